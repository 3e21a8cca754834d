"""The update as a JAX primitive.

In this order: shape rule, lowerings, differentiation, composition, and
:func:`fused_update`, which the rest of the package calls. Partitioning and batching
have modules of their own. The composition is

    custom_vmap(custom_jvp(custom_partitioning(primitive.bind)))

because a custom call without partitioning information makes XLA gather every
sharded operand, silently, and custom_partitioning by itself can neither be batched
nor differentiated.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_fused_adamw import _ffi
from jax_fused_adamw._batching import batching_rule
from jax_fused_adamw._eager import run_eagerly
from jax_fused_adamw._noise import UNCUT
from jax_fused_adamw._operands import (
    AMSGRAD_KINDS,
    CLIP_KINDS,
    HYPERPARAMETERS,
    Buffers,
    Operands,
    Results,
    Scalars,
    UpdateConfig,
    call_in_parts,
    field_shapes,
    flatten,
    flatten_results,
    listed,
    parts_of,
    unflatten,
    unflatten_results,
)
from jax_fused_adamw._partitioning import (
    partition,
    sharding_rule,
    unless_all_manual,
    with_partitioning,
)
from jax_fused_adamw._reference import reference_update

LEAF_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
LEAF_DTYPES_X64 = (*LEAF_DTYPES, jnp.float64)

# Leaves in one equation of the jaxpr. In calls of 256 the step of 1000 small leaves
# took 73.5 us and compiled in 4.8 s (H200, JAX 0.11.2); the CUDA kernel's leaf table
# holds 727 of them in place and 163 at its widest, which is then two launches.
_LEAVES_PER_EQUATION = 256

# Leaves in one custom call. XLA:CPU compiles n aliased buffers in about n^3 steps:
# 1000 leaves take over 60 s in one call and 1.0 s in calls of 64 (2 cores, JAX
# 0.10.0 to 0.12.0.1).
_LEAVES_PER_CALL = {"cpu": 64, "cuda": _LEAVES_PER_EQUATION}

update_p = Primitive("fused_adamw_update")
update_p.multiple_results = True


# --- Shape rule -----------------------------------------------------------------------


@update_p.def_abstract_eval
def update_shapes(*avals, config: UpdateConfig):
    """Results are their inputs' avals, which keeps explicit shardings."""
    scalars, _, buffers = unflatten(config, avals)
    _check_scalars(config, scalars)
    for i in range(config.num_leaves):
        _check_leaf(config, i, buffers)
    # As new parameters or as updates, `out` is shaped like the parameters.
    results = {"out": buffers.params, "copies": buffers.copies, "ema": buffers.ema}
    for kind in config.moment_kinds:
        results[kind] = getattr(buffers, kind)
        if config.zero_moments:
            (dtype,) = _allowed_dtypes(config, kind)
            results[kind] = [
                p.update(dtype=dtype, weak_type=False) for p in buffers.params
            ]
    counters = [scalars.count, *scalars.skip_counters] if config.count_step else []
    return [*(x for kind in config.result_kinds for x in results[kind]), *counters]


def _check_scalars(config: UpdateConfig, scalars: Scalars) -> None:
    int32, uint32, float32 = np.int32, np.uint32, np.float32
    dtypes = Scalars(
        count=int32,
        skip_update=np.bool_,
        hyper_bits=uint32,
        traced=float32,
        norms=float32,
        nonfinite=int32,
        gradient_scale=float32,
        noise=uint32,
        skip_counters=int32,
    )
    for name, kind, dtype, value_shape in zip(
        Scalars._fields, listed(scalars), dtypes, field_shapes(config), strict=True
    ):
        for aval in kind:
            shapes = [value_shape, (config.members, *value_shape)]
            if aval.dtype != dtype or aval.shape not in shapes:
                raise TypeError(f"fused_adamw: {name} cannot be {aval.str_short()}")


def _allowed_dtypes(config: UpdateConfig, kind: str) -> list[np.dtype]:
    float32, *low_precision, float64 = map(np.dtype, LEAF_DTYPES_X64)
    is_float64 = config.real == float64
    if is_float64 and kind == "grads":
        return [float32, *low_precision, float64]
    if is_float64 or kind == "params" and config.has_copies or kind == "ema":
        return [config.real]
    if kind == "copies":
        return low_precision
    if kind in config.moment_kinds:
        return [np.dtype(config.mu_dtype if kind == "mu" else config.nu_dtype)]
    return [float32, *low_precision]


def _check_leaf(config: UpdateConfig, i: int, buffers: Buffers) -> None:
    param = buffers.params[i]
    for kind in config.operand_kinds:
        leaf, allowed = getattr(buffers, kind)[i], _allowed_dtypes(config, kind)
        if leaf.shape != param.shape or leaf.dtype not in allowed:
            raise TypeError(
                f"fused_adamw: leaf {i} of {kind}: expected shape {param.shape} and "
                f"one of {[dtype.name for dtype in allowed]}, got {leaf.str_short()}"
            )


# --- Lowerings ------------------------------------------------------------------------


def aliases(config: UpdateConfig) -> dict[int, int]:
    """Operand index -> result index: all but gradients and what cannot change."""
    if not config.alias:
        return {}
    n, first = config.num_leaves, config.first_leaf
    pairs: dict[int, int] = {}
    for place, kind in enumerate(config.operand_kinds):
        if kind == "params" and config.write_params:
            kind = "out"
        if kind in config.result_kinds:
            result = config.result_kinds.index(kind)
            pairs |= {first + place * n + i: result * n + i for i in range(n)}
    if config.count_step:
        counters = (0, config.num_scalars - 2, config.num_scalars - 1)
        pairs |= {x: config.num_leaf_results + i for i, x in enumerate(counters)}
    return pairs


