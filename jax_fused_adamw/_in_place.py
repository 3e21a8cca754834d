"""In-place updates through optax's protocol.

optax passes `updates` from transformation to transformation and adds them to the
parameters at the end, which costs one more read and write of every parameter. The
fused kernel has already written the new parameters; :class:`InPlaceUpdate` carries
them to ``optax.apply_updates`` in the place of the update.
"""

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import get_opaque_trace_state


@dataclasses.dataclass
class _Step:
    """A running :func:`step`.

    Attributes:
      trace: the trace it runs in; None where it wants plain updates.
      made_updates: whether in-place updates came of it.
      made_float32: whether plain updates of another dtype than their parameters did.
      is_followed: whether a state has followed the updates already: its masters,
        copies and averages are those of the parameters that they lead to.
      followed: which in-place updates it was.
    """

    trace: Any
    made_updates: bool = False
    made_float32: bool = False
    is_followed: bool = False
    followed: list["InPlaceUpdate"] = dataclasses.field(default_factory=list)


_STEP: contextvars.ContextVar[_Step | None] = contextvars.ContextVar(
    "jax_fused_adamw_step", default=None
)


class _TeachingType(type):
    """A class whose name in an error says what to do.

    ``eqx.apply_updates`` maps over the updates with the parameters beside them, which
    takes an :class:`InPlaceUpdate` apart. The error is JAX's own, about trees that
    differ, and the class is all of ours that it shows.
    """

    def __repr__(cls) -> str:
        return (
            f"<class 'jax_fused_adamw.{cls.__name__}'> (made by in_place=True, for "
            "optax.apply_updates(params, updates) alone; elsewhere use "
            "jax_fused_adamw.step, or leave in_place out)"
        )


class InPlaceUpdate(metaclass=_TeachingType):
    """An update that knows the parameter it was made for and its new value.

    ``p + update`` is the new value, without arithmetic, when ``p`` is that very
    object; any other ``p`` gets ``p + difference``. As a pytree it has one child,
    the difference, so whatever maps over it (scaling, logging, a jit boundary) works
    on plain numbers and merely loses the shortcut. The difference is computed when
    it is asked for, and reading it keeps the old parameter alive: a copy.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jax_fused_adamw as jfa
      >>> tx, params = jfa.fused_adamw(0.5, in_place=True), {"w": jnp.ones(2)}
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> isinstance(updates["w"], jfa.InPlaceUpdate)
      True
      >>> print(optax.apply_updates(params, updates)["w"].round(2))
      [0.5 0.5]
      >>> print(jax.tree.leaves(updates)[0].round(2))  # reading costs a copy
      [-0.5 -0.5]
    """

    # `array + update` must come to __radd__: numpy's + yields to None here, and JAX's +
    # yields to what it does not know, so there is no __jax_array__.
    __array_ufunc__ = None

    def __init__(self, old: Any, new: Any, dtype: Any = None):
        self._old = old
        self._new = new
        self._dtype = dtype  # of the difference; the parameter's if None
        self._given_difference = None

    @property
    def difference(self) -> jax.Array:
        """``new - old``; -0.0 where the bits agree, so that adding it keeps them.

        Examples:
          >>> import jax.numpy as jnp
          >>> import jax_fused_adamw as jfa
          >>> tx, p = jfa.fused_adamw(0.1, in_place=True), jnp.ones(2)
          >>> update, _ = tx.update(p, tx.init(p), p, skip_update=True)
          >>> print(update.difference)
          [-0. -0.]
        """
        if self._given_difference is not None:
            return self._given_difference
        # Not kept: it belongs to the trace that asks, which may be a branch of a cond.
        return difference(self._old, self._new, self._dtype or self._new.dtype)

    def __radd__(self, param: Any) -> jax.Array:
        if self._old is not None and param is self._old:
            return self._new
        return param + self.difference

    __add__ = __radd__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an InPlaceUpdate has no {name!r}; its .difference, or jax.tree.map over "
            "the updates, gives arrays"
        )

    def __repr__(self) -> str:
        return f"InPlaceUpdate({self.difference!r})"


