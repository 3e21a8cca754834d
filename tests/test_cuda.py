"""The CUDA kernel gives the CPU kernel's bits, over options, dtypes and shapes."""

import itertools
import os
import subprocess
import sys

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
SIZES = (0, 1, 3, 4, 5, 127, 511, 512, 513, 1029, 0, 20_001)
DTYPES = ("float32", "bfloat16", "float16")
SPECIAL = np.array([0.0, -0.0, np.inf, np.nan, 1e-40], np.float32)
# What one compiled step may be told: nothing, to skip, a scale.
EXTRAS = [
    dict(skip_update=jnp.array(skip), gradient_scale=jnp.float32(scale))
    for skip, scale in ((False, 1.0), (True, 1.0), (False, 3.0))
]


def make_leaves(sizes, param_dtype="float32", grad_dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    params, grads = (
        [jnp.asarray(rng.normal(size=n), dtype) for n in sizes]
        for dtype in (param_dtype, grad_dtype)
    )
    if sizes[-1] >= len(SPECIAL):
        grads[-1] = grads[-1].at[: len(SPECIAL)].set(SPECIAL.astype(grad_dtype))
    return params, grads


def make_mixed_leaves():
    """Every size in every pair of dtypes, in one tree."""
    params, grads = [], []
    for seed, pair in enumerate(itertools.product(DTYPES, DTYPES)):
        more_params, more_grads = make_leaves(SIZES, *pair, seed=seed)
        params += more_params
        grads += more_grads
    return params, grads


def run(device, tx, params, grads, counts, extras):
    """The step and the update for each count and each dict of extra arguments."""

    def both(params, state, grads, extra):
        stepped = jfa.step(tx, grads, state, params, **extra)
        return stepped, tx.update(grads, state, params, **extra)

    params, grads = jax.device_put((params, grads), device)
    jitted = jax.jit(both)
    with jax.default_device(device):
        state = tx.init(params)._replace(
            mu=jax.tree.map(lambda p: p.astype(jnp.float32) * 0.1, params),
            nu=jax.tree.map(lambda p: jnp.square(p.astype(jnp.float32)), params),
        )
        return jax.device_get(
            [
                jitted(params, state._replace(count=jnp.int32(count)), grads, extra)
                for count in counts
                for extra in extras
            ]
        )


def assert_gpu_equals_cpu(tx, params, grads, counts=(7,), extras=({},)):
    on_gpu = run(GPU, tx, params, grads, counts, extras)
    on_cpu = run(CPU, tx, params, grads, counts, extras)
    assert_same_values(on_gpu, on_cpu)


def canonical(x):
    """One NaN for all: its sign and payload are the processor's."""
    x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return np.where(np.isnan(x), np.array(np.nan, x.dtype), x)


def assert_same_values(actual, expected):
    """Same bits; of a NaN only that it is one."""
    assert_same_bits(jax.tree.map(canonical, actual), jax.tree.map(canonical, expected))


@pytest.mark.parametrize("alias", [True, False])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True, "optax"])
def test_options_and_dtypes(amsgrad, nesterov, alias):
    params, grads = make_mixed_leaves()
    tx = jfa.fused_adamw(
        1e-2,
        amsgrad=amsgrad,
        nesterov=nesterov,
        alias=alias,
        weight_decay=0.1,
        eps_root=1e-9,
        maximize=nesterov,
        mask=[i % 2 == 0 for i in range(len(params))],
    )
    assert_gpu_equals_cpu(tx, params, grads, extras=EXTRAS)


def test_bias_corrections():
    params, grads = make_leaves((100,))
    tx = jfa.fused_adamw(1e-2, b1=0.97, b2=0.99999)
    assert_gpu_equals_cpu(
        tx, params, grads, counts=(0, 1, 2, 999, 12_345, 2**24, 2**31 - 1)
    )


def test_gradient_scales():
    params, grads = make_leaves((1000,), grad_dtype="bfloat16")
    scales = (1.0, 2.0**15, 3.0, 1e-40, 0.0, -1.0, np.inf, np.nan)
    extras = [dict(gradient_scale=jnp.float32(scale)) for scale in scales]
    tx = jfa.fused_adamw(1e-2)
    assert_gpu_equals_cpu(tx, params, grads, extras=extras)
    assert_gpu_equals_cpu(tx, params, grads, extras=[dict(gradient_scale=3.3)])


