"""The optax transformation: state, init and update.

:mod:`jax_fused_adamw._alias` documents the options; this module carries them out.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_fused_adamw import _checks, _in_place
from jax_fused_adamw._analyzed_update import analyzed_update, suits_one_call
from jax_fused_adamw._buckets import make_buckets
from jax_fused_adamw._export import saved_by_name
from jax_fused_adamw._hyperparams import (
    ScalarOrSchedule,
    check_gradient_scale,
    current_learning_rate,
    encode,
    scale_operand,
    skip_update_operand,
)
from jax_fused_adamw._operands import (
    Buffers,
    Operands,
    Part,
    Results,
    Scalars,
    UpdateConfig,
    call_in_parts,
)
from jax_fused_adamw._primitives import fused_update
from jax_fused_adamw._shardings import zeros_like
from jax_fused_adamw._stats import (
    Analysis,
    GradReport,
    analysis_of,
    check_report,
    no_report,
)


@saved_by_name
class FusedAdamWState(NamedTuple):
    """State of :func:`fused_adamw`; what an option does not need is None.

    The names are optax's, so ``optax.tree.get(state, "mu")`` works.
    """

    count: jax.Array  # int32[]: applied steps, saturating
    mu: Any  # float32 leaves: first moment
    nu: Any  # float32 leaves: second moment
    nu_max: Any  # float32 leaves with amsgrad: the running maximum
    master: Any
    ema: Any
    skipped: jax.Array  # int32[]: skipped steps, saturating
    consecutive: jax.Array  # int32[]: steps skipped since the last applied one
    report: Any  # GradReport of the last step, where gradients are analysed


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked arguments of ``fused_adamw``."""

    learning_rate: ScalarOrSchedule
    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    weight_decay: Any
    mask: Any
    nesterov: bool
    amsgrad: str  # one of _operands.AMSGRAD_KINDS
    clip: str  # one of _operands.CLIP_KINDS
    max_grad: Any  # what it limits; infinite without
    skip_nonfinite: bool
    maximize: bool
    alias: bool
    in_place: bool
    bucket_bytes: int
    implementation: str

    @property
    def analyses(self) -> bool:
        """Whether a step needs statistics of its gradients."""
        return self.clip == "norm" or self.skip_nonfinite


class StepControl(NamedTuple):
    """What a step may be told besides its gradients: data, on the device or not.

    As the arguments of the same names of ``update`` and :func:`step`.
    """

    gradient_scale: Any = 1.0  # the gradients are divided by it once
    skip_update: Any = False  # bool or integer scalar: non-zero skips the step
    report: GradReport | None = None  # takes the place of the step's own analysis


class FusedAdamW(optax.GradientTransformationExtraArgs):
    """What ``fused_adamw`` returns: an optax transformation with a ``step``."""

    def step(
        self,
        grads: optax.Updates,
        state: FusedAdamWState,
        params: optax.Params,
        **extra_args: Any,
    ) -> tuple[optax.Params, FusedAdamWState]:
        """:func:`jax_fused_adamw.step` of this transformation."""
        return _in_place.step(self, grads, state, params, **extra_args)


def make_transformation(options: Options) -> FusedAdamW:
    return FusedAdamW(
        functools.partial(_init, options), functools.partial(_update, options)
    )


def options_of(tx: FusedAdamW) -> Options:
    return tx.update.args[0]  # of the partial that make_transformation made


def _init(options: Options, params: optax.Params) -> FusedAdamWState:
    _checks.check_params(params)

    def zeros() -> Any:
        # One buffer a leaf: donating the state must never donate a buffer twice.
        return zeros_like(params, partitioned=options.implementation == "ffi")

    return FusedAdamWState(
        count=jnp.zeros((), jnp.int32),
        mu=zeros(),
        nu=zeros(),
        nu_max=None if options.amsgrad == "off" else zeros(),
        master=None,
        ema=None,
        skipped=jnp.zeros((), jnp.int32),
        consecutive=jnp.zeros((), jnp.int32),
        report=no_report() if options.analyses else None,
    )


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
    _check_state_type(state)
    control = StepControl(gradient_scale, skip_update, report)
    write_params = _in_place.wants_in_place(options.in_place)
    out, new_state = fused_step(options, grads, state, params, control, write_params)
    if write_params:
        out = jax.tree.map(_in_place.InPlaceUpdate, params, out)
    return out, new_state


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
    if zero_moments:
        state = _init(options, None)
    else:
        _check_state(options, state, params)
    arrays = {"params": params, "grads": grads} | _checks.moment_trees(state)
    _checks.check_memory(arrays)
    if control.report is not None:
        check_report(control.report)
    scalars, traced = _scalars(options, state, control)
    config = UpdateConfig(
        decays=tuple(_checks.resolve_mask(options.mask, params)),
        traced=traced,
        amsgrad=options.amsgrad,
        clip=options.clip,
        skip_nonfinite=options.skip_nonfinite,
        nesterov=options.nesterov,
        maximize=options.maximize,
        write_params=write_params,
        # Nothing that is concrete here can be donated: XLA would copy every aliased
        # buffer first.
        alias=options.alias and _any_traced(_buffers(params, grads, state)),
        zero_moments=zero_moments,
        count_step=True,
    )
    results, analysis = _analyze_and_update(
        options, config, control, scalars, params, grads, state
    )
    unflatten = jax.tree.structure(params).unflatten
    count, skipped, consecutive = results.counters
    new_state = state._replace(
        count=count,
        mu=unflatten(results.mu),
        nu=unflatten(results.nu),
        nu_max=unflatten(results.nu_max) if config.has_nu_max else None,
        skipped=skipped,
        consecutive=consecutive,
        report=None if analysis is None else analysis.report,
    )
    return unflatten(results.out), new_state


