"""The CUDA kernel gives the CPU kernel's bits, over options, dtypes and shapes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, copies, count_ops

import jax_fused_adamw as jfa

try:
    GPU = jax.devices("cuda")[0]
except RuntimeError:
    GPU = None
CPU = jax.devices("cpu")[0]

pytestmark = pytest.mark.skipif(GPU is None, reason="needs a CUDA device")

# Sizes around the 4 elements of a thread and the 512 of a block, and empty ones.
SIZES = (0, 1, 3, 4, 5, 127, 511, 512, 513, 1029, 0, 70_001)
DTYPES = ("float32", "bfloat16", "float16")


def make_tree(param_dtype, grad_dtype, sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)

    def leaves(dtype, scale=1.0):
        return [jnp.asarray(rng.normal(size=n) * scale, dtype) for n in sizes]

    params, grads = leaves(param_dtype), leaves(grad_dtype)
    if sizes:
        special = jnp.array([0.0, -0.0, jnp.inf, jnp.nan, 1e-40], jnp.float32)
        grads[-1] = grads[-1].at[:5].set(special.astype(grad_dtype))
    return params, grads


def run(device, tx, params, grads, count=7, **extra):
    params, grads = jax.device_put((params, grads), device)
    with jax.default_device(device):
        state = tx.init(params)
        state = state._replace(
            count=jnp.int32(count),
            mu=jax.tree.map(lambda p: p.astype(jnp.float32) * 0.1, params),
            nu=jax.tree.map(lambda p: jnp.square(p.astype(jnp.float32)), params),
        )
        stepped = jax.jit(tx.step)(grads, state, params, **extra)
        updated = jax.jit(tx.update)(grads, state, params, **extra)
        return jax.device_get((stepped, updated))


def assert_gpu_equals_cpu(tx, params, grads, **extra):
    on_gpu = run(GPU, tx, params, grads, **extra)
    on_cpu = run(CPU, tx, params, grads, **extra)
    assert_same_values(on_gpu, on_cpu)


def assert_same_values(actual, expected):
    """Same bits; of a NaN only that it is one (its payload is the processor's)."""

    def canonical(x):
        x = np.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return np.where(np.isnan(x), np.array(np.nan, x.dtype), x)

    assert_same_bits(jax.tree.map(canonical, actual), jax.tree.map(canonical, expected))


@pytest.mark.parametrize("alias", [True, False])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True, "optax"])
def test_options(amsgrad, nesterov, alias):
    tx = jfa.fused_adamw(
        1e-2,
        amsgrad=amsgrad,
        nesterov=nesterov,
        alias=alias,
        weight_decay=0.1,
        eps_root=1e-9,
        maximize=nesterov,
        mask=[i % 2 == 0 for i in range(len(SIZES))],
    )
    for param_dtype, grad_dtype in itertools.product(DTYPES, DTYPES):
        params, grads = make_tree(param_dtype, grad_dtype)
        for extra in (dict(), dict(skip_update=True), dict(gradient_scale=3.0)):
            assert_gpu_equals_cpu(tx, params, grads, **extra)


@pytest.mark.parametrize("count", [0, 1, 999, 2**24, 2**31 - 1])
def test_bias_corrections(count):
    params, grads = make_tree("float32", "float32", (100,))
    tx = jfa.fused_adamw(1e-2, b1=0.97, b2=0.99999)
    assert_gpu_equals_cpu(tx, params, grads, count=count)


@pytest.mark.parametrize("scale", [1.0, 2.0**15, 3.0, 0.0, -1.0, np.inf, np.nan])
def test_gradient_scales(scale):
    params, grads = make_tree("float32", "bfloat16", (1000,))
    tx = jfa.fused_adamw(1e-2)
    assert_gpu_equals_cpu(tx, params, grads, gradient_scale=scale)
    assert_gpu_equals_cpu(tx, params, grads, gradient_scale=jnp.float32(scale))


def test_mixed_dtypes_in_one_tree():
    pairs = list(itertools.product(DTYPES, DTYPES))
    params, grads = [], []
    for i, (param_dtype, grad_dtype) in enumerate(pairs):
        p, g = make_tree(param_dtype, grad_dtype, (600 + i,), seed=i)
        params += p
        grads += g
    assert_gpu_equals_cpu(jfa.fused_adamw(1e-2), params, grads)


@pytest.mark.parametrize("num_leaves", [1, 36, 37, 63, 64, 65, 256, 257, 1000])
def test_many_leaves(num_leaves):
    params, grads = make_tree("float32", "float32", (37,) * num_leaves)
    assert_gpu_equals_cpu(jfa.fused_adamw(1e-2, alias=False), params, grads)


def test_vmap_over_leaves_and_scalars():
    rates, skips = jnp.array([0.1, 0.2, 0.3]), jnp.array([False, True, False])
    leaf = np.random.default_rng(0).normal(size=(3, 513)).astype(np.float32)

    def member(param, rate, skip):
        tx = jfa.fused_adamw(rate, amsgrad=True)
        state = tx.init({"w": param})
        return jfa.step(tx, {"w": param}, state, {"w": param}, skip_update=skip)

    ends = []
    for device in (GPU, CPU):
        arguments = jax.device_put((leaf, rates, skips), device)
        with jax.default_device(device):
            ends.append(jax.device_get(jax.vmap(member)(*arguments)))
    assert_same_values(*ends)


def test_donated_step_copies_nothing():
    params, grads = jax.device_put(make_tree("float32", "bfloat16"), GPU)
    tx = jfa.fused_adamw(1e-2)

    def step(params, state, grads):
        return jfa.step(tx, grads, state, params)

    with jax.default_device(GPU):
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
            params, tx.init(params), grads
        )
    compiled = lowered.compile()
    assert copies(compiled) == 0
    assert count_ops(compiled, "custom-call") == 1


def test_same_bits_a_hundred_times_captured_or_not():
    params, grads = jax.device_put(make_tree("float32", "float32"), GPU)
    tx = jfa.fused_adamw(1e-2)
    with jax.default_device(GPU):
        state = tx.init(params)
        jitted = jax.jit(tx.step)
        first = jax.device_get(jitted(grads, state, params))
        for _ in range(100):
            assert_same_bits(jax.device_get(jitted(grads, state, params)), first)


def test_numbers_of_the_device_never_reach_the_host():
    params, grads = jax.device_put(make_tree("float32", "float32"), GPU)
    tx = jfa.fused_adamw(lambda count: 1e-2 / (1 + count))
    with jax.default_device(GPU):
        state, skip = tx.init(params), jnp.array(False)
        jitted = jax.jit(tx.step)
        jitted(grads, state, params, skip_update=skip)
        with jax.transfer_guard("disallow"):
            jax.block_until_ready(jitted(grads, state, params, skip_update=skip))
