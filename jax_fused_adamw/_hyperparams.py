"""Hyperparameters: what a caller may give, and the operands they become."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fused_adamw._operands import HYPERPARAMETERS

ScalarOrSchedule = float | jax.Array | Callable[[jax.Array], jax.Array]


def _is_finite(x: float) -> bool:
    return abs(x) <= float(np.finfo(np.float32).max)


# What each value must satisfy where the host can see it.
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "learning_rate": ("a number finite in float32", _is_finite),
    "b1": ("0 <= b1 < 1", lambda x: 0.0 <= x < 1.0),
    "b2": ("0 <= b2 < 1", lambda x: 0.0 <= x < 1.0),
    "eps": ("a finite eps >= 0", lambda x: 0.0 <= x and _is_finite(x)),
    "eps_root": ("a finite eps_root >= 0", lambda x: 0.0 <= x and _is_finite(x)),
    "weight_decay": ("a finite decay >= 0", lambda x: 0.0 <= x and _is_finite(x)),
    "ema_decay": ("0 <= ema_decay < 1", lambda x: 0.0 <= x < 1.0),
    "max_grad_norm": ("max_grad_norm >= 0", lambda x: 0.0 <= x),
    "max_norm": ("max_norm >= 0", lambda x: 0.0 <= x),
    "max_grad_value": ("max_grad_value >= 0", lambda x: 0.0 <= x),
}

# In these, a rounding to 16 bits changes the method: bfloat16(0.999) is 1.0.
_NEED_FLOAT32 = ("b1", "b2", "eps", "eps_root", "ema_decay")


def check_hyperparameter(name: str, value: Any) -> None:
    """Raises ValueError or TypeError unless ``value`` can serve as ``name``."""
    if callable(value) and not _is_array(value):
        if name == "learning_rate":
            return
        raise TypeError(
            f"fused_adamw: {name} is a function; only learning_rate takes a schedule. "
            "Wrap the optimizer in optax.inject_hyperparams to schedule the others."
        )
    if _is_array(value):
        _check_array(name, value)
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"fused_adamw: {name} must be a real number or a scalar array, "
            f"got {value!r} of type {type(value).__name__}"
        )
    if _is_host_value(value):
        condition, holds = _RANGES[name]
        if not holds(to_float(value)):
            raise ValueError(f"fused_adamw: expected {condition}, got {name}={value}")


def _check_array(name: str, value: Any) -> None:
    dtype = np.dtype(value.dtype)
    if value.shape != ():
        raise ValueError(
            f"fused_adamw: {name} must be a scalar, got an array of shape {value.shape}"
        )
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"fused_adamw: {name} must be a real number, got dtype {dtype}")
    low_precision = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    if low_precision and name in _NEED_FLOAT32:
        raise TypeError(
            f"fused_adamw: {name} has dtype {dtype}, too coarse for it "
            "(bfloat16 rounds 0.999 to 1.0). With inject_hyperparams, pass "
            "optax.inject_hyperparams(fused_adamw, hyperparam_dtype=jnp.float32)"
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def to_float(value: Any) -> float:
    """A number of any type; one beyond float64 is infinite."""
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64
        return math.inf if value > 0 else -math.inf


def _is_host_value(value: Any) -> bool:
    return not isinstance(value, jax.Array)


def encode(
    hyperparams: dict[str, Any],
) -> tuple[np.ndarray, tuple[str, ...], list[jax.Array]]:
    """Checked values as operands.

    Returns:
      ``Scalars.hyper_bits``, ``UpdateConfig.traced`` and ``Scalars.traced``.
    """
    values = [hyperparams[name] for name in HYPERPARAMETERS]
    known = [to_float(value) if _is_host_value(value) else 0.0 for value in values]
    bits = np.array(known, "<f8").view("<u4").reshape(-1, 2).astype(np.uint32)
    traced = {
        name: value.astype(jnp.float32)
        for name, value in zip(HYPERPARAMETERS, values, strict=True)
        if not _is_host_value(value)
    }
    return bits, tuple(traced), list(traced.values())


def current_learning_rate(learning_rate: ScalarOrSchedule, count: jax.Array) -> Any:
    """The learning rate of the step that follows ``count`` applied ones."""
    if callable(learning_rate) and not _is_array(learning_rate):
        learning_rate = learning_rate(count)
        check_hyperparameter("learning_rate", learning_rate)
    return learning_rate


def check_gradient_scale(value: Any) -> None:
    """Any value of ``gradient_scale`` is data; only its kind can be wrong."""
    _check_step_scalar("gradient_scale", value, (jnp.floating, jnp.integer))


def check_weight(value: Any) -> None:
    """A micro-batch's weight; its range only where the host can see it."""
    _check_step_scalar("weight", value, (jnp.floating, jnp.integer))
    if _is_host_value(value) and not (value >= 0 and _is_finite(to_float(value))):
        raise ValueError(
            f"fused_adamw: expected a finite weight >= 0, got weight={value}"
        )


def scale_operand(value: Any) -> np.float32 | jax.Array:
    """A checked ``gradient_scale`` as ``float32[]``; one beyond float32 is infinite."""
    if not _is_host_value(value):
        return value.astype(jnp.float32)
    with np.errstate(over="ignore"):
        return np.float32(to_float(value))


def skip_update_operand(value: Any) -> np.bool_ | jax.Array:
    """``skip_update`` as ``bool[]``: any non-zero value skips."""
    _check_step_scalar("skip_update", value, (jnp.bool_, jnp.integer))
    if _is_host_value(value):
        return np.bool_(value != 0)
    return value if value.dtype == jnp.bool_ else value != 0


def _check_step_scalar(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    expected = " or ".join(kind.__name__.rstrip("_") for kind in kinds)
    if isinstance(value, numbers.Integral) and not isinstance(
        value, (bool, np.generic)
    ):
        value = np.int32(value != 0)  # of any size; only its kind is looked at
    is_number = isinstance(value, (bool, numbers.Real))
    if not (_is_array(value) or is_number):
        raise TypeError(
            f"fused_adamw: {name} must be a {expected} scalar, got {value!r} of type "
            f"{type(value).__name__}"
        )
    array = value if _is_array(value) else np.asarray(value)
    if array.shape != ():
        is_flag = jnp.bool_ in kinds
        advice = "; reduce it first (for example with .any() or .all())"
        raise ValueError(
            f"fused_adamw: {name} must be a scalar, got an array of shape "
            f"{array.shape}{advice if is_flag else ''}"
        )
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(
            f"fused_adamw: {name} must be a {expected} scalar, got dtype {array.dtype}"
        )
