"""The two stages of gradient statistics as JAX primitives.

``analyze_gradient`` makes a row of three words for each chunk of each gradient, and
reports of the rows; ``merge_gradient_stats`` makes reports of rows that several devices
have made. What a row is, and in which order everything is added, is written in
``cc/core/stats.h``.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_fused_adamw import _ffi
from jax_fused_adamw._eager import run_eagerly
from jax_fused_adamw._reference import gradient_divisor
from jax_fused_adamw._stats_plan import MAX_ROWS, ROW_ELEMENTS, StatsPlan

TILE_ELEMENTS = 4096  # jfa::kStatsTileElements

_INFINITY_BITS = 0x7F800000
_INT32_MAX = 2**31 - 1


class Segment(NamedTuple):
    """Rows that become one report."""

    first_row: int
    num_rows: int


class Reports(NamedTuple):
    """One value for each segment, after the members' axis if there is one."""

    norm: Any  # float32
    scaled_norm: Any  # float32: the norm times 2^-64, which no norm overflows
    max_abs: Any  # float32
    nonfinite: Any  # int32
    rows: Any  # uint32[..., 3]


def chunk_elements(leaf_sizes: Sequence[int]) -> int:
    """Elements of a row: a tile, or more where that makes too many rows."""
    elements = TILE_ELEMENTS
    while sum(num_rows(size, elements) for size in leaf_sizes) > MAX_ROWS:
        elements *= 2
    return elements


