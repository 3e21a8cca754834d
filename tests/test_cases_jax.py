"""Faults at the border to JAX and XLA, as inputs with right answers.

A test's number is that of its case. Unless a case says otherwise: lr 1e-3, b1 .9,
b2 .999, eps 1e-8, no decay, float32, count 0.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    WAYS,
    assert_same_bits,
    bits,
    plain_tx,
    random_like,
    take_step,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_adamw as jfa
from jax_fused_adamw._ffi import UPDATE_TARGET

every_way = pytest.mark.parametrize("way", WAYS)


# --- Tracing --------------------------------------------------------------------------


@every_way
def test_b31_x64_mode_changes_nothing(way):
    """Neither dtypes nor bits, in scan, in cond and outside them."""
    tx = plain_tx(way, learning_rate=0.1, weight_decay=0.1, amsgrad=True)
    params = {"w": jnp.ones(5), "h": jnp.linspace(-1, 1, 7, dtype=jnp.bfloat16)}

    def step(carry, _=None):
        params, state = carry
        return take_step(way, tx, params, state, params, gradient_scale=2), None

    def run():
        start = (params, tx.init(params))
        return (
            step(step(step(start)[0])[0])[0],
            jax.jit(lambda c: jax.lax.scan(step, c, length=3)[0])(start),
            jax.jit(
                lambda c, yes: jax.lax.cond(yes, lambda c: step(c)[0], lambda c: c, c)
            )(start, True),
        )

    expected = run()
    with jax.enable_x64(True):
        got = run()
        assert jnp.ones(1, float).dtype == jnp.float64
    assert_same_bits(got, expected)
    assert_same_bits(expected[1], expected[0])
    assert_same_bits(expected[2], step((params, tx.init(params)))[0])


def injected(way):
    """learning_rate and weight_decay live in the state."""
    tx = optax.inject_hyperparams(
        jfa.fused_adamw,
        static_args=("in_place",),
        hyperparam_dtype=jnp.float32,
    )(0.1, weight_decay=0.1, in_place=way == "in_place")

    def step(params, state, lr, wd, **extra):
        hyperparams = {**state.hyperparams, "learning_rate": lr, "weight_decay": wd}
        state = state._replace(hyperparams=hyperparams)
        return take_step(way, tx, params, state, params, **extra)

    return tx.init, step


def rebuilt(way):
    """The transformation is made anew from traced values."""

    def step(params, state, lr, wd, **extra):
        tx = plain_tx(way, learning_rate=lr, weight_decay=wd)
        return take_step(way, tx, params, state, params, **extra)

    return plain_tx(way).init, step


@every_way
@pytest.mark.parametrize("make", [injected, rebuilt])
def test_b36_new_values_compile_nothing(way, make):
    init, step = make(way)
    jitted = jax.jit(step)
    params = {"w": jnp.ones(5), "h": jnp.ones(7, jnp.bfloat16)}
    state = init(params)
    values = [
        # lr, wd, gradient_scale, skip_update
        (0.1, 0.1, 1.0, False),
        (0.1, 0.1, 1.0, False),
        (0.2, 0.1, 1.0, False),
        (0.2, 0.3, 1.0, False),
        (0.2, 0.3, 3.0, False),
        (0.2, 0.3, 3.0, True),
    ]
    previous = params
    for lr, wd, scale, skip in values:
        arguments = map(np.float32, (lr, wd))
        extra = dict(gradient_scale=np.float32(scale), skip_update=np.bool_(skip))
        oracle = plain_tx(way, learning_rate=lr, weight_decay=wd)
        inner = state if isinstance(state, jfa.FusedAdamWState) else state.inner_state
        expected = take_step(way, oracle, params, inner, params, **extra)[0]
        params, state = jitted(params, state, *arguments, **extra)
        # Injected, b2 is a float32: 1 - b2 is 1e-5 off.
        np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-5)
        assert (params["w"] != previous["w"]).all() != skip
        previous = params
    assert jitted._cache_size() == 1


@every_way
def test_b43_vmap_over_members(way):
    """Each member its own skip: one kernel call, not a loop and not plain JAX."""
    tx = plain_tx(way, weight_decay=0.1)
    params = random_like(jnp.zeros((3, 5)), seed=1)
    grads = random_like(params, seed=2).at[1, 2].set(jnp.nan)
    state = jax.vmap(tx.init)(params)

    def step(params, state, grads):
        skip = jnp.isnan(grads).any()
        return take_step(way, tx, grads, state, params, skip_update=skip)

    compiled = jax.jit(jax.vmap(step)).lower(params, state, grads).compile()
    assert len(re.findall(UPDATE_TARGET, compiled.as_text())) >= 1
    assert "while(" not in compiled.as_text()
    new, after = compiled(params, state, grads)
    singles = [
        step(params[i], jax.tree.map(lambda x, i=i: x[i], state), grads[i])
        for i in range(3)
    ]
    assert_same_bits((new, after), jax.tree.map(lambda *x: jnp.stack(x), *singles))
    assert after.skipped.tolist() == [0, 1, 0]
    assert_same_bits(new[1], params[1])


@every_way
def test_b48_transposed_gradients(way):
    tx = plain_tx(way, learning_rate=0.1)
    params = jnp.zeros((4, 3))
    state = tx.init(params)

    def step(params, state):
        grads = jnp.arange(12.0).reshape(3, 4).T
        return take_step(way, tx, grads, state, params)

    copied = jnp.asarray(np.arange(12, dtype=np.float32).reshape(3, 4).T.copy())
    expected = take_step(way, tx, copied, state, params)
    assert_same_bits(jax.jit(step)(params, state), expected)
    np.testing.assert_allclose(expected[1].mu[1], [0.1, 0.5, 0.9], rtol=1e-6)


# --- Buffers --------------------------------------------------------------------------


def test_b39_init_shares_no_buffers():
    params = {"w": jnp.zeros(6), "b": jnp.zeros(6)}
    tx = plain_tx(amsgrad=True)
    state = tx.init(params)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))]
    assert len(set(pointers)) == len(pointers) == 2 * 4 + 3
    # Hence state and parameters can be donated together.
    step = jax.jit(lambda p, s, g: tx.step(g, s, p), donate_argnums=(0, 1))
    grads = {"w": jnp.ones(6), "b": jnp.ones(6)}
    expected = tx.step(grads, state, params)
    expected = jax.tree.map(np.array, expected)
    assert_same_bits(step(params, state, grads), expected)


@pytest.mark.timeout(60)
def test_b39_tied_leaves():
    """One buffer twice: an error when donated, the right result when not."""
    x = jnp.ones(6)
    params, grads = {"w": x, "ema": x}, {"w": jnp.ones(6), "ema": -jnp.ones(6)}
    tx = plain_tx(learning_rate=0.5)
    state = tx.init(params)
    new, _ = jax.jit(tx.step)(grads, state, params)
    np.testing.assert_allclose(new["w"], np.full(6, 0.5), rtol=1e-6)
    np.testing.assert_allclose(new["ema"], np.full(6, 1.5), rtol=1e-6)
    assert_same_bits(x, jnp.ones(6))
    step = jax.jit(lambda p, s, g: tx.step(g, s, p), donate_argnums=(0, 1))
    with pytest.raises(Exception, match="(?i)donate"):
        jax.block_until_ready(step(params, state, grads))


@every_way
def test_b40_host_views_survive_donation(way):
    params = random_like(jnp.zeros(1000), seed=1)
    tx = plain_tx(way, learning_rate=0.5)
    state = tx.init(params)
    view = np.asarray(params)
    before = view.copy()
    step = jax.jit(lambda p, s, g: take_step(way, tx, g, s, p), donate_argnums=(0, 1))
    new, _ = step(params, state, jnp.ones(1000))
    assert (bits(new) != bits(before)).all()
    assert_same_bits(view, before)


# --- Devices --------------------------------------------------------------------------


def mesh_of(num_devices, axis_type=AxisType.Auto):
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), ("x",), (axis_type,), devices=devices)


@pytest.mark.devices(8)
@every_way
@pytest.mark.parametrize("spec", [P(), P("x")], ids=["replicated", "sharded"])
@pytest.mark.parametrize("num_devices", [2, 8])
def test_b38_donation_with_sharding_constraints(way, spec, num_devices):
    sharding = NamedSharding(mesh_of(num_devices), spec)
    tx = plain_tx(way, learning_rate=0.1, weight_decay=0.1, amsgrad=True)

    def step(params, state, grads):
        params, state = take_step(way, tx, grads, state, params)
        constrained = jax.lax.with_sharding_constraint(params, sharding)
        return constrained, state

    ends = []
    for donated in [(), (0, 1)]:
        jitted = jax.jit(step, donate_argnums=donated)
        params = jax.device_put(random_like(jnp.zeros((16, 3)), seed=1), sharding)
        state = jax.jit(tx.init)(params)
        for seed in range(10):
            grads = jax.device_put(random_like(params, seed=seed + 2), sharding)
            params, state = jitted(params, state, grads)
        assert params.sharding.is_equivalent_to(sharding, 2)
        ends.append(jax.device_get((params, state)))
    assert_same_bits(ends[1], ends[0])
    local = jax.device_put(random_like(jnp.zeros((16, 3)), seed=1), jax.devices()[0])
    state = tx.init(local)
    for seed in range(10):
        grads = random_like(local, seed=seed + 2)
        local, state = take_step(way, tx, grads, state, local)
    assert_same_bits(ends[0], jax.device_get((local, state)))


@pytest.mark.devices(8)
@every_way
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_b42_sharded_operands_are_not_gathered(way, axis_type):
    mesh = mesh_of(8, axis_type)
    sharding = NamedSharding(mesh, P("x"))
    tx = plain_tx(way, learning_rate=0.5)
    with jax.set_mesh(mesh):
        ones = jax.device_put(jnp.ones(64), sharding)
        state = jax.tree.map(
            lambda x: jax.device_put(
                x, sharding if x.ndim else NamedSharding(mesh, P())
            ),
            tx.init(jnp.ones(64)),
        )
        step = jax.jit(lambda p, s, g: take_step(way, tx, g, s, p))
        compiled = step.lower(ones, state, ones).compile()
        new, after = compiled(ones, state, ones)
    text = compiled.as_text()
    assert UPDATE_TARGET in text
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text
    for x in (new, after.mu, after.nu):
        assert x.sharding.is_equivalent_to(sharding, 1)
    np.testing.assert_allclose(new, np.full(64, 0.5), rtol=1e-6)


def test_b44_lowering_for_another_platform():
    """The right handler, or an error that names the way out; never this platform's."""
    tx = plain_tx()
    params = jnp.ones(4)
    traced = jax.jit(tx.step).trace(params, tx.init(params), params)
    assert UPDATE_TARGET in traced.lower().as_text()
    if jfa.kernel_info().cuda.loaded:
        assert UPDATE_TARGET in traced.lower(lowering_platforms=("cuda",)).as_text()
    else:
        with pytest.raises(RuntimeError, match='cuda.*implementation="xla"'):
            traced.lower(lowering_platforms=("cuda",))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert UPDATE_TARGET not in text and "sqrt" in text


@pytest.mark.devices(2)
@every_way
@pytest.mark.parametrize("jit", [False, True])
def test_b47_runs_where_its_arrays_lie(way, jit):
    tx = plain_tx(way, learning_rate=0.1, amsgrad=True)

    def run(device):
        params, grads = jax.device_put(
            (random_like(jnp.zeros(40), 1), random_like(jnp.zeros(40), 2)), device
        )
        state = jax.device_put(tx.init(params), device)

        def step(g, s, p):
            return take_step(way, tx, g, s, p)

        return (jax.jit(step) if jit else step)(grads, state, params)

    first, second = jax.devices()[:2]
    after = run(second)
    assert all(leaf.devices() == {second} for leaf in jax.tree.leaves(after))
    assert_same_bits(jax.device_get(after), jax.device_get(run(first)))
