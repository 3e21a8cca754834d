"""The isolated optimizer step: every row on every model, against the copy."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fused_adamw.bench import _check, _problem, _protocol
from jax_fused_adamw.bench._clip_rows import CLIP_ROWS
from jax_fused_adamw.bench._machine import describe_load, describe_machine
from jax_fused_adamw.bench._measure import (
    Limit,
    measure_limit,
    percent_of_limit,
)
from jax_fused_adamw.bench._precision_rows import PRECISION_ROWS
from jax_fused_adamw.bench._problem import Kept, Numbers, Problem, Row
from jax_fused_adamw.bench._protocol import Entry
from jax_fused_adamw.bench._results import (
    MEASURED,
    ModelResult,
    Results,
    RowResult,
    Spread,
    comparable_us,
)
from jax_fused_adamw.bench._rounding import rounding_bounds
from jax_fused_adamw.bench._rows import JAX_ROWS
from jax_fused_adamw.bench._shapes import Leaves, num_parameters
from jax_fused_adamw.bench._torch import TORCH_ROWS

_FLOAT32_ROWS = (*JAX_ROWS, *TORCH_ROWS, *CLIP_ROWS)
# Those that are measured where none is named, and all that may be named.
DEFAULT_ROWS = tuple(row.name for row in _FLOAT32_ROWS)
ROWS = {row.name: row for row in (*_FLOAT32_ROWS, *PRECISION_ROWS)}


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
      dtype: of the gradients.
      amsgrad: whether the maximum of the second moment is kept.
      iterations: steps of a batch.
      samples: timed batches of a row.
    """

    dtype: str
    amsgrad: bool
    iterations: int
    samples: int


def run_bench(
    models: dict[str, Leaves],
    rows: Sequence[Row],
    options: Options,
    save: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Measures the rows on every model.

    Args:
      models: leaf shapes by name.
      rows: values of ``ROWS``.
      options: how.
      save: called with what there is after each model: a run may be killed.

    Raises:
      BenchError: a model that does not fit into memory even once.
    """
    machine, before = describe_machine(), describe_load()
    limit = measure_limit(machine["platform"])
    measured: list[ModelResult] = []

    def results() -> Results:
        return Results(
            machine=machine,
            load={"before": before, "after": describe_load()},
            setting=describe_setting(options),
            limit=dataclasses.asdict(limit),
            models=measured,
        )

    for name, leaves in models.items():
        measured.append(_measure_model(name, leaves, rows, options, limit))
        save(results())
    return results()


def describe_setting(options: Options) -> dict[str, Any]:
    names = ["LEARNING_RATE", "B1", "B2", "EPS", "WEIGHT_DECAY", "START_COUNT"]
    names += ["MAX_GRAD_NORM", "EMA_DECAY"]
    hyperparameters = {name.lower(): getattr(_problem, name) for name in names}
    return {**dataclasses.asdict(options), **hyperparameters}


def row_result(entry: Entry, problem: Problem, limit: Limit) -> RowResult:
    row = entry.row
    if entry.status != MEASURED:
        return RowResult(row.name, row.ours, entry.status, entry.reason, peer=row.peer)
    device = entry.device
    result = RowResult(
        name=row.name,
        ours=row.ours,
        status=MEASURED,
        reason=entry.reason,
        num_bytes=row.num_bytes(problem),
        wall_ms=Spread.of(entry.wall_ms),
        device_us=Spread.of([d.us for d in device]) if device else None,
        launches=max((d.launches for d in device), default=None),
        compile_s=entry.stepper.compile_s,
        peak_bytes=entry.stepper.peak_bytes,
        peer=row.peer,
    )
    percent = None
    # Where the device's time was lost, the host's does not stand in for it.
    if result.num_bytes and (device or not _protocol.is_profiled(row)):
        num_bytes = result.num_bytes * num_parameters(problem.leaves)
        (step_us,) = comparable_us([result])
        percent = percent_of_limit(num_bytes, step_us / 1e6, limit)
    return dataclasses.replace(result, percent_of_limit=percent)


def _measure_model(
    name: str, leaves: Leaves, rows: Sequence[Row], options: Options, limit: Limit
) -> ModelResult:
    problem = Problem(leaves, options.dtype, options.amsgrad)
    expected = _Expected(problem, options.iterations)
    with _protocol.fitting(name, "choose a smaller model with --shape"):
        jax.block_until_ready(problem.grads)
        entries = _protocol.run_rows(name, problem, rows, expected, options.samples)
    results = [row_result(entry, problem, limit) for entry in entries]
    return ModelResult(name, len(leaves), num_parameters(leaves), results)


class _Rule(NamedTuple):
    """Rows of which this is the same end with the same numbers."""

    dtype: str  # of the gradients
    optax_amsgrad: bool
    norm: float
    kept: Kept


class _Expected:
    """What a batch must end with, computed when it is first asked for."""

    def __init__(self, problem: Problem, iterations: int):
        self._problem, self.iterations = problem, iterations
        self._norms: dict[str, float] = {}
        self._references: dict[_Rule, Numbers] = {}
        self._bounds: dict[_Rule, Numbers | None] = {}

    def difference(self, row: Row, numbers: Numbers) -> str | None:
        if row.skips:
            return _check.difference(numbers, self._problem.start(), _check.EXACT)
        # Without AMSGrad both rules are one; with it, each is computed once.
        problem = row.variant(self._problem)
        optax_amsgrad = row.optax_amsgrad and problem.amsgrad
        norm = 0.0 if row.norm_error is None else self._norm(problem)
        # Copies are those of the row's own parameters.
        kept = dataclasses.replace(row.kept, copies=False)
        rule = _Rule(problem.dtype, optax_amsgrad, norm, kept)
        if rule not in self._references:
            self._bounds[rule] = rounding_bounds(
                problem, self.iterations, optax_amsgrad, kept
            )
            self._references[rule] = _check.reference(
                problem, self.iterations, optax_amsgrad, norm, kept
            )
        expected = self._references[rule]
        if row.kept.copies:
            copies = [param.astype(jnp.bfloat16) for param in numbers.params]
            expected = expected._replace(compute=copies)
        allowed = _check.tolerances(self.iterations, norm, row.norm_error or 0.0)
        return _check.difference(numbers, expected, allowed, self._bounds[rule])

    def _norm(self, problem: Problem) -> float:
        if problem.dtype not in self._norms:
            self._norms[problem.dtype] = _check.global_norm(problem.grads)
        return self._norms[problem.dtype]