def attributes(config: UpdateConfig) -> dict[str, Any]:
    """What the native handler is told of the call, as ``cc/ffi/operands.h`` has it."""
    strides = config.shard_strides or [UNCUT] * config.num_leaves
    optional = {}
    if config.lr_scales:
        optional["lr_scales"] = np.array(config.lr_scales, np.float64)
    return optional | {
        "analyze": np.bool_(config.analyze),
        "amsgrad": np.int64(AMSGRAD_KINDS.index(config.amsgrad)),
        "clip": np.int64(CLIP_KINDS.index(config.clip)),
        "count_step": np.bool_(config.count_step),
        "decays": np.array(config.decays, np.uint8),
        "has_copies": np.bool_(config.has_copies),
        "has_ema": np.bool_(config.has_ema),
        "leaf_ids": np.array(config.leaf_ids or [0] * config.num_leaves, np.int64),
        "maximize": np.bool_(config.maximize),
        "members": np.int64(1 if config.members is None else config.members),
        "nesterov": np.bool_(config.nesterov),
        "num_after": np.int64(config.num_after),
        "shard_strides": np.array(strides, np.int64).reshape(-1),
        "skip_nonfinite": np.bool_(config.skip_nonfinite),
        "stochastic_moments": np.bool_(config.stochastic_moments),
        "stochastic_params": np.bool_(config.stochastic_params),
        "traced": np.array([h in config.traced for h in HYPERPARAMETERS], np.uint8),
        "write_params": np.bool_(config.write_params),
        "zero_moments": np.bool_(config.zero_moments),
    }


def _update_native_lowering(platform: str, ctx, *operands, config: UpdateConfig):
    _ffi.require_module(platform, ctx)
    limit = _LEAVES_PER_CALL[platform]
    if config.num_leaves > limit:
        split = mlir.lower_fun(
            functools.partial(_update_in_calls, limit), multiple_results=True
        )
        return split(ctx, *operands, config=config)
    call = jax.ffi.ffi_lowering(
        _ffi.UPDATE_TARGET, operand_output_aliases=aliases(config)
    )
    return call(ctx, *operands, **attributes(config))


def _update_in_calls(leaves_per_call: int, *operands, config: UpdateConfig):
    parts = parts_of(config.num_leaves, leaves_per_call)
    return flatten_results(
        call_in_parts(_bind, parts, config, unflatten(config, operands))
    )


def _bind(config: UpdateConfig, operands: Operands) -> Results:
    return unflatten_results(config, update_p.bind(*flatten(operands), config=config))


def _update_reference(*operands, config: UpdateConfig):
    scalars, _, buffers = unflatten(config, operands)
    return flatten_results(reference_update(config, scalars, buffers))


run_eagerly(update_p)

for _platform in ("cpu", "cuda"):
    mlir.register_lowering(
        update_p,
        functools.partial(_update_native_lowering, _platform),
        platform=_platform,
    )
# Every other platform. On cpu and cuda a missing module is an error, never this.
mlir.register_lowering(
    update_p, mlir.lower_fun(_update_reference, multiple_results=True)
)


# --- Differentiation ------------------------------------------------------------------


def refuse_derivative(primals, tangents, **params):
    raise TypeError(
        "fused_adamw: the fused update cannot be differentiated. Take gradients of "
        "the loss, not of the optimizer step; to differentiate through a step "
        '(meta-learning), use fused_adamw(..., implementation="xla") or optax.adamw.'
    )


# --- Composition ----------------------------------------------------------------------


@functools.cache
def _update_call(config: UpdateConfig):
    """Flat operands -> flat results, with every rule above attached."""

    def bind(*operands):
        return tuple(update_p.bind(*operands, config=config))

    def bind_without_places(*operands):
        return bind(*operands[: config.first_leaf + config.num_leaf_operands])

    partitioned = with_partitioning(
        bind_without_places,
        functools.partial(partition, update_p.bind, config),
        functools.partial(sharding_rule, config),
    )

    def with_places(*operands):
        buffers = unflatten(config, operands).buffers
        return partitioned(*operands, *buffers.params, *buffers.copies)

    differentiated = jax.custom_jvp(unless_all_manual(bind, with_places))
    differentiated.defjvp(refuse_derivative)
    batched = custom_vmap(differentiated)
    batched.def_vmap(functools.partial(batching_rule, _update_call, config))
    return batched


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def fused_update(
    config: UpdateConfig, implementation: str, operands: Operands
) -> Results:
    """One optimizer step over all leaves.

    Jitted, because custom_partitioning called eagerly replicates its operands.

    Args:
      config: compile-time options; ``config.decays`` has one entry a leaf.
      implementation: ``"ffi"`` (native on cpu and cuda) or ``"xla"`` (plain JAX).
      operands: scalars as ``_hyperparams`` encodes them, and checked leaves
        (``_checks``).

    Returns:
      Results in the order of ``buffers``.
    """
    if implementation == "xla" or config.num_leaves == 0:
        return reference_update(config, operands.scalars, operands.buffers)
    parts = parts_of(config.num_leaves, _LEAVES_PER_EQUATION)
    return call_in_parts(_partitioned_call, parts, config, operands)


def _partitioned_call(config: UpdateConfig, operands: Operands) -> Results:
    return unflatten_results(config, _update_call(config)(*flatten(operands)))
