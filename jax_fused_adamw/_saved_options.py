"""Options as a dict that JSON can hold, and what a saved one says of others.

:class:`._transform.FusedAdamW` documents both.
"""

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jax_fused_adamw._leaf_options import is_function
from jax_fused_adamw._options import Options

_VERSION = 2

# What an optimizer did before there was the option.
_OFF = {
    "eps_root": 0.0,
    "mask": None,
    "lr_scale": None,
    "nesterov": False,
    "amsgrad": False,
    "maximize": False,
    "mu_dtype": "float32",
    "nu_dtype": "float32",
    "master_weights": False,
    "stochastic_rounding": False,
    "seed": None,
    "ema_decay": None,
    "compute_dtype": None,
    # Since version 2: statistics.
    "max_grad_norm": None,
    "max_grad_value": None,
    "skip_nonfinite": False,
}
# What a step in float32 reads rounded to float32. Of b1, b2 and ema_decay it reads
# powers and complements, which are taken in float64: 1 - 0.999 and
# 1 - float32(0.999) differ by 1e-5 of their size.
_ROUNDED = {"learning_rate", "eps", "eps_root", "weight_decay"}
_ROUNDED |= {"max_grad_norm", "max_grad_value"}
# A value is also that of all deeper paths.
_FOR_NONE: dict[str, dict[str, Any]] = {"mask": {"": True}, "lr_scale": {"": 1.0}}


def recorded(options: Options) -> dict[str, Any]:
    rounding = "params" if options.stochastic_params else options.stochastic_moments
    limits = {"norm": "max_grad_norm", "value": "max_grad_value"}
    max_grad = {name: None for name in limits.values()}
    if options.clip in limits:
        max_grad[limits[options.clip]] = _number(options.max_grad)
    return {
        "version": _VERSION,
        "learning_rate": _number(options.learning_rate),
        "b1": _number(options.b1),
        "b2": _number(options.b2),
        "eps": _number(options.eps),
        "eps_root": _number(options.eps_root),
        "weight_decay": _number(options.weight_decay),
        "mask": _tree(options.mask, bool),
        "lr_scale": _tree(options.lr_scale, float),
        "nesterov": options.nesterov,
        "amsgrad": options.given_amsgrad,
        "maximize": options.maximize,
        "mu_dtype": options.mu_dtype,
        "nu_dtype": options.nu_dtype,
        "master_weights": options.master_weights,
        "stochastic_rounding": rounding,
        "seed": _number(options.seed, int) if rounding else None,
        "ema_decay": _number(options.ema_decay),
        "compute_dtype": options.compute_dtype,
        **max_grad,
        "skip_nonfinite": options.skip_nonfinite,
    }


def _number(value: Any, kind: type = float) -> Any:
    """A number as JSON has it, or the word for what is none."""
    if value is None:
        return None
    if isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer) or not value.is_fully_addressable:
            return "traced"
    elif callable(value):
        return "schedule"
    value = kind(value)
    return value if math.isfinite(value) else str(value)  # JSON has no infinity


def _tree(tree: Any, kind: type) -> Any:
    """Of a mask or of scales."""
    if tree is None:
        return None
    if is_function(tree):
        return "function"
    paths_and_values = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): kind(x) for path, x in paths_and_values}


def check(
    options: Options, saved: Mapping[str, Any] | None, changed: Iterable[str]
) -> tuple[str, ...]:
    """What could not be compared; raises ValueError for what differs."""
    saved = {"version": 1} if saved is None else _as_dict(saved)
    now = recorded(options)
    changed = (changed,) if isinstance(changed, str) else tuple(changed)
    version = saved.pop("version", None)
    del now["version"]
    # JSON of other writers may say 2.0 for 2; True is no number here.
    is_number = isinstance(version, numbers.Real) and not isinstance(version, bool)
    if not is_number or version not in range(1, _VERSION + 1):
        raise ValueError(
            f"fused_adamw: the saved options have version {version!r}, this release "
            f"knows 1 to {_VERSION}; restore with the release that saved them"
        )
    may_change = now.keys() - {"amsgrad"}  # whose maxima cannot be converted
    for what, names, known in (
        ("the saved options name", saved, now),
        ("changed names", changed, may_change),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(
                f"fused_adamw: {what} {unknown[0]!r}, expected some of {sorted(known)}"
            )
    old = _OFF | saved
    compared = [name for name in now if name in old and name not in changed]
    rounded = _rounded_names(old, now)
    differing = [
        name
        for name in compared
        if not _same(name, old[name], now[name], name in rounded)
        and not _cannot_tell(old[name], now[name])
    ]
    if differing:
        told = [f"{name} was {old[name]!r} and is {now[name]!r}" for name in differing]
        raise ValueError(
            f"fused_adamw: the saved options differ: {'; '.join(told)}. Make the "
            f"optimizer with the saved options{advice_on_changed(differing)}"
        )
    return tuple(
        name
        for name in now
        if name not in changed
        and (name not in old or _cannot_tell(old[name], now[name]))
    )


def advice_on_changed(differing: Iterable[str]) -> str:
    names = set(differing)
    if names == {"amsgrad"}:
        return ", since maxima of one kind cannot be turned into another's"
    never = ", which amsgrad never may" if "amsgrad" in names else ""
    return f", or name in changed= what is meant to differ{never}"


def _as_dict(saved: Any) -> dict[str, Any]:
    if isinstance(saved, Mapping):
        return dict(saved)
    advice = "json.loads makes one of it" if isinstance(saved, (str, bytes)) else ""
    raise TypeError(
        "fused_adamw: the saved options must be a dict, as options() returns, got "
        f"{type(saved).__name__}; {advice or 'pass None where there are none'}"
    )


def _rounded_names(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Of numbers that act as float32 ones."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return set()  # there may be leaves of float64
    # Its product with a scale is rounded, not the learning rate itself.
    scaled = any(options["lr_scale"] is not None for options in (old, new))
    return _ROUNDED - {"learning_rate"} if scaled else _ROUNDED


def _same(name: str, old: Any, new: Any, is_rounded: bool) -> bool:
    if name in _FOR_NONE:
        old, new = (_FOR_NONE[name] if x is None else x for x in (old, new))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            return old == new or (_covers(old, new) and _covers(new, old))
    # JSON of other writers may say 0 for 0.0; True is no number here.
    if isinstance(old, bool) != isinstance(new, bool):
        return False
    if is_rounded and all(isinstance(x, (int, float)) for x in (old, new)):
        with np.errstate(over="ignore"):
            return bool(np.float32(old) == np.float32(new))
    return old == new


def _covers(tree: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the other tree has each value, at its path or above, or only deeper."""
    return all(
        any(_is_below(path, above) and value == other[above] for above in other)
        or any(_is_below(below, path) and below != path for below in other)
        for path, value in tree.items()
    )


def _is_below(path: str, above: str) -> bool:
    rest = path.removeprefix(above) if path.startswith(above) else "no"
    return rest[:1] in ("", "[", ".")  # a key starts there, not half of one


def _cannot_tell(old: Any, new: Any) -> bool:
    """Whether the two may be the same, or not."""
    words = [x for x in (old, new) if isinstance(x, str)]
    if "traced" in words:
        return None not in (old, new)
    if "function" in words:  # of a tree, which another option tells of in paths
        return None not in (old, new)
    return words == ["schedule", "schedule"]
