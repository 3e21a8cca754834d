"""The plain-JAX twin's own arithmetic: float64 patterns read without float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fused_adamw._reference import decode_float64_bits

FLOAT32 = np.finfo(np.float32)


def decode(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    words = np.ascontiguousarray(values, "<f8").view("<u4").reshape(-1, 2)
    value, residual = decode_float64_bits(jnp.asarray(words.astype(np.uint32)))
    return np.asarray(value), np.asarray(residual)


def check_sum(values: np.ndarray) -> None:
    """value rounds correctly but for ties; value + residual has 48 bits.

    Where a part falls below float32's normal numbers, a platform may flush it.
    """
    value, residual = decode(values)
    assert value.dtype == residual.dtype == np.float32
    flushed = 2.0**-126
    half_ulp = np.spacing(np.abs(value)).astype(np.float64) / 2
    rounding = np.abs(value - values)
    assert (rounding <= np.maximum(half_ulp * (1 + 2**-20), flushed)).all()
    error = np.abs(value.astype(np.float64) + residual - values)
    assert (error <= np.maximum(np.abs(values) * 2.0**-48, flushed)).all()


def test_normal_range():
    rng = np.random.default_rng(0)
    mantissas = 1 + rng.integers(0, 2**52, 20000) * 2.0**-52
    exponents = rng.integers(-125, 127, 20000)
    check_sum(np.ldexp(mantissas, exponents) * rng.choice([-1.0, 1.0], 20000))


@pytest.mark.parametrize("places", [1, 23, 24, 25, 47, 48, 49, 51, 52, 53])
def test_around_powers_of_two_and_ties(places):
    """1 - 2^-53 carries through all three parts of the mantissa."""
    small = 2.0**-places
    values = np.array([1 - small, 1 - 2 * small, 1 + 2 * small, 1 + 3 * small])
    check_sum(np.concatenate([values, values * 2.0**-30, values * 0.7]))


def test_usual_hyperparameters():
    values = np.array([0.9, 0.999, 0.9999999, 1e-8, 1e-4, 1e-3, 0.1, 3e-5, 65536.0])
    check_sum(values)
    assert decode(values)[0].tolist() == values.astype(np.float32).tolist()
    # What b2 is for: the difference from 1 survives.
    value, residual = decode(np.array([1 - 2.0**-40]))
    assert (1.0 - value) - residual == np.float32(2.0**-40)


def test_ends_of_the_range():
    largest = float(FLOAT32.max)
    values = [0.0, np.inf, largest, largest * (1 + 2**-26), 2.0**128, 1e300, 2.0**1023]
    values = np.array([*values, *(-x for x in values)])
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32)
    value, residual = decode(values)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(np.signbit(value), np.signbit(expected))
    assert (residual[~np.isfinite(expected)] == 0).all()


def test_nan():
    patterns = np.array(
        [
            0x7FF8000000000000,
            0xFFF8000000000000,
            0x7FF0000000000001,
            0x7FFFFFFF00000000,
        ],
        np.uint64,
    )
    value, residual = decode(patterns.view(np.float64))
    assert np.isnan(value).all()
    assert (residual == 0).all()


def test_below_normal_float32():
    """Kept or flushed to zero, as the platform does; never anything else."""
    values = np.array(
        [2.0**-127, 1.5 * 2.0**-140, 2.0**-149, 2.0**-150, 1e-60, 1e-300, 5e-324]
    )
    for sign in (1.0, -1.0):
        value, residual = decode(sign * values)
        kept = np.abs(value.astype(np.float64) - sign * values) <= 2.0**-149
        assert (kept | (value == 0)).all()
        assert (np.abs(residual) <= 2.0**-126).all()
