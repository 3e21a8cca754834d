"""What the native handlers take and refuse of float64 leaves, called directly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_call import SIZE, call

from jax_fused_adamw import _ffi

FLOAT64 = dict(param_dtype="float64", mu_dtype="float64", nu_dtype="float64")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("grad_dtype", ["float64", "float32", "bfloat16", "float16"])
def test_everything_but_the_gradient_is_float64(grad_dtype):
    arguments = dict(FLOAT64, grad_dtype=grad_dtype, ema_dtype="float64")
    param, mu, nu, ema = call(**arguments)
    assert param.dtype == mu.dtype == nu.dtype == ema.dtype == jnp.float64
    assert (mu == 2.0).all() and (nu == 5.0).all()
    # The corrected moments are 4 and 10; neither epsilon nor decay.
    expected = np.arange(SIZE) - 0.5 * 4 / np.sqrt(10)
    np.testing.assert_allclose(param, expected, rtol=1e-15)
    np.testing.assert_allclose(ema, 0.75 * 2 + 0.25 * expected, rtol=1e-15)


def test_skipped_step():
    update, mu, _ = call(**FLOAT64, write_params=False, skip=True)
    assert (update == 0.0).all() and np.signbit(update).all()
    assert (mu == 1.0).all()


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(grad_dtype="float64"), "gradient of leaf 0: float64"),
        (dict(mu_dtype="float64"), "parameter of leaf 0: expected float64"),
        (dict(nu_dtype="float64"), "parameter of leaf 0: expected float64"),
        (FLOAT64 | dict(mu_dtype="float32"), "parameter of leaf 0: expected float64"),
        (FLOAT64 | dict(nu_dtype="bfloat16"), "parameter of leaf 0: expected float64"),
        (FLOAT64 | dict(param_dtype="float32"), "expected float64"),
        (FLOAT64 | dict(ema_dtype="float32"), "ema of leaf 0: unexpected dtype"),
        (FLOAT64 | dict(copy_dtype="bfloat16"), "of a float32 parameter"),
        (dict(copy_dtype="float64"), "copy of leaf 0: expected bfloat16 or float16"),
        (
            FLOAT64 | dict(stochastic_moments=True, noise=[(0, 0), (0, 0)]),
            "rounded stochastically",
        ),
        (dict(grad_dtype="int32"), "float16 or float64"),
    ],
    ids=str,
)
def test_handler_refuses(arguments, text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(call(**arguments))


def analyze(gradient):
    shapes = [(jnp.float32, 1)] * 3 + [(jnp.int32, 1), (jnp.uint32, 3)]
    shapes += [(jnp.uint32, 0), (jnp.uint32, 3)]
    return jax.ffi.ffi_call(
        _ffi.ANALYZE_TARGET, [jax.ShapeDtypeStruct((n,), dtype) for dtype, n in shapes]
    )(
        jnp.float32(1.0),
        gradient,
        chunk_elements=np.int64(4096),
        first_rows=np.zeros(1, np.int64),
        members=np.int64(1),
        num_rows=np.ones(1, np.int64),
    )


def test_statistics():
    norm, _, max_abs, nonfinite, *_ = analyze(jnp.array([3.0, -4.0, 1e-310]))
    assert norm == 5.0 and max_abs == 4.0 and nonfinite == 0
    norm, scaled_norm, max_abs, nonfinite, *_ = analyze(jnp.array([1e300, -1e300]))
    largest = np.finfo(np.float32).max
    assert norm == largest and max_abs == largest and nonfinite == 0
    assert jnp.isfinite(scaled_norm).all()
    *_, nonfinite = analyze(jnp.array([np.inf, 1e300, np.nan]))[:4]
    assert nonfinite == 2
