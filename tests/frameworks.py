"""Training loops as users of each framework write them, of one small classifier.

A :class:`Loop` is a framework's train step around an optax transformation; everything
that it changes is donated. Which loops need ``in_place=True`` stands in
:data:`IN_PLACE`. A framework that is not installed skips the test that asks for it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jax_fused_adamw as jfa
import jax_fused_adamw.flax

FEATURES, HIDDEN, CLASSES = 12, 24, 5
STEPS, BATCH = 50, 32


class Loop(NamedTuple):
    """A framework's loop.

    Attributes:
      lower: ``(state, x, y)`` to the lowered train step.
      step: ``(state, x, y)`` to the new state and the loss, jitted.
      state: the first one.
      params: of a state, the arrays that are trained.
    """

    lower: Callable[..., Any]
    step: Callable[..., tuple[Any, jax.Array]]
    state: Any
    params: Callable[[Any], list[jax.Array]]


@functools.cache
def batches() -> tuple[np.ndarray, np.ndarray]:
    """Inputs of two clouds a class, and their classes, a batch for each step."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, 2, FEATURES))
    y = rng.integers(CLASSES, size=(STEPS, BATCH))
    cloud = rng.integers(2, size=y.shape)
    x = centres[y, cloud] + 0.7 * rng.normal(size=(*y.shape, FEATURES))
    return x.astype(np.float32), y.astype(np.int32)


def train(loop: Loop) -> tuple[np.ndarray, list[np.ndarray]]:
    """The losses of all steps, and the arrays at the end."""
    state, losses = loop.state, []
    for x, y in zip(*batches()):
        state, loss = loop.step(state, x, y)
        losses.append(loss)
    return np.array(losses), [np.asarray(param) for param in loop.params(state)]


def compiled_step(loop: Loop):
    x, y = batches()
    return loop.lower(loop.state, x[0], y[0]).compile()


def _loop(step, state, params) -> Loop:
    jitted = jax.jit(step, donate_argnums=0)
    return Loop(jitted.lower, jitted, state, lambda s: jax.tree.leaves(params(s)))


def _mean_loss(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


# --- optax alone --------------------------------------------------------------------


def _plain_params():
    keys = jax.random.split(jax.random.key(0))
    sizes = [(FEATURES, HIDDEN), (HIDDEN, CLASSES)]
    return [
        {"w": jax.random.normal(key, size) / np.sqrt(size[0]), "b": jnp.zeros(size[1])}
        for key, size in zip(keys, sizes)
    ]


def _plain_loss(params, x, y):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return _mean_loss(x @ params[-1]["w"] + params[-1]["b"][None], y)


def plain_step(tx) -> Loop:
    def step(carry, x, y):
        params, state = carry
        loss, grads = jax.value_and_grad(_plain_loss)(params, x, y)
        return jfa.step(tx, grads, state, params), loss

    params = _plain_params()
    return _loop(step, (params, tx.init(params)), lambda carry: carry[0])


def plain_protocol(tx) -> Loop:
    def step(carry, x, y):
        params, state = carry
        loss, grads = jax.value_and_grad(_plain_loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    params = _plain_params()
    return _loop(step, (params, tx.init(params)), lambda carry: carry[0])


# --- Flax ---------------------------------------------------------------------------


class _LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(jnp.tanh(nn.Dense(HIDDEN)(x)))


def linen(tx, train_state_class=train_state.TrainState) -> Loop:
    def step(state, x, y):
        def loss_fn(params):
            return _mean_loss(state.apply_fn(params, x), y)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    model = _LinenModel()
    params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))
    state = train_state_class.create(apply_fn=model.apply, params=params, tx=tx)
    # Flax begins with a Python int, which would be traced anew once it is an array.
    return _loop(step, state.replace(step=jnp.int32(0)), lambda state: state.params)


def our_linen(tx) -> Loop:
    return linen(tx, jfa.flax.TrainState)


class _NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def nnx_optimizer(tx) -> Loop:
    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda m: _mean_loss(m(x), y))(model)
        optimizer.update(model, grads)
        return loss

    def step(state, x, y):
        return state, train_step(*state, x, y)

    def params(state):
        return jax.tree.leaves(nnx.state(state[0], nnx.Param))

    model = _NnxModel(nnx.Rngs(0))
    state = (model, nnx.Optimizer(model, tx, wrt=nnx.Param))
    return Loop(lambda s, x, y: train_step.lower(*s, x, y), step, state, params)


# --- Haiku --------------------------------------------------------------------------


def haiku(tx) -> Loop:
    hk = pytest.importorskip("haiku")

    def forward(x):
        return hk.nets.MLP([HIDDEN, CLASSES], activation=jnp.tanh)(x)

    model = hk.without_apply_rng(hk.transform(forward))

    def step(carry, x, y):
        params, state = carry

        def loss_fn(params):
            return _mean_loss(model.apply(params, x), y)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jfa.step(tx, grads, state, params), loss

    params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))
    return _loop(step, (params, tx.init(params)), lambda carry: carry[0])


# --- Equinox ------------------------------------------------------------------------


def equinox_model():
    eqx = pytest.importorskip("equinox")
    return eqx.nn.MLP(
        FEATURES, CLASSES, HIDDEN, depth=1, activation=jnp.tanh, key=jax.random.key(0)
    )


def _equinox(take_step, tx) -> Loop:
    eqx = pytest.importorskip("equinox")

    @eqx.filter_jit(donate="all-except-first")
    def train_step(batch, model, state):
        x, y = batch

        def loss_fn(model):
            return _mean_loss(jax.vmap(model)(x), y)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        params, state = take_step(tx, grads, state, params)
        return eqx.combine(params, static), state, loss

    def step(carry, x, y):
        model, state, loss = train_step((x, y), *carry)
        return (model, state), loss

    def lower(carry, x, y):
        return train_step.lower((x, y), *carry).lowered

    def params(carry):
        return jax.tree.leaves(eqx.filter(carry[0], eqx.is_inexact_array))

    model = equinox_model()
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    return Loop(lower, step, (model, state), params)


def equinox_step(tx) -> Loop:
    return _equinox(jfa.step, tx)


def equinox_protocol(tx) -> Loop:
    def take_step(tx, grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return _equinox(take_step, tx)


LOOPS = {
    "optax, step": plain_step,
    "optax, apply_updates": plain_protocol,
    "flax TrainState": linen,
    "jfa.flax.TrainState": our_linen,
    "nnx.Optimizer": nnx_optimizer,
    "haiku, step": haiku,
    "equinox, step": equinox_step,
    "equinox, apply_updates": equinox_protocol,
}
# Those that use optax's protocol: without in_place=True they add updates themselves.
IN_PLACE = (
    "optax, apply_updates",
    "flax TrainState",
    "nnx.Optimizer",
    "equinox, apply_updates",
)
