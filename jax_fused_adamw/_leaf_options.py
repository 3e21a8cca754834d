"""Options of each leaf: which ones decay, and what scales their learning rate.

Both are static: a tree of Python values, a prefix of the parameters' tree, or a
callable that makes either from the parameters.
"""

import numbers
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import tree_leaves_with_path

from jax_fused_adamw import _checks
from jax_fused_adamw._checks import leaf_name
from jax_fused_adamw._hyperparams import to_float
from jax_fused_adamw._options import Options
from jax_fused_adamw._shardings import is_empty

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def is_function(option: Any) -> bool:
    """Whether a mask or lr_scale is called with the parameters, by optax's rule.

    A module of Equinox is a tree that can be called: as a mask it is the tree.
    """
    leaves = jax.tree.leaves(option)
    return callable(option) and bool(leaves) and all(map(callable, leaves))


def check_mask_values(tree: Any) -> None:
    """Raises TypeError unless every leaf of a mask is a Python bool."""
    for path, value in tree_leaves_with_path(tree):
        name = leaf_name("mask", path)
        if isinstance(value, (jax.Array, np.ndarray)):
            raise TypeError(
                f"fused_adamw: {name} must be static and is an array, expected a "
                "Python or NumPy bool: bool(x) makes one outside of jit. "
                f"{_checks.static_advice('mask')}"
            )
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"fused_adamw: {name} must be a Python bool, got {value!r}")


def check_lr_scale_values(tree: Any) -> None:
    """Raises unless every leaf is a number that can multiply a learning rate."""
    for path, value in tree_leaves_with_path(tree):
        name = leaf_name("lr_scale", path)
        if isinstance(value, (jax.Array, np.ndarray)):
            raise TypeError(
                f"fused_adamw: {name} is an array, expected a Python or NumPy number: "
                "float(x) makes one outside of jit. A scale that changes from step to "
                "step belongs in the learning_rate of a group of optax.multi_transform."
                f" {_checks.static_advice('lr_scale')}"
            )
        is_bool = isinstance(value, (bool, np.bool_))
        if is_bool or not isinstance(value, numbers.Real):
            advice = "; a selection of leaves is a mask" if is_bool else ""
            raise TypeError(
                f"fused_adamw: {name} must be a real number, got {value!r} of type "
                f"{type(value).__name__}{advice}"
            )
        # As a float: in float16 the largest of float32 is infinite, too.
        if not 0 <= to_float(value) <= _FLOAT32_MAX:
            raise ValueError(
                f"fused_adamw: {name} must be a scale >= 0 and finite in float32, got "
                f"{value!r}"
            )


def check_leaf_options(options: Options, params: Any) -> None:
    """Raises unless trees given as mask or lr_scale suit the parameters.

    Functions wait for the step: Flax nnx gives ``init`` its variables and ``update``
    their arrays, and a function may know the paths of one only.
    """
    if not jax.tree.leaves(params):  # optax.tree.map_params asks with a placeholder
        return
    if not is_function(options.mask):
        resolve_mask(options.mask, params)
    if not is_function(options.lr_scale):
        scales = resolve_lr_scale(options.lr_scale, params)
        if not callable(options.learning_rate):
            check_scaled_rates(options.learning_rate, scales, params)


def check_scaled_rates(rate: Any, scales: Iterable[float], params: Any) -> None:
    """Raises ValueError where the host sees that a leaf's own rate is infinite."""
    if isinstance(rate, jax.Array):
        return
    rate = float(rate)
    for (path, _), scale in zip(tree_leaves_with_path(params), scales, strict=True):
        if abs(rate * scale) > _FLOAT32_MAX:
            raise ValueError(
                f"fused_adamw: lr_scale of {leaf_name('params', path)} is {scale:g}, "
                f"which makes the learning rate {rate:g} infinite in float32; expected "
                "a finite product"
            )


def resolve_mask(mask: Any, params: Any) -> tuple[bool, ...]:
    """For each leaf of params, whether it decays; for None, all do."""
    if mask is None:
        return (True,) * len(jax.tree.leaves(params))
    values = _of_leaves("mask", mask, params, check_mask_values)
    return tuple(map(bool, values))


def resolve_lr_scale(lr_scale: Any, params: Any) -> tuple[float, ...]:
    """For each leaf of params a factor; for None, ones."""
    if lr_scale is None:
        return (1.0,) * len(jax.tree.leaves(params))
    values = _of_leaves("lr_scale", lr_scale, params, check_lr_scale_values)
    return tuple(map(float, values))


def _of_leaves(
    name: str, option: Any, params: Any, check: Callable[[Any], None]
) -> list[Any]:
    """One checked value a leaf of params."""
    tree = _called(name, option, params) if is_function(option) else option
    check(tree)
    paths_and_values, treedef = _flatten(tree, params)
    try:
        subtrees = treedef.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(
            f"fused_adamw: the tree of {name} is not a prefix of the parameters' tree: "
            f"{_first_difference(name, tree, params)}. Give every leaf, or every "
            "subtree, of params one value"
        ) from error
    pairs = zip(paths_and_values, subtrees, strict=True)
    return [value for (_, value), subtree in pairs for _ in jax.tree.leaves(subtree)]


def _called(name: str, function: Callable[[Any], Any], params: Any) -> Any:
    try:
        return function(params)
    except TypeError as error:  # of a schedule, which is no such function
        raise TypeError(
            f"fused_adamw: {name} is a function that fails with the parameters "
            f"({error}); expected one of the parameters that returns their tree, or a "
            "prefix, of Python values. A schedule, which is called with a count, is a "
            "learning_rate: optax.multi_transform gives groups their own"
        ) from error


def _flatten(tree: Any, params: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Paths and values, and the tree's structure, no deeper than params has leaves.

    A group of ``optax.multi_transform`` is given one ``MaskedNode`` in the place of all
    that is another's, of which a tree for the whole model has values.
    """
    others = {
        path
        for path, param in tree_leaves_with_path(params, is_leaf=is_empty)
        if is_empty(param)
    }
    return jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda path, _: path in others, is_leaf_takes_path=True
    )


def _first_difference(name: str, tree: Any, params: Any) -> str:
    values = {path for path, _ in _flatten(tree, params)[0]}
    expected = tree_leaves_with_path(params, is_leaf=is_empty)
    known = {path[:i] for path, _ in expected for i in range(len(path) + 1)}
    for path in sorted(values - known, key=str):
        return f"{leaf_name(name, path)} has no counterpart in params"
    for path, param in expected:
        if values.isdisjoint(path[:i] for i in range(len(path) + 1)):
            advice = ""
            if isinstance(param, optax.MaskedNode):
                advice = (
                    ", which is another group's: in a group of optax.multi_transform "
                    "it is the tree of the whole model"
                )
            return f"it has no value for {leaf_name('params', path)}{advice}"
    return _checks.container_difference(name, tree, params)
