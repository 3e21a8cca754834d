"""The seed specification of the fused update, a test for each row of its section A."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    DTYPES,
    HYPERPARAMS,
    WAYS,
    assert_follows_oracle,
    assert_same_bits,
    bits,
    copies,
    make_tx,
    random_like,
    state_at,
    take_step,
)
from jax.experimental.sparse import BCOO

import jax_fused_adamw as jfa
from jax_fused_adamw._ffi import UPDATE_TARGET

every_way = pytest.mark.parametrize("way", WAYS)

PARAMS = random_like({"w": jnp.zeros((5, 7)), "b": jnp.zeros(7)}, seed=1)
GRADS = random_like(PARAMS, seed=2)


# --- A1: one kernel, and what it computes ---------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a1_one_kernel_does_the_whole_step(amsgrad):
    """No array of the size of a leaf is made or copied beside it."""
    tx = jfa.fused_adamw(**HYPERPARAMS, amsgrad=amsgrad)
    step = jax.jit(
        lambda params, state, grads, scale: tx.step(
            grads, state, params, gradient_scale=scale
        ),
        donate_argnums=(0, 1),
    )
    lowered = step.lower(PARAMS, tx.init(PARAMS), GRADS, jnp.float32(8))
    compiled = lowered.compile()
    text = compiled.as_text()
    assert text.count(f'custom_call_target="{UPDATE_TARGET}"') == 1
    assert copies(compiled) == 0
    made = [line for line in text.splitlines() if "= f32[5,7]" in line]
    allowed = ("parameter(", "get-tuple-element(")
    assert all(any(op in line for op in allowed) for line in made), made
    assert len(made) >= (5 if amsgrad else 4)


@every_way
def test_a1_decay_never_enters_gradient_or_moments(way):
    ends = []
    for weight_decay in (0.0, 0.5):
        tx = make_tx(way, **HYPERPARAMS | dict(weight_decay=weight_decay, amsgrad=True))
        ends.append(take_step(way, tx, GRADS, state_at(tx, PARAMS, 9), PARAMS))
    (plain, plain_state), (decayed, decayed_state) = ends
    assert_same_bits(decayed_state, plain_state)
    for name in PARAMS:
        difference = np.asarray(decayed[name], np.float64) - plain[name]
        expected = -HYPERPARAMS["learning_rate"] * 0.5 * np.asarray(PARAMS[name])
        np.testing.assert_allclose(difference, expected, rtol=1e-3, atol=3e-7)


def test_a1_eps_is_outside_the_square_root():
    """g = 3, eps = 1: 3 / (3 + 1), and inside it would be 3 / sqrt(10)."""
    outside = jfa.fused_adamw(1.0, eps=1.0, weight_decay=0.0)
    inside = jfa.fused_adamw(1.0, eps=0.0, eps_root=1.0, weight_decay=0.0)
    param = jnp.zeros(1)
    for tx, expected in [(outside, -3 / 4), (inside, -3 / 10**0.5)]:
        updates, _ = tx.update(jnp.full(1, 3.0), tx.init(param), param)
        np.testing.assert_allclose(updates, [expected], rtol=1e-6)


def test_a1_stores_the_uncorrected_maximum():
    tx = jfa.fused_adamw(**HYPERPARAMS, amsgrad=True)
    state = tx.init(PARAMS)
    seen = jax.tree.map(jnp.zeros_like, PARAMS)
    for scale in (1.0, 0.1, 3.0, 0.01):
        grads = jax.tree.map(lambda g, s=scale: g * s, GRADS)
        _, state = tx.update(grads, state, PARAMS)
        seen = jax.tree.map(jnp.maximum, seen, state.nu)
        assert_same_bits(state.nu_max, seen)
    # Had it stayed behind for no element, this would prove nothing.
    tx = jfa.fused_adamw(**HYPERPARAMS | dict(b2=0.5), amsgrad=True)
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    first = state.nu_max
    _, state = tx.update(jax.tree.map(jnp.zeros_like, GRADS), state, PARAMS)
    assert_same_bits(state.nu_max, first)
    assert (np.asarray(state.nu["w"]) < np.asarray(first["w"])).all()


# --- A2: defaults ---------------------------------------------------------------------


def test_a2_defaults_are_those_of_optax():
    ours = inspect.signature(jfa.fused_adamw).parameters
    theirs = inspect.signature(optax.adamw).parameters
    shared = ["b1", "b2", "eps", "eps_root", "weight_decay", "mask", "nesterov"]
    assert [ours[name].default for name in shared] == [
        theirs[name].default for name in shared
    ]
    # By position too, as far as optax's arguments go.
    assert list(ours)[:8] == list(theirs)[:8]


def test_a2_the_settings_of_the_seed():
    options = dict(
        learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-5, eps_root=0.0, weight_decay=1e-4
    )
    tx = jfa.fused_adamw(**options)
    for count in (0, 999):
        state = state_at(tx, PARAMS, count)
        updates, after = tx.update(GRADS, state, PARAMS)
        assert_follows_oracle(
            options, (PARAMS, state), GRADS, (updates, after), out="update"
        )


# --- A3: dtypes, maximize -------------------------------------------------------------


@every_way
@pytest.mark.parametrize("dtype", DTYPES)
def test_a3_float32_parameters_take_any_gradient_dtype(way, dtype):
    grads = jax.tree.map(lambda g: g.astype(dtype), GRADS)
    tx = make_tx(way, **HYPERPARAMS)
    state = state_at(tx, PARAMS, 3)
    after = take_step(way, tx, grads, state, PARAMS)
    assert {leaf.dtype for leaf in jax.tree.leaves(after[0])} == {np.dtype(np.float32)}
    assert_follows_oracle(HYPERPARAMS, (PARAMS, state), grads, after, out="param")
    # A gradient of another dtype is not the same as a rounded parameter.
    if dtype != "float32":
        full = take_step(way, tx, GRADS, state, PARAMS)
        assert (bits(full[0]["w"]) != bits(after[0]["w"])).any()


@every_way
def test_a3_maximize_negates_the_gradient(way):
    ends = []
    for sign, maximize in [(1.0, True), (-1.0, False), (1.0, False)]:
        tx = make_tx(way, **HYPERPARAMS, nesterov=True, maximize=maximize)
        grads = jax.tree.map(lambda g, s=sign: g * s, GRADS)
        ends.append(take_step(way, tx, grads, state_at(tx, PARAMS, 3), PARAMS))
    assert_same_bits(ends[0], ends[1])
    assert (bits(ends[0][0]["w"]) != bits(ends[2][0]["w"])).all()


# --- A4: bias corrections -------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 10, 999, 1000, 12345, 2**20, 2**31 - 1])
@pytest.mark.parametrize("b1, b2", [(0.9, 0.999), (0.99, 1 - 1e-7), (0.5, 0.9999)])
def test_a4_bias_corrections_are_float64_rounded_once(b1, b2, step):
    """With m = v = 1 and no gradient the update shows nothing else."""
    tx = jfa.fused_adamw(1.0, b1=b1, b2=b2, eps=0.0, weight_decay=0.0)
    ones = jnp.ones(1)
    state = tx.init(ones)._replace(count=jnp.int32(step - 1), mu=ones, nu=ones)
    updates, _ = tx.update(jnp.zeros(1), state, ones)
    float32 = np.float32
    mu_hat = float32(b1) * (1 / float32(1 - np.float64(b1) ** step))
    nu_hat = float32(b2) * (1 / float32(1 - np.float64(b2) ** step))
    assert_same_bits(np.asarray(updates), np.array([-(mu_hat / np.sqrt(nu_hat))]))


# A5, a first update that initialises the moments, is not built yet.


# --- A6: step control -----------------------------------------------------------------


@every_way
@pytest.mark.parametrize("jit", [False, True])
def test_a6_scale_and_skip_are_data(way, jit):
    tx = make_tx(way, **HYPERPARAMS)
    state = state_at(tx, PARAMS, 3)

    def step(grads, scale, skip):
        extra = dict(gradient_scale=scale, skip_update=skip)
        return take_step(way, tx, grads, state, PARAMS, **extra)

    step = jax.jit(step) if jit else step
    scaled = jax.tree.map(lambda g: g * 1024, GRADS)
    expected = take_step(way, tx, GRADS, state, PARAMS)
    for one, no in [(1.0, False), (jnp.float32(1), jnp.bool_(False)), (1, 0)]:
        assert_same_bits(step(GRADS, one, no), expected)
    assert_same_bits(step(scaled, 1024.0, False), expected)
    for yes in (True, jnp.bool_(True), 3, np.int32(-1)):
        assert_same_bits(step(GRADS, 1.0, yes)[0], PARAMS)
    for bad in (0.0, -1.0, np.inf, np.nan):
        assert np.isnan(step(GRADS, bad, False)[0]["w"]).all()


@every_way
@pytest.mark.parametrize("amsgrad", [False, True, "optax"])
def test_a6_nothing_is_scanned_unless_asked(way, amsgrad):
    """A NaN is used like any gradient: found_inf comes from the caller."""
    tx = make_tx(way, **HYPERPARAMS, amsgrad=amsgrad)
    grads = {**GRADS, "b": GRADS["b"].at[2].set(jnp.nan)}
    state = tx.init(PARAMS)
    stored = ["mu", "nu"] + ["nu_max"] * bool(amsgrad)
    if amsgrad:  # a NaN of old is not lost either
        state.nu_max["b"] = state.nu_max["b"].at[4].set(jnp.nan)
    new, after = take_step(way, tx, grads, state, PARAMS)
    for name in stored:
        bad = [2, 4] if name == "nu_max" else [2]
        assert np.flatnonzero(np.isnan(getattr(after, name)["b"])).tolist() == bad
    assert np.flatnonzero(np.isnan(new["b"])).tolist() == bad
    assert not np.isnan(new["w"]).any()
    assert (int(after.count), int(after.skipped)) == (1, 0)


# --- A7: skipped steps and empty tensors ----------------------------------------------


@every_way
def test_a7_skipping_changes_and_counts_nothing(way):
    # A NaN keeps its payload in our kernels, not in every processor's addition.
    kept = [-0.0, 0.0, jnp.inf, *([] if way == "update" else [jnp.nan])]
    params = {**PARAMS, "signs": jnp.array(kept)}
    grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    tx = make_tx(way, **HYPERPARAMS, amsgrad=True)
    state = state_at(tx, params, 3)
    for calls in (1, 2):
        new, after = take_step(way, tx, grads, state, params, skip_update=True)
        assert_same_bits(new, params)
        n = jnp.int32(calls)
        assert_same_bits(after, state._replace(skipped=n, consecutive=n))
        state = after
    good = jax.tree.map(jnp.zeros_like, params)
    _, after = take_step(way, tx, good, state, params)
    counters = (after.count, after.skipped, after.consecutive)
    assert list(map(int, counters)) == [4, 2, 0]


def test_a7_a_skipped_update_is_minus_zero():
    tx = jfa.fused_adamw(**HYPERPARAMS)
    params = {name: jnp.ones(5, name) for name in DTYPES}
    updates, _ = tx.update(params, tx.init(params), params, skip_update=True)
    assert_same_bits(updates, jax.tree.map(lambda p: jnp.full_like(p, -0.0), params))


def test_a7_without_elements_nothing_is_launched_and_the_tree_counts():
    tx = jfa.fused_adamw(**HYPERPARAMS)
    for params in ({}, {"a": None}):
        compiled = jax.jit(tx.step).lower(params, tx.init(params), params).compile()
        assert "custom-call" not in compiled.as_text()
        assert int(compiled(params, tx.init(params), params)[1].count) == 1
    empty = {"a": jnp.zeros((0, 3)), "b": jnp.zeros(0, jnp.bfloat16)}
    new, state = tx.step(empty, tx.init(empty), empty)
    assert_same_bits(new, empty)
    assert int(state.count) == 1


# --- A8: rejections -------------------------------------------------------------------


def with_w(tree, leaf):
    return {**tree, "w": leaf}


W = GRADS["w"]
BAD_GRADS = {
    "shape": (with_w(GRADS, W[:4]), ValueError, r"grads\['w'\].*\(4, 7\).*\(5, 7\)"),
    "broadcast": (with_w(GRADS, W[:1]), ValueError, "never broadcast"),
    "scalar": (with_w(GRADS, jnp.float32(1)), ValueError, r"grads\['w'\].*\(\)"),
    "dtype": (with_w(GRADS, W.astype(int)), TypeError, r"grads\['w'\].*int32"),
    "missing": ({"w": W}, ValueError, r"grads\['b'\] is missing"),
    "None": (with_w(GRADS, None), ValueError, r"grads\['w'\] is missing"),
    "sparse": (
        with_w(GRADS, BCOO.fromdense(W)),
        TypeError,
        r"grads\['w'\].*BCOO.*densify",
    ),
}


@every_way
@pytest.mark.parametrize("kind", BAD_GRADS)
@pytest.mark.parametrize("jit", [False, True])
def test_a8_bad_gradients_are_refused_before_any_change(way, kind, jit):
    grads, error, message = BAD_GRADS[kind]
    tx = make_tx(way, **HYPERPARAMS)
    params, state = jax.tree.map(jnp.array, (PARAMS, tx.init(PARAMS)))

    def step(params, state, grads):
        return take_step(way, tx, grads, state, params)

    expected = jax.device_get(step(params, state, GRADS))
    step = jax.jit(step, donate_argnums=(0, 1)) if jit else step
    with pytest.raises(error, match=message):
        step(params, state, grads)
    assert_same_bits((params, state), (PARAMS, tx.init(PARAMS)))
    assert_same_bits(step(params, state, GRADS), expected)


@pytest.mark.devices(2)
@pytest.mark.parametrize("jit", [False, True])
def test_a8_leaves_on_other_devices_are_refused(jit):
    tx = jfa.fused_adamw(**HYPERPARAMS)
    first, second = jax.devices()[:2]
    params, state = jax.device_put((PARAMS, tx.init(PARAMS)), first)
    step = jax.jit(tx.step) if jit else tx.step
    with pytest.raises(ValueError, match="(?i)incompatible devices"):
        step(jax.device_put(GRADS, second), state, params)
    assert_same_bits(params, PARAMS)
    step(jax.device_put(GRADS, first), state, params)
