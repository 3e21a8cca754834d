"""The update in plain JAX: the twin of ``cc/core/adamw.h``.

It serves the platforms that have no kernel of ours and ``implementation="xla"``,
and it is one link of the tests' chain of trust. It agrees with the kernels within
a few ulp, not bit for bit: XLA may fuse multiplications and additions, without x64
there is no float64 for the bias corrections, and XLA:CPU flushes subnormals, a
subnormal ``gradient_scale`` among them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fused_adamw._noise import (
    LeafNoise,
    Wide,
    element_index,
    round_stochastically,
)
from jax_fused_adamw._operands import (
    HYPERPARAMETERS,
    Buffers,
    Results,
    Scalars,
    UpdateConfig,
)

_INT32_MAX = 2**31 - 1

_Leaf = Any  # Buffers of one leaf: every kind is an array, or None


class _Hyper(NamedTuple):
    """A hyperparameter as an unevaluated sum of two numbers of the arithmetic."""

    value: jax.Array
    residual: jax.Array

    def complement(self) -> jax.Array:
        """1 - hyperparameter, rounded about once."""
        return (1.0 - self.value) - self.residual


class _Step(NamedTuple):
    """Everything a leaf needs, of shape ``[]`` or ``[members]``.

    Of the dtype of the arithmetic, or as told.
    """

    b1: jax.Array
    one_minus_b1: jax.Array
    b2: jax.Array
    one_minus_b2: jax.Array
    mu_correction: jax.Array
    grad_correction: jax.Array
    nu_correction: jax.Array
    eps: jax.Array
    eps_root: jax.Array
    weight_decay: jax.Array
    learning_rate: jax.Array
    learning_rate_residual: jax.Array  # what its rounding left
    gradient_divisor: jax.Array
    max_grad: jax.Array
    norm: jax.Array  # float32
    scaled_norm: jax.Array  # float32
    ema_decay: jax.Array
    one_minus_ema_decay: jax.Array
    skip: jax.Array
    number: jax.Array  # int32: that of the step, 1-based
    noise: Any  # uint32[..., 1 + leaves, 2] with noise, else None


def reference_update(
    config: UpdateConfig, scalars: Scalars, buffers: Buffers
) -> Results:
    """Same operands and results as the native update call."""
    step = _make_step(config, scalars)
    leaves = [
        _update_leaf(
            config, step, i, Buffers._make(x[i] if x else None for x in buffers)
        )
        for i in range(config.num_leaves)
    ]
    kinds = {
        kind: [getattr(leaf, kind) for leaf in leaves] for kind in config.result_kinds
    }
    counters = _count_step(scalars, step.skip) if config.count_step else []
    return Results(**kinds, counters=counters)


def _count_step(scalars: Scalars, skip: jax.Array) -> list[jax.Array]:
    """An applied step moves count; a skipped one moves the two skip counters."""
    skipped, consecutive = scalars.skip_counters
    return [
        jnp.where(skip, scalars.count, _next_count(scalars.count)),
        jnp.where(skip, _next_count(skipped), skipped),
        jnp.where(skip, _next_count(consecutive), 0),
    ]


def _next_count(count: jax.Array) -> jax.Array:
    return count + jnp.where(count < _INT32_MAX, 1, 0)


def _make_step(config: UpdateConfig, scalars: Scalars) -> _Step:
    hyper = _read_hyper(config, scalars)
    b1, b2 = hyper["b1"], hyper["b2"]
    number = _next_count(scalars.count)
    t = number.astype(config.real)
    divisor = gradient_divisor(hyper["gradient_scale"].value)
    skip = jnp.asarray(scalars.skip_update)
    for nonfinite in scalars.nonfinite:
        skip = skip | (nonfinite != 0)
    norm, scaled_norm = scalars.norms or (jnp.float32(0), jnp.float32(0))
    if config.nesterov:
        mu_correction = b1.value / _one_minus_power(b1, t + 1.0)
    else:
        mu_correction = 1.0 / _one_minus_power(b1, t)
    return _Step(
        b1=b1.value,
        one_minus_b1=b1.complement(),
        b2=b2.value,
        one_minus_b2=b2.complement(),
        mu_correction=mu_correction,
        grad_correction=b1.complement() / _one_minus_power(b1, t),
        nu_correction=1.0 / _one_minus_power(b2, t),
        eps=hyper["eps"].value,
        eps_root=hyper["eps_root"].value,
        weight_decay=hyper["weight_decay"].value,
        learning_rate=hyper["learning_rate"].value,
        learning_rate_residual=hyper["learning_rate"].residual,
        gradient_divisor=-divisor if config.maximize else divisor,
        max_grad=hyper["max_grad"].value,
        norm=norm,
        scaled_norm=scaled_norm,
        ema_decay=hyper["ema_decay"].value,
        one_minus_ema_decay=hyper["ema_decay"].complement(),
        skip=skip,
        number=number,
        noise=scalars.noise[0] if scalars.noise else None,
    )


def gradient_divisor(gradient_scale: np.float32 | jax.Array) -> jax.Array:
    """What gradients are divided by: NaN for a scale that float32 has no place for."""
    rounded = gradient_scale.astype(jnp.float32)
    valid = (rounded > 0) & jnp.isfinite(rounded)
    return jnp.where(valid, gradient_scale, jnp.nan)


def clip_by_norm(
    grad: jax.Array, norm: jax.Array, scaled_norm: jax.Array, max_norm: jax.Array
) -> jax.Array:
    """``grad`` if ``norm <= max_norm``, else ``(grad / norm) * max_norm``.

    The norms are float32, all else of the arithmetic's dtype. A norm that is not
    finite makes every gradient NaN; one that exceeds float32, which reports the
    largest float32, is known by ``scaled_norm``, its product with 2^-64.
    """
    norm, scaled_norm = norm.astype(grad.dtype), scaled_norm.astype(grad.dtype)
    is_within = (norm <= max_norm) & jnp.isfinite(norm)
    is_beyond = norm == jnp.finfo(jnp.float32).max
    # What is not chosen must have finite derivatives: theirs are multiplied by zero.
    divisor = jnp.where(jnp.isfinite(norm), norm, jnp.nan)
    divisor = jnp.where(is_within, 1.0, divisor)
    scaled_norm = jnp.where(is_beyond, scaled_norm, 1.0)
    max_norm = jnp.where(is_within, 1.0, max_norm)
    clipped = grad / divisor * max_norm
    beyond = (grad * 2.0**-64) / scaled_norm * max_norm
    clipped = jnp.where(is_beyond, beyond, clipped)
    return jnp.where(is_within, grad, clipped)


def _read_hyper(config: UpdateConfig, scalars: Scalars) -> dict[str, _Hyper]:
    known = decode_float64_bits(scalars.hyper_bits, config.real)
    hyper = {
        name: _Hyper(*(part[..., i] for part in known))
        for i, name in enumerate(HYPERPARAMETERS)
    }
    for name, value in zip(config.traced, scalars.traced, strict=True):
        value = value.astype(config.real)
        hyper[name] = _Hyper(value, jnp.zeros_like(value))
    return hyper


def _one_minus_power(b: _Hyper, t: jax.Array) -> jax.Array:
    """1 - b^t without the cancellation that 1 - pow(b, t) suffers for b near 1."""
    return -jnp.expm1(t * jnp.log1p(-b.complement()))


def decode_float64_bits(words: jax.Array, real: Any = np.float32) -> _Hyper:
    """Reads ``uint32[..., 2]``, low word first; for float32, without float64.

    The 53 bits of a mantissa are split into 24 + 24 + 5, each part exact in float32,
    and scaled by the exponent; what float32 cannot hold at all becomes 0 or inf.
    """
    if real == np.float64:
        value = lax.bitcast_convert_type(words, jnp.float64)
        return _Hyper(value, jnp.zeros_like(value))
    low, high = words[..., 0], words[..., 1]
    biased = ((high >> 20) & 0x7FF).astype(jnp.int32)
    top = ((high & 0xFFFFF) << 3) | (low >> 29) | 0x800000
    middle = (low >> 5) & 0xFFFFFF
    bottom = low & 0x1F
    exponent = jnp.clip(biased - 1023, -300, 300)
    sign = jnp.where(high >> 31 == 1, -1.0, 1.0).astype(jnp.float32)

    def scaled(part: jax.Array, place: int) -> jax.Array:
        # In two factors, since 2^(exponent - place) alone may leave float32's range.
        half = (exponent - place) // 2
        other = exponent - place - half
        return part.astype(jnp.float32) * _power_of_two(half) * _power_of_two(other)

    head = scaled(top, 23)
    tail = scaled(middle, 47) + scaled(bottom, 52)
    value = head + tail
    residual = jnp.where(jnp.isfinite(value), tail - (value - head), 0.0)
    is_nan = (biased == 0x7FF) & ((high & 0xFFFFF | low) != 0)
    value = jnp.where(biased == 0, 0.0, jnp.where(is_nan, jnp.nan, value))
    residual = jnp.where((biased == 0) | (biased == 0x7FF), 0.0, residual)
    return _Hyper(sign * value, sign * residual)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent from its bit pattern, clipped to float32's normal range."""
    biased = jnp.clip(exponent + 127, 1, 254).astype(jnp.uint32)
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


