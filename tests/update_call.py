"""A call of the native handler of the update, for one leaf."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fused_adamw import _ffi

SIZE = 5
EMA_DECAY = 0.75


def _hyper_bits():
    # By jfa::Hyper: the rates, the divisor of the gradients, the limit, the average.
    values = [0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 1.0, 1.0, EMA_DECAY]
    return np.array(values, "<f8").view("<u4").reshape(-1, 2)


def call(
    param_dtype="float32",
    grad_dtype=None,
    first_param=0,
    param_step=1,
    mu_dtype="bfloat16",
    nu_dtype="bfloat16",
    nu_out_dtype=None,
    copy_dtype=None,
    ema_dtype=None,
    noise=None,
    stochastic_moments=False,
    stochastic_params=False,
    write_params=True,
    leaf_ids=(0,),
    shard_strides=(0,) * 6,
    lr_scales=None,
    skip=False,
):
    param = jnp.arange(SIZE) * param_step + first_param
    param = param.astype(param_dtype)
    extras = [jnp.full(SIZE, 2.0, x) for x in (copy_dtype, ema_dtype) if x]
    moments = [jnp.ones(SIZE, mu_dtype), jnp.ones(SIZE, nu_dtype)]
    outputs = [param, moments[0], moments[1].astype(nu_out_dtype or nu_dtype), *extras]
    return jax.ffi.ffi_call(
        _ffi.UPDATE_TARGET, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    )(
        jnp.int32(0),
        jnp.array(skip),
        _hyper_bits(),
        *([] if noise is None else [jnp.array(noise, jnp.uint32)]),
        param,
        jnp.full(SIZE, 3.0, grad_dtype or param_dtype),
        *moments,
        *extras,
        analyze=np.bool_(False),
        amsgrad=np.int64(0),
        clip=np.int64(0),
        count_step=np.bool_(False),
        decays=np.ones(1, np.uint8),
        has_copies=np.bool_(copy_dtype is not None),
        has_ema=np.bool_(ema_dtype is not None),
        leaf_ids=np.array(leaf_ids, np.int64),
        maximize=np.bool_(False),
        members=np.int64(1),
        nesterov=np.bool_(False),
        num_after=np.int64(0),
        shard_strides=np.array(shard_strides, np.int64),
        skip_nonfinite=np.bool_(False),
        stochastic_moments=np.bool_(stochastic_moments),
        stochastic_params=np.bool_(stochastic_params),
        traced=np.zeros(9, np.uint8),
        write_params=np.bool_(write_params),
        zero_moments=np.bool_(False),
        **({} if lr_scales is None else {"lr_scales": np.asarray(lr_scales)}),
    )
