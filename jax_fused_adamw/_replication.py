"""Which operands may differ between the devices of a shard_map."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.tree_util import tree_leaves_with_path

from jax_fused_adamw._checks import leaf_name, params_with
from jax_fused_adamw._specs import varying_axes


def check_replication(
    params: Any, grads: Any, state: Any, names: Iterable[str], scalars: Any
) -> None:
    """Raises TypeError for operands of a shard_map that would differ in secret.

    A custom call tells JAX nothing of what its results depend on: with a gradient that
    varies over a mesh axis, a parameter declared the same on all devices would silently
    stop being so.
    """
    trees = {"grads": grads} | {name: getattr(state, name) for name in names}
    leaves = jax.tree.leaves((params, trees, scalars))
    if not any(varying_axes(leaf) for leaf in leaves):
        return
    named_params = tree_leaves_with_path(params)
    for kind, tree in trees.items():
        name = kind if kind == "grads" else f"state.{kind}"
        of_params = jax.tree.leaves(params_with(kind, params))
        for (path, leaf), param in zip(tree_leaves_with_path(tree), of_params):
            # A gradient may be the same where its parameter varies; state may not.
            differ = varying_axes(leaf) - varying_axes(param)
            if kind != "grads":
                differ |= varying_axes(param) - varying_axes(leaf)
            if differ:
                raise TypeError(
                    f"fused_adamw: {leaf_name(name, path)} varies over the mesh axes "
                    f"{_axes(leaf)} of this shard_map, its parameter over "
                    f"{_axes(param)}: psum your gradients over {sorted(differ)}, or "
                    "give parameters and state the same in_specs"
                )
    for scalar in jax.tree.leaves(scalars):
        for path, param in named_params:
            if varying_axes(scalar) - varying_axes(param):
                raise TypeError(
                    "fused_adamw: a scalar of the step (skip_update, gradient_scale or "
                    f"a hyperparameter) varies over the mesh axes {_axes(scalar)}, "
                    f"{leaf_name('params', path)} over {_axes(param)}: reduce the "
                    "scalar over them first (psum, pmax)"
                )
    _check_that_counters_agree(scalars)


def _check_that_counters_agree(scalars: Any) -> None:
    """One device that skips alone would go on with a count of its own."""
    names = ("count", "skipped", "consecutive")
    for name, counter in zip(names, (scalars.count, *scalars.skip_counters)):
        for skip in (scalars.skip_update, *scalars.nonfinite):
            differ = tuple(sorted(varying_axes(skip) - varying_axes(counter)))
            if differ:
                raise TypeError(
                    "fused_adamw: what decides whether to skip (skip_update, a report) "
                    f"varies over the mesh axes {_axes(skip)} of this shard_map, "
                    f"state.{name} over {_axes(counter)}: all devices must skip "
                    f"together, jax.lax.pmax(skip_update, {differ}) if any of them does"
                )


def _axes(x: Any) -> str:
    return str(sorted(varying_axes(x)))
