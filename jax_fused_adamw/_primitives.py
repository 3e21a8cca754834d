"""The update as a JAX primitive.

In this order: shape rule, lowerings, partitioning, batching, differentiation, and
:func:`fused_update`, which the rest of the package calls. The composition is

    custom_vmap(custom_jvp(custom_partitioning(primitive.bind)))

because a custom call without partitioning information makes XLA gather every
sharded operand, silently, and custom_partitioning by itself can neither be batched
nor differentiated.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_fused_adamw import _ffi
from jax_fused_adamw._operands import (
    AMSGRAD_KINDS,
    HYPERPARAMETERS,
    VALUE_SHAPES,
    Buffers,
    Results,
    Scalars,
    UpdateConfig,
    chunks,
    concatenate,
    flatten,
    unflatten,
    unflatten_results,
)
from jax_fused_adamw._reference import reference_update

LEAF_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# Leaves in one equation of the jaxpr: the CUDA kernel's pointer table holds 606 with
# AMSGrad, and calls of 256 compile in 2.6 s for 1000 leaves (H200, JAX 0.11.2).
_LEAVES_PER_EQUATION = 256

# Leaves in one custom call. XLA:CPU compiles n aliased buffers in about n^3 steps:
# 1000 leaves take over 60 s in one call and 1.0 s in calls of 64 (2 cores, JAX
# 0.10.0 to 0.12.0.1).
_LEAVES_PER_CALL = {"cpu": 64, "cuda": _LEAVES_PER_EQUATION}

update_p = Primitive("fused_adamw_update")
update_p.multiple_results = True


# --- Shape rule -----------------------------------------------------------------------


@update_p.def_abstract_eval
def _update_shape_rule(*avals, config: UpdateConfig):
    """Results are their inputs' avals, which keeps explicit shardings."""
    scalars, buffers = unflatten(config, avals)
    _check_scalars(config, scalars)
    for i in range(config.num_leaves):
        _check_leaf(i, buffers)
    # As new parameters or as updates, `out` is shaped like the parameters.
    return [*buffers.params, *buffers.mu, *buffers.nu, *buffers.nu_max]


def _check_scalars(config: UpdateConfig, scalars: Scalars) -> None:
    dtypes = Scalars(np.int32, np.bool_, np.uint32, np.float32)
    for name, kind, dtype, value_shape in zip(
        Scalars._fields, _listed(scalars), dtypes, VALUE_SHAPES, strict=True
    ):
        for aval in kind:
            shapes = [value_shape, (config.members, *value_shape)]
            if aval.dtype != dtype or aval.shape not in shapes:
                raise TypeError(f"fused_adamw: {name} cannot be {aval.str_short()}")


def _listed(scalars: Scalars) -> Scalars:
    """Every field as a list of arrays."""
    return Scalars(*([x] for x in scalars[:3]), scalars.traced)


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


def _aliases(config: UpdateConfig) -> dict[int, int]:
    """Operand index -> result index: params, mu, nu, nu_max; never a gradient."""
    if not config.alias:
        return {}
    n, first = config.num_leaves, config.num_scalars
    kinds = {0: 0} if config.write_params else {}
    kinds |= {2: 1, 3: 2, **({4: 3} if config.has_nu_max else {})}
    return {
        first + operand_kind * n + i: result_kind * n + i
        for operand_kind, result_kind in kinds.items()
        for i in range(n)
    }


def _update_native_lowering(platform: str, ctx, *operands, config: UpdateConfig):
    _ffi.require_module(platform)
    limit = _LEAVES_PER_CALL[platform]
    if config.num_leaves > limit:
        split = mlir.lower_fun(
            functools.partial(_update_in_calls, limit), multiple_results=True
        )
        return split(ctx, *operands, config=config)
    call = jax.ffi.ffi_lowering(
        _ffi.UPDATE_TARGET, operand_output_aliases=_aliases(config)
    )
    return call(
        ctx,
        *operands,
        amsgrad=np.int64(AMSGRAD_KINDS.index(config.amsgrad)),
        decays=np.array(config.decays, np.uint8),
        maximize=np.bool_(config.maximize),
        members=np.int64(1 if config.members is None else config.members),
        nesterov=np.bool_(config.nesterov),
        traced=np.array([h in config.traced for h in HYPERPARAMETERS], np.uint8),
        write_params=np.bool_(config.write_params),
    )


