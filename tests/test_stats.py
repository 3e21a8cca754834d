"""Gradient statistics: exact counts, norms near float64's, one fixed tree of sums."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, bits, count_ops

import jax_fused_adamw as jfa
from jax_fused_adamw import _stats_primitives as primitives

NONFINITE = {
    "float32": (0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000),
    "bfloat16": (0x7FC0, 0xFFC0, 0x7F81, 0x7F80, 0xFF80),
    "float16": (0x7E00, 0xFE00, 0x7C01, 0x7C00, 0xFC00),
}
WORDS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
# Around the lanes, rounds, tiles and draws of the kernels.
SIZES = (1, 3, 4, 5, 511, 512, 513, 4095, 4096, 4097, 65_537)
implementations = pytest.mark.parametrize("implementation", ["ffi", "xla"])


def norm64(leaves, scale=1.0):
    total = sum(np.sum((np.asarray(x, np.float64) / scale) ** 2) for x in leaves)
    return np.sqrt(total)


def random_leaves(sizes, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=n), dtype) for n in sizes]


@implementations
@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 3.0])
def test_norm_and_maximum(implementation, dtype, scale):
    leaves = random_leaves(SIZES, dtype=dtype)
    report = jfa.grad_stats(leaves, scale, implementation=implementation)
    assert report.norm.dtype == report.max_abs.dtype == jnp.float32
    assert report.nonfinite.dtype == jnp.int32
    np.testing.assert_allclose(report.norm, norm64(leaves, scale), rtol=3e-7)
    largest = max(np.abs(np.asarray(x, np.float32)).max() for x in leaves)
    expected = largest / np.float32(scale)
    if implementation == "ffi":
        assert report.max_abs == expected
    np.testing.assert_allclose(report.max_abs, expected, rtol=1.2e-7)
    assert report.nonfinite == 0


@implementations
def test_per_leaf_in_the_order_of_the_tree(implementation):
    tree = {"b": jnp.zeros(0), "a": jnp.array([3.0, -4.0]), "c": jnp.full(5000, 2.0)}
    tree["d"] = jnp.array([1.0, np.nan, np.inf])
    total, leaves = jfa.grad_stats(tree, per_leaf=True, implementation=implementation)
    np.testing.assert_allclose(leaves.norm[:3], [5, 0, np.sqrt(5000 * 4)], rtol=1e-6)
    np.testing.assert_array_equal(leaves.max_abs, [4, 0, 2, np.nan])
    np.testing.assert_array_equal(leaves.nonfinite, [0, 0, 0, 2])
    assert np.isnan(total.norm) and np.isnan(total.max_abs) and total.nonfinite == 2
    assert_same_bits(total, jfa.grad_stats(tree, implementation=implementation))


@implementations
@pytest.mark.parametrize(
    "tree", [{}, [], {"a": None}, [jnp.zeros(0)], [jnp.zeros((3, 0))]]
)
def test_no_elements(implementation, tree):
    report = jfa.grad_stats(tree, implementation=implementation)
    assert [float(x) for x in report] == [0.0, 0.0, 0.0]


# --- Extreme values -------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, norm",
    [
        ([300.0, 400.0], 500.0),  # as float16: the square overflows
        ([3e19, 4e19], 5e19),
        ([3e-24, 4e-24], 5e-24),
        ([3e-42, 4e-42], 5e-42),  # subnormal
        ([3e38, 0.0], 3e38),
        ([2.4e38, 2.4e38], 3.394e38),
        ([3e38, 1e-45], 3e38),
    ],
)
def test_b04_squares_neither_overflow_nor_vanish(values, norm):
    dtype = jnp.float16 if values[0] == 300 else jnp.float32
    report = jfa.grad_stats(jnp.array(values, dtype))
    np.testing.assert_allclose(report.norm, norm, rtol=1e-3 if norm < 1e-40 else 1e-4)
    exact = norm64([np.array(values, np.float32)])
    np.testing.assert_allclose(report.norm, exact, rtol=1e-6 if norm > 1e-30 else 1e-3)


def test_norm_beyond_float32_reports_the_largest():
    report = jfa.grad_stats(jnp.full(1000, 3e38, jnp.float32))
    assert report.norm == np.finfo(np.float32).max
    assert report.max_abs == np.float32(3e38) and report.nonfinite == 0


@pytest.mark.parametrize("scale", [np.inf, np.nan, 0.0, -1.0, 10**400])
def test_scale_that_cannot_be_one_makes_everything_nonfinite(scale):
    report = jfa.grad_stats([jnp.ones(5), jnp.zeros(4096), jnp.zeros(0)], scale)
    assert report.nonfinite == 4101 and np.isnan(report.norm)


def test_unscaled_gradient_decides():
    """Finite as it is stored, infinite unscaled; and the other way round."""
    assert jfa.grad_stats(jnp.array([3e38]), 0.5).nonfinite == 1
    assert jfa.grad_stats(jnp.array([60000.0], jnp.float16), 2.0**-10).nonfinite == 0


@implementations
@pytest.mark.parametrize("dtype", WORDS)
def test_b11_every_nonfinite_word_is_found(implementation, dtype):
    stats = jax.jit(lambda x: jfa.grad_stats(x, implementation=implementation))
    for size in (1, 333, 65_537):
        finite = np.zeros(size, WORDS[dtype])
        finite[:] = np.asarray(jnp.finfo(dtype).max, dtype=jnp.dtype(dtype)).view(
            WORDS[dtype]
        )
        assert stats(jnp.asarray(finite.view(dtype))).nonfinite == 0
        for word in NONFINITE[dtype]:
            for place in {0, size // 2, size - 1}:
                planted = finite.copy()
                planted[place] = word
                report = stats(jnp.asarray(planted.view(dtype)))
                assert report.nonfinite == 1
                is_nan = (
                    word & ~np.array(NONFINITE[dtype][4]) != 0
                )  # beyond -inf's bits
                expected = np.nan if is_nan else np.inf
                np.testing.assert_array_equal(report.norm, np.float32(expected))
                np.testing.assert_array_equal(report.max_abs, np.float32(expected))


def test_ten_thousand_nonfinite_values_and_none_invented():
    """Random dtype, payload, place and number of leaves; on extreme finite values."""
    rng = np.random.default_rng(5)
    stats = jax.jit(jfa.grad_stats)
    planted = 0
    while planted < 10_000:
        leaves, expected = [], 0
        for i in range(7):
            dtype = list(WORDS)[i % 3]
            word = WORDS[dtype]
            size = (1, 130, 513, 4097, 9000, 0, 77)[i]
            magnitudes = [0, 1, np.asarray(jnp.finfo(dtype).max, dtype).view(word)]
            sign = 1 << (8 * np.dtype(word).itemsize - 1)
            leaf = rng.choice(
                np.array([m | s for m in magnitudes for s in (0, sign)]), size
            )
            leaf = leaf.astype(word)
            if rng.random() < 0.8 and size:
                count = int(rng.integers(1, min(size, 400) + 1))
                places = rng.choice(size, count, replace=False)
                leaf[places] = rng.choice(np.array(NONFINITE[dtype], word), count)
                expected += count
            leaves.append(jnp.asarray(leaf.view(dtype)))
        assert stats(leaves).nonfinite == expected
        planted += expected


# --- One tree of sums -----------------------------------------------------------------


def test_grouping_of_equal_chunks_does_not_matter():
    """A leaf cut at a chunk's border has the rows of its parts."""
    x = np.random.default_rng(0).normal(size=5 * 4096 + 7).astype(np.float32)
    whole = jfa.grad_stats(jnp.asarray(x))
    parts = jfa.grad_stats([jnp.asarray(x[: 2 * 4096]), jnp.asarray(x[2 * 4096 :])])
    assert_same_bits(parts, whole)


