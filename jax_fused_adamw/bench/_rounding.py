"""How far rounding moments to bfloat16 may carry a step, element by element.

A running error analysis: beside the reference's exact steps go bounds of how far each
number of a row can be, in which every stored moment is off by the row's relative error
and every step passes on what came before. No step may exceed them, whatever the noise
of a stochastic rounding. So an element with a small first moment and a large second one
has a narrow bound, and there a decay that is missing shows; a bound for all elements
at once would be the widest of them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._check import (
    amsgrad_rule,
    collect,
    leaves_of,
    reference_state,
)
from jax_fused_adamw.bench._problem import (
    B1,
    B2,
    EPS,
    LEARNING_RATE,
    Blocked,
    Kept,
    Numbers,
    Problem,
)

# The second moment forgets in 1,000 steps, so its errors all but add up. Where they may
# reach half of it, the bound of the square root is of little use.
_LARGEST_ERROR = 0.5


def rounding_bounds(
    problem: Problem, steps: int, optax_amsgrad: bool, kept: Kept
) -> Numbers | None:
    """How far each number may be from that of the reference; None for float32 moments.

    Args:
      problem: where to start, with the gradients.
      steps: how many.
      optax_amsgrad: with AMSGrad, whether the rule is that of ``optax.amsgrad``.
      kept: with the errors of a stored moment.

    Raises:
      Blocked: more steps than there is a bound for.
    """
    if not (kept.mu_error or kept.nu_error):
        return None
    if steps * kept.nu_error >= _LARGEST_ERROR:
        raise Blocked(
            "it can be checked for less than "
            f"{_LARGEST_ERROR / kept.nu_error:.0f} steps of a batch: choose fewer "
            "--iterations"
        )
    amsgrad = amsgrad_rule(problem, optax_amsgrad)
    start = kept.rounded(problem.start())
    pairs = zip(leaves_of(start), problem.grads, strict=True)
    return collect([_bounds(amsgrad, kept, *pair, steps) for pair in pairs])


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _bounds(amsgrad, kept, leaf, grad, steps):
    tx, state = reference_state(amsgrad, leaf)

    def body(_, carry):
        param, old, bounds = carry
        param, new = jfa.step(tx, grad, old, param)
        product = _rounded(B1 * bounds.mu, B1 * old.mu, kept.product_error)
        bounds = bounds._replace(mu=product, nu=B2 * bounds.nu)
        return param, new, _after_update(bounds, new, amsgrad, kept)

    zero = jnp.zeros_like(leaf.params)
    bounds = Numbers(zero, zero, zero, zero if amsgrad else None, None, None)
    return lax.fori_loop(0, steps, body, (leaf.params, state, bounds))[-1]


def _after_update(
    bounds: Numbers, state: jfa.FusedAdamWState, amsgrad: bool | str, kept: Kept
) -> Numbers:
    """The bounds after a step whose exact end is ``state``.

    Args:
      bounds: of the old parameters, and of the new moments before they are rounded.
      state: of the reference.
      amsgrad: of :func:`amsgrad_rule`.
      kept: with the errors of a stored moment.
    """
    used, used_bound, max_bound = state.nu, bounds.nu, None
    if amsgrad:
        max_bound = jnp.maximum(bounds.nu_max, bounds.nu)
        used, used_bound = state.nu_max, max_bound
    # The update is computed from the new moments before they are rounded.
    correct_mu, correct_nu = (-jnp.expm1(state.count * jnp.log(b)) for b in (B1, B2))
    root = jnp.sqrt(used if amsgrad == "optax" else used / correct_nu) + EPS
    largest = (jnp.abs(state.mu) + bounds.mu) * lax.rsqrt(1 - used_bound / used)
    error = LEARNING_RATE * (largest - jnp.abs(state.mu)) / correct_mu / root
    return bounds._replace(
        params=bounds.params + error,
        mu=_rounded(bounds.mu, state.mu, kept.mu_error),
        nu=_rounded(bounds.nu, state.nu, kept.nu_error),
        nu_max=_rounded(max_bound, state.nu_max, kept.nu_error) if amsgrad else None,
    )


def _rounded(bound: jax.Array, value: jax.Array, error: float) -> jax.Array:
    """The bound of a value once that, perhaps off by all of it, is rounded."""
    return bound + error * (jnp.abs(value) + bound)
