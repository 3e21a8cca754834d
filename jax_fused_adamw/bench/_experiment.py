"""The protocol: warm every row, check it, time it in turns, check it again.

Inputs are made and results are read outside of the timed part. Every batch starts from
the same numbers, in buffers of its own, so that one row is in memory at a time and the
result after a batch is known in advance.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from tqdm import tqdm

from jax_fused_adamw.bench import BenchError, _check, _problem
from jax_fused_adamw.bench._machine import describe_load, describe_machine
from jax_fused_adamw.bench._measure import (
    Limit,
    LostEvents,
    measure_limit,
    percent_of_limit,
    profile_device,
)
from jax_fused_adamw.bench._problem import Blocked, Numbers, Problem, Row, Stepper
from jax_fused_adamw.bench._results import (
    BLOCKED,
    FAILED,
    MEASURED,
    WRONG,
    ModelResult,
    Results,
    RowResult,
    Spread,
    comparable_us,
)
from jax_fused_adamw.bench._rows import JAX_ROWS
from jax_fused_adamw.bench._shapes import Leaves, num_parameters
from jax_fused_adamw.bench._torch import TORCH_ROWS

ROWS = {row.name: row for row in (*JAX_ROWS, *TORCH_ROWS)}


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
    models: dict[str, Leaves], rows: Sequence[Row], options: Options
) -> Results:
    """Measures the rows on every model.

    Args:
      models: leaf shapes by name.
      rows: values of ``ROWS``.
      options: how.

    Raises:
      BenchError: a model that does not fit into memory even once.
    """
    machine, before = describe_machine(), describe_load()
    limit = measure_limit(machine["platform"])
    results = [
        _measure_model(name, leaves, rows, options, limit)
        for name, leaves in models.items()
    ]
    return Results(
        machine=machine,
        load={"before": before, "after": describe_load()},
        setting=_setting(options),
        limit=dataclasses.asdict(limit),
        models=results,
    )


def _setting(options: Options) -> dict[str, Any]:
    hyperparameters = {
        name.lower(): getattr(_problem, name)
        for name in ("LEARNING_RATE", "B1", "B2", "EPS", "WEIGHT_DECAY", "START_COUNT")
    }
    return {**dataclasses.asdict(options), **hyperparameters}


class _Entry:
    """A row at work: its stepper while it is right, and its samples."""

    def __init__(self, row: Row):
        self.row = row
        self.stepper: Stepper | None = None
        self.status, self.reason = MEASURED, None
        self.wall_ms: list[float] = []
        self.device: list[Any] = []

    def stop(self, status: str, reason: str) -> None:
        self.status, self.reason, self.stepper = status, reason, None

    def result(self, problem: Problem, limit: Limit) -> RowResult:
        row = self.row
        if self.status != MEASURED:
            return RowResult(row.name, row.ours, self.status, self.reason)
        result = RowResult(
            name=row.name,
            ours=row.ours,
            status=MEASURED,
            reason=self.reason,
            num_bytes=row.num_bytes(row.variant(problem)),
            wall_ms=Spread.of(self.wall_ms),
            device_us=Spread.of([d.us for d in self.device]) if self.device else None,
            launches=max((d.launches for d in self.device), default=None),
            compile_s=self.stepper.compile_s,
            peak_bytes=self.stepper.peak_bytes,
        )
        percent = None
        # Where the device's time was lost, the host's does not stand in for it.
        if result.num_bytes and (self.device or not _is_profiled(row)):
            num_bytes = result.num_bytes * num_parameters(problem.leaves)
            (step_us,) = comparable_us([result])
            percent = percent_of_limit(num_bytes, step_us / 1e6, limit)
        return dataclasses.replace(result, percent_of_limit=percent)


def _has_profiler() -> bool:
    return jax.default_backend() == "gpu"


def _is_profiled(row: Row) -> bool:
    return _has_profiler() and not row.on_host


def _measure_model(
    name: str, leaves: Leaves, rows: Sequence[Row], options: Options, limit: Limit
) -> ModelResult:
    problem = Problem(leaves, options.dtype, options.amsgrad)
    expected = _Expected(problem, options.iterations)
    entries = [_Entry(row) for row in rows]
    try:
        jax.block_until_ready(problem.grads)
        num_batches = len(rows) * (options.samples + 1)
        with tqdm(total=num_batches, desc=name, mininterval=0.5) as progress:
            for entry in _tell(entries, progress):
                _warm(entry, problem, expected)
            for sample in range(options.samples):
                order = entries if sample % 2 == 0 else entries[::-1]
                for entry in _tell(order, progress):
                    if entry.status == MEASURED:
                        _sample(entry, expected)
    except jax.errors.JaxRuntimeError as error:
        raise BenchError(
            f"{name}: {_first_line(error)}; choose a smaller model with --shape"
        ) from error
    results = [entry.result(problem, limit) for entry in entries]
    return ModelResult(name, len(leaves), num_parameters(leaves), results)


def _tell(entries: Iterable[_Entry], progress: tqdm) -> Iterable[_Entry]:
    for entry in entries:
        progress.set_postfix_str(entry.row.name, refresh=False)
        yield entry
        progress.update()


class _Expected:
    """What a batch must end with, computed when it is first asked for."""

    def __init__(self, problem: Problem, iterations: int):
        self._problem, self.iterations = problem, iterations
        self._references: dict[tuple[str, bool], Numbers] = {}

    def difference(self, row: Row, numbers: Numbers) -> str | None:
        if row.skips:
            return _check.difference(numbers, self._problem.start(), _check.EXACT)
        # Without AMSGrad both rules are one; with it, each is computed once.
        problem = row.variant(self._problem)
        key = problem.dtype, row.optax_amsgrad and problem.amsgrad
        if key not in self._references:
            self._references[key] = _check.reference(problem, self.iterations, key[1])
        allowed = _check.tolerances(self.iterations)
        return _check.difference(numbers, self._references[key], allowed)


def _warm(entry: _Entry, problem: Problem, expected: _Expected) -> None:
    """Compiles the row, takes a batch of steps and checks it."""
    with _stopping(entry):
        entry.stepper = entry.row.build(entry.row.variant(problem))
        _run_batch(entry, expected)


def _sample(entry: _Entry, expected: _Expected) -> None:
    """A timed batch; on a GPU another under the profiler, which slows the host."""
    with _stopping(entry):
        seconds = _run_batch(entry, expected)
        if entry.status == MEASURED:
            entry.wall_ms.append(1e3 * seconds / expected.iterations)
            if _is_profiled(entry.row):
                _run_batch(entry, expected, profiled=True)


def _run_batch(entry: _Entry, expected: _Expected, profiled: bool = False) -> float:
    """Seconds of a batch whose numbers came out right; else the entry is stopped."""
    stepper, steps = entry.stepper, expected.iterations
    stepper.start()
    run = functools.partial(stepper.run, steps)
    started = time.perf_counter()
    if profiled:
        try:
            entry.device.append(profile_device(run, steps))
        except LostEvents as error:
            entry.reason = str(error)
    else:
        run()
    seconds = time.perf_counter() - started
    difference = expected.difference(entry.row, stepper.numbers())
    stepper.release()
    if difference is not None:
        entry.stop(WRONG, difference)
    return seconds


@contextlib.contextmanager
def _stopping(entry: _Entry):
    """Blocked where the row cannot run here (no package, no memory), else failed."""
    try:
        yield
    except Blocked as error:
        entry.stop(BLOCKED, str(error))
    except RuntimeError as error:  # both JAX's and torch's
        line = _first_line(error)
        out_of_memory = "RESOURCE_EXHAUSTED" in line or "out of memory" in line
        entry.stop(BLOCKED if out_of_memory else FAILED, line)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
