"""vmap of the update, for any mix of batched and unbatched operands."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp

from jax_fused_adamw._operands import (
    Buffers,
    Operands,
    Scalars,
    UpdateConfig,
    field_shapes,
    flatten,
    flatten_results,
    listed,
    unflatten,
)
from jax_fused_adamw._reference import reference_update


def batching_rule(
    update_call: Callable, config: UpdateConfig, axis_size, in_batched, *operands
):
    """custom_vmap's rule; ``update_call(config)`` is the update of flat operands."""
    scalars, after, buffers = unflatten(config, operands)
    scalars_batched, _, buffers_batched = unflatten(config, in_batched)
    differ = any(any(kind) for kind in listed(scalars_batched))
    if differ or config.members is not None or config.has_noise:
        return _batch_members(update_call, config, axis_size, operands, in_batched)
    # The update is elementwise, and without noise a batched leaf is just a larger leaf.
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
    counters = (False,) * (len(out) - config.num_leaf_results)
    return out, tuple(leaf_batched) * len(config.result_kinds) + counters


def _batch_members(update_call, config, axis_size, operands, in_batched):
    """Batched scalars: the leaves' leading axis counts members, each with its own."""
    scalars, after, buffers = unflatten(config, operands)
    scalars_batched, _, buffers_batched = unflatten(config, in_batched)
    inner = () if config.members is None else (config.members,)
    members = axis_size * math.prod(inner)
    scalar = functools.partial(merge_scalar, axis_size, inner)
    leaf = functools.partial(merge_leaf, axis_size, inner)
    lists = Scalars(
        *(
            [scalar(x, has, value_shape) for x, has in zip(*kinds, strict=True)]
            for value_shape, *kinds in zip(
                field_shapes(config),
                listed(scalars),
                listed(scalars_batched),
                strict=True,
            )
        )
    )
    counters = [*lists.count, *lists.skip_counters]
    # The kernel counts once, or for each member where anything tells members apart.
    differ = any(x.ndim > 0 for x in (*counters, *lists.skip_update, *lists.nonfinite))
    if differ:
        counters = [jnp.broadcast_to(x, members) for x in counters]
    merged = Operands(
        lists._replace(
            count=counters[0],
            skip_update=lists.skip_update[0],
            hyper_bits=lists.hyper_bits[0],
            skip_counters=counters[1:],
        ),
        after,
        Buffers(
            *(
                list(map(leaf, *kind))
                for kind in zip(buffers, buffers_batched, strict=True)
            )
        ),
    )
    merged_config = dataclasses.replace(config, members=members)
    if members == 0:
        out = flatten_results(reference_update(merged_config, *merged[::2]))
    else:
        out = update_call(merged_config)(*flatten(merged))
    leaves = [
        x.reshape(axis_size, *inner, *x.shape[1:])
        for x in out[: config.num_leaf_results]
    ]
    new_counters = list(out[config.num_leaf_results :])
    if differ:
        # An inner vmap that knows one count for all its members expects one back.
        inner_has_counts = scalars.count.ndim > scalars_batched.count
        new_counters = [x.reshape(axis_size, *inner) for x in new_counters]
        if inner and not inner_has_counts:
            new_counters = [x[:, 0] for x in new_counters]
    batched = (True,) * len(leaves) + (differ,) * len(new_counters)
    return (*leaves, *new_counters), batched


def merge_scalar(axis_size, inner, x, has_batch: bool, value_shape=()):
    """A scalar of all members, or what it was where members share it.

    Args:
      axis_size: of the axis that vmap adds.
      inner: the members' axis that is there already, as a shape: ``()`` or ``(n,)``.
      x: its value, or one for each member of either axis.
      has_batch: whether it has the new axis.
      value_shape: of one value.
    """
    has_inner = x.ndim - has_batch > len(value_shape)
    if not (has_batch or has_inner):
        return x
    x = _with_batch_axis(x, axis_size, has_batch)
    if inner and not has_inner:
        x = jnp.broadcast_to(x[:, None], (axis_size, *inner, *value_shape))
    return x.reshape(axis_size * math.prod(inner), *value_shape)


def merge_leaf(axis_size, inner, x, has_batch: bool):
    """A leaf with one leading axis for all members, as :func:`merge_scalar`."""
    x = _with_batch_axis(x, axis_size, has_batch)
    return x.reshape(axis_size * math.prod(inner), *x.shape[1 + len(inner) :])


def _with_batch_axis(x, axis_size: int, has_batch: bool):
    return x if has_batch else jnp.broadcast_to(x, (axis_size, *x.shape))
