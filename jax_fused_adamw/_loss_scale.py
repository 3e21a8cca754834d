"""Dynamic loss scaling for low-precision gradients, kept on the device."""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from jax_fused_adamw._stats import GradReport

# Below the smallest normal number XLA may flush to zero.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


class _Fields(NamedTuple):
    value: jax.Array
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float
    finite_steps: jax.Array


class DynamicLossScale(_Fields):
    r"""A loss scale that grows while gradients are finite and shrinks on overflow.

    Small float16 gradients vanish; those of ``scale * loss`` do not, and the optimizer
    divides by the same scale (``gradient_scale``). The largest usable scale is found
    by trying. With :math:`S` the scale (``value``), :math:`n` the finite steps counted
    (``finite_steps``), :math:`a, b` the factors of growth and backoff and :math:`N` the
    ``growth_interval``, an update is

    .. math::

      (S, n) \leftarrow \begin{cases}
        (\max(b S, \text{min\_scale}),\ 0) & \text{not finite} \\
        (\min(a S, \text{max\_scale}),\ 0) & \text{finite},\ n \ge N \\
        (S,\ n + 1) & \text{finite},\ n < N
      \end{cases}

    These are the defaults and, step by step, the scales of Flax's ``DynamicScale``:
    the finite step that follows ``growth_interval`` counted ones grows the scale.
    PyTorch's ``GradScaler`` grows one step sooner: for its scales pass its interval
    less one. Unlike Flax's, a counter restored beyond a smaller interval grows at the
    next finite step instead of never, and :meth:`scale` never computes in float16.

    The order of use is: :meth:`scale` the loss, take gradients, step with
    ``gradient_scale=loss_scale.value`` and a skip of non-finite gradients, and last
    :meth:`update`, all with the same instance. The new instance serves the next step.

    A pytree with two leaves, ``value`` and ``finite_steps``; the options are static.
    It may be carried by ``jax.jit``, ``lax.scan`` and ``lax.cond`` and be donated; no
    method reads the device. Of what it saves, Flax's serialization and pickle include
    the options, other formats the two arrays.

    Args:
      value: the scale to begin with, within ``min_scale`` and ``max_scale``. The
        attribute is a float32[] array.
      growth_factor: what the scale is multiplied by to grow, above 1.
      backoff_factor: what it is multiplied by after a step that is not finite, between
        0 and 1.
      growth_interval: finite steps in a row, at least 1, that are counted before the
        scale grows.
      min_scale: the smallest scale, at least the smallest normal float32.
      max_scale: the largest scale, at most the largest float32.
      finite_steps: finite steps in a row so far. The attribute is an int32[] array.

    Raises:
      ValueError: a value out of its range, where the host can see it.
      TypeError: a value of another kind.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> loss_scale = jfa.DynamicLossScale(value=1024.0, growth_interval=2)
      >>> print(loss_scale.scale(jnp.float16(100.0)))
      102400.0
      >>> for finite in (False, True, True, True):
      ...   loss_scale = loss_scale.update(finite=jnp.array(finite))
      ...   print(loss_scale.value)
      512.0
      512.0
      512.0
      1024.0

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.2.
    """

    __slots__ = ()

    def __new__(
        cls,
        value: Any = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = _SMALLEST,
        max_scale: float = _LARGEST,
        finite_steps: Any = 0,
    ):
        options = {
            "growth_factor": _number("growth_factor", growth_factor),
            "backoff_factor": _number("backoff_factor", backoff_factor),
            "growth_interval": _integer("growth_interval", growth_interval),
            "min_scale": _number("min_scale", min_scale),
            "max_scale": _number("max_scale", max_scale),
        }
        _check_array("value", value, jnp.float32)
        _check_array("finite_steps", finite_steps, jnp.int32)
        _check_ranges(value=_seen(value), **options, finite_steps=_seen(finite_steps))
        if isinstance(value, numbers.Real):
            value = jnp.asarray(value, jnp.float32)
        if isinstance(finite_steps, numbers.Real):
            finite_steps = jnp.asarray(finite_steps, jnp.int32)
        return cls._make((value, *options.values(), finite_steps))

    def scale(self, loss: Any) -> jax.Array:
        """The loss times the scale, in float32 or, for a float64 loss, in float64.

        65536 itself is beyond float16, and so is the derivative of the result with
        respect to a float16 loss: let the last reduction of the loss be in float32, or
        the first steps overflow and shrink the scale to 32768.

        Args:
          loss: a floating-point array of any shape, usually a scalar.

        Returns:
          An array of the loss's shape.

        Raises:
          TypeError: the loss is not floating-point.

        Examples:
          >>> import jax, jax.numpy as jnp
          >>> import jax_fused_adamw as jfa
          >>> loss_scale = jfa.DynamicLossScale(value=1024.0)
          >>> print(jax.grad(lambda w: loss_scale.scale(3.0 * w))(1.0))
          3072.0
        """
        loss = jnp.asarray(loss)
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TypeError(
                f"DynamicLossScale.scale: expected a floating-point loss, got dtype "
                f"{loss.dtype}"
            )
        dtype = jnp.promote_types(loss.dtype, jnp.float32)
        return loss.astype(dtype) * self.value.astype(dtype)

    def update(
        self, report: GradReport | None = None, *, finite: Any = None
    ) -> "DynamicLossScale":
        """The loss scale for the next step.

        Args:
          report: what ``grad_stats`` found in this step's gradients; they are finite
            where ``report.nonfinite`` is zero.
          finite: in place of a report, a bool array: whether they all were.

        Returns:
          A new instance with the same options.

        Raises:
          TypeError: neither or both of the two, or one of another kind.
          ValueError: not a scalar.

        Examples:
          >>> import jax.numpy as jnp
          >>> import jax_fused_adamw as jfa
          >>> loss_scale = jfa.DynamicLossScale(value=1024.0)
          >>> report = jfa.grad_stats({"w": jnp.array([1.0, jnp.inf])})
          >>> print(loss_scale.update(report).value)
          512.0
        """
        finite = _finite_operand(report, finite)
        if jnp.shape(finite) != jnp.shape(self.value):
            raise ValueError(
                "DynamicLossScale.update: expected a scalar, got shape "
                f"{jnp.shape(finite)}; one loss scale needs the report of the whole "
                "tree (or .all() of finite)"
            )
        grows = self.finite_steps >= self.growth_interval
        larger = jnp.minimum(self.value * self.growth_factor, self.max_scale)
        smaller = jnp.maximum(self.value * self.backoff_factor, self.min_scale)
        kept = jnp.where(grows, larger, self.value)
        return self._replace(
            value=jnp.where(finite, kept, smaller),
            finite_steps=jnp.where(finite & ~grows, self.finite_steps + 1, 0),
        )

    def static_options(self) -> dict[str, float | int]:
        """The arguments that no step changes: what a checkpoint of arrays lacks.

        Returns:
          Their values by name.

        Examples:
          >>> import jax_fused_adamw as jfa
          >>> scale = jfa.DynamicLossScale(growth_interval=500)
          >>> scale.static_options()["growth_interval"]
          500
        """
        return {k: x for k, x in self._asdict().items() if k not in _CHILDREN}