def _update_leaf(config: UpdateConfig, step: _Step, i: int, leaf: _Leaf) -> Results:
    param = leaf.params

    def per_member(scalar: jax.Array) -> jax.Array:
        return scalar.reshape(scalar.shape + (1,) * (param.ndim - scalar.ndim))

    *scalars, rows = step
    s = _Step._make([*(per_member(x) if x.ndim else x for x in scalars), rows])
    if config.zero_moments:
        zeros = [jnp.zeros_like(param, dtype) for dtype in _moment_dtypes(config)]
        leaf = leaf._replace(**dict(zip(config.moment_kinds, zeros)))
    noise = _leaf_noise(config, step, i, param.shape) if config.has_noise else None
    if config.lr_scales:
        s = _with_scaled_learning_rate(config, s, config.lr_scales[i])
    update, moments = _update_and_moments(config, s, config.decays[i], leaf)
    new = _store_params(config, s, leaf, update, noise)
    new |= _store_moments(config, moments, noise)
    kept = leaf._asdict() | {"out": param}
    if not config.write_params:
        kept["out"] = jnp.array(-0.0, param.dtype)
    stored: dict[str, Any] = {k: jnp.where(s.skip, kept[k], x) for k, x in new.items()}
    return Results(**stored)


def _with_scaled_learning_rate(config: UpdateConfig, s: _Step, scale: float) -> _Step:
    """The product of two sums of two numbers, rounded about once."""
    head = float(config.real.type(scale))
    tail = s.learning_rate * (scale - head) + s.learning_rate_residual * head
    return s._replace(learning_rate=s.learning_rate * head + tail)


