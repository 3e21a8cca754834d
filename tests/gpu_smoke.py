"""One step on the GPU with the compiler that is named: `gpu_smoke.py nvcc|nvrtc`."""

import os
import sys
import time

os.environ["JAX_FUSED_ADAMW_CUDA_COMPILER"] = sys.argv[1]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jax_fused_adamw as jfa  # noqa: E402

print(jfa.kernel_info())
assert jfa.kernel_info().cuda.loaded
assert sys.argv[1] in jfa.kernel_info().cuda.details["compiler"]
params = {"w": jnp.linspace(-1.0, 1.0, 5001), "h": jnp.ones(77, jnp.bfloat16)}
tx = jfa.fused_adamw(0.1)
state = tx.init(params)
jax.block_until_ready(state)
for attempt in ("first", "second"):
    start = time.perf_counter()
    new, _ = jax.block_until_ready(tx.step(params, state, params))
    print(f"{attempt} step: {time.perf_counter() - start:.2f} s")
cpu = jax.devices("cpu")[0]
expected, _ = tx.step(*jax.device_put((params, state, params), cpu))
for name in params:
    a, b = (np.asarray(x[name]).tobytes() for x in (new, expected))
    assert a == b, f"{name}: the GPU's bits differ from the CPU's"
print("GPU bits equal CPU bits")
