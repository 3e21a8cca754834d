"""Links of the chain of trust that hold bit by bit, and what they rest on."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    HYPERPARAMS,
    VARIANTS,
    WAYS,
    assert_same_bits,
    make_tx,
    mixed_tree,
    name_of,
    scaled,
    state_at,
    take_step,
)

import jax_fused_adamw as jfa

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=name_of)


def as_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


# --- The three ways -------------------------------------------------------------------


@every_variant
def test_three_ways_give_float32_leaves_the_same_bits(variant):
    """Over steps with shrinking gradients of every dtype."""
    params, grads = mixed_tree()
    params = as_float32(params)
    ends = []
    for way in WAYS:
        tx = make_tx(way, **HYPERPARAMS, **variant)
        values, state = params, state_at(tx, params, 41)
        for scale in (1.0, 0.25, 0.03125):
            shrunk = scaled(grads, scale)
            values, state = take_step(way, tx, shrunk, state, values)
        ends.append((values, state))
    for end in ends[1:]:
        assert_same_bits(end, ends[0])
    moved = jax.tree.map(lambda p, q: bool((p != q).all()), params, ends[0][0])
    assert all(jax.tree.leaves(moved))


# --- Storage below float32 <-> float32 ------------------------------------------------


@pytest.mark.parametrize("way", ["step", "in_place", "update only"])
@every_variant
def test_low_precision_leaves_are_the_float32_result_rounded_once(variant, way):
    """p + u is rounded by step and in_place, u by update; nothing else is.

    The conversions of NumPy's dtypes, exact in one direction and to nearest even in
    the other, serve as the reference of the kernel's own.
    """
    params, grads = mixed_tree()
    tx = make_tx(way, **HYPERPARAMS, **variant)
    state = state_at(tx, params, 20)

    def result(params, grads):
        if way == "update only":
            return tx.update(grads, state, params)
        return take_step(way, tx, grads, state, params)

    exact, exact_state = result(as_float32(params), as_float32(grads))
    rounded, rounded_state = result(params, grads)
    expected = jax.tree.map(lambda x, p: np.asarray(x).astype(p.dtype), exact, params)
    assert_same_bits(rounded, expected)
    assert_same_bits(rounded_state, exact_state)


def every_word(dtype) -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_low_precision_gradient_is_read_exactly(dtype):
    words = every_word(dtype)
    grads = jnp.asarray(words)
    tx = jfa.fused_adamw(1.0, b1=0.0, weight_decay=0.0)
    # The first moment is the gradient; it starts at -0.0, which adding keeps.
    state = tx.init(grads)._replace(mu=jnp.full(grads.shape, -0.0))
    _, state = tx.update(grads, state, grads)
    expected = words.astype(np.float32)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(~np.isnan(state.mu), number)
    assert_same_bits(np.asarray(state.mu)[number], expected[number])


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "scale", [1.0, 3.0, 1000.0, 0.1, 2.0**16, 2.0**-16, 2.0**126, 2.0**127, 2.0**-140]
)
def test_gradients_are_divided_by_the_scale_and_rounded_once(scale, maximize):
    """Bit for bit the quotient, where the kernel multiplies by a reciprocal too."""
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    values *= np.float32(2.0) ** np.arange(-126, 126, 0.252).astype(np.float32)
    grads = jnp.asarray(values)
    tx = jfa.fused_adamw(1.0, b1=0.0, weight_decay=0.0, maximize=maximize)
    _, state = tx.update(grads, tx.init(grads), grads, gradient_scale=scale)
    with np.errstate(over="ignore", under="ignore"):
        expected = values / np.float32(-scale if maximize else scale)
    # Adding the decayed moment of 0.0 leaves no -0.0.
    assert_same_bits(np.asarray(state.mu), expected + np.float32(0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("factor", [0, 2**-9, 2**-24, 2**8])
def test_every_low_precision_parameter_is_stored_to_nearest_even(dtype, factor):
    """All words times numbers that make ties, their neighbours and overflow.

    A zero gradient leaves the decay alone: the update is -(weight_decay * param).
    """
    words = every_word(dtype)
    params = jnp.asarray(words)
    factors = np.float32([1.5, 1.25, 1.75, 1.0, np.pi]) * np.float32(factor)
    around = np.nextafter(factors, np.float32(9)), np.nextafter(factors, np.float32(0))
    for decay in np.concatenate([factors, *around]):
        tx = jfa.fused_adamw(1.0, weight_decay=decay)
        state = tx.init(params)
        updates, _ = tx.update(jnp.zeros_like(params), state, params)
        # The kernel adds the decay to a direction of +0.0, or nothing where it is 0.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            decayed = decay * words.astype(np.float32) if decay else np.float32(0)
            expected = np.broadcast_to(-(np.float32(0) + decayed), words.shape)
            expected = expected.astype(words.dtype)
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(~np.isnan(np.asarray(updates)), number)
        assert_same_bits(np.asarray(updates)[number], expected[number])


# --- Subnormals -----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["step", "in_place"])
def test_kernel_keeps_subnormals(way):
    """XLA's own threads flush them: the kernel sets its own mode and puts it back."""
    params = jnp.asarray(np.float32([1e-40, -1e-40, 1e-45, 1.0]))
    tx = make_tx(way, learning_rate=0.5, b1=0.5, b2=0.5, weight_decay=0.0)
    state = tx.init(params)._replace(nu=jnp.asarray(np.float32([2e-39, 0, 0, 0])))
    new, after = take_step(way, tx, jnp.zeros(4), state, params)
    assert_same_bits(new, params)
    assert_same_bits(np.asarray(after.nu), np.float32([1e-39, 0, 0, 0]))


