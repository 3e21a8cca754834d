"""What the native handler takes and refuses of low-precision state, called directly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_call import SIZE, call


def test_moments_copies_and_averages():
    param, mu, nu, copy, ema = call(copy_dtype="float16", ema_dtype="float32")
    assert mu.dtype == nu.dtype == jnp.bfloat16
    assert (mu == 2.0).all() and (nu == 5.0).all()
    # The corrected moments are 4 and 10; neither epsilon nor decay.
    expected = np.arange(SIZE) - 0.5 * 4 / np.sqrt(10)
    np.testing.assert_allclose(param, expected, rtol=1e-6)
    np.testing.assert_array_equal(copy, param.astype(jnp.float16))
    np.testing.assert_allclose(ema, 0.75 * 2 + 0.25 * expected, rtol=1e-6)


def test_skipped_step_keeps_copies_and_averages():
    *_, copy, ema = call(copy_dtype="bfloat16", ema_dtype="float32", skip=True)
    assert (copy == 2.0).all() and (ema == 2.0).all()


def test_average_without_parameters_written():
    for param_dtype in "float32", "bfloat16":
        update, *_, ema = call(param_dtype, ema_dtype="float32", write_params=False)
        param = jnp.arange(SIZE, dtype=param_dtype) + update
        np.testing.assert_array_equal(ema, 0.75 * 2 + 0.25 * param.astype(jnp.float32))


def test_noise_is_read_from_the_device():
    def params(seed, first_index=0):  # all the same, but for the noise
        noise = [(seed, 0), (first_index, 0)]
        return call(
            "bfloat16",
            first_param=2,
            param_step=0,
            noise=noise,
            stochastic_params=True,
        )[0]

    by_seed = [params(seed) for seed in range(8)]
    np.testing.assert_array_equal(by_seed[1], params(1))
    assert len({np.asarray(x).tobytes() for x in by_seed}) > 1
    for seed, x in enumerate(by_seed):
        np.testing.assert_array_equal(x[3:], params(seed, first_index=3)[:2])


NOISE = [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(nu_dtype="float16"), "nu: expected float32 or bfloat16"),
        (dict(nu_out_dtype="float32"), "nu of leaf 0: unexpected dtype"),
        (dict(mu_dtype="int32"), "new mu of leaf 0: expected"),
        (dict(copy_dtype="float32"), "copy of leaf 0: expected bfloat16 or float16"),
        (dict(copy_dtype="float16", param_dtype="bfloat16"), "of a float32 parameter"),
        (dict(copy_dtype="float16", write_params=False), "write_params"),
        (dict(ema_dtype="bfloat16"), "ema of leaf 0: unexpected dtype"),
        (dict(stochastic_moments=True), "expected 8 operands"),
        (dict(stochastic_params=True), "expected 8 operands"),
        (dict(noise=NOISE), "expected 7 operands"),
        (dict(noise=NOISE[:1], stochastic_moments=True), "noise: expected"),
        (dict(leaf_ids=()), "one entry for each leaf"),
        (dict(leaf_ids=(-1,)), "leaf_ids must be"),
        (dict(leaf_ids=(1 << 31,)), "leaf_ids must be"),
        (dict(shard_strides=(0,) * 5), "three pairs"),
        (dict(shard_strides=(-1,) + (0,) * 5), "must not be negative"),
    ],
    ids=str,
)
def test_handler_refuses(arguments, text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(call(**arguments))
