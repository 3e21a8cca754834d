"""Reports of gradients, wherever they lie.

One pass over the gradients for the whole tree, in the composition of
:mod:`._primitives`. On a mesh every device analyses what it holds; the rows of the
devices, three words each, are gathered with one all-reduce for each set of mesh axes
and merged in the order of the devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule
from jax.sharding import NamedSharding, PartitionSpec

from jax_fused_adamw._batching import merge_leaf, merge_scalar
from jax_fused_adamw._hyperparams import scale_operand
from jax_fused_adamw._partitioning import (
    is_all_manual,
    manual_axes,
    unless_all_manual,
    with_partitioning,
)
from jax_fused_adamw._specs import (
    align_members,
    even_sharding,
    ordered_axes,
    spec_axes,
    spec_of,
    varying_axes,
)
from jax_fused_adamw._stats_jvp import Statistics, with_tangents
from jax_fused_adamw._stats_primitives import (
    Reports,
    Segment,
    analyze_gradient,
    merge_gradient_stats,
)


def analyze(
    grads: Any, gradient_scale: Any, implementation: str, per_leaf: bool
) -> Reports:
    """Reports of checked gradients: of all, and with ``per_leaf`` of each after it."""
    leaves = jax.tree.leaves(grads)
    scale = scale_operand(gradient_scale)
    if varying_axes(scale):
        raise TypeError(
            "fused_adamw: gradient_scale varies over the mesh axes "
            f"{ordered_axes(scale)} of this shard_map, and one norm is asked "
            "for: reduce the scale over them first (psum, pmin)"
        )
    # Inside a shard_map over some axes of the mesh, the shardings over the others are
    # hidden from custom_partitioning; plain JAX lets XLA partition the sums.
    is_hidden = bool(manual_axes()) and not is_all_manual()
    native = implementation == "ffi" and not is_hidden
    return _jitted_reports(_Config(per_leaf, native), scale, leaves)


@dataclasses.dataclass(frozen=True)
class _Config:
    """What changes the compiled code.

    Attributes:
      per_leaf: a report for each leaf after the one for all.
      native: the platform's kernels; else plain JAX.
      members: under vmap, the size of each leaf's leading axis.
    """

    per_leaf: bool
    native: bool
    members: int | None = None


# Jitted, because custom_partitioning called eagerly replicates its operands.
@functools.partial(jax.jit, static_argnums=0)
def _jitted_reports(config: _Config, scale, leaves) -> Reports:
    analyze_local = functools.partial(_local_reports, config)
    if config.native:
        analyze_local = _call(config)
    axes = [ordered_axes(leaf) for leaf in leaves]
    operands = (scale, leaves) if config.native else lax.stop_gradient((scale, leaves))
    if any(axes):
        reports = _reports_across(config, analyze_local, axes, *operands)
    else:
        reports = Reports(*analyze_local(operands[0], *operands[1]))
    if config.native:
        return reports
    statistics = Statistics(reports.norm, reports.scaled_norm, reports.max_abs)
    statistics = with_tangents(statistics, axes, scale, leaves)
    return reports._replace(**statistics._asdict())


def _local_reports(config: _Config, scale, *grads) -> Reports:
    """Of what this device holds."""
    return analyze_gradient(
        scale, grads, config.members, config.per_leaf, config.native
    )


# --- Across devices -------------------------------------------------------------------


def _reports_across(
    config: _Config,
    analyze_local: Callable[..., Sequence[jax.Array]],
    axes_of_leaves: Sequence[tuple[str, ...]],
    scale: jax.Array,
    grads: Sequence[jax.Array],
) -> Reports:
    """Of all devices, each of which holds a part of some leaves.

    Args:
      config: of this call.
      analyze_local: reports of leaves that this device holds, in order.
      axes_of_leaves: of each leaf, the mesh axes along which it is cut; over the
        others it is the same everywhere, and counted once.
      scale: of the gradients.
      grads: what this device holds.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, axes in enumerate(axes_of_leaves):
        groups.setdefault(axes, []).append(i)
    totals: list[jax.Array] = []
    of_leaves: dict[int, jax.Array] = {}
    for axes, leaves in groups.items():
        local = Reports(*analyze_local(scale, *(grads[i] for i in leaves)))
        rows = _all_rows(local.rows, axes)  # [..., reports, devices, 3]
        totals.append(rows[..., 0, :, :])
        of_leaves |= {i: rows[..., 1 + k, :, :] for k, i in enumerate(leaves)}
    parts = [jnp.concatenate(totals, axis=-2)]
    if config.per_leaf:
        parts += [of_leaves[i] for i in range(len(grads))]
    segments, first = [], 0
    for part in parts:
        segments.append(Segment(first, part.shape[-2]))
        first += part.shape[-2]
    rows = jnp.concatenate(parts, axis=-2)
    return merge_gradient_stats(rows, segments, config.members, config.native)