def _moment_dtypes(config: UpdateConfig) -> list[str]:
    """By ``config.moment_kinds``."""
    return [config.mu_dtype, config.nu_dtype, config.nu_dtype][
        : len(config.moment_kinds)
    ]


def _update_and_moments(
    config: UpdateConfig, s: _Step, decays: bool, leaf: _Leaf
) -> tuple[jax.Array, list[jax.Array]]:
    """From the moments as they are stored; the moments not rounded yet."""
    read = (leaf.params, leaf.grads, leaf.mu, leaf.nu)
    p, g, mu, nu = (x.astype(config.real) for x in read)
    g = g / s.gradient_divisor
    if config.clip == "norm":
        g = clip_by_norm(g, s.norm, s.scaled_norm, s.max_grad)
    elif config.clip == "value":
        g = jnp.clip(g, -s.max_grad, s.max_grad)
    mu = s.b1 * mu + s.one_minus_b1 * g
    nu = s.b2 * nu + s.one_minus_b2 * g * g
    mu_hat = mu * s.mu_correction
    if config.nesterov:
        mu_hat = mu_hat + g * s.grad_correction
    nu_hat, moments = nu * s.nu_correction, [mu, nu]
    if config.has_nu_max:
        is_corrected = config.amsgrad == "corrected"
        old_max = leaf.nu_max.astype(config.real)
        nu_max = jnp.maximum(old_max, nu_hat if is_corrected else nu)
        nu_hat = nu_max if is_corrected else nu_max * s.nu_correction
        moments.append(nu_max)
    direction = mu_hat / (jnp.sqrt(nu_hat + s.eps_root) + s.eps)
    if decays:
        decay = jnp.where(s.weight_decay == 0, 0.0, s.weight_decay * p)
        direction = direction + decay
    return -s.learning_rate * direction, moments


