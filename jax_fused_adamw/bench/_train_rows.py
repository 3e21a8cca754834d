"""The optimizers of whole train steps, and a compiled step with one of them."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._rows import peak_bytes_of, require_kernel
from jax_fused_adamw.bench._workloads import LossFn, Workload, value_and_grad

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0
MAX_ERRORS = 5


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A row.

    Attributes:
      name: as printed.
      make: makes the transformation.
      peer: name of the row of optax that follows the same rule, perhaps itself.
      ours: whether ``jfa.step`` takes the step, instead of optax's protocol.
      compute_dtype: of the copies of the parameters with respect to which gradients
        are: our step writes them, one of optax casts the parameters and the gradients.
        None takes the gradients of the parameters.
    """

    name: str
    make: Callable[[], optax.GradientTransformation]
    peer: str
    ours: bool = False
    compute_dtype: str | None = None

    def suits(self, workload: Workload) -> bool:
        """Whether what the workload computes with loses nothing to the copies."""
        return self.compute_dtype in (None, workload.activations)

    def value_and_grad(
        self, loss_fn: LossFn, state: Any, params: Any, batch: Any
    ) -> tuple[jax.Array, Any]:
        if self.compute_dtype is None:
            return value_and_grad(loss_fn, state, params, batch)
        copies = jfa.compute_params(state, params) if self.ours else None
        of_copies = jfa.value_and_grad(loss_fn, compute_dtype=self.compute_dtype)
        return of_copies(params, batch, compute_params=copies)

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if self.ours:
            return jfa.step(self.make(), grads, state, params)
        # optax would keep its arithmetic in the gradients' dtype.
        grads = jax.tree.map(
            lambda grad, param: grad.astype(param.dtype), grads, params
        )
        updates, state = self.make().update(grads, state, params)
        return optax.apply_updates(params, updates), state


def _adamw() -> optax.GradientTransformation:
    return optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def _fused(**options: Any) -> jfa.FusedAdamW:
    return jfa.fused_adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY, **options)


def _clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), tx)


def _if_finite(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.apply_if_finite(tx, MAX_ERRORS)


def _with_bf16_grads(
    of_optax: Optimizer, ours: str, **options: Any
) -> tuple[Optimizer, Optimizer]:
    """Rows of the rule of ``of_optax``: its own one, and ours."""
    peer = f"bf16 grads, {of_optax.name}"
    bfloat16 = functools.partial(Optimizer, peer=peer, compute_dtype="bfloat16")
    fused = functools.partial(_fused, compute_dtype="bfloat16", **options)
    return (
        bfloat16(peer, of_optax.make),
        bfloat16(f"bf16 grads, {ours}", fused, ours=True),
    )


_ADAMW, _CLIP = "optax.adamw", "clip, optax.adamw"
ADAMW = Optimizer(_ADAMW, lambda: _adamw(), _ADAMW)
CLIPPED = Optimizer(_CLIP, lambda: _clipped(_adamw()), _CLIP)
OURS_CLIPPED = Optimizer(
    "if finite, clip, fused_adamw",
    lambda: _fused(max_grad_norm=MAX_NORM),
    _CLIP,
    ours=True,
)
OPTIMIZERS = (
    ADAMW,
    CLIPPED,
    Optimizer(f"if finite, {_CLIP}", lambda: _if_finite(_clipped(_adamw())), _CLIP),
    Optimizer("fused_adamw", lambda: _fused(), _ADAMW, ours=True),
    OURS_CLIPPED,
    *_with_bf16_grads(ADAMW, "fused_adamw"),
    *_with_bf16_grads(CLIPPED, OURS_CLIPPED.name, max_grad_norm=MAX_NORM),
)


class TrainStepper:
    """A compiled step of a workload; see ``Stepper``. Its numbers are the losses.

    Args:
      workload: what is trained.
      optimizer: with what; None takes the gradients alone.
      compiler_options: for XLA.
    """

    def __init__(
        self,
        workload: Workload,
        optimizer: Optimizer | None,
        compiler_options: dict[str, str] | None = None,
    ):
        if optimizer is not None and optimizer.ours:
            require_kernel()
        self._workload, self._optimizer = workload, optimizer
        step, donated = workload.gradients, ()
        if optimizer is not None:
            step = workload.train_step(optimizer.update, optimizer.value_and_grad)
            donated = (0, 1)
        arguments = self._example_arguments()
        started = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=donated).lower(*arguments)
        self._step = lowered.compile(compiler_options=compiler_options)
        self.compile_s = time.perf_counter() - started
        self.peak_bytes = peak_bytes_of(self._step)
        self.release()

    def _example_arguments(self) -> tuple[Any, ...]:
        # Shapes are enough, so that a step which does not fit can be compiled too.
        start = jax.eval_shape(self._make_start)
        return *start, jax.eval_shape(self._workload.make_batch)

    def _make_start(self) -> tuple[Any, ...]:
        params = self._workload.init()
        if self._optimizer is None:
            return (params,)
        return params, self._optimizer.make().init(params)

    def start(self) -> None:
        self._losses = []
        self._carry = jax.block_until_ready(self._make_start())
        self._batch = self._workload.batch

    def run(self, steps: int) -> None:
        for _ in range(steps):
            *results, losses = self._step(*self._carry, self._batch)
            if self._optimizer is not None:
                self._carry = results
            self._losses.append(losses)
        jax.block_until_ready((results, self._losses))

    def numbers(self) -> np.ndarray:
        return np.concatenate([np.ravel(loss) for loss in self._losses])

    def release(self) -> None:
        self._carry = self._losses = self._batch = None