def _all_rows(rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The rows of all devices along the axes, on a new axis before the last.

    Each device puts its words into its own place among zeros, so the sum is exact.
    """
    if not axes:
        return rows[..., None, :]
    place = lax.axis_index(axes)
    slots = jnp.arange(lax.axis_size(axes))
    mine = (slots == place)[:, None]
    return lax.psum(jnp.where(mine, rows[..., None, :], jnp.uint32(0)), axes)


def _sharding_rule(config: _Config, mesh, operands, results):
    """Members stay where they are; everything else is reduced."""
    del mesh
    leading = () if config.members is None else ("member",)
    scale, *grads = operands

    def names(prefix: str, rank: int, members: tuple[str, ...]) -> ArrayMapping:
        return ArrayMapping(*members, *(f"{prefix}{d}" for d in range(rank)))

    own = [
        names(f"leaf{i}_dim", grad.rank - len(leading), leading)
        for i, grad in enumerate(grads)
    ]
    reduced = [
        f"leaf{i}_dim{d}"
        for i, grad in enumerate(grads)
        for d in range(grad.rank - len(leading))
    ]
    return SdyShardingRule(
        (names("scale", 0, leading if scale.rank else ()), *own),
        tuple(
            names(f"result{i}_dim", x.rank - len(leading), leading)
            for i, x in enumerate(results)
        ),
        reduction_factors=tuple(reduced),
    )


def _partition(config: _Config, mesh, operands, results):
    scale, *grads = operands
    placements = [even_sharding(mesh, g.sharding, g.shape) for g in grads]
    member_spec = None
    if config.members is not None:
        member_spec, placements = align_members(mesh, placements)
    leading = 0 if config.members is None else 1
    axes = [
        tuple(a for entry in spec_of(placement)[leading:] for a in spec_axes(entry))
        for placement in placements
    ]

    def of_shards(scale, *shards):
        local = config
        if config.members is not None:
            local = dataclasses.replace(config, members=shards[0].shape[0])
        # Operations of jnp must not see the outer explicit mesh.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            if not any(axes):
                return tuple(_local_reports(local, scale, *shards))
            analyze_local = functools.partial(_local_reports, local)
            return tuple(_reports_across(local, analyze_local, axes, scale, shards))

    whole = NamedSharding(mesh, PartitionSpec())
    of_members = NamedSharding(mesh, PartitionSpec(member_spec))
    return (
        mesh,
        of_shards,
        tuple(whole if leading == 0 else of_members for _ in results),
        (of_members if scale.shape else whole, *placements),
    )


# --- Composition ----------------------------------------------------------------------


def _jvp(primals, tangents):
    raise TypeError(
        "fused_adamw: gradient statistics (grad_stats, clip_by_global_norm, "
        "max_grad_norm, skip_nonfinite) of the kernels cannot be differentiated; those "
        'of implementation="xla" can'
    )


def _batching_rule(config: _Config, axis_size, in_batched, scale, *grads):
    scale_batched, *grads_batched = in_batched
    inner = () if config.members is None else (config.members,)
    members = axis_size * math.prod(inner)
    if members == 0:
        shapes = jax.eval_shape(
            functools.partial(_local_reports, config), scale, *grads
        )
        zeros = [jnp.zeros((axis_size, *x.shape), x.dtype) for x in shapes]
        return tuple(zeros), (True,) * len(zeros)
    scale = merge_scalar(axis_size, inner, scale, scale_batched)
    leaves = [
        merge_leaf(axis_size, inner, grad, has)
        for grad, has in zip(grads, grads_batched, strict=True)
    ]
    out = _call(dataclasses.replace(config, members=members))(scale, *leaves)
    out = [x.reshape(axis_size, *inner, *x.shape[1:]) for x in out]
    return tuple(out), (True,) * len(out)


@functools.cache
def _call(config: _Config):
    """``(scale, *grads) -> Reports``, flat, with every rule above attached."""

    def reports(*operands):
        return tuple(_local_reports(config, *operands))

    partitioned = with_partitioning(
        reports,
        functools.partial(_partition, config),
        functools.partial(_sharding_rule, config),
    )
    differentiated = jax.custom_jvp(unless_all_manual(reports, partitioned))
    differentiated.defjvp(_jvp)
    batched = custom_vmap(differentiated)
    batched.def_vmap(functools.partial(_batching_rule, config))
    return batched
