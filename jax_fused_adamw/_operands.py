"""The shape of one update call: what varies at compile time, and its operands.

The flat operand order is that of ``cc/ffi/operands.h``: the scalars in the order of
:class:`Scalars`, then every parameter, every gradient, every mu, every nu, and with
AMSGrad every nu_max.

A hyperparameter that the host knows travels as the bit pattern of its float64, so
that nothing is lost before the kernel's last rounding, and all of them share one
array: XLA rewrites small constants into little computations, each a kernel of its
own on a GPU. One that only the device knows is an operand of its own.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# By the values of jfa::Hyper.
HYPERPARAMETERS = (
    "learning_rate",
    "b1",
    "b2",
    "eps",
    "eps_root",
    "weight_decay",
    "gradient_scale",
)

AMSGRAD_KINDS = ("off", "uncorrected", "corrected")  # by the value of jfa::Amsgrad


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """What changes the compiled code of an update call.

    Attributes:
      decays: for each leaf of the call, whether weight decay applies to it.
      traced: the hyperparameters that are operands of their own, in the order of
        :data:`HYPERPARAMETERS`.
      amsgrad: one of :data:`AMSGRAD_KINDS`.
      nesterov: Nesterov's momentum, as optax's ``nesterov=True``.
      maximize: ascend instead of descend.
      write_params: return new parameters; otherwise the updates.
      alias: let each output take the buffer of its input.
      members: under vmap with batched scalars, the number of members; then every
        leaf has a leading axis of this size, and a scalar may have one.
    """

    decays: tuple[bool, ...]
    traced: tuple[str, ...] = ()
    amsgrad: str = "off"
    nesterov: bool = False
    maximize: bool = False
    write_params: bool = True
    alias: bool = True
    members: int | None = None

    @property
    def has_nu_max(self) -> bool:
        return self.amsgrad != "off"

    @property
    def num_leaves(self) -> int:
        return len(self.decays)

    @property
    def num_scalars(self) -> int:
        return 3 + len(self.traced)

    def of_leaves(self, start: int, stop: int) -> "UpdateConfig":
        return dataclasses.replace(self, decays=self.decays[start:stop])


class Scalars(NamedTuple):
    """What is the same for every leaf; with members, an optional leading axis."""

    step: Any  # int32[]: 1-based number of this step if it is applied
    skip_update: Any  # bool[]
    hyper_bits: Any  # uint32[7, 2]: float64 patterns, low word first
    traced: Sequence[Any]  # float32[] each, by UpdateConfig.traced


VALUE_SHAPES = Scalars((), (), (len(HYPERPARAMETERS), 2), ())


def listed(scalars: Scalars) -> Scalars:
    """Every field as a list of arrays."""
    return Scalars(*([x] for x in scalars[:3]), scalars.traced)


class Buffers(NamedTuple):
    """Operand leaves, one list a kind; ``nu_max`` is empty without AMSGrad."""

    params: Sequence[Any]
    grads: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]
    nu_max: Sequence[Any]


class Results(NamedTuple):
    """Result leaves; ``out`` holds new parameters or updates."""

    out: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]
    nu_max: Sequence[Any]


def flatten(scalars: Scalars, buffers: Buffers) -> list[Any]:
    step, skip_update, hyper_bits, traced = scalars
    leaves = (leaf for kind in buffers for leaf in kind)
    return [step, skip_update, hyper_bits, *traced, *leaves]


def unflatten(config: UpdateConfig, operands: Sequence[Any]) -> tuple[Scalars, Buffers]:
    step, skip_update, hyper_bits, *traced = operands[: config.num_scalars]
    kinds = _split_kinds(config, operands[config.num_scalars :])
    scalars = Scalars(step, skip_update, hyper_bits, traced)
    return scalars, Buffers(*kinds, *([] for _ in range(5 - len(kinds))))


def unflatten_results(config: UpdateConfig, flat: Sequence[Any]) -> Results:
    kinds = _split_kinds(config, flat)
    return Results(*kinds, *([] for _ in range(4 - len(kinds))))


def _split_kinds(config: UpdateConfig, flat: Sequence[Any]) -> list[Sequence[Any]]:
    n = config.num_leaves
    return [flat[start : start + n] for start in range(0, len(flat), n)] if n else []


def chunks(
    config: UpdateConfig, buffers: Buffers, leaves_per_call: int
) -> Iterator[tuple[UpdateConfig, Buffers]]:
    """Cuts a call into calls of at most ``leaves_per_call`` leaves, in order."""
    for start in range(0, config.num_leaves, leaves_per_call):
        stop = min(start + leaves_per_call, config.num_leaves)
        part = Buffers(*(kind[start:stop] for kind in buffers))
        yield config.of_leaves(start, stop), part


def concatenate(parts: Sequence[Results]) -> Results:
    kinds = zip(*parts, strict=True) if parts else [()] * len(Results._fields)
    return Results(*([leaf for part in kind for leaf in part] for kind in kinds))
