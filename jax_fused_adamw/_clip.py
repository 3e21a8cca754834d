"""Clipping by the global norm as a transformation of its own."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_fused_adamw import _checks
from jax_fused_adamw._export import saved_by_name
from jax_fused_adamw._hyperparams import check_gradient_scale, check_hyperparameter
from jax_fused_adamw._reference import clip_by_norm
from jax_fused_adamw._stats import GradReport, analysis_of, no_report


@saved_by_name
class ClipByGlobalNormState(NamedTuple):
    """State of :func:`clip_by_global_norm`.

    Attributes:
      report: the :class:`GradReport` of the last gradients, before clipping; zeros
        before the first ones.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> tx = jfa.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.array([3.0, 4.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(state.report.norm)
      5.0
    """

    report: GradReport


def clip_by_global_norm(
    max_norm: Any, *, implementation: str | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""``optax.clip_by_global_norm`` with one pass for the norm of the whole tree.

    .. math::

      g \mapsto g \;\text{ if } \|g\| \le c, \quad
      \text{else } (g / \|g\|) \cdot c

    :math:`c` is ``max_norm`` and :math:`\|g\|` the norm that :func:`grad_stats`
    reports: it neither overflows nor vanishes, and is the same on CPU and CUDA. float64
    gradients are clipped in float64, by a norm that is float32. Any optimizer may
    follow. ``fused_adamw(max_grad_norm=...)`` does the same without the pass that
    writes the clipped gradients.

    With ``update(..., gradient_scale=)`` in the chain, the norm is that of the unscaled
    gradients, and what comes out still carries the scale: ``fused_adamw`` behind it
    divides once. With ``report=`` of :func:`grad_stats`, that norm is taken instead.

    Args:
      max_norm: a float or scalar array, at least 0.
      implementation: as of :func:`fused_adamw`.

    Returns:
      The transformation. Updates keep their dtypes. A tree with a NaN or an infinity
      comes out as NaN everywhere, so that a step which skips non-finite gradients
      skips it.

    Raises:
      ValueError: a negative ``max_norm``, as far as the host can see it.
      TypeError: at ``update``, a leaf that :func:`grad_stats` does not take.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_fused_adamw as jfa
      >>> tx = optax.chain(jfa.clip_by_global_norm(1.0), optax.sgd(1.0))
      >>> grads = {"w": jnp.array([3.0, 4.0])}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates["w"], state[0].report.norm)
      [-0.6 -0.8] 5.0
    """
    speaking = functools.partial(_checks.speaking_as, "clip_by_global_norm")
    with speaking():
        check_hyperparameter("max_norm", max_norm)
        implementation = _checks.choose(
            "implementation", implementation, _checks.IMPLEMENTATIONS
        )

    def init(params: optax.Params) -> ClipByGlobalNormState:
        del params
        return ClipByGlobalNormState(no_report())

    def update(
        updates: optax.Updates,
        state: ClipByGlobalNormState,
        params: optax.Params | None = None,
        *,
        gradient_scale: Any = 1.0,
        report: GradReport | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipByGlobalNormState]:
        del state, params, extra_args
        with speaking():
            _checks.check_grad_leaves(updates)
            check_gradient_scale(gradient_scale)
            analysis = analysis_of(updates, gradient_scale, report, implementation)
        norms = analysis.report.norm, analysis.scaled_norm

        def clip(grad: jax.Array) -> jax.Array:
            real = jnp.promote_types(grad.dtype, jnp.float32)
            limit = jnp.asarray(max_norm, real)
            return clip_by_norm(grad.astype(real), *norms, limit).astype(grad.dtype)

        return jax.tree.map(clip, updates), ClipByGlobalNormState(analysis.report)

    return optax.GradientTransformationExtraArgs(init, update)
