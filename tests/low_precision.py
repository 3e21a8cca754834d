"""Low-precision states and steps that several test files share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_like

import jax_fused_adamw as jfa

# Every option that keeps something at low precision, in one.
EVERYTHING = {
    "mu_dtype": jnp.bfloat16,
    "nu_dtype": jnp.bfloat16,
    "master_weights": True,
    "compute_dtype": jnp.bfloat16,
    "ema_decay": 0.9,
}

PARAMS = random_like(
    {
        "a": jnp.zeros((5, 7)),
        "b": jnp.zeros((33,), jnp.bfloat16),
        "c": jnp.zeros((), jnp.float16),
        "d": jnp.zeros((4, 1, 9)),
        "e": jnp.zeros((2, 0), jnp.bfloat16),
    },
    seed=1,
)
GRADS = random_like(PARAMS, seed=2, scale=0.1)

needs_kernel = pytest.mark.skipif(
    not jfa.kernel_info().cpu.loaded, reason="no native module here"
)
each_implementation = pytest.mark.parametrize(
    "implementation", [pytest.param("ffi", marks=needs_kernel), "xla"]
)


def steps(tx, params, grads, count=3, state=None, **extra):
    """Parameters and state after jitted steps."""
    step = jax.jit(functools.partial(jfa.step, tx, **extra))
    state = tx.init(params) if state is None else state
    for _ in range(count):
        params, state = step(grads, state, params)
    return params, state


def as_float64(x):
    return np.asarray(x).astype(np.float64)
