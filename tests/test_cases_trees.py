"""Bookkeeping faults of multi-tensor optimizers, as inputs with right answers.

A test's number is that of its case. Unless a case says otherwise: lr 1e-3, b1 .9,
b2 .999, eps 1e-8, no decay, float32, count 0.
"""

import itertools
import pickle
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    WAYS,
    assert_same_bits,
    assert_within_ulp,
    plain_tx,
    random_like,
    walk,
)

import jax_fused_adamw as jfa

every_way = pytest.mark.parametrize("way", WAYS)


@every_way
@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
def test_b12_empty_leaf_anywhere(way, order):
    sizes = {"a": 4, "b": 0, "c": 4}
    params = [jnp.ones(sizes[name]) for name in order]
    tx = plain_tx(way)
    [(new, state)] = walk(way, tx, [params], params)
    for name, leaf in zip(order, new, strict=True):
        expected = np.full(sizes[name], 0.99900000001)
        assert_within_ulp(leaf, expected, 1)
        assert leaf.shape == expected.shape
    assert int(state.count) == 1


@pytest.mark.parametrize(
    "num_leaves", [1000, pytest.param(5000, marks=pytest.mark.slow)]
)
def test_b14_only_empty_leaves(num_leaves):
    params = {i: jnp.zeros((0,)) for i in range(num_leaves)}
    tx = plain_tx(amsgrad=True)
    new, state = jax.jit(tx.step)(params, tx.init(params), params)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert all(leaf.shape == (0,) for leaf in new.values())
    assert int(state.count) == 1


@every_way
def test_b18_mixed_gradient_dtypes_in_every_order(way):
    leaves = [(3.0, "bfloat16"), (4.0, "float32"), (12.0, "float16")]
    tx = plain_tx(way, weight_decay=0.1)
    singles = {}
    for value, dtype in leaves:
        grads, params = jnp.array([value], dtype), jnp.array([value + 1.0])
        [singles[dtype]] = walk(way, tx, [grads], params)
        assert_within_ulp(singles[dtype][1].mu, [0.1 * value], 2)
    for order in itertools.permutations(leaves):
        grads = [jnp.array([value], dtype) for value, dtype in order]
        params = [jnp.array([value + 1.0]) for value, _ in order]
        [(new, state)] = walk(way, tx, [grads], params)
        for i, (_, dtype) in enumerate(order):
            one = state._replace(mu=state.mu[i], nu=state.nu[i])
            assert_same_bits((new[i], one), singles[dtype])


@pytest.mark.parametrize(
    "tree", [{}, {"w": np.ones(3, np.float32)}], ids=["empty", "masked"]
)
def test_b20_empty_group_counts_and_survives_saving(tree):
    params = jax.tree.map(jnp.asarray, tree)
    inner = plain_tx()
    tx = optax.masked(inner, jax.tree.map(lambda _: False, params))
    state = tx.init(params)
    for step in range(1, 4):
        saved = pickle.dumps(jax.device_get(state))
        state = jax.tree.map(jnp.asarray, pickle.loads(saved))
        new, state = jax.jit(lambda s: jfa.step(tx, params, s, params))(state)
        assert int(optax.tree.get(state, "count")) == step
        # What the transformation does not own passes through: p + g.
        assert_same_bits(new, jax.tree.map(lambda p: p + p, params))


# XLA:CPU takes half a minute for 5000 leaves, and much longer when they are donated.
@pytest.mark.parametrize(
    "num_leaves, donated",
    [(1000, (1, 2)), pytest.param(5000, (), marks=pytest.mark.slow)],
)
def test_b21_very_many_leaves(num_leaves, donated):
    """Equal to one leaf that holds them all, and to leaves alone."""
    shape = (num_leaves, 3)
    tx = plain_tx(weight_decay=0.1)
    rows, row_grads = (random_like(jnp.zeros(shape), seed=seed) for seed in (1, 2))
    params, grads = list(rows), list(row_grads)
    state, copies = tx.init(params), [jnp.array(param) for param in params]
    step = jax.jit(tx.step, donate_argnums=donated)
    start = time.monotonic()
    new, after = jax.block_until_ready(step(grads, state, copies))
    assert time.monotonic() - start < 60
    stacked, whole = tx.step(row_grads, tx.init(rows), rows)
    assert_same_bits(np.stack(new), np.asarray(stacked))
    assert_same_bits(np.stack(after.mu), np.asarray(whole.mu))
    assert_same_bits(np.stack(after.nu), np.asarray(whole.nu))
    for i in (0, 63, 64, 255, 256, num_leaves - 1):
        alone, _ = tx.step(grads[i], tx.init(params[i]), params[i])
        assert_same_bits(new[i], alone)
