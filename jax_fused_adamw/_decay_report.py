"""Which parameters decay, and at what learning rate, as an optimizer is told."""

import contextvars
import math
import numbers
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import tree_leaves_with_path

from jax_fused_adamw._checks import leaf_name
from jax_fused_adamw._leaf_options import resolve_lr_scale, resolve_mask
from jax_fused_adamw._options import Options


class DecayReport(NamedTuple):
    """Leaves by their paths, as :func:`decay_report` finds them; prints as a table.

    Attributes:
      decayed: leaves to which weight decay applies: as it is multiplied by the
        learning rate, those of ``lr_scale`` 0 are not among them.
      not_decayed: leaves that ``fused_adamw`` updates without one.
      others: leaves that no ``fused_adamw`` updates.
      lr_scales: of each leaf of the first two, what multiplies its learning rate.
      num_parameters: of each leaf, its elements.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jfa.fused_adamw(1e-3, mask={"w": True, "b": False})
      >>> print(jfa.decay_report(tx, params))
      leaf         parameters  decays  lr_scale
      params['b']           2  no      1
      params['w']           6  yes     1
      decayed: 1 of 2 leaves, 6 parameters
      not_decayed: 1 of 2 leaves, 2 parameters
      others: 0 of 2 leaves, 0 parameters
    """

    decayed: tuple[str, ...]
    not_decayed: tuple[str, ...]
    others: tuple[str, ...]
    lr_scales: dict[str, float]
    num_parameters: dict[str, int]

    def __str__(self) -> str:
        decayed = set(self.decayed)
        rows = [("leaf", "parameters", "decays", "lr_scale")]
        for name, size in self.num_parameters.items():
            told = ("-", "-")
            if name in self.lr_scales:
                decays = "yes" if name in decayed else "no"
                told = (decays, f"{self.lr_scales[name]:g}")
            rows.append((name, f"{size:,}", *told))
        width, digits = (max(len(row[i]) for row in rows) for i in range(2))
        lines = [
            f"{name:<{width}}  {size:>{digits}}  {decays:<6}  {scale}"
            for name, size, decays, scale in rows
        ]
        for kind in ("decayed", "not_decayed", "others"):
            names = getattr(self, kind)
            total = sum(self.num_parameters[name] for name in names)
            of_all = f"{len(names)} of {len(self.num_parameters)} leaves"
            lines.append(f"{kind}: {of_all}, {total:,} parameters")
        return "\n".join(lines)


class _Told(NamedTuple):
    """What one ``fused_adamw`` inside the optimizer is told of a leaf."""

    shape: tuple[int, ...]
    decays: bool
    lr_scale: float


# Of each fused_adamw that an init has come to, its leaves by name.
_Calls = list[dict[str, _Told]]

_RUNNING: contextvars.ContextVar[_Calls | None] = contextvars.ContextVar(
    "jax_fused_adamw_decay_report", default=None
)


def tell_decay_report(options: Options, params: Any) -> None:
    """Tells a running :func:`decay_report` of an ``init`` with these parameters."""
    running = _RUNNING.get()
    if running is None:
        return
    factors = (options.weight_decay, options.learning_rate)
    has_decay = not any(map(_is_zero, factors))
    columns = (
        tree_leaves_with_path(params),
        resolve_mask(options.mask, params),
        resolve_lr_scale(options.lr_scale, params),
    )
    running.append(
        {
            leaf_name("params", path): _Told(
                leaf.shape, decays and has_decay and lr_scale != 0.0, lr_scale
            )
            for (path, leaf), decays, lr_scale in zip(*columns, strict=True)
        }
    )


def _is_zero(hyperparameter: Any) -> bool:
    """Whether the host sees that it is, and for every step."""
    if isinstance(hyperparameter, jax.Array):
        is_traced = isinstance(hyperparameter, jax.core.Tracer)
        if is_traced or not hyperparameter.is_fully_addressable:
            return False
    elif callable(hyperparameter):
        return False
    return float(hyperparameter) == 0.0


