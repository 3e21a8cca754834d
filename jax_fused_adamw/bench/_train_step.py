"""Whole train steps: what an optimizer costs where it is used.

A row is right where its losses, one a step, are those of the same rule in optax from
the same start. That finds an update that is missing, doubled or of another size; what
moves a loss less than the tolerance (a decay, a b2) is for the isolated step's bench,
which compares every element.
"""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fused_adamw._machine import num_processors
from jax_fused_adamw.bench import _gpt, _protocol
from jax_fused_adamw.bench._machine import describe_load, describe_machine
from jax_fused_adamw.bench._problem import Blocked
from jax_fused_adamw.bench._protocol import Entry
from jax_fused_adamw.bench._results import (
    MEASURED,
    WRONG,
    Spread,
    TrainResults,
    TrainRowResult,
    WorkloadResult,
    comparable_us,
)
from jax_fused_adamw.bench._train_rows import (
    LEARNING_RATE,
    MAX_ERRORS,
    MAX_NORM,
    OPTIMIZERS,
    WEIGHT_DECAY,
    Optimizer,
    TrainStepper,
)
from jax_fused_adamw.bench._workloads import (
    Workload,
    gpt_workload,
    largest_batch,
    ppo_workload,
)

# A share of the distance between the least and the greatest of the reference's losses,
# whose gradients have the same dtype. In the first 8 updates other orders of addition
# take up 0.1 % of it for GPT-2 (H200), 0.02 % for a small GPT with float32 or bfloat16
# gradients (CPU, 2026-11-30).
TOLERANCE = 0.01
# After about ten updates of GPT-2 on a GPU, attention's sums in an order of chance have
# taken a run 0.2 away from its own repetition (H200, cuDNN, 2026-11-29).
CHECKED_UPDATES = 8
# With bfloat16 gradients roundings part two programs earlier: ours and optax's of GPT-2
# are 0.1 % apart for six updates, 0.4 and 1.2 % in the two after, and by the tenth they
# are 1 to 3 % away from one with float32 gradients (H200, jax 0.11.2, 2026-11-30).
CHECKED_UPDATES_OF_BF16 = 6
GRADIENTS = "gradients only"
_FIRST_BATCH = 4
_TOKENS = 80_000  # about as many in a timed batch of GPT-2 steps, but 3 steps at least
_MEMORY_SHARE = 0.95  # the allocator needs some room between arrays
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


@dataclasses.dataclass(frozen=True)
class _Row:
    """What the protocol measures: a row, or its twin without CUDA graphs."""

    name: str
    build: Callable[[Workload], TrainStepper]
    peer: str | None
    checked_updates: int = CHECKED_UPDATES
    profiled: bool = True


class ExpectedLosses:
    """The losses of each peer's first batch, which its followers must repeat."""

    def __init__(self, iterations: int):
        self.iterations = iterations
        self._losses: dict[str, np.ndarray] = {}

    def difference(self, row: Any, losses: np.ndarray) -> str | None:
        if not np.isfinite(losses).all():
            return "a loss is not finite"
        if row.peer is None:
            return None
        if row.name == row.peer:
            self._losses.setdefault(row.peer, losses)
        if row.peer not in self._losses:
            raise Blocked(f"there is nothing to check it against: no {row.peer}")
        expected = self._losses[row.peer]
        return losses_differ(losses, expected, row.peer, row.checked_updates)


def losses_differ(
    losses: np.ndarray, expected: np.ndarray, peer: str, updates: int = CHECKED_UPDATES
) -> str | None:
    """Says where the first losses leave those of the peer; None where they do not."""
    losses, expected = losses[:updates], expected[:updates]
    allowed = TOLERANCE * np.ptp(expected)
    distance = np.abs(losses - expected)
    # Negated, so that a NaN is wrong.
    wrong = ~(distance <= allowed)
    if not wrong.any():
        return None
    return (
        f"{wrong.sum()} of {losses.size} losses differ from those of {peer} by up to "
        f"{distance[wrong].max():.1e}, where {allowed:.1e} is allowed, {TOLERANCE:.0%} "
        f"of the distance that they move; the first one is of update {wrong.argmax()}"
    )


