"""The rows that clip by the global norm: ours, optax's, PyTorch's.

Ours skip a step with a gradient that is not finite too, and so does optax's with
``if_finite``. Each is named after the row to which it adds the clip.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._problem import (
    MAX_GRAD_NORM,
    Problem,
    Row,
    clipped_bytes,
    gradient_bytes,
)
from jax_fused_adamw.bench._rows import (
    JaxStepper,
    build_optax,
    build_step,
    fused,
    require_kernel,
)
from jax_fused_adamw.bench._torch import TorchStepper

_MAX_ERRORS = 5
_ULP = 2.0**-23
# How far a norm may be from the exact one. That of grad_stats is within a few ulp.
OUR_ERROR = 4 * _ULP
# One float32 sum of squares a leaf, in XLA's order: 1e-7 off for GPT-2 on a CPU.
OPTAX_ERROR = 5e-6
# torch adds 1e-6 to the norm. On a CPU it adds up a leaf in a few float32 sums, 1e-3
# off for 30 M elements and 1e-2 for 134 M: there the row is wrong.
_TORCH_ERROR = 1e-6 / MAX_GRAD_NORM + 5e-6
_TORCH_CPU_ERROR = 2e-3


def _build_clip(problem: Problem) -> JaxStepper:
    return build_step(problem, max_grad_norm=MAX_GRAD_NORM)


class NanStepper(JaxStepper):
    """The last gradient is NaN; see ``Stepper``."""

    def start(self) -> None:
        super().start()
        *others, last = self._problem.grads
        last = last.at[(-1,) * last.ndim].set(jnp.nan)
        self._grads = jax.block_until_ready([*others, last])


def _build_skipped_clip(problem: Problem) -> NanStepper:
    require_kernel()
    tx = fused(problem, max_grad_norm=MAX_GRAD_NORM)
    return NanStepper(problem, tx, lambda p, s, g: jfa.step(tx, g, s, p))


def clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), tx)


def _clipped_if_finite(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
    return optax.apply_if_finite(clipped(tx), _MAX_ERRORS)


class ClippedTorchStepper(TorchStepper):
    """``torch.optim.AdamW`` behind the work of ``clip_grad_norm_``; see ``Stepper``.

    ``torch.nn.utils.clip_grad_norm_`` would scale the gradients in place, and the next
    step would find them clipped. The same operations are taken out of place: the norms
    of all leaves at once, the norm of those, and one multiplication of all leaves.
    """

    def _make_optimizer(self) -> Any:
        optimizer = super()._make_optimizer()
        self._grads = [*map(self._torch.from_dlpack, self._problem.grads)]
        return optimizer

    def _step(self) -> None:
        torch = self._torch
        norms = torch._foreach_norm(self._grads, 2)
        norm = torch.linalg.vector_norm(torch.stack(norms), 2)
        factor = torch.clamp(MAX_GRAD_NORM / (norm + 1e-6), max=1.0)
        params = self._numbers.params
        if self._grads[0].is_cuda:
            scaled = torch._foreach_mul(self._grads, factor)
            for param, grad in zip(params, scaled, strict=True):
                param.grad = grad
        else:
            # What foreach does on a CPU, without the page faults of new memory.
            for param, grad in zip(params, self._grads, strict=True):
                torch.mul(grad, factor, out=param.grad)
        super()._step()

    def release(self) -> None:
        super().release()
        self._grads = None


_Clip = functools.partial(Row, num_bytes=clipped_bytes, peer="optax.adamw+clip")

CLIP_ROWS = (
    _Clip("step+clip", _build_clip, ours=True, norm_error=OUR_ERROR),
    _Clip(
        "skipped+clip",
        _build_skipped_clip,
        num_bytes=gradient_bytes,
        ours=True,
        skips=True,
    ),
    _Clip(
        "optax.adamw+clip",
        functools.partial(build_optax, wrap=clipped),
        optax_amsgrad=True,
        norm_error=OPTAX_ERROR,
    ),
    _Clip(
        "optax.adamw+clip+if_finite",
        functools.partial(build_optax, wrap=_clipped_if_finite),
        optax_amsgrad=True,
        norm_error=OPTAX_ERROR,
    ),
    _Clip(
        "torch-fused+clip",
        functools.partial(ClippedTorchStepper, fused=True),
        norm_error=_TORCH_CPU_ERROR,
    ),
    _Clip(
        "torch-cuda-graph+clip",
        functools.partial(ClippedTorchStepper, fused=True, graph=True),
        norm_error=_TORCH_ERROR,
    ),
)
