"""``--ladder``: from a plain loop to the packed kernel, one change at a time.

The rungs that the package does not use itself are native code of ``cc/ladder``. They
are custom calls with the operands of the optimizer's own, registered here when a
ladder is first run.
"""

import dataclasses
import functools
import importlib
import math

import jax
import numpy as np

import jax_fused_adamw as jfa
from jax_fused_adamw._hyperparams import encode
from jax_fused_adamw._operands import (
    Buffers,
    Operands,
    Scalars,
    UpdateConfig,
    flatten,
    unflatten_results,
)
from jax_fused_adamw._primitives import aliases, attributes
from jax_fused_adamw.bench._problem import (
    B1,
    B2,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Blocked,
    Numbers,
    Problem,
    Row,
    fused_bytes,
)
from jax_fused_adamw.bench._rows import JAX_ROWS, JaxStepper, Step
from jax_fused_adamw.bench._shapes import Leaves, named

_SIZES = (65_536, 1_048_576)
_CUDA_RUNGS = {"naive": 0, "16-byte vectors": 1}  # by the value of jfa::cuda::Rung


def ladder_models() -> dict[str, Leaves]:
    """One small leaf, one of a size where launches no longer count, and GPT-2's."""
    one_leaf = {f"{n:,} elements": [(n,)] for n in _SIZES}
    return {**one_leaf, "gpt2": named("gpt2")}


class HostStepper(JaxStepper):
    """A step on the processor, also where JAX has a GPU; see ``Stepper``."""

    def __init__(self, problem: Problem, step: Step):
        try:
            self._host = jax.devices("cpu")[0]
        except RuntimeError as error:
            raise Blocked(
                "needs JAX's CPU backend: leave cpu in JAX_PLATFORMS, or unset it"
            ) from error
        own = Problem(problem.leaves, problem.dtype, problem.amsgrad)
        with jax.default_device(self._host):
            super().__init__(own, _make_state(), step)

    def start(self) -> None:
        with jax.default_device(self._host):
            super().start()

    def numbers(self) -> Numbers:
        """Where the reference is, to be compared with it."""
        return jax.device_put(super().numbers(), jax.devices()[0])


@functools.cache
def _register(platform: str) -> str:
    """Registers the rungs of ``"cpu"`` or ``"cuda"``; returns their target's name."""
    info = getattr(jfa.kernel_info(), platform)
    if not info.loaded:
        raise Blocked(f"no kernel: {info.reason}")
    module = importlib.import_module(f"jax_fused_adamw._{platform}")
    ((name, handler),) = module.ladder_registrations().items()
    platform = {"cpu": "cpu", "cuda": "CUDA"}[platform]
    jax.ffi.register_ffi_target(name, handler, platform=platform)
    return name


def _make_state() -> jfa.FusedAdamW:
    """The rungs keep the optimizer's own state; its ``init`` is all they use."""
    return jfa.fused_adamw(LEARNING_RATE)


def _native_step(target: str, rung: int) -> Step:
    """A step by the ladder's custom call, with the operands of ``fused_adamw``'s."""
    hyper_bits, *_ = encode(
        {
            "learning_rate": LEARNING_RATE,
            "b1": B1,
            "b2": B2,
            "eps": EPS,
            "eps_root": 0.0,
            "weight_decay": WEIGHT_DECAY,
            "gradient_scale": 1.0,
            "max_grad": math.inf,
            "ema_decay": 0.0,
        }
    )

    def step(params, state, grads):
        config = UpdateConfig(decays=(True,) * len(params), count_step=True)
        counters = [state.count, state.skipped, state.consecutive]
        scalars = Scalars(
            state.count, np.bool_(False), hyper_bits, skip_counters=counters[1:]
        )
        buffers = Buffers(params, grads, state.mu, state.nu)
        results = [*params, *state.mu, *state.nu, *counters]
        call = jax.ffi.ffi_call(
            target,
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
            input_output_aliases=aliases(config),
        )
        operands = flatten(Operands(scalars, [], buffers))
        flat = call(*operands, **attributes(config), rung=np.int64(rung))
        new = unflatten_results(config, flat)
        count, skipped, consecutive = new.counters
        return new.out, state._replace(
            count=count,
            mu=new.mu,
            nu=new.nu,
            skipped=skipped,
            consecutive=consecutive,
        )

    return step


def _build_loop(problem: Problem) -> HostStepper:
    return HostStepper(problem, _native_step(_register("cpu"), rung=0))


def _build_cuda(rung: int, problem: Problem) -> JaxStepper:
    if jax.default_backend() != "gpu":
        raise Blocked("needs a CUDA device")
    step = _native_step(_register("cuda"), rung)
    return JaxStepper(problem, _make_state(), step)


def _with_gradients(row: Row, dtype: str) -> Row:
    """The row with gradients of another dtype than the run's."""

    def variant(function):
        return lambda problem: function(dataclasses.replace(problem, dtype=dtype))

    return dataclasses.replace(
        row,
        name=f"{row.name} {dtype}",
        build=variant(row.build),
        num_bytes=variant(row.num_bytes),
        dtype=dtype,
    )


_BENCH_ROWS = {row.name: row for row in JAX_ROWS}
_PACKED = dataclasses.replace(_BENCH_ROWS["step"], name="packed")

LADDER_ROWS = (
    Row("cpu loop", _build_loop, fused_bytes, profiled=False),
    _BENCH_ROWS["staged"],
    *(
        Row(name, functools.partial(_build_cuda, rung), fused_bytes)
        for name, rung in _CUDA_RUNGS.items()
    ),
    _PACKED,
    _with_gradients(_PACKED, "bfloat16"),
    _BENCH_ROWS["optax.adamw"],
)
