"""float64 parameters, with x64 on: the step against long double and beside others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    HYPERPARAMS,
    VARIANTS,
    WAYS,
    assert_same_bits,
    bits,
    make_tx,
    name_of,
    oracle_of,
    random_like,
    take_step,
    walk,
)
from low_precision import each_implementation, needs_kernel, steps
from oracle import LeafState

import jax_fused_adamw as jfa
from jax_fused_adamw._ffi import UPDATE_TARGET

every_way = pytest.mark.parametrize("way", WAYS)

# Decays away from 1, where 1 - b^t would cancel digits of float64 as well.
OPTIONS = {**HYPERPARAMS, "b1": 0.9, "b2": 0.95}
SHAPE = (7, 9)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def leaf(seed, scale=1.0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE) * scale, dtype)


def mixed(seed=1):
    """The float64 leaf is the last one: the noise goes by the numbers of the leaves."""
    shapes = {
        "a": jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        "b": jax.ShapeDtypeStruct((5,), jnp.bfloat16),
        "z": jax.ShapeDtypeStruct((4, 8), jnp.float64),
    }
    return random_like(shapes, seed)


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def without_float64(tree):
    return {name: x for name, x in tree.items() if x.dtype != jnp.float64}


def assert_close(actual, expected, name=""):
    """To 1e-14 of the number or, where terms cancel, of the largest one."""
    assert actual.dtype == jnp.float64
    expected = np.asarray(expected).astype(np.longdouble)
    atol = 1e-14 * float(np.abs(expected).max())
    actual = np.asarray(actual).astype(np.longdouble)
    np.testing.assert_allclose(actual, expected, 1e-14, atol, err_msg=name)


# --- Against long double --------------------------------------------------------------

LIMIT = 0.5
CLIPS = {
    "no clip": {},
    "norm": {"max_grad_norm": LIMIT},
    "value": {"max_grad_value": LIMIT},
}


def clipped(grad, kind, norm):
    if kind == "value":
        return np.clip(grad, -LIMIT, LIMIT)
    is_within = kind == "no clip" or norm <= LIMIT
    return grad if is_within else grad / norm * LIMIT


@each_implementation
@pytest.mark.parametrize(
    "variant, clip",
    [*((v, "no clip") for v in VARIANTS), *((VARIANTS[4], clip) for clip in CLIPS)],
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)
def test_follows_long_double(variant, clip, implementation):
    """50 steps; gradients shrink, so that the maximum of AMSGrad matters."""
    options = {**OPTIONS, **variant}
    scale = 3.0
    tx = jfa.fused_adamw(**options, **CLIPS[clip], implementation=implementation)
    oracle = dataclasses.replace(oracle_of(options), real=np.longdouble)
    param = leaf(1)
    exact = np.asarray(param).astype(np.longdouble)
    exact_state, state = LeafState.zeros(SHAPE, np.longdouble), tx.init(param)
    step = jax.jit(tx.step)
    for i in range(1, 51):
        grad = leaf(100 + i, scale=3.0 / i)
        param, state = step(grad, state, param, gradient_scale=scale)
        # The norm is that of the float32 report, widened.
        norm = np.longdouble(state.report.norm) if clip == "norm" else None
        unscaled = clipped(np.asarray(grad).astype(np.longdouble) / scale, clip, norm)
        update, exact_state = oracle.update(exact, unscaled, exact_state, i)
        exact = exact + update
    assert_close(param, exact, "param")
    assert_close(state.mu, exact_state.mu, "mu")
    assert_close(state.nu, exact_state.nu, "nu")
    if variant["amsgrad"]:
        assert_close(state.nu_max, exact_state.nu_max, "nu_max")


@each_implementation
@pytest.mark.parametrize("grad_dtype", ["float64", "float32", "bfloat16", "float16"])
def test_a_narrower_gradient_is_widened_exactly(grad_dtype, implementation):
    tx = jfa.fused_adamw(**OPTIONS, implementation=implementation)
    param, grad = leaf(1), leaf(2, dtype=grad_dtype)
    widened = grad.astype(jnp.float64)
    assert_same_bits(steps(tx, param, grad), steps(tx, param, widened))


@each_implementation
def test_average_and_decay_mask(implementation):
    params = {"w": leaf(1), "bias": leaf(2)}
    grads = random_like(params, 3)
    options = {**OPTIONS, "ema_decay": 0.9}
    mask = {"w": True, "bias": False}
    tx = jfa.fused_adamw(**options, mask=mask, implementation=implementation)
    new, state = steps(tx, params, grads, count=1)
    for name, decays in mask.items():
        decay = OPTIONS["weight_decay"] * decays
        oracle = oracle_of({**OPTIONS, "weight_decay": decay})
        zeros = LeafState.zeros(SHAPE)
        update, _ = oracle.update(params[name], grads[name], zeros, 1)
        assert_close(new[name], params[name] + update, name)
        average = 0.9 * params[name] + (1 - 0.9) * new[name]
        assert_close(state.ema[name], average, name)


@each_implementation
def test_traced_hyperparameters_are_float32_widened(implementation):
    tx = jfa.fused_adamw(0.1, implementation=implementation)
    rounded = jfa.fused_adamw(float(np.float32(0.1)), implementation=implementation)
    traced = jfa.fused_adamw(jnp.asarray(0.1), implementation=implementation)
    param = leaf(1)
    got, _ = steps(traced, param, param)
    assert_same_bits(got, steps(rounded, param, param)[0])
    assert (got != steps(tx, param, param)[0]).any()


SHARED = {"learning_rate": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-3}
IN_OPTAX = {
    "adamw": (optax.adamw, {"eps_root": 1e-4, "weight_decay": 0.1}, {}),
    "amsgrad": (optax.amsgrad, {}, {"amsgrad": "optax", "weight_decay": 0.0}),
}


@each_implementation
@pytest.mark.parametrize("name", IN_OPTAX)
def test_follows_optax(name, implementation):
    """Which loses some of the digits of 1 - b^t, as in float32 most of them."""
    make, both, only_ours = IN_OPTAX[name]
    theirs = make(**SHARED, **both)
    ours = jfa.fused_adamw(**SHARED, **both, **only_ours, implementation=implementation)
    param = expected = leaf(1)
    state, their_state = ours.init(param), theirs.init(param)
    for i in range(10):
        grad = leaf(2 + i, scale=1 / (i + 1))
        param, state = ours.step(grad, state, param)
        updates, their_state = theirs.update(grad, their_state, expected)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(param, expected, rtol=1e-12)


# --- Beside leaves of other dtypes ----------------------------------------------------

LOW_PRECISION = {
    "mu_dtype": jnp.bfloat16,
    "nu_dtype": jnp.bfloat16,
    "master_weights": True,
    "compute_dtype": jnp.bfloat16,
    "ema_decay": 0.9,
}


@needs_kernel
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True, "skip_nonfinite": True},
        LOW_PRECISION,
        {"stochastic_rounding": "params"},
    ],
    ids=["plain", "analysis", "low precision", "noise"],
)
def test_others_have_the_bits_of_a_tree_without_it(options):
    """And it has those of a tree of its own, whatever the options of the others."""
    params, grads = mixed(1), mixed(2)
    got, state = steps(jfa.fused_adamw(0.1, **options), params, grads)
    own_options = {k: x for k, x in options.items() if k in ("amsgrad", "ema_decay")}
    rest, rest_state = steps(
        jfa.fused_adamw(0.1, **options), without_float64(params), without_float64(grads)
    )
    own, own_state = steps(
        jfa.fused_adamw(0.1, **own_options), {"z": params["z"]}, {"z": grads["z"]}
    )
    assert_same_bits(got, rest | own)
    for name in ("mu", "nu", "nu_max", "ema"):
        tree = getattr(state, name)
        if tree is not None:
            assert tree["z"].dtype == jnp.float64
            parts = getattr(rest_state, name), getattr(own_state, name)
            assert_same_bits(tree, parts[0] | parts[1])
    assert all(
        tree is None or tree["z"] is None for tree in (state.master, state.compute)
    )
    assert_same_bits(state.count, jnp.int32(3))


@needs_kernel
def test_plain_jax_agrees_in_a_mixed_tree():
    options = LOW_PRECISION | {"stochastic_rounding": False, "amsgrad": True}
    ends = [
        steps(jfa.fused_adamw(0.1, **options, implementation=x), mixed(1), mixed(2))
        for x in (None, "xla")
    ]
    (native, native_state), (plain, plain_state) = ends
    assert dtypes(native_state) == dtypes(plain_state)
    np.testing.assert_allclose(native["z"], plain["z"], rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(native["a"], plain["a"], rtol=1e-5)


@needs_kernel
@pytest.mark.platform("cpu")
@pytest.mark.parametrize(
    "names, options, calls",
    [
        ("z", {}, 1),
        ("ab", {}, 1),
        ("abz", {}, 2),
        ("z", {"max_grad_norm": 1.0}, 1),
        ("az", LOW_PRECISION, 2),
        ("az", {"bucket_bytes": 1}, 2),
    ],
)
def test_calls(names, options, calls):
    tx = jfa.fused_adamw(0.1, **options)
    params = {name: mixed()[name] for name in names}

    def step(params, state, scale):
        grads = jax.grad(
            lambda p: scale * sum(jnp.sum(x.astype(float) ** 2) for x in p.values())
        )(params)
        return tx.step(grads, state, params)

    arguments = (params, tx.init(params), 2.0)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    text = compiled.as_text()
    assert text.count(f'custom_call_target="{UPDATE_TARGET}"') == calls
    _, state = compiled(*arguments)
    assert int(state.count) == 1 and int(state.consecutive) == 0


# --- Ways, skips and first steps ------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("variant", VARIANTS[::5], ids=name_of)
def test_three_ways_have_the_same_bits(variant):
    params, grads = {"z": leaf(1)}, [{"z": leaf(i)} for i in (2, 3, 4)]
    ends = [
        list(walk(way, make_tx(way, **OPTIONS, **variant), grads, params))[-1]
        for way in WAYS
    ]
    assert_same_bits(ends[1], ends[0])
    assert_same_bits(ends[2], ends[0])


@each_implementation
@every_way
def test_a_skipped_step_keeps_every_bit(way, implementation):
    tx = make_tx(way, learning_rate=0.1, amsgrad=True, implementation=implementation)
    params = {"z": leaf(1).at[0, 0].set(-0.0).at[0, 1].set(jnp.nan)}
    _, state = take_step(way, tx, params, tx.init(params), params)
    bad = {"z": leaf(2).at[1, 1].set(jnp.inf)}
    new, new_state = take_step(way, tx, bad, state, params, skip_update=True)
    assert_same_bits(new, params)
    for name in ("count", "mu", "nu", "nu_max"):
        assert_same_bits(getattr(new_state, name), getattr(state, name))
    assert int(new_state.skipped) == 1


@each_implementation
def test_reading_an_in_place_update(implementation):
    tx = jfa.fused_adamw(0.1, in_place=True, implementation=implementation)
    param = leaf(1)
    for skip in (False, True):
        update, _ = tx.update(param, tx.init(param), param, skip_update=skip)
        new = optax.apply_updates(param, update)
        expected = jnp.full_like(param, -0.0) if skip else new - param
        assert_same_bits(update.difference, expected)


@each_implementation
def test_updates_of_a_skipped_step_are_minus_zero(implementation):
    tx = jfa.fused_adamw(0.1, skip_nonfinite=True, implementation=implementation)
    params = mixed()
    bad = params | {"z": params["z"].at[1, 1].set(jnp.inf)}
    updates, state = tx.update(bad, tx.init(params), params)
    for name, x in updates.items():
        assert x.dtype == params[name].dtype
        assert (bits(x) == bits(np.asarray(-0.0, x.dtype))).all()
    assert int(state.skipped) == 1


@each_implementation
def test_first_step_of_one_array(implementation):
    param, grad = leaf(1), leaf(2)
    options = dict(OPTIONS, amsgrad=True, ema_decay=0.9, implementation=implementation)
    tx = jfa.fused_adamw(**options)
    first = jfa.adamw_step(param, grad, options=tx)
    assert_same_bits(first, tx.step(grad, tx.init(param), param))
    assert first[1].mu.dtype == jnp.float64
    second = jfa.adamw_step(*first[:1], grad, first[1], tx)
    assert_same_bits(second, tx.step(grad, first[1], first[0]))
