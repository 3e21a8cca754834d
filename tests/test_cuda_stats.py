"""Statistics, clip and skip on CUDA: the CPU's bits, in few launches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, copies, count_ops
from test_cuda import (
    CPU,
    DTYPES,
    GPU,
    SIZES,
    assert_same_values,
    make_leaves,
    make_mixed_leaves,
)

import jax_fused_adamw as jfa
from jax_fused_adamw.bench import _measure

pytestmark = pytest.mark.skipif(GPU is None, reason="needs a CUDA device")


def on_both(function, *operands):
    """The results on the GPU and on the CPU."""
    results = []
    for device in (GPU, CPU):
        placed = jax.device_put(operands, device)
        with jax.default_device(device):
            results.append(jax.device_get(jax.jit(function)(*placed)))
    return results


def finite_leaves(sizes, dtype, seed=0):
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.integers(-3, 3, len(sizes))
    return [
        jnp.asarray(rng.normal(size=n) * s, dtype)
        for n, s in zip(sizes, scales, strict=True)
    ]


STATS_SIZES = (*SIZES, 4095, 4096, 4097, 2 * 4096 + 3, 131_073)


@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 3.0, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_report_has_the_cpu_s_bits(dtype, scale):
    stats = lambda leaves: jfa.grad_stats(leaves, scale, per_leaf=True)  # noqa: E731
    gpu, cpu = on_both(stats, finite_leaves(STATS_SIZES, dtype))
    assert_same_bits(gpu, cpu)


def test_mixed_dtypes_and_nonfinite_values():
    _, grads = make_mixed_leaves()
    gpu, cpu = on_both(lambda x: jfa.grad_stats(x, per_leaf=True), grads)
    assert_same_values(gpu, cpu)
    assert gpu[0].nonfinite > 0


@pytest.mark.parametrize("num_leaves", [100, 1500])
def test_many_leaves(num_leaves):
    """More than the small table and than the large one hold."""
    leaves = finite_leaves([7] * num_leaves, "float32")
    stats = lambda leaves: jfa.grad_stats(leaves, per_leaf=True)  # noqa: E731
    assert_same_bits(*on_both(stats, leaves))


def test_more_rows_than_one_merge_takes():
    leaf = [jnp.asarray(np.random.default_rng(0).normal(size=9_000_001), jnp.float32)]
    assert_same_bits(*on_both(jfa.grad_stats, leaf))


def test_members_of_a_vmap():
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.normal(size=(3, n)), jnp.float32) for n in (5, 4097, 8)]
    scales = jnp.array([1.0, 2.0, 3.0])
    gpu, cpu = on_both(jax.vmap(jfa.grad_stats), leaves, scales)
    assert_same_bits(gpu, cpu)
    one = jfa.grad_stats([leaf[1] for leaf in leaves], scales[1])
    assert_same_bits(jax.tree.map(lambda x: x[1], gpu), jax.device_get(one))


@pytest.mark.parametrize("amsgrad", [False, True, "optax"])
@pytest.mark.parametrize(
    "options",
    [
        dict(max_grad_norm=0.5),
        dict(max_grad_norm=1e9),
        dict(max_grad_norm=0.0),
        dict(max_grad_value=0.25),
        dict(skip_nonfinite=True),
        dict(max_grad_norm=0.5, skip_nonfinite=False),
    ],
    ids=str,
)
def test_clipped_step_has_the_cpu_s_bits(options, amsgrad):
    tx = jfa.fused_adamw(1e-2, weight_decay=0.1, amsgrad=amsgrad, **options)
    for dtype in DTYPES:
        params = finite_leaves(SIZES, "float32", seed=1)
        grads = finite_leaves(SIZES, dtype, seed=2)

        def three_steps(params, grads):
            state = tx.init(params)
            for _ in range(3):
                params, state = tx.step(grads, state, params, gradient_scale=8.0)
            return params, state

        assert_same_values(*on_both(three_steps, params, grads))


def test_nonfinite_step_is_skipped_bit_for_bit():
    params, grads = make_leaves(SIZES)  # with an infinity and a NaN
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0)
    (gpu_params, gpu_state), cpu = on_both(
        lambda p, g: tx.step(g, tx.init(p), p), params, grads
    )
    assert_same_bits(gpu_params, jax.device_get(params))
    assert (gpu_state.count, gpu_state.skipped, gpu_state.consecutive) == (0, 1, 1)
    assert_same_values((gpu_params, gpu_state), cpu)


@pytest.mark.parametrize(
    "dtype, launches", [("float32", 1), ("bfloat16", 1), ("float16", 2)]
)
def test_one_call_one_launch_and_no_copy(dtype, launches):
    """float16 gradients have no kernel that does both."""
    params = jax.device_put(finite_leaves(SIZES[1:9], "float32"), GPU)
    grads = jax.device_put(finite_leaves(SIZES[1:9], dtype), GPU)
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0)
    with jax.default_device(GPU):
        state = tx.init(params)
        step = jax.jit(lambda p, s, g: tx.step(g, s, p), donate_argnums=(0, 1))
        compiled = step.lower(params, state, grads).compile()
        # The first call copies the program's constants to the device.
        new = jax.block_until_ready(compiled(params, state, grads))

        def run():
            after = new
            for _ in range(20):
                after = compiled(*after, grads)
            jax.block_until_ready(after)

        assert _measure.profile_device(run, 20).launches == launches
    assert count_ops(compiled, "custom-call") == 1
    assert copies(compiled) == 0
    assert count_ops(compiled, "fusion") == 0


def test_numbers_of_the_device_never_reach_the_host():
    params = jax.device_put(finite_leaves(SIZES, "float32"), GPU)
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0)
    with jax.default_device(GPU):
        state, scale = tx.init(params), jnp.float32(2.0)
        step = jax.jit(tx.step)
        step(params, state, params, gradient_scale=scale)
        with jax.transfer_guard("disallow"):
            jax.block_until_ready(step(params, state, params, gradient_scale=scale))


def test_same_bits_a_hundred_times():
    leaves = jax.device_put(finite_leaves((5_000_001, 77, 4096), "bfloat16"), GPU)
    stats = jax.jit(jfa.grad_stats)
    reports = {
        tuple(x.tobytes() for x in jax.device_get(stats(leaves))) for _ in range(100)
    }
    assert len(reports) == 1
