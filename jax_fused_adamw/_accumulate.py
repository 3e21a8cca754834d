"""Gradient accumulation: one optimizer pass for several micro-batches."""

import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jax_fused_adamw import _checks, _in_place
from jax_fused_adamw._export import saved_by_name
from jax_fused_adamw._hyperparams import (
    check_gradient_scale,
    check_weight,
    scale_operand,
    skip_update_operand,
)
from jax_fused_adamw._options import options_of
from jax_fused_adamw._replication import check_skips
from jax_fused_adamw._shardings import placed_as, zeros_like
from jax_fused_adamw._specs import ordered_axes
from jax_fused_adamw._state import FusedAdamWState, follows_params, map_states
from jax_fused_adamw._stats import Analysis, GradReport, analysis_of
from jax_fused_adamw._transform import FusedAdamW


@saved_by_name
class AccumulateState(NamedTuple):
    """State of :func:`accumulate`, a pending window included.

    The first micro-batch of a window overwrites what the last window has left in
    ``acc_grads``, ``total_weight`` and ``skip``.

    Attributes:
      mini_step: int32[], micro-batches in the pending window.
      total_weight: float32[], the sum of their weights.
      skip: bool[], whether one of them has condemned the window.
      acc_grads: sums of ``weight * grad / gradient_scale``, leaves of the parameters'
        shapes, float64 beside float64 parameters, else float32.
      inner_opt_state: the state of the transformation that takes the steps.
      skipped_windows: int32[], windows without a step, saturating.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> tx = jfa.accumulate(jfa.fused_adamw(0.1), every_k=3)
      >>> params = {"w": jnp.ones(2)}
      >>> grads = {"w": jnp.array([1.0, 2.0])}
      >>> _, state = jfa.step(tx, grads, tx.init(params), params, weight=4)
      >>> print(state.mini_step, state.total_weight, state.acc_grads["w"])
      1 4.0 [4. 8.]
    """

    mini_step: jax.Array
    total_weight: jax.Array
    skip: jax.Array
    acc_grads: Any
    inner_opt_state: Any
    skipped_windows: jax.Array


