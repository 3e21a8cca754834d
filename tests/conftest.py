"""Settings for the whole suite: they must stand before JAX starts its backend."""

import json
import os

# Sharding and placement tests need several devices; the others use the first one.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8"
    os.environ["XLA_FLAGS"] = flags.strip()

import jax  # noqa: E402
import pytest  # noqa: E402
from meshes import KINDS, make_mesh  # noqa: E402


def pytest_runtest_setup(item):
    for marker in item.iter_markers("devices"):
        (needed,) = marker.args
        if jax.device_count() < needed:
            pytest.skip(f"needs {needed} devices, here are {jax.device_count()}")
    for marker in item.iter_markers("platform"):
        (needed,) = marker.args
        if jax.default_backend() != needed:
            pytest.skip(f"is about {needed}, the default is {jax.default_backend()}")


def refuse_addresses(names):
    """A test's name must be the same in every worker process, or none can run it."""
    moving = [name for name in names if "at 0x" in name]
    if moving:
        raise pytest.UsageError(
            f"names of tests ({len(moving)}, such as {moving[0]}) hold an address in "
            "memory, which differs from process to process: give the parameters ids"
        )


def pytest_collection_modifyitems(config, items):
    refuse_addresses(item.nodeid for item in items)
    if config.getoption("-m"):
        return
    skip = pytest.mark.skip(reason="slow; run with -m slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def strict_promotion():
    """Our own code never relies on implicit dtype or rank promotion."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(params=KINDS)
def mesh(request):
    """Of axes x and y, in use."""
    mesh = make_mesh("x", "y", kind=request.param)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def small_copies(monkeypatch):
    """The bench measures the limit in no time."""
    from jax_fused_adamw.bench import _measure

    monkeypatch.setattr(_measure, "_CPU_COPY_BYTES", 1 << 20)


@pytest.fixture
def run_bench(tmp_path, small_copies):
    """Runs the bench on tiny shapes: its exit status and its results."""
    from jax_fused_adamw.bench import _results
    from jax_fused_adamw.bench.__main__ import main

    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"tiny": [[5, 3], [7], []], "one": [[64]]}))
    out = tmp_path / "results.json"

    def run(*options):
        quick = ["--iterations", "2", "--samples", "2"]
        argv = ["--shapes", str(shapes), "--json", str(out), *quick, *options]
        status = main(argv)
        return status, _results.read(out)

    return run
