"""Runs that go on under the other of optax and fused_adamw."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, random_like, scaled

import jax_fused_adamw as jfa

PARAMS = random_like({"w": jnp.zeros((5, 3)), "b": [jnp.zeros(7), None]}, seed=1)
# Shrinking: AMSGrad's maximum stays behind.
GRADS = [scaled(random_like(PARAMS, seed), 0.5**seed) for seed in range(8)]
COMMON = dict(b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4)
MASK = {"w": True, "b": False}
SCHEDULE = optax.exponential_decay(0.05, 1, 0.7)


def nadamw(learning_rate, **options):
    return optax.adamw(learning_rate, nesterov=True, **options)


# optax's transformation and the options of ours.
PAIRS = {
    "adamw": (optax.adamw(0.05, **COMMON, weight_decay=0.1), dict(weight_decay=0.1)),
    "defaults": (optax.adamw(0.05, **COMMON), {}),
    "nesterov": (nadamw(0.05, **COMMON), dict(nesterov=True)),
    "amsgrad": (
        optax.amsgrad(0.05, **COMMON),
        dict(amsgrad="optax", weight_decay=0.0),
    ),
    "mask": (
        optax.adamw(0.05, **COMMON, weight_decay=0.3, mask=MASK),
        dict(weight_decay=0.3, mask=MASK),
    ),
    "schedule": (optax.adamw(SCHEDULE, **COMMON), dict(learning_rate=SCHEDULE)),
    "clip": (
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05, **COMMON)),
        dict(max_grad_norm=0.5),
    ),
}
every_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def ours(options):
    return jfa.fused_adamw(**(dict(learning_rate=0.05) | COMMON | options))


def walk(tx, params, state, grads):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        params, state = step(params, state, grad)
    return params, state


def assert_near(actual, expected, start):
    """Within 5e-5 of the way from where both began."""
    for a, e, s in zip(*map(jax.tree.leaves, (actual, expected, start)), strict=True):
        way = np.abs(np.asarray(e) - np.asarray(s)).max()
        np.testing.assert_allclose(a, e, rtol=1e-6, atol=5e-5 * way)


@every_pair
def test_optax_goes_on_here_and_back_there(pair):
    peer, options = pair
    tx = ours(options)
    params, opt_state = walk(peer, PARAMS, peer.init(PARAMS), GRADS[:3])
    expected, end = walk(peer, params, opt_state, GRADS[3:])
    state = jfa.from_optax(opt_state, params, tx)
    assert state.count == 3
    got, state = walk(tx, params, state, GRADS[3:])
    assert_near(got, expected, params)
    # Without the state it is another run.
    fresh, _ = walk(tx, params, tx.init(params), GRADS[3:])
    with pytest.raises(AssertionError):
        assert_near(fresh, expected, params)
    # And further there.
    back = jfa.to_optax(state, got, tx, peer)
    assert jax.tree.structure(back) == jax.tree.structure(end)
    further, _ = walk(peer, got, back, GRADS[:3])
    expected_further, _ = walk(peer, expected, end, GRADS[:3])
    assert_near(further, expected_further, expected)


@every_pair
def test_there_and_back_keeps_every_bit(pair):
    peer, options = pair
    tx = ours(options)
    params, opt_state = walk(peer, PARAMS, peer.init(PARAMS), GRADS[:3])
    state = jfa.from_optax(opt_state, params, tx)
    assert_same_bits(jfa.to_optax(state, params, tx, peer), opt_state)
    again = jfa.from_optax(jfa.to_optax(state, params, tx, peer), params, tx)
    assert_same_bits(again, state)


def test_no_buffer_is_shared():
    peer, tx = optax.adamw(0.05), ours({})
    opt_state = peer.init(PARAMS)
    state = jfa.from_optax(opt_state, PARAMS, tx)
    back = jfa.to_optax(state, PARAMS, tx, peer)
    pointers = [
        x.unsafe_buffer_pointer()
        for tree in (opt_state, state, back)
        for x in jax.tree.leaves(tree)
    ]
    assert len(set(pointers)) == len(pointers)


def test_low_precision_moments_are_widened_or_rounded():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    grads = [jax.tree.map(lambda x: x.astype(jnp.bfloat16), g) for g in GRADS[:3]]
    peer = optax.adamw(0.05)
    params, opt_state = walk(peer, params, peer.init(params), grads)
    tx = ours(dict(master_weights=True, ema_decay=0.9))
    state = jfa.from_optax(opt_state, params, tx)
    assert opt_state[0].mu["w"].dtype == jnp.bfloat16
    assert state.mu["w"].dtype == jnp.float32
    np.testing.assert_array_equal(state.mu["w"], opt_state[0].mu["w"])
    for tree in (state.master, state.ema):  # which begin as the parameters
        np.testing.assert_array_equal(tree["w"], params["w"])
    params, state = walk(tx, params, state, grads)
    with pytest.warns(UserWarning, match="state.master and state.ema"):
        back = jfa.to_optax(state, params, tx, peer)
    assert_same_bits(back[0].nu["w"], state.nu["w"].astype(jnp.bfloat16))


SOME = optax.adamw(0.05)
FROM = {
    "maximum": (optax.amsgrad(0.05), {}, "ScaleByAmsgradState.*needs a ScaleByAdam"),
    "no maximum": (SOME, dict(amsgrad="optax"), "needs a ScaleByAmsgradState"),
    "another maximum": (optax.amsgrad(0.05), dict(amsgrad=True), "uncorrected"),
    "nothing": (optax.identity(), {}, "found 0"),
    "two": (optax.chain(SOME, SOME), {}, "found 2"),
    "other": (optax.chain(SOME, optax.trace(0.9)), {}, r"opt_state\[1\].trace\['b'\]"),
    "injected": (
        optax.inject_hyperparams(optax.adamw)(0.05),
        {},
        "opt_state.count.*inside of the wrapper",
    ),
}


@pytest.mark.parametrize(("peer", "options", "named"), FROM.values(), ids=FROM)
def test_what_cannot_be_converted_is_refused_both_ways(peer, options, named):
    tx = ours(options)
    with pytest.raises(ValueError, match=f"from_optax: .*{named}"):
        jfa.from_optax(peer.init(PARAMS), PARAMS, tx)
    with pytest.raises(ValueError, match=f"to_optax: .*{named}"):
        jfa.to_optax(tx.init(PARAMS), PARAMS, tx, peer)


def test_other_counts_trees_and_shapes_are_refused():
    tx, peer = ours(dict(learning_rate=SCHEDULE)), optax.adamw(SCHEDULE)
    adam, decay, schedule = peer.init(PARAMS)
    late = (adam, decay, schedule._replace(count=jnp.int32(4)))
    with pytest.raises(ValueError, match="schedule in opt_state is at count 4"):
        jfa.from_optax(late, PARAMS, tx)
    other = {"w": PARAMS["w"]}
    with pytest.raises(ValueError, match=r"mu\['b'\]\[0\] has no counterpart"):
        jfa.from_optax(peer.init(PARAMS), other, tx)
    turned = PARAMS | {"w": PARAMS["w"].T}
    with pytest.raises(ValueError, match=r"mu\['w'\] has shape \(5, 3\)"):
        jfa.from_optax(peer.init(PARAMS), turned, tx)
    with pytest.raises(ValueError, match=r"optax_tx.mu\['b'\]\[0\] is missing"):
        masked = optax.masked(peer, {"w": True, "b": False})
        jfa.to_optax(tx.init(PARAMS), PARAMS, tx, masked)


def test_the_state_of_a_group_is_taken_with_all_parameters():
    """As optax.masked and optax.multi_transform hold it."""
    labels = {"w": "own", "b": "other"}

    def groups(tx):
        return optax.multi_transform({"own": tx, "other": optax.sgd(0.1)}, labels)

    peer, tx = optax.adamw(0.05, **COMMON), ours({})
    params, opt_state = walk(groups(peer), PARAMS, groups(peer).init(PARAMS), GRADS[:3])
    inner = opt_state.inner_states["own"].inner_state
    group = {"w": params["w"], "b": optax.MaskedNode()}
    state = jfa.from_optax(inner, params, tx)
    assert_same_bits(state, jfa.from_optax(inner, group, tx))
    assert_same_bits(jfa.to_optax(state, params, tx, peer), inner)
    whole = groups(tx).init(params)
    masked = whole.inner_states["own"]
    whole.inner_states["own"] = masked._replace(inner_state=state)
    got, _ = walk(groups(tx), params, whole, GRADS[3:6])
    expected, _ = walk(groups(peer), params, opt_state, GRADS[3:6])
    assert_near(got, expected, params)
    with pytest.raises(ValueError, match=r"it has mu\['w'\] and lacks mu\['b'\]"):
        jfa.from_optax(inner, {"b": params["b"]}, tx)


def test_shapes_have_no_values_to_begin_with():
    peer, shapes = optax.adamw(0.05), jax.eval_shape(lambda: PARAMS)
    told = r"from_optax: {}\['b'\]\[0\] is a ShapeDtypeStruct, expected an array"
    with pytest.raises(TypeError, match=told.format(r"opt_state\[0\].mu")):
        jfa.from_optax((peer.init(PARAMS)[0]._replace(mu=shapes),), PARAMS, ours({}))
    kept = ours(dict(ema_decay=0.9))
    with pytest.raises(TypeError, match=told.format("params")):
        jfa.from_optax(peer.init(PARAMS), shapes, kept)
    with pytest.raises(TypeError, match=r"params\['b'\]\[0\] is a ShapeDtypeStruct"):
        kept.init(shapes)
    assert jax.eval_shape(kept.init, shapes).ema["w"].shape == (5, 3)


def test_arguments_of_another_kind_are_refused():
    tx, peer = ours({}), optax.adamw(0.05)
    state = tx.init(PARAMS)
    inner = "must be a FusedAdamWState, got tuple; .* of a chain the one inside"
    for other in ((state,), peer.init(PARAMS)):
        with pytest.raises(TypeError, match=f"to_optax: state {inner}"):
            jfa.to_optax(other, PARAMS, tx, peer)
        with pytest.raises(TypeError, match=f"to_torch: state {inner}"):
            jfa.to_torch(other, PARAMS, tx)
    told = r"to_optax: optax_tx must be the transformation .*, got .* type tuple"
    with pytest.raises(TypeError, match=told):
        jfa.to_optax(state, PARAMS, tx, peer.init(PARAMS))


@pytest.mark.devices(2)
def test_sharded_state_stays_where_it_is():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("x"))
    params = jax.device_put({"w": jnp.ones((4, 3))}, rows)
    peer, tx = optax.adamw(0.05), ours({})
    opt_state = jax.jit(peer.init, out_shardings=jfa.state_shardings(peer, params))(
        params
    )
    state = jfa.from_optax(opt_state, params, tx)
    assert state.mu["w"].sharding == rows
    assert jfa.to_optax(state, params, tx, peer)[0].nu["w"].sharding == rows


def test_a_negative_count_is_refused():
    adam, *others = optax.adamw(0.1).init(PARAMS)
    spoiled = (adam._replace(count=jnp.int32(-2)), *others)
    with pytest.raises(ValueError, match="from_optax: state.count is -2, expected"):
        jfa.from_optax(spoiled, PARAMS, jfa.fused_adamw(0.1))


def test_scaled_updates_of_optax_go_on_as_lr_scale_and_back():
    scales = {"w": 0.25, "b": 2.0}

    def scale(updates, params):
        return {k: scaled(u, scales[k]) for k, u in updates.items()}

    peer = optax.chain(optax.adamw(0.05, **COMMON), optax.stateless(scale))
    tx = ours(dict(lr_scale=scales))
    params, opt_state = walk(peer, PARAMS, peer.init(PARAMS), GRADS[:2])
    state = jfa.from_optax(opt_state, params, tx)
    middle, state = walk(tx, params, state, GRADS[2:4])
    opt_state = jfa.to_optax(state, middle, tx, peer)
    got, _ = walk(peer, middle, opt_state, GRADS[4:6])
    expected, _ = walk(peer, PARAMS, peer.init(PARAMS), GRADS[:6])
    forgotten, _ = walk(optax.adamw(0.05, **COMMON), middle, opt_state[0], GRADS[4:6])
    for leaf, right, wrong, start in zip(
        *map(jax.tree.leaves, (got, expected, forgotten, PARAMS)), strict=True
    ):
        way = np.abs(right - start).max()
        np.testing.assert_allclose(leaf, right, rtol=0, atol=5e-5 * way)
        assert np.abs(wrong - right).max() > 1e-2 * way