def test_order_of_merges():
    """More rows than one merge takes: levels, as StatsPlan has them."""
    x = np.random.default_rng(0).normal(size=1_100 * 4096).astype(np.float32)
    *_, rows = primitives.analyze_p.bind(
        np.float32(1), jnp.asarray(x), members=None, chunk=4096, per_leaf=False
    )
    assert rows.shape == (1100, 3)
    sums = np.asarray(rows)[:, 0].copy().view(np.float32).astype(np.float64)
    scale = 2.0 ** ((np.asarray(rows)[:, 1] >> 23).astype(np.float64) - 127)
    norm = np.sqrt(np.sum(sums * scale**2))
    assert jfa.StatsPlan(1100).levels == (2,)
    np.testing.assert_allclose(jfa.grad_stats(jnp.asarray(x)).norm, norm, rtol=1e-7)
    np.testing.assert_allclose(norm, norm64([x]), rtol=2e-7)


def test_larger_trees_take_larger_chunks():
    assert primitives.chunk_elements([4096 * 4_194_304]) == 4096
    assert primitives.chunk_elements([4096 * 4_194_304 + 1]) == 8192
    assert primitives.chunk_elements([4096 * 4_194_304, 1]) == 8192


def test_chunks_of_several_tiles(monkeypatch):
    leaves = random_leaves((1, 4097, 50_000), seed=1)
    expected = jfa.grad_stats(leaves)
    monkeypatch.setattr(primitives, "TILE_ELEMENTS", 3 * 4096)
    jax.clear_caches()
    report = jfa.grad_stats(leaves)
    np.testing.assert_allclose(report.norm, expected.norm, rtol=3e-7)
    assert_same_bits(report[1:], expected[1:])
    jax.clear_caches()


