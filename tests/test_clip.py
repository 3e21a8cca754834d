"""Clipping and skipping inside the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    WAYS,
    assert_same_bits,
    copies,
    count_ops,
    make_tx,
    plain_tx,
    random_like,
    take_step,
)

import jax_fused_adamw as jfa

every_way = pytest.mark.parametrize("way", WAYS)
implementations = pytest.mark.parametrize("implementation", [None, "xla"])
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 1000).reshape(20, 50), "b": jnp.ones(3)}


def steps(way, tx, params, all_grads, **extra):
    state = tx.init(params)
    for grads in all_grads:
        params, state = take_step(way, tx, grads, state, params, **extra)
    return params, state


@every_way
@implementations
@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_agrees_with_optax_chain(way, implementation, max_norm):
    grads = [random_like(PARAMS, seed=i) for i in range(5)]
    ours = make_tx(
        way, learning_rate=1e-2, max_grad_norm=max_norm, implementation=implementation
    )
    theirs = optax.chain(optax.clip_by_global_norm(max_norm), optax.adamw(1e-2))
    params, state = steps(way, ours, PARAMS, grads)
    expected, peer = steps("update", theirs, PARAMS, grads)
    for name in PARAMS:
        moved = np.abs(expected[name] - PARAMS[name]).max()
        np.testing.assert_allclose(params[name], expected[name], atol=5e-5 * moved)
        for moment in ("mu", "nu"):
            np.testing.assert_allclose(
                getattr(state, moment)[name],
                optax.tree.get(peer, moment)[name],
                rtol=5e-5,
                atol=1e-9,
            )
    np.testing.assert_allclose(state.report.norm, optax.tree.norm(grads[-1]), rtol=1e-6)
    assert (state.count, state.skipped, state.consecutive) == (5, 0, 0)


@every_way
def test_b03_the_unscaled_norm_is_clipped(way):
    tx = plain_tx(way, max_grad_norm=1.0)
    params, grads = jnp.zeros(2), jnp.array([3072.0, 4096.0])
    _, state = take_step(way, tx, grads, tx.init(params), params, gradient_scale=1024.0)
    assert state.report.norm == 5.0
    np.testing.assert_array_almost_equal_nulp(
        np.asarray(state.mu), np.array([0.06, 0.08], np.float32), nulp=2
    )


def test_b04_extreme_norms_clip_right():
    for values, limit in (
        ([3e-24, 4e-24], 1e-24),
        ([3e19, 4e19], 1.0),
        ([3e38, 3e38], 2.0),  # the norm exceeds float32
    ):
        grads = jnp.array(values, jnp.float32)
        tx = jfa.fused_adamw(1e-3, b1=0.0, max_grad_norm=limit)
        _, state = tx.update(grads, tx.init(grads), grads)
        expected = np.array(values) / np.linalg.norm(np.array(values)) * limit
        np.testing.assert_allclose(state.mu, expected, rtol=1e-6)
        assert state.report.nonfinite == 0 and state.count == 1


@every_way
@implementations
def test_b05_zero_norm_and_zero_limit(way, implementation):
    tx = plain_tx(way, max_grad_norm=0.0, implementation=implementation)
    params = jnp.ones(3)
    params, state = take_step(way, tx, jnp.zeros(3), tx.init(params), params)
    assert_same_bits(params, jnp.ones(3))
    np.testing.assert_array_equal(state.mu, np.zeros(3))
    assert state.count == 1


@every_way
@implementations
def test_b06_infinite_norm_skips(way, implementation):
    tx = plain_tx(way, max_grad_norm=1.0, implementation=implementation)
    params = {"a": jnp.ones(2), "b": jnp.full(1, -0.0)}
    grads = {"a": jnp.array([np.inf, 1.0]), "b": jnp.array([2.0])}
    state = tx.init(params)
    new_params, new_state = take_step(way, tx, grads, state, params)
    assert_same_bits(new_params, params)
    assert_same_bits((new_state.mu, new_state.nu), (state.mu, state.nu))
    assert np.isinf(new_state.report.norm) and new_state.report.nonfinite == 1
    assert (new_state.count, new_state.skipped, new_state.consecutive) == (0, 1, 1)


@implementations
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_clipped_but_not_skipped_every_gradient_is_nan(implementation, bad):
    tx = jfa.fused_adamw(
        1e-3, max_grad_norm=1.0, skip_nonfinite=False, implementation=implementation
    )
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    grads = {"a": jnp.array([bad, 1.0]), "b": jnp.ones(3)}
    _, state = tx.update(grads, tx.init(params), params)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(state.mu))
    assert (state.count, state.skipped) == (1, 0)


@implementations
def test_skip_without_clip(implementation):
    tx = jfa.fused_adamw(1e-2, skip_nonfinite=True, implementation=implementation)
    plain = jfa.fused_adamw(1e-2, implementation=implementation)
    grads = random_like(PARAMS)
    params, state = tx.step(grads, tx.init(PARAMS), PARAMS)
    expected, _ = plain.step(grads, plain.init(PARAMS), PARAMS)
    assert_same_bits(params, expected)
    bad = grads | {"b": jnp.array([1.0, jnp.nan, 1.0])}
    again, state = tx.step(bad, state, params)
    assert_same_bits(again, params)
    assert (state.count, state.skipped, state.consecutive) == (1, 1, 1)


@every_way
def test_b09_counters_of_a_row_of_bad_steps(way):
    tx = plain_tx(way, skip_nonfinite=True)
    step = jax.jit(lambda g, s, p: take_step(way, tx, g, s, p))
    params = jnp.ones(2)
    state, rows = tx.init(params), []
    for value in [jnp.nan] * 5 + [1.0]:
        params, state = step(jnp.full(2, value), state, params)
        rows.append((int(state.count), int(state.consecutive), int(state.skipped)))
    assert rows == [(0, k, k) for k in (1, 2, 3, 4, 5)] + [(1, 0, 5)]


@implementations
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_clip_by_value_keeps_nan(implementation, dtype):
    tx = jfa.fused_adamw(
        1.0, b1=0.0, max_grad_value=0.5, maximize=True, implementation=implementation
    )
    grads = jnp.array([4.0, -4.0, 0.5, 0.25, jnp.nan, jnp.inf], dtype)
    params = jnp.zeros(6)
    _, state = tx.update(grads, tx.init(params), params, gradient_scale=2.0)
    expected = [-0.5, 0.5, -0.25, -0.125, np.nan, -0.5]
    np.testing.assert_array_equal(state.mu, np.array(expected, np.float32))
    assert state.report is None


def test_both_clips_are_refused():
    with pytest.raises(ValueError, match="got both"):
        jfa.fused_adamw(1e-3, max_grad_norm=1.0, max_grad_value=1.0)


# --- Data on the device ---------------------------------------------------------------


def test_traced_limit_and_one_compile():
    @jax.jit
    def step(limit, grads, state, params):
        tx = jfa.fused_adamw(1e-3, b1=0.0, max_grad_norm=limit)
        return tx.update(grads, state, params)

    grads = jnp.array([3.0, 4.0])
    state = jfa.fused_adamw(1e-3, max_grad_norm=1.0).init(grads)
    for limit in (1.0, 2.0, 10.0):
        _, new = step(jnp.float32(limit), grads, state, grads)
        scale = min(1.0, limit / 5)
        np.testing.assert_allclose(new.mu, [3 * scale, 4 * scale], rtol=1e-6)
    assert step._cache_size() == 1


def test_inject_hyperparams_schedules_the_limit():
    tx = optax.inject_hyperparams(jfa.fused_adamw)(
        1e-3, b1=0.0, max_grad_norm=lambda count: 1.0 + count
    )
    params = grads = jnp.array([3.0, 4.0])
    state = tx.init(params)
    for limit in (1.0, 2.0):
        params, state = jfa.step(tx, grads, state, params)
        mu = optax.tree.get(state, "mu")
        np.testing.assert_allclose(mu, [0.6 * limit, 0.8 * limit], rtol=1e-6)


def test_report_shared_by_groups():
    """g = (3, 4) in two groups and a limit of 1 clip to (.6, .8)."""
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    make = lambda: jfa.fused_adamw(1e-3, b1=0.0, max_grad_norm=1.0)  # noqa: E731
    tx = optax.multi_transform(
        {"x": make(), "y": make(), "plain": jfa.fused_adamw(1e-3)},
        {"a": "x", "b": "y"},
    )
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    report = jfa.grad_stats(grads)
    _, state = jfa.step(tx, grads, tx.init(params), params, report=report)
    groups = [state.inner_states[name].inner_state for name in ("x", "y")]
    moments = [jax.tree.leaves(group.mu)[0] for group in groups]
    np.testing.assert_allclose(moments, [[0.6], [0.8]], rtol=1e-6)
    assert all(group.report.norm == 5.0 for group in groups)
    bad = grads | {"b": jnp.array([jnp.nan])}
    new_params, state = jfa.step(
        tx, bad, tx.init(params), params, report=jfa.grad_stats(bad)
    )
    assert_same_bits(new_params, params)
    groups = [state.inner_states[name].inner_state for name in ("x", "y")]
    assert [int(group.skipped) for group in groups] == [1, 1]


@implementations
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("scale", [np.nan, np.inf, 0.0, -2.0])
def test_bad_scale_skips_whatever_the_report_says(implementation, traced, scale):
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0, implementation=implementation)
    params = {"w": jnp.ones(2)}
    if traced:
        scale = jnp.float32(scale)
    new_params, state = tx.step(
        params,
        tx.init(params),
        params,
        report=jfa.grad_stats(params),
        gradient_scale=scale,
    )
    assert_same_bits(new_params, params)
    assert (state.count, state.skipped) == (0, 1) and state.report.nonfinite > 0


def test_report_of_python_numbers_keeps_the_state_s_types():
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0)
    params = {"w": jnp.ones(2)}
    step = jax.jit(lambda s, p: tx.step(p, s, p, report=jfa.GradReport(1.0, 1.0, 0))[1])
    state = tx.init(params)
    for _ in range(3):
        state = step(state, params)
    assert step._cache_size() == 1
    assert not any(x.weak_type for x in state.report)


def test_masked_leaves_are_not_counted():
    tx = optax.masked(jfa.fused_adamw(1e-3, max_grad_norm=1.0), {"a": True, "b": False})
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([jnp.nan])}
    _, state = tx.update(grads, tx.init(params), params)
    assert state.inner_state.report.norm == 5.0


def test_first_step_without_a_state():
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0)
    grads = random_like(PARAMS)
    expected = tx.step(grads, tx.init(PARAMS), PARAMS)
    assert_same_bits(jfa.adamw_step(PARAMS, grads, options=tx), expected)
    control = jfa.StepControl(report=jfa.grad_stats(grads))
    assert_same_bits(
        jfa.adamw_step(PARAMS, grads, options=tx, control=control), expected
    )


def test_state_of_other_options_is_refused():
    clip, plain = jfa.fused_adamw(1e-3, max_grad_norm=1.0), jfa.fused_adamw(1e-3)
    for tx, other, words in ((clip, plain, "has no report"), (plain, clip, "has a")):
        with pytest.raises(ValueError, match=words):
            tx.update(PARAMS, other.init(PARAMS), PARAMS)


def test_vmap_with_a_limit_and_a_nan_for_each_member():
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(3, 600)), "f4")}
    grads = {"w": params["w"] * 2}
    grads["w"] = grads["w"].at[1, 7].set(jnp.nan)
    limits = jnp.array([0.5, 1.0, 1e6])

    def step(limit, grads, params):
        tx = jfa.fused_adamw(1e-2, max_grad_norm=limit)
        return tx.step(grads, tx.init(params), params)

    batched = jax.vmap(step)(limits, grads, params)
    for i in range(3):
        member = lambda tree: jax.tree.map(lambda x: x[i], tree)  # noqa: B023, E731
        assert_same_bits(
            member(batched), step(limits[i], member(grads), member(params))
        )
    np.testing.assert_array_equal(batched[1].skipped, [0, 1, 0])


# --- What it costs --------------------------------------------------------------------


def test_donated_step_copies_nothing_and_makes_one_call():
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0)
    state = tx.init(PARAMS)
    jitted = jax.jit(
        lambda p, s, g: tx.step(g, s, p), donate_argnums=(0, 1), keep_unused=True
    )
    compiled = jitted.lower(PARAMS, state, PARAMS).compile()
    assert copies(compiled) == 0
    assert count_ops(compiled, "custom-call") == 1
    assert "callback" not in compiled.as_text()


def test_overflowing_steps_leave_no_trace():
    """1000 steps of which 200 overflow end in the bits of the other 800."""
    rng = np.random.default_rng(0)
    overflows = np.zeros(1000, bool)
    overflows[rng.choice(1000, 200, replace=False)] = True
    params = {
        "w": jnp.asarray(rng.normal(size=300), jnp.float32),
        "z": jnp.full(2, -0.0),
    }
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0, weight_decay=0.0)
    noise = jnp.asarray(rng.normal(size=(1000, 300)), jnp.float32)
    payloads = jnp.asarray(rng.choice([np.inf, -np.inf, np.nan], 1000), jnp.float32)

    def run(which, poison):
        def body(carry, step):
            noise, payload, bad = step
            grads = {"w": carry[0]["w"] + noise, "z": jnp.zeros(2)}
            grads["w"] = jnp.where(bad, grads["w"].at[17].set(payload), grads["w"])
            return tx.step(grads, carry[1], carry[0]), None

        xs = (noise[which], payloads[which], jnp.asarray(poison[which]))
        return jax.jit(lambda: jax.lax.scan(body, (params, tx.init(params)), xs)[0])()

    with_overflows = run(np.arange(1000), overflows)
    without = run(np.flatnonzero(~overflows), overflows)
    for name in ("count", "mu", "nu"):
        assert_same_bits(getattr(with_overflows[1], name), getattr(without[1], name))
    assert_same_bits(with_overflows[0], without[0])
    assert with_overflows[1].skipped == 200 and without[1].skipped == 0


# --- clip_by_global_norm --------------------------------------------------------------


@implementations
def test_clip_by_global_norm_agrees_with_optax(implementation):
    grads = random_like(PARAMS)
    for limit in (0.5, 1e3):
        ours = jfa.clip_by_global_norm(limit, implementation=implementation)
        theirs = optax.clip_by_global_norm(limit)
        updates, state = ours.update(grads, ours.init(grads))
        expected, _ = theirs.update(grads, theirs.init(grads))
        for name in grads:
            np.testing.assert_allclose(updates[name], expected[name], rtol=1e-6)
        np.testing.assert_allclose(state.report.norm, optax.tree.norm(grads), rtol=1e-6)


def test_clip_by_global_norm_in_a_chain_with_a_scale():
    """The unscaled norm is compared, and the gradient is divided once."""
    chain = optax.chain(jfa.clip_by_global_norm(1.0), jfa.fused_adamw(1e-3, b1=0.0))
    params, grads = jnp.zeros(2), jnp.array([3072.0, 4096.0])
    _, state = jfa.step(chain, grads, chain.init(params), params, gradient_scale=1024.0)
    assert state[0].report.norm == 5.0
    np.testing.assert_allclose(state[1].mu, [0.6, 0.8], rtol=1e-6)


def test_clip_by_global_norm_keeps_dtypes_and_spreads_nan():
    tx = jfa.clip_by_global_norm(1.0)
    grads = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.array([jnp.inf, 1.0])}
    updates, state = tx.update(grads, tx.init(grads))
    assert updates["a"].dtype == jnp.bfloat16
    assert all(np.isnan(np.asarray(u, np.float32)).all() for u in updates.values())
    assert state.report.nonfinite == 1
