"""The noise of stochastic rounding: generator, index, rounding."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import bits

import jax_fused_adamw as jfa
from jax_fused_adamw._noise import (
    LeafNoise,
    Wide,
    element_index,
    noise_operand,
    philox,
    product,
    round_stochastically,
    shard_strides,
)

MASK = 0xFFFFFFFF


def philox_of_the_paper(counter, key, rounds=7):
    """Figure 2 of Salmon et al. in Python's integers: words (R1, L1, R2, L2)."""
    c = list(counter)
    k = list(key)
    for _ in range(rounds):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & MASK,
            (first >> 32) ^ c[3] ^ k[1],
            first & MASK,
        ]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


KNOWN = [  # Random123: philox4x32 7
    ("00000000 00000000 00000000 00000000", "00000000 00000000"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"),
]
ANSWERS = [
    "5f6fb709 0d893f64 4f121f81 4f730a48",
    "5207ddc2 45165e59 4d8ee751 8c52f662",
    "4dfccaba 190a87f0 c47362ba b6b5242a",
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("case", range(3))
def test_known_answers(case):
    counter, key = map(words, KNOWN[case])
    expected = words(ANSWERS[case])
    assert philox_of_the_paper(counter, key) == expected
    got = philox([jnp.uint32(x) for x in counter], [jnp.uint32(x) for x in key])
    assert [int(x) for x in got] == expected


def test_any_counter():
    rng = np.random.default_rng(0)
    cases = rng.integers(0, 2**32, (50, 6), dtype=np.uint64)
    columns = [jnp.asarray(x, jnp.uint32) for x in cases.T]
    got = np.stack(philox(columns[:4], columns[4:]), axis=1)
    for case, result in zip(cases.tolist(), got.tolist(), strict=True):
        assert result == philox_of_the_paper(case[:4], case[4:])


def wide(value):
    return Wide(jnp.uint32(value & MASK), jnp.uint32(value >> 32 & MASK))


def as_int(x: Wide):
    return np.asarray(x.low, np.uint64) + (np.asarray(x.high, np.uint64) << 32)


def test_64_bit_arithmetic():
    rng = np.random.default_rng(1)
    for _ in range(50):
        a, b = (int(x) for x in rng.integers(0, 2**64, 2, dtype=np.uint64))
        x = int(rng.integers(0, 2**32))
        assert as_int(wide(a).plus(wide(b))) == (a + b) % 2**64
        assert as_int(product(jnp.uint32(x), a)) == x * a % 2**64


def noise_at(index, seed=5, step=1, leaf_id=0):
    return LeafNoise(wide(seed), jnp.uint32(step), leaf_id, index)


def test_every_element_has_a_word_of_its_own_counter():
    """By the definition: key, counter, word and half, one element at a time."""
    seed, step, leaf_id, first = (3 << 32) + 7, 9, 2, (1 << 33) + 6
    index = element_index((3, 5)).plus(wide(first))
    noise = noise_at(index, seed, step, leaf_id)
    mu, nu = noise.for_moments()
    params = noise.for_params()
    for i, got in enumerate(zip(*(np.ravel(x).tolist() for x in (mu, nu, params)))):
        q, lane = divmod(first + i, 4)
        key = [seed & MASK, seed >> 32]
        word = philox_of_the_paper([q & MASK, q >> 32, leaf_id, step], key)[lane]
        other = [q & MASK, q >> 32, leaf_id | 1 << 31, step]
        param_word = philox_of_the_paper(other, key)[lane]
        assert got == (word & 0xFFFF, word >> 16, param_word & 0xFFFF)


SHARDS = [
    ((8, 6), (2, 6)),
    ((8, 6), (8, 3)),
    ((8, 6), (4, 2)),
    ((1, 8, 6), (1, 2, 3)),
    ((4, 6, 8), (2, 3, 4)),
    ((4, 6, 5, 8), (2, 3, 5, 2)),
    ((2, 4, 4, 6), (1, 2, 2, 3)),
    ((4, 4, 6, 2), (2, 2, 2, 1)),
    ((5,), (2,)),
    ((), ()),
]


@pytest.mark.parametrize("whole, shard", SHARDS, ids=str)
def test_a_shard_knows_its_elements_in_the_whole(whole, shard):
    numbers = np.arange(math.prod(whole), dtype=np.uint64).reshape(whole)
    strides = shard_strides(whole, shard)
    parts = [range(size // part) for size, part in zip(whole, shard)]
    for place in itertools.product(*parts):
        cut = numbers[tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, shard))]
        index = element_index(shard, strides).plus(wide(int(cut.reshape(-1)[0])))
        np.testing.assert_array_equal(as_int(index), cut)
        # As a kernel does it, from the shard's own row-major index.
        i = np.arange(cut.size, dtype=np.uint64)
        for divisor, extra in zip(strides[::2], strides[1::2]):
            i = i + i // divisor * extra if divisor else i
        np.testing.assert_array_equal(i + cut.reshape(-1)[0], cut.reshape(-1))


def test_at_most_three_pairs():
    assert shard_strides((2, 4, 4, 4), (1, 2, 2, 2)) is not None
    assert shard_strides((4, 4, 4, 4, 4), (2, 2, 2, 2, 2)) is None


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 + 5, -(2**63)])
def test_seed_is_two_words(seed):
    operand = noise_operand(seed, 2)
    assert operand.dtype == np.uint32 and operand.shape == (3, 2)
    assert (operand[1:] == 0).all()
    assert int(operand[0, 0]) + (int(operand[0, 1]) << 32) == seed % 2**64


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**31)])
def test_seed_on_the_device_is_the_same(seed):
    expected = noise_operand(seed, 1)
    np.testing.assert_array_equal(noise_operand(jnp.int32(seed), 1), expected)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(noise_operand(jnp.int64(seed), 1), expected)
        large = noise_operand(jnp.uint64(2**63 + 5), 1)
    np.testing.assert_array_equal(large, noise_operand(2**63 + 5, 1))


