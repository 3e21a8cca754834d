"""Stochastic rounding in plain JAX, and where in a tree an element stands.

The twin of ``cc/core/noise.h`` and of ``StoreStochastic`` in ``cc/core/dtype.h``. Each
element draws its noise from a counter of its own, so that the noise is a function of
the seed, the step, the leaf and the element's index in the whole leaf, whatever the
launch, the device or the shard it is worked out in.

The operand ``noise`` holds 64-bit numbers as ``uint32[1 + leaves, 2]``, low word first:
the seed, then for each leaf the index of its first element, not zero in a shard.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fused_adamw._specs import varying_axes

_ROUNDS = 7
_MULTIPLIERS = (np.uint32(0xD2511F53), np.uint32(0xCD9E8D57))
_KEY_INCREMENTS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))

# Of the noise of parameters, which is drawn apart from that of their moments.
_PARAMS = 0x80000000

_MAX_PAIRS = 3
UNCUT = (0,) * (2 * _MAX_PAIRS)  # shard_strides of a whole leaf


class Wide(NamedTuple):
    """A 64-bit unsigned integer in two words."""

    low: jax.Array
    high: jax.Array

    def plus(self, other: "Wide") -> "Wide":
        low = self.low + other.low
        carry = (low < other.low).astype(jnp.uint32)
        return Wide(low, self.high + other.high + carry)


def _words(value: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(value & 0xFFFFFFFF), np.uint32(value >> 32 & 0xFFFFFFFF)


def product(x: jax.Array, factor: int) -> Wide:
    """A uint32 array times a 64-bit constant, modulo 2^64."""
    low, high = _words(factor)
    wide = _multiply(low, x)
    return Wide(wide.low, wide.high + x * high)


def _multiply(a: np.uint32, b: jax.Array) -> Wide:
    """The 64 bits of a product of words, from products of 16 bits."""
    half = np.uint32(0xFFFF)
    a_low, a_high, b_low, b_high = a & half, a >> 16, b & half, b >> 16
    low, middle, other = a_low * b_low, a_low * b_high, a_high * b_low
    carry = (low >> 16) + (middle & half) + (other & half)
    high = a_high * b_high + (middle >> 16) + (other >> 16) + (carry >> 16)
    return Wide(a * b, high)


def philox(counter: Sequence[jax.Array], key: Sequence[jax.Array]) -> list[jax.Array]:
    """Philox4x32 with 7 rounds: four random words of a counter of four.

    Salmon, Moraes, Dror and Shaw, `Parallel Random Numbers: As Easy as 1, 2, 3
    <https://doi.org/10.1145/2063384.2063405>`_, 2011, section 4.3.
    """

    def one_round(_: Any, words: list[jax.Array]) -> list[jax.Array]:
        c0, c1, c2, c3, k0, k1 = words
        first, second = (_multiply(m, c) for m, c in zip(_MULTIPLIERS, (c0, c2)))
        c0, c1 = second.high ^ c1 ^ k0, second.low
        c2, c3 = first.high ^ c3 ^ k1, first.low
        return [c0, c1, c2, c3, k0 + _KEY_INCREMENTS[0], k1 + _KEY_INCREMENTS[1]]

    # What a loop carries must be of one type: in a shard_map the words come to vary
    # over all axes that one of them varies over, a seed of each device among them.
    words = [*counter, *key]
    axes = frozenset().union(*map(varying_axes, words))
    words = [lax.pcast(x, tuple(axes - varying_axes(x)), to="varying") for x in words]
    # A loop, since XLA would compile seven rounds of every leaf for longer.
    return lax.fori_loop(0, _ROUNDS, one_round, words)[:4]


class LeafNoise(NamedTuple):
    """Where the noise of a leaf comes from; scalars, or one a member."""

    seed: Wide
    step: jax.Array  # uint32: 1-based number of the applied step
    leaf_id: int
    index: Wide  # type: ignore[assignment] # hides tuple.index: of each element in the whole leaf

    def for_moments(self) -> tuple[jax.Array, jax.Array]:
        """16 random bits an element, for mu and for nu."""
        word = self._words(self.leaf_id)
        return word & np.uint32(0xFFFF), word >> 16

    def for_params(self) -> jax.Array:
        return self._words(self.leaf_id | _PARAMS) & np.uint32(0xFFFF)

    def _words(self, stream: int) -> jax.Array:
        """Four neighbours share a counter and take one of its words each."""
        low, high = self.index
        counter: list[Any] = [
            low >> 2 | high << 30,
            high >> 2,
            np.uint32(stream),
            self.step,
        ]
        words = philox([jnp.broadcast_to(x, low.shape) for x in counter], self.seed)
        lane = low & 3
        return jnp.select([lane == i for i in range(3)], words[:3], words[3])


def element_index(shape: tuple[int, ...], strides: Sequence[int] = ()) -> Wide:
    """Of each element of a leaf its index; in a shard that in the whole leaf, but for
    the index of the shard's first element.

    Args:
      shape: of the leaf or the shard.
      strides: of :func:`shard_strides`; none where the leaf is whole.
    """
    zero = jnp.zeros(shape, jnp.uint32)
    index = Wide(zero, zero)
    for dim in range(len(shape)):
        place = _index_in_whole(math.prod(shape[dim + 1 :]), strides)
        coordinate = lax.broadcasted_iota(jnp.uint32, shape, dim)
        index = index.plus(product(coordinate, place))
    return index


def _index_in_whole(i: int, strides: Sequence[int]) -> int:
    for divisor, extra in zip(strides[::2], strides[1::2], strict=True):
        if divisor > 0:
            i += i // divisor * extra
    return i


def shard_strides(
    whole: tuple[int, ...], shard: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Takes the index of an element in a shard to that in the whole leaf.

    Three pairs (divisor, extra), unused ones zero: beginning with the shard's own
    row-major index ``i``, each pair in turn adds ``i // divisor * extra``; the index of
    the shard's first element is added last. A pair widens the rows of a dimension that
    is cut, from the last to the first; a cut along the first needs none.

    Returns:
      None where three pairs are too few.
    """
    pairs: list[int] = []
    row = 1  # elements in a row of the dimensions after, which are whole by now
    for dim in reversed(range(len(whole))):
        cut = shard[dim] != whole[dim]
        if cut and math.prod(shard[:dim]) > 1:
            pairs += [shard[dim] * row, (whole[dim] - shard[dim]) * row]
        row *= whole[dim]
    if len(pairs) > len(UNCUT):
        return None
    return (*pairs, *UNCUT[len(pairs) :])