def _update_in_calls(leaves_per_call: int, *operands, config: UpdateConfig):
    scalars, buffers = unflatten(config, operands)
    parts = [
        unflatten_results(part, update_p.bind(*flatten(scalars, leaves), config=part))
        for part, leaves in chunks(config, buffers, leaves_per_call)
    ]
    return [leaf for kind in concatenate(parts) for leaf in kind]


def _update_reference(*operands, config: UpdateConfig):
    results = reference_update(config, *unflatten(config, operands))
    return [leaf for kind in results for leaf in kind]


@functools.lru_cache(maxsize=None)
def _jitted_bind(config: UpdateConfig):
    return jax.jit(functools.partial(update_p.bind, config=config))


@update_p.def_impl
def _update_impl(*operands, config: UpdateConfig):
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


# --- Partitioning ---------------------------------------------------------------------


def _update_sharding_rule(config: UpdateConfig, mesh, operands, results):
    """Leaf i shards alike in all its buffers; scalars are whole on every device."""
    del mesh
    first, n = config.num_scalars, config.num_leaves
    leading = () if config.members is None else ("member",)

    def scalar(i: int, value_type) -> ArrayMapping:
        value_rank = len(VALUE_SHAPES[min(i, 3)])
        members = leading if value_type.rank > value_rank else ()
        return ArrayMapping(*members, *(f"scalar{i}_dim{d}" for d in range(value_rank)))

    def leaf(i: int, value_type) -> ArrayMapping:
        own = (f"leaf{i}_dim{d}" for d in range(len(leading), value_type.rank))
        return ArrayMapping(*leading, *own)

    return SdyShardingRule(
        (
            *(scalar(i, x) for i, x in enumerate(operands[:first])),
            *(leaf(i % n, x) for i, x in enumerate(operands[first:])),
        ),
        tuple(leaf(i % n, x) for i, x in enumerate(results)),
    )


def _update_partition(config: UpdateConfig, mesh, operands, results):
    """Runs each leaf where its mu lies: the state decides the placement."""
    n, first = config.num_leaves, config.num_scalars
    _, buffers = unflatten(config, operands)
    placements = [mu.sharding for mu in buffers.mu]
    member_spec = None
    if config.members is not None:
        member_spec, placements = _align_members(mesh, placements)

    def scalar_sharding(i: int, x) -> NamedSharding:
        per_member = len(x.shape) > len(VALUE_SHAPES[min(i, 3)])
        spec = PartitionSpec(member_spec) if per_member else PartitionSpec()
        return NamedSharding(mesh, spec)

    def update_shard(*shards):
        local = config
        if config.members is not None:
            local = dataclasses.replace(config, members=shards[first].shape[0])
        # jnp operations of the plain-JAX rule must not see the outer explicit mesh.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return tuple(update_p.bind(*shards, config=local))

    return (
        mesh,
        update_shard,
        tuple(placements[i % n] for i in range(len(results))),
        (
            *(scalar_sharding(i, x) for i, x in enumerate(operands[:first])),
            *(placements[i % n] for i in range(len(operands) - first)),
        ),
    )


def _align_members(mesh, placements):
    """One sharding of the member axis for all leaves: that of the first leaf."""
    specs = []
    for placement in placements:
        if not hasattr(placement, "spec"):
            raise NotImplementedError(
                "fused_adamw: vmap with batched scalars inside a shard_map that is "
                "manual over only some mesh axes; make it manual over all of them"
            )
        specs.append(tuple(placement.spec))
    member_spec = next((spec[0] for spec in specs if spec), None)
    used = {member_spec} if isinstance(member_spec, str) else set(member_spec or ())

    def free(axes) -> bool:
        return used.isdisjoint({axes} if isinstance(axes, str) else set(axes or ()))

    aligned = [
        NamedSharding(
            mesh, PartitionSpec(member_spec, *(a if free(a) else None for a in s[1:]))
        )
        for s in specs
    ]
    return member_spec, aligned


# --- Batching -------------------------------------------------------------------------


