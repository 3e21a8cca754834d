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
from collections.abc import Callable, Sequence
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
    "max_grad",
)

AMSGRAD_KINDS = ("off", "uncorrected", "corrected")  # by the value of jfa::Amsgrad
CLIP_KINDS = ("off", "norm", "value")  # by the value of jfa::Clip


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """What changes the compiled code of an update call.

    Attributes:
      decays: for each leaf of the call, whether weight decay applies to it.
      traced: the hyperparameters that are operands of their own, in the order of
        :data:`HYPERPARAMETERS`.
      amsgrad: one of :data:`AMSGRAD_KINDS`.
      clip: one of :data:`CLIP_KINDS`: what the hyperparameter ``max_grad`` limits. With
        ``"norm"``, the norms are operands.
      skip_nonfinite: the number of non-finite gradients is an operand, and skips the
        step unless it is zero.
      nesterov: Nesterov's momentum, as optax's ``nesterov=True``.
      maximize: ascend instead of descend.
      write_params: return new parameters; otherwise the updates.
      alias: let each output take the buffer of its input.
      zero_moments: the moments are zero and no operands: a first step, which reads 8
        bytes less for each element, and needs no state to have been made.
      num_after: the operands that the call only waits for (:mod:`._buckets`).
      analyze: the call makes the report of its own gradients (see
        :mod:`._analyzed_update`): what it reads of one is no operand, and the report
        is a result.
      count_step: the counters are operands and results. A step of several calls is
        counted by the last one.
      members: under vmap with batched scalars, the number of members; then every
        leaf has a leading axis of this size, and a scalar may have one.
    """

    decays: tuple[bool, ...]
    traced: tuple[str, ...] = ()
    amsgrad: str = "off"
    clip: str = "off"
    skip_nonfinite: bool = False
    nesterov: bool = False
    maximize: bool = False
    write_params: bool = True
    alias: bool = True
    zero_moments: bool = False
    num_after: int = 0
    analyze: bool = False
    count_step: bool = False
    members: int | None = None

    @property
    def has_nu_max(self) -> bool:
        return self.amsgrad != "off"

    @property
    def num_leaves(self) -> int:
        return len(self.decays)

    @property
    def num_scalars(self) -> int:
        of_report = self.num_norms + self.num_nonfinite + self.analyze
        return 3 + len(self.traced) + of_report + 2 * self.count_step

    @property
    def num_norms(self) -> int:
        return 2 * (self.clip == "norm" and not self.analyze)

    @property
    def num_nonfinite(self) -> int:
        return int(self.skip_nonfinite and not self.analyze)

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


class Scalars(NamedTuple):
    """What is the same for every leaf; with members, an optional leading axis."""

    count: Any  # int32[]: steps applied before this one
    skip_update: Any  # bool[]
    hyper_bits: Any  # uint32[8, 2]: float64 patterns, low word first
    traced: Sequence[Any]  # float32[] each, by UpdateConfig.traced
    norms: Sequence[Any]  # float32[]: norm, scaled_norm, with clip="norm"
    nonfinite: Sequence[Any]  # int32[]: one, with skip_nonfinite
    gradient_scale: Sequence[Any]  # float32[]: one, with analyze
    skip_counters: Sequence[Any]  # int32[]: skipped, consecutive, with count_step


VALUE_SHAPES = Scalars((), (), (len(HYPERPARAMETERS), 2), (), (), (), (), ())


def listed(scalars: Scalars) -> Scalars:
    """Every field as a list of arrays."""
    return Scalars(*([x] for x in scalars[:3]), *scalars[3:])


def value_shapes(config: UpdateConfig) -> list[tuple[int, ...]]:
    """Of each scalar operand, the shape without members."""
    first = list(VALUE_SHAPES[:3])
    return first + [()] * (config.num_scalars - len(first))


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
    """Result leaves; ``out`` holds new parameters or updates.

    ``counters`` are count, skipped and consecutive after the step, with ``count_step``;
    ``report`` with ``analyze`` is norm, scaled norm, max_abs and nonfinite, then rows.
    """

    out: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]
    nu_max: Sequence[Any]
    counters: Sequence[Any]
    report: Sequence[Any] = ()


