"""Correctness before speed: what the numbers must be after a batch of steps.

The reference is the package's plain-JAX twin, one leaf at a time. It shares no code
with optax's, PyTorch's and the staged rows, which are held to the same numbers, so a
fault of its own would show in those. It clips by itself, with a norm of its own.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._problem import (
    B1,
    B2,
    EPS,
    GRADIENT_SCALE,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    START_COUNT,
    WEIGHT_DECAY,
    Numbers,
    Problem,
)

_ULP = 2.0**-23
_PIECE = 256  # elements, of which float32 sums are still nearly exact


def global_norm(grads: Sequence[jax.Array]) -> float:
    """Of all leaves, to float64 but for the sums within a piece."""
    sums = jax.device_get([_sums_of_squares(grad) for grad in grads])
    return math.sqrt(sum(x.sum(dtype=np.float64) for x in sums))


@jax.jit
def _sums_of_squares(grad):
    flat = grad.ravel().astype(jnp.float32)
    pieces = jnp.pad(flat, (0, -flat.size % _PIECE)).reshape(-1, _PIECE)
    return jnp.square(pieces).sum(axis=1)


def reference(
    problem: Problem, steps: int, optax_amsgrad: bool, norm: float = 0.0
) -> Numbers:
    """Parameters and moments after ``steps`` applied steps.

    Args:
      problem: where to start, with the gradients.
      steps: how many.
      optax_amsgrad: with AMSGrad, whether the rule is that of ``optax.amsgrad``.
      norm: of all gradients, to clip them by; 0 leaves them as they are.
    """
    norm = np.float32(norm) if norm > MAX_GRAD_NORM else None
    amsgrad = problem.amsgrad and ("optax" if optax_amsgrad else True)
    start = problem.start()
    nu_max = start.nu_max or [None] * len(start.params)
    done = [
        _reference_leaf(amsgrad, leaf, grad, norm, steps)
        for leaf, grad in zip(
            zip(start.params, start.mu, start.nu, nu_max), problem.grads, strict=True
        )
    ]
    params, mu, nu, nu_max = map(list, zip(*done, strict=True))
    return Numbers(params, mu, nu, nu_max if amsgrad else [])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _reference_leaf(amsgrad, leaf, grad, norm, steps):
    if norm is not None:
        grad = grad.astype(jnp.float32) / norm * MAX_GRAD_NORM
    tx = jfa.fused_adamw(
        LEARNING_RATE,
        b1=B1,
        b2=B2,
        eps=EPS,
        eps_root=0.0,
        weight_decay=WEIGHT_DECAY,
        amsgrad=amsgrad,
        implementation="xla",
    )
    param, mu, nu, nu_max = leaf
    count = jnp.array(START_COUNT, jnp.int32)
    state = tx.init(param)._replace(count=count, mu=mu, nu=nu, nu_max=nu_max)

    def body(_, carry):
        return jfa.step(tx, grad, carry[1], carry[0])

    param, state = lax.fori_loop(0, steps, body, (param, state))
    return param, state.mu, state.nu, state.nu_max


def tolerances(
    steps: int, norm: float = 0.0, norm_error: float = 0.0
) -> dict[str, tuple[float, float]]:
    """``(absolute, relative)`` for each part of :class:`Numbers`.

    Every bound is what float32 rounding can add up to. A learning rate, b1, b2 or
    maximal norm that is off by 1 % is well outside, and so is a step without decay.

    Args:
      steps: how many.
      norm: of :func:`reference`.
      norm_error: how far the row's may be from it, relatively.
    """
    # Per step one rounding of the parameter, and an update of at most about twice the
    # learning rate, in which optax's float32 bias correction is up to 5e-5 off.
    # The error of a norm is the gradient's, and reaches the square root too.
    update_error = 5e-5 + 2 * norm_error
    params = (steps * update_error * 2 * LEARNING_RATE, steps * _ULP)
    # Moments of opposite sign cancel, so mu errs by its terms' size: three roundings a
    # step of terms within the gradients' scale, forgotten at the rate 1 - b1.
    clipped = GRADIENT_SCALE * min(1.0, MAX_GRAD_NORM / norm if norm else 1.0)
    clipping = (1 - B1**steps) * norm_error * clipped
    mu = (3 * _ULP * GRADIENT_SCALE / (1 - B1) + clipping, 0.0)
    # Sums of squares do not cancel: three roundings a step, forgotten at 1 - b2. Where
    # b2 itself is a float32 (torch's fused CUDA kernel), 1 - b2 errs by b2's rounding.
    # The maximum may be the corrected one, which inherits the correction's error.
    remembered = min(steps, 1 / (1 - B2))
    rounding = remembered * _ULP / 4 * GRADIENT_SCALE**2
    clipping = remembered * (1 - B2) * 2 * norm_error * clipped**2
    nu = (rounding + clipping, remembered * 3 * _ULP)
    return {"params": params, "mu": mu, "nu": nu, "nu_max": (nu[0], nu[1] + 5e-5)}


EXACT = dict.fromkeys(Numbers._fields, (0.0, 0.0))


def difference(
    got: Numbers, expected: Numbers, allowed: dict[str, tuple[float, float]]
) -> str | None:
    """Says where the numbers are wrong and by how much; None where they are right.

    Args:
      got: after a batch.
      expected: of :func:`reference`, or the start state of skipped steps.
      allowed: of :func:`tolerances`, or ``EXACT``.
    """
    checks = {}
    for name in Numbers._fields:
        pairs = zip(getattr(got, name), getattr(expected, name), strict=True)
        for i, (a, b) in enumerate(pairs):
            checks[name, i] = _worst(a, b, *allowed[name])
            if b.sharding.num_devices > 1:
                # Several such programs in flight have stopped XLA:CPU for ever, each
                # device waiting in the all-reduce of another one.
                jax.block_until_ready(checks[name, i])
    # Read after all have been launched, since a leaf's check is a small program.
    for (name, i), (num_wrong, largest) in jax.device_get(checks).items():
        if num_wrong:
            leaf = getattr(expected, name)[i]
            absolute, relative = allowed[name]
            return (
                f"{name} of leaf {i} {leaf.shape}: {num_wrong} of {leaf.size} elements "
                f"differ from the reference by up to {largest:.1e}, where "
                f"{absolute:.1e} + {relative:.1e} * |x| is allowed"
            )
    return None


@jax.jit
def _worst(got, expected, absolute, relative):
    """How many elements are out of tolerance, and the largest difference of them."""
    distance = jnp.abs(got - expected)
    # Negated, so that a NaN is wrong.
    wrong = ~(distance <= absolute + relative * jnp.abs(expected))
    return wrong.sum(), jnp.where(wrong, distance, 0.0).max()
