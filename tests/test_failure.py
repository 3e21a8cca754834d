"""What a device failure leaves, and that the last checkpoint is a way on from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import jax_fused_adamw as jfa

X = jnp.linspace(-1.0, 1.0, 6 * 8 * 5).reshape(6, 8, 5)


def make_step(failing):
    """A train step that fails on the device while the host's ``failing`` is true."""
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0)

    def check(x):
        if failing:
            raise RuntimeError("the device has failed")
        return x

    @jax.jit(donate_argnums=(0, 1))
    def train_step(params, state, x):
        x = jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        grads = jax.grad(lambda p: jnp.square(x @ p["w"] - 1.0).mean())(params)
        return jfa.step(tx, grads, state, params)

    return tx, train_step


def start(tx):
    params = {"w": jnp.ones((5, 3))}
    return params, tx.init(params)


@pytest.mark.platform("cpu")
def test_checkpoint_resumes_after_a_failure():
    """The README's recipe: wait, save with the position, discard, restore."""
    failing = []
    tx, train_step = make_step(failing)
    expected = start(tx)
    for x in X:
        expected = train_step(*expected, x)

    live = start(tx)
    for position in range(3):
        live = train_step(*live, X[position])
    jax.block_until_ready(live)
    checkpoint = jax.tree.map(np.array, live), position + 1

    failing.append(True)
    # XLA:CPU's kind of error depends on the thread that fails.
    kinds = (jax.errors.JaxRuntimeError, ValueError)
    with pytest.raises(kinds, match="the device has failed"):
        jax.block_until_ready(train_step(*live, X[3]))

    failing.clear()
    live, position = checkpoint
    live = jax.tree.map(jnp.array, live)
    for x in X[position:]:
        live = train_step(*live, x)
    assert_same_bits(live, expected)