@pytest.mark.parametrize(
    "options",
    [{}, dict(max_grad_norm=1.0), dict(amsgrad=True, alias=False, nesterov=True)],
    ids=str,
)
@pytest.mark.parametrize("num_leaves", [3, 61, 62, 257])
def test_lr_scale(num_leaves, options):
    """Around what the small leaf table holds with a word more in each row."""
    params, grads = make_leaves((37,) * num_leaves)
    grads[-1] = grads[0]  # finite: no skipped step
    scales = [i % 4 / 3 for i in range(num_leaves)]
    for lr in (1e-2, jnp.float32(0.3)):
        tx = jfa.fused_adamw(lr, lr_scale=scales, weight_decay=0.1, **options)
        assert_gpu_equals_cpu(tx, params, grads, extras=[dict(gradient_scale=3.0)])


@pytest.mark.parametrize("num_leaves", [1, 36, 37, 64, 65, 257, 1000])
def test_many_leaves(num_leaves):
    params, grads = make_leaves((37,) * num_leaves)
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
    # XLA makes a copied constant of every empty result, whoever computes it.
    sizes = [n for n in SIZES if n > 0]
    params, grads = jax.device_put(make_leaves(sizes, grad_dtype="bfloat16"), GPU)
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


A_HUNDRED_RUNS = """
import hashlib
import jax
import numpy as np
from test_cuda import SIZES, canonical, make_leaves
import jax_fused_adamw as jfa

tx = jfa.fused_adamw(1e-2)
step = jax.jit(tx.step)
device = jax.devices({platform!r})[0]
with jax.default_device(device):
    params, grads = jax.device_put(make_leaves(SIZES[:-1] + (2_000_001,)), device)
    digests = set()
    for run in range(100):
        after, state = params, tx.init(params)
        for _ in range(3):
            after, state = step(grads, state, after)
        leaves = jax.device_get(jax.tree.leaves((after, state)))
        leaves = [canonical(x) for x in leaves]
        digests.add(hashlib.sha256(b"".join(x.tobytes() for x in leaves)).hexdigest())
print(*digests)
"""


def test_same_digest_a_hundred_times_in_three_processes():
    def digests(platform):
        return subprocess.run(
            [sys.executable, "-c", A_HUNDRED_RUNS.format(platform=platform)],
            env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()

    [expected] = digests("cpu")
    for _ in range(3):
        assert digests("cuda") == [expected]


def test_counters_of_small_and_large_grids():
    """A small grid counts the step itself; behind a large one a kernel does."""
    tx = jfa.fused_adamw(1e-2)

    def steps(params, state):
        for _ in range(50):
            params, state = tx.step(params, state, params)
        return params, state

    for size in (3, 512 * 1024, 512 * 1024 + 1):
        params = jax.device_put(jnp.ones(size), GPU)
        with jax.default_device(GPU):
            state = tx.init(params)
            jitted = jax.jit(steps, donate_argnums=(0, 1))
            for _ in range(4):
                params, state = jitted(params, state)
            params, state = tx.step(params, state, params, skip_update=True)
        counters = (state.count, state.skipped, state.consecutive)
        assert counters == (200, 1, 1)


def test_numbers_of_the_device_never_reach_the_host():
    params, grads = jax.device_put(make_leaves(SIZES), GPU)
    tx = jfa.fused_adamw(lambda count: 1e-2 / (1 + count))
    with jax.default_device(GPU):
        state, skip = tx.init(params), jnp.array(False)
        jitted = jax.jit(tx.step)
        jitted(grads, state, params, skip_update=skip)
        with jax.transfer_guard("disallow"):
            jax.block_until_ready(jitted(grads, state, params, skip_update=skip))


def test_two_programs_alternate_with_allocations_between():
    """Replayed graphs must follow the buffers when they move."""
    makers = (jfa.fused_adamw(1e-2), jfa.fused_adamw(1e-2, amsgrad=True))
    params, grads = jax.device_put(make_leaves(SIZES), GPU)

    def train(alternate):
        with jax.default_device(GPU):
            runs = [[jax.jit(tx.step), params, tx.init(params)] for tx in makers]
            order = [0, 1] * 200 if alternate else [0] * 200 + [1] * 200
            kept = []
            for i in order:
                step, p, state = runs[i]
                runs[i][1:] = step(grads, state, p)
                if alternate:
                    kept = kept[-3:] + [jnp.ones(1000 + len(kept))]
            return jax.device_get([run[1:] for run in runs])

    assert_same_values(train(alternate=True), train(alternate=False))
