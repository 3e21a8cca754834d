"""Statistics of gradients, computed and kept on the device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fused_adamw import _checks
from jax_fused_adamw._export import saved_by_name
from jax_fused_adamw._hyperparams import check_gradient_scale, scale_operand
from jax_fused_adamw._operands import Scalars, UpdateConfig
from jax_fused_adamw._reference import gradient_divisor
from jax_fused_adamw._stats_primitives import Reports
from jax_fused_adamw._stats_reports import analyze

_INT32_MAX = 2**31 - 1


@saved_by_name
class GradReport(NamedTuple):
    """What :func:`grad_stats` found, on the device.

    A tree with a NaN has ``norm`` and ``max_abs`` NaN, one with an infinity but no NaN
    has them infinite. A finite tree whose norm exceeds float32 reports the largest
    float32. Of no elements all three are zero.

    Attributes:
      norm: float32[], the global L2 norm.
      max_abs: float32[], the largest magnitude.
      nonfinite: int32[], the number of NaN and infinite elements, saturating.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> report = jfa.grad_stats({"w": jnp.array([3.0, jnp.inf])})
      >>> print(*report)
      inf inf 1
    """

    norm: jax.Array
    max_abs: jax.Array
    nonfinite: jax.Array


class Analysis(NamedTuple):
    """A report, and its norm times 2^-64, which float32 always holds."""

    report: GradReport
    scaled_norm: jax.Array

    def inform(self, scalars: Scalars, config: UpdateConfig) -> Scalars:
        """The scalars of an update that clips or skips by this analysis."""
        norms = [self.report.norm, self.scaled_norm] if config.clip == "norm" else []
        nonfinite = [self.report.nonfinite] if config.skip_nonfinite else []
        return scalars._replace(norms=norms, nonfinite=nonfinite)


def grad_stats(
    grads: Any,
    gradient_scale: Any = 1.0,
    *,
    per_leaf: bool = False,
    implementation: str | None = None,
) -> GradReport | tuple[GradReport, GradReport]:
    r"""Global norm, largest magnitude and non-finite count of gradients, in one pass.

    Nothing is read back by the host. With :math:`g = \tilde g / s`, where
    :math:`\tilde g` are the elements of ``grads`` and :math:`s` is
    ``gradient_scale``:

    .. math::

      \text{norm} = \sqrt{\textstyle\sum g^2}, \quad
      \text{max\_abs} = \max |g|, \quad
      \text{nonfinite} = |\{g : g \text{ is NaN or infinite}\}|

    Squares are taken relative to a power of two near the largest element, so they
    neither overflow nor vanish, and are added in one fixed order: CPU and CUDA give the
    same bits, however leaves are grouped into launches. The norm is within a few ulp
    of the exact one.

    Args:
      grads: a tree of float32, bfloat16, float16 or, with ``jax_enable_x64``, float64
        leaves of any shape; ``None`` and ``optax.MaskedNode`` are not counted. float64
        elements are rounded to float32 first, finite ones beyond it to the largest
        float32, and divided then. Never written.
      gradient_scale: the loss scale that the gradients carry. One that is not positive
        and finite makes every element count as NaN.
      per_leaf: also return the statistics of each leaf.
      implementation: as of :func:`fused_adamw`; ``"xla"`` can be differentiated.

    Returns:
      A :class:`GradReport` of scalars; with ``per_leaf`` a pair: that, and one whose
      fields are vectors with an element for each leaf, in the order of
      ``jax.tree.leaves``.

      On sharded gradients the result is that of the whole arrays. Inside ``shard_map``
      a leaf that varies over mesh axes counts as one array whose shards lie along
      them: sum gradients of a batch over its axes first. Where it is manual over some
      axes of the mesh only, plain JAX does the work, within a few ulp. With
      ``check_vma=False`` JAX does not know what varies, and the result is that of what
      each device holds: reduce it yourself (of leaves that are all cut over the same
      axes, ``sqrt(psum(norm**2))``, ``pmax(max_abs)``, ``psum(nonfinite)`` over them)
      before it is passed on as ``report=``.

    Raises:
      TypeError: a leaf of another dtype, named by its path, or a sparse one; a
        ``gradient_scale`` that is not a number.
      ValueError: a ``gradient_scale`` that is not a scalar.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> report = jfa.grad_stats({"w": jnp.array([3.0, 4.0]), "b": jnp.zeros(2)})
      >>> print(report.norm, report.max_abs, report.nonfinite)
      5.0 4.0 0

      Skip a step whose largest gradient is out of the ordinary:

      >>> grads, limit = {"w": jnp.array([3.0, 400.0])}, 100.0
      >>> report = jfa.grad_stats(grads)
      >>> skip = (report.nonfinite > 0) | (report.max_abs > limit)
      >>> tx, params = jfa.fused_adamw(0.1), {"w": jnp.ones(2)}
      >>> params, state = jfa.step(tx, grads, tx.init(params), params, skip_update=skip)
      >>> print(params["w"], state.skipped)
      [1. 1.] 1

    .. seealso:: ``fused_adamw(max_grad_norm=..., skip_nonfinite=...)``, which does this
      and the step together; :class:`StatsPlan`, how rows are merged.
    """
    with _checks.speaking_as("grad_stats"):
        _checks.check_grad_leaves(grads)
        _checks.check_memory({"grads": grads})
        check_gradient_scale(gradient_scale)
        implementation = _checks.choose(
            "implementation", implementation, _checks.IMPLEMENTATIONS
        )
        reports = analyze(grads, gradient_scale, implementation, per_leaf)
    total = GradReport(*(x[0] for x in _of_report(reports)))
    if not per_leaf:
        return total
    return total, GradReport(*(x[1:] for x in _of_report(reports)))


def no_report() -> GradReport:
    """What a state holds before the first step."""
    dtypes = GradReport(jnp.float32, jnp.float32, jnp.int32)
    return GradReport(*(jnp.zeros((), dtype) for dtype in dtypes))


def analysis_of(
    grads: Any,
    gradient_scale: Any,
    report: GradReport | Analysis | None,
    implementation: str,
) -> Analysis:
    """The analysis of checked gradients for a step, or what a caller's report says.

    A report's norm ends at the largest float32; an analysis, which :mod:`._accumulate`
    has made of these very gradients and this scale, knows it beyond.
    """
    if isinstance(report, Analysis):
        return report
    if report is not None:
        check_report(report)
        values = zip(report, no_report(), strict=True)
        report = GradReport(*(jnp.asarray(x, like.dtype) for x, like in values))
        # It may be of another scale: one that is none makes this step non-finite.
        is_scale = jnp.isfinite(gradient_divisor(scale_operand(gradient_scale)))
        nonfinite = jnp.where(is_scale, report.nonfinite, _INT32_MAX)
        report = report._replace(nonfinite=nonfinite)
        return Analysis(report, report.norm * jnp.float32(2.0**-64))
    reports = analyze(grads, gradient_scale, implementation, per_leaf=False)
    report = GradReport(*(x[0] for x in _of_report(reports)))
    return Analysis(report, reports.scaled_norm[0])


def check_report(report: Any) -> None:
    """Raises TypeError unless ``report`` is what :func:`grad_stats` returns."""
    if isinstance(report, Analysis):
        return
    advice = "pass what jfa.grad_stats(grads) returned"
    if not isinstance(report, GradReport):
        raise TypeError(
            f"fused_adamw: report must be a GradReport, got {type(report).__name__}; "
            f"{advice}"
        )
    for name, value, expected in zip(report._fields, report, no_report(), strict=True):
        if jnp.shape(value) != () or jnp.asarray(value).dtype != expected.dtype:
            raise TypeError(
                f"fused_adamw: report.{name} must be a {expected.dtype} scalar, got "
                f"{value!r}; {advice}"
            )


def _of_report(reports: Reports) -> tuple[jax.Array, jax.Array, jax.Array]:
    return reports.norm, reports.max_abs, reports.nonfinite
