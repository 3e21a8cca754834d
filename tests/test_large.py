"""Leaves and trees of more than 2^31 elements: minutes and 40 GB of GPU memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fused_adamw as jfa

try:
    GPU = jax.devices("cuda")[0]
except RuntimeError:
    GPU = None

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GPU is None, reason="needs a CUDA device"),
]

# One step from zero with g = 1: the update is -lr / (1 + eps).
STEPPED = np.float32(-1e-3 / (1 + 1e-8))


def donated_step(tx):
    def step(params, state, grads):
        return jfa.step(tx, grads, state, params)

    return jax.jit(step, donate_argnums=(0, 1))


def test_b16_a_leaf_of_more_than_2_31_elements():
    n = 2**31 + 7
    marked = (0, 2**31 - 1, 2**31, n - 1)
    tx = jfa.fused_adamw(1e-3, weight_decay=0.0)
    with jax.default_device(GPU), jax.enable_x64(True):
        positions = jnp.arange(n, dtype=jnp.int64)
        grads = jnp.isin(positions, jnp.array(marked)).astype(jnp.bfloat16)
        del positions
        assert jfa.grad_stats(grads).norm == 2.0
        params = jnp.zeros(n, jnp.float32)
        params, state = donated_step(tx)(params, tx.init(params), grads)
        assert int(jnp.count_nonzero(params)) == len(marked)
        for i in marked:
            np.testing.assert_allclose(params[i], STEPPED, rtol=3e-7)
        assert int(jnp.count_nonzero(state.mu)) == len(marked)


def test_b17_a_tree_whose_sizes_sum_to_more_than_2_31():
    tx = jfa.fused_adamw(1e-3, weight_decay=0.0)
    with jax.default_device(GPU):
        params = [jnp.zeros(2**29) for _ in range(5)]
        grads = [jnp.ones(2**29, jnp.bfloat16) for _ in range(5)]
        np.testing.assert_allclose(jfa.grad_stats(grads).norm, 51810.7572, rtol=1e-6)
        params, _ = donated_step(tx)(params, tx.init(params), grads)
        for leaf in params:
            low, high = float(leaf.min()), float(leaf.max())
            assert low == high
            np.testing.assert_allclose(low, STEPPED, rtol=3e-7)
