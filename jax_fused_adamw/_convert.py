"""What the converters of other optimizers' state share."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fused_adamw import _checks
from jax_fused_adamw._options import Options
from jax_fused_adamw._state import (
    FusedAdamWState,
    check_counts,
    check_state,
    copies_of,
    copy,
    init_state,
)


def make_state(
    options: Options, params: Any, count: Any, moments: dict[str, Any]
) -> FusedAdamWState:
    """A state with these moments, in buffers of its own, the rest as ``init`` has it.

    Moments lie where their parameters are committed to, by a sharding or a device.

    Args:
      options: of the optimizer that is to use it.
      params: its parameters.
      count: applied steps.
      moments: the trees ``mu``, ``nu`` and, with AMSGrad, ``nu_max``, of any dtypes.
    """
    _checks.check_params(params)
    dtypes = options.state_dtypes

    def converted(name: str, tree: Any) -> Any:
        _checks.check_same_tree(name, tree, params, "moments of these parameters")
        _checks.check_shapes(name, tree, params)
        return jax.tree.map(
            lambda x, p: _copy_beside(p, x, _checks.state_dtype(dtypes[name], p)),
            tree,
            params,
        )

    state = init_state(options, None)._replace(
        count=copy(count, jnp.int32),
        **copies_of(options, params),
        **{name: converted(name, tree) for name, tree in moments.items()},
    )
    check_state(options, state, params)
    check_counts(state)
    return state


def _copy_beside(param: Any, x: Any, dtype: Any) -> jax.Array:
    """A copy of an array that lies where its parameter is committed to."""
    sharding = None
    if not isinstance(param, jax.core.Tracer) and getattr(param, "committed", True):
        sharding = getattr(param, "sharding", None)
    if isinstance(x, jax.Array):
        new = copy(x, dtype)
        return new if sharding is None else jax.device_put(new, sharding)
    # From the host shard by shard: no device need hold it whole. One array after the
    # other: each has one more copy on its way.
    return jax.block_until_ready(jax.device_put(np.array(x, dtype), sharding))


def tell_what_stays(name: str, state: FusedAdamWState) -> None:
    """Warns of what the other optimizer has no place for, where it is not derived."""
    left = [x for x in ("master", "ema") if jax.tree.leaves(getattr(state, x))]
    if left:
        warnings.warn(
            f"{name}: leaves behind {' and '.join(f'state.{x}' for x in left)}, which "
            "the other optimizer has no place for",
            stacklevel=3,
        )
