"""One training run: the optimizers, the compiled step, the loop."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_fused_adamw as jfa
from jax_fused_adamw import _ffi
from jax_fused_adamw.demo import DemoError
from jax_fused_adamw.demo._data import (
    Corpus,
    held_out_batches,
    training_batches,
    windows,
)
from jax_fused_adamw.demo._model import loss_fn

_PEAK_LEARNING_RATE = 3e-3
_UNSTEADY_STEPS = 5  # left out of the median: the first calls fill caches


def optax_step(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
) -> tuple[optax.Params, optax.OptState]:
    """What :func:`jax_fused_adamw.step` stands for, in optax's own words."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


class Optimizer(NamedTuple):
    """An optimizer's printed name, its factory, and how a step of it is taken."""

    label: str
    make: Callable[..., optax.GradientTransformation]
    step: Callable[..., tuple[optax.Params, optax.OptState]]


OPTIMIZERS = {
    "fused": Optimizer("fused_adamw", jfa.fused_adamw, jfa.step),
    "optax": Optimizer("optax.adamw", optax.adamw, optax_step),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run leaves.

    Attributes:
      label: the optimizer's printed name.
      params: the trained parameters.
      losses: training loss of every step, before its update.
      held_out_loss: mean loss on the held-out windows, after the last step.
      median_step_ms: median wall time of a step, the first ones left out.
      compile_seconds: time to trace and compile the step.
      native_calls: calls of the package's kernel in the compiled step.
    """

    label: str
    params: nnx.State
    losses: list[float]
    held_out_loss: float
    median_step_ms: float
    compile_seconds: float
    native_calls: int


def check_platform(optimizers: Sequence[str]) -> None:
    """Raises a DemoError if JAX has no device or ``fused_adamw`` no kernel for it."""
    try:
        jax.devices()
        if "fused" in optimizers:
            params = {"w": jnp.zeros(1, jnp.float32)}
            tx = jfa.fused_adamw(_PEAK_LEARNING_RATE)
            jax.jit(tx.step).lower(params, tx.init(params), params)
    except RuntimeError as error:
        raise DemoError(str(error).splitlines()[0]) from error


def decay_mask(params: optax.Params) -> Any:
    """Matrices decay; the scales and biases of the norms do not."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def hyperparameters(steps: int) -> dict[str, Any]:
    """What both optimizers are made with, for a run of ``steps``."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=_PEAK_LEARNING_RATE / 10,
        peak_value=_PEAK_LEARNING_RATE,
        warmup_steps=min(steps // 10, 50),
        decay_steps=steps,
        end_value=_PEAK_LEARNING_RATE / 10,
    )
    return {
        "learning_rate": schedule,
        "b1": 0.9,
        "b2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "mask": decay_mask,
    }


def make_train_step(
    optimizer: Optimizer, tx: optax.GradientTransformation, graphdef: nnx.GraphDef
) -> Callable[..., tuple[nnx.State, optax.OptState, jax.Array]]:
    """The jitted ``params, state, batch -> params, state, loss``; donates the state."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, graphdef, batch)
        params, state = optimizer.step(tx, grads, state, params)
        return params, state, loss

    return train_step


def train(
    optimizer: Optimizer,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    corpus: Corpus,
    steps: int,
    seed: int,
) -> Run:
    """Trains from ``params``, which stay intact.

    Args:
      optimizer: one of ``OPTIMIZERS``.
      graphdef: the model without its parameters.
      params: where to start.
      corpus: the text.
      steps: how many steps; the learning-rate schedule spans them.
      seed: of the batches' order.

    Returns:
      A :class:`Run`.
    """
    tx = optimizer.make(**hyperparameters(steps))
    params = jax.tree.map(jnp.copy, params)
    state = tx.init(params)
    batches = [windows(corpus.train, s) for s in training_batches(corpus, steps, seed)]
    started = time.perf_counter()
    train_step = make_train_step(optimizer, tx, graphdef)
    compiled = train_step.lower(params, state, batches[0]).compile()
    compile_seconds = time.perf_counter() - started
    losses, seconds = [], []
    with tqdm(batches, optimizer.label, unit=" steps", mininterval=0.5) as progress:
        for batch in progress:
            started = time.perf_counter()
            params, state, loss = jax.block_until_ready(compiled(params, state, batch))
            seconds.append(time.perf_counter() - started)
            losses.append(float(loss))
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    steady = seconds[min(_UNSTEADY_STEPS, steps - 1) :]
    return Run(
        label=optimizer.label,
        params=params,
        losses=losses,
        held_out_loss=held_out_loss(params, graphdef, corpus),
        median_step_ms=1e3 * float(np.median(steady)),
        compile_seconds=compile_seconds,
        native_calls=native_calls(compiled),
    )


_jitted_loss = jax.jit(loss_fn, static_argnames="graphdef")


def held_out_loss(params: nnx.State, graphdef: nnx.GraphDef, corpus: Corpus) -> float:
    """Mean loss over the same held-out windows every time."""
    batches = (windows(corpus.held_out, starts) for starts in held_out_batches(corpus))
    return float(np.mean([_jitted_loss(params, graphdef, batch) for batch in batches]))


def native_calls(compiled: jax.stages.Compiled) -> int:
    """How many times a compiled program calls the package's kernel."""
    return compiled.as_text().count(f'custom_call_target="{_ffi.UPDATE_TARGET}"')
