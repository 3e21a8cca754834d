"""FSDP training of a small GPT: batch and parameters cut over all devices.

Every device takes its part of the batch. Parameters are gathered where the loss reads
them, and their gradients come back in parts, which is all that the optimizer sees.

Whole curves are recorded, and their beginnings compared: a learning rate off by 1e-5 of
itself moves the last of 100 losses by 0.05 (the tiny GPT, one CPU device).
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jax_fused_adamw.bench import _gpt, _protocol
from jax_fused_adamw.bench._mesh import (
    everywhere,
    find_collectives,
    make_mesh,
    peak_bytes_in_use,
    run_steps,
    split_batch,
    split_longest,
)
from jax_fused_adamw.bench._protocol import Entry
from jax_fused_adamw.bench._results import (
    MEASURED,
    ShardedModelResult,
    ShardedRowResult,
    Spread,
)
from jax_fused_adamw.bench._train_rows import (
    CLIPPED,
    OURS_CLIPPED,
    Optimizer,
    TrainStepper,
)
from jax_fused_adamw.bench._train_step import CHECKED_UPDATES, TOLERANCE, ExpectedLosses
from jax_fused_adamw.bench._workloads import Workload, gpt_workload

SEQUENCES = 4  # of each device
# The partitioner cuts XLA's attention along the batch without help of cuDNN's.
_ATTENTION = "xla"


def describe_training(updates: int) -> dict[str, Any]:
    return {
        "updates": updates,
        "sequences_per_device": SEQUENCES,
        "attention": _ATTENTION,
        "tolerance": TOLERANCE,
        "checked_updates": CHECKED_UPDATES,
    }


def measure_training(
    num_devices: int, updates: int, samples: int
) -> ShardedModelResult:
    """Trains with clip and AdamW, optax's and ours, in turns.

    Args:
      num_devices: of the mesh.
      updates: of every run.
      samples: timed runs of either.
    """
    mesh = make_mesh(num_devices)
    config = _gpt.GPT2 if jax.default_backend() == "gpu" else _gpt.TINY
    workload = _on_mesh(gpt_workload(config, SEQUENCES * num_devices, _ATTENTION), mesh)
    name = f"{workload.name} on {num_devices} devices"
    expected = _Recorded(updates)
    rows = [_Row(each, mesh) for each in (CLIPPED, OURS_CLIPPED)]
    with _protocol.fitting(name, "leave it out with --updates 0"):
        entries = _protocol.run_rows(
            name, workload, rows, expected, samples, num_devices
        )
        params = jax.tree.leaves(jax.eval_shape(workload.init))
    return ShardedModelResult(
        name=name,
        shape=workload.name,
        num_devices=num_devices,
        step="train step",
        iterations=updates,
        num_leaves=len(params),
        num_parameters=sum(leaf.size for leaf in params),
        peak_bytes_in_use=peak_bytes_in_use(mesh),
        rows=[_row_result(entry, expected) for entry in entries],
    )


class _Recorded(ExpectedLosses):
    """Keeps the losses of every row's last run."""

    def __init__(self, iterations: int):
        super().__init__(iterations)
        self.last: dict[str, list[float]] = {}

    def difference(self, row: Any, losses: np.ndarray) -> str | None:
        self.last[row.name] = losses.tolist()
        return super().difference(row, losses)


class _Row:
    """What the protocol measures: an optimizer on a mesh, by the clock alone."""

    checked_updates = CHECKED_UPDATES
    profiled = False  # a hundred steps are more events than a profile should hold

    def __init__(self, optimizer: Optimizer, mesh: Mesh):
        self.name, self.peer = optimizer.name, optimizer.peer
        self.ours = optimizer.ours
        self._optimizer, self._mesh = optimizer, mesh

    def build(self, workload: Workload) -> "MeshTrainStepper":
        return MeshTrainStepper(workload, self._optimizer, self._mesh)


class MeshTrainStepper(TrainStepper):
    """A train step whose gradients and results lie where the parameters do."""

    def __init__(self, workload: Workload, optimizer: Optimizer, mesh: Mesh):
        self._mesh = mesh
        super().__init__(workload, _OnMesh(optimizer, mesh))
        self.collectives = find_collectives(self._step.as_text())

    def run(self, steps: int) -> None:
        run_steps(super().run, steps)

    def _make_start(self) -> tuple[Any, ...]:
        start = super()._make_start()
        return jax.device_put(start, _cut_placements(self._mesh, start))

    def _example_arguments(self) -> tuple[Any, ...]:
        # Shapes alone would leave the placement of the arguments to XLA.
        self.start()
        return *self._carry, self._batch


class _OnMesh:
    """The optimizer with its arguments and results cut; see :class:`Optimizer`."""

    def __init__(self, optimizer: Optimizer, mesh: Mesh):
        self._optimizer, self._mesh = optimizer, mesh
        self.ours, self.make = optimizer.ours, optimizer.make
        self.value_and_grad = optimizer.value_and_grad

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        results = self._optimizer.update(self._cut(grads), state, params)
        return self._cut(results)

    def _cut(self, tree: Any) -> Any:
        placements = _cut_placements(self._mesh, tree)
        return lax.with_sharding_constraint(tree, placements)


def _cut_placements(mesh: Mesh, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: split_longest(mesh, leaf.shape), tree)


def _on_mesh(workload: Workload, mesh: Mesh) -> Workload:
    def init() -> Any:
        params = workload.init()
        return jax.device_put(params, _cut_placements(mesh, params))

    def make_batch() -> Any:
        return jax.device_put(workload.make_batch(), split_batch(mesh))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        whole = jax.tree.map(lambda _: everywhere(mesh), params)
        return workload.loss_fn(lax.with_sharding_constraint(params, whole), batch)

    return dataclasses.replace(
        workload, init=init, make_batch=make_batch, loss_fn=loss_fn
    )


def _row_result(entry: Entry, expected: _Recorded) -> ShardedRowResult:
    row = entry.row
    result = ShardedRowResult(
        row.name, row.ours, entry.status, entry.reason, peer=row.peer
    )
    # The curve of a wrong row tells what went wrong; only its times are withheld.
    result = dataclasses.replace(result, losses=expected.last.get(row.name))
    if entry.status != MEASURED:
        return result
    return dataclasses.replace(
        result,
        wall_ms=Spread.of(entry.wall_ms),
        compile_s=entry.stepper.compile_s,
        peak_bytes=entry.stepper.peak_bytes,
        collectives=entry.stepper.collectives,
    )
