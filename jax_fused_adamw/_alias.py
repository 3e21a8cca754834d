"""The public optimizer, with its documentation and the checks of its options."""

import math
import numbers
from typing import Any

import jax
import numpy as np

from jax_fused_adamw import _checks
from jax_fused_adamw._buckets import DEFAULT_BUCKET_BYTES
from jax_fused_adamw._hyperparams import ScalarOrSchedule, check_hyperparameter
from jax_fused_adamw._leaf_options import (
    check_lr_scale_values,
    check_mask_values,
    is_function,
)
from jax_fused_adamw._options import AMSGRAD, Options
from jax_fused_adamw._transform import FusedAdamW, make_transformation

_STOCHASTIC_ROUNDING = {False: "off", True: "moments", "params": "params"}


def fused_adamw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    amsgrad: bool | str = False,
    maximize: bool = False,
    nu_dtype: Any = None,
    master_weights: bool = False,
    stochastic_rounding: bool | str = True,
    seed: Any = 0,
    max_grad_norm: Any = None,
    max_grad_value: Any = None,
    skip_nonfinite: bool | None = None,
    lr_scale: Any = None,
    ema_decay: Any = None,
    compute_dtype: Any = None,
    packed_state: bool = False,
    alias: bool = True,
    in_place: bool = False,
    bucket_bytes: int | None = None,
    implementation: str | None = None,
) -> FusedAdamW:
    r"""AdamW and AMSGrad over a whole parameter tree in one native call.

    Differs from :func:`optax.adamw` in where the work happens, not in what it is: one
    kernel unscales the gradient, moves both moments, corrects their bias, decays and
    writes the parameter, in place when its arguments are donated. Arithmetic is float64
    for float64 parameters and float32 for all others, whatever the dtypes of gradients
    and moments; the update is that of the new moments before they are rounded to
    theirs. The bias corrections are exact to float32 (optax's :math:`1-\beta_2^t` is up
    to 226 ulp off for :math:`\beta_2=.999`), so compare the two at about ``rtol=5e-5``,
    in float64 at ``1e-12``.

    .. math::

      g_t &= s\,\tilde g_t / \text{gradient\_scale} \\
      m_t &= \beta_1 m_{t-1} + (1-\beta_1) g_t \\
      v_t &= \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \\
      \hat m_t &= m_t / (1-\beta_1^t), \quad \hat v_t = v_t / (1-\beta_2^t) \\
      u_t &= -\alpha\left(\frac{\hat m_t}{\sqrt{\hat v_t + \bar\epsilon} + \epsilon}
             + \lambda p_{t-1}\right) \\
      p_t &= p_{t-1} + u_t

    :math:`\alpha` is ``learning_rate``, times the leaf's ``lr_scale`` if there is one,
    :math:`\beta_1, \beta_2` are ``b1, b2``, :math:`\epsilon` is ``eps``,
    :math:`\bar\epsilon` is ``eps_root``, :math:`\lambda` is ``weight_decay``,
    :math:`s` is -1 with ``maximize`` and 1 otherwise, :math:`t` is
    ``state.count + 1``.

    Three ways to use it, with the same bits for float32 and float64 parameters:

    * ``params, state = jfa.step(tx, grads, state, params)``: the fast path.
    * ``tx.update`` and ``optax.apply_updates`` with ``in_place=True``: the protocol
      at in-place cost, for loops that cannot be changed.
    * ``tx.update`` and ``optax.apply_updates``: contract-exact arrays, and one more
      pass over the parameters; not faster than XLA on large leaves.

    Parameters are float32, bfloat16, float16 or, where ``jax_enable_x64`` is on,
    float64 leaves of any shape, mixed freely; ``None`` and ``optax.MaskedNode`` pass
    through. The update has the dtype of its parameter. Gradients may be of any of these
    dtypes, leaf by leaf; only float64 ones want a float64 parameter.

    A float64 parameter has all of its state in float64, whatever ``mu_dtype`` and
    ``nu_dtype`` say, needs neither master nor copy, and is updated in a kernel call
    beside that of the others. Hyperparameters that the host knows act on it unrounded,
    traced ones as float32. Norms stay float32, and a finite gradient beyond float32
    enters them as the largest float32, before ``gradient_scale`` divides it: a clip by
    such a norm leaves more than ``max_grad_norm``. Keep scaled gradients below 3.4e38.

    What is kept besides may be of lower precision, or of higher:

    .. math::

      m_t, v_t &\to \text{round}(m_t), \text{round}(v_t) \\
      w_t &= w_{t-1} + u_t, \quad p_t = \text{round}(w_t) \\
      a_t &= \delta a_{t-1} + (1-\delta) w_t

    :math:`m, v` are rounded to ``mu_dtype`` and ``nu_dtype``; with ``master_weights``
    :math:`w` is the float32 master of a low-precision parameter :math:`p`, otherwise
    the parameter itself; with ``compute_dtype`` :math:`p` is the copy of a float32
    parameter :math:`w` that the next forward pass reads; :math:`a` is ``state.ema``
    with ``ema_decay`` :math:`\delta`, which begins as the parameters. Masters and
    copies are rounded to nearest even. Where a parameter has a master, or is rounded
    stochastically, the update of the plain protocol is the float32 difference of new
    and old parameter, which ``optax.apply_updates`` rounds to the new one (but for the
    sign of a zero, and for a new one below about :math:`2^{-16}` of the old).

    Stochastic rounding goes to one of the two neighbours, to each with the probability
    of its nearness: the mean is the value, so that steps too small for the dtype add
    up, and what the dtype can represent keeps its bits. The noise is Philox4x32 with 7
    rounds, a function of ``seed``, :math:`t`, the number of the leaf in
    ``jax.tree.leaves`` of the gradients and the element's index in the whole leaf: the
    same bits under ``jit``, in other buckets, on a mesh or after a restore. Inside
    ``shard_map`` over all mesh axes a shard is all that is seen, and its elements are
    counted from zero: shards then share their noise, unless each has a seed of its own.
    ``state.nu_max`` is always rounded to nearest: a maximum of noisy values creeps
    upwards.

    On a mesh each leaf is updated where its first moment lies, without a gather, and
    comes back with the sharding it had; the norm and the decision to skip are those of
    the whole tree. :func:`state_shardings` places a state.

    ``update`` and ``step`` take three more arguments, all data on the device:

    * ``skip_update``: a bool or integer scalar. Non-zero leaves parameters, moments
      and count bit-identical and adds one to ``state.skipped`` and
      ``state.consecutive``; no host synchronisation, no ``lax.cond``.
    * ``gradient_scale``: the loss scale that the gradients carry; they are divided by
      it once. A value that is not positive and finite turns every gradient into NaN.
    * ``report``: a :class:`GradReport` of :func:`grad_stats` in place of the step's own
      analysis, so that several groups (``optax.multi_transform``) are clipped and
      skipped as one. Without ``max_grad_norm`` and ``skip_nonfinite`` nothing reads it.
      A norm beyond float32 is known to it only as the largest float32.

    After a step with ``max_grad_norm`` or ``skip_nonfinite``, ``state.report`` tells
    the norm, largest magnitude and non-finite count of :math:`g`, before clipping.

    Args:
      learning_rate: a float, a scalar array, or a schedule of ``state.count`` (the
        number of applied steps, before this one).
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the square root, outside of it.
      eps_root: added inside the square root, after bias correction.
      mu_dtype: of the first moment: bfloat16, float16, or ``None`` for float32 (where
        optax takes the parameter's dtype). In float16 a :math:`|m|` of 65,536 or more
        becomes infinite: a finite gradient of 1e6 makes infinite or NaN parameters in
        the next steps, which ``skip_nonfinite`` cannot see: clip, or use bfloat16.
        Static.
      weight_decay: decoupled decay, times the learning rate. optax's default; PyTorch
        uses 1e-2.
      mask: which parameters decay: a tree of Python bools, a prefix of the parameter
        tree, or a callable that makes one from the parameters. None is all. What is
        both a tree and callable, as a module of Equinox is, is taken as the tree.
      nesterov: Nesterov momentum as in ``optax.adamw(nesterov=True)``.
      amsgrad: ``True`` divides by the maximum of all :math:`v_t`, corrected
        afterwards, as PyTorch does; ``"optax"`` keeps the maximum of the corrected
        :math:`\hat v_t`, as ``optax.amsgrad`` does. The two differ in value.
      maximize: ascend: the gradient is negated.
      nu_dtype: of the second moment and its maximum: bfloat16, or ``None`` for float32.
        Not float16, whose smallest positive number is 6e-8. Static.
      master_weights: keep a float32 master of every low-precision parameter in
        ``state.master``, and make the parameter its rounded copy. The master decides:
        see :func:`resync` for parameters that something else has changed. So this must
        be the last transformation that changes updates, and be given the real
        parameters: after ``optax.scale(0.5)``, or inside ``schedule_free`` or
        ``lookahead``, parameters would silently not be what their masters say
        (:func:`step` warns). ``optax.apply_if_finite`` around it raises JAX's TypeError
        about the branches of a ``cond`` unless gradients are float32: use
        ``skip_nonfinite=True``.
      stochastic_rounding: how moments below float32 are rounded: ``True``
        stochastically, ``False`` to nearest, where :math:`v` stops moving once a step
        is below half its spacing (at 0.25 for :math:`g=1, \beta_2=.999` in bfloat16).
        ``"params"`` also rounds bfloat16 parameters without a master stochastically;
        float16 ones keep rounding to nearest. ``optax.apply_if_finite`` around that:
        as with ``master_weights``.
      seed: an integer of 64 bits, or an integer scalar array, for the noise. Leaves
        are numbered within the optimizer, so groups of ``multi_transform`` with the
        same seed have the same noise: give each its own. Under
        ``optax.inject_hyperparams``, which makes it int32, name a larger one in
        ``static_args=("seed",)``.
      max_grad_norm: a float or a scalar array: gradients of which the global norm
        exceeds it are scaled to it, :math:`g` to
        :math:`(g / \text{norm}) \cdot \text{max\_grad\_norm}`. One more pass reads
        the gradients before the step, of all leaves of this optimizer. Inside
        ``shard_map(check_vma=False)``, clip and skip are by what each device holds: see
        :func:`grad_stats`.
      max_grad_value: limits each element of :math:`g` to plus or minus this; a NaN
        stays one. Not together with ``max_grad_norm``.
      skip_nonfinite: skip a step with a NaN or infinite element of :math:`g` anywhere,
        as ``skip_update`` does. ``None`` is True with ``max_grad_norm``, else False.
        Clipped by the norm but not skipped, such a step makes every gradient NaN.
      lr_scale: what multiplies the learning rate, and with it the decay, of each
        parameter, as that of a parameter group does: a tree of numbers, finite and not
        negative, a prefix of the parameter tree (a number is one), or a callable that
        makes one from the parameters, told apart as for ``mask``. None is 1 for all.
        The product is float64 and rounded once. A scale of 0 leaves the parameter as it
        is, as long as its moments are finite, and the moments advance. One kernel call
        takes all scales. Static: another scale is another program. Groups that differ
        in other hyperparameters are optimizers of their own in
        ``optax.multi_transform``, where trees of ``lr_scale`` and ``mask`` are those of
        the whole model.
      ema_decay: in [0, 1): keep the average of the parameters in ``state.ema``, float32
        (float64 of float64 ones) and of the masters where there are any; without
        debiasing. None keeps none. What changes updates after this transformation, or
        hides the parameters from it, makes it an average of others, as with
        ``master_weights``.
      compute_dtype: bfloat16 or float16: write a rounded copy of every float32
        parameter in the same pass, for :func:`compute_params`. It is kept in
        ``state.compute``, since it must travel with the parameters through any optax
        wrapper and donation. What changes updates after this transformation, or hides
        the parameters from it, leaves wrong copies, as with ``master_weights``. Static.
      packed_state: not built yet.
      alias: let outputs take the buffers of donated inputs. ``False`` computes out of
        place, without copies, for callers that keep the old state.
      in_place: let ``update`` return :class:`InPlaceUpdate` nodes, which
        ``optax.apply_updates`` turns into the parameters the kernel has written. Works
        in ``chain``, ``masked``, ``multi_transform``, Flax's ``TrainState`` and
        ``nnx.Optimizer``. Does not work with ``eqx.apply_updates``, inside a
        ``lax.cond`` whose other branch returns arrays (``optax.apply_if_finite``), or
        before what combines updates with another tree (``optax.ema``,
        ``add_decayed_weights``, ``lookahead``): there use :func:`step`. Reading the
        updates costs a copy of the parameters.
      bucket_bytes: under ``jax.jit``, leaves go into kernel calls of about this many
        bytes of gradients, in the order in which the backward pass finishes them, so
        that gradients die early: temporary memory is then that of XLA's own update and
        about one bucket. Not where something needs all gradients before the step
        (clipping by the global norm) or one operation makes them all (``lax.scan``).
        None is the measured default, 256 MiB; what is larger than all gradients
        together makes one call.
      implementation: ``None`` or ``"ffi"`` is the platform's native kernel, an error
        where cpu or cuda has none; ``"xla"`` is plain JAX, for comparison and for
        differentiating through a step (with ``eps_root > 0``: the square root of a
        zero moment has no finite derivative).

    Returns:
      An :class:`optax.GradientTransformationExtraArgs` with a method ``step``. Its
      state is a :class:`FusedAdamWState`. All arrays of the state and the parameters
      may be donated; gradients are never written.

    Raises:
      ValueError: a hyperparameter out of its range, as far as the host can see it; at
        ``update``: missing parameters, another tree, another shape.
      TypeError: a hyperparameter of the wrong kind; at ``init`` and ``update``: a leaf
        of another dtype, named by its path.
      NotImplementedError: an option that is not built yet, by name.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> tx = jfa.fused_adamw(learning_rate=0.1)
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> state = tx.init(params)
      >>> grads = {"w": jnp.array([0.5, -0.5])}
      >>> params, state = jfa.step(tx, grads, state, params)
      >>> print(params["w"].round(4), state.count)
      [0.9 2.1] 1

      bfloat16 parameters with float32 masters and moments of 2 bytes:

      >>> tx = jfa.fused_adamw(1e-4, weight_decay=0.0, master_weights=True,
      ...                      mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16)
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> params, state = jfa.step(tx, params, tx.init(params), params)
      >>> print(params["w"], state.master["w"].round(4))
      [1 1] [0.9999 0.9999]

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2019, algorithm 2.

      Reddi, Kale and Kumar, `On the Convergence of Adam and Beyond
      <https://openreview.net/forum?id=ryQu7f-RZ>`_, 2018, algorithm 2 (AMSGrad).

      Gupta, Agrawal, Gopalakrishnan and Narayanan, `Deep Learning with Limited
      Numerical Precision <https://arxiv.org/abs/1502.02551>`_, 2015, section 3
      (stochastic rounding).

      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.1 (master weights).

      Salmon, Moraes, Dror and Shaw, `Parallel Random Numbers: As Easy as 1, 2, 3
      <https://doi.org/10.1145/2063384.2063405>`_, 2011 (Philox).

      Dozat, `Incorporating Nesterov Momentum into Adam
      <https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ>`_, 2016.

    .. seealso:: :func:`jax_fused_adamw.step`, :func:`optax.adamw`
    """
    for name, value in {
        "learning_rate": learning_rate,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "eps_root": eps_root,
        "weight_decay": weight_decay,
    }.items():
        check_hyperparameter(name, value)
    clip, max_grad = _choose_clip(max_grad_norm, max_grad_value)
    if not is_function(mask):
        check_mask_values(mask)
    if not is_function(lr_scale):
        check_lr_scale_values(lr_scale)
    _checks.check_static("mu_dtype", mu_dtype)
    _checks.check_static("nu_dtype", nu_dtype)
    _checks.check_static("compute_dtype", compute_dtype)
    _checks.check_static("bucket_bytes", bucket_bytes)
    if isinstance(seed, jax.Array):
        # Only inject_hyperparams makes seed an array, and it calls a function as if it
        # were a schedule: what arrives is that function's answer for a count.
        if isinstance(mask, bool):
            raise TypeError(_checks.not_static_message("mask"))
        if isinstance(lr_scale, int):
            raise TypeError(
                f"{_checks.not_static_message('lr_scale')}, and write {lr_scale}.0"
            )
    _check_not_built(packed_state=packed_state)
    _check_flags(
        nesterov=nesterov,
        maximize=maximize,
        master_weights=master_weights,
        alias=alias,
        in_place=in_place,
    )
    if skip_nonfinite is None:
        skip_nonfinite = clip == "norm"
    _check_flags(skip_nonfinite=skip_nonfinite)
    _check_seed(seed)
    if ema_decay is not None:
        check_hyperparameter("ema_decay", ema_decay)
    mu_dtype, nu_dtype = _moment_dtypes(mu_dtype, nu_dtype)
    rounding = _checks.choose(
        "stochastic_rounding", stochastic_rounding, _STOCHASTIC_ROUNDING
    )
    is_rounded = {mu_dtype, nu_dtype} != {"float32"}
    return make_transformation(
        Options(
            learning_rate=learning_rate,
            b1=b1,
            b2=b2,
            eps=eps,
            eps_root=eps_root,
            weight_decay=weight_decay,
            mask=mask,
            lr_scale=lr_scale,
            nesterov=bool(nesterov),
            amsgrad=_checks.choose("amsgrad", amsgrad, AMSGRAD),
            clip=clip,
            max_grad=max_grad,
            skip_nonfinite=bool(skip_nonfinite),
            maximize=bool(maximize),
            mu_dtype=mu_dtype,
            nu_dtype=nu_dtype,
            master_weights=bool(master_weights),
            stochastic_moments=is_rounded and rounding != "off",
            stochastic_params=rounding == "params",
            seed=seed,
            ema_decay=ema_decay,
            compute_dtype=_checks.dtype_name(
                "compute_dtype", compute_dtype, _checks.COMPUTE_DTYPES
            ),
            alias=bool(alias),
            in_place=bool(in_place),
            bucket_bytes=_check_bucket_bytes(bucket_bytes),
            implementation=_checks.choose(
                "implementation", implementation, _checks.IMPLEMENTATIONS
            ),
        )
    )


