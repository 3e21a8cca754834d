"""Numeric faults that other optimizers had, as inputs with right answers.

A test's number is that of its case. Unless a case says otherwise: lr 1e-3, b1 .9,
b2 .999, eps 1e-8, no decay, float32, count 0.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import (
    DTYPES,
    WAYS,
    assert_same_bits,
    assert_within_ulp,
    bits,
    plain_tx,
    state_at,
    take_step,
    walk,
)

every_way = pytest.mark.parametrize("way", WAYS)


# --- Scaling and skipping -------------------------------------------------------------


@every_way
def test_b01_gradients_are_unscaled_once(way):
    tx = plain_tx(way, learning_rate=0.1, eps=1e-3)
    grads = jnp.array([32768.0, -16384.0], jnp.float16)
    [(params, _)] = walk(way, tx, [grads], jnp.ones(2), gradient_scale=65536)
    np.testing.assert_allclose(params, [0.9001996, 1.0996016], rtol=3e-7)


@every_way
@pytest.mark.parametrize("first", [np.nan, 1.0])
def test_b02_skip_needs_no_scale(way, first):
    tx = plain_tx(way, amsgrad=True)
    params = jnp.array([-0.0, 2.0])
    state = state_at(tx, params, 0)._replace(mu=jnp.array([0.5, -0.0]))
    grads = jnp.array([first, 1.0])
    new, after = take_step(way, tx, grads, state, params, skip_update=True)
    assert_same_bits(new, params)
    one = jnp.int32(1)
    assert_same_bits(after, state._replace(skipped=one, consecutive=one))


# --- Precision, dtype, state ----------------------------------------------------------


@every_way
@pytest.mark.parametrize("dtype", DTYPES)
def test_b22_zero_gradient_is_harmless(way, dtype):
    params = jnp.array([1.0, -2.0, 0.5, 0.0, -0.0], dtype)
    grads = [jnp.zeros_like(params)] * 3
    for new, state in walk(way, plain_tx(way), grads, params):
        assert_same_bits(new, params)
        assert_same_bits((state.mu, state.nu), (jnp.zeros(5), jnp.zeros(5)))


@every_way
def test_b24_thousand_steps(way):
    tx = plain_tx(way)
    grads = jnp.float32(0.1)

    def step(carry, _):
        params, state = carry
        return take_step(way, tx, grads, state, params), None

    params = jnp.float32(1.0)
    walked = jax.jit(lambda carry: jax.lax.scan(step, carry, length=1000)[0])
    params, state = walked((params, tx.init(params)))
    assert int(state.count) == 1000
    assert abs(float(params) - 1.0e-7) <= 1e-4


@every_way
@pytest.mark.parametrize("count, after", [(2**24, 2**24 + 1), (2**31 - 1, 2**31 - 1)])
def test_b24_huge_counts(way, count, after):
    tx = plain_tx(way, learning_rate=0.5, eps=1.0)
    ones = jnp.ones(3)
    state = tx.init(ones)._replace(count=jnp.int32(count), mu=ones, nu=ones)
    new, state = take_step(way, tx, ones, state, jnp.zeros(3))
    assert int(state.count) == after
    assert_within_ulp(new, np.full(3, -0.25), 4)


B25 = {
    True: [-0.99999999, -1.74081062, -2.37395416],
    "optax": [-0.99999999, -1.52631577, -1.89531946],
}
B26 = {True: [0.001, 0.001009, 0.001017991], "optax": [1.0, 1.0, 1.0]}


@every_way
@pytest.mark.parametrize("amsgrad", [True, "optax"])
def test_b25_b26_amsgrad_conventions_and_stored_maximum(way, amsgrad):
    tx = plain_tx(way, learning_rate=1.0, amsgrad=amsgrad)
    grads = [jnp.float32(g) for g in (1.0, 0.1, 0.1)]
    steps = list(walk(way, tx, grads, jnp.float32(0.0)))
    np.testing.assert_allclose([p for p, _ in steps], B25[amsgrad], rtol=5e-7)
    np.testing.assert_allclose([s.nu_max for _, s in steps], B26[amsgrad], rtol=5e-7)


@every_way
def test_b27_bfloat16_without_master_stays(way):
    """The step is below half an ulp: what master weights will be for."""
    params = jnp.ones(3, jnp.bfloat16)
    tx = plain_tx(way, learning_rate=1e-4)
    *_, (new, state) = walk(way, tx, [params] * 50, params)
    assert_same_bits(new, params)
    np.testing.assert_allclose(state.mu, np.full(3, 1 - 0.9**50), rtol=1e-6)


def dtypes_of(tree) -> list:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


LEARNING_RATES = {
    "float": 1e-3,
    "np.float32": np.float32(1e-3),
    "np.float64": np.float64(1e-3),
    "0-d array": np.array(1e-3),
    "jax": jnp.float32(1e-3),
    "weak jax": jnp.asarray(1e-3),
    "schedule": lambda count: 1e-3,
    "jax schedule": lambda count: jnp.float32(1e-3) + 0 * count,
}


@every_way
@pytest.mark.parametrize("kind", LEARNING_RATES)
def test_b30_kind_of_learning_rate_changes_nothing(way, kind):
    params = {"w": jnp.linspace(-1, 1, 9, dtype=jnp.bfloat16), "b": jnp.ones(2)}
    ends = []
    for learning_rate in (LEARNING_RATES[kind], 1e-3):
        tx = plain_tx(way, learning_rate=learning_rate)
        step = jax.jit(lambda g, s, p, tx=tx: take_step(way, tx, g, s, p))
        new, state = params, tx.init(params)
        updates, _ = tx.update(params, state, params)
        assert dtypes_of(updates) == dtypes_of(params)
        for _ in range(3):
            new, state = step(params, state, new)
        assert step._cache_size() == 1
        ends.append((new, state))
    assert_same_bits(*ends)


@every_way
def test_b32_integer_hyperparameters(way):
    tx = plain_tx(way, learning_rate=1, b1=0, weight_decay=0)
    [(new, _)] = walk(way, tx, [jnp.array([1.0, 2.0])], jnp.zeros(2))
    eps = 1e-8
    np.testing.assert_allclose(new, [-1 / (1 + eps), -2 / (2 + eps)], rtol=3e-7)


UNSUPPORTED = [np.int32, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn]


@every_way
@pytest.mark.parametrize("dtype", UNSUPPORTED, ids=lambda d: np.dtype(d).name)
def test_b33_other_dtypes_are_refused_by_path(way, dtype):
    tx = plain_tx(way)
    good = {"w": jnp.ones(2), "deep": [jnp.ones(2)]}
    bad = {"w": jnp.ones(2), "deep": [jnp.ones(2).astype(dtype)]}
    state = tx.init(good)
    match = rf"\['deep'\]\[0\].*{np.dtype(dtype).name}"
    with pytest.raises(TypeError, match="params" + match):
        tx.init(bad)
    with pytest.raises(TypeError, match="params" + match):
        take_step(way, tx, good, state, bad)
    with pytest.raises(TypeError, match="grads" + match):
        take_step(way, tx, bad, state, good)
    assert_same_bits(good, {"w": jnp.ones(2), "deep": [jnp.ones(2)]})
    assert_same_bits(state, tx.init(good))
    new, _ = take_step(way, tx, good, state, good)
    assert (bits(new["w"]) != bits(good["w"])).all()


MASKS = {
    "tree": {"w": {"a": True, "b": True}, "bias": False, "none": None},
    "prefix": {"w": True, "bias": False, "none": None},
    "callable": lambda params: {"w": True, "bias": False, "none": None},
}


@every_way
@pytest.mark.parametrize("kind", MASKS)
def test_b34_decay_mask_and_none_leaves(way, kind):
    params = {
        "w": {"a": jnp.ones(2), "b": jnp.ones(1)},
        "bias": jnp.array([1.0, jnp.inf]),
        "none": None,
    }
    tx = plain_tx(way, learning_rate=0.1, weight_decay=0.5, mask=MASKS[kind])
    [(new, state)] = walk(way, tx, [jax.tree.map(jnp.zeros_like, params)], params)
    assert new["none"] is None and state.mu["none"] is None
    assert_same_bits(new["bias"], params["bias"])
    for name in ("a", "b"):
        assert_within_ulp(new["w"][name], np.full_like(new["w"][name], 0.95), 1)


@every_way
def test_b35_multi_steps(way):
    """No dtype mismatch in its cond; the fourth call equals one with the mean."""
    params = {"w": jnp.linspace(1, 2, 5, dtype=jnp.bfloat16), "b": jnp.float32(1.5)}
    inner = plain_tx(way, learning_rate=0.25)
    tx = optax.MultiSteps(inner, every_k_schedule=4)
    tx = tx.gradient_transformation()
    step = jax.jit(lambda g, s, p: take_step(way, tx, g, s, p))
    new, state = params, tx.init(params)
    for value in (1.0, 2.0, 3.0, 4.0):
        assert_same_bits(new, params)
        grads = jax.tree.map(lambda p, v=value: jnp.full_like(p, v), params)
        new, state = step(grads, state, new)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 2.5), params)
    expected, _ = take_step(way, inner, grads, inner.init(params), params)
    assert (bits(expected["w"]) != bits(params["w"])).all()
    # MultiSteps reads the updates, so in place they are rounded differences.
    rtol = {"w": 2.0**-8, "b": 2.0**-23} if way != "update" else {"w": 0, "b": 0}
    for name in params:
        np.testing.assert_allclose(
            np.float32(new[name]), np.float32(expected[name]), rtol=rtol[name]
        )
