"""The bench: what it refuses to time, and its arithmetic."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from bench_helpers import canned_profile, on_a_gpu, statuses

from jax_fused_adamw.bench import (
    _check,
    _clip_rows,
    _experiment,
    _measure,
    _protocol,
    _rows,
)
from jax_fused_adamw.bench.__main__ import main
from jax_fused_adamw.bench._experiment import ROWS
from jax_fused_adamw.bench._problem import Numbers, Problem
from jax_fused_adamw.bench._results import Spread

pytestmark = pytest.mark.usefixtures("small_copies")


# --- Correctness before speed ---------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, where",
    [
        ("LEARNING_RATE", 1.01e-3, "params"),
        ("B1", 0.909, "mu"),
        ("B2", 0.99, "nu"),
        ("WEIGHT_DECAY", 0.0, "params"),
        ("EPS", 1e-2, "params"),
        ("START_COUNT", 3, "params"),
    ],
)
def test_wrong_step_shows_its_difference_and_no_speed(
    run_bench, capsys, monkeypatch, name, value, where
):
    monkeypatch.setattr(_rows, name, value)
    status, results = run_bench("--rows", "step", "optax.adamw")
    assert status == 1
    assert set(statuses(results).values()) == {"wrong"}
    for _, row in results.rows():
        assert f"{where} of leaf 0" in row.reason
        assert "differ from the reference by up to" in row.reason
        assert row.wall_ms is row.percent_of_limit is row.compile_s is None
    printed = capsys.readouterr().out
    assert printed.count("WRONG") == 4
    assert "step wrong: " in printed and "elements differ" in printed


@pytest.mark.parametrize(
    "row",
    [
        "step+clip",
        "optax.adamw+clip",
        pytest.param("torch-fused+clip", marks=pytest.mark.platform("cpu")),
    ],
)
def test_wrong_norm_is_found(capsys, monkeypatch, row):
    if row.startswith("torch"):
        pytest.importorskip("torch")
    run = ["--elements", "20000", "--iterations", "2", "--samples", "1"]
    assert main([*run, "--rows", row]) == 0
    monkeypatch.setattr(_clip_rows, "MAX_GRAD_NORM", 0.505)
    assert main([*run, "--rows", row]) == 1
    assert f"{row} wrong: mu of leaf 0" in capsys.readouterr().out


def test_rows_take_turns_from_one_start_in_alternating_order(run_bench, monkeypatch):
    batches = []
    run_batch = _protocol._run_batch

    def recorded(entry, expected, **options):
        if not options.get("profiled"):  # a GPU has one more after each timed batch
            batches.append(entry.row.name)
        return run_batch(entry, expected, **options)

    monkeypatch.setattr(_protocol, "_run_batch", recorded)
    _, results = run_bench("--rows", "step", "staged", "--samples", "3")
    warm_up, forth, back = ["step", "staged"], ["step", "staged"], ["staged", "step"]
    assert batches == 2 * [*warm_up, *forth, *back, *forth]


def test_row_that_goes_wrong_later_loses_its_times(run_bench, monkeypatch):
    class Fickle(_rows.JaxStepper):
        batches = 0

        def run(self, steps):
            self.batches += 1
            super().run(steps + (self.batches == 3))

    monkeypatch.setattr(_rows, "JaxStepper", Fickle)
    status, results = run_bench("--rows", "step")
    assert status == 1
    assert set(statuses(results).values()) == {"wrong"}


def test_wrong_pass_of_the_staged_step_is_found(run_bench, monkeypatch):
    write = _rows._write_parameter
    monkeypatch.setattr(_rows, "_write_parameter", lambda p, u: write(p, 1.01 * u))
    assert run_bench("--rows", "staged", "step")[0] == 1


def test_skipped_step_must_change_no_bit(run_bench, monkeypatch):
    monkeypatch.setitem(
        _experiment.ROWS, "step", dataclasses.replace(ROWS["step"], skips=True)
    )
    status, results = run_bench("--rows", "step", "skipped", "skipped+clip")
    assert status == 1
    assert statuses(results)["tiny", "step"] == "wrong"
    assert statuses(results)["tiny", "skipped"] == "measured"
    assert statuses(results)["tiny", "skipped+clip"] == "measured"


def test_only_the_last_gradient_of_a_skipped_step_is_nan(run_bench, monkeypatch):
    start = _clip_rows.NanStepper.start
    flags = []

    def recorded(self):
        start(self)
        flags.append([np.isnan(np.asarray(grad)).ravel() for grad in self._grads])

    monkeypatch.setattr(_clip_rows.NanStepper, "start", recorded)
    assert run_bench("--rows", "skipped+clip")[0] == 0
    assert [int(leaf.sum()) for leaf in flags[0]] == [0, 0, 1]
    # Without the NaN the step is taken, and the check sees it.
    monkeypatch.setattr(_clip_rows.NanStepper, "start", _rows.JaxStepper.start)
    assert run_bench("--rows", "skipped+clip")[0] == 1


def test_amsgrad_rules_are_told_apart(run_bench, monkeypatch):
    row = dataclasses.replace(ROWS["step"], optax_amsgrad=True)
    monkeypatch.setitem(_experiment.ROWS, "step", row)
    assert run_bench("--rows", "step")[0] == 0
    assert run_bench("--rows", "step", "--amsgrad")[0] == 1


def test_nan_is_a_difference():
    start = Problem([(3,)], "float32", False).start()
    broken = start._replace(nu=[start.nu[0].at[1].set(jnp.nan)])
    found = _check.difference(broken, start, _check.tolerances(5))
    assert found.startswith("nu of leaf 0 (3,): 1 of 3 elements differ")
    assert _check.difference(start, broken, _check.tolerances(5)) is not None
    assert _check.difference(start, start, _check.EXACT) is None


def test_reference_is_the_definition_in_float64():
    problem = Problem([(50,)], "float32", False)
    p, m, v = (np.asarray(x[0], np.float64) for x in problem.start()[:3])
    g = np.asarray(problem.grads[0], np.float64)
    for t in (3, 4, 5):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
        p = p - 1e-3 * (m_hat / (np.sqrt(v_hat) + 1e-8) + 0.01 * p)
    expected = Numbers([p], [m], [v], [])
    got = _check.reference(problem, 3, optax_amsgrad=False)
    for name, (absolute, relative) in _check.tolerances(3).items():
        for a, b in zip(getattr(got, name), getattr(expected, name), strict=True):
            np.testing.assert_allclose(a, b, atol=absolute, rtol=relative)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_clips_by_the_norm_in_float64(dtype):
    problem = Problem([(300, 70), (5,), ()], dtype, False)
    exact = [np.asarray(grad, np.float64) for grad in problem.grads]
    norm = np.sqrt(sum((grad**2).sum() for grad in exact))
    assert _check.global_norm(problem.grads) == pytest.approx(norm, rel=1e-7)
    got = _check.reference(problem, 1, optax_amsgrad=False, norm=norm)
    for mu, before, grad in zip(got.mu, problem.start().mu, exact, strict=True):
        expected = 0.9 * np.asarray(before, np.float64) + 0.1 * grad * 0.5 / norm
        np.testing.assert_allclose(mu, expected, atol=1e-8, rtol=0)


def test_allowed_error_of_a_norm_is_that_of_the_clipped_gradients():
    plain, short, long = (_check.tolerances(5, norm, 1e-3) for norm in (0, 0.5, 50))
    assert _check.tolerances(5, 50.0) == _check.tolerances(5)
    assert plain == short
    unclipped = _check.tolerances(5)["mu"][0]
    assert short["mu"][0] - unclipped == pytest.approx(1e-5 * (1 - 0.9**5))
    assert long["mu"][0] - unclipped == pytest.approx(1e-7 * (1 - 0.9**5))


def test_start_is_the_same_each_time_and_tells_buffers_apart():
    problem = Problem([(40, 5), (40, 5)], "bfloat16", True)
    first, second = problem.start(), problem.start()
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert problem.grads[0].dtype == "bfloat16"
    leaves = [np.asarray(leaf) for part in first for leaf in part]
    assert len({leaf.tobytes() for leaf in leaves}) == len(leaves) == 8
    assert (leaves[4] > 0).all() and abs(np.mean(leaves[0])) < 0.02
    above = np.mean(np.asarray(first.nu_max[0]) > np.asarray(first.nu[0]))
    assert 0.3 < above < 0.7


# --- Arithmetic -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, dtype, amsgrad, num_bytes",
    [
        ("step", "float32", False, 28),
        ("step", "float32", True, 36),
        ("step", "bfloat16", False, 26),
        ("in_place", "float16", True, 34),
        ("alias=False", "float32", False, 28),
        ("update", "float32", False, 40),
        ("update", "bfloat16", True, 46),
        ("skipped", "float32", False, 0),
        ("optax.adamw", "float32", False, 28),
        ("step+clip", "float32", False, 32),
        ("step+clip", "bfloat16", True, 36),
        ("skipped+clip", "float32", True, 4),
        ("skipped+clip", "bfloat16", False, 2),
        ("optax.adamw+clip", "float32", False, 32),
        ("optax.adamw+clip+if_finite", "float32", True, 40),
        ("torch-fused+clip", "float32", False, 32),
        ("staged", "float32", False, 48),
        ("staged", "float32", True, 60),
        ("staged", "bfloat16", False, 44),
        ("torch-fused", "float32", False, 28),
    ],
)
def test_bytes_are_counted(name, dtype, amsgrad, num_bytes):
    assert ROWS[name].num_bytes(Problem([(2,)], dtype, amsgrad)) == num_bytes


def test_percent_of_limit():
    limit = _measure.Limit(gb_per_s=100.0, method="")
    # 28 MB take 280 us at 100 GB/s.
    assert _measure.percent_of_limit(28_000_000, 560e-6, limit) == pytest.approx(50)


def test_device_time_is_the_sum_of_the_streams_events():
    lines = {
        "Stream #13(Compute)": [1000.0, 2000.0, 3000.0],
        "Stream #14(MemcpyD2D)": [500.0],
        "XLA Modules": [100_000.0],
        "Steps": [100_000.0, 100_000.0],
    }
    time = _measure.read_device_time(canned_profile(lines), steps=2)
    assert time == _measure.DeviceTime(us=3.25, launches=2)


def test_profile_with_lost_events_is_refused():
    lines = {"Stream #13(Compute)": [1000.0] * 5}
    for profile in (
        canned_profile(lines),
        canned_profile({}),
        canned_profile({"Steps": [1.0] * 2}),
        canned_profile({"Stream #1": [1.0] * 2}, plane="/device:GPU:1"),
    ):
        with pytest.raises(_measure.LostEvents, match="events in 2 steps"):
            _measure.read_device_time(profile, steps=2)


def test_device_time_decides_where_there_is_a_profiler(run_bench, monkeypatch):
    on_a_gpu(monkeypatch, lambda steps: 3 * steps)
    _, results = run_bench("--rows", "step")
    row = results.models[1].rows[0]
    assert row.device_us == Spread(6.0, 6.0, 6.0) and row.launches == 3
    limit = results.limit["gb_per_s"]
    assert row.percent_of_limit == pytest.approx(100 * 64 * 28 / 6e-6 / limit / 1e9)


def test_wall_time_never_stands_in_for_the_device_s(run_bench, monkeypatch):
    on_a_gpu(monkeypatch, lambda steps: 3 * steps - 1)
    _, results = run_bench("--rows", "step")
    row = results.models[0].rows[0]
    assert row.status == "measured" and row.wall_ms is not None
    assert row.device_us is row.launches is row.percent_of_limit is None
    assert row.reason == "the profiler saw 5 events in 2 steps"


def test_cpu_limit_is_the_faster_copy():
    limit = _measure.measure_limit("cpu")
    assert limit.gb_per_s > 0
    assert "XLA" in limit.method or "threads" in limit.method
