"""The ladder: what each rung is on this machine, and that a wrong one shows no time."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same_bits

from jax_fused_adamw.bench import (
    _ladder,
    _measure,
    _protocol,
    _results,
    _shapes,
)
from jax_fused_adamw.bench.__main__ import main
from jax_fused_adamw.bench._problem import Blocked, Problem

TINY = {"tiny": [(33, 7), (5,), (513,)], "one": [(64,)]}
NAMES = [
    "cpu loop",
    "staged",
    "naive",
    "16-byte vectors",
    "packed",
    "packed bfloat16",
    "optax.adamw",
]
CUDA_RUNGS = {"naive", "16-byte vectors"}
ROWS = {row.name: row for row in _ladder.LADDER_ROWS}


@pytest.fixture
def run_ladder(tmp_path, monkeypatch):
    """Runs the command on the tiny shapes: its exit status and its results."""
    monkeypatch.setattr(_measure, "_CPU_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(_ladder, "ladder_models", lambda: TINY)

    def run(*options):
        out = tmp_path / "results.json"
        quick = ["--iterations", "2", "--samples", "2"]
        status = main(["--ladder", "--json", str(out), *quick, *options])
        return status, _results.read(out)

    return run


def test_the_rungs_in_order_and_their_bytes():
    problem = Problem([(2,)], "float32", False)
    rows = _ladder.LADDER_ROWS
    assert [row.name for row in rows] == NAMES
    num_bytes = [row.num_bytes(row.variant(problem)) for row in rows]
    assert num_bytes == [28, 48, 28, 28, 28, 26, 28]
    assert {row.name for row in rows if row.ours} == {"packed", "packed bfloat16"}
    sizes = {
        name: (len(leaves), _shapes.num_parameters(leaves))
        for name, leaves in _ladder.ladder_models().items()
    }
    assert list(sizes.values()) == [(1, 65_536), (1, 1_048_576), (148, 124_439_808)]


@pytest.mark.platform("cpu")
def test_every_rung_is_measured_or_blocked(run_ladder, tmp_path, capsys):
    plot = tmp_path / "ladder.png"
    status, results = run_ladder("--plot", str(plot))
    assert status == 0
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [model.name for model in results.models] == list(TINY)
    for model in results.models:
        assert [row.name for row in model.rows] == NAMES
        for row in model.rows:
            if row.name in CUDA_RUNGS:
                assert (row.status, row.reason) == ("blocked", "needs a CUDA device")
                assert row.wall_ms is None
            else:
                assert row.status == "measured", row
                assert row.wall_ms.min > 0 and row.percent_of_limit > 0
    assert results.models[0].rows[5].num_bytes == 26
    printed = capsys.readouterr().out
    assert "naive blocked: needs a CUDA device" in printed
    files = [str(tmp_path / "results.json")] * 2
    assert main(["--compare", *files]) == 0
    assert "tiny cpu loop" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, value, where", [("B1", 0.909, "mu"), ("WEIGHT_DECAY", 0.0, "params")]
)
def test_wrong_rung_shows_its_difference_and_no_time(
    run_ladder, monkeypatch, capsys, name, value, where
):
    monkeypatch.setattr(_ladder, name, value)
    status, results = run_ladder()
    assert status == 1
    wrong = {"cpu loop"} | (CUDA_RUNGS if jax.default_backend() == "gpu" else set())
    for _, row in results.rows():
        assert (row.status == "wrong") == (row.name in wrong), row
        if row.name in wrong:
            assert f"{where} of leaf 0" in row.reason
            assert row.wall_ms is row.percent_of_limit is row.compile_s is None
    assert "cpu loop wrong: " in capsys.readouterr().out


def test_bfloat16_rung_is_held_to_gradients_of_its_own(run_ladder, monkeypatch):
    of_float32 = dataclasses.replace(
        ROWS["packed bfloat16"], build=ROWS["packed"].build
    )
    monkeypatch.setattr(_ladder, "LADDER_ROWS", [ROWS["packed"], of_float32])
    _, results = run_ladder()
    for model in results.models:
        assert [row.status for row in model.rows] == ["measured", "wrong"]


def bits_after(row, steps=3):
    """Parameters and moments, and the count, after a few steps of the row."""
    problem = Problem(TINY["tiny"], "float32", False)
    stepper = row.build(problem)
    stepper.start()
    stepper.run(steps)
    return jax.device_get((stepper.numbers(), stepper._state.count))


# On a GPU the two start from numbers that different XLA backends have made.
@pytest.mark.platform("cpu")
def test_plain_loop_gives_the_bits_of_the_packed_kernel():
    loop = bits_after(ROWS["cpu loop"])
    assert loop[1] == 5
    assert_same_bits(loop, bits_after(ROWS["packed"]))


@pytest.mark.platform("gpu")
@pytest.mark.parametrize("name", sorted(CUDA_RUNGS))
def test_cuda_rungs_give_the_bits_of_the_packed_kernel(name):
    assert_same_bits(bits_after(ROWS[name]), bits_after(ROWS["packed"]))


@pytest.mark.platform("gpu")
def test_cuda_rungs_launch_a_kernel_a_leaf_and_one_that_counts(run_ladder):
    status, results = run_ladder()
    assert status == 0
    for model in results.models:
        rows = {row.name: row for row in model.rows}
        assert {row.status for row in model.rows} == {"measured"}
        for name in CUDA_RUNGS:
            assert rows[name].launches == len(TINY[model.name]) + 1
        assert rows["packed"].launches < rows["naive"].launches
        loop = rows["cpu loop"]
        assert loop.device_us is loop.reason is None and loop.percent_of_limit > 0


def test_host_rung_is_timed_by_the_clock_where_there_is_a_profiler(
    run_ladder, monkeypatch
):
    def profile_device(run, steps, num_devices):
        run()
        return _measure.DeviceTime(us=1.0, launches=1)

    monkeypatch.setattr(_protocol, "has_profiler", lambda: True)
    monkeypatch.setattr(_protocol, "profile_device", profile_device)
    _, results = run_ladder()
    rows = {row.name: row for row in results.models[0].rows}
    assert rows["packed"].device_us.median == 1.0
    assert rows["cpu loop"].device_us is None
    assert rows["cpu loop"].percent_of_limit > 0


def test_host_rung_without_a_cpu_backend_is_blocked(monkeypatch):
    def devices(platform=None):
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(Blocked, match="leave cpu in JAX_PLATFORMS"):
        ROWS["cpu loop"].build(Problem([(3,)], "float32", False))


def test_native_code_refuses_what_it_has_no_code_for():
    step = _ladder._native_step(_ladder._register("cpu"), rung=0)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        params = [jnp.ones(3)]
        state = _ladder._make_state().init(params)
        grads = [jnp.ones(3, jnp.bfloat16)]
        jitted = jax.jit(step, donate_argnums=(0, 1))
        with pytest.raises(jax.errors.JaxRuntimeError, match="the ladder takes"):
            jax.block_until_ready(jitted(params, state, grads))


@pytest.mark.parametrize(
    "argv",
    [
        ["--rows", "step"],
        ["--dtype", "bfloat16"],
        ["--amsgrad"],
        ["--shape", "mlp"],
        ["--shapes", "file.json"],
        ["--module", "a:b"],
        ["--elements", "5"],
    ],
    ids=lambda argv: argv[0],
)
def test_options_that_the_ladder_decides_are_refused(capsys, argv):
    assert main(["--ladder", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "--ladder has rows, sizes and gradients of its own" in captured.err
    assert f"leave out {argv[0]}" in captured.err


def test_nothing_of_the_ladder_is_registered_by_the_import():
    code = (
        "import sys, jax, jax_fused_adamw\n"
        "from jax_fused_adamw import _cpu\n"
        "assert 'jax_fused_adamw_ladder' not in _cpu.registrations()\n"
        "assert set(_cpu.ladder_registrations()) == {'jax_fused_adamw_ladder'}\n"
        "assert 'jax_fused_adamw.bench._ladder' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
