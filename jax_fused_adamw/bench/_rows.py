"""The rows in JAX: ours, ``optax.adamw``, and a step in separate passes."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._problem import (
    B1,
    B2,
    EPS,
    LEARNING_RATE,
    START_COUNT,
    WEIGHT_DECAY,
    Blocked,
    Numbers,
    Problem,
    Row,
    fused_bytes,
    staged_bytes,
    unfused_bytes,
)

Step = Callable[..., tuple[Any, Any]]


class JaxStepper:
    """A jitted ``step(params, state, grads, *extra)``; see ``Stepper``."""

    def __init__(
        self,
        problem: Problem,
        tx: optax.GradientTransformation,
        step: Step,
        extra: tuple[jax.Array, ...] = (),
        donate: bool = True,
    ):
        self._problem, self._tx, self._extra = problem, tx, extra
        jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
        self.start()
        started = time.perf_counter()
        lowered = jitted.lower(self._params, self._state, self._grads, *extra)
        self._step = lowered.compile()
        self.compile_s = time.perf_counter() - started
        self.peak_bytes = peak_bytes_of(self._step)
        self.release()

    def start(self) -> None:
        numbers = self._problem.start()
        self._params = numbers.params
        self._state = self._start_state(numbers)
        self._grads = self._problem.grads
        jax.block_until_ready((self._params, self._state))

    def _start_state(self, numbers: Numbers) -> Any:
        """The transformation's own state with the problem's numbers in its dtypes."""
        state = self._tx.init(self._params)
        state = optax.tree.set(state, count=jnp.array(START_COUNT, jnp.int32))
        trees = {"mu": numbers.mu, "nu": numbers.nu}
        if self._problem.amsgrad:
            trees["nu_max"] = numbers.nu_max
        if optax.tree.get(state, "ema"):
            trees["ema"] = self._problem.start_ema()
        # One at a time: optax looks for the others only outside of what it has set.
        for name, tree in trees.items():
            old = optax.tree.get(state, name)
            tree = jax.tree.map(lambda x, y: x.astype(y.dtype), tree, old)
            state = optax.tree.set(state, **{name: tree})
        return state

    def run(self, steps: int) -> None:
        params, state = self._params, self._state
        for _ in range(steps):
            params, state = self._step(params, state, self._grads, *self._extra)
        self._params, self._state = jax.block_until_ready((params, state))

    def numbers(self) -> Numbers:
        names = ("mu", "nu", "nu_max", "ema", "compute")
        trees = [optax.tree.get(self._state, name) or [] for name in names]
        return Numbers(self._params, *trees)

    def release(self) -> None:
        self._params = self._state = self._grads = None


def peak_bytes_of(compiled: jax.stages.Compiled) -> int | None:
    """What a compiled program holds at most, arguments included; None if unknown."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def fused(problem: Problem, **options: Any) -> jfa.FusedAdamW:
    return jfa.fused_adamw(
        LEARNING_RATE,
        b1=B1,
        b2=B2,
        eps=EPS,
        eps_root=0.0,
        weight_decay=WEIGHT_DECAY,
        amsgrad=problem.amsgrad,
        **options,
    )


def _protocol_step(tx: optax.GradientTransformation) -> Step:
    """A step in optax's own words."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def build_step(
    problem: Problem, stepper: type[JaxStepper] | None = None, **options: Any
) -> JaxStepper:
    """``jfa.step`` of ``fused_adamw`` with these options, taken by ``stepper``."""
    require_kernel()
    tx = fused(problem, **options)
    step = lambda p, s, g: jfa.step(tx, g, s, p)  # noqa: E731
    return (stepper or JaxStepper)(problem, tx, step)


def _build_out_of_place(problem: Problem) -> JaxStepper:
    """Without donation: for a caller who keeps the old parameters and state."""
    tx = fused(problem, alias=False)
    step = lambda p, s, g: jfa.step(tx, g, s, p)  # noqa: E731
    return _build(problem, tx, step, donate=False)


def _build_in_place(problem: Problem) -> JaxStepper:
    tx = fused(problem, in_place=True)
    return _build(problem, tx, _protocol_step(tx))


def _build_update(problem: Problem) -> JaxStepper:
    tx = fused(problem)
    return _build(problem, tx, _protocol_step(tx))


def _build_skipped(problem: Problem) -> JaxStepper:
    tx = fused(problem)

    def step(params, state, grads, skip):
        return jfa.step(tx, grads, state, params, skip_update=skip)

    return _build(problem, tx, step, extra=(jnp.array(True),))


def require_kernel() -> None:
    """Raises :class:`Blocked` where this package has no kernel for JAX's platform."""
    platform = jax.default_backend()
    module = {"cpu": jfa.kernel_info().cpu, "gpu": jfa.kernel_info().cuda}
    if platform not in module:
        raise Blocked(f"there is no kernel for {platform}")
    if not module[platform].loaded:
        raise Blocked(f"no kernel: {module[platform].reason}")


