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
    EMA_DECAY,
    EPS,
    GRADIENT_SCALE,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    PARAMETER_SCALE,
    START_COUNT,
    WEIGHT_DECAY,
    Kept,
    Numbers,
    Problem,
)

_ULP = 2.0**-23
_FLOAT32 = Kept()
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
    problem: Problem,
    steps: int,
    optax_amsgrad: bool,
    norm: float = 0.0,
    kept: Kept = _FLOAT32,
) -> Numbers:
    """Parameters and moments after ``steps`` applied steps, all in float32.

    Args:
      problem: where to start, with the gradients.
      steps: how many.
      optax_amsgrad: with AMSGrad, whether the rule is that of ``optax.amsgrad``.
      norm: of all gradients, to clip them by; 0 leaves them as they are.
      kept: what the state is; where it stores less than float32, only the start is
        rounded to it.
    """
    norm = np.float32(norm) if norm > MAX_GRAD_NORM else None
    amsgrad = amsgrad_rule(problem, optax_amsgrad)
    start = kept.rounded(problem.start())
    start = start._replace(ema=problem.start_ema() if kept.ema else ())
    done = [
        _reference_leaf(amsgrad, leaf, grad, norm, steps)
        for leaf, grad in zip(leaves_of(start), problem.grads, strict=True)
    ]
    return collect(done)


def amsgrad_rule(problem: Problem, optax_amsgrad: bool) -> bool | str:
    return problem.amsgrad and ("optax" if optax_amsgrad else True)


def leaves_of(numbers: Numbers) -> list[Numbers]:
    """The parts of each leaf; None where there are none."""
    nothing = [None] * len(numbers.params)
    parts = zip(*(part or nothing for part in numbers), strict=True)
    return [Numbers(*leaf) for leaf in parts]


def collect(leaves: Sequence[Numbers]) -> Numbers:
    """What :func:`leaves_of` took apart."""
    parts = zip(*leaves, strict=True)
    return Numbers(*([] if part[0] is None else list(part) for part in parts))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _reference_leaf(amsgrad, leaf, grad, norm, steps):
    if norm is not None:
        grad = grad.astype(jnp.float32) / norm * MAX_GRAD_NORM
    tx, state = reference_state(amsgrad, leaf)

    def body(_, carry):
        param, state, ema = carry
        param, state = jfa.step(tx, grad, state, param)
        if ema is not None:
            ema = EMA_DECAY * ema + (1 - EMA_DECAY) * param
        return param, state, ema

    param, state, ema = lax.fori_loop(0, steps, body, (leaf.params, state, leaf.ema))
    return Numbers(param, state.mu, state.nu, state.nu_max, ema, None)


def reference_state(
    amsgrad: bool | str, leaf: Numbers
) -> tuple[jfa.FusedAdamW, jfa.FusedAdamWState]:
    """The plain-JAX twin, and its state for one leaf of the start."""
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
    return tx, tx.init(leaf.params)._replace(
        count=jnp.array(START_COUNT, jnp.int32),
        mu=leaf.mu,
        nu=leaf.nu,
        nu_max=leaf.nu_max,
    )


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
    # Three roundings a step of terms within the parameters' scale, hardly forgotten,
    # and the error of the parameters that it takes in.
    taken_in = (1 - EMA_DECAY**steps) * params[0]
    ema = (steps * 3 * _ULP / 2 * PARAMETER_SCALE + taken_in, 0.0)
    return {
        "params": params,
        "mu": mu,
        "nu": nu,
        "nu_max": (nu[0], nu[1] + 5e-5),
        "ema": ema,
        "compute": (0.0, 0.0),
    }


EXACT = dict.fromkeys(Numbers._fields, (0.0, 0.0))


def difference(
    got: Numbers,
    expected: Numbers,
    allowed: dict[str, tuple[float, float]],
    bounds: Numbers | None = None,
) -> str | None:
    """Says where the numbers are wrong and by how much; None where they are right.

    Args:
      got: after a batch.
      expected: of :func:`reference`, or the start state of skipped steps.
      allowed: of :func:`tolerances`, or ``EXACT``.
      bounds: what is allowed of each element on top of that; None is nothing.
    """
    checks = {}
    for name in Numbers._fields:
        pairs = zip(getattr(got, name), getattr(expected, name), strict=True)
        more = getattr(bounds, name, None) or ()
        for i, (a, b) in enumerate(pairs):
            absolute, relative = allowed[name]
            absolute = absolute + more[i] if more else absolute
            checks[name, i] = _worst(a, b, absolute, relative)
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
                + (" on top of its bfloat16 moments' rounding" if bounds else "")
            )
    return None


@jax.jit
def _worst(got, expected, absolute, relative):
    """How many elements are out of tolerance, and the largest difference of them."""
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    distance = jnp.abs(got - expected)
    # Negated, so that a NaN is wrong.
    wrong = ~(distance <= absolute + relative * jnp.abs(expected))
    return wrong.sum(), jnp.where(wrong, distance, 0.0).max()
