"""The checksum of a record's leaves: its formula, on every way to hold an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fused_adamw._checksum import (
    _BLOCK,
    _SMALL_BLOCK,
    _block_sum,
    _checksum,
    _mix,
    checksum,
)

WORD = 0xFFFFFFFF


def mix(x):
    x = (x ^ x >> 16) * 0x85EBCA6B & WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def expected(array):
    """In Python's integers."""
    array = np.asarray(array)
    words = np.frombuffer(array.tobytes(), f"<u{min(array.itemsize, 4)}")
    return sum(mix(int(x) ^ mix(i)) for i, x in enumerate(words)) & WORD


def bits(dtype, shape=(2, 3, 4)):
    """An array with any bits that the dtype may have."""
    dtype = jnp.dtype(dtype)
    if dtype.name in ("bool", "int4"):
        return (np.arange(24).reshape(shape) % 2).astype(dtype)
    words = np.random.default_rng(0).bytes(24 * dtype.itemsize)
    return np.frombuffer(words, dtype).reshape(shape)


DTYPES = "bool int4 int8 uint8 float8_e5m2 int16 float16 bfloat16 int32 float32".split()
WIDE = ("int64", "float64", "complex128")


@pytest.mark.parametrize("dtype", [*DTYPES, "complex64"])
def test_arrays_of_the_device_and_of_the_host(dtype):
    array = bits(dtype)
    on_device = jnp.array(array)
    assert int(checksum(array)) == expected(array)
    assert int(checksum(on_device)) == expected(on_device)


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_arrays(dtype):
    """The same number whether jit may have 64 bits or not."""
    array = bits(dtype)
    assert int(checksum(array)) == expected(array)
    with jax.enable_x64(True):
        assert int(checksum(jnp.array(array))) == expected(array)
        assert int(checksum(array)) == expected(array)


def test_numbers_and_keys():
    assert int(checksum(7)) == expected(np.int64(7))
    assert int(checksum(0.1)) == expected(np.float64(0.1))
    assert int(checksum(True)) == expected(np.uint8(1))
    key = jax.random.key(5)
    assert int(checksum(key)) == expected(jax.random.key_data(key))


def test_these_numbers_are_in_checkpoints():
    assert int(checksum(np.arange(1000, dtype=np.float32))) == 3909339582
    assert checksum(np.zeros(1, np.float32)).dtype == jnp.uint32


def test_every_bit_is_seen():
    array = bits("bfloat16", (24,))
    seen = {int(checksum(array))}
    for i in range(24):
        for bit in range(16):
            other = array.view(np.uint16).copy()
            other[i] ^= 1 << bit
            seen.add(int(checksum(other.view(array.dtype))))
    assert len(seen) == 1 + 24 * 16


def test_other_places_are_seen():
    array = np.zeros((4, 6), np.float32)
    array[1, 2] = 1.0
    others = [array, array.T.copy(), array[::-1].copy(), -array, np.zeros_like(array)]
    # The highest bit of each of two words, which a plain sum would lose.
    others.append(array * np.where(np.arange(24).reshape(4, 6) < 2, -1, 1))
    assert len({int(checksum(x.astype(np.float32))) for x in others}) == len(others)


@pytest.mark.devices(4)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_one_number_for_all_shardings_and_nothing_is_gathered(kind):
    array = bits("float32", (4, 6))
    kind = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    for spec in (jax.P("x", "y"), jax.P(("x", "y"), None), jax.P(None, "y"), jax.P()):
        placed = jax.device_put(array, jax.NamedSharding(mesh, spec))
        assert int(checksum(placed)) == expected(array), spec
        text = _checksum.lower(placed).compile().as_text()
        assert "all-gather" not in text and "all-to-all" not in text


def test_arrays_in_the_memory_of_the_host():
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    array = bits("float32")
    assert int(checksum(jax.device_put(array, sharding))) == expected(array)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
def test_arrays_of_many_blocks(dtype):
    """Around the ends of blocks, by the same formula for all words at once."""

    def whole(array):
        words = np.ascontiguousarray(array).view(f"u{min(array.itemsize, 4)}")
        i = np.arange(words.size, dtype=np.uint32)
        return int(_mix(words.astype(np.uint32) ^ _mix(i)).sum(dtype=np.uint32))

    words = np.random.default_rng(1).bytes(8 * (2 * _BLOCK + 1))
    array = np.frombuffer(words, np.uint8).view(dtype)
    for n in (_SMALL_BLOCK - 1, _SMALL_BLOCK, _SMALL_BLOCK + 1, _BLOCK - 1, _BLOCK):
        assert int(checksum(array[:n])) == whole(array[:n]), n
    for n in (_BLOCK + 1, 2 * _BLOCK + 1):
        with jax.enable_x64(True):
            assert int(checksum(jnp.array(array[:n]))) == whole(array[:n]), n
    assert int(checksum(array[::3])) == whole(array[::3])


@pytest.mark.platform("cpu")
def test_arrays_of_the_host_share_their_programs():
    sizes = (1, 77, 4096, 5000, 1 << 20, (1 << 20) + 3)
    for n in sizes:
        checksum(np.zeros(n, np.float32))
    compiled = _block_sum._cache_size()
    for n in sizes:
        checksum(np.zeros((n, 2), np.float32))
        checksum(jnp.zeros((3, n), jnp.int32))
    assert _block_sum._cache_size() == compiled