def _build(problem: Problem, tx: Any, step: Step, **options: Any) -> JaxStepper:
    require_kernel()
    return JaxStepper(problem, tx, step, **options)


def optax_transformation(
    problem: Problem, mu_dtype: Any = None
) -> optax.GradientTransformation:
    """``optax.adamw``; AMSGrad, which it has not, is put together the same way."""
    if not problem.amsgrad:
        return optax.adamw(
            LEARNING_RATE,
            b1=B1,
            b2=B2,
            eps=EPS,
            eps_root=0.0,
            mu_dtype=mu_dtype,
            weight_decay=WEIGHT_DECAY,
            mask=None,
            nesterov=False,
        )
    return optax.chain(
        optax.scale_by_amsgrad(b1=B1, b2=B2, eps=EPS, eps_root=0.0, mu_dtype=mu_dtype),
        optax.add_decayed_weights(WEIGHT_DECAY, mask=None),
        optax.scale_by_learning_rate(LEARNING_RATE, flip_sign=True),
    )


def build_optax(
    problem: Problem,
    wrap: Callable[..., optax.GradientTransformation] = lambda tx: tx,
    stepper: type[JaxStepper] | None = None,
    mu_dtype: Any = None,
) -> JaxStepper:
    """A step in optax alone.

    Args:
      problem: of the row.
      wrap: makes what is measured from :func:`optax_transformation`.
      stepper: takes the steps; None is :class:`JaxStepper`.
      mu_dtype: of the first moment; None is float32.
    """
    tx = wrap(optax_transformation(problem, mu_dtype))
    step = _protocol_step(tx)

    def widened_step(params, state, grads):
        # optax computes (1 - b1) * g in the gradient's dtype. XLA fuses the cast, so
        # float32 arithmetic on low-precision gradients costs no more traffic.
        grads = [grad.astype(jnp.float32) for grad in grads]
        return step(params, state, grads)

    return (stepper or JaxStepper)(problem, tx, widened_step)


class StagedStepper:
    """Every pass over every leaf is a program of its own; see ``Stepper``.

    What a framework without fusion does: first moment, second moment, with AMSGrad
    the maximum, bias-corrected update, parameter write.
    """

    peak_bytes = None  # of many programs; none of them holds the whole step

    def __init__(self, problem: Problem):
        self._problem = problem
        self._tick = jax.jit(lambda count: count + 1, donate_argnums=0)
        self._first = jax.jit(_first_moment, donate_argnums=0)
        self._second = jax.jit(_second_moment, donate_argnums=0)
        self._maximum = jax.jit(jnp.maximum, donate_argnums=0)
        self._update = jax.jit(_corrected_update)
        self._write = jax.jit(_write_parameter, donate_argnums=0)
        self.start()
        started = time.perf_counter()
        self.run(1)
        self.compile_s = time.perf_counter() - started
        self.release()

    def start(self) -> None:
        numbers = self._problem.start()
        self._numbers = jax.block_until_ready(numbers)
        self._count = jnp.array(START_COUNT, jnp.int32)

    def run(self, steps: int) -> None:
        params, mu, nu, nu_max, *_ = self._numbers
        for _ in range(steps):
            self._count = self._tick(self._count)
            for i, grad in enumerate(self._problem.grads):
                mu[i] = self._first(mu[i], grad)
                nu[i] = used = self._second(nu[i], grad)
                if nu_max:
                    nu_max[i] = used = self._maximum(nu_max[i], nu[i])
                update = self._update(mu[i], used, self._count)
                params[i] = self._write(params[i], update)
        jax.block_until_ready(self._numbers)

    def numbers(self) -> Numbers:
        return self._numbers

    def release(self) -> None:
        self._numbers = None


def _first_moment(mu, grad):
    return B1 * mu + (1 - B1) * grad.astype(jnp.float32)


def _second_moment(nu, grad):
    return B2 * nu + (1 - B2) * jnp.square(grad.astype(jnp.float32))


def _corrected_update(mu, nu, count):
    # 1 - b^count cancels in float32; -expm1(count * log(b)) does not.
    correct_mu = -jnp.expm1(count * math.log(B1))
    correct_nu = -jnp.expm1(count * math.log(B2))
    return (mu / correct_mu) / (jnp.sqrt(nu / correct_nu) + EPS)


def _write_parameter(param, update):
    return param - LEARNING_RATE * (update + WEIGHT_DECAY * param)


def _no_bytes(problem: Problem) -> int:
    del problem
    return 0  # the kernel reads the flag and returns


JAX_ROWS = (
    Row("step", build_step, fused_bytes, ours=True),
    Row("in_place", _build_in_place, fused_bytes, ours=True),
    Row("update", _build_update, unfused_bytes, ours=True),
    Row("alias=False", _build_out_of_place, fused_bytes, ours=True),
    Row("skipped", _build_skipped, _no_bytes, ours=True, skips=True),
    Row("optax.adamw", build_optax, fused_bytes, optax_amsgrad=True),
    Row("staged", StagedStepper, staged_bytes),
)