# --- Rounding -------------------------------------------------------------------------

ALL_NOISE = jnp.arange(2**16, dtype=jnp.uint32)
LOW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
VALUES = {
    "bfloat16": [1.0, 1.001, -3.3e-5, 1.7e38, -2.0e-38, 0.1],
    "float16": [1.0, 1.0003, -0.33, 6e-5, -6.2e-5, 3e-7, 2e-8, -1.1e-9, 65510.0],
}
EVERY = [(dtype, value) for dtype, values in VALUES.items() for value in values]


def neighbours(value, dtype):
    """The values of a dtype around a float32, in float64."""
    low = np.asarray(value).astype(LOW[dtype])
    with np.errstate(over="ignore"):
        near = [np.nextafter(low, LOW[dtype](x)) for x in (-np.inf, np.inf)]
    around = np.array([near[0], low, near[1]]).astype(np.float64)
    below, above = around[around <= value].max(), around[around >= value].min()
    return below, above


@pytest.mark.parametrize("dtype, value", EVERY)
def test_mean_over_all_noise_is_the_value(dtype, value):
    """To 2^-16 of a step (2^-13 for float16's normal numbers), and only neighbours."""
    x = jnp.float32(value)
    rounded = round_stochastically(jnp.full(2**16, x), jnp.dtype(dtype), ALL_NOISE)
    got = np.asarray(rounded).astype(np.float64)
    below, above = neighbours(np.float32(value), dtype)
    assert set(got) <= {below, above}
    assert abs(got.mean() - float(x)) <= (above - below) * 2.0**-13


