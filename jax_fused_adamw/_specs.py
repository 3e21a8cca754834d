"""What a sharding says of each dimension, and a type of the mesh axes."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def align_members(mesh, placements):
    """One sharding of the member axis for all leaves: of the first that has one."""
    specs = [spec_of(placement) for placement in placements]
    member_spec = next((spec[0] for spec in specs if spec and spec[0]), None)
    used = spec_axes(member_spec)

    def free(axes) -> bool:
        return set(used).isdisjoint(spec_axes(axes))

    aligned = [
        NamedSharding(
            mesh, PartitionSpec(member_spec, *(a if free(a) else None for a in s[1:]))
        )
        for s in specs
    ]
    return member_spec, aligned


def spec_of(
    placement,
    needed_by: str = "a vmap with a learning rate, count or skip of each member",
) -> tuple:
    """The mesh axes of each dimension."""
    if hasattr(placement, "spec"):
        return tuple(placement.spec)
    if placement.is_fully_replicated:
        return ()
    raise NotImplementedError(
        "fused_adamw: the sharding of a leaf is hidden inside a shard_map that is "
        f"manual over only some mesh axes, and {needed_by} needs it: make the "
        "shard_map manual over all axes"
    )


def spec_axes(entry) -> tuple[str, ...]:
    """The mesh axes of one entry of a ``PartitionSpec``."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def even_sharding(mesh, placement, shape: tuple[int, ...]):
    """The placement, whole along dimensions that it cuts into uneven parts.

    XLA fills the last part up, and what it is filled with must not be counted.
    """
    spec = spec_of(placement)
    even = [
        entry
        if size % math.prod(mesh.shape[a] for a in spec_axes(entry)) == 0
        else None
        for entry, size in zip(spec, shape)
    ]
    if even == list(spec):
        return placement
    return NamedSharding(mesh, PartitionSpec(*even))


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes of an enclosing shard_map over which ``x`` may differ."""
    if not isinstance(x, jax.Array):
        return frozenset()
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return getattr(manual, "varying", frozenset())


def ordered_axes(x: Any) -> tuple[str, ...]:
    """Its varying axes in an order for collectives."""
    return tuple(sorted(varying_axes(x)))
