"""A number that tells the bits of an array, made where the array lies.

.. math:: \\sum_i mix(x_i \\oplus mix(i)) \\mod 2^{32}

over the words :math:`x_i` of the array in row-major order: of one, two or four bytes,
as its elements are; wider elements are several words. Since ``mix`` is a bijection, no
change of one word is missed, and any other with a chance of 2^-32. A sum has no order:
each device sums what it holds, nothing is gathered, and every way to shard an array
gives the same number. A checksum of a library's needs all bytes in order on the host.
XLA:CPU keeps the mixed words of an array, four bytes each, until it has summed them.

Saved with checkpoints: another formula needs another name there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fused_adamw._noise import element_index


def checksum(leaf: Any) -> jax.Array:
    """The checksum of an array, a PRNG key or a Python number: a uint32 scalar.

    It is on its way when this returns, as from any function under ``jit``; where
    processes share the array, each of them has to call it.
    """
    if not isinstance(leaf, jax.Array):
        return _checksum(_host_words(np.asarray(leaf)))
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    device = next(iter(leaf.sharding.device_set))
    kind = device.default_memory().kind
    if leaf.sharding.memory_kind in (None, kind):
        return _checksum(leaf)
    # jit does not read the host's memory: through the device's, one array at a time.
    leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))
    return jax.block_until_ready(_checksum(leaf))


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    words = _words(x)
    place = element_index(words.shape).low
    return _mix(words.astype(jnp.uint32) ^ _mix(place)).sum(dtype=jnp.uint32)


def _host_words(x: np.ndarray) -> np.ndarray:
    """What jit would narrow to four bytes, as words; everything else as it is."""
    if x.itemsize < 8:
        return x
    return np.ascontiguousarray(x)[..., None].view(np.uint32)


def _words(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    bits = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    return lax.bitcast_convert_type(x, f"uint{min(bits(x.dtype).bits, 32)}")


def _mix(x: jax.Array) -> jax.Array:
    """The finalizer of 32-bit MurmurHash3 (Austin Appleby, public domain)."""
    x = (x ^ x >> 16) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * np.uint32(0xC2B2AE35)
    return x ^ x >> 16