def _flatten(update: InPlaceUpdate) -> tuple[tuple[Any], None]:
    return (update.difference,), None


def _unflatten(aux_data: None, children: Any) -> InPlaceUpdate:
    del aux_data
    update = InPlaceUpdate(None, None)
    (update._given_difference,) = children
    return update


jax.tree_util.register_pytree_node(InPlaceUpdate, _flatten, _unflatten)


def difference(old: jax.Array, new: jax.Array, dtype: Any) -> jax.Array:
    """The update that leads from one parameter to another.

    In float32, adding it to a low-precision parameter and rounding lands on the new
    one, but for the sign of a zero and for a new one below about 2^-16 of the old.
    """
    same = _bits(old) == _bits(new)
    return jnp.where(
        same, jnp.array(-0.0, dtype), new.astype(dtype) - old.astype(dtype)
    )


def _bits(x: jax.Array) -> jax.Array:
    words = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    return lax.bitcast_convert_type(x, words[jnp.asarray(x).dtype.itemsize])


def wants_in_place(option: bool) -> bool:
    """Whether an update made here is to be an :class:`InPlaceUpdate`.

    Outside of :func:`step`, as the option ``in_place`` says. Inside, the step decides:
    not within a ``lax.cond`` or ``jit`` that a wrapper has put between the two
    (``optax.apply_if_finite``), since what crosses it are plain arrays.
    """
    running = _STEP.get()
    if running is None:
        return option
    if running.trace is None or running.trace != get_opaque_trace_state():
        return False
    running.made_updates = True
    return True


def is_in_place(node: Any) -> bool:
    return isinstance(node, InPlaceUpdate)


def tell_step(params: Any, updates: Any, is_followed: bool) -> None:
    """Tells a running :func:`step` of updates what it may have to explain later."""
    running = _STEP.get()
    if running is None:
        return
    leaves = jax.tree.leaves(updates, is_leaf=is_in_place)
    in_place = [leaf for leaf in leaves if is_in_place(leaf)]
    if is_followed:
        running.is_followed = True
        running.followed += in_place
    if not in_place:
        pairs = zip(leaves, jax.tree.leaves(params), strict=True)
        running.made_float32 |= any(u.dtype != p.dtype for u, p in pairs)


def _have_arrived(running: _Step, updates: Any, params: Any) -> bool:
    """Whether all followed updates have come through, each for its parameter."""
    leaves = jax.tree.leaves(updates, is_leaf=is_in_place)
    known = {id(param) for param in jax.tree.leaves(params)}
    arrived = {id(u) for u in leaves if is_in_place(u) and id(u._old) in known}
    return all(id(update) in arrived for update in running.followed)


_LEFT_BEHIND = (
    "state.master, state.ema and state.compute follow the updates as fused_adamw made "
    "them: make it the last transformation that changes updates, and give it the "
    "parameters themselves"
)
_FLOAT32_NOTE = (
    "jax_fused_adamw.step: the updates of low-precision parameters that have masters, "
    "or are rounded stochastically, are float32. If this is about the branches of "
    "optax.apply_if_finite, which wants them in the dtype of the gradients: use "
    "fused_adamw(..., skip_nonfinite=True) without it, or float32 gradients"
)


@contextlib.contextmanager
def _stepping(trace: Any) -> Iterator[_Step]:
    running = _Step(trace)
    token = _STEP.set(running)
    try:
        yield running
    except TypeError as error:
        if running.made_float32:
            error.add_note(_FLOAT32_NOTE)
        raise
    finally:
        _STEP.reset(token)


