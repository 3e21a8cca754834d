"""The shape of one update call: what varies at compile time, and its operands.

The flat operand order is that of ``cc/ffi/operands.h``: the scalars in the order of
:class:`Scalars`, what the call waits for, then every parameter, every gradient, every
mu, every nu, and with AMSGrad every nu_max.

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
      zero_moments: the moments are zero and no operands: a first step, which reads 8
        bytes less for each element, and needs no state to have been made.
      num_after: the operands that the call only waits for (:mod:`._buckets`).
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
    zero_moments: bool = False
    num_after: int = 0
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

    @property
    def first_leaf(self) -> int:
        """Index of the first parameter among the flat operands."""
        return self.num_scalars + self.num_after

    @property
    def num_operand_kinds(self) -> int:
        return 2 if self.zero_moments else 5 if self.has_nu_max else 4

    @property
    def num_result_kinds(self) -> int:
        return 4 if self.has_nu_max else 3

    def of_leaves(self, leaves: Sequence[int]) -> "UpdateConfig":
        return dataclasses.replace(self, decays=tuple(self.decays[i] for i in leaves))


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
    """Operand leaves, one list a kind.

    ``nu_max`` is empty without AMSGrad, and all moments are with ``zero_moments``.
    """

    params: Sequence[Any]
    grads: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]
    nu_max: Sequence[Any]

    def of_leaves(self, leaves: Sequence[int]) -> "Buffers":
        return Buffers(*([kind[i] for i in leaves] if kind else [] for kind in self))


class Results(NamedTuple):
    """Result leaves; ``out`` holds new parameters or updates."""

    out: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]
    nu_max: Sequence[Any]


class Operands(NamedTuple):
    """All operands of a call; ``after`` holds arrays that are waited for, not read."""

    scalars: Scalars
    after: Sequence[Any]
    buffers: Buffers


def flatten(operands: Operands) -> list[Any]:
    step, skip_update, hyper_bits, traced = operands.scalars
    leaves = (leaf for kind in operands.buffers for leaf in kind)
    return [step, skip_update, hyper_bits, *traced, *operands.after, *leaves]


def unflatten(config: UpdateConfig, flat: Sequence[Any]) -> Operands:
    step, skip_update, hyper_bits, *traced = flat[: config.num_scalars]
    after = flat[config.num_scalars : config.first_leaf]
    kinds = _split(flat[config.first_leaf :], config.num_leaves)
    return Operands(
        Scalars(step, skip_update, hyper_bits, traced),
        after,
        Buffers(*kinds, *([] for _ in range(5 - len(kinds)))),
    )


def unflatten_results(config: UpdateConfig, flat: Sequence[Any]) -> Results:
    kinds = _split(flat, config.num_leaves)
    return Results(*kinds, *([] for _ in range(4 - len(kinds))))


def _split(flat: Sequence[Any], n: int) -> list[Sequence[Any]]:
    return [flat[start : start + n] for start in range(0, len(flat), n)] if n else []


def chunks(
    config: UpdateConfig, operands: Operands, leaves_per_call: int
) -> Iterator[tuple[UpdateConfig, Operands]]:
    """Cuts a call into calls of at most ``leaves_per_call`` leaves, in order."""
    for start in range(0, config.num_leaves, leaves_per_call):
        leaves = range(start, min(start + leaves_per_call, config.num_leaves))
        part = operands._replace(buffers=operands.buffers.of_leaves(leaves))
        yield config.of_leaves(leaves), part


def concatenate(parts: Sequence[Results]) -> Results:
    kinds = zip(*parts, strict=True) if parts else [()] * len(Results._fields)
    return Results(*([leaf for part in kind for leaf in part] for kind in kinds))


def reorder(results: Results, leaves: Sequence[int]) -> Results:
    """Puts results of the leaves that ``leaves`` numbers into the order 0, 1, ..."""
    places = sorted(range(len(leaves)), key=leaves.__getitem__)
    return Results(*([kind[i] for i in places] if kind else [] for kind in results))