def accumulate(
    tx: optax.GradientTransformation, every_k: int
) -> optax.GradientTransformationExtraArgs:
    r"""Takes one step of ``tx`` for every ``every_k`` micro-batches.

    Differs from :class:`optax.MultiSteps`: ``tx`` runs once per window, under
    ``lax.cond``, where other micro-batches only add to the accumulators; one NaN skips
    its window and no later one; a weight, a skip or a loss scale may come with every
    micro-batch. ``tx`` is given the weighted mean

    .. math::

      \bar g = \sum_{i=1}^{k} w_i \, (\tilde g_i / s_i) \Big/ \sum_{i=1}^{k} w_i

    in float32 (float64 for float64 parameters), added in this order: :math:`k` is
    ``every_k``, :math:`\tilde g_i` are the ``grads`` of micro-batch :math:`i`,
    :math:`w_i` is its ``weight`` and :math:`s_i` its ``gradient_scale``. Where weights
    are not given, it is the plain mean of equal micro-batches: do not divide their
    losses by their number again.

    A window ends after ``every_k`` calls. If it holds a gradient that is not finite, a
    ``skip_update`` or a bad scale or weight, or if the sum of :math:`w_i g_i` or of
    :math:`w_i` overflows (though the mean may not), parameters and the state of ``tx``
    stay as they are, bit for bit, and the skip is counted: in ``skipped_windows`` and
    in ``skipped`` and ``consecutive`` of every ``fused_adamw`` in ``tx``. If all
    weights are zero, nothing happens and nothing is counted. Schedules and counts in
    ``tx`` move once per applied window.

    Use it as any transformation, :func:`step` included, which passes parameters
    through untouched where a micro-batch only adds. In the plain protocol its updates
    are -0.0 then, so that adding them keeps every bit (but for subnormals, which XLA's
    addition flushes on a CPU); with ``fused_adamw(..., in_place=True)`` in ``tx`` they
    keep the parameters as they are. Call it under ``jax.jit``: outside of it,
    ``lax.cond`` compiles anew in every call. What lies outside sees micro-batches:
    ``optax.chain(clip, accumulate(...))`` clips each of them,
    ``accumulate(optax.chain(clip, ...), k)`` their mean.

    ``update`` and ``step`` take these arguments, all of them data on the device:

    * ``weight``: a scalar, finite and not negative, 1 by default; with unequal
      micro-batches the number of samples whose mean the loss is. A micro-batch of
      weight 0 adds nothing, whatever its gradients.
    * ``skip_update``: a bool or integer scalar; non-zero skips the whole window.
    * ``gradient_scale``: the loss scale of this micro-batch. Gradients are divided by
      it before they are added, so it may change within a window.
    * ``report``: a ``GradReport`` of this micro-batch: non-finite ones skip the window.
      It is not passed on, since it does not describe the mean. A skipped window leaves
      the report in the state of ``tx`` as it was: :class:`DynamicLossScale` takes that
      of each micro-batch, ``grad_stats(grads, gradient_scale)``.
    * others are passed to ``tx``: those of the window's last micro-batch.

    Inside ``jax.shard_map`` a NaN on one device skips the window on all; the scalars
    must be the same on every device, which JAX knows of what ``psum`` or ``pmax``
    returns.

    Args:
      tx: the transformation that takes the steps; ours, or one of optax. It is given
        float32 gradients for all parameters but float64 ones.
        ``optax.apply_if_finite`` cannot take these for low-precision parameters: leave
        it out, since a window that is not finite is skipped anyway.
      every_k: micro-batches in a window, a Python integer, at least 1. It is static:
        schedules and arrays are not taken.

    Returns:
      An :class:`optax.GradientTransformationExtraArgs` with an
      :class:`AccumulateState`. Accumulators take 4 bytes a parameter; a pending window
      is in the state, is saved with it and goes on where it was. Gradients may be of
      other dtypes than the parameters; ``tx`` sees float32 or float64 as said, and its
      state keeps the dtypes that it had.

    Raises:
      TypeError: ``every_k`` is not a Python integer; at ``update``: an argument of
        another kind, or one that varies inside of a ``shard_map``.
      ValueError: ``every_k`` below 1; at ``update``: another tree or shape.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> tx = jfa.accumulate(jfa.fused_adamw(0.1), every_k=2)
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> state = tx.init(params)
      >>> @jax.jit  # in a training loop: jax.jit(..., donate_argnums=(0, 1))
      ... def train_step(params, state, x):
      ...   grads = jax.grad(lambda p: (p["w"] * x).sum())(params)
      ...   return jfa.step(tx, grads, state, params, weight=x.size)
      >>> for x in jnp.array([[3.0, -1.0], [-1.0, -1.0]]):
      ...   params, state = train_step(params, state, x)
      ...   print(params["w"].round(4), state.inner_opt_state.count)
      [1. 2.] 0
      [0.9 2.1] 1

    .. seealso:: :class:`optax.MultiSteps`, :func:`jax_fused_adamw.step`
    """
    if isinstance(every_k, bool) or not isinstance(every_k, numbers.Integral):
        raise TypeError(
            f"accumulate: every_k must be a Python integer, got {every_k!r} of type "
            f"{type(every_k).__name__}; schedules and arrays are not taken"
        )
    if not 1 <= every_k < 2**31:
        raise ValueError(f"accumulate: expected 1 <= every_k < 2**31, got {every_k}")
    if not isinstance(tx, FusedAdamW):
        tx = optax.with_extra_args_support(tx)
    return optax.GradientTransformationExtraArgs(
        functools.partial(_init, tx), functools.partial(_update, tx, int(every_k))
    )


def _init(tx: Any, params: optax.Params) -> AccumulateState:
    inner_opt_state = tx.init(params)

    def dtype_of(param: jax.Array) -> Any:
        return jnp.promote_types(param.dtype, jnp.float32)

    return AccumulateState(
        mini_step=jnp.zeros((), jnp.int32),
        total_weight=jnp.zeros((), jnp.float32),
        skip=jnp.zeros((), jnp.bool_),
        acc_grads=zeros_like(params, dtype_of),
        inner_opt_state=inner_opt_state,
        skipped_windows=jnp.zeros((), jnp.int32),
    )


