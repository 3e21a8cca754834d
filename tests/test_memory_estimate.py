"""memory_estimate is what XLA says of the compiled step."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._rows import peak_bytes_of

SHAPES = {"w": (1000, 300), "b": (4000,), "v": (64, 513)}
OPTIONS = [
    {},
    {"amsgrad": True},
    {"amsgrad": "optax", "max_grad_norm": 1.0},
    {"skip_nonfinite": True},
    {"mu_dtype": jnp.bfloat16, "nu_dtype": jnp.bfloat16, "amsgrad": True},
    {"master_weights": True, "mu_dtype": jnp.float16},
    {"compute_dtype": jnp.bfloat16, "ema_decay": 0.999},
    {"stochastic_rounding": "params"},
]
# The scalars of a step, the rows of a clip, and XLA's rounding of each buffer.
SLACK = 16_384


def make_params(dtype=jnp.float32, sharding=None):
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=dtype, sharding=sharding)
    return {name: struct(shape) for name, shape in SHAPES.items()}


def compiled_peak(params, grads, options, donate):
    tx = jfa.fused_adamw(0.1, **options)
    state = jax.eval_shape(tx.init, params)
    if params["w"].sharding is not None:
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            state,
            jfa.state_shardings(tx, params),
        )
    step = jax.jit(
        lambda p, s, g: tx.step(g, s, p), donate_argnums=(0, 1) if donate else ()
    )
    return peak_bytes_of(step.lower(params, state, grads).compile())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_peaks_of_the_compiled_step(options, dtype):
    params, grads = make_params(dtype), make_params()
    estimate = jfa.memory_estimate(params, grad_dtype=jnp.float32, **options)
    for donate, expected in (
        (True, estimate.donated_step),
        (False, estimate.kept_step),
    ):
        assert abs(compiled_peak(params, grads, options, donate) - expected) < SLACK


def test_gradients_are_of_what_the_loss_is_given():
    params = make_params() | {"low": jax.ShapeDtypeStruct((100,), jnp.float16)}
    plain = jfa.memory_estimate(params)
    low = jfa.memory_estimate(params, compute_dtype=jnp.bfloat16)
    assert low.grads - 200 == (plain.grads - 200) // 2 == low.state - plain.state


def test_sharded_leaves_count_what_a_device_holds():
    mesh = make_mesh("x")
    params = make_params(sharding=jax.NamedSharding(mesh, P("x")))
    estimate = jfa.memory_estimate(params, max_grad_norm=1.0)
    whole = jfa.memory_estimate(make_params(), max_grad_norm=1.0)
    assert estimate.params * mesh.size == whole.params
    options = {"max_grad_norm": 1.0}
    peak = compiled_peak(params, params, options, donate=True)
    assert abs(peak - estimate.donated_step) < SLACK


def test_gpt2_is_496_mb_and_three_times_that():
    """SPEC D2: parameters N x 4, gradients and moments N x 12."""
    params = {"all": jax.ShapeDtypeStruct((124_000_000,), jnp.float32)}
    estimate = jfa.memory_estimate(params)
    assert estimate.params == 496_000_000
    assert estimate.grads + estimate.state == pytest.approx(1_488_000_000, abs=100)
    assert (estimate.grads + estimate.state) / estimate.donated_step == pytest.approx(
        0.75
    )


BF16 = jnp.bfloat16
LOW = {"mu_dtype": BF16, "nu_dtype": BF16}
ROWS = {  # name: parameters of a device, options
    "124 M": (124e6, {}),
    "1.1 G": (1.1e9, {}),
    "7 G": (7e9, {}),
    "7 G, `amsgrad`": (7e9, {"amsgrad": True}),
    "7 G, `mu_dtype` and `nu_dtype` bfloat16": (7e9, LOW),
    "7 G, and `compute_dtype=jnp.bfloat16`": (7e9, LOW | {"compute_dtype": BF16}),
    "7 G over 8 devices": (7e9 / 8, {}),
}


def test_table_of_the_readme():
    readme = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    for name, (size, options) in ROWS.items():
        params = {"all": jax.ShapeDtypeStruct((int(size),), jnp.float32)}
        cells = [
            float(f"{x / 1e9:.3g}") for x in jfa.memory_estimate(params, **options)
        ]
        cells = [round(x, 1) for x in cells]
        assert f"| {name} | {' | '.join(f'{x:g}' for x in cells)} |" in readme


def test_arrays_of_the_host_and_none():
    params = {"w": np.ones((10, 10), np.float32), "frozen": None}
    assert jfa.memory_estimate(params).params == 400
    assert jfa.memory_estimate({}).params == 0


def test_errors():
    with pytest.raises(TypeError, match=r"memory_estimate: params\['n'\]"):
        jfa.memory_estimate({"n": np.ones(3, np.int32)})
    with pytest.raises(TypeError, match="amsgrade"):
        jfa.memory_estimate(make_params(), amsgrade=True)