def _choose_clip(max_grad_norm: Any, max_grad_value: Any) -> tuple[str, Any]:
    if max_grad_norm is not None and max_grad_value is not None:
        raise ValueError(
            "fused_adamw: expected max_grad_norm or max_grad_value, got both; put "
            "optax.clip(max_grad_value) in front of the optimizer for one of them"
        )
    if max_grad_norm is not None:
        check_hyperparameter("max_grad_norm", max_grad_norm)
        return "norm", max_grad_norm
    if max_grad_value is not None:
        check_hyperparameter("max_grad_value", max_grad_value)
        return "value", max_grad_value
    return "off", math.inf


def _moment_dtypes(mu_dtype: Any, nu_dtype: Any) -> tuple[str, str]:
    mu_name = _checks.dtype_name("mu_dtype", mu_dtype, _checks.MU_DTYPES)
    nu_name = _checks.dtype_name("nu_dtype", nu_dtype, _checks.NU_DTYPES)
    return mu_name or "float32", nu_name or "float32"


def _check_not_built(**options: Any) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"fused_adamw: {name} is not built yet")


def _check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"fused_adamw: {name} must be True or False, got {value!r}")


def _check_seed(seed: Any) -> None:
    dtype = seed.dtype if isinstance(seed, jax.Array) else np.asarray(seed).dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            "fused_adamw: seed must be an integer, got a PRNG key; pass "
            "jax.random.bits(key)"
        )
    is_integer = isinstance(seed, int) or dtype.kind in "iu"
    if isinstance(seed, bool) or not is_integer:
        raise TypeError(f"fused_adamw: seed must be an integer, got {seed!r}")
    if np.shape(seed) != ():
        raise ValueError(
            f"fused_adamw: seed must be a scalar, got an array of shape {seed.shape}"
        )
    if not isinstance(seed, jax.Array) and not -(2**63) <= int(seed) < 2**64:
        raise ValueError(f"fused_adamw: expected a seed of 64 bits, got {seed}")


def _check_bucket_bytes(bucket_bytes: Any) -> int:
    if bucket_bytes is None:
        return DEFAULT_BUCKET_BYTES
    is_integer = isinstance(bucket_bytes, numbers.Integral)
    if not is_integer or isinstance(bucket_bytes, bool):
        raise TypeError(
            "fused_adamw: bucket_bytes must be an integer or None, got "
            f"{bucket_bytes!r}"
        )
    if bucket_bytes < 1:
        raise ValueError(
            f"fused_adamw: expected bucket_bytes >= 1, got {bucket_bytes}; for one "
            "call pass a number larger than the gradients"
        )
    return int(bucket_bytes)