def step(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Updates parameters in place: the fast path, through optax's wrappers.

    Equals ``updates, state = tx.update(grads, state, params, **extra_args)`` and
    ``optax.apply_updates(params, updates)``, except that a ``fused_adamw`` inside
    ``tx`` writes the new parameters itself: with donated arguments that is 28 bytes
    of memory traffic for a float32 parameter instead of 40, and no second kernel a
    leaf. It works bare and through ``optax.chain``, ``masked``, ``multi_transform``
    and ``inject_hyperparams``.

    Leaves that another transformation leaves alone (``optax.set_to_zero`` in a group of
    ``multi_transform``) are in no kernel call and under ``jit`` cost nothing; integer
    ones among them may have the gradients of ``jax.grad(..., allow_int=True)``.

    Where a wrapper hides the new parameters, the result is still right, at the cost
    of the ordinary protocol: a transformation after ours that changes the updates, or
    ``optax.apply_if_finite`` around it. One that cannot take in-place updates at all
    (``optax.ema``, ``add_decayed_weights``, ``lookahead``, ``flatten``) gets plain
    ones, with a warning that says so.

    The state, though, follows the updates as ``fused_adamw`` made them. With
    ``master_weights``, ``compute_dtype`` or ``ema_decay`` ours must therefore be the
    last transformation that changes updates, and must be given the real parameters:
    after ``optax.scale``, or inside ``schedule_free`` or ``lookahead``, masters, copies
    and averages would be of other parameters, and a warning says so. The plain protocol
    cannot know.

    ``optax.apply_if_finite`` around an optimizer with masters or
    ``stochastic_rounding="params"`` needs float32 gradients: it wants updates in their
    dtype, and those of bfloat16 parameters are float32. ``skip_nonfinite=True`` does
    the same without it, for any gradients.

    Args:
      tx: the transformation; ours, or any that contains ours.
      grads: gradients, with the tree of ``params``.
      state: ``tx``'s state. Donate it and ``params`` to the enclosing ``jax.jit``,
        or both are copied first.
      params: the current parameters.
      **extra_args: passed to ``tx.update``: ``skip_update``, ``gradient_scale`` and
        ``report``; of :func:`accumulate`, ``weight`` too.

    Returns:
      The new parameters and the new state.

    Raises:
      ValueError, TypeError: as ``fused_adamw``'s ``update`` does.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jax_fused_adamw as jfa
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), jfa.fused_adamw(1e-3))
      >>> params = {"w": jnp.ones((2, 3))}
      >>> @jax.jit  # in a training loop: jax.jit(..., donate_argnums=(0, 1))
      ... def train_step(params, state):
      ...   grads = jax.grad(lambda p: (p["w"] ** 2).sum())(params)
      ...   return jfa.step(tx, grads, state, params)
      >>> params, state = train_step(params, tx.init(params))
      >>> bool((params["w"] < 1.0).all())
      True
    """
    tx = optax.with_extra_args_support(tx)
    with _stepping(get_opaque_trace_state()) as running:
        try:
            updates, new_state = tx.update(grads, state, params, **extra_args)
            new_params = _apply_updates(params, updates)
            if not _have_arrived(running, updates, params):
                warnings.warn(
                    "jax_fused_adamw.step: a transformation around fused_adamw has "
                    f"changed its updates or its parameters; {_LEFT_BEHIND}",
                    stacklevel=2,
                )
            return new_params, new_state
        except (TypeError, ValueError) as error:
            if not running.made_updates:
                raise
            first_error = error
    # A wrapper may have stumbled over an InPlaceUpdate; any other mistake comes again.
    with _stepping(None) as running:
        updates, new_state = tx.update(grads, state, params, **extra_args)
    warnings.warn(
        "jax_fused_adamw.step: a transformation around fused_adamw cannot take in-place"
        " updates, so this step adds plain ones, which costs one more pass over the "
        f"parameters. It said: {str(first_error).splitlines()[0]}"
        + (f"\nIf it changes updates: {_LEFT_BEHIND}" if running.is_followed else ""),
        stacklevel=2,
    )
    return _apply_updates(params, updates), new_state


def _apply_updates(params: Any, updates: Any) -> Any:
    """optax's, where the gradient of an integer leaf (``float0``) adds nothing."""

    def addable(param: Any, update: Any) -> Any:
        is_float0 = getattr(update, "dtype", None) == jax.dtypes.float0
        return np.zeros((), param.dtype) if is_float0 else update

    updates = jax.tree.map(addable, params, updates, is_leaf=lambda x: x is None)
    return optax.apply_updates(params, updates)
