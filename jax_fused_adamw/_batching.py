"""vmap of the update, for any mix of batched and unbatched operands."""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp

from jax_fused_adamw._operands import (
    VALUE_SHAPES,
    Buffers,
    Operands,
    Scalars,
    UpdateConfig,
    flatten,
    listed,
    unflatten,
)


def batching_rule(
    update_call: Callable, config: UpdateConfig, axis_size, in_batched, *operands
):
    """custom_vmap's rule; ``update_call(config)`` is the update of flat operands."""
    scalars, after, buffers = unflatten(config, operands)
    scalars_batched, _, buffers_batched = unflatten(config, in_batched)
    if any(any(kind) for kind in listed(scalars_batched)) or config.members is not None:
        return _batch_members(update_call, config, axis_size, operands, in_batched)
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
    out = update_call(config)(*flatten(Operands(scalars, after, batched)))
    return out, tuple(leaf_batched) * (len(out) // len(leaf_batched))


def _batch_members(update_call, config, axis_size, operands, in_batched):
    """Batched scalars: the leaves' leading axis counts members, each with its own."""
    scalars, after, buffers = unflatten(config, operands)
    scalars_batched, _, buffers_batched = unflatten(config, in_batched)
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
            VALUE_SHAPES, listed(scalars), listed(scalars_batched), strict=True
        )
    )
    merged_scalars = Scalars(*(x for [x] in merged_firsts), merged_traced)
    merged = Buffers(
        *(list(map(leaf, *kind)) for kind in zip(buffers, buffers_batched))
    )
    merged_config = dataclasses.replace(config, members=members)
    if members == 0:
        moments = [jnp.zeros_like(p, jnp.float32) for p in merged.params]
        out = [*merged.params, *(moments * (config.num_result_kinds - 1))]
    else:
        flat = flatten(Operands(merged_scalars, after, merged))
        out = update_call(merged_config)(*flat)
    shaped = tuple(x.reshape(axis_size, *inner, *x.shape[1:]) for x in out)
    return shaped, (True,) * len(shaped)


def _with_batch_axis(x, axis_size: int, has_batch: bool):
    return x if has_batch else jnp.broadcast_to(x, (axis_size, *x.shape))
