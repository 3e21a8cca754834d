"""`jfa.step` and `in_place=True` through optax, and what they compile to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, copies, count_ops, random_like

import jax_fused_adamw as jfa

BF16 = jnp.bfloat16
PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 96 * 40).reshape(96, 40),
    "b": jnp.linspace(0.5, 1.5, 96),
}
GRADS = random_like(PARAMS, seed=1, scale=0.1)


def only_w(params):
    return {name: name == "w" for name in params}


def bare(**options):
    return jfa.fused_adamw(1e-2, **options)


def chained(**options):
    return optax.chain(optax.clip_by_global_norm(1.0), bare(**options))


def masked(**options):
    return optax.masked(bare(**options), {"w": True, "b": True})


def multi_transformed(**options):
    groups = {"fast": jfa.fused_adamw(1e-1, **options), "slow": bare(**options)}
    return optax.multi_transform(groups, {"w": "fast", "b": "slow"})


def injected(**options):
    factory = optax.inject_hyperparams(
        jfa.fused_adamw, static_args=("mask",), hyperparam_dtype=jnp.float32
    )
    return factory(learning_rate=1e-2, mask=only_w, **options)


def nested(**options):
    return optax.chain(optax.identity(), optax.masked(chained(**options), only_w))


WRAPPERS = [bare, chained, masked, multi_transformed, injected, nested]


def with_step(tx):
    return lambda params, state, grads: jfa.step(tx, grads, state, params)


def with_protocol(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(step, tx, steps=3):
    step = jax.jit(step)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        params, state = step(params, state, GRADS)
    return params, state


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_three_ways_give_the_same_bits(wrapper):
    expected = run(with_protocol(wrapper()), wrapper())
    assert_same_bits(run(with_step(wrapper()), wrapper()), expected)
    in_place = wrapper(in_place=True)
    assert_same_bits(run(with_protocol(in_place), in_place), expected)


def compile_donated(step, tx):
    return (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(PARAMS, tx.init(PARAMS), GRADS)
        .compile()
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("way", ["step", "in_place"])
def test_donated_step_copies_nothing_and_adds_nothing(wrapper, way):
    if way == "step":
        compiled = compile_donated(with_step(wrapper()), wrapper())
    else:
        tx = wrapper(in_place=True)
        compiled = compile_donated(with_protocol(tx), tx)
    assert "jax_fused_adamw_update" in compiled.as_text()
    assert copies(compiled) == 0
    for shape in ("f32[96,40]", "f32[96]"):
        if wrapper is nested and shape == "f32[96]":
            continue  # outside the mask: optax adds the raw gradient itself
        for op in ("add", "subtract"):
            assert f"{shape}{{1,0}} {op}(" not in compiled.as_text()
            assert f"{shape}{{0}} {op}(" not in compiled.as_text()
    params_and_moments = 3 * (96 * 40 + 96) * 4
    if wrapper is not nested:
        assert compiled.memory_analysis().alias_size_in_bytes >= params_and_moments


def test_plain_protocol_does_add():
    """The counterpart that shows the previous test can fail."""
    text = compile_donated(with_protocol(bare()), bare()).as_text()
    assert "f32[96,40]{1,0} add(" in text


def test_out_of_place_undonated_copies_nothing():
    tx = bare(alias=False)
    compiled = jax.jit(with_step(tx)).lower(PARAMS, tx.init(PARAMS), GRADS).compile()
    assert copies(compiled) == 0
    aliased = bare()
    compiled = (
        jax.jit(with_step(aliased)).lower(PARAMS, aliased.init(PARAMS), GRADS).compile()
    )
    # p, mu and nu of two leaves and three counters: in place costs them here.
    assert copies(compiled) == 6 + 3


@pytest.mark.parametrize("alias", [True, False])
def test_inputs_stay_intact_without_donation(alias):
    tx = bare(alias=alias)
    state = tx.init(PARAMS)
    before = jax.tree.map(lambda x: np.array(x), (PARAMS, state, GRADS))
    out = jax.jit(with_step(tx))(PARAMS, state, GRADS)
    eager = jfa.step(tx, GRADS, state, PARAMS)
    assert_same_bits(jax.tree.map(np.asarray, (PARAMS, state, GRADS)), before)
    assert_same_bits(eager, out)


def test_donated_step_keeps_the_buffers():
    tx = bare()
    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))]
    out = jax.jit(with_step(tx), donate_argnums=(0, 1))(params, state, GRADS)
    after = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(out)]
    assert before == after
    assert params["w"].is_deleted() and not GRADS["w"].is_deleted()


def test_in_place_update_falls_back_to_the_difference():
    """Anything that maps over the updates sees numbers and stays correct."""
    tx = bare(in_place=True)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    plain, _ = bare().update(GRADS, bare().init(PARAMS), PARAMS)
    assert all(
        isinstance(u, jfa.InPlaceUpdate)
        for u in jax.tree.leaves(updates, is_leaf=lambda u: not isinstance(u, dict))
    )
    halved = jax.tree.map(lambda u: 0.5 * u, updates)
    moved = optax.apply_updates(PARAMS, halved)
    expected = optax.apply_updates(PARAMS, jax.tree.map(lambda u: 0.5 * u, plain))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), moved, expected
    )
    # Another object than the parameter it was made for gets the difference too.
    other = jax.tree.map(lambda p: p + 1.0, PARAMS)
    shifted = optax.apply_updates(other, updates)
    jax.tree.map(
        lambda a, o, u: np.testing.assert_allclose(a, o + u, atol=1e-6),
        shifted,
        other,
        plain,
    )
    # Across a jit boundary only the difference survives.
    passed = jax.jit(lambda u: u)(updates)
    jax.tree.map(
        lambda u, p: np.testing.assert_allclose(u, p, atol=2e-7),
        jax.tree.leaves(passed),
        jax.tree.leaves(plain),
    )


def test_in_place_difference_of_a_kept_parameter_is_minus_zero():
    params = {"w": jnp.array([0.0, -0.0, 1.0, jnp.inf])}
    tx = bare(in_place=True)
    updates, _ = tx.update(params, tx.init(params), params, skip_update=True)
    difference = np.asarray(updates["w"].difference)
    assert np.array_equal(difference, np.zeros(4)) and np.signbit(difference).all()


def test_difference_may_be_read_in_a_branch_and_outside_it():
    """Conditional logging of the updates must not leak a tracer."""
    tx = bare(in_place=True)

    @jax.jit
    def train_step(params, state, log):
        updates, state = tx.update(GRADS, state, params)
        logged = jax.lax.cond(log, lambda: optax.tree.norm(updates), lambda: 0.0)
        return optax.apply_updates(params, updates), logged, optax.tree.norm(updates)

    with jax.checking_leaks():
        _, logged, norm = train_step(PARAMS, tx.init(PARAMS), jnp.array(True))
    assert float(logged) == pytest.approx(float(norm)) and float(norm) > 0.0
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    inside = jax.jit(lambda: optax.tree.norm(updates))()
    assert float(inside) == pytest.approx(float(optax.tree.norm(updates)))


def test_numpy_parameters_meet_in_place_updates():
    params = jax.tree.map(np.asarray, PARAMS)
    tx = bare(in_place=True)
    updates, _ = tx.update(GRADS, tx.init(params), params)
    assert isinstance(params["w"] + updates["w"], jax.Array)
    assert_same_bits(
        optax.apply_updates(params, updates), run(with_step(bare()), bare(), 1)[0]
    )


def test_scale_after_ours_is_still_correct_in_step():
    tx = optax.chain(bare(), optax.scale(0.5))
    got = run(with_step(tx), tx, 1)[0]
    expected = run(with_protocol(tx), tx, 1)[0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_apply_if_finite_around_ours_is_correct_in_step(in_place):
    tx = optax.apply_if_finite(bare(in_place=in_place), 5)
    plain = optax.apply_if_finite(bare(), 5)
    assert_same_bits(run(with_step(tx), tx), run(with_protocol(plain), plain))


def test_apply_if_finite_around_in_place_is_an_error():
    tx = optax.apply_if_finite(bare(in_place=True), 5)
    with pytest.raises(TypeError, match="InPlaceUpdate"):
        run(with_protocol(tx), tx)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(tx, optax.ema(0.9)),
        lambda tx: optax.chain(tx, optax.trace(0.9)),
        lambda tx: optax.chain(tx, optax.add_decayed_weights(0.1)),
        lambda tx: optax.chain(tx, optax.scale_by_trust_ratio()),
        lambda tx: optax.chain(tx, optax.keep_params_nonnegative()),
        lambda tx: optax.flatten(tx),
    ],
    ids=["ema", "trace", "decay", "trust_ratio", "nonnegative", "flatten"],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_step_gives_plain_updates_to_wrappers_that_need_them(wrap, in_place):
    tx, plain = wrap(bare(in_place=in_place)), wrap(bare())
    with pytest.warns(UserWarning, match="cannot take in-place updates"):
        got = run(with_step(tx), tx)
    assert_same_bits(got, run(with_protocol(plain), plain))


def test_in_place_update_names_the_way_to_its_numbers():
    tx = bare(in_place=True)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    with pytest.raises(AttributeError, match="difference"):
        updates["w"].mean()


def test_jit_between_step_and_ours_is_correct():
    inner = bare()
    tx = optax.GradientTransformationExtraArgs(inner.init, jax.jit(inner.update))
    assert_same_bits(run(with_step(tx), tx), run(with_protocol(inner), inner))


def test_step_mode_ends_with_the_step():
    tx = bare()
    jfa.step(tx, GRADS, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError):
        jfa.step(tx, GRADS, tx.init(PARAMS), {"w": PARAMS["w"]})
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert isinstance(updates["w"], jax.Array)


def test_scan_and_cond_keep_the_step_in_place():
    tx = bare()

    def many(params, state, grads):
        def body(carry, keep):
            params, state = carry
            return jax.lax.cond(
                keep,
                lambda: jfa.step(tx, grads, state, params),
                lambda: (params, state),
            ), None

        return jax.lax.scan(body, (params, state), jnp.array([True, False, True]))[0]

    compiled = compile_donated(many, tx)
    assert count_ops(compiled, "copy") <= 4  # scalars only: no leaf is copied
    assert "f32[96,40]{1,0} copy(" not in compiled.as_text()
    got = jax.jit(many)(PARAMS, tx.init(PARAMS), GRADS)
    assert_same_bits(got, run(with_step(tx), tx, 2))


FOLLOWING = [{"master_weights": True}, {"ema_decay": 0.9}, {"compute_dtype": BF16}]
MIXED = {"w": jnp.linspace(-1.0, 1.0, 64), "b": jnp.ones(3, BF16)}


def one_step(tx, params=MIXED):
    return jfa.step(tx, optax.tree.ones_like(params), tx.init(params), params)


@pytest.mark.parametrize("options", FOLLOWING, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(tx, optax.scale(0.5)),
        lambda tx: optax.contrib.schedule_free(tx, 0.1),
        lambda tx: optax.chain(tx, optax.ema(0.9)),
        lambda tx: optax.chain(jfa.accumulate(tx, 1), optax.scale(0.5)),
        lambda tx: jfa.accumulate(optax.chain(tx, optax.scale(0.5)), 1),
    ],
    ids=["scale", "schedule_free", "ema", "after_accumulate", "in_accumulate"],
)
def test_step_warns_where_the_state_follows_other_updates(wrap, options):
    with pytest.warns(UserWarning, match="the last transformation that changes"):
        one_step(wrap(bare(**options)))


@pytest.mark.parametrize("options", FOLLOWING, ids=lambda options: next(iter(options)))
def test_step_warns_under_lookahead(options):
    tx = optax.lookahead(bare(**options), 2, 0.5)
    params = optax.LookaheadParams.init_synced(MIXED)
    with pytest.warns(UserWarning, match="the last transformation that changes"):
        jfa.step(tx, optax.tree.ones_like(MIXED), tx.init(params), params)


@pytest.mark.parametrize("options", FOLLOWING, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.masked(tx, {"w": True, "b": False}),
        lambda tx: optax.multi_transform(
            {"ours": tx, "other": optax.sgd(0.1)}, {"w": "other", "b": "ours"}
        ),
        lambda tx: optax.chain(jfa.accumulate(tx, 1), optax.identity()),
    ],
    ids=["masked", "multi_transform", "accumulate"],
)
def test_step_does_not_warn_where_the_state_follows_the_parameters(wrap, options):
    one_step(wrap(bare(**options)))  # a warning would be an error


def test_step_does_not_warn_where_nothing_follows():
    one_step(optax.chain(bare(master_weights=True), optax.scale(0.5)), {"w": PARAMS})


@pytest.mark.parametrize(
    "options", [{"master_weights": True}, {"stochastic_rounding": "params"}]
)
def test_apply_if_finite_with_float32_updates_names_the_remedy(options):
    tx = optax.apply_if_finite(bare(**options), 5)
    with pytest.raises(TypeError) as caught:
        one_step(tx)
    assert "skip_nonfinite=True" in caught.value.__notes__[-1]
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), MIXED)
    jfa.step(tx, grads, tx.init(MIXED), MIXED)
    one_step(bare(skip_nonfinite=True, **options))
