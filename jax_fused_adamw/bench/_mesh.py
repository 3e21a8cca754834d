"""Leaves on a mesh of devices, and what a compiled step says to the others."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_fused_adamw.bench._problem import Numbers, Problem

_AXIS = "fsdp"
_COLLECTIVE = re.compile(
    r" = (?P<types>[^%\n]*?) (?P<op>all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|ragged-all-to-all|collective-permute|collective-broadcast)(?P<start>-start)?\("
)
_TYPE = re.compile(r"\b(?:pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<sizes>[\d,]*)\]")
# Their first halves return the operands too, and then the results.
_RETURN_OPERANDS = ("all-gather", "collective-permute")


def make_mesh(num_devices: int) -> Mesh:
    """The first devices in a row."""
    return jax.make_mesh(
        (num_devices,),
        (_AXIS,),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:num_devices],
    )


def everywhere(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_longest(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Cut along the longest dimension that the devices share evenly, else whole."""
    sizes = [size if size % mesh.size == 0 else 0 for size in shape]
    if not any(sizes):
        return everywhere(mesh)
    before = [None] * sizes.index(max(sizes))
    return NamedSharding(mesh, PartitionSpec(*before, _AXIS))


def split_batch(mesh: Mesh) -> NamedSharding:
    """Cut along the first dimension."""
    return NamedSharding(mesh, PartitionSpec(_AXIS))


@dataclasses.dataclass(frozen=True)
class MeshProblem:
    """A :class:`Problem` whose leaves lie on a mesh; rows take it in its place.

    Attributes:
      whole: the same numbers on one device.
      mesh: where they lie.
      zero1: whether parameters are whole on every device and only moments and
        gradients are cut (ZeRO-1); else all are (FSDP).
    """

    whole: Problem
    mesh: Mesh
    zero1: bool = False

    @property
    def amsgrad(self) -> bool:
        return self.whole.amsgrad

    @functools.cached_property
    def placements(self) -> list[NamedSharding]:
        """Where each leaf's gradient and moments lie."""
        return [split_longest(self.mesh, shape) for shape in self.whole.leaves]

    @property
    def _param_placements(self) -> list[NamedSharding]:
        if self.zero1:
            return [everywhere(self.mesh)] * len(self.placements)
        return self.placements

    @property
    def shard(self) -> Problem:
        """What one device holds of it."""
        shapes = zip(self.whole.leaves, self.placements, strict=True)
        leaves = [placement.shard_shape(shape) for shape, placement in shapes]
        return dataclasses.replace(self.whole, leaves=leaves)

    @functools.cached_property
    def grads(self) -> list[jax.Array]:
        return jax.device_put(self.whole.grads, self.placements)

    def start(self) -> Numbers:
        start = self.place(self.whole.start())
        return start._replace(
            params=jax.device_put(start.params, self._param_placements)
        )

    def place(self, numbers: Numbers) -> Numbers:
        """The numbers cut as the moments are."""
        parts = [jax.device_put(x, self.placements if x else x) for x in numbers]
        return Numbers(*parts)

    def state_placements(self, state: Any) -> Any:
        """Of an optimizer's state: moments are cut, scalars are on every device."""
        placements = jax.tree.map(lambda _: everywhere(self.mesh), state)
        names = ("mu", "nu", "nu_max") if self.amsgrad else ("mu", "nu")
        return optax.tree.set(placements, **dict.fromkeys(names, self.placements))

    def keep_placement(self, step: Callable) -> Callable:
        """The step, with results that lie where its arguments do.

        Otherwise XLA may leave them elsewhere, and the next step could not take them.
        """

        def kept(params, state, *others):
            params, state = step(params, state, *others)
            placements = self._param_placements, self.state_placements(state)
            return lax.with_sharding_constraint((params, state), placements)

        return kept


def find_collectives(text: str) -> dict[str, dict[str, int]]:
    """Counts a compiled program's collectives: ``{op: {"count", "bytes"}}``.

    Args:
      text: of the program that each device runs. A loop's body counts once. The bytes
        are those of the results on a device.
    """
    found: dict[str, dict[str, int]] = {}
    for match in _COLLECTIVE.finditer(text):
        op, types = match["op"], list(_TYPE.finditer(match["types"]))
        if match["start"] and op in _RETURN_OPERANDS:
            types = types[len(types) // 2 :]
        entry = found.setdefault(op, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += sum(map(_num_bytes, types))
    return dict(sorted(found.items()))


def _num_bytes(match: re.Match) -> int:
    sizes = [int(size) for size in match["sizes"].split(",") if size]
    return math.prod(sizes) * int(match["bits"] or 8) // 8


def run_steps(run: Callable[[int], None], steps: int) -> None:
    """Takes the steps: all at once, but on a CPU one at a time.

    With several steps on eight forced devices in flight, XLA:CPU has stopped for ever
    in a collective (JAX 0.10.2).
    """
    if jax.default_backend() != "cpu":
        run(steps)
        return
    for _ in range(steps):
        run(1)


def peak_bytes_in_use(mesh: Mesh) -> list[int] | None:
    """What each device's allocator has held at most since the process began."""
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    peaks = [each.get("peak_bytes_in_use") for each in stats]
    return None if None in peaks else peaks