def decay_report(tx: Any, params: Any) -> DecayReport:
    """Which leaves decay, which do not, and what scales their learning rate.

    Found by what ``tx.init`` makes of the shapes of the parameters; nothing is
    computed or allocated. So it works for any optax transformation around
    ``fused_adamw`` that gives it leaves under their own paths: ``chain``, ``masked``,
    ``multi_transform``, ``inject_hyperparams``, :func:`accumulate`. A ``weight_decay``
    or ``learning_rate`` that is an array in there (``inject_hyperparams``), and a
    schedule, count as not zero.

    Args:
      tx: ``fused_adamw``, or a transformation with one or more inside.
      params: a tree of arrays or of ``jax.ShapeDtypeStruct``.

    Returns:
      A :class:`DecayReport`; ``print`` shows it leaf by leaf.

    Raises:
      ValueError: there is no ``fused_adamw`` inside, two of them update the same leaf,
        or it is given other leaves than ``params`` has (``optax.flatten``); a ``mask``
        or ``lr_scale`` that does not suit the parameters.
      TypeError: a leaf that ``fused_adamw`` cannot hold, a wrong ``mask`` or
        ``lr_scale``, a ``tx`` that is no transformation.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> params = {"w": jnp.zeros((30, 50)), "b": jnp.zeros(50)}
      >>> mask, scales = {"w": True, "b": False}, {"w": 1, "b": 2}
      >>> tx = jfa.fused_adamw(1e-3, mask=mask, lr_scale=scales)
      >>> print(jfa.decay_report(tx, params))
      leaf         parameters  decays  lr_scale
      params['b']          50  no      2
      params['w']       1,500  yes     1
      decayed: 1 of 2 leaves, 1,500 parameters
      not_decayed: 1 of 2 leaves, 50 parameters
      others: 0 of 2 leaves, 0 parameters
    """
    if not callable(getattr(tx, "init", None)):
        raise TypeError(
            "decay_report: expected an optax transformation as tx, got "
            f"{type(tx).__name__}; call decay_report(tx, params)"
        )
    shapes = {
        leaf_name("params", path): _shape(path, leaf)
        for path, leaf in tree_leaves_with_path(params)
    }
    told: dict[str, _Told] = {}
    for leaves in _ask(tx, params):
        for name, of_leaf in leaves.items():
            if shapes.get(name) != of_leaf.shape:
                raise ValueError(
                    "decay_report: a transformation around fused_adamw gives it a leaf "
                    f"{name} of shape {of_leaf.shape}, which params does not have: ask "
                    "for the report of the fused_adamw inside, with the tree that it "
                    "is given"
                )
            if name in told:
                raise ValueError(
                    f"decay_report: more than one fused_adamw updates {name}: ask for "
                    "the report of each"
                )
            told[name] = of_leaf
    return DecayReport(
        decayed=tuple(x for x in shapes if x in told and told[x].decays),
        not_decayed=tuple(x for x in shapes if x in told and not told[x].decays),
        others=tuple(x for x in shapes if x not in told),
        lr_scales={x: told[x].lr_scale for x in shapes if x in told},
        num_parameters={name: math.prod(shape) for name, shape in shapes.items()},
    )


def _shape(path: Any, leaf: Any) -> tuple[int, ...]:
    if not hasattr(leaf, "shape") and not isinstance(leaf, numbers.Number):
        raise TypeError(
            f"decay_report: {leaf_name('params', path)} is of type "
            f"{type(leaf).__name__}, expected an array or a jax.ShapeDtypeStruct; of a "
            "module of Equinox pass eqx.filter(module, eqx.is_inexact_array)"
        )
    return np.shape(leaf)


def _ask(tx: Any, params: Any) -> _Calls:
    calls: _Calls = []
    token = _RUNNING.set(calls)
    try:
        # A new function, of which JAX has kept no shapes.
        jax.eval_shape(lambda params: tx.init(params), params)
    finally:
        _RUNNING.reset(token)
    if not calls:
        raise ValueError(
            f"decay_report: the init of {type(tx).__name__} comes to no fused_adamw; "
            "pass the optimizer itself, not a transformation that makes one later"
        )
    return calls