class Operands(NamedTuple):
    """All operands of a call; ``after`` holds arrays that are waited for, not read."""

    scalars: Scalars
    after: Sequence[Any]
    buffers: Buffers


def flatten(operands: Operands) -> list[Any]:
    scalars = (x for kind in listed(operands.scalars) for x in kind)
    leaves = (leaf for kind in operands.buffers for leaf in kind)
    return [*scalars, *operands.after, *leaves]


def unflatten(config: UpdateConfig, flat: Sequence[Any]) -> Operands:
    count, skip_update, hyper_bits, *others = flat[: config.num_scalars]
    traced, others = _cut(others, len(config.traced))
    norms, others = _cut(others, config.num_norms)
    nonfinite, others = _cut(others, config.num_nonfinite)
    scale, skip_counters = _cut(others, int(config.analyze))
    after = flat[config.num_scalars : config.first_leaf]
    kinds = _by_kind(flat[config.first_leaf :], config.num_leaves)
    return Operands(
        Scalars(
            count,
            skip_update,
            hyper_bits,
            traced,
            norms,
            nonfinite,
            scale,
            skip_counters,
        ),
        after,
        Buffers(*kinds, *([] for _ in range(5 - len(kinds)))),
    )


def flatten_results(results: Results) -> list[Any]:
    return [x for kind in results for x in kind]


def unflatten_results(config: UpdateConfig, flat: Sequence[Any]) -> Results:
    leaves, others = _cut(flat, config.num_result_kinds * config.num_leaves)
    counters, report = _cut(others, 3 * config.count_step)
    kinds = _by_kind(leaves, config.num_leaves)
    return Results(*kinds, *([] for _ in range(4 - len(kinds))), counters, report)


def _cut(flat: Sequence[Any], n: int) -> tuple[Sequence[Any], Sequence[Any]]:
    return flat[:n], flat[n:]


def _by_kind(flat: Sequence[Any], n: int) -> list[Sequence[Any]]:
    return [flat[start : start + n] for start in range(0, len(flat), n)] if n else []


class Part(NamedTuple):
    """Leaves of one of several calls, by index, and what else that call waits for."""

    leaves: Sequence[int]
    after: Sequence[Any] = ()


def parts_of(num_leaves: int, leaves_per_part: int) -> list[Part]:
    starts = range(0, num_leaves, leaves_per_part)
    return [Part(range(i, min(i + leaves_per_part, num_leaves))) for i in starts]


def call_in_parts(
    call: Callable[[UpdateConfig, Operands], Results],
    parts: Sequence[Part],
    config: UpdateConfig,
    operands: Operands,
) -> Results:
    """One call for each part, each waiting for the one before; the last one counts.

    The counters are updated in place, so the call that counts must be the last one to
    read them; and the order in which :mod:`._buckets` puts its buckets is kept.
    """
    if len(parts) == 1 and not parts[0].after:
        return call(config, operands)
    results: list[Results] = []
    for part in parts:
        after = [*operands.after, *part.after]
        if results:
            after.append(results[-1].mu[0])
        counts = config.count_step and part is parts[-1]
        scalars = operands.scalars
        if not counts:
            scalars = scalars._replace(skip_counters=[])
        part_config = dataclasses.replace(
            config,
            decays=tuple(config.decays[i] for i in part.leaves),
            num_after=len(after),
            count_step=counts,
        )
        buffers = operands.buffers.of_leaves(part.leaves)
        results.append(call(part_config, Operands(scalars, after, buffers)))
    return _in_order(results, [i for part in parts for i in part.leaves])


def _in_order(results: Sequence[Results], leaves: Sequence[int]) -> Results:
    """The results of parts as those of one call; ``leaves`` are theirs in sequence."""
    places = sorted(range(len(leaves)), key=leaves.__getitem__)
    *kinds, counters, _ = (
        [leaf for part in kind for leaf in part] for kind in zip(*results, strict=True)
    )
    return Results(
        *([kind[i] for i in places] if kind else [] for kind in kinds), counters
    )
