"""A NaN or infinity under jax.debug_nans and jax.debug_infs: JAX's own error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fused_adamw as jfa

GOOD, NAN = (np.array([x, 1, 1], np.float32) for x in (2, np.nan))
# Of 2^21 elements, which are beyond one call of statistics and update together.
SIZES = {"small": 1, "large": 700_000}
OPTIONS = [{}, {"skip_nonfinite": True}, {"max_grad_norm": 1.0}]


def make_step(jitted, **options):
    tx = jfa.fused_adamw(0.1, **options)

    def step(grads, state, params, **control):
        return jfa.step(tx, grads, state, params, **control)

    return tx, jax.jit(step) if jitted else step


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_a_nan_is_an_error_and_the_next_step_is_right(jitted, options, size):
    tx, step = make_step(jitted, **options)
    params = {"w": jnp.ones(3 * SIZES[size])}
    state = tx.init(params)
    good, bad = ({"w": np.tile(x, SIZES[size])} for x in (GOOD, NAN))
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="nan"):
            step(bad, state, params)
        new_params, new_state = step(good, state, params)
    assert new_state.count == 1 and bool((new_params["w"] < 1).all())


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_an_infinity_is_an_error(jitted):
    tx, step = make_step(jitted, max_grad_norm=1.0)
    params = {"w": jnp.ones(3)}
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        step({"w": GOOD * np.float32(np.inf)}, tx.init(params), params)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_statistics(jitted):
    stats = jax.jit(jfa.grad_stats) if jitted else jfa.grad_stats
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="nan"):
            stats({"w": NAN})
        assert stats({"w": GOOD}).nonfinite == 0