def num_rows(leaf_size: int, chunk: int) -> int:
    """Rows of a leaf (of one member)."""
    return -(-leaf_size // chunk)


def member_sizes(grads: Sequence[Any], members: int | None) -> list[int]:
    """Elements of each leaf, or of one of its members."""
    axes = 0 if members is None else 1
    return [math.prod(grad.shape[axes:]) for grad in grads]


def segments_of(
    grads: Sequence[Any], members: int | None, chunk: int, per_leaf: bool
) -> tuple[Segment, ...]:
    """All rows, then with ``per_leaf`` those of each leaf."""
    segments, first = [], 0
    for size in member_sizes(grads, members):
        segments.append(Segment(first, num_rows(size, chunk)))
        first += segments[-1].num_rows
    return (Segment(0, first), *(segments if per_leaf else ()))


def analyze_gradient(
    gradient_scale: jax.Array,
    grads: Sequence[jax.Array],
    members: int | None,
    per_leaf: bool,
    native: bool,
) -> Reports:
    """A report for all leaves, and with ``per_leaf`` for each.

    Args:
      gradient_scale: float32, a scalar or one for each member.
      grads: leaves; with ``members``, each with a leading axis of that size.
      members: under vmap, how many.
      per_leaf: whether each leaf has a report.
      native: the platform's kernel; else plain JAX.
    """
    chunk = chunk_elements(member_sizes(grads, members))
    analyze = analyze_p.bind if native else reference_analyze
    results = analyze(
        gradient_scale, *grads, members=members, chunk=chunk, per_leaf=per_leaf
    )
    return Reports(*results[: len(Reports._fields)])


def merge_gradient_stats(
    rows: jax.Array, segments: Sequence[Segment], members: int | None, native: bool
) -> Reports:
    """One report for each segment of rows."""
    merge = merge_p.bind if native else reference_merge
    *reports, _ = merge(rows, segments=tuple(segments), members=members)
    return Reports(*reports)


def _leading(members: int | None) -> tuple[int, ...]:
    return () if members is None else (members,)


# --- analyze_gradient -----------------------------------------------------------------

analyze_p = Primitive("analyze_gradient")
analyze_p.multiple_results = True


@analyze_p.def_abstract_eval
def _analyze_shape_rule(gradient_scale, *grads, members, chunk, per_leaf):
    segments = segments_of(grads, members, chunk, per_leaf)
    rows = (*_leading(members), segments[0].num_rows, ROW_ELEMENTS)
    avals = [*_report_avals(segments, members), ShapedArray(rows, jnp.uint32)]
    return _with_members_of([*grads, gradient_scale], members, avals)


def _with_members_of(operands, members: int | None, avals) -> list[ShapedArray]:
    """The avals, their members where those of the operands lie: on an explicit mesh,
    operations on the results are checked against that."""
    meshes = [x.sharding.mesh for x in operands if not x.sharding.mesh.empty]
    if members is None or not meshes:
        return avals
    specs = [x.sharding.spec[0] for x in operands if x.ndim and x.sharding.spec]
    member_spec = next((spec for spec in specs if spec is not None), None)

    def place(aval: ShapedArray) -> ShapedArray:
        spec = PartitionSpec(member_spec, *(None,) * (aval.ndim - 1))
        return aval.update(sharding=NamedSharding(meshes[0], spec))

    return [place(aval) for aval in avals]


def _analyze_native_lowering(platform: str, ctx, *operands, members, chunk, per_leaf):
    _ffi.require_module(platform, ctx)
    segments = segments_of(ctx.avals_in[1:], members, chunk, per_leaf)
    return jax.ffi.ffi_lowering(_ffi.ANALYZE_TARGET)(
        ctx,
        *operands,
        chunk_elements=np.int64(chunk),
        **_segment_attributes(segments, members),
    )


def reference_analyze(gradient_scale, *grads, members, chunk, per_leaf):
    """The same in plain JAX: all of a leaf in its first row, its others zero."""
    leading = _leading(members)
    divisor = gradient_divisor(gradient_scale)
    parts = [
        _reference_row(grad, divisor, len(leading), num_rows(size, chunk))
        for grad, size in zip(grads, member_sizes(grads, members), strict=True)
        if size
    ]
    empty = jnp.zeros((*leading, 0, ROW_ELEMENTS), jnp.uint32)
    rows = jnp.concatenate([empty, *parts], axis=-2)
    segments = segments_of(grads, members, chunk, per_leaf)
    return [*reference_merge(rows, segments=segments, members=members), rows]


def _reference_row(grad, divisor, leading: int, rows: int):
    # Not flattened: that would gather what is cut along any dimension but the first.
    axes = tuple(range(leading, grad.ndim))

    def spread(x):
        return jnp.expand_dims(x, axes) if x.ndim else x

    x = stats_element(grad) / spread(divisor)
    bits = lax.bitcast_convert_type(x, jnp.uint32) & 0x7FFFFFFF
    max_bits = bits.max(axis=axes)
    nonfinite = (bits >= _INFINITY_BITS).sum(axis=axes, dtype=jnp.uint32)
    scaled = x * spread(inverse_scale(max_bits))
    total = jnp.where(max_bits < _INFINITY_BITS, jnp.square(scaled).sum(axis=axes), 0.0)
    words = [lax.bitcast_convert_type(total, jnp.uint32), max_bits, nonfinite]
    row = jnp.stack(words, axis=-1)[..., None, :]
    return jnp.pad(row, [(0, 0)] * (row.ndim - 2) + [(0, rows - 1), (0, 0)])


def stats_element(grad):
    """Elements in float32, which is all that a norm needs; what is finite stays so."""
    if grad.dtype == jnp.float64:
        largest = float(jnp.finfo(jnp.float32).max)
        within = jnp.clip(grad, -largest, largest)
        grad = jnp.where(jnp.isfinite(grad), within, grad)
    return grad.astype(jnp.float32)


def _exponent(max_bits):
    return jnp.clip(max_bits >> 23, 1, 253)


def inverse_scale(max_bits):
    """The power of two that a row's elements were multiplied with."""
    return lax.bitcast_convert_type((254 - _exponent(max_bits)) << 23, jnp.float32)


# --- merge_gradient_stats -------------------------------------------------------------

merge_p = Primitive("merge_gradient_stats")
merge_p.multiple_results = True


@merge_p.def_abstract_eval
def _merge_shape_rule(rows, *, segments, members):
    return _with_members_of([rows], members, _report_avals(segments, members))


def _report_avals(
    segments: Sequence[Segment], members: int | None
) -> list[ShapedArray]:
    """Of :class:`Reports`, and of the rows between first rows and reports."""
    reports = (*_leading(members), len(segments))
    plans = [StatsPlan(segment.num_rows) for segment in segments if segment.num_rows]
    scratch = sum(sum(plan.levels) for plan in plans)
    return [
        *(ShapedArray(reports, dtype) for dtype in 3 * (jnp.float32,)),
        ShapedArray(reports, jnp.int32),
        ShapedArray((*reports, ROW_ELEMENTS), jnp.uint32),
        ShapedArray((*_leading(members), scratch, ROW_ELEMENTS), jnp.uint32),
    ]


def _segment_attributes(
    segments: Sequence[Segment], members: int | None
) -> dict[str, Any]:
    return {
        "members": np.int64(1 if members is None else members),
        "first_rows": np.array([first for first, _ in segments], np.int64),
        "num_rows": np.array([count for _, count in segments], np.int64),
    }


def _merge_native_lowering(platform: str, ctx, rows, *, segments, members):
    _ffi.require_module(platform, ctx)
    return jax.ffi.ffi_lowering(_ffi.MERGE_TARGET)(
        ctx, rows, **_segment_attributes(segments, members)
    )


def reference_merge(rows, *, segments, members):
    """The same in plain JAX and float32: a few ulp off the kernels."""
    reports = [
        _reference_report(rows[..., first : first + count, :])
        for first, count in segments
    ]
    stacked = [
        jnp.stack(column, axis=len(_leading(members))) for column in zip(*reports)
    ]
    return [*stacked, jnp.zeros((*_leading(members), 0, ROW_ELEMENTS), jnp.uint32)]


def _reference_report(rows):
    if rows.shape[-2] == 0:
        rows = jnp.zeros((*rows.shape[:-2], 1, ROW_ELEMENTS), jnp.uint32)
    sums = lax.bitcast_convert_type(rows[..., 0], jnp.float32)
    max_bits = rows[..., 1].max(axis=-1)
    # Two factors, since their product may leave float32's range. A small one vanishes.
    ratio = inverse_scale(max_bits)[..., None] / inverse_scale(rows[..., 1])
    total = (sums * ratio * ratio).sum(axis=-1)
    counts = rows[..., 2]
    # Saturates: float32 cannot miss a sum that leaves int32.
    is_large = counts.astype(jnp.float32).sum(axis=-1) >= _INT32_MAX
    nonfinite = jnp.where(is_large, _INT32_MAX, counts.sum(axis=-1, dtype=jnp.uint32))
    is_finite = max_bits < _INFINITY_BITS
    bad = jnp.where(max_bits > _INFINITY_BITS, jnp.nan, jnp.inf)
    root = jnp.sqrt(total) / inverse_scale(max_bits)
    norm = jnp.minimum(root, jnp.finfo(jnp.float32).max)
    scaled = jnp.sqrt(total) * jnp.float32(2.0**-64) / inverse_scale(max_bits)
    max_abs = lax.bitcast_convert_type(max_bits, jnp.float32)
    total = jnp.where(is_finite, total, 0.0)
    row = [
        lax.bitcast_convert_type(total, jnp.uint32),
        max_bits,
        nonfinite.astype(jnp.uint32),
    ]
    return (
        jnp.where(is_finite, norm, bad),
        jnp.where(is_finite, scaled, bad),
        jnp.where(is_finite, max_abs, bad),
        nonfinite.astype(jnp.int32),
        jnp.stack(row, axis=-1),
    )


def _merge_batching_rule(args, dims, *, segments, members):
    """An axis more of members; what a shard_map inside a vmap needs."""
    (rows,), (axis,) = args, dims
    rows = jnp.moveaxis(rows, axis, 0)
    size, leading = rows.shape[0], _leading(members)
    flat = rows.reshape(-1, *rows.shape[1 + len(leading) :])
    results = merge_p.bind(flat, segments=segments, members=flat.shape[0])
    results = [x.reshape(size, *leading, *x.shape[1:]) for x in results]
    return results, (0,) * len(results)


batching.primitive_batchers[merge_p] = _merge_batching_rule


# --- Registration ---------------------------------------------------------------------


def _register(primitive, native_lowering, reference) -> None:
    run_eagerly(primitive)
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(
            primitive, functools.partial(native_lowering, platform), platform=platform
        )
    # Every other platform. On cpu and cuda a missing module is an error, never this.
    mlir.register_lowering(primitive, mlir.lower_fun(reference, multiple_results=True))


_register(analyze_p, _analyze_native_lowering, reference_analyze)
_register(merge_p, _merge_native_lowering, reference_merge)
