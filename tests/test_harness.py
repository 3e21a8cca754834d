"""Builds and runs the C++ harness: alignment, canaries, threads, instruction sets."""

import pathlib
import shutil
import subprocess
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROGRAMS = ("update_test", "stats_test", "noise_test", "float64_test")


def build_and_run(folder: pathlib.Path, *sanitizers: str) -> None:
    """Configures, builds and runs cc/tests; each of its programs must succeed."""
    # The test extra's own: what stands on the PATH may be too old.
    cmake = shutil.which("cmake", path=sysconfig.get_path("scripts"))
    if cmake is None:
        pytest.skip("cmake is not installed; it comes with the test extra")
    flags = ""
    if sanitizers:
        flags = f"-fsanitize={','.join(sanitizers)} -fno-sanitize-recover=all -g"
    configure = [
        cmake,
        "-S",
        str(ROOT),
        "-B",
        str(folder),
        "-DJAX_FUSED_ADAMW_TESTS=ON",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CXX_FLAGS={flags}",
    ]
    run(configure)
    run([cmake, "--build", str(folder), "--parallel", "2"])
    for program in PROGRAMS:
        output = run([str(folder / program)])
        assert "instruction set: portable" in output and "\n0 failures" in output


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_b49_any_alignment_same_bits_no_overrun(tmp_path):
    build_and_run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sanitizers", [("address", "undefined"), ("thread",)], ids="+".join
)
def test_harness_under_sanitizers(tmp_path, sanitizers):
    build_and_run(tmp_path, *sanitizers)
