"""Options as a dict that JSON can hold, and what a saved one says of others.

:class:`._transform.FusedAdamW` documents both.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

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
_AMSGRAD = {"off": False, "uncorrected": True, "corrected": "optax"}


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
        "amsgrad": _AMSGRAD[options.amsgrad],
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
    now, saved = recorded(options), {"version": 1} if saved is None else dict(saved)
    changed = (changed,) if isinstance(changed, str) else tuple(changed)
    version = saved.pop("version", None)
    del now["version"]
    if not isinstance(version, int) or not 1 <= version <= _VERSION:
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
    differing = [name for name in compared if _differ(old[name], now[name])]
    if differing:
        told = [f"{name} was {old[name]!r} and is {now[name]!r}" for name in differing]
        raise ValueError(
            f"fused_adamw: the saved options differ: {'; '.join(told)}. Make the "
            "optimizer with the saved options, or name in changed= what is meant to "
            "differ"
        )
    return tuple(
        name
        for name in now
        if name not in changed
        and (name not in old or _cannot_tell(old[name], now[name]))
    )


def _differ(old: Any, new: Any) -> bool:
    return not _same(old, new) and not _cannot_tell(old, new)


def _same(old: Any, new: Any) -> bool:
    # JSON of other writers may say 0 for 0.0; True is no number here.
    return old == new and isinstance(old, bool) == isinstance(new, bool)


def _cannot_tell(old: Any, new: Any) -> bool:
    """Whether the two may be the same, or not."""
    words = [x for x in (old, new) if isinstance(x, str)]
    if "traced" in words:
        return None not in (old, new)
    if "function" in words:  # of a tree, which another option tells of in paths
        return None not in (old, new)
    return words == ["schedule", "schedule"]