@pytest.mark.parametrize("dtype", LOW)
def test_what_the_dtype_holds_keeps_its_bits(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(LOW[dtype])
    is_nan = np.isnan(every.astype(np.float32))
    # XLA:CPU may flush a float32 that is subnormal; the kernels do not.
    exact = jax.lax.bitcast_convert_type(jnp.asarray(every), jnp.dtype(dtype))
    values = jnp.asarray(every.astype(np.float32))
    for noise in (0, 1, 0x7FFF, 0xFFFF):
        noise = jnp.full(2**16, noise, jnp.uint32)
        got = np.asarray(round_stochastically(values, jnp.dtype(dtype), noise))
        np.testing.assert_array_equal(bits(got)[~is_nan], bits(exact)[~is_nan])
        assert np.isnan(got[is_nan].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", LOW)
def test_a_finite_value_does_not_become_infinite(dtype):
    largest = float(ml_dtypes.finfo(LOW[dtype]).max)
    top = {"bfloat16": float(np.finfo(np.float32).max), "float16": 65535.0}[dtype]
    for sign in (1.0, -1.0):
        x = jnp.full(2**16, sign * top, jnp.float32)
        got = np.asarray(round_stochastically(x, jnp.dtype(dtype), ALL_NOISE))
        assert (got.astype(np.float64) == sign * largest).all()
    for value in (np.inf, -np.inf) + ((65536.0,) if dtype == "float16" else ()):
        x = jnp.full(4, value, jnp.float32)
        got = round_stochastically(x, jnp.dtype(dtype), ALL_NOISE[-4:])
        assert np.isinf(np.asarray(got).astype(np.float64)).all()


def test_noise_is_uniform_and_streams_differ():
    index = element_index((1 << 16,))
    streams = [
        *noise_at(index).for_moments(),
        noise_at(index).for_params(),
        noise_at(index, seed=6).for_moments()[0],
        noise_at(index, step=2).for_moments()[0],
        noise_at(index, leaf_id=1).for_moments()[0],
    ]
    streams = [np.asarray(x, np.float64) / 2**16 for x in streams]
    sigma = math.sqrt(1 / 12 / 2**16)
    for x in streams:
        assert abs(x.mean() - 0.5 + 2.0**-17) < 4 * sigma
    correlations = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlations).max() < 5 / 2**8


# --- Derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
def test_derivative_is_that_of_rounding_to_nearest(dtype):
    def rounded(x, noise):
        return round_stochastically(x, jnp.dtype(dtype), noise)

    x, noise = jnp.linspace(-2.0, 2.0, 7), ALL_NOISE[:7]
    tangent = jnp.linspace(0.3, 0.9, 7)
    got, got_tangent = jax.jvp(lambda x: rounded(x, noise), (x,), (tangent,))
    np.testing.assert_array_equal(got, rounded(x, noise))
    np.testing.assert_array_equal(got_tangent, tangent.astype(dtype))


@pytest.mark.parametrize("which", [True, "params"])
def test_gradients_flow_through_steps_as_without_noise(which):
    """Through the moments of two steps, and through bfloat16 parameters."""
    dtype = jnp.bfloat16 if which == "params" else jnp.float32
    params = jnp.linspace(-1.0, 1.0, 12).astype(dtype)
    grads = jnp.linspace(0.5, 1.5, 12)

    def last_sum(stochastic_rounding, scale, params):
        tx = jfa.fused_adamw(
            0.1,
            mu_dtype=jnp.bfloat16,
            nu_dtype=jnp.bfloat16,
            stochastic_rounding=stochastic_rounding,
            implementation="xla",
        )
        state = tx.init(params)
        for g in (scale * grads, 0.5 * grads):
            params, state = jfa.step(tx, g, state, params)
        return params.astype(jnp.float32).sum()

    derivative = jax.jit(jax.grad(last_sum, (1, 2)), static_argnums=0)
    got, expected = (derivative(x, 1.0, params) for x in (which, False))
    assert abs(expected[0]) > 0.01
    np.testing.assert_allclose(got[0], expected[0], rtol=0.05)
    np.testing.assert_allclose(
        *(np.asarray(x[1], np.float64) for x in (got, expected)), rtol=0.02
    )
