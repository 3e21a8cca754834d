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
from jax_fused_adamw._operands import (
    AMSGRAD_KINDS,
    CLIP_KINDS,
    HYPERPARAMETERS,
    VALUE_SHAPES,
    Buffers,
    Operands,
    Results,
    Scalars,
    UpdateConfig,
    call_in_parts,
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

# Leaves in one equation of the jaxpr. In calls of 256 the step of 1000 small leaves
# took 73.5 us and compiled in 4.8 s (H200, JAX 0.11.2); the CUDA kernel's leaf table
# holds 380 of them at its widest.
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
        _check_leaf(i, buffers)
    # As new parameters or as updates, `out` is shaped like the parameters.
    moments = [buffers.mu, buffers.nu, buffers.nu_max]
    if config.zero_moments:
        float32 = np.dtype(np.float32)
        like = [p.update(dtype=float32, weak_type=False) for p in buffers.params]
        moments = [like] * (config.num_result_kinds - 1)
    counters = [scalars.count, *scalars.skip_counters] if config.count_step else []
    return [*buffers.params, *(leaf for kind in moments for leaf in kind), *counters]


def _check_scalars(config: UpdateConfig, scalars: Scalars) -> None:
    int32, float32 = np.int32, np.float32
    dtypes = Scalars(
        int32, np.bool_, np.uint32, float32, float32, int32, float32, int32
    )
    for name, kind, dtype, value_shape in zip(
        Scalars._fields, listed(scalars), dtypes, VALUE_SHAPES, strict=True
    ):
        for aval in kind:
            shapes = [value_shape, (config.members, *value_shape)]
            if aval.dtype != dtype or aval.shape not in shapes:
                raise TypeError(f"fused_adamw: {name} cannot be {aval.str_short()}")


def _check_leaf(i: int, buffers: Buffers) -> None:
    param = buffers.params[i]
    for kind, leaves in zip(Buffers._fields, buffers, strict=True):
        if not leaves:
            continue
        allowed = LEAF_DTYPES if kind in ("params", "grads") else (jnp.float32,)
        if leaves[i].shape != param.shape or leaves[i].dtype not in allowed:
            raise TypeError(
                f"fused_adamw: leaf {i} of {kind}: expected shape {param.shape} and "
                f"one of {[np.dtype(d).name for d in allowed]}, got "
                f"{leaves[i].str_short()}"
            )


# --- Lowerings ------------------------------------------------------------------------


def aliases(config: UpdateConfig) -> dict[int, int]:
    """Operand index -> result index: all but gradients and what cannot change."""
    if not config.alias:
        return {}
    n, first = config.num_leaves, config.first_leaf
    kinds = {0: 0} if config.write_params else {}
    kinds |= {kind: kind - 1 for kind in range(2, config.num_operand_kinds)}
    pairs = {
        first + operand_kind * n + i: result_kind * n + i
        for operand_kind, result_kind in kinds.items()
        for i in range(n)
    }
    if config.count_step:
        counters = (0, config.num_scalars - 2, config.num_scalars - 1)
        first_result = config.num_result_kinds * n
        pairs |= {counter: first_result + i for i, counter in enumerate(counters)}
    return pairs


def attributes(config: UpdateConfig) -> dict[str, Any]:
    """What the native handler is told of the call, as ``cc/ffi/operands.h`` has it."""
    return {
        "analyze": np.bool_(config.analyze),
        "amsgrad": np.int64(AMSGRAD_KINDS.index(config.amsgrad)),
        "clip": np.int64(CLIP_KINDS.index(config.clip)),
        "count_step": np.bool_(config.count_step),
        "decays": np.array(config.decays, np.uint8),
        "maximize": np.bool_(config.maximize),
        "members": np.int64(1 if config.members is None else config.members),
        "nesterov": np.bool_(config.nesterov),
        "num_after": np.int64(config.num_after),
        "skip_nonfinite": np.bool_(config.skip_nonfinite),
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


@functools.cache
def _jitted_bind(config: UpdateConfig):
    return jax.jit(functools.partial(update_p.bind, config=config))


@update_p.def_impl
def _update_impl(*operands, config: UpdateConfig):
    # Under jax.disable_jit the jitted bind would come back here, for ever.
    with jax.disable_jit(False):
        return _jitted_bind(config)(*operands)


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

    def bind_without_params(*operands):
        return bind(*operands[: -config.num_leaves])

    partitioned = with_partitioning(
        bind_without_params,
        functools.partial(partition, update_p.bind, config),
        functools.partial(sharding_rule, config),
    )

    def with_params(*operands):
        return partitioned(*operands, *unflatten(config, operands).buffers.params)

    differentiated = jax.custom_jvp(unless_all_manual(bind, with_params))
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
