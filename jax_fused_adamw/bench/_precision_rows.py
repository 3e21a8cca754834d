"""The rows with a state of another kind: bfloat16 moments, copies, master, average.

``--rows`` names them; without it only the rows with two float32 moments are measured.
optax has no stochastic rounding and no bfloat16 second moment, so that ``optax.adamw,
bf16 mu`` is the nearest that it has to our ``step, bf16 moments``. An average and
copies of the new parameters are what XLA makes of them in the same program. PyTorch's
moments have the dtype of their parameters, so that it has no row here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._problem import (
    EMA_DECAY,
    Kept,
    Numbers,
    Problem,
    Row,
    fused_bytes,
)
from jax_fused_adamw.bench._rows import (
    JaxStepper,
    build_optax,
    build_step,
    fused,
    require_kernel,
)

# From a bfloat16 to the next it is at most 2^-7 of it. Stochastic rounding may take
# either neighbour, other rounding takes the nearer one.
_STOCHASTIC, _NEAREST = 2.0**-7, 2.0**-8
# optax's product of b1 and a bfloat16 moment is one of bfloat16: b1 becomes 0.8984, and
# the product is rounded. XLA may leave either out.
_PRODUCT = 2.0**-9 + _NEAREST


def _build_master(problem: Problem) -> JaxStepper:
    require_kernel()
    tx = fused(problem, master_weights=True)
    return MasterStepper(problem, tx, lambda p, s, g: jfa.step(tx, g, s, p))


class MasterStepper(JaxStepper):
    """bfloat16 parameters, copies of a float32 master; see ``Stepper``."""

    def _start_state(self, numbers: Numbers) -> Any:
        self._params = [param.astype(jnp.bfloat16) for param in numbers.params]
        return optax.tree.set(super()._start_state(numbers), master=numbers.params)

    def numbers(self) -> Numbers:
        master = optax.tree.get(self._state, "master")
        return super().numbers()._replace(params=master, compute=self._params)


class KeptState(NamedTuple):
    """State of :func:`keep`."""

    inner: Any
    ema: Any = None
    compute: Any = None


def keep(
    tx: optax.GradientTransformation, ema: bool = False, copies: bool = False
) -> optax.GradientTransformation:
    """Keeps an average or bfloat16 copies of the new parameters in the state."""

    def copy(params):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def init(params):
        average = jax.tree.map(jnp.zeros_like, params) if ema else None
        return KeptState(tx.init(params), average, copy(params) if copies else None)

    def update(grads, state, params):
        updates, inner = tx.update(grads, state.inner, params)
        new = optax.apply_updates(params, updates)
        state = state._replace(inner=inner)
        if ema:
            state = state._replace(ema=jax.tree.map(_average, state.ema, new))
        if copies:
            state = state._replace(compute=copy(new))
        return updates, state

    return optax.GradientTransformation(init, update)


def _average(ema: jax.Array, param: jax.Array) -> jax.Array:
    return EMA_DECAY * ema + (1 - EMA_DECAY) * param


def _build_kept(**kept: bool) -> Callable[[Problem], JaxStepper]:
    return functools.partial(build_optax, wrap=functools.partial(keep, **kept))


def _bf16_moments_bytes(problem: Problem) -> int:
    """Each moment, AMSGrad's maximum too, is two bytes shorter, twice: 20."""
    return fused_bytes(problem) - 4 * (3 if problem.amsgrad else 2)


def _bf16_mu_bytes(problem: Problem) -> int:
    return fused_bytes(problem) - 4


def _copy_bytes(problem: Problem) -> int:
    """Writes two bytes more: 30. A master moves as the parameters would."""
    return fused_bytes(problem) + 2


def _ema_bytes(problem: Problem) -> int:
    """Reads and writes another float32: 36."""
    return fused_bytes(problem) + 8


PRECISION_ROWS = (
    Row(
        "step, bf16 moments",
        functools.partial(build_step, mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16),
        _bf16_moments_bytes,
        ours=True,
        peer="optax.adamw, bf16 mu",
        kept=Kept(mu_error=_STOCHASTIC, nu_error=_STOCHASTIC),
    ),
    Row(
        "step, bf16 copy",
        functools.partial(build_step, compute_dtype=jnp.bfloat16),
        _copy_bytes,
        ours=True,
        peer="optax.adamw, bf16 copy",
        kept=Kept(copies=True),
    ),
    Row(
        "step, master",
        _build_master,
        _copy_bytes,
        ours=True,
        peer="optax.adamw, bf16 copy",
        kept=Kept(copies=True),
    ),
    Row(
        "step+ema",
        functools.partial(build_step, ema_decay=EMA_DECAY),
        _ema_bytes,
        ours=True,
        peer="optax.adamw+ema",
        kept=Kept(ema=True),
    ),
    Row(
        "optax.adamw, bf16 mu",
        functools.partial(build_optax, mu_dtype=jnp.bfloat16),
        _bf16_mu_bytes,
        optax_amsgrad=True,
        peer="optax.adamw, bf16 mu",
        kept=Kept(mu_error=_NEAREST, product_error=_PRODUCT),
    ),
    Row(
        "optax.adamw, bf16 copy",
        _build_kept(copies=True),
        _copy_bytes,
        optax_amsgrad=True,
        peer="optax.adamw, bf16 copy",
        kept=Kept(copies=True),
    ),
    Row(
        "optax.adamw+ema",
        _build_kept(ema=True),
        _ema_bytes,
        optax_amsgrad=True,
        peer="optax.adamw+ema",
        kept=Kept(ema=True),
    ),
)
