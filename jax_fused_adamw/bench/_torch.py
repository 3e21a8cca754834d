"""The rows in PyTorch, where it is installed: fused, foreach, CUDA graph."""

import functools
import importlib.util
from types import ModuleType
from typing import Any

import jax

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
    """``torch.optim.AdamW``; see ``Stepper``."""

    compile_s = None
    peak_bytes = None

    def __init__(self, problem: Problem, graph: bool = False, **options: Any):
        self._torch = _import_torch(problem, graph)
        self._problem, self._graph = problem, graph
        self._options = {"foreach": False, "fused": False, "capturable": graph}
        self._options |= options

    def start(self) -> None:
        # Held until torch has copied it: JAX would use the memory again.
        start = jax.block_until_ready(self._problem.start())
        self._numbers = Numbers(*([*map(self._copy, part)] for part in start))
        self._optimizer = self._make_optimizer()
        self._take_step = self._step
        if self._graph:
            self._take_step = self._capture()
            self._restore(start)
        self._wait()

    def _copy(self, array: jax.Array) -> Any:
        return self._torch.from_dlpack(array).clone()

    def _make_optimizer(self) -> Any:
        numbers = self._numbers
        for param, grad in zip(numbers.params, self._problem.grads, strict=True):
            param.grad = self._copy(grad)
        optimizer = self._torch.optim.AdamW(
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
        on_device = self._options["fused"] or self._options["capturable"]
        for i, param in enumerate(numbers.params):
            state = optimizer.state[param]
            device = param.device if on_device else "cpu"
            state["step"] = self._torch.tensor(float(START_COUNT), device=device)
            for name, theirs in _MOMENTS.items():
                if getattr(numbers, name):
                    state[theirs] = getattr(numbers, name)[i]
        return optimizer

    def _step(self) -> None:
        self._optimizer.step()

    def _capture(self) -> Any:
        """One step as a CUDA graph, after one without it that loads the kernels."""
        cuda = self._torch.cuda
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            self._step()
        self._wait()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            self._step()
        return graph.replay

    def _restore(self, start: Numbers) -> None:
        """Start over at the addresses that the graph knows."""
        for tensors, arrays in zip(self._numbers, start, strict=True):
            for tensor, array in zip(tensors, arrays, strict=True):
                tensor.copy_(self._torch.from_dlpack(array))
        for state in self._optimizer.state.values():
            state["step"].fill_(START_COUNT)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._take_step()
        self._wait()

    def _wait(self) -> None:
        if jax.default_backend() == "gpu":
            self._torch.cuda.synchronize()

    def numbers(self) -> Numbers:
        return Numbers(*([*map(jax.dlpack.from_dlpack, x)] for x in self._numbers))

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