def _update(
    tx: Any,
    every_k: int,
    updates: optax.Updates,
    state: AccumulateState,
    params: optax.Params | None = None,
    *,
    weight: Any = 1,
    skip_update: Any = False,
    gradient_scale: Any = 1.0,
    report: Any = None,
    **extra_args: Any,
) -> tuple[optax.Updates, AccumulateState]:
    if not isinstance(state, AccumulateState):
        raise TypeError(
            f"accumulate: state must be an AccumulateState, got {type(state).__name__};"
            " pass what init or the previous step returned, in the order "
            "update(grads, state, params)"
        )
    with _checks.speaking_as("accumulate"):
        remedy = "gradients of the parameters given to init"
        _checks.check_same_tree("grads", updates, state.acc_grads, remedy)
        _checks.check_shapes("grads", updates, state.acc_grads)
        _checks.check_memory({"grads": updates})
        skip = skip_update_operand(skip_update)
        check_weight(weight)
        check_gradient_scale(gradient_scale)
        scalars = {"weight": weight, "gradient_scale": gradient_scale}
        bad = {} if report is None else {"report": _has_nonfinite(report)}
        # Of a lax.cond that not all devices take, the others would wait for ever.
        decisions = {"skip_update": skip, **bad, **scalars}
        check_skips(decisions, {"mini_step": state.mini_step})
    skip = functools.reduce(jnp.logical_or, bad.values(), skip)
    pending = _add(updates, state, weight, gradient_scale, skip)
    # Not ==: a window may have been saved with a larger every_k.
    is_last = pending.mini_step >= every_k
    has_weight = pending.total_weight > 0
    may_apply = is_last & has_weight & ~pending.skip
    out, inner_opt_state, applied = _apply_if(
        may_apply, tx, pending, params, extra_args
    )
    skips = is_last & (has_weight | pending.skip) & ~applied
    return out, pending._replace(
        mini_step=jnp.where(is_last, 0, pending.mini_step),
        inner_opt_state=_count_skip(skips, inner_opt_state),
        skipped_windows=_increment_if(skips, state.skipped_windows),
    )


def _has_nonfinite(report: Any) -> jax.Array:
    if not isinstance(report, GradReport):
        raise TypeError(
            f"accumulate: report must be a GradReport, got {type(report).__name__}"
        )
    if jnp.shape(report.nonfinite) != ():
        raise ValueError(
            "accumulate: expected the report of the whole tree, of scalars, got "
            f"nonfinite of shape {jnp.shape(report.nonfinite)}"
        )
    return report.nonfinite != 0


def _add(
    grads: Any, state: AccumulateState, weight: Any, gradient_scale: Any, skip: Any
) -> AccumulateState:
    """The state with one more micro-batch in its window."""
    weight = jnp.asarray(weight, jnp.float32)
    scale = jnp.asarray(scale_operand(gradient_scale))
    is_first = state.mini_step == 0
    total_weight = jnp.where(is_first, weight, state.total_weight + weight)
    is_valid = (weight >= 0) & jnp.isfinite(total_weight)
    is_valid &= (scale > 0) & jnp.isfinite(scale)
    skip = skip | ~is_valid

    def add(acc: jax.Array, grad: jax.Array) -> jax.Array:
        grad = grad.astype(acc.dtype) / scale.astype(acc.dtype)
        term = jnp.where(weight == 0, 0.0, weight.astype(acc.dtype) * grad)
        term = placed_as(term, acc)
        # A choice, not a product with 0: nothing of the last window may survive.
        return jnp.where(is_first, term, acc + term)

    return state._replace(
        mini_step=state.mini_step + 1,
        total_weight=total_weight,
        skip=jnp.where(is_first, skip, state.skip | skip),
        acc_grads=jax.tree.map(add, state.acc_grads, grads),
    )


