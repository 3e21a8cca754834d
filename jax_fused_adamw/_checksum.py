"""A number that tells the bits of an array, made where the array lies.

.. math:: \\sum_i mix(x_i \\oplus mix(i)) \\mod 2^{32}

over the words :math:`x_i` of the array in row-major order: of one, two or four bytes,
as its elements are; wider elements are several words. Since ``mix`` is a bijection, no
change of one word is missed, and any other with a chance of 2^-32. A sum has no order:
each device sums what it holds, nothing is gathered, and every way to shard an array
gives the same number. A checksum of a library's needs all bytes in order on the host.

What the host's memory holds is summed in blocks of two sizes, by programs that serve
all shapes: to compile one for each of 300 shapes took 38 s (two CPU cores, 2026-11-30).
An array on a GPU or on several devices has one for its shape and sharding.

Saved with checkpoints: another formula needs another name there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fused_adamw._noise import element_index

# Words of a block: 4 MiB of float32, and what a small leaf fills.
_BLOCK, _SMALL_BLOCK = 1 << 20, 1 << 12


def checksum(leaf: Any) -> jax.Array | np.uint32:
    """The checksum of an array, a PRNG key or a Python number: a uint32 scalar.

    That of an array on a GPU or on several devices is on its way when this returns, as
    from any function under ``jit``, and each of these devices has the number of what it
    holds itself: those of replicas that differ are different numbers. Where processes
    share the array, each of them has to call it.
    """
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
        # jit would narrow wide ones, which have no dtype of less than a byte.
        return _checksum(leaf) if _is_packed(leaf) else _sum_of_blocks(leaf)
    devices: Any = leaf.sharding.device_set
    device = next(iter(devices))
    kind = device.default_memory().kind
    if leaf.sharding.memory_kind in (None, kind):
        is_on_host = len(devices) == 1 and device.platform == "cpu"
        if is_on_host and not _is_packed(leaf):
            return _sum_of_blocks(np.asarray(leaf))
        return _checksum(leaf)
    # jit does not read the host's memory: through the device's, one array at a time.
    leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))
    return jax.block_until_ready(_checksum(leaf))


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    words = _words(x)
    place = element_index(words.shape).low
    return _mix(words.astype(jnp.uint32) ^ _mix(place)).sum(dtype=jnp.uint32)


def _is_packed(x: Any) -> bool:
    """Whether its elements have less than a byte, of which NumPy has its own view."""
    return x.dtype.name.startswith(("int2", "int4", "uint2", "uint4", "float4"))


def _sum_of_blocks(x: np.ndarray) -> np.uint32:
    words = np.ascontiguousarray(x).reshape(-1).view(f"u{min(x.itemsize, 4)}")
    sums = []
    for start in range(0, words.size, _BLOCK):
        block = words[start : start + _BLOCK]
        size = _BLOCK if block.size > _SMALL_BLOCK else _SMALL_BLOCK
        place = np.array([start % 2**32, block.size], np.uint32)
        if block.size < size:
            block = np.pad(block, (0, size - block.size))
        # Explicitly, for those who guard transfers.
        sums.append(_block_sum(jax.device_put(block), jax.device_put(place)))
    return np.sum(jax.device_get(sums), dtype=np.uint32)


@jax.jit
def _block_sum(words: jax.Array, place: jax.Array) -> jax.Array:
    """Of ``place[1]`` words, of which the first is word ``place[0]`` of the array."""
    index = lax.iota(jnp.uint32, words.size)
    mixed = _mix(words.astype(jnp.uint32) ^ _mix(index + place[0]))
    return jnp.where(index < place[1], mixed, 0).sum(dtype=jnp.uint32)


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