def run_train_steps(
    batches: Sequence[int],
    iterations: int | None,
    samples: int,
    save: Callable[[TrainResults], None] = lambda results: None,
    rows: Sequence[str] = (),
) -> TrainResults:
    """Measures optimizers on every workload.

    Args:
      batches: sequences in a batch of the GPT; none are 4 and, on a GPU, the largest
        power of two times 4 that fits.
      iterations: steps of a timed batch; None suits each workload.
      samples: timed batches of a row.
      save: called with what there is after each workload: a run may be killed.
      rows: names of optimizers, each measured next to its peer; none are all.

    Raises:
      BenchError: parameters that do not fit into memory even once.
    """
    machine, before = describe_machine(), describe_load()
    config = _gpt.GPT2 if machine["platform"] == "gpu" else _gpt.TINY
    attention = _gpt.choose_attention(config)
    gpt = functools.partial(gpt_workload, config, attention=attention)
    workloads = [gpt(n) for n in batches or _default_batches(gpt)] + [ppo_workload()]
    models: list[WorkloadResult] = []

    def results() -> TrainResults:
        return TrainResults(
            machine=machine,
            load={"before": before, "after": describe_load()},
            setting=_setting(samples, attention),
            models=models,
        )

    for i, workload in enumerate(workloads):
        # CUDA graphs save launches, which a large batch hides, and compile once more.
        graphs = i == 0 or workload.updates > 1
        steps = iterations or _num_iterations(workload)
        models.append(_measure_workload(workload, steps, samples, graphs, rows))
        save(results())
    return results()


def _setting(samples: int, attention: str) -> dict[str, Any]:
    return {
        "samples": samples,
        "attention": attention,
        "activations": jnp.dtype(_gpt.ACTIVATIONS).name,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "max_norm": MAX_NORM,
        "max_consecutive_errors": MAX_ERRORS,
        "tolerance": TOLERANCE,
        "checked_updates": CHECKED_UPDATES,
        "checked_updates_of_bf16": CHECKED_UPDATES_OF_BF16,
    }


def _default_batches(gpt: Callable[[int], Workload]) -> list[int]:
    memory = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in memory:
        return [_FIRST_BATCH]

    def peak_bytes(batch: int) -> int | None:
        try:
            return TrainStepper(gpt(batch), OPTIMIZERS[0]).peak_bytes
        except jax.errors.JaxRuntimeError:
            return None

    limit_bytes = int(_MEMORY_SHARE * memory["bytes_limit"])
    largest = largest_batch(peak_bytes, _FIRST_BATCH, limit_bytes)
    return sorted({_FIRST_BATCH, largest})


