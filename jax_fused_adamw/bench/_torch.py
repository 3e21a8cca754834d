"""The rows in PyTorch, where it is installed: fused, foreach, CUDA graph."""

import functools
import importlib.util
from types import ModuleType
from typing import Any

import jax
import numpy as np

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
)

_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"}


def _import_torch(problem: Problem, graph: bool) -> ModuleType:
    """torch, able to run the row on the device that JAX uses."""
    platform = jax.default_backend()
    if importlib.util.find_spec("torch") is None:
        raise Blocked("torch is not installed")
    if graph and platform != "gpu":
        raise Blocked(f"a CUDA graph needs a CUDA device, and JAX runs on {platform}")
    if platform not in ("cpu", "gpu"):
        raise Blocked(f"this bench has no torch for {platform}")
    if problem.dtype != "float32":
        raise Blocked(f"torch takes no {problem.dtype} gradient of a float32 parameter")
    import torch

    if platform == "gpu" and not torch.cuda.is_available():
        raise Blocked(f"torch {torch.__version__} finds no CUDA device")
    return torch


class TorchStepper:
    """``torch.optim.AdamW``; see ``Stepper``.

    Parameters, gradients and state stay at their addresses, as a graph needs, and
    ``start`` copies the start state there.
    """

    compile_s = None
    peak_bytes = None

    def __init__(self, problem: Problem, graph: bool = False, **options: Any):
        self._torch = _import_torch(problem, graph)
        self._problem, self._graph = problem, graph
        self._options = {"foreach": False, "fused": False, "capturable": graph}
        self._options |= options
        self._device = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]

    def _tensor(self, array: jax.Array) -> Any:
        # A copy: torch writes in place, and JAX's host copy is read-only.
        return self._torch.from_numpy(np.array(array)).to(self._device)

    def start(self) -> None:
        numbers = Numbers(
            *([*map(self._tensor, part)] for part in self._problem.start())
        )
        for param, grad in zip(numbers.params, self._problem.grads, strict=True):
            param.grad = self._tensor(grad)
        self._optimizer = self._torch.optim.AdamW(
            numbers.params,
            lr=LEARNING_RATE,
            betas=(B1, B2),
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            amsgrad=self._problem.amsgrad,
            maximize=False,
            differentiable=False,
            **self._options,
        )
        self._set_state(numbers)
        self._numbers = numbers
        self._take_step = self._capture() if self._graph else self._optimizer.step
        self._wait()

    def _set_state(self, numbers: Numbers) -> None:
        on_device = self._options["fused"] or self._options["capturable"]
        device = self._device if on_device else "cpu"
        for i, param in enumerate(numbers.params):
            state = self._optimizer.state[param]
            state["step"] = self._torch.tensor(float(START_COUNT), device=device)
            for name, theirs in _MOMENTS.items():
                if getattr(numbers, name):
                    state[theirs] = getattr(numbers, name)[i]

    def _capture(self) -> Any:
        """One step as a CUDA graph; capturing records it without running it."""
        graph = self._torch.cuda.CUDAGraph()
        self._wait()
        with self._torch.cuda.graph(graph):
            self._optimizer.step()
        return graph.replay

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._take_step()
        self._wait()

    def _wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def numbers(self) -> Numbers:
        def to_jax(tensor: Any) -> jax.Array:
            return jax.numpy.array(tensor.detach().cpu().numpy())

        return Numbers(*([*map(to_jax, part)] for part in self._numbers))

    def release(self) -> None:
        self._numbers = self._optimizer = self._take_step = None


TORCH_ROWS = (
    Row("torch-fused", functools.partial(TorchStepper, fused=True), fused_bytes),
    Row("torch-foreach", functools.partial(TorchStepper, foreach=True), fused_bytes),
    Row(
        "torch-cuda-graph",
        functools.partial(TorchStepper, fused=True, graph=True),
        fused_bytes,
    ),
)
