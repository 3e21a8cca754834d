"""What is trained: a GPT, and the minibatch updates of a PPO iteration."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fused_adamw.bench import _gpt, _ppo

# params, batch -> loss
LossFn = Callable[[Any, Any], jax.Array]
# optimizer update: grads, state, params -> params, state
Update = Callable[[Any, Any, Any], tuple[Any, Any]]
# loss_fn, state, params, batch -> loss, grads
ValueAndGrad = Callable[[LossFn, Any, Any, Any], tuple[jax.Array, Any]]


def value_and_grad(
    loss_fn: LossFn, state: Any, params: Any, batch: Any
) -> tuple[jax.Array, Any]:
    """With respect to the parameters themselves, whatever the optimizer's state."""
    del state
    return jax.value_and_grad(loss_fn)(params, batch)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A loss, first float32 parameters, and the batch that every step takes.

    Attributes:
      name: with the size of the batch.
      step: what is timed, in words.
      init: makes the same parameters at every call, in new buffers.
      make_batch: makes the batch.
      loss_fn: ``params, batch -> loss``.
      updates: optimizer updates of a compiled step. More than one are a ``lax.scan``
        over the batch's first axis.
      activations: dtype of what is computed with the parameters.
    """

    name: str
    step: str
    init: Callable[[], Any]
    make_batch: Callable[[], Any]
    loss_fn: LossFn
    updates: int = 1
    activations: str = "float32"

    @functools.cached_property
    def batch(self) -> Any:
        return jax.block_until_ready(self.make_batch())

    def train_step(
        self, update: Update, value_and_grad: ValueAndGrad = value_and_grad
    ) -> Callable[..., tuple[Any, Any, jax.Array]]:
        """The function ``params, state, batch -> params, state, losses``."""

        def one(params, state, batch):
            loss, grads = value_and_grad(self.loss_fn, state, params, batch)
            params, state = update(grads, state, params)
            return params, state, loss

        def scanned(params, state, batch):
            def body(carry, minibatch):
                params, state, loss = one(*carry, minibatch)
                return (params, state), loss

            (params, state), losses = lax.scan(body, (params, state), batch)
            return params, state, losses

        return one if self.updates == 1 else scanned

    def gradients(self, params: Any, batch: Any) -> tuple[Any, jax.Array]:
        """Gradients and losses of a step without an optimizer."""

        def one(params, batch):
            loss, grads = jax.value_and_grad(self.loss_fn)(params, batch)
            return grads, loss

        def body(grads, minibatch):
            del grads  # those before: only the last ones are returned
            return one(params, minibatch)

        if self.updates == 1:
            return one(params, batch)
        return lax.scan(body, jax.tree.map(jnp.zeros_like, params), batch)


def gpt_workload(config: _gpt.Config, batch: int, attention: str) -> Workload:
    """Next-token prediction on ``batch`` sequences of random tokens.

    Args:
      config: sizes; ``GPT2`` is the published 124 M.
      batch: how many sequences.
      attention: of ``_gpt.choose_attention``.
    """
    model = "GPT-2" if config == _gpt.GPT2 else "tiny GPT"
    return Workload(
        name=f"{model}, {batch} x {config.context} tokens",
        step="train step",
        init=functools.partial(_gpt.init, config),
        make_batch=functools.partial(_gpt.tokens, config, batch),
        loss_fn=functools.partial(
            _gpt.loss_fn, heads=config.heads, attention=attention
        ),
        activations=jnp.dtype(_gpt.ACTIVATIONS).name,
    )


def ppo_workload() -> Workload:
    """All minibatch updates of an iteration in one ``lax.scan``."""
    return Workload(
        name=f"PPO, {_ppo.MINIBATCHES} minibatches of {_ppo.MINIBATCH} in lax.scan",
        step="minibatch update",
        init=_ppo.init,
        make_batch=_ppo.rollout,
        loss_fn=_ppo.loss_fn,
        updates=_ppo.MINIBATCHES,
    )


def largest_batch(
    peak_bytes: Callable[[int], int | None], first: int, limit_bytes: int
) -> int:
    """The greatest ``first * 2**n`` whose step fits, from memory analysis alone.

    Compiling takes long, so it goes to where a straight line points, and checks there.

    Args:
      peak_bytes: what a compiled step of that batch holds at most; None where it does
        not compile.
      first: the least batch, and the answer where nothing larger fits.
      limit_bytes: how much there is.
    """

    @functools.cache
    def peak(batch: int) -> float:
        num_bytes = peak_bytes(batch)
        return math.inf if num_bytes is None else num_bytes

    batch = first
    # A part does not grow with the batch: twice the batch is less than twice as much.
    while 2 * batch / first * peak(first) <= limit_bytes:
        batch *= 2
    while batch > first and peak(batch) > limit_bytes:
        batch //= 2
    while batch == first or _line(peak, first, batch) <= limit_bytes:
        if peak(2 * batch) > limit_bytes:
            break
        batch *= 2
    return batch


def _line(peak: Callable[[int], float], first: int, batch: int) -> float:
    """Where the line through two batches stands at twice the larger one."""
    slope = (peak(batch) - peak(first)) / (batch - first)
    return peak(batch) + slope * batch
