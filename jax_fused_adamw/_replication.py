"""Which operands may differ between the devices of a shard_map."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.tree_util import tree_leaves_with_path

from jax_fused_adamw._checks import leaf_name, params_with
from jax_fused_adamw._specs import ordered_axes, varying_axes


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
                    f"{ordered_axes(leaf)} of this shard_map, its parameter over "
                    f"{ordered_axes(param)}: psum your gradients over "
                    f"{sorted(differ)}, or give parameters and state the same in_specs"
                )
    for scalar in jax.tree.leaves(scalars):
        for path, param in named_params:
            if varying_axes(scalar) - varying_axes(param):
                raise TypeError(
                    "fused_adamw: a scalar of the step (skip_update, gradient_scale or "
                    "a hyperparameter) varies over the mesh axes "
                    f"{ordered_axes(scalar)}, {leaf_name('params', path)} over "
                    f"{ordered_axes(param)}: reduce the scalar over them first (psum, "
                    "pmax)"
                )
    decisions = (scalars.skip_update, *scalars.nonfinite)
    counters = (scalars.count, *scalars.skip_counters)
    check_skips(
        dict(zip(("skip_update", "report"), decisions)),
        dict(zip(("count", "skipped", "consecutive"), counters)),
    )


def check_skips(decisions: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
    """Raises TypeError where devices that share a counter decide apart to skip."""
    for name, decision in decisions.items():
        for counter, count in counters.items():
            differ = tuple(sorted(varying_axes(decision) - varying_axes(count)))
            if differ:
                raise TypeError(
                    f"fused_adamw: {name} varies over the mesh axes "
                    f"{ordered_axes(decision)} of this shard_map, state.{counter} over "
                    f"{ordered_axes(count)}, and one device would skip alone: make it "
                    f"one for all, as jax.lax.pmax(skip_update, {differ}) is, or, "
                    f"where each device trains a model of its own, let state.{counter} "
                    f"vary too: jax.lax.pcast(x, {differ}, to='varying')"
                )
