"""Speed on the machine at hand, interleaved in one run: long, so run with -m slow."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fused_adamw as jfa

WIDTH = 768
BLOCK = {
    "norm1": (2, WIDTH),
    "qkv": (WIDTH, 3 * WIDTH),
    "qkv_bias": (3 * WIDTH,),
    "out": (WIDTH, WIDTH),
    "out_bias": (WIDTH,),
    "norm2": (2, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "up_bias": (4 * WIDTH,),
    "down": (4 * WIDTH, WIDTH),
    "down_bias": (WIDTH,),
}
GPT2 = {"tokens": (50257, WIDTH), "positions": (1024, WIDTH), "norm": (2, WIDTH)} | {
    f"block{i}": BLOCK for i in range(12)
}


def tree_of(value: float):
    def is_shape(node):
        return isinstance(node, tuple)

    return jax.tree.map(lambda s: jnp.full(s, value), GPT2, is_leaf=is_shape)


def optax_step(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.slow
def test_gpt2_shaped_step_is_1_3_times_as_fast_as_optax_on_the_cpu():
    fused, plain = jfa.fused_adamw(1e-3), optax.adamw(1e-3)
    steps = {
        "fused": (fused, lambda p, s, g: jfa.step(fused, g, s, p)),
        "optax": (plain, optax_step(plain)),
    }
    grads = tree_of(1e-5)
    runs = {}
    for name, (tx, step) in steps.items():
        params = tree_of(0.01)
        jitted = jax.jit(step, donate_argnums=(0, 1))
        runs[name] = dict(step=jitted, params=params, state=tx.init(params), seconds=[])
    for i in range(22):
        for name in runs if i % 2 else reversed(runs):
            run = runs[name]
            start = time.perf_counter()
            run["params"], run["state"] = jax.block_until_ready(
                run["step"](run["params"], run["state"], grads)
            )
            run["seconds"].append(time.perf_counter() - start)
    median = {name: np.median(run["seconds"][2:]) for name, run in runs.items()}
    print({name: f"{1e3 * seconds:.1f} ms" for name, seconds in median.items()})
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-5),
        runs["fused"]["params"],
        runs["optax"]["params"],
    )
    assert median["optax"] >= 1.3 * median["fused"]