DIGEST = """
import jax.numpy as jnp, numpy as np, jax_fused_adamw as jfa
rng = np.random.default_rng(0)
for dtype in ("float32", "bfloat16", "float16"):
    leaves = [jnp.asarray(rng.normal(size=n), dtype) for n in (1, 511, 4097, 70_001)]
    for scale in (1.0, 3.0):
        for x in jfa.grad_stats(leaves, scale):
            print(np.asarray(x).tobytes().hex())
"""


def test_every_instruction_set_gives_the_same_bits():
    def digest(isa):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST],
            env=os.environ | {"JAX_FUSED_ADAMW_CPU_ISA": isa, "JAX_PLATFORMS": "cpu"},
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    supported = jfa.kernel_info().cpu.details["supported"]
    assert len({digest(isa) for isa in supported}) == 1


# --- Under transformations ------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
def test_vmap_equals_a_loop(scaled):
    rng = np.random.default_rng(0)
    grads = [jnp.asarray(rng.normal(size=(3, n)), jnp.float32) for n in (5, 4097)]
    grads[0] = grads[0].at[1, 2].set(jnp.nan)
    scales = jnp.array([1.0, 2.0, 3.0]) if scaled else jnp.ones(3)

    def stats(grads, scale):
        return jfa.grad_stats(grads, scale, per_leaf=True)

    batched = jax.vmap(stats, in_axes=(0, 0 if scaled else None))(
        grads, scales if scaled else scales[0]
    )
    for i in range(3):
        one = stats([g[i] for g in grads], scales[i])
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], batched), one)


def test_nested_vmap_and_an_unbatched_leaf():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 7)), jnp.float32)
    y = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5)), jnp.float32)
    stats = lambda x, y: jfa.grad_stats([x, y]).norm  # noqa: E731
    batched = jax.vmap(jax.vmap(stats, in_axes=(0, None)))(x, y)
    expected = [[stats(x[i, j], y[i]) for j in range(3)] for i in range(2)]
    np.testing.assert_array_equal(bits(batched), bits(np.array(expected)))
    assert jax.vmap(stats)(jnp.zeros((0, 2)), jnp.zeros((0, 3))).shape == (0,)


def test_scan_cond_checkpoint_and_disable_jit():
    x = jnp.arange(6.0).reshape(2, 3)
    _, norms = jax.lax.scan(lambda c, row: (c, jfa.grad_stats(row).norm), 0, x)
    np.testing.assert_allclose(norms, [np.sqrt(5), np.sqrt(50)], rtol=1e-6)
    with jax.disable_jit():
        assert jfa.grad_stats(jnp.array([3.0, 4.0])).norm == 5.0


def test_gradient_is_refused_by_name():
    with pytest.raises(TypeError, match="cannot be differentiated"):
        jax.grad(lambda x: jfa.grad_stats(x).norm)(jnp.ones(3))


def test_one_custom_call_and_nothing_read_by_the_host():
    compiled = jax.jit(jfa.grad_stats).lower([jnp.ones(3)] * 300).compile()
    assert count_ops(compiled, "custom-call") == 1
    text = compiled.as_text()
    assert "callback" not in text and "outfeed" not in text


@pytest.mark.parametrize("leaf", [jnp.arange(3), jnp.ones(2, bool), "text"])
def test_other_leaves_are_named(leaf):
    with pytest.raises(TypeError, match=r"grads\['w'\]"):
        jfa.grad_stats({"w": leaf})


def test_gradients_are_not_written():
    x = jnp.asarray(np.random.default_rng(0).normal(size=5000), jnp.float32)
    before = np.array(x)
    jfa.grad_stats(x, 3.0)
    np.testing.assert_array_equal(bits(x), bits(before))
