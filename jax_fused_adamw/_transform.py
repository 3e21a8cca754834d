"""The optax transformation: update and step.

:mod:`jax_fused_adamw._alias` documents the options; this module carries them out.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_fused_adamw import _checks, _in_place, _saved_options
from jax_fused_adamw._analyzed_update import analyzed_update, suits_one_call
from jax_fused_adamw._buckets import make_buckets
from jax_fused_adamw._decay_report import tell_decay_report
from jax_fused_adamw._hyperparams import (
    check_gradient_scale,
    current_learning_rate,
    encode,
    scale_operand,
    skip_update_operand,
)
from jax_fused_adamw._leaf_options import (
    check_leaf_options,
    check_scaled_rates,
    resolve_lr_scale,
    resolve_mask,
)
from jax_fused_adamw._noise import noise_operand
from jax_fused_adamw._operands import (
    Buffers,
    Operands,
    Part,
    Results,
    Scalars,
    UpdateConfig,
    call_in_parts,
)
from jax_fused_adamw._options import Options, StepControl, options_of
from jax_fused_adamw._primitives import fused_update
from jax_fused_adamw._replication import check_replication
from jax_fused_adamw._state import (
    FusedAdamWState,
    check_state,
    check_state_type,
    copies_of,
    follows_params,
    init_state,
)
from jax_fused_adamw._stats import Analysis, analysis_of, check_report
from jax_fused_adamw._weights import (
    LeafPlan,
    NewWeights,
    in_place_update,
    make_buffers,
    new_weights,
)


class FusedAdamW(optax.GradientTransformationExtraArgs):
    """What :func:`fused_adamw` returns: an optax transformation with a :meth:`step`.

    :meth:`options` says what it was told, as a dict to save beside its state, and
    :meth:`check_options` what has changed since.

    Attributes:
      init: ``params`` to the :class:`FusedAdamWState` before the first step.
      update: ``(grads, state, params, **extra_args)`` to updates and the new state;
        the extra arguments are those of a :class:`StepControl`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_fused_adamw as jfa
      >>> tx = jfa.fused_adamw(0.5)
      >>> isinstance(tx, optax.GradientTransformationExtraArgs)
      True
      >>> params = {"w": jnp.ones(2)}
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> print(updates["w"].round(2), state.count)
      [-0.5 -0.5] 1
      >>> import json
      >>> tx = jfa.fused_adamw(1e-3, b2=0.95, max_grad_norm=1.0)
      >>> saved = json.loads(json.dumps(tx.options()))
      >>> saved["version"], saved["b2"], saved["skip_nonfinite"], saved["mask"]
      (2, 0.95, True, None)
      >>> tx.check_options(saved)
      ()
      >>> other = jfa.fused_adamw(1e-3, max_grad_norm=1.0)
      >>> other.check_options(saved)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      ValueError: fused_adamw: the saved options differ: b2 was 0.95 and is 0.999...
    """

    def step(
        self,
        grads: optax.Updates,
        state: FusedAdamWState,
        params: optax.Params,
        **extra_args: Any,
    ) -> tuple[optax.Params, FusedAdamWState]:
        """:func:`jax_fused_adamw.step` of this transformation.

        Args:
          grads: gradients, with the tree of ``params``.
          state: what ``init`` or the previous step returned.
          params: the current parameters.
          **extra_args: ``skip_update``, ``gradient_scale`` and ``report``.

        Returns:
          The new parameters and the new state, in the buffers of the old ones where
          these are donated to the enclosing ``jax.jit``.

        Raises:
          ValueError, TypeError: as ``update`` does.

        Examples:
          >>> import jax.numpy as jnp
          >>> import jax_fused_adamw as jfa
          >>> tx, params = jfa.fused_adamw(0.1), {"w": jnp.ones(2)}
          >>> params, state = tx.step(params, tx.init(params), params)
          >>> print(params["w"].round(4), state.count)
          [0.9 0.9] 1
        """
        return _in_place.step(self, grads, state, params, **extra_args)

    def options(self) -> dict[str, Any]:
        """What decides the numbers and the state, as a dict that JSON can hold.

        The names are those of the arguments of :func:`fused_adamw`, the values what
        acts: defaults and implied options are filled in, dtypes are names, a scalar
        array is a float, ``seed`` is None where nothing is rounded stochastically, a
        tree (``mask``, ``lr_scale``) is a dict from the paths of its leaves to bools or
        numbers. What cannot be recorded is one of these words: ``"schedule"`` (a
        ``learning_rate``), ``"function"`` (a ``mask`` or ``lr_scale``), ``"traced"`` (a
        value inside ``jax.jit`` or on other hosts). How a step runs, which changes no
        number (``alias``, ``in_place``, ``bucket_bytes``) or rounds differently
        (``implementation``), is not in it.

        ``"version"`` is 2. A dict of version 1 has no options of statistics
        (``max_grad_norm``, ``max_grad_value``, ``skip_nonfinite``).

        Returns:
          A dict of None, bools, numbers, strings and dicts of bools or numbers.

        Examples:
          >>> import jax_fused_adamw as jfa
          >>> saved = jfa.fused_adamw(1e-3, amsgrad=True, mask={"w": True}).options()
          >>> saved["version"], saved["amsgrad"], saved["mask"], saved["nu_dtype"]
          (2, True, {"['w']": True}, 'float32')
        """
        return _saved_options.recorded(options_of(self))

    def check_options(
        self, saved: Mapping[str, Any] | None, changed: Iterable[str] = ()
    ) -> tuple[str, ...]:
        """Compares this optimizer with one whose :meth:`options` were saved.

        An option that ``saved`` does not have was not there yet, and counts as off; a
        hyperparameter that it does not have is not compared. Numbers are compared as
        steps use them: ``np.float32(0.1)`` and 0.1 are the same learning rate of
        float32 arithmetic, but not with ``lr_scale``, by which it is multiplied before
        it is rounded, nor with ``jax_enable_x64``, where leaves may be float64; and
        they are never the same ``b1``, ``b2``, ``ema_decay`` or scale. Trees are
        compared by what they say of each path: a prefix and the same written out are
        alike, and so are None and a mask of True or scales of 1.

        Args:
          saved: what :meth:`options` returned; None for a state that was saved without
            them.
          changed: names of options that are meant to differ, for example
            ``("learning_rate",)``; never ``amsgrad``, whose state cannot be converted.
            What the others change of the state is checked with it.

        Returns:
          The names of options that could not be compared: schedules, mask functions,
          traced values, what was not recorded. They may differ.

        Raises:
          ValueError: options that differ, by name, with both values; a later version;
            an unknown name in ``saved`` or ``changed``.
          TypeError: ``saved`` is no dict, but for example the text of its JSON.

        Examples:
          >>> import jax_fused_adamw as jfa
          >>> saved = jfa.fused_adamw(1e-3, b2=0.95).options()
          >>> jfa.fused_adamw(lambda count: 1e-3, b2=0.95).check_options(
          ...   saved, changed=("learning_rate",))
          ()
          >>> jfa.fused_adamw(1e-3).check_options(saved)  # doctest: +ELLIPSIS
          Traceback (most recent call last):
            ...
          ValueError: fused_adamw: the saved options differ: b2 was 0.95 and is 0.999...
        """
        return _saved_options.check(options_of(self), saved, changed)


def make_transformation(options: Options) -> FusedAdamW:
    return FusedAdamW(
        functools.partial(_init, options), functools.partial(_update, options)
    )


def _init(options: Options, params: Any) -> FusedAdamWState:
    state = init_state(options, params)
    check_leaf_options(options, params)
    tell_decay_report(options, params)
    return state


def _update(
    options: Options,
    updates: optax.Updates,
    state: FusedAdamWState,
    params: optax.Params | None = None,
    *,
    skip_update: Any = False,
    gradient_scale: Any = 1.0,
    report: Any = None,
    **extra_args: Any,
) -> tuple[optax.Updates, FusedAdamWState]:
    del extra_args
    grads = updates
    if params is None:
        if jax.tree.leaves(grads):
            raise ValueError(_checks.NO_PARAMS_MESSAGE)
        params = grads
    check_state_type(state)
    control = StepControl(gradient_scale, skip_update, report)
    write_params = _in_place.wants_in_place(options.in_place)
    out, new_state = fused_step(options, grads, state, params, control, write_params)
    if write_params:
        out = jax.tree.map(functools.partial(in_place_update, options), params, out)
    _in_place.tell_step(params, out, follows_params(new_state))
    return out, new_state


class _Step(NamedTuple):
    """What a step works on, checked."""

    params: Any
    grads: Any
    state: FusedAdamWState
    control: StepControl
    plans: list[LeafPlan]
    buffers: Buffers


def fused_step(
    options: Options,
    grads: optax.Updates,
    state: FusedAdamWState | None,
    params: optax.Params,
    control: StepControl,
    write_params: bool,
) -> tuple[Any, FusedAdamWState]:
    """New parameters or updates, and the new state.

    Without a state this is the first step, and the moments are zero.
    """
    _checks.check_params(params)
    _checks.check_grads(grads, params)
    zero_moments = state is None
    if state is None:
        state = init_state(options, None)._replace(**copies_of(options, params))
    else:
        check_state(options, state, params)
    trees = _checks.state_trees(state, options.state_dtypes)
    _checks.check_memory({"params": params, "grads": grads} | trees)
    if control.report is not None:
        check_report(control.report)
    plans = [LeafPlan.of(options, x, write_params) for x in jax.tree.leaves(params)]
    buffers = make_buffers(plans, params, grads, state)
    step = _Step(params, grads, state, control, plans, buffers)
    config, scalars = _config_and_scalars(options, step, write_params, zero_moments)
    results, analysis = _analyze_and_update(options, step, config, scalars)
    new = new_weights(plans, params, state, results)
    return _new_trees(options, step, new, results, analysis)


def _config_and_scalars(
    options: Options, step: _Step, write_params: bool, zero_moments: bool
) -> tuple[UpdateConfig, Scalars]:
    """Of all leaves together; the scalars yet without an analysis."""
    state, control, buffers = step.state, step.control, step.buffers
    hyperparams = _hyperparams(options, state.count, control.gradient_scale)
    hyper_bits, traced, traced_values = encode(hyperparams)
    lr_scales = resolve_lr_scale(options.lr_scale, step.params)
    check_scaled_rates(hyperparams["learning_rate"], lr_scales, step.params)
    has_bfloat16 = any(x.dtype == jnp.bfloat16 for x in buffers.params)
    config = UpdateConfig(
        decays=resolve_mask(options.mask, step.params),
        lr_scales=lr_scales if any(x != 1.0 for x in lr_scales) else (),
        traced=traced,
        amsgrad=options.amsgrad,
        clip=options.clip,
        skip_nonfinite=options.skip_nonfinite,
        nesterov=options.nesterov,
        maximize=options.maximize,
        write_params=write_params,
        mu_dtype=options.mu_dtype,
        nu_dtype=options.nu_dtype,
        has_ema=options.ema_decay is not None,
        stochastic_moments=options.stochastic_moments,
        stochastic_params=options.stochastic_params and has_bfloat16,
        # Nothing that is concrete here can be donated: XLA would copy every aliased
        # buffer first.
        alias=options.alias and _any_traced(buffers),
        zero_moments=zero_moments,
        count_step=True,
    )
    noise = []
    if config.has_noise:
        config = dataclasses.replace(config, leaf_ids=tuple(range(len(step.plans))))
        noise = [noise_operand(options.seed, config.num_leaves)]
    scalars = Scalars(
        state.count,
        skip_update_operand(control.skip_update),
        hyper_bits,
        traced_values,
        noise=noise,
        skip_counters=[state.skipped, state.consecutive],
    )
    return config, scalars


def _analyze_and_update(
    options: Options, step: _Step, config: UpdateConfig, scalars: Scalars
) -> tuple[Results, Analysis | None]:
    scale, report = step.control.gradient_scale, step.control.report
    analyzes = options.analyses and report is None
    suits = options.implementation == "ffi" and suits_one_call(config, step.buffers)
    if analyzes and suits:
        return analyzed_update(config, scale_operand(scale), scalars, step.buffers)
    analysis = None
    if options.analyses:
        analysis = analysis_of(step.grads, scale, report, options.implementation)
        scalars = analysis.inform(scalars, config)
    check_replication(
        step.params, step.grads, step.state, options.state_dtypes, scalars
    )
    parts = _parts(options, step)
    call = functools.partial(_call, options.implementation)
    operands = Operands(scalars, [], step.buffers)
    return call_in_parts(call, parts, config, operands), analysis


def _call(implementation: str, config: UpdateConfig, operands: Operands) -> Results:
    return fused_update(config, implementation, operands)


def _parts(options: Options, step: _Step) -> list[Part]:
    """The calls: each bucket, its leaves apart by arithmetic and by what is written."""
    # An analysis has waited for all gradients already.
    bucket_bytes = math.inf if options.analyses else options.bucket_bytes
    read = jax.tree.leaves(step.params)
    copies = step.buffers.copies
    parts = []
    for bucket in make_buckets(read, step.buffers.grads, bucket_bytes, copies):
        after = [step.buffers.grads[i] for i in bucket.after]
        alike: dict[tuple, list[int]] = {}
        for i in bucket.leaves:
            alike.setdefault(tuple(step.plans[i].changes.items()), []).append(i)
        for changes, leaves in (alike or {(): []}).items():
            parts.append(Part(leaves, after, dict(changes)))
    return parts


def _new_trees(
    options: Options,
    step: _Step,
    new: NewWeights,
    results: Results,
    analysis: Analysis | None,
) -> tuple[Any, FusedAdamWState]:
    leaves = results._asdict() | {"master": new.master, "compute": new.compute}

    def tree(name: str) -> Any:
        like = _checks.params_with(name, step.params)
        return jax.tree.unflatten(jax.tree.structure(like), leaves[name])

    count, skipped, consecutive = results.counters
    new_state = step.state._replace(
        count=count,
        skipped=skipped,
        consecutive=consecutive,
        report=None if analysis is None else analysis.report,
        **{name: tree(name) for name in options.state_dtypes},
    )
    return jax.tree.unflatten(jax.tree.structure(step.params), new.out), new_state


def _hyperparams(
    options: Options, count: jax.Array, gradient_scale: Any
) -> dict[str, Any]:
    check_gradient_scale(gradient_scale)
    return {
        "learning_rate": current_learning_rate(options.learning_rate, count),
        "b1": options.b1,
        "b2": options.b2,
        "eps": options.eps,
        "eps_root": options.eps_root,
        "weight_decay": options.weight_decay,
        "gradient_scale": gradient_scale,
        "max_grad": options.max_grad,
        "ema_decay": 0.0 if options.ema_decay is None else options.ema_decay,
    }


def _any_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
