"""Masters and parameters that have come apart, and how to bring them together."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_fused_adamw import _checks
from jax_fused_adamw._shardings import placed_as
from jax_fused_adamw._state import (
    FusedAdamWState,
    beside_params,
    copy,
    map_beside,
    map_states,
    states_in,
)

_SOURCES = {"master": "master", "params": "params"}


def master_mismatch(state: Any, params: Any) -> dict[str, jax.Array]:
    """Counts elements whose float32 value and low-precision copy have come apart.

    After every applied step the one is the other rounded to nearest; after a restore,
    or where something else than the step has written the parameters, it may not be: the
    next step then overwrites them by what the masters say, and the next forward pass
    reads copies of old ones. :func:`resync` mends that.

    Args:
      state: the state of any optax transformation with a ``fused_adamw`` inside that
        has ``master_weights`` or ``compute_dtype``.
      params: the parameters that it belongs to.

    Returns:
      For each parameter with a master or a copy, by its path in ``params``, how many
      elements differ: ``int32[]`` arrays, on the device. NaN equals NaN here, and the
      two zeros are equal.

    Raises:
      ValueError: a state without masters and copies, or one of other parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> params = {"w": jnp.array([1.0, 2.0], jnp.bfloat16)}
      >>> state = jfa.fused_adamw(0.1, master_weights=True).init(params)
      >>> restored = {"w": jnp.array([1.0, 3.0], jnp.bfloat16)}
      >>> counts = jfa.master_mismatch(state, restored)
      >>> {path: int(count) for path, count in counts.items()}
      {"['w']": 1}
    """
    counts: dict[str, jax.Array] = {}

    def count(path: Any, kept: jax.Array, param: jax.Array) -> None:
        lower = min(kept.dtype, param.dtype, key=lambda dtype: dtype.itemsize)
        a, b = kept.astype(lower), placed_as(param, kept).astype(lower)
        is_same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
        counts[jax.tree_util.keystr(path)] = (~is_same).sum(dtype=jnp.int32)

    with _checks.speaking_as("master_mismatch"):
        _check_keeps_some(state, params)
        for ours in states_in(state):
            map_beside("master", count, ours.master, params)
            map_beside("compute", count, ours.compute, params)
    return counts


def resync(state: Any, params: Any, source: str) -> tuple[Any, Any]:
    """Makes masters and parameters agree again, by the one that is right.

    Args:
      state: the state of any optax transformation with a ``fused_adamw`` inside that
        has ``master_weights`` or ``compute_dtype``.
      params: the parameters that it belongs to.
      source: ``"params"`` makes the masters anew from the parameters, and the copies of
        float32 parameters for the forward pass too; nothing else of the state changes.
        ``"master"`` rounds the masters to parameters, and the state stays as it is.

    Returns:
      Parameters and state, in the order of :func:`step`. New arrays share no buffer
      with old ones, and lie where what they replace does (ZeRO-1: masters cut,
      parameters whole). Under ``jax.jit`` only a mesh of explicit axes tells where that
      is: with automatic ones, call it outside, or pass ``out_shardings``.

    Raises:
      ValueError: another ``source``, a state with nothing to make, or one of other
        parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> params = {"w": jnp.array([1.0, 2.0], jnp.bfloat16)}
      >>> state = jfa.fused_adamw(0.1, master_weights=True).init(params)
      >>> changed = {"w": jnp.array([1.0, 3.0], jnp.bfloat16)}
      >>> params, _ = jfa.resync(state, changed, source="master")
      >>> print(params["w"])
      [1 2]
      >>> _, state = jfa.resync(state, changed, source="params")
      >>> print(state.master["w"])
      [1. 3.]

    .. seealso:: :func:`jax_fused_adamw.master_mismatch`
    """
    with _checks.speaking_as("resync"):
        source = _checks.choose("source", source, _SOURCES)
        if source == "master":
            for ours in _states_with_masters(state, params):
                params = beside_params("master", _rounded, ours.master, params)
            return params, state
        _check_keeps_some(state, params)
        return params, map_states(lambda ours: _made_anew(ours, params), state)


def _check_keeps_some(state: Any, params: Any) -> None:
    _checks.check_params(params)
    kept = [(ours.master, ours.compute) for ours in states_in(state)]
    has_options = any(tree is not None for pair in kept for tree in pair)
    if not has_options and jax.tree.leaves(params):
        raise ValueError(
            "fused_adamw: the state holds neither masters nor copies of parameters: "
            "make the optimizer with master_weights=True or compute_dtype"
        )


def _made_anew(ours: FusedAdamWState, params: Any) -> FusedAdamWState:
    def anew(_: Any, old: jax.Array, param: jax.Array) -> jax.Array:
        return copy(placed_as(param, old), old.dtype)

    return ours._replace(
        master=map_beside("master", anew, ours.master, params),
        compute=map_beside("compute", anew, ours.compute, params),
    )


def _rounded(master: jax.Array, param: jax.Array) -> jax.Array:
    return placed_as(master.astype(param.dtype), param)


def _states_with_masters(state: Any, params: Any) -> list[FusedAdamWState]:
    found = [ours for ours in states_in(state) if ours.master is not None]
    if not found and jax.tree.leaves(_checks.params_with("master", params)):
        raise ValueError(
            "fused_adamw: the state holds no masters: make the optimizer with "
            "fused_adamw(..., master_weights=True)"
        )
    return found
