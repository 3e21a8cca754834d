"""The bench's rows with another state: measured, held to their bounds, refused."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from bench_helpers import reasons, statuses

import jax_fused_adamw as jfa
from jax_fused_adamw.bench import _check, _experiment, _precision_rows, _rows
from jax_fused_adamw.bench.__main__ import main
from jax_fused_adamw.bench._experiment import DEFAULT_ROWS, ROWS
from jax_fused_adamw.bench._precision_rows import PRECISION_ROWS
from jax_fused_adamw.bench._problem import Blocked, Kept, Problem
from jax_fused_adamw.bench._rounding import rounding_bounds

NAMES = [row.name for row in PRECISION_ROWS]
OURS = [row.name for row in PRECISION_ROWS if row.ours]
BF16_MOMENTS, BF16_MU = "step, bf16 moments", "optax.adamw, bf16 mu"
# Enough elements to hold one whose bound is narrow.
MANY = ["--elements", "20000", "--iterations", "2", "--samples", "1"]
pytestmark = pytest.mark.usefixtures("small_copies")


# --- Every row, through the command ---------------------------------------------------


@pytest.mark.parametrize(
    "options", [[], ["--amsgrad"], ["--dtype", "bfloat16"]], ids=" ".join
)
def test_every_row_is_measured(run_bench, options):
    status, results = run_bench("--rows", *NAMES, *options)
    assert status == 0 and not set(NAMES) & set(DEFAULT_ROWS)
    assert results.setting["ema_decay"] == 0.999
    for model in results.models:
        assert [row.name for row in model.rows] == NAMES
        for row in model.rows:
            assert row.status == "measured", row
            assert row.wall_ms.median > 0 and row.percent_of_limit > 0
            assert not ROWS[row.peer].ours


def test_missing_kernel_blocks_ours(run_bench, monkeypatch):
    def require_kernel():
        raise Blocked("no kernel: it was not built")

    for module in (_rows, _precision_rows):
        monkeypatch.setattr(module, "require_kernel", require_kernel)
    _, results = run_bench("--rows", *NAMES)
    for name in NAMES:
        expected = "blocked" if name in OURS else "measured"
        assert statuses(results)["tiny", name] == expected


@pytest.mark.parametrize(
    "name, dtype, amsgrad, num_bytes",
    [
        (BF16_MOMENTS, "float32", False, 20),
        (BF16_MOMENTS, "bfloat16", False, 18),
        (BF16_MOMENTS, "float32", True, 24),
        (BF16_MU, "float32", False, 24),
        (BF16_MU, "bfloat16", True, 30),
        ("step, bf16 copy", "float32", False, 30),
        ("step, bf16 copy", "bfloat16", False, 28),
        ("optax.adamw, bf16 copy", "float32", False, 30),
        ("step, master", "bfloat16", False, 28),
        ("step+ema", "float32", False, 36),
        ("optax.adamw+ema", "bfloat16", True, 42),
    ],
)
def test_bytes_are_counted(name, dtype, amsgrad, num_bytes):
    assert ROWS[name].num_bytes(Problem([(2,)], dtype, amsgrad)) == num_bytes


# --- Bounds of rounded moments --------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
def test_bounds_hold_whatever_the_rounding(sign, amsgrad):
    """Every moment is stored as wrongly as it may be, always in one direction."""
    kept = Kept(mu_error=2.0**-7, nu_error=2.0**-7)
    problem, steps = Problem([(500,)], "float32", amsgrad), 20
    exact = _check.reference(problem, steps, optax_amsgrad=False, kept=kept)
    bounds = rounding_bounds(problem, steps, optax_amsgrad=False, kept=kept)
    start = kept.rounded(problem.start())
    p, m, v = (np.asarray(x[0], np.float64) for x in start[:3])
    v_max = np.asarray(start.nu_max[0], np.float64) if amsgrad else 0.0
    g = np.asarray(problem.grads[0], np.float64)
    for t in range(3, 3 + steps):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        v_max = np.maximum(v_max, v) if amsgrad else v
        m_hat, v_hat = m / (1 - 0.9**t), v_max / (1 - 0.999**t)
        p = p - 1e-3 * (m_hat / (np.sqrt(v_hat) + 1e-8) + 0.01 * p)
        m = m * (1 + sign * 2.0**-7)
        v, v_max = v * (1 - sign * 2.0**-7), v_max * (1 - sign * 2.0**-7)
    allowed = _check.tolerances(steps)
    for name, got in {"params": p, "mu": m, "nu": v}.items():
        (reference,), (bound,) = getattr(exact, name), getattr(bounds, name)
        distance = np.abs(got - np.asarray(reference, np.float64))
        absolute, relative = allowed[name]
        assert (distance <= absolute + relative * np.abs(reference) + bound).all()
        # Where every error has one sign, not much is left of the bound.
        assert (distance / bound).max() > 0.5


def test_bound_is_narrow_where_the_first_moment_is_small():
    kept = Kept(mu_error=2.0**-7, nu_error=2.0**-7)
    problem = Problem([(20_000,)], "float32", False)
    (bound,) = rounding_bounds(problem, 10, optax_amsgrad=False, kept=kept).params
    # Ten steps without a decay are 1e-5 * |p| off for parameters of up to 0.1.
    assert bound.min() < 5e-6 and bound.max() > 1e-4


def test_float32_moments_have_no_bounds_and_some_batches_are_too_long(run_bench):
    problem = Problem([(3,)], "float32", False)
    assert rounding_bounds(problem, 10_000, False, Kept(ema=True)) is None
    _, results = run_bench("--rows", *NAMES, "--iterations", "64")
    assert reasons(results)[BF16_MOMENTS].startswith(
        "it can be checked for less than 64"
    )
    assert list(statuses(results).values()).count("blocked") == 2  # of two models
    assert statuses(results)["tiny", BF16_MU] == "measured"


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
def test_wrong_step_with_bf16_moments_is_found(capsys, monkeypatch, name, value, where):
    monkeypatch.setattr(_rows, name, value)
    assert main([*MANY, "--rows", BF16_MOMENTS, BF16_MU]) == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG") == 2
    for row in (BF16_MOMENTS, BF16_MU):
        assert f"{row} wrong: {where} of leaf 0" in printed
    assert "on top of its bfloat16 moments' rounding" in printed


def test_moments_rounded_twice_as_coarsely_are_found(run_bench, monkeypatch):
    def with_error(error):
        row = ROWS[BF16_MOMENTS]
        kept = dataclasses.replace(row.kept, mu_error=error, nu_error=error)
        row = dataclasses.replace(row, kept=kept)
        monkeypatch.setitem(_experiment.ROWS, BF16_MOMENTS, row)
        return main([*MANY, "--rows", BF16_MOMENTS])

    assert with_error(2.0**-7) == 0
    assert with_error(2.0**-8) == 1


@pytest.mark.parametrize("decay", [0.99, 0.9991, 0.0])
def test_wrong_average_is_found(run_bench, monkeypatch, decay):
    row = dataclasses.replace(
        ROWS["step+ema"], build=functools.partial(_rows.build_step, ema_decay=decay)
    )
    monkeypatch.setitem(_experiment.ROWS, "step+ema", row)
    monkeypatch.setattr(_precision_rows, "EMA_DECAY", decay)
    status, results = run_bench("--rows", "step+ema", "optax.adamw+ema")
    assert status == 1 and set(statuses(results).values()) == {"wrong"}
    assert reasons(results)["step+ema"].startswith("ema of leaf 0")


def test_average_of_the_old_parameters_is_found(run_bench, monkeypatch):
    apply = _precision_rows.optax.apply_updates
    late = lambda params, updates: params  # noqa: E731
    tx = _precision_rows.keep

    def keep(*arguments, **options):
        inner = tx(*arguments, **options)

        def update(grads, state, params):
            monkeypatch.setattr(_precision_rows.optax, "apply_updates", late)
            result = inner.update(grads, state, params)
            monkeypatch.setattr(_precision_rows.optax, "apply_updates", apply)
            return result

        return _precision_rows.optax.GradientTransformation(inner.init, update)

    row = dataclasses.replace(
        ROWS["optax.adamw+ema"],
        build=functools.partial(
            _rows.build_optax, wrap=functools.partial(keep, ema=True)
        ),
    )
    monkeypatch.setitem(_experiment.ROWS, "optax.adamw+ema", row)
    _, results = run_bench("--rows", "optax.adamw+ema")
    assert reasons(results)["optax.adamw+ema"].startswith("ema of leaf 0")


@pytest.mark.parametrize("row", [row for row in NAMES if ROWS[row].kept.copies])
def test_copies_that_are_not_of_the_new_parameters_are_found(
    run_bench, monkeypatch, row
):
    build = ROWS[row].build

    class Stale:
        """Shows the copies that it had before the batch."""

        def __init__(self, problem):
            self._stepper = build(problem)

        def __getattr__(self, name):
            return getattr(self._stepper, name)

        def start(self):
            self._stepper.start()
            copies = self._stepper.numbers().compute
            self._copies = [jnp.array(x, copy=True) for x in copies]

        def numbers(self):
            return self._stepper.numbers()._replace(compute=self._copies)

    stale = dataclasses.replace(ROWS[row], build=Stale)
    monkeypatch.setitem(_experiment.ROWS, row, stale)
    _, results = run_bench("--rows", row)
    assert reasons(results)[row].startswith("compute of leaf 0")


def test_start_of_a_master_is_the_problem_s():
    stepper = ROWS["step, master"].build(Problem([(5,)], "bfloat16", False))
    stepper.start()
    numbers = stepper.numbers()
    assert numbers.params[0].dtype == "float32"
    assert numbers.compute[0].dtype == "bfloat16"
    expected = Problem([(5,)], "bfloat16", False).start()
    np.testing.assert_array_equal(numbers.params[0], expected.params[0])
    np.testing.assert_array_equal(numbers.mu[0], expected.mu[0])
    assert isinstance(stepper._state, jfa.FusedAdamWState)
