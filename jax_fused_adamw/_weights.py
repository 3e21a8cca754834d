"""What a call updates for each parameter, and what becomes of its results.

A parameter is updated directly, or is itself the rounded copy that the call writes of
its float32 master; a float32 parameter may have a low-precision copy for the next
forward pass; a float64 one has neither, and calls of its own. A parameter that the
call has written although the caller wants updates gets its update as a difference of
float32: no difference of low precision would lead to every value.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fused_adamw._in_place import InPlaceUpdate, difference
from jax_fused_adamw._operands import Buffers, Results
from jax_fused_adamw._options import Options
from jax_fused_adamw._shardings import placed_as
from jax_fused_adamw._state import FusedAdamWState

_FLOAT64 = {
    "mu_dtype": "float64",
    "nu_dtype": "float64",
    "stochastic_moments": False,
    "stochastic_params": False,
}


class LeafPlan(NamedTuple):
    """How one parameter is updated."""

    is_float64: bool  # and then all of its state
    has_master: bool
    has_compute: bool  # a copy in state.compute
    wants_params: bool  # what the caller wants: new parameters or updates
    writes_params: bool  # what the call returns

    @classmethod
    def of(cls, options: Options, param: Any, wants_params: bool) -> "LeafPlan":
        dtype = np.dtype(param.dtype)
        has_master = options.master_weights and dtype.itemsize < 4
        is_float32 = dtype == np.float32
        return cls(
            is_float64=dtype == np.float64,
            has_master=has_master,
            has_compute=options.compute_dtype is not None and is_float32,
            wants_params=wants_params,
            writes_params=wants_params
            or has_master
            or (options.stochastic_params and dtype == jnp.bfloat16),
        )

    @property
    def has_copy(self) -> bool:
        """Whether the call writes a copy; one of updates cannot."""
        return self.has_master or self.has_compute and self.writes_params

    @property
    def changes(self) -> dict[str, Any]:
        """In what the call differs from one that only does what the caller wants."""
        if self.is_float64:
            return _FLOAT64
        wanted = {"has_copies": False, "write_params": self.wants_params}
        does = {"has_copies": self.has_copy, "write_params": self.writes_params}
        return {} if does == wanted else does


def in_place_update(options: Options, param: jax.Array, new: jax.Array) -> Any:
    """The update of a parameter that the caller has been promised in place."""
    of_update = LeafPlan.of(options, param, wants_params=False)
    dtype = jnp.float32 if of_update.writes_params else param.dtype
    return InPlaceUpdate(param, new, dtype)


def make_buffers(
    plans: Sequence[LeafPlan], params: Any, grads: Any, state: FusedAdamWState
) -> Buffers:
    leaves = jax.tree.leaves
    masters, computes = iter(leaves(state.master)), iter(leaves(state.compute))
    updated, copies = [], []
    for plan, param in zip(plans, leaves(params), strict=True):
        compute = next(computes) if plan.has_compute else None
        updated.append(next(masters) if plan.has_master else param)
        copies.append(param if plan.has_master else compute if plan.has_copy else None)
    if not any(plan.has_copy for plan in plans):
        copies = []
    mu, nu, nu_max = map(leaves, (state.mu, state.nu, state.nu_max))
    return Buffers(updated, leaves(grads), mu, nu, nu_max, copies, leaves(state.ema))


class NewWeights(NamedTuple):
    """Leaves of the whole tree: what the caller gets, and what the state keeps."""

    out: list[Any]
    master: list[Any]
    compute: list[Any]


def new_weights(
    plans: Sequence[LeafPlan], params: Any, state: FusedAdamWState, results: Results
) -> NewWeights:
    """Sorts the results of a step; ``params`` and ``state`` are the old ones."""
    _, _, consecutive = results.counters
    new = NewWeights([], [], [])
    copies = results.copies or [None] * len(plans)
    old_copies = iter(jax.tree.leaves(state.compute))
    leaves = jax.tree.leaves(params)
    for plan, param, out, copy in zip(plans, leaves, results.out, copies, strict=True):
        if plan.has_master:
            new.master.append(out)
            out = copy
        if plan.has_compute:
            old_copy = next(old_copies)
            if not plan.has_copy:
                # As optax.apply_updates will have it, and in the same pass of XLA's.
                copy = (param + out).astype(old_copy.dtype)
                copy = placed_as(copy, old_copy)
                copy = jnp.where(consecutive != 0, old_copy, copy)
            new.compute.append(copy)
        if plan.writes_params and not plan.wants_params:
            out = difference(param, out, jnp.float32)
        new.out.append(out)
    return new
