"""The isolated optimizer step on a mesh of 1, 2, 4, ... devices.

A row is right where its numbers are those of the plain-JAX reference on one device
within its tolerance, and, if it is ours, bit for bit our own on one device, given the
norm that the mesh has found.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jax_fused_adamw.bench import BenchError, _check, _protocol
from jax_fused_adamw.bench._experiment import Options, describe_setting, row_result
from jax_fused_adamw.bench._machine import describe_load, describe_machine
from jax_fused_adamw.bench._measure import Limit, measure_limit
from jax_fused_adamw.bench._mesh import MeshProblem, make_mesh, peak_bytes_in_use
from jax_fused_adamw.bench._mesh_rows import MeshNumbers, run_on_one_device
from jax_fused_adamw.bench._problem import Numbers, Problem, Row
from jax_fused_adamw.bench._protocol import Entry
from jax_fused_adamw.bench._results import (
    MEASURED,
    ShardedModelResult,
    ShardedResults,
    ShardedRowResult,
    Spread,
    comparable_us,
)
from jax_fused_adamw.bench._shapes import Leaves, num_parameters
from jax_fused_adamw.bench._sharded_train import describe_training, measure_training


def default_counts() -> list[int]:
    """1, 2, 4, ... devices, as many as there are."""
    counts = [1]
    while 2 * counts[-1] <= jax.device_count():
        counts.append(2 * counts[-1])
    return counts


def check_counts(counts: Sequence[int]) -> None:
    """Raises a BenchError where there are not as many devices, or only one."""
    available = jax.device_count()
    if available == 1:
        raise BenchError(
            "--sharded needs several devices, and here is one; on a CPU set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8"
        )
    if max(counts) > available:
        raise BenchError(
            f"--devices: expected at most {available}, which are here, got "
            f"{max(counts)}"
        )


def run_sharded(
    models: dict[str, Leaves],
    rows: Sequence[Row],
    counts: Sequence[int],
    updates: int,
    options: Options,
    save: Callable[[ShardedResults], None] = lambda results: None,
) -> ShardedResults:
    """Measures the rows on every model and mesh, then trains on the largest mesh.

    Args:
      models: leaf shapes by name.
      rows: values of ``MESH_ROWS``.
      counts: how many devices, one mesh each.
      updates: of the training; 0 leaves it out.
      options: how.
      save: called with what there is after each mesh: a run may be killed.

    Raises:
      BenchError: a model that does not fit into memory even once.
    """
    machine, before = describe_machine(), describe_load()
    limit = measure_limit(machine["platform"])
    measured: list[ShardedModelResult] = []

    def results() -> ShardedResults:
        return ShardedResults(
            machine=machine,
            load={"before": before, "after": describe_load()},
            setting={**describe_setting(options), **describe_training(updates)},
            limit=dataclasses.asdict(limit),
            models=measured,
        )

    for name, leaves in models.items():
        for result in _measure_meshes(name, leaves, counts, rows, options, limit):
            measured.append(result)
            save(results())
    if updates:
        measured.append(measure_training(max(counts), updates, options.samples))
        save(results())
    return results()


def _measure_meshes(
    name: str,
    leaves: Leaves,
    counts: Sequence[int],
    rows: Sequence[Row],
    options: Options,
    limit: Limit,
) -> Iterator[ShardedModelResult]:
    problem = Problem(leaves, options.dtype, options.amsgrad)
    reference = _Reference(problem, options.iterations)
    done: list[ShardedModelResult] = []
    for count in sorted(set(counts)):
        result = _measure_mesh(name, reference, count, rows, options, limit)
        done.append(_with_efficiency(result, done))
        yield done[-1]


class _Rule(NamedTuple):
    """What tells references apart.

    Attributes:
      optax_amsgrad: with AMSGrad, whether the rule is that of ``optax.amsgrad``.
      norm: of the gradients, to clip them by; 0 where the row does not clip.
    """

    optax_amsgrad: bool
    norm: float


class _Reference:
    """What a batch must end with, on one device; computed when it is first asked."""

    def __init__(self, problem: Problem, iterations: int):
        self.problem, self.iterations = problem, iterations
        self._numbers: dict[_Rule, Numbers] = {}

    @functools.cached_property
    def _norm(self) -> float:
        return _check.global_norm(self.problem.grads)

    def rule(self, row: Row) -> _Rule:
        norm = 0.0 if row.norm_error is None else self._norm
        return _Rule(row.optax_amsgrad and self.problem.amsgrad, norm)

    def numbers(self, rule: _Rule) -> Numbers:
        if rule not in self._numbers:
            self._numbers[rule] = _check.reference(self.problem, self.iterations, *rule)
        return self._numbers[rule]


class _Expected:
    """The same on a mesh; see ``_protocol.Expected``."""

    def __init__(self, reference: _Reference, problem: MeshProblem):
        self._reference, self._problem = reference, problem
        self.iterations = reference.iterations
        self._placed: dict[_Rule, Numbers] = {}
        self._same_bits: set[str] = set()

    def difference(self, row: Row, got: MeshNumbers) -> str | None:
        rule = self._reference.rule(row)
        if rule not in self._placed:
            numbers = self._reference.numbers(rule)
            self._placed[rule] = self._problem.place(numbers)
        allowed = _check.tolerances(self.iterations, rule.norm, row.norm_error or 0.0)
        reason = _check.difference(got.numbers, self._placed[rule], allowed)
        # The bits once: every batch starts from the same numbers.
        if reason is not None or not row.ours or row.name in self._same_bits:
            return reason
        own = run_on_one_device(self._problem.whole, self.iterations, got.report)
        own = self._problem.place(own)
        reason = _check.difference(got.numbers, own, _check.EXACT)
        if reason is not None:
            return f"not the bits of one device: {reason}"
        self._same_bits.add(row.name)
        return None


def _measure_mesh(
    name: str,
    reference: _Reference,
    num_devices: int,
    rows: Sequence[Row],
    options: Options,
    limit: Limit,
) -> ShardedModelResult:
    problem = MeshProblem(reference.problem, make_mesh(num_devices))
    title = f"{name} on {num_devices} device{'s' if num_devices > 1 else ''}"
    with _protocol.fitting(title, "choose a smaller model with --shape"):
        jax.block_until_ready(problem.grads)
        entries = _protocol.run_rows(
            title,
            problem,
            rows,
            _Expected(reference, problem),
            options.samples,
            num_devices,
        )
    return ShardedModelResult(
        name=title,
        shape=name,
        num_devices=num_devices,
        step="optimizer step",
        iterations=options.iterations,
        num_leaves=len(problem.whole.leaves),
        num_parameters=num_parameters(problem.whole.leaves),
        peak_bytes_in_use=peak_bytes_in_use(problem.mesh),
        rows=[_row_result(entry, problem, limit) for entry in entries],
    )


def _row_result(entry: Entry, problem: MeshProblem, limit: Limit) -> ShardedRowResult:
    # The percentage is that of a device, which moves its own part.
    result = ShardedRowResult(**vars(row_result(entry, problem.shard, limit)))
    if result.status != MEASURED:
        return result
    found: dict[str, Any] = {"collectives": entry.stepper.collectives}
    if entry.device:
        times = [each.communication_us for each in entry.device]
        found["communication_us"] = Spread.of(times)
    if entry.device and entry.num_devices > 1:
        found["median_us"] = Spread.of([each.median_us for each in entry.device])
    return dataclasses.replace(result, **found)


def _with_efficiency(
    result: ShardedModelResult, before: Sequence[ShardedModelResult]
) -> ShardedModelResult:
    """With one device's time over that of all devices, added up."""
    if not before or before[0].num_devices != 1:
        return result
    single = {row.name: row for row in before[0].rows}

    def add(row: ShardedRowResult) -> ShardedRowResult:
        rows = (single[row.name], row)
        if any(each.status != MEASURED for each in rows):
            return row
        one, all_of_them = comparable_us(rows)
        efficiency = one / (result.num_devices * all_of_them)
        return dataclasses.replace(row, efficiency=efficiency)

    return dataclasses.replace(result, rows=[add(row) for row in result.rows])
