"""What every row of the bench computes: one start, one set of gradients, options."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jax_fused_adamw.bench._shapes import Leaves

LEARNING_RATE = 1e-3
B1 = 0.9
B2 = 0.999
EPS = 1e-8
WEIGHT_DECAY = 0.01
# Steps that the start state has behind it: so few that a count which is off by one
# shows. After ten, the two bias corrections all but cancel each other's change.
START_COUNT = 2
GRADIENT_SCALE = 1e-2  # gradients and first moments lie within +- this
PARAMETER_SCALE = 0.1
# Gradients of 10,000 parameters already have a norm of 0.58. Those of the largest shape
# keep 0.3 % of their length, still well beyond what the check allows.
MAX_GRAD_NORM = 0.5
EMA_DECAY = 0.999


class Numbers(NamedTuple):
    """Parameters and moments, one array a leaf.

    What a row does not have is empty: ``nu_max`` without AMSGrad, ``ema`` without an
    average of the parameters, ``compute`` without copies of them.
    """

    params: list[jax.Array]
    mu: list[jax.Array]
    nu: list[jax.Array]
    nu_max: list[jax.Array]
    ema: Sequence[jax.Array] = ()
    compute: Sequence[jax.Array] = ()


@dataclasses.dataclass(frozen=True)
class Problem:
    """Float32 parameters of the given shapes, with constant gradients.

    Attributes:
      leaves: the shapes.
      dtype: of the gradients.
      amsgrad: whether the maximum of the second moment is kept.
    """

    leaves: Leaves
    dtype: str
    amsgrad: bool

    @functools.cached_property
    def grads(self) -> list[jax.Array]:
        return self._fill(0, _signed, GRADIENT_SCALE, self.dtype)

    def start(self) -> Numbers:
        """The same numbers at every call, in new buffers that may be donated.

        No moment is zero and none agrees with the gradients, so that an option that
        differs shows: from a fresh state every step is lr * sign(gradient).
        """
        return Numbers(
            params=self._fill(1, _signed, PARAMETER_SCALE),
            mu=self._fill(2, _signed, GRADIENT_SCALE),
            nu=self._fill(3, _squared, GRADIENT_SCALE),
            # Above nu in half of the elements, below it in the others.
            nu_max=self._fill(4, _squared, GRADIENT_SCALE) if self.amsgrad else [],
        )

    def start_ema(self) -> list[jax.Array]:
        """An average that is far from the parameters, so that its decay shows."""
        return self._fill(5, _signed, PARAMETER_SCALE)

    def _fill(
        self, kind: int, function: Callable, scale: float, dtype: str = "float32"
    ) -> list[jax.Array]:
        return [
            _random_leaf(shape, dtype, function, jnp.uint32(8 * i + kind), scale)
            for i, shape in enumerate(self.leaves)
        ]


def _signed(unit: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * (2.0 * unit - 1.0)


def _squared(unit: jax.Array, scale: jax.Array) -> jax.Array:
    """Between 1 % and all of scale^2: no division by nearly zero."""
    return jnp.square(scale) * (0.01 + 0.99 * unit)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_leaf(shape, dtype, function, seed, scale):
    """Hashes each index: compiles in no time and costs one pass of writing."""
    x = lax.iota(jnp.uint32, math.prod(shape)) + seed * jnp.uint32(0x9E3779B1)
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(multiplier)
    unit = ((x ^ (x >> 16)) >> 8).astype(jnp.float32) * 2.0**-24
    return function(unit, scale).astype(dtype).reshape(shape)


class Blocked(Exception):
    """Why a row cannot run here."""


class Stepper(Protocol):
    """An optimizer at work on a problem, compiled.

    Attributes:
      compile_s: seconds to trace and compile; None where nothing is compiled.
      peak_bytes: what the compiled step holds at most, arguments included; or None.
    """

    compile_s: float | None
    peak_bytes: int | None

    def start(self) -> None:
        """Takes the problem's start state."""

    def run(self, steps: int) -> None:
        """Takes steps and waits for the last one."""

    def numbers(self) -> Numbers:
        """Parameters and moments as they are now."""

    def release(self) -> None:
        """Frees them, so that one row's arrays are in memory at a time."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a row's state keeps besides, or instead of, two float32 moments.

    Attributes:
      mu_error: how far a first moment may be from the exact one because it is stored in
        bfloat16, relatively and for each step; 0 where it is float32.
      nu_error: the same of the second moment.
      product_error: how far b1 times the stored first moment may be from the exact
        product, relatively.
      ema: whether there is an average of the parameters.
      copies: whether there are bfloat16 copies of the parameters.
    """

    mu_error: float = 0.0
    nu_error: float = 0.0
    product_error: float = 0.0
    ema: bool = False
    copies: bool = False

    def rounded(self, start: Numbers) -> Numbers:
        """The start state as it can be stored, in float32."""

        def stored(moments: list[jax.Array], error: float) -> list[jax.Array]:
            dtype = jnp.bfloat16 if error else jnp.float32
            return [x.astype(dtype).astype(jnp.float32) for x in moments]

        return start._replace(
            mu=stored(start.mu, self.mu_error),
            nu=stored(start.nu, self.nu_error),
            nu_max=stored(start.nu_max, self.nu_error),
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to take the step.

    Attributes:
      name: as printed, and as ``--rows`` takes it.
      build: makes the stepper, or raises :class:`Blocked`.
      num_bytes: memory traffic for a parameter, counted, not measured, by problem.
      ours: whether it is this package's.
      skips: whether every step is a skipped one, which changes nothing.
      optax_amsgrad: whether AMSGrad is optax's rule (the maximum of the corrected
        moment) instead of PyTorch's.
      profiled: whether its device time is measured too, where there is a profiler.
      dtype: of the row's gradients, where it is not the run's.
      norm_error: how far from the exact global norm the row's may be, relatively; None
        where the row does not clip by it.
      peer: name of the row of optax that follows the same rule.
      kept: what its state is.
    """

    name: str
    build: Callable[[Problem], Stepper]
    num_bytes: Callable[[Problem], int]
    ours: bool = False
    skips: bool = False
    optax_amsgrad: bool = False
    profiled: bool = True
    dtype: str | None = None
    norm_error: float | None = None
    peer: str = "optax.adamw"
    kept: Kept = Kept()

    def variant(self, problem: Problem) -> Problem:
        """The problem with this row's gradients."""
        if self.dtype in (None, problem.dtype):
            return problem
        return dataclasses.replace(problem, dtype=self.dtype)


def gradient_bytes(problem: Problem) -> int:
    return jnp.dtype(problem.dtype).itemsize


def fused_bytes(problem: Problem) -> int:
    """Reads p, g, m, v and writes p, m, v: 28 for float32; AMSGrad's maximum is 8."""
    return 24 + gradient_bytes(problem) + (8 if problem.amsgrad else 0)


def clipped_bytes(problem: Problem) -> int:
    """The norm takes another reading of the gradients, all before the step."""
    return fused_bytes(problem) + gradient_bytes(problem)


def unfused_bytes(problem: Problem) -> int:
    """Writes an update instead of p, and a second pass reads both and writes p."""
    return fused_bytes(problem) + 12


def staged_bytes(problem: Problem) -> int:
    """Four kernels of two reads and a write: 48, 60 with AMSGrad's fifth.

    Two of them read the gradient.
    """
    return 40 + 2 * gradient_bytes(problem) + (12 if problem.amsgrad else 0)
