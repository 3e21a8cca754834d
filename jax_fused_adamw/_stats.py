"""Statistics of gradients, computed and kept on the device.

One pass over the gradients for the whole tree, in the composition of
:mod:`._primitives`. On a mesh every device analyses what it holds; the rows of the
devices, three words each, are gathered with one all-reduce for each set of mesh axes
and merged in the order of the devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule
from jax.sharding import NamedSharding, PartitionSpec

from jax_fused_adamw import _checks
from jax_fused_adamw._batching import merge_leaf, merge_scalar
from jax_fused_adamw._export import saved_by_name
from jax_fused_adamw._hyperparams import check_gradient_scale, scale_operand
from jax_fused_adamw._operands import Scalars, UpdateConfig
from jax_fused_adamw._partitioning import (
    is_all_manual,
    manual_axes,
    unless_all_manual,
    with_partitioning,
)
from jax_fused_adamw._reference import gradient_divisor
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

_INT32_MAX = 2**31 - 1


@saved_by_name
class GradReport(NamedTuple):
    """What :func:`grad_stats` found, on the device.

    A tree with a NaN has ``norm`` and ``max_abs`` NaN, one with an infinity but no NaN
    has them infinite. A finite tree whose norm exceeds float32 reports the largest
    float32. Of no elements all three are zero.

    Attributes:
      norm: float32[], the global L2 norm.
      max_abs: float32[], the largest magnitude.
      nonfinite: int32[], the number of NaN and infinite elements, saturating.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> report = jfa.grad_stats({"w": jnp.array([3.0, jnp.inf])})
      >>> print(*report)
      inf inf 1
    """

    norm: jax.Array
    max_abs: jax.Array
    nonfinite: jax.Array


class Analysis(NamedTuple):
    """A report, and its norm times 2^-64, which float32 always holds."""

    report: GradReport
    scaled_norm: jax.Array

    def inform(self, scalars: Scalars, config: UpdateConfig) -> Scalars:
        """The scalars of an update that clips or skips by this analysis."""
        norms = [self.report.norm, self.scaled_norm] if config.clip == "norm" else []
        nonfinite = [self.report.nonfinite] if config.skip_nonfinite else []
        return scalars._replace(norms=norms, nonfinite=nonfinite)


def grad_stats(
    grads: Any,
    gradient_scale: Any = 1.0,
    *,
    per_leaf: bool = False,
    implementation: str | None = None,
) -> GradReport | tuple[GradReport, GradReport]:
    r"""Global norm, largest magnitude and non-finite count of gradients, in one pass.

    Nothing is read back by the host. With :math:`g = \tilde g / s`, where
    :math:`\tilde g` are the elements of ``grads`` and :math:`s` is
    ``gradient_scale``:

    .. math::

      \text{norm} = \sqrt{\textstyle\sum g^2}, \quad
      \text{max\_abs} = \max |g|, \quad
      \text{nonfinite} = |\{g : g \text{ is NaN or infinite}\}|

    Squares are taken relative to a power of two near the largest element, so they
    neither overflow nor vanish, and are added in one fixed order: CPU and CUDA give the
    same bits, however leaves are grouped into launches. The norm is within a few ulp
    of the exact one.

    Args:
      grads: a tree of float32, bfloat16, float16 or, with ``jax_enable_x64``, float64
        leaves of any shape; ``None`` and ``optax.MaskedNode`` are not counted. float64
        elements are rounded to float32 first, finite ones beyond it to the largest
        float32, and divided then. Never written.
      gradient_scale: the loss scale that the gradients carry. One that is not positive
        and finite makes every element count as NaN.
      per_leaf: also return the statistics of each leaf.
      implementation: as of :func:`fused_adamw`; ``"xla"`` can be differentiated.

    Returns:
      A :class:`GradReport` of scalars; with ``per_leaf`` a pair: that, and one whose
      fields are vectors with an element for each leaf, in the order of
      ``jax.tree.leaves``.

      On sharded gradients the result is that of the whole arrays. Inside ``shard_map``
      a leaf that varies over mesh axes counts as one array whose shards lie along
      them: sum gradients of a batch over its axes first. Where it is manual over some
      axes of the mesh only, plain JAX does the work, within a few ulp. With
      ``check_vma=False`` JAX does not know what varies, and the result is that of what
      each device holds: reduce it yourself (of leaves that are all cut over the same
      axes, ``sqrt(psum(norm**2))``, ``pmax(max_abs)``, ``psum(nonfinite)`` over them)
      before it is passed on as ``report=``.

    Raises:
      TypeError: a leaf of another dtype, named by its path, or a sparse one; a
        ``gradient_scale`` that is not a number.
      ValueError: a ``gradient_scale`` that is not a scalar.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> report = jfa.grad_stats({"w": jnp.array([3.0, 4.0]), "b": jnp.zeros(2)})
      >>> print(report.norm, report.max_abs, report.nonfinite)
      5.0 4.0 0

      Skip a step whose largest gradient is out of the ordinary:

      >>> grads, limit = {"w": jnp.array([3.0, 400.0])}, 100.0
      >>> report = jfa.grad_stats(grads)
      >>> skip = (report.nonfinite > 0) | (report.max_abs > limit)
      >>> tx, params = jfa.fused_adamw(0.1), {"w": jnp.ones(2)}
      >>> params, state = jfa.step(tx, grads, tx.init(params), params, skip_update=skip)
      >>> print(params["w"], state.skipped)
      [1. 1.] 1

    .. seealso:: ``fused_adamw(max_grad_norm=..., skip_nonfinite=...)``, which does this
      and the step together; :class:`StatsPlan`, how rows are merged.
    """
    with _checks.speaking_as("grad_stats"):
        _checks.check_grad_leaves(grads)
        _checks.check_memory({"grads": grads})
        check_gradient_scale(gradient_scale)
        implementation = _checks.choose(
            "implementation", implementation, _checks.IMPLEMENTATIONS
        )
        reports = _analyze(grads, gradient_scale, implementation, per_leaf)
    total = GradReport(*(x[0] for x in _of_report(reports)))
    if not per_leaf:
        return total
    return total, GradReport(*(x[1:] for x in _of_report(reports)))


def no_report() -> GradReport:
    """What a state holds before the first step."""
    dtypes = GradReport(jnp.float32, jnp.float32, jnp.int32)
    return GradReport(*(jnp.zeros((), dtype) for dtype in dtypes))


def analysis_of(
    grads: Any,
    gradient_scale: Any,
    report: GradReport | Analysis | None,
    implementation: str,
) -> Analysis:
    """The analysis of checked gradients for a step, or what a caller's report says.

    A report's norm ends at the largest float32; an analysis, which :mod:`._accumulate`
    has made of these very gradients and this scale, knows it beyond.
    """
    if isinstance(report, Analysis):
        return report
    if report is not None:
        check_report(report)
        values = zip(report, no_report(), strict=True)
        report = GradReport(*(jnp.asarray(x, like.dtype) for x, like in values))
        # It may be of another scale: one that is none makes this step non-finite.
        is_scale = jnp.isfinite(gradient_divisor(scale_operand(gradient_scale)))
        nonfinite = jnp.where(is_scale, report.nonfinite, _INT32_MAX)
        report = report._replace(nonfinite=nonfinite)
        return Analysis(report, report.norm * jnp.float32(2.0**-64))
    reports = _analyze(grads, gradient_scale, implementation, per_leaf=False)
    report = GradReport(*(x[0] for x in _of_report(reports)))
    return Analysis(report, reports.scaled_norm[0])


def check_report(report: Any) -> None:
    """Raises TypeError unless ``report`` is what :func:`grad_stats` returns."""
    if isinstance(report, Analysis):
        return
    advice = "pass what jfa.grad_stats(grads) returned"
    if not isinstance(report, GradReport):
        raise TypeError(
            f"fused_adamw: report must be a GradReport, got {type(report).__name__}; "
            f"{advice}"
        )
    for name, value, expected in zip(report._fields, report, no_report(), strict=True):
        if jnp.shape(value) != () or jnp.asarray(value).dtype != expected.dtype:
            raise TypeError(
                f"fused_adamw: report.{name} must be a {expected.dtype} scalar, got "
                f"{value!r}; {advice}"
            )


def _of_report(reports: Reports) -> tuple[jax.Array, jax.Array, jax.Array]:
    return reports.norm, reports.max_abs, reports.nonfinite


def _analyze(
    grads: Any, gradient_scale: Any, implementation: str, per_leaf: bool
) -> Reports:
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
