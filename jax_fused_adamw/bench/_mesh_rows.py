"""The rows on a mesh: FSDP and ZeRO-1, ours and optax's, with and without a clip."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import optax

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._clip_rows import OPTAX_ERROR, OUR_ERROR, clipped
from jax_fused_adamw.bench._mesh import MeshProblem, find_collectives, run_steps
from jax_fused_adamw.bench._problem import (
    MAX_GRAD_NORM,
    Numbers,
    Problem,
    Row,
    clipped_bytes,
    fused_bytes,
)
from jax_fused_adamw.bench._rows import JaxStepper, build_optax, build_step, fused


class MeshNumbers(NamedTuple):
    """What a batch ends with.

    Attributes:
      numbers: parameters and moments.
      report: of the last step's gradients; None where the row makes none.
    """

    numbers: Numbers
    report: jfa.GradReport | None


class MeshStepper(JaxStepper):
    """A step whose results lie where its arguments do; see ``Stepper``."""

    def __init__(self, problem: MeshProblem, tx: Any, step: Any):
        super().__init__(problem, tx, problem.keep_placement(step))
        self.collectives = find_collectives(self._step.as_text())

    def start(self) -> None:
        super().start()
        # Else the first step would send the scalars to the other devices, in copies
        # that no later one has.
        placements = self._problem.state_placements(self._state)
        self._state = jax.block_until_ready(jax.device_put(self._state, placements))

    def run(self, steps: int) -> None:
        run_steps(super().run, steps)

    def numbers(self) -> MeshNumbers:
        return MeshNumbers(super().numbers(), optax.tree.get(self._state, "report"))


def run_on_one_device(
    problem: Problem, steps: int, report: jfa.GradReport | None
) -> Numbers:
    """Our own numbers on one device, clipped by the norm of another run's report."""
    if report is None:
        stepper = build_step(problem)
    else:
        tx = fused(problem, max_grad_norm=MAX_GRAD_NORM)
        step = lambda p, s, g, r: jfa.step(tx, g, s, p, report=r)  # noqa: E731
        report = jax.device_put(report, jax.devices()[0])
        stepper = JaxStepper(problem, tx, step, extra=(report,))
    stepper.start()
    stepper.run(steps)
    return stepper.numbers()


def _zero1(row: Row) -> Row:
    def build(problem: MeshProblem) -> JaxStepper:
        return row.build(dataclasses.replace(problem, zero1=True))

    name, peer = (f"{name}, ZeRO-1" for name in (row.name, row.peer))
    return dataclasses.replace(row, name=name, peer=peer, build=build)


_step = functools.partial(build_step, stepper=MeshStepper)
_optax = functools.partial(build_optax, stepper=MeshStepper)
_STEP = Row("step", _step, fused_bytes, ours=True)
_CLIP = Row(
    "step+clip",
    functools.partial(_step, max_grad_norm=MAX_GRAD_NORM),
    clipped_bytes,
    ours=True,
    norm_error=OUR_ERROR,
    peer="optax.adamw+clip",
)
_OPTAX = Row("optax.adamw", _optax, fused_bytes, optax_amsgrad=True)
_OPTAX_CLIP = Row(
    "optax.adamw+clip",
    functools.partial(_optax, wrap=clipped),
    clipped_bytes,
    optax_amsgrad=True,
    norm_error=OPTAX_ERROR,
    peer="optax.adamw+clip",
)

MESH_ROWS = {
    row.name: row
    for row in (
        _CLIP,
        _OPTAX_CLIP,
        _STEP,
        _OPTAX,
        _zero1(_CLIP),
        _zero1(_OPTAX_CLIP),
    )
}
