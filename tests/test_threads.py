"""Steps of several threads at once have the bits of the same steps in turn."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, random_like

import jax_fused_adamw as jfa

NUM_STEPS = 1000
# Small leaves, and one that the CPU kernels share out among the threads of the pool.
PARAMS = {
    "a": jnp.zeros((7, 3)),
    "b": jnp.zeros(5, jnp.bfloat16),
    "c": jnp.zeros(70_001),
}


def make_steps():
    """Two programs, compiled by the first threads that need them."""
    plain = jfa.fused_adamw(1e-2, weight_decay=0.1, amsgrad=True)
    clipped = jfa.fused_adamw(1e-2, b1=0.8, max_grad_norm=1.0)

    def jitted(tx):
        return jax.jit(
            lambda params, state, grads: tx.step(grads, state, params),
            donate_argnums=(0, 1),
        )

    return [(tx, jitted(tx)) for tx in (plain, clipped)]


def walk(tx, step, seed: int, barrier: threading.Barrier | None = None):
    params, grads = random_like(PARAMS, seed), random_like(PARAMS, seed + 100)
    state = tx.init(params)
    if barrier is not None:
        barrier.wait(timeout=60)
    for _ in range(NUM_STEPS):
        params, state = step(params, state, grads)
    return jax.device_get((params, state))


@pytest.mark.parametrize("num_threads", [2, 8])
def test_threads(num_threads):
    steps = make_steps()
    barrier = threading.Barrier(num_threads)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        futures = [
            pool.submit(walk, *steps[i % 2], i, barrier) for i in range(num_threads)
        ]
        together = [future.result(timeout=300) for future in futures]
    for i, end in enumerate(together):
        assert_same_bits(end, walk(*steps[i % 2], i))


def test_eager_steps_of_threads():
    """Through the caches of configurations and of calls."""
    ones = {"w": np.ones(9, np.float32)}

    def first_step(i: int):
        tx = jfa.fused_adamw(0.1, amsgrad=bool(i % 2), nesterov=bool(i % 3))
        return jax.device_get(tx.step(ones, tx.init(ones), ones))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(first_step, range(24)))
    assert_same_bits(together, [first_step(i) for i in range(24)])