def _update_batching_rule(config: UpdateConfig, axis_size, in_batched, *operands):
    scalars, buffers = unflatten(config, operands)
    scalars_batched, buffers_batched = unflatten(config, in_batched)
    if any(any(kind) for kind in _listed(scalars_batched)) or config.members is not None:
        return _batch_members(
            config, axis_size, scalars, scalars_batched, buffers, buffers_batched
        )
    # The update is elementwise: a batched leaf is just a larger leaf.
    leaf_batched = [any(kinds) for kinds in zip(*filter(None, buffers_batched))]
    batched = Buffers(
        *(
            [
                _with_batch_axis(x, axis_size, has) if wanted else x
                for x, has, wanted in zip(kind, kind_batched, leaf_batched)
            ]
            for kind, kind_batched in zip(buffers, buffers_batched)
        )
    )
    out = _update_call(config)(*flatten(scalars, batched))
    return out, tuple(leaf_batched) * (len(out) // len(leaf_batched))


def _batch_members(
    config, axis_size, scalars, scalars_batched, buffers, buffers_batched
):
    """Batched scalars: the leaves' leading axis counts members, each with its own."""
    inner = () if config.members is None else (config.members,)
    members = axis_size * math.prod(inner)

    def scalar(value_shape, x, has_batch: bool):
        has_inner = x.ndim - has_batch > len(value_shape)
        if not (has_batch or has_inner):
            return x
        x = _with_batch_axis(x, axis_size, has_batch)
        if inner and not has_inner:
            x = jnp.broadcast_to(x[:, None], (axis_size, *inner, *value_shape))
        return x.reshape(members, *value_shape)

    def leaf(x, has_batch: bool):
        x = _with_batch_axis(x, axis_size, has_batch)
        return x.reshape(members, *x.shape[1 + len(inner) :])

    *merged_firsts, merged_traced = (
        [scalar(value_shape, x, has) for x, has in zip(*kinds, strict=True)]
        for value_shape, *kinds in zip(
            VALUE_SHAPES, _listed(scalars), _listed(scalars_batched), strict=True
        )
    )
    merged_scalars = Scalars(*(x for [x] in merged_firsts), merged_traced)
    merged = Buffers(*(list(map(leaf, *kind)) for kind in zip(buffers, buffers_batched)))
    merged_config = dataclasses.replace(config, members=members)
    if members == 0:
        out = [*merged.params, *merged.mu, *merged.nu, *merged.nu_max]
    else:
        out = _update_call(merged_config)(*flatten(merged_scalars, merged))
    shaped = tuple(x.reshape(axis_size, *inner, *x.shape[1:]) for x in out)
    return shaped, (True,) * len(shaped)


def _with_batch_axis(x, axis_size: int, has_batch: bool):
    return x if has_batch else jnp.broadcast_to(x, (axis_size, *x.shape))


# --- Differentiation ------------------------------------------------------------------


def _update_jvp(primals, tangents):
    raise TypeError(
        "fused_adamw: the fused update cannot be differentiated. Take gradients of "
        "the loss, not of the optimizer step; to differentiate through a step "
        '(meta-learning), use fused_adamw(..., implementation="xla") or optax.adamw.'
    )


# --- Composition ----------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _update_call(config: UpdateConfig):
    """Flat operands -> flat results, with every rule above attached."""

    def bind(*operands):
        return tuple(update_p.bind(*operands, config=config))

    partitioned = custom_partitioning(bind)
    partitioned.def_partition(
        partition=functools.partial(_update_partition, config),
        sharding_rule=functools.partial(_update_sharding_rule, config),
    )
    differentiated = jax.custom_jvp(partitioned)
    differentiated.defjvp(_update_jvp)
    batched = custom_vmap(differentiated)
    batched.def_vmap(functools.partial(_update_batching_rule, config))
    return batched


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def fused_update(
    config: UpdateConfig,
    implementation: str,
    scalars: Scalars,
    buffers: Buffers,
) -> Results:
    """One optimizer step over all leaves.

    Jitted, because custom_partitioning called eagerly replicates its operands.

    Args:
      config: compile-time options; ``config.decays`` has one entry a leaf.
      implementation: ``"ffi"`` (native on cpu and cuda) or ``"xla"`` (plain JAX).
      scalars: as ``_hyperparams`` encodes them.
      buffers: checked leaves (``_checks``).

    Returns:
      Results in the order of ``buffers``.
    """
    if config.num_leaves == 0:
        return Results([], [], [], [])
    if implementation == "xla":
        return reference_update(config, jax.tree.map(jnp.asarray, scalars), buffers)
    parts = [
        unflatten_results(part, _update_call(part)(*flatten(scalars, leaves)))
        for part, leaves in chunks(config, buffers, _LEAVES_PER_EQUATION)
    ]
    return concatenate(parts)
