"""Flax and Haiku training loops in place: bits of the plain protocol, no copies."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import assert_same_bits, copies

import jax_fused_adamw as jfa

PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 96 * 40).reshape(96, 40),
    "b": jnp.linspace(0.5, 1.5, 96),
}


def bare(**options):
    return jfa.fused_adamw(1e-2, **options)


def test_flax_nnx_optimizer_is_in_place():
    def loss(model, x):
        return jnp.square(model(x)).mean()

    x = jnp.ones((4, 96))
    results = []
    for tx in (bare(), bare(in_place=True)):
        model = nnx.Linear(96, 40, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def train_step(model, optimizer, x):
            grads = nnx.grad(loss)(model, x)
            optimizer.update(model, grads)

        for _ in range(3):
            train_step(model, optimizer, x)
        results.append(nnx.to_pure_dict(nnx.state(model)))
    assert_same_bits(*results)


def nnx_step(tx):
    graphdef, params = nnx.split(nnx.Linear(96, 40, rngs=nnx.Rngs(0)))

    def train_step(params, state, x):
        model = nnx.merge(graphdef, params)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        nnx.update(optimizer.opt_state, state)
        grads = nnx.grad(lambda m: jnp.square(m(x)).mean())(model)
        optimizer.update(model, grads)
        return nnx.state(model), nnx.state(optimizer.opt_state)

    state = nnx.state(
        nnx.Optimizer(nnx.merge(graphdef, params), tx, wrt=nnx.Param).opt_state
    )
    return train_step, params, state


def test_flax_nnx_compiles_without_copies():
    train_step, params, state = nnx_step(bare(in_place=True))
    x = jnp.ones((4, 96))
    lowered = jax.jit(train_step, donate_argnums=(0, 1)).lower(params, state, x)
    compiled = lowered.compile()
    assert "jax_fused_adamw_update" in compiled.as_text()
    assert copies(compiled) == 0
    assert "f32[96,40]{1,0} add(" not in compiled.as_text()


def test_flax_linen_train_state_is_in_place():
    def train_step(state, x):
        def loss(params):
            return jnp.square(x @ params["w"]).mean() + jnp.square(params["b"]).mean()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    x = jnp.ones((4, 96))

    def create(**options):
        params = jax.tree.map(jnp.copy, PARAMS)
        return TrainState.create(apply_fn=None, params=params, tx=bare(**options))

    in_place = create(in_place=True)
    compiled = jax.jit(train_step, donate_argnums=0).lower(in_place, x).compile()
    assert copies(compiled) == 0
    assert "f32[96,40]{1,0} add(" not in compiled.as_text()
    plain = jax.jit(train_step)(create(), x)
    ours = jax.jit(train_step)(in_place, x)
    assert_same_bits(ours.params, plain.params)


def test_haiku_steps_are_in_place():
    hk = pytest.importorskip("haiku")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([40, 7])(x)))
    x = jnp.ones((4, 96))
    params = model.init(jax.random.key(0), x)

    def gradients(params):
        return jax.grad(lambda p: jnp.square(model.apply(p, x)).mean())(params)

    def fast(params, state):
        return jfa.step(bare(), gradients(params), state, params)

    def protocol(params, state):
        updates, state = bare().update(gradients(params), state, params)
        return optax.apply_updates(params, updates), state

    state = bare().init(params)
    lowered = jax.jit(fast, donate_argnums=(0, 1)).lower(params, state)
    assert copies(lowered.compile()) == 0
    ends = []
    for step in map(jax.jit, (fast, protocol)):
        end = (params, state)
        for _ in range(3):
            end = step(*end)
        ends.append(end)
    assert_same_bits(*ends)
