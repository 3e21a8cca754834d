"""The step of a small tree that clips or skips: statistics and update in one call.

A kernel call that waits for another costs a small tree more than its arithmetic. On one
device the kernels of ``analyze_gradient`` and of the update are therefore one FFI call,
on a GPU one launch. Wherever there is more than one device or member, the call takes
itself apart into the two, which know how to partition and to batch.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from jax_fused_adamw import _ffi
from jax_fused_adamw._eager import run_eagerly
from jax_fused_adamw._operands import (
    Buffers,
    Operands,
    Results,
    Scalars,
    UpdateConfig,
    flatten,
    flatten_results,
    unflatten,
    unflatten_results,
)
from jax_fused_adamw._partitioning import reveal_devices
from jax_fused_adamw._primitives import (
    aliases,
    attributes,
    fused_update,
    refuse_derivative,
    update_shapes,
)
from jax_fused_adamw._stats import Analysis, GradReport, analysis_of
from jax_fused_adamw._stats_plan import ROW_ELEMENTS
from jax_fused_adamw._stats_primitives import TILE_ELEMENTS, num_rows

# What one launch takes at most, about: more leaves fill its table, and more elements
# more blocks than run at the same time. Beyond, launches are no longer what costs.
_MAX_LEAVES = 64
_MAX_ELEMENTS = 2**20

analyzed_update_p = Primitive("fused_adamw_analyzed_update")
analyzed_update_p.multiple_results = True


def suits_one_call(config: UpdateConfig, buffers: Buffers) -> bool:
    """Whether the tree is small, all its state float32, and on no mesh of devices.

    That is as far as types tell; where they do not, the lowering knows.
    """
    leaves = buffers.params
    moment_dtypes = {config.mu_dtype, config.nu_dtype}
    return (
        0 < len(leaves) <= _MAX_LEAVES
        and moment_dtypes == {"float32"}
        and all(x.dtype != jnp.float64 for x in leaves)
        and not (buffers.copies or config.has_ema or config.has_noise)
        and sum(math.prod(jnp.shape(leaf)) for leaf in leaves) <= _MAX_ELEMENTS
        and jax.sharding.get_abstract_mesh().empty
        and all(_is_on_one_device(x) for kind in buffers for x in kind)
    )


def _is_on_one_device(x) -> bool:
    mesh = jax.typeof(x).sharding.mesh
    return mesh.empty or mesh.size == 1 and AxisType.Explicit not in mesh.axis_types


@functools.partial(jax.jit, static_argnames="config")
def analyzed_update(
    config: UpdateConfig, scale: jax.Array, scalars: Scalars, buffers: Buffers
) -> tuple[Results, Analysis]:
    """One step over all leaves, by the statistics of its own gradients.

    Args:
      config: of the update, with ``clip`` or ``skip_nonfinite``.
      scale: float32[]: of the gradients.
      scalars: without what the update reads of a report.
      buffers: checked leaves that :func:`suits_one_call` accepts.
    """
    config = dataclasses.replace(config, analyze=True)
    scalars = scalars._replace(gradient_scale=[reveal_devices(scale)])
    operands = Operands(scalars, [], buffers)
    flat = analyzed_update_p.bind(*flatten(operands), config=config)
    results = unflatten_results(config, flat)
    norm, scaled_norm, max_abs, nonfinite, *_ = results.report
    report = GradReport(norm, max_abs, nonfinite)
    return results._replace(report=()), Analysis(report, scaled_norm)


def _report_shapes(params: Sequence) -> list[ShapedArray]:
    """Of norm, scaled norm, max_abs, nonfinite, then of the merged row and of rows."""
    rows = sum(num_rows(math.prod(x.shape), TILE_ELEMENTS) for x in params)
    return [
        *(ShapedArray((), dtype) for dtype in 3 * (jnp.float32,)),
        ShapedArray((), jnp.int32),
        ShapedArray((1, ROW_ELEMENTS), jnp.uint32),
        ShapedArray((rows, ROW_ELEMENTS), jnp.uint32),
    ]


@analyzed_update_p.def_abstract_eval
def _shape_rule(*avals, config: UpdateConfig):
    params = unflatten(config, avals).buffers.params
    return [*update_shapes(*avals, config=config), *_report_shapes(params)]


def _in_two_calls(*operands, config: UpdateConfig):
    """The same as an analysis and an update, for any platform and placement."""
    scalars, _, buffers = unflatten(config, operands)
    (gradient_scale,) = scalars.gradient_scale
    analysis = analysis_of(buffers.grads, gradient_scale, None, "ffi")
    plain = dataclasses.replace(config, analyze=False)
    scalars = analysis.inform(scalars._replace(gradient_scale=[]), plain)
    results = fused_update(plain, "ffi", Operands(scalars, [], buffers))
    report = analysis.report
    rows = [jnp.zeros(x.shape, x.dtype) for x in _report_shapes(buffers.params)[4:]]
    values = (report.norm, analysis.scaled_norm, report.max_abs, report.nonfinite)
    return flatten_results(results._replace(report=[*values, *rows]))


_lower_two_calls = mlir.lower_fun(_in_two_calls, multiple_results=True)


def _native_lowering(platform: str, ctx, *operands, config: UpdateConfig):
    _ffi.require_module(platform, ctx)
    if getattr(ctx.module_context.axis_context, "num_devices", None) != 1:
        return _lower_two_calls(ctx, *operands, config=config)
    call = jax.ffi.ffi_lowering(
        _ffi.UPDATE_TARGET, operand_output_aliases=aliases(config)
    )
    return call(ctx, *operands, **attributes(config))


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(
        analyzed_update_p,
        functools.partial(_native_lowering, _platform),
        platform=_platform,
    )
mlir.register_lowering(analyzed_update_p, _lower_two_calls)


def _batching_rule(args, axes, *, config: UpdateConfig):
    """Counters and report stay one for all members where nothing tells these apart."""
    in_two_calls = functools.partial(_in_two_calls, config=config)
    results = unflatten_results(config, jax.vmap(in_two_calls, in_axes=axes)(*args))
    scalars, _, buffers = unflatten(config, axes)
    analyzed = (*buffers.grads, *scalars.gradient_scale)
    reports_differ = any(axis is not None for axis in analyzed)
    counted = (scalars.count, scalars.skip_update, *scalars.skip_counters)
    counters_differ = any(axis is not None for axis in counted)
    counters_differ |= config.skip_nonfinite and reports_differ
    if 0 in (x.shape[axis] for x, axis in zip(args, axes) if axis is not None):
        reports_differ = counters_differ = True  # there is no member to ask
    if not reports_differ:
        results = results._replace(report=[x[0] for x in results.report])
    if not counters_differ:
        results = results._replace(counters=[x[0] for x in results.counters])
    flat = flatten_results(results)
    num_counters, num_report = len(results.counters), len(results.report)
    return flat, (
        *(0 for _ in flat[num_counters + num_report :]),
        *(0 if counters_differ else None for _ in range(num_counters)),
        *(0 if reports_differ else None for _ in range(num_report)),
    )


batching.primitive_batchers[analyzed_update_p] = _batching_rule
ad.primitive_jvps[analyzed_update_p] = refuse_derivative
run_eagerly(analyzed_update_p)
