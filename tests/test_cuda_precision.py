"""The CUDA kernel gives the CPU kernel's bits with every state that a step may keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_cuda import (
    CPU,
    EXTRAS,
    GPU,
    assert_same_values,
    make_leaves,
    make_mixed_leaves,
)

import jax_fused_adamw as jfa

pytestmark = pytest.mark.skipif(GPU is None, reason="needs a CUDA device")

BF16_MOMENTS = dict(mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16)
STATES = {
    "bfloat16 moments": BF16_MOMENTS,
    "to nearest": BF16_MOMENTS | dict(stochastic_rounding=False),
    "bfloat16 mu": dict(mu_dtype=jnp.bfloat16),
    "float16 mu, bfloat16 nu": dict(mu_dtype=jnp.float16, nu_dtype=jnp.bfloat16),
    "stochastic parameters": dict(stochastic_rounding="params"),
    "masters": dict(master_weights=True),
    "copies": dict(compute_dtype=jnp.bfloat16),
    "average": dict(ema_decay=0.9),
    "all": BF16_MOMENTS
    | dict(master_weights=True, compute_dtype=jnp.float16, ema_decay=0.99),
}


def steps(device, tx, params, grads):
    """Three steps, of which one is skipped, and what an update gives then."""

    def one(params, state, extra):
        update = tx.update(grads_on_device, state, params, **extra)
        return jfa.step(tx, grads_on_device, state, params, **extra), update

    params, grads_on_device = jax.device_put((params, grads), device)
    jitted = jax.jit(one)
    with jax.default_device(device):
        state = jax.jit(tx.init)(params)
        results = []
        for extra in EXTRAS:
            (params, state), update = jitted(params, state, extra)
            results.append((params, state, update))
        return jax.device_get(results)


def assert_gpu_equals_cpu(tx, params, grads):
    on_gpu = steps(GPU, tx, params, grads)
    assert_same_values(on_gpu, steps(CPU, tx, params, grads))


@pytest.mark.parametrize("alias", [True, False])
@pytest.mark.parametrize("amsgrad, nesterov", [(False, False), (True, True)])
@pytest.mark.parametrize("state", STATES)
def test_states_and_dtypes(state, amsgrad, nesterov, alias):
    params, grads = make_mixed_leaves()
    tx = jfa.fused_adamw(
        1e-2,
        amsgrad=amsgrad,
        nesterov=nesterov,
        alias=alias,
        weight_decay=0.1,
        seed=2**40 + 3,
        mask=[i % 2 == 0 for i in range(len(params))],
        **STATES[state],
    )
    assert_gpu_equals_cpu(tx, params, grads)


@pytest.mark.parametrize("amsgrad", [False, True, "optax"])
@pytest.mark.parametrize("sizes", [(100, 513), (5000, 200_001, 3_000_000)])
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("state", ["bfloat16 moments", "copies", "average"])
def test_classes_with_kernels_of_their_own(state, grad_dtype, sizes, amsgrad):
    params, grads = make_leaves(sizes, "float32", grad_dtype)
    tx = jfa.fused_adamw(1e-2, amsgrad=amsgrad, **STATES[state])
    assert_gpu_equals_cpu(tx, params, grads)


@pytest.mark.parametrize("state", STATES)
def test_first_step_without_a_state(state):
    params, grads = make_mixed_leaves()
    tx = jfa.fused_adamw(1e-2, **STATES[state])

    def first(device):
        placed = jax.device_put((params, grads), device)
        step = jax.jit(lambda p, g: jfa.adamw_step(p, g, options=tx))
        return jax.device_get(step(*placed))

    assert_same_values(first(GPU), first(CPU))


def test_clipped_and_many_leaves():
    params, grads = make_leaves((37,) * 300, "bfloat16", "bfloat16")
    grads[-1] = jnp.ones(37, jnp.bfloat16)
    tx = jfa.fused_adamw(
        1e-2, max_grad_norm=1.0, **STATES["all"], alias=False, amsgrad=True
    )
    assert_gpu_equals_cpu(tx, params, grads)


def test_members_with_noise():
    rates = jnp.array([0.1, 0.2, 0.3])
    leaf = np.random.default_rng(0).normal(size=(3, 513)).astype(np.float32)

    def step(rate, p):
        tx = jfa.fused_adamw(rate, **BF16_MOMENTS)
        return jfa.step(tx, p, tx.init(p), p)

    def run(device):
        placed = jax.device_put((rates, leaf), device)
        return jax.device_get(jax.jit(jax.vmap(step))(*placed))

    assert_same_values(run(GPU), run(CPU))


@pytest.mark.parametrize("grad_dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("amsgrad, nesterov", [(False, False), (True, True)])
@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=1.0), dict(ema_decay=0.9)])
def test_float64(options, amsgrad, nesterov, grad_dtype):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = [jnp.asarray(rng.normal(size=n)) for n in (0, 1, 5, 513, 200_001)]
        grads = [jnp.asarray(rng.normal(size=p.shape), grad_dtype) for p in params]
        tx = jfa.fused_adamw(1e-2, amsgrad=amsgrad, nesterov=nesterov, **options)
        assert_gpu_equals_cpu(tx, params, grads)
