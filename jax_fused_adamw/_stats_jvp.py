"""Derivatives of gradient statistics that plain JAX has computed.

Their own are of no use: they pass through bit patterns and integers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_fused_adamw._reference import gradient_divisor
from jax_fused_adamw._stats_primitives import stats_element


class Statistics(NamedTuple):
    """float32: one of all leaves, then, where asked for, one of each."""

    norm: jax.Array
    scaled_norm: jax.Array  # the norm times 2^-64
    max_abs: jax.Array


def with_tangents(
    statistics: Statistics,
    axes_of_leaves: Sequence[tuple[str, ...]],
    scale: jax.Array,
    grads: Sequence[jax.Array],
) -> Statistics:
    """The statistics as a function of the gradients and their scale.

    The norm's tangent is 0 where the norm is; that of the largest magnitude is that of
    the element which has it, or the mean of several.

    Args:
      statistics: of ``grads``.
      axes_of_leaves: of each leaf, the mesh axes of a ``shard_map`` that cut it.
      scale: of the gradients, a float32 scalar.
      grads: what this device holds.
    """

    @jax.custom_jvp
    def of(statistics, scale, grads):
        del scale, grads
        return statistics

    @of.defjvp
    def jvp(primals, tangents):
        statistics, scale, grads = primals
        statistics = of(*primals)  # whose own derivatives those of second order need
        _, scale_tangent, grad_tangents = tangents
        unscaled = [
            jax.jvp(_unscale, (grad, scale), (grad_tangent, scale_tangent))
            for grad, grad_tangent in zip(grads, grad_tangents, strict=True)
        ]
        leaves = [(*x, axes) for x, axes in zip(unscaled, axes_of_leaves, strict=True)]
        sets = [leaves, *([leaf] for leaf in leaves)][: statistics.norm.size]
        norms = [
            _norm_tangent(statistics.norm[i], statistics.scaled_norm[i], leaves)
            for i, leaves in enumerate(sets)
        ]
        norm = jnp.stack(norms)
        max_abs = jnp.stack([_max_abs_tangent(leaves) for leaves in sets])
        out = Statistics(norm, norm * jnp.float32(2.0**-64), max_abs)
        return statistics, out

    return of(statistics, jnp.asarray(scale), list(grads))


def _unscale(grad, scale):
    return stats_element(grad) / gradient_divisor(scale)


def _norm_tangent(norm, scaled_norm, leaves):
    """The sum of ``x / norm * dx``."""
    # A norm beyond float32 is known by the other; dividing by 1 keeps zeros zero.
    is_beyond = norm == jnp.finfo(jnp.float32).max
    factor = jnp.where(is_beyond, jnp.float32(2.0**-64), 1.0)
    divisor = jnp.where(norm == 0, 1.0, jnp.where(is_beyond, scaled_norm, norm))
    return _total((x * factor / divisor * dx, axes) for x, dx, axes in leaves)


def _max_abs_tangent(leaves):
    largest = jnp.float32(0)
    for x, _, axes in leaves:
        of_leaf = jnp.abs(lax.stop_gradient(x)).max(initial=0.0)
        largest = jnp.maximum(largest, lax.pmax(of_leaf, axes) if axes else of_leaf)
    chosen = [(jnp.abs(x) == largest, x, dx, axes) for x, dx, axes in leaves]
    total = _total((jnp.where(c, jnp.sign(x) * dx, 0), a) for c, x, dx, a in chosen)
    count = _total((c.astype(jnp.float32), a) for c, _, _, a in chosen)
    return total / jnp.maximum(count, 1.0)


def _total(terms):
    total = jnp.float32(0)
    for term, axes in terms:
        part = term.sum()
        total = total + (lax.psum(part, axes) if axes else part)
    return total
