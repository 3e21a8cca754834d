"""The noise of a shard: that of its elements in the whole leaf."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_fused_adamw._noise import Wide, product, shard_strides
from jax_fused_adamw._operands import Operands, UpdateConfig, flatten, unflatten
from jax_fused_adamw._specs import spec_axes, spec_of


class Shard(NamedTuple):
    """Where a device's shard of a leaf (of a member) lies in the whole leaf.

    Attributes:
      strides: of :func:`._noise.shard_strides`.
      steps: mesh axes of a dimension, and by how much the index of the shard's first
        element grows from device to device along them.
    """

    strides: tuple[int, ...]
    steps: list[tuple[tuple[str, ...], int]]

    @classmethod
    def of(cls, i: int, config: UpdateConfig, mesh, placement, shape) -> "Shard":
        spec = spec_of(placement, "stochastic rounding")
        if config.members is not None:
            spec, shape = spec[1:], shape[1:]
        devices = [math.prod(mesh.shape[a] for a in spec_axes(axes)) for axes in spec]
        # The last part may be shorter, and XLA then fills it up.
        parts = [-(-size // n) for size, n in zip(shape, devices)]
        shard = (*parts, *shape[len(parts) :])
        strides = shard_strides(shape, shard)
        if strides is None:
            raise NotImplementedError(
                f"fused_adamw: leaf {config.leaf_ids[i]} (in the order of "
                f"jax.tree.leaves), of shape {shape}, is sharded by {spec}; for "
                "stochastic rounding expected a cut along at most three dimensions "
                "besides the first: cut fewer, or pass stochastic_rounding=False"
            )
        steps = [
            (spec_axes(axes), shard[dim] * math.prod(shape[dim + 1 :]))
            for dim, axes in enumerate(spec)
            if axes
        ]
        return cls(strides, steps)

    def first_index(self) -> Wide:
        zero = jnp.zeros((), jnp.uint32)
        first = Wide(zero, zero)
        for axes, step in self.steps:
            first = first.plus(product(lax.axis_index(axes).astype(jnp.uint32), step))
        return first


def at_their_places(
    config: UpdateConfig, shards: Sequence[Shard], operands: Sequence
) -> tuple[UpdateConfig, list]:
    """The call of shards, whose noise is that of the whole leaves."""
    config = dataclasses.replace(
        config, shard_strides=tuple(shard.strides for shard in shards)
    )
    scalars, after, buffers = unflatten(config, operands)
    (noise,) = scalars.noise  # of whole leaves: its rows but the first are zero
    rows = [jnp.stack(shard.first_index()) for shard in shards]
    first = jnp.stack([jnp.zeros((2,), jnp.uint32), *rows])
    scalars = scalars._replace(noise=[noise + jnp.broadcast_to(first, noise.shape)])
    return config, flatten(Operands(scalars, after, buffers))
