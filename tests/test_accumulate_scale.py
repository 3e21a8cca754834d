"""`jfa.accumulate` with loss scales, and with what is beyond float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from test_accumulate import MICRO, clipped, last, ours, times, walk, windows

import jax_fused_adamw as jfa


def test_loss_scale_may_change_within_a_window():
    scales = [1024.0, 512.0, 2048.0]
    grads = [times(g, s) for g, s in zip(MICRO, scales, strict=False)]
    extras = [{"gradient_scale": jnp.float32(s)} for s in scales]
    for run in (windows(3), windows(3, clipped)):
        scaled = last(walk(run, grads, extras=extras))
        assert_same_bits(scaled, last(walk(run, MICRO[:3])))


def test_largest_loss_scale_divides_too():
    """By a product with its reciprocal, which is subnormal, XLA would make zeros."""
    scale = jnp.float32(2.0**127)
    grads = {"w": jnp.array([1.5, -1e-3, 3e38]), "b": jnp.float32(1e-30)}
    params = jax.tree.map(jnp.ones_like, grads)
    got = last(walk(windows(1), [grads], params, [{"gradient_scale": scale}]))
    expected = jax.tree.map(lambda g: np.float64(g) / 2.0**127, grads)
    mu = got[1].inner_opt_state.mu
    np.testing.assert_allclose(mu["w"], 0.1 * expected["w"], rtol=1e-6, atol=1.2e-38)
    assert float(mu["w"][2]) > 0.1


@pytest.mark.parametrize("told_by", ["finite", "report"])
def test_dynamic_loss_scale_around_windows(told_by):
    """An overflow costs its window, and shrinks the scale at once."""
    tx = jfa.accumulate(ours(), 2)
    params = {"w": jnp.ones(4)}
    state, loss_scale = tx.init(params), jfa.DynamicLossScale(2.0**15)

    @jax.jit
    def train_step(params, state, loss_scale, x):
        grads = jax.grad(
            lambda p: loss_scale.scale((p["w"].astype(jnp.float16) * x).sum())
        )(params)
        scale = loss_scale.value
        told, extra = {"finite": jnp.isfinite(grads["w"]).all()}, {}
        if told_by == "report":
            told = extra = {"report": jfa.grad_stats(grads, scale)}
        params, state = jfa.step(
            tx, grads, state, params, gradient_scale=scale, **extra
        )
        return params, state, loss_scale.update(**told)

    for x in jnp.array([1.0, 3.0, 1.0, 2.0], jnp.float16):
        params, state, loss_scale = train_step(params, state, loss_scale, x)
    assert float(loss_scale.value) == 2.0**14
    assert int(state.skipped_windows) == 1
    expected = jfa.step(
        ours(), {"w": jnp.full(4, 1.5)}, ours().init(params), {"w": jnp.ones(4)}
    )
    assert_same_bits(params, expected[0])


def test_scale_beyond_float32_skips_its_window():
    tx = jfa.accumulate(jfa.fused_adamw(1e-2), 1)
    params = jnp.ones(2)
    new_params, state = jfa.step(
        tx, params, tx.init(params), params, gradient_scale=10**400
    )
    assert_same_bits(new_params, params)
    assert state.skipped_windows == 1


def test_norm_beyond_float32_clips_right():
    tx = jfa.accumulate(jfa.fused_adamw(1e-2, b1=0.0, max_grad_norm=1.0), 1)
    params, grads = jnp.ones(1000), jnp.full(1000, 3e38)
    _, state = jfa.step(tx, grads, tx.init(params), params)
    np.testing.assert_allclose(np.linalg.norm(state.inner_opt_state.mu), 1.0, rtol=1e-6)
