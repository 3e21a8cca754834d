"""The exponential moving average of the parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import WAYS, assert_same_bits, make_tx, take_step
from low_precision import GRADS, PARAMS, as_float64, each_implementation, steps

import jax_fused_adamw as jfa

DECAY = 0.75
OPTIONS = [
    {},
    {"master_weights": True},
    {"master_weights": True, "compute_dtype": jnp.bfloat16},
    {"stochastic_rounding": "params"},
]


@each_implementation
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_average_of_the_parameters_as_they_are_stored(way, options, implementation):
    """Of the masters, where there are any."""
    tx = make_tx(
        way,
        learning_rate=0.1,
        ema_decay=DECAY,
        implementation=implementation,
        **options,
    )
    params, state = PARAMS, tx.init(PARAMS)
    expected = {name: as_float64(x) for name, x in PARAMS.items()}
    for name, x in state.ema.items():
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(as_float64(x), expected[name])
    step = jax.jit(functools.partial(take_step, way, tx))
    for _ in range(4):
        params, state = step(GRADS, state, params)
        for name, p in params.items():
            if options.get("master_weights") and state.master[name] is not None:
                p = state.master[name]
            expected[name] = DECAY * expected[name] + (1 - DECAY) * as_float64(p)
            np.testing.assert_allclose(
                state.ema[name], expected[name], rtol=1e-6, atol=1e-7
            )
    assert step._cache_size() == 1


@each_implementation
def test_the_rest_of_the_step_is_what_it_is_without(implementation):
    make = functools.partial(jfa.fused_adamw, 0.1, implementation=implementation)
    params, state = steps(make(ema_decay=DECAY), PARAMS, GRADS)
    expected_params, expected = steps(make(), PARAMS, GRADS)
    if implementation == "ffi":
        assert_same_bits(
            (params, state._replace(ema=None)), (expected_params, expected)
        )
    for got, want in zip(*map(jax.tree.leaves, (params, expected_params)), strict=True):
        np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=1e-5)


@each_implementation
@pytest.mark.parametrize("way", WAYS)
def test_skipped_step_keeps_it(way, implementation):
    tx = make_tx(way, learning_rate=0.1, ema_decay=DECAY, implementation=implementation)
    state = tx.init(PARAMS)
    step = jax.jit(functools.partial(take_step, way, tx, skip_update=True))
    _, new = step(GRADS, state, jax.tree.map(lambda x: x + 1, PARAMS))
    assert_same_bits(new.ema, state.ema)


@each_implementation
def test_decay_may_be_injected_and_scheduled(implementation):
    make = optax.inject_hyperparams(
        jfa.fused_adamw, static_args="implementation", hyperparam_dtype=jnp.float32
    )
    tx = make(
        0.1,
        ema_decay=lambda count: jnp.where(count == 0, 0.0, 0.5),
        implementation=implementation,
    )
    params = {"a": PARAMS["a"]}
    grads = {"a": GRADS["a"]}
    state, step = tx.init(params), jax.jit(functools.partial(jfa.step, tx))
    first, state = step(grads, state, params)
    np.testing.assert_array_equal(state.inner_state.ema["a"], first["a"])
    second, state = step(grads, state, first)
    expected = (as_float64(first["a"]) + as_float64(second["a"])) / 2
    np.testing.assert_allclose(state.inner_state.ema["a"], expected, rtol=1e-6)
    assert step._cache_size() == 1


@each_implementation
def test_decay_acts_at_double_precision(implementation):
    """1 - (1 - 2^-30) is 2^-30; that of the float32 nearest to it is zero."""
    tx = jfa.fused_adamw(
        0.0, weight_decay=0.0, ema_decay=1 - 2.0**-30, implementation=implementation
    )
    params = jnp.array([2.0**30], jnp.float32)
    state = tx.init(params)._replace(ema=jnp.zeros(1))
    _, state = tx.step(jnp.zeros(1), state, params)
    np.testing.assert_array_equal(state.ema, [1.0])


@each_implementation
def test_first_step_without_a_state(implementation):
    tx = jfa.fused_adamw(0.1, ema_decay=DECAY, implementation=implementation)
    expected = tx.step(GRADS, tx.init(PARAMS), PARAMS)
    assert_same_bits(jfa.adamw_step(PARAMS, GRADS, options=tx), expected)


def test_state_of_other_options_is_refused():
    tx = jfa.fused_adamw(0.1, ema_decay=DECAY, implementation="xla")
    plain = jfa.fused_adamw(0.1, implementation="xla")
    with pytest.raises(ValueError, match="has no ema, but ema_decay is 0.75"):
        tx.update(GRADS, plain.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="has an ema"):
        plain.update(GRADS, tx.init(PARAMS), PARAMS)
