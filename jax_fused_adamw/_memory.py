"""What an optimizer step holds in memory, before anything is allocated."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_fused_adamw import _checks
from jax_fused_adamw._alias import fused_adamw
from jax_fused_adamw._options import options_of
from jax_fused_adamw._primitives import LEAF_DTYPES_X64
from jax_fused_adamw._shardings import state_shardings


class MemoryEstimate(NamedTuple):
    """Bytes on each device, as :func:`memory_estimate` counts them.

    Attributes:
      params: of the parameters.
      grads: of their gradients.
      state: of the optimizer's state.
      donated_step: peak of a step that is given its old parameters and state.
      kept_step: peak of a step whose caller keeps them.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> estimate = jfa.memory_estimate({"w": jnp.ones(1000)})
      >>> estimate.params, estimate.donated_step, estimate.kept_step
      (4000, 16012, 28024)
    """

    params: int
    grads: int
    state: int
    donated_step: int
    kept_step: int


def memory_estimate(
    params: Any, *, grad_dtype: Any = None, **options: Any
) -> MemoryEstimate:
    r"""Bytes of parameters, gradients and state, and of a step at its peak.

    With :math:`P`, :math:`G` and :math:`S` the bytes of ``params``, of their gradients
    and of the state of ``fused_adamw(**options)``, a donated step holds
    :math:`P + G + S`, and one without donation the new parameters and state too,
    :math:`2P + G + 2S`. Activations, and what a train step holds besides, are not in
    it; XLA adds a few KB of its own, and the statistics of a clip 12 bytes for each
    4,096 gradients, which are left out.

    Args:
      params: a tree of arrays or of ``jax.ShapeDtypeStruct``. A leaf with a sharding
        counts as much as a device holds of it.
      grad_dtype: of all gradients; by default each has that of what the loss was given:
        the parameter, or with ``compute_dtype`` the copy of a float32 one.
      **options: of :func:`fused_adamw`, as far as they matter here: ``amsgrad``,
        ``mu_dtype``, ``nu_dtype``, ``master_weights``, ``ema_decay``,
        ``compute_dtype``.

    Returns:
      A :class:`MemoryEstimate`.

    Raises:
      TypeError, ValueError: a leaf that :func:`fused_adamw` does not take, named by its
        path, a ``grad_dtype`` that it does not take, or an unknown option.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> params = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
      >>> estimate = jfa.memory_estimate(params)
      >>> estimate.params, estimate.grads, estimate.state
      (4000000, 4000000, 8000012)

      With moments in bfloat16:

      >>> low = dict(mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16)
      >>> jfa.memory_estimate(params, **low).state
      4000012
    """
    with _checks.speaking_as("memory_estimate"):
        _checks.check_params(params)
        dtypes = tuple(np.dtype(x).name for x in LEAF_DTYPES_X64)
        grad_dtype = _checks.dtype_name("grad_dtype", grad_dtype, dtypes)
    tx = fused_adamw(**{"learning_rate": 0.0, **options})
    params = jax.tree.map(_placed, params)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    compute_dtype = options_of(tx).compute_dtype

    def grad_of(param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_float32 = np.dtype(param.dtype) == np.float32
        dtype = compute_dtype if is_float32 and compute_dtype else param.dtype
        return param.update(dtype=grad_dtype or dtype)

    grads = jax.tree.map(grad_of, params)
    of_params, of_grads = _num_bytes(params, shardings), _num_bytes(grads, shardings)
    of_state = _num_bytes(jax.eval_shape(tx.init, params), state_shardings(tx, params))
    donated = of_params + of_grads + of_state
    return MemoryEstimate(
        of_params, of_grads, of_state, donated, donated + of_params + of_state
    )


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf that says where it lies: on one device if it did not."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _num_bytes(tree: Any, shardings: Any) -> int:
    """Of what one device holds; without parameters, nothing says where that is."""

    def num_bytes(x, sharding) -> int:
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * np.dtype(x.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(num_bytes, tree, shardings)))
