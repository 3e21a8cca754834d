"""Comparisons, trees and compiled-text queries that several test files share."""

import re

import jax
import jax.numpy as jnp
import numpy as np

# Bounds against float64, in ulp of the largest term that was added.
ULP_BOUNDS = {"mu": 2, "nu": 3, "nu_max": 3, "update": 16, "param": 10}


def bits(x) -> np.ndarray:
    """The array's bit pattern, so that NaN and -0.0 compare as what they are."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.itemsize])


def assert_same_bits(actual, expected) -> None:
    """Equal trees: structure, dtype, shape and every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    )
    for (path, a), e in pairs:
        name = jax.tree_util.keystr(path)
        assert a.dtype == e.dtype and a.shape == e.shape, name
        np.testing.assert_array_equal(bits(a), bits(e), err_msg=name)


def assert_within_ulp(actual, expected, bound, largest_term=None, name="") -> None:
    """|actual - expected| <= bound ulp (float32) of ``largest_term``."""
    expected = np.asarray(expected, np.float64)
    scale = np.abs(expected if largest_term is None else largest_term)
    scale = np.maximum(scale, np.abs(expected)).astype(np.float32)
    ulp = np.spacing(np.maximum(scale, np.float32(2.0**-126))).astype(np.float64)
    error = np.abs(np.asarray(actual, np.float64) - expected) / ulp
    worst = error.max() if error.size else 0.0
    assert worst <= bound, f"{name}: {worst:.2f} ulp, at most {bound} allowed"


def random_like(tree, seed=0, scale=1.0, dtype=None):
    """Normal values with the tree, shapes and dtypes of ``tree``."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape) * scale, dtype or x.dtype), tree
    )


def copies(compiled) -> int:
    """Copy instructions in a compiled program's text."""
    return len(re.findall(r"= \S+ copy\(", compiled.as_text()))


def count_ops(compiled, op: str) -> int:
    return len(re.findall(rf"= \S.* {op}\(", compiled.as_text()))