def _scalars(
    options: Options, state: FusedAdamWState, control: StepControl
) -> tuple[Scalars, tuple[str, ...]]:
    """Scalars of a step, yet without an analysis; which hyperparameters are traced."""
    hyperparams = _hyperparams(options, state.count, control.gradient_scale)
    hyper_bits, traced, traced_values = encode(hyperparams)
    scalars = Scalars(
        state.count,
        skip_update_operand(control.skip_update),
        hyper_bits,
        traced_values,
        norms=[],
        nonfinite=[],
        gradient_scale=[],
        skip_counters=[state.skipped, state.consecutive],
    )
    return scalars, traced


def _analyze_and_update(
    options: Options,
    config: UpdateConfig,
    control: StepControl,
    scalars: Scalars,
    params: Any,
    grads: Any,
    state: FusedAdamWState,
) -> tuple[Results, Analysis | None]:
    buffers = _buffers(params, grads, state)
    analyzes = options.analyses and control.report is None
    if analyzes and options.implementation == "ffi" and suits_one_call(buffers):
        scale = scale_operand(control.gradient_scale)
        return analyzed_update(config, scale, scalars, buffers)
    analysis = None
    if options.analyses:
        analysis = analysis_of(
            grads, control.gradient_scale, control.report, options.implementation
        )
        scalars = analysis.inform(scalars, config)
    _checks.check_replication(params, grads, state, scalars)
    return _update_in_buckets(options, config, scalars, buffers), analysis


def _buffers(params: Any, grads: Any, state: FusedAdamWState) -> Buffers:
    trees = (params, grads, state.mu, state.nu, state.nu_max)
    return Buffers(*map(jax.tree.leaves, trees))


def _update_in_buckets(
    options: Options, config: UpdateConfig, scalars: Scalars, buffers: Buffers
) -> Results:
    # An analysis has waited for all gradients already.
    bucket_bytes = math.inf if options.analyses else options.bucket_bytes
    parts = [
        Part(bucket.leaves, [buffers.grads[i] for i in bucket.after])
        for bucket in make_buckets(buffers.params, buffers.grads, bucket_bytes)
    ]

    def call(part_config: UpdateConfig, operands: Operands) -> Results:
        return fused_update(part_config, options.implementation, operands)

    return call_in_parts(call, parts, config, Operands(scalars, [], buffers))


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
    }


def _check_state_type(state: Any) -> None:
    if not isinstance(state, FusedAdamWState):
        raise TypeError(
            f"fused_adamw: state must be a FusedAdamWState, got "
            f"{type(state).__name__}; pass what init or the previous step returned, in "
            "the order update(grads, state, params)"
        )


def _check_state(options: Options, state: FusedAdamWState, params: Any) -> None:
    has_leaves = bool(jax.tree.leaves(params))  # else nu_max may be an empty None
    if has_leaves and (state.nu_max is None) != (options.amsgrad == "off"):
        has = "has no" if state.nu_max is None else "has a"
        raise ValueError(
            f"fused_adamw: the state {has} nu_max, but amsgrad is {options.amsgrad!r}; "
            "use the state with the options it was made with"
        )
    if (state.report is not None) != options.analyses:
        has = "has no" if state.report is None else "has a"
        wants = "analyses" if options.analyses else "does not analyse"
        raise ValueError(
            f"fused_adamw: the state {has} report, but the optimizer {wants} gradients "
            "(max_grad_norm, skip_nonfinite); use the state with the options it was "
            "made with"
        )
    moments = _checks.MOMENTS if state.nu_max is not None else ("mu", "nu")
    for name in moments:
        _checks.check_moments(name, getattr(state, name), params)
    for name in ("count", "skipped", "consecutive"):
        _checks.check_counter(name, getattr(state, name))


def _any_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