def _num_iterations(workload: Workload) -> int:
    if jax.default_backend() == "cpu":
        return 10
    if workload.updates > 1:
        return 20
    num_tokens = math.prod(jax.eval_shape(workload.make_batch).shape)
    return max(3, min(20, _TOKENS // num_tokens))


def _choose(rows: Sequence[str]) -> list[Optimizer]:
    peers = {each.peer for each in OPTIMIZERS if each.name in rows}
    return [each for each in OPTIMIZERS if not rows or each.name in {*rows, *peers}]


def _measure_workload(
    workload: Workload,
    iterations: int,
    samples: int,
    graphs: bool,
    names: Sequence[str] = (),
) -> WorkloadResult:
    rows = [_Row(GRADIENTS, lambda workload: TrainStepper(workload, None), peer=None)]
    optimizers = [each for each in _choose(names) if each.suits(workload)]
    for optimizer in optimizers:
        build = functools.partial(TrainStepper, optimizer=optimizer)
        rows.append(
            _Row(optimizer.name, build, optimizer.peer, _checked_updates(optimizer))
        )
    twins = (
        _make_twins(workload, optimizers) if graphs and _protocol.has_profiler() else []
    )
    with _protocol.fitting(workload.name, "choose a smaller --batch"):
        workload.batch  # noqa: B018 - made and kept
        entries = _protocol.run_rows(
            workload.name,
            workload,
            [*rows, *twins],
            ExpectedLosses(iterations),
            samples,
        )
        params = jax.tree.leaves(jax.eval_shape(workload.init))
    gradients, *others = entries[: len(rows)]
    without_graphs = {twin.row.name: twin for twin in entries[len(rows) :]}
    results = [_result(gradients, None, workload.updates)]
    for entry, optimizer in zip(others, optimizers, strict=True):
        result = _result(entry, optimizer, workload.updates)
        result = _with_share(result, results[0])
        twin = without_graphs.get(_twin_name(optimizer))
        results.append(_with_twin(result, twin, workload.updates))
    return WorkloadResult(
        name=workload.name,
        step=workload.step,
        iterations=iterations,
        num_leaves=len(params),
        num_parameters=sum(leaf.size for leaf in params),
        rows=results,
    )


def _checked_updates(optimizer: Optimizer) -> int:
    is_bf16 = optimizer.compute_dtype == "bfloat16"
    return CHECKED_UPDATES_OF_BF16 if is_bf16 else CHECKED_UPDATES


def _twin_name(optimizer: Optimizer) -> str:
    return f"{optimizer.name}, no CUDA graphs"


def _make_twins(workload: Workload, optimizers: Sequence[Optimizer]) -> list[_Row]:
    """Every row again without CUDA graphs, compiled at once: nobody times that."""

    def build(optimizer: Optimizer) -> TrainStepper:
        try:
            return TrainStepper(workload, optimizer, _NO_GRAPHS)
        except jax.errors.JaxRuntimeError as error:
            raise Blocked(_protocol.first_line(error)) from error

    @functools.cache
    def build_all() -> dict[str, concurrent.futures.Future]:
        with concurrent.futures.ThreadPoolExecutor(num_processors()) as pool:
            return {each.name: pool.submit(build, each) for each in optimizers}

    return [
        _Row(
            name=_twin_name(optimizer),
            build=lambda _, name=optimizer.name: build_all()[name].result(),
            peer=optimizer.peer,
            checked_updates=_checked_updates(optimizer),
            profiled=False,
        )
        for optimizer in optimizers
    ]


def _result(entry: Entry, optimizer: Optimizer | None, updates: int) -> TrainRowResult:
    result = TrainRowResult(
        name=entry.row.name,
        ours=optimizer is not None and optimizer.ours,
        status=entry.status,
        reason=entry.reason,
        peer=entry.row.peer,
    )
    if entry.status != MEASURED:
        return result
    device = [each.us / updates for each in entry.device]
    launches = [each.launches / updates for each in entry.device]
    return dataclasses.replace(
        result,
        wall_ms=_wall_ms(entry, updates),
        device_us=Spread.of(device) if device else None,
        launches=max(launches, default=None),
        compile_s=entry.stepper.compile_s,
        peak_bytes=entry.stepper.peak_bytes,
    )


def _wall_ms(entry: Entry, updates: int) -> Spread:
    return Spread.of([each / updates for each in entry.wall_ms])


def _with_share(result: TrainRowResult, gradients: TrainRowResult) -> TrainRowResult:
    if not result.status == gradients.status == MEASURED:
        return result
    rows = (result, gradients)
    # Where the device's time was lost, the host's does not stand in for it.
    if _protocol.has_profiler() and any(row.device_us is None for row in rows):
        return result
    step, grads = comparable_us(rows)
    return dataclasses.replace(result, optimizer_share=(step - grads) / step)


def _with_twin(
    result: TrainRowResult, twin: Entry | None, updates: int
) -> TrainRowResult:
    if twin is None or result.status != MEASURED:
        return result
    if twin.status == WRONG:
        reason = f"without CUDA graphs, {twin.reason}"
        return TrainRowResult(result.name, result.ours, WRONG, reason, peer=result.peer)
    if twin.status != MEASURED:
        return dataclasses.replace(result, no_graphs_reason=twin.reason)
    return dataclasses.replace(result, no_graphs_ms=_wall_ms(twin, updates))