def _store_moments(
    config: UpdateConfig, moments: list[jax.Array], noise: LeafNoise | None
) -> dict[str, jax.Array]:
    # The maximum to nearest: one of noisy values would creep upwards.
    bits: tuple[Any, ...] = (None, None, None)
    if noise is not None and config.stochastic_moments:
        bits = (*noise.for_moments(), None)
    stored = map(_stored, moments, _moment_dtypes(config), bits)
    return dict(zip(config.moment_kinds, stored))


def _store_params(
    config: UpdateConfig,
    s: _Step,
    leaf: _Leaf,
    update: jax.Array,
    noise: LeafNoise | None,
) -> dict[str, jax.Array]:
    """``out``, and what follows from the new parameters: copies and average."""
    param = leaf.params
    p = param.astype(config.real)
    new: dict[str, jax.Array] = {}
    if config.write_params:
        is_noisy = config.stochastic_params and param.dtype == jnp.bfloat16
        bits = noise.for_params() if noise is not None and is_noisy else None
        new_param = new["out"] = _stored(p + update, param.dtype, bits)
    else:
        new["out"] = update.astype(param.dtype)
        new_param = (p + _widened(new["out"], config.real)).astype(param.dtype)
    if config.has_copies:
        new["copies"] = new_param.astype(leaf.copies.dtype)
    if config.has_ema:
        kept = s.ema_decay * leaf.ema
        new["ema"] = kept + s.one_minus_ema_decay * _widened(new_param, config.real)
    return new


def _widened(x: jax.Array, real: Any) -> jax.Array:
    """As ``real``, rounded again: XLA on GPUs drops a conversion there and back."""
    wide = x.astype(real)
    if wide.dtype == x.dtype:
        return wide
    info = jnp.finfo(x.dtype)
    rounded = lax.reduce_precision(wide, info.nexp, info.nmant)
    if x.dtype == jnp.float16:  # whose subnormals would become zero; 0.5 has their step
        subnormal = jnp.copysign((jnp.abs(wide) + 0.5) - 0.5, wide)
        rounded = jnp.where(jnp.abs(wide) < info.smallest_normal, subnormal, rounded)
    return rounded


def _stored(x: jax.Array, dtype: Any, noise: jax.Array | None) -> jax.Array:
    """Rounded to nearest, or with noise stochastically."""
    if noise is None or np.dtype(dtype) == np.float32:
        return x.astype(dtype)
    return round_stochastically(x, np.dtype(dtype), noise)


def _leaf_noise(
    config: UpdateConfig, step: _Step, i: int, shape: tuple[int, ...]
) -> LeafNoise:
    members = () if config.members is None else (1,)
    strides = config.shard_strides[i] if config.shard_strides else ()
    index = element_index(shape[len(members) :], strides)

    def spread(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape + (1,) * (len(shape) - x.ndim)) if x.ndim else x

    def wide(row: int) -> Wide:
        return Wide(*(spread(step.noise[..., row, word]) for word in range(2)))

    index = Wide(*(word.reshape(*members, *word.shape) for word in index))
    index = Wide(*(jnp.broadcast_to(word, shape) for word in index))
    return LeafNoise(
        seed=wide(0),
        step=spread(step.number).astype(jnp.uint32),
        leaf_id=config.leaf_ids[i],
        index=index.plus(wide(1 + i)),
    )