@pytest.mark.platform("cpu")
def test_xla_flushes_subnormals():
    product = jax.jit(jnp.multiply)(jnp.asarray(np.float32(1e-39)), jnp.float32(0.5))
    assert float(product) == 0.0, "XLA no longer flushes: simplify the kernel"


@pytest.mark.platform("cpu")
def test_apply_updates_flushes_subnormals():
    """Where ``update`` with ``apply_updates`` differs from ``step``: XLA's addition."""
    params = jnp.asarray(np.float32([1e-40, 1.0]))
    tx = jfa.fused_adamw(0.5, weight_decay=0.0)
    moved = take_step("update", tx, jnp.zeros(2), tx.init(params), params)[0]
    assert_same_bits(np.asarray(moved), np.float32([0.0, 1.0]))


# --- Instruction sets -----------------------------------------------------------------

DIGEST_SCRIPT = """
import hashlib, jax, jax.numpy as jnp, numpy as np
import jax_fused_adamw as jfa
from helpers import HYPERPARAMS, VARIANTS, bits, mixed_tree, random_like, state_at

params, grads = mixed_tree(size=1061)
params["long"] = random_like(jnp.zeros(70001), seed=8)
grads["long"] = random_like(jnp.zeros(70001), seed=9)
digest = hashlib.sha256()
for variant in VARIANTS:
    tx = jfa.fused_adamw(**HYPERPARAMS, **variant)
    state = state_at(tx, params, 30)
    for scale in (1.0, 3.0, 4.0):
        for step in (tx.step, tx.update):
            after = step(grads, state, params, gradient_scale=scale)
            for leaf in jax.tree.leaves(after):
                digest.update(bits(leaf).tobytes())
print(jfa.kernel_info().cpu.details["instruction_set"], digest.hexdigest())
"""


def test_instruction_sets_give_the_same_bits():
    names = jfa.kernel_info().cpu.details["supported"]
    if len(names) == 1:
        pytest.skip("this processor has the portable kernel only")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DIGEST_SCRIPT],
            cwd=pathlib.Path(__file__).parent,
            env=os.environ | {"JAX_FUSED_ADAMW_CPU_ISA": name, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    lines = [process.communicate(timeout=300)[0].split() for process in processes]
    assert [used for used, _ in lines] == list(names)
    assert len({digest for _, digest in lines}) == 1, lines
