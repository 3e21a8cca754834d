"""The built package: stable ABI, contents, and a wheel that needs no compiler."""

import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
STABLE_ABI = sys.version_info >= (3, 12)


def test_modules_use_the_stable_abi():
    """A CMake without SABIModule drops it in silence and still tags the wheel abi3."""
    for name in ("_cpu", "_cuda"):
        spec = importlib.util.find_spec(f"jax_fused_adamw.{name}")
        if name == "_cuda" and not sys.platform.startswith("linux"):
            continue
        assert spec.origin.endswith(".abi3.so") == STABLE_ABI, spec.origin


def test_versions_agree():
    import jax_fused_adamw as jfa

    assert importlib.metadata.version("jax_fused_adamw") == jfa.__version__


def test_type_checkers_may_read_the_package():
    import jax_fused_adamw as jfa

    assert pathlib.Path(jfa.__file__).with_name("py.typed").exists()


STEP = """
import shutil
assert shutil.which("cc") is None and shutil.which("g++") is None
import jax, jax.numpy as jnp, jax_fused_adamw as jfa
print(jax.__version__, jfa.kernel_info())
assert jfa.kernel_info().cpu.loaded
params = {"w": jnp.ones(3)}
tx = jfa.fused_adamw(0.1)
assert float(tx.step(params, tx.init(params), params)[0]["w"][0]) < 1.0
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=900)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert all(n.startswith(("jax_fused_adamw/", "jax_fused_adamw-")) for n in names)
    assert not [n for n in names if n.endswith((".cc", ".h", ".cu", ".cuh", ".inl"))]
    assert any(n.endswith(".abi3.so") for n in names) == STABLE_ABI
    assert "jax_fused_adamw/py.typed" in names


@pytest.mark.slow
@pytest.mark.parametrize("jax_version", ["jax==0.10.0", "jax==0.10.2", "jax"])
def test_wheel_runs_without_a_compiler(wheel, jax_version, tmp_path):
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    empty = tmp_path / "empty"
    empty.mkdir()
    no_compiler = {**os.environ, "PATH": str(empty)}
    for arguments in (["-m", "pip", "install", jax_version, wheel], ["-c", STEP]):
        done = subprocess.run(
            [python, *arguments],
            env=no_compiler,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