def _seed_words(seed: Any) -> Any:
    """A checked integer, on the host or the device, as ``uint32[2]``."""
    if not isinstance(seed, jax.Array):
        return np.array(_words(int(seed)), np.uint32)
    if seed.dtype.itemsize == 8:
        words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    elif jnp.issubdtype(seed.dtype, jnp.signedinteger):
        words = [seed.astype(jnp.int32), seed.astype(jnp.int32) >> 31]
    else:
        words = [seed, jnp.zeros_like(seed)]
    return jnp.stack([word.astype(jnp.uint32) for word in words])


def noise_operand(seed: Any, num_leaves: int) -> Any:
    """The operand ``noise`` of whole leaves."""
    words = _seed_words(seed)
    xp = jnp if isinstance(words, jax.Array) else np
    return xp.concatenate([words[None], np.zeros((num_leaves, 2), np.uint32)])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_stochastically(x: jax.Array, dtype: Any, noise: jax.Array) -> jax.Array:
    """float32 to a neighbour in a 16-bit dtype, each the likelier the nearer it is.

    What the dtype can represent keeps its value, and so do infinities and NaN; a finite
    value becomes infinite only where float16 ends for good, at 65536. The derivative is
    that of rounding to nearest, 1.

    Args:
      x: float32.
      dtype: bfloat16 or float16.
      noise: uint32 of the shape of ``x``, 16 random bits.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    round_bits = _to_bfloat16 if dtype == jnp.bfloat16 else _to_float16
    rounded = round_bits(x, bits & np.uint32(0x7FFFFFFF), noise)
    sign = bits >> 16 & np.uint32(0x8000)
    return lax.bitcast_convert_type((sign | rounded).astype(jnp.uint16), dtype)


@round_stochastically.defjvp
def _round_jvp(dtype, primals, tangents):
    return round_stochastically(primals[0], dtype, primals[1]), tangents[0].astype(
        dtype
    )


def _to_bfloat16(x: jax.Array, magnitude: jax.Array, noise: jax.Array) -> jax.Array:
    del x
    is_finite = magnitude < np.uint32(0x7F800000)
    finite = jnp.minimum(magnitude + noise >> 16, np.uint32(0x7F7F))
    is_nan = magnitude > np.uint32(0x7F800000)
    special = jnp.where(is_nan, magnitude >> 16 | np.uint32(0x40), np.uint32(0x7F80))
    return jnp.where(is_finite, finite, special)


def _to_float16(x: jax.Array, magnitude: jax.Array, noise: jax.Array) -> jax.Array:
    smallest_normal, end = np.uint32(113 << 23), np.uint32(143 << 23)
    rebiased = magnitude - np.uint32(112 << 23)
    normal = jnp.minimum(rebiased + (noise >> 3) >> 13, np.uint32(0x7BFF))
    # In units of 2^-16 of float16's smallest step, 2^-24.
    is_subnormal = magnitude < smallest_normal
    units = jnp.where(is_subnormal, jnp.abs(x) * np.float32(2.0**40), 0.0)
    subnormal = units.astype(jnp.uint32) + noise >> 16
    is_nan = magnitude > np.uint32(0x7F800000)
    quiet_nan = np.uint32(0x7E00) | magnitude >> 13 & np.uint32(0x3FF)
    special = jnp.where(is_nan, quiet_nan, np.uint32(0x7C00))
    finite = jnp.where(is_subnormal, subnormal, normal)
    return jnp.where(magnitude < end, finite, special)