_CHILDREN = ("value", "finite_steps")


def _flatten(loss_scale: DynamicLossScale) -> tuple[tuple[Any, ...], Any]:
    options = loss_scale._asdict() | dict.fromkeys(_CHILDREN)
    children = tuple(getattr(loss_scale, name) for name in _CHILDREN)
    return children, tuple(options.values())


def _flatten_with_keys(loss_scale: DynamicLossScale):
    children, options = _flatten(loss_scale)
    keys = map(GetAttrKey, _CHILDREN)
    return tuple(zip(keys, children, strict=True)), options


def _unflatten(options: Any, children: Any) -> DynamicLossScale:
    # Not by the constructor: JAX puts any object in a leaf's place.
    return DynamicLossScale._make(options)._replace(
        **dict(zip(_CHILDREN, children, strict=True))
    )


jax.tree_util.register_pytree_with_keys(
    DynamicLossScale, _flatten_with_keys, _unflatten, _flatten
)


def _finite_operand(report: Any, finite: Any) -> Any:
    if (report is None) == (finite is None):
        neither = (
            "neither (state.report is None without max_grad_norm or skip_nonfinite: "
            "pass jfa.grad_stats(grads, scale))"
        )
        raise TypeError(
            "DynamicLossScale.update: expected either a GradReport or finite=, got "
            + (neither if report is None else "both")
        )
    if report is None:
        if np.dtype(getattr(finite, "dtype", type(finite))) != np.bool_:
            raise TypeError(
                f"DynamicLossScale.update: finite must be a bool scalar, got {finite!r}"
            )
        return finite
    if not isinstance(report, GradReport):
        raise TypeError(
            "DynamicLossScale.update: report must be a GradReport, got "
            f"{type(report).__name__}; a bool goes to finite="
        )
    return report.nonfinite == 0


def _check_ranges(**given: Any) -> None:
    """Raises ValueError, as far as the host can see the values."""
    low, high = given["min_scale"], given["max_scale"]
    expected = {
        "1 < growth_factor, finite in float32": 1 < given["growth_factor"] <= _LARGEST,
        "0 < backoff_factor < 1": 0 < given["backoff_factor"] < 1,
        "1 <= growth_interval < 2**31": 1 <= given["growth_interval"] < 2**31,
        f"{_SMALLEST} <= min_scale <= max_scale <= {_LARGEST}": (
            _SMALLEST <= low <= high <= _LARGEST
        ),
    }
    if isinstance(given["value"], numbers.Real):
        value = _number("value", given["value"])
        with np.errstate(over="ignore"):
            rounded = float(np.float32(low)), float(np.float32(high))
        expected["min_scale <= value <= max_scale"] = (
            min(low, rounded[0]) <= value <= max(high, rounded[1])
        )
    if isinstance(given["finite_steps"], numbers.Real):
        finite_steps = _integer("finite_steps", given["finite_steps"])
        expected["0 <= finite_steps < 2**31"] = 0 <= finite_steps < 2**31
    for condition, holds in expected.items():
        if not holds:
            named = [f"{k}={v}" for k, v in given.items() if k in condition]
            raise ValueError(
                f"DynamicLossScale: expected {condition}, got {', '.join(named)}"
            )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"DynamicLossScale: {name} must be a real number, got {value!r} of type "
            f"{type(value).__name__}"
        )
    return float(value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"DynamicLossScale: {name} must be an integer, got {value!r}")
    return int(value)


def _check_array(name: str, value: Any, dtype: Any) -> None:
    """Raises unless ``value`` is a number or a scalar array of that dtype."""
    if isinstance(value, numbers.Real):
        return
    if getattr(value, "dtype", None) != dtype:
        raise TypeError(
            f"DynamicLossScale: {name} must be a number or an array of dtype "
            f"{np.dtype(dtype)}, got {value!r}"
        )
    if value.shape != ():
        raise ValueError(
            f"DynamicLossScale: {name} must be a scalar, got an array of shape "
            f"{value.shape}"
        )


def _seen(value: Any) -> Any:
    """The number in an array that this process can read, anything else as it is."""
    is_traced = isinstance(value, jax.core.Tracer)
    if isinstance(value, numbers.Real) or is_traced:
        return value
    return value.item() if getattr(value, "is_fully_addressable", True) else value