def _apply_if(
    may_apply: jax.Array,
    tx: Any,
    pending: AccumulateState,
    params: Any,
    extra_args: Any,
) -> tuple[Any, Any, jax.Array]:
    """Updates, the state of ``tx``, and whether ``tx`` has taken a step.

    It does where it may and the mean is finite.
    """

    is_ours = isinstance(tx, FusedAdamW)

    def take(step, analysis, params, inner_opt_state):
        grads, extra = pending.acc_grads, dict(extra_args)
        if is_ours:
            # The kernel divides.
            extra |= {"gradient_scale": pending.total_weight, "report": analysis}
        else:
            grads = _mean(pending)
        out, new_state = step(grads, inner_opt_state, params, **extra)
        return out, jax.tree.map(_cast_like, new_state, inner_opt_state)

    def choose(apply, keep):
        def at_the_end(*operands):
            if is_ours:
                analysis = _analysis_of_mean(tx, pending)
                finite = analysis.report.nonfinite == 0
            else:
                analysis, finite = None, _all_finite(_mean(pending))
            step = functools.partial(apply, analysis)
            return *lax.cond(finite, step, keep, *operands), finite

        def before(*operands):
            return *keep(*operands), jnp.array(False)

        operands = (params, pending.inner_opt_state)
        return lax.cond(may_apply, at_the_end, before, *operands)

    apply = functools.partial(take, tx.update)
    updates, _ = jax.eval_shape(
        functools.partial(apply, None), params, pending.inner_opt_state
    )
    nodes = jax.tree.leaves(updates, is_leaf=_in_place.is_in_place)
    if not _in_place.wants_in_place(any(map(_in_place.is_in_place, nodes))):
        no_update = functools.partial(jax.tree.map, _minus_zero, updates)
        return choose(apply, lambda _, inner_opt_state: (no_update(), inner_opt_state))
    # Only arrays leave a branch: here the parameters, to be marked again outside.
    apply = functools.partial(take, functools.partial(_in_place.step, tx))
    new_params, *rest = choose(apply, lambda *operands: operands)
    out = jax.tree.map(_marked, params, new_params, updates)
    _in_place.tell_step(params, out, follows_params(pending.inner_opt_state))
    return out, *rest


def _analysis_of_mean(tx: FusedAdamW, pending: AccumulateState) -> Analysis:
    return analysis_of(
        pending.acc_grads,
        pending.total_weight,
        report=None,
        implementation=options_of(tx).implementation,
    )


def _mean(pending: AccumulateState) -> Any:
    return jax.tree.map(
        lambda total: total / pending.total_weight.astype(total.dtype),
        pending.acc_grads,
    )


def _all_finite(tree: Any) -> jax.Array:
    finite = jnp.array(True)
    for leaf in jax.tree.leaves(tree):
        finite &= jnp.isfinite(leaf).all()
    axes = ordered_axes(finite)  # of a shard_map with sharded leaves
    return lax.pmin(finite.astype(jnp.int32), axes) > 0 if axes else finite


def _minus_zero(update: jax.ShapeDtypeStruct) -> jax.Array:
    """What adds to any number without changing its bits."""
    return jnp.full_like(update, -0.0)


def _marked(param: jax.Array, new: jax.Array, update: Any) -> _in_place.InPlaceUpdate:
    """In place, with a difference of the dtype that ``tx`` gives this update."""
    (plain,) = jax.tree.leaves(update)
    return _in_place.InPlaceUpdate(param, new, plain.dtype)


def _cast_like(new: Any, old: Any) -> jax.Array:
    """Of the dtype that the state had: a float32 gradient would promote it."""
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _count_skip(skips: jax.Array, inner_opt_state: Any) -> Any:
    """The state of ``tx`` with the skip counted wherever it is counted at all."""

    def count(ours: FusedAdamWState) -> FusedAdamWState:
        return ours._replace(
            skipped=_increment_if(skips, ours.skipped),
            consecutive=_increment_if(skips, ours.consecutive),
        )

    return map_states(count, inner_opt_state)


def _increment_if(condition: jax.Array, count: jax.Array) -> jax.Array:
    return jnp.where(condition, optax.safe_increment(count), count)
