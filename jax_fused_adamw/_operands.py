"""The shape of one update call: what varies at compile time, and its operands.

The flat operand order is that of ``cc/ffi/operands.h``: the scalars in the order of
:class:`Scalars`, what the call waits for, then kind by kind the leaves, in the order of
:class:`Buffers`.

A hyperparameter that the host knows travels as the bit pattern of its float64, so
that nothing is lost before the kernel's last rounding, and all of them share one
array: XLA rewrites small constants into little computations, each a kernel of its
own on a GPU. One that only the device knows is an operand of its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

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
    "ema_decay",
)

AMSGRAD_KINDS = ("off", "uncorrected", "corrected")  # by the value of jfa::Amsgrad
CLIP_KINDS = ("off", "norm", "value")  # by the value of jfa::Clip


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """What changes the compiled code of an update call.

    Attributes:
      decays: for each leaf of the call, whether weight decay applies to it.
      lr_scales: for each leaf what multiplies its learning rate; empty where that is 1
        for all.
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
      mu_dtype: of the first moments, by name.
      nu_dtype: of the second moments and their maxima, by name. Both are float64 in a
        call of float64 parameters, and in no other.
      has_copies: parameters are float32 and ``copies``, of lower precision, are
        operands and results: the new parameters rounded to nearest. Only with
        ``write_params``.
      has_ema: an average of the parameters is an operand and a result.
      stochastic_moments: moments below float32 are rounded stochastically.
      stochastic_params: new bfloat16 parameters are.
      leaf_ids: with noise, for each leaf its number in the whole tree.
      shard_strides: with noise and sharded leaves, for each leaf the numbers of
        :func:`._noise.shard_strides`.
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
    lr_scales: tuple[float, ...] = ()
    traced: tuple[str, ...] = ()
    amsgrad: str = "off"
    clip: str = "off"
    skip_nonfinite: bool = False
    nesterov: bool = False
    maximize: bool = False
    write_params: bool = True
    mu_dtype: str = "float32"
    nu_dtype: str = "float32"
    has_copies: bool = False
    has_ema: bool = False
    stochastic_moments: bool = False
    stochastic_params: bool = False
    leaf_ids: tuple[int, ...] = ()
    shard_strides: tuple[tuple[int, ...], ...] = ()
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
    def real(self) -> np.dtype:
        """Of the arithmetic, and of averages."""
        is_float64 = "float64" in (self.mu_dtype, self.nu_dtype)
        return np.dtype(np.float64 if is_float64 else np.float32)

    @property
    def has_noise(self) -> bool:
        return self.stochastic_moments or self.stochastic_params

    @property
    def num_leaves(self) -> int:
        return len(self.decays)

    @property
    def num_scalars(self) -> int:
        return sum(self.scalar_counts)

    @property
    def scalar_counts(self) -> "Scalars":
        """Of each field of :class:`Scalars`, how many operands it is."""
        return Scalars(
            count=1,
            skip_update=1,
            hyper_bits=1,
            traced=len(self.traced),
            norms=2 * (self.clip == "norm" and not self.analyze),
            nonfinite=int(self.skip_nonfinite and not self.analyze),
            gradient_scale=int(self.analyze),
            noise=int(self.has_noise),
            skip_counters=2 * self.count_step,
        )

    @property
    def first_leaf(self) -> int:
        """Index of the first parameter among the flat operands."""
        return self.num_scalars + self.num_after

    @property
    def moment_kinds(self) -> tuple[str, ...]:
        return ("mu", "nu", "nu_max") if self.has_nu_max else ("mu", "nu")

    @property
    def operand_kinds(self) -> tuple[str, ...]:
        """The fields of :class:`Buffers` that are operands."""
        moments = () if self.zero_moments else self.moment_kinds
        return ("params", "grads", *moments, *self._kept_kinds)

    @property
    def result_kinds(self) -> tuple[str, ...]:
        """The fields of :class:`Results` that hold leaves."""
        return ("out", *self.moment_kinds, *self._kept_kinds)

    @property
    def _kept_kinds(self) -> tuple[str, ...]:
        return ("copies",) * self.has_copies + ("ema",) * self.has_ema

    @property
    def num_leaf_operands(self) -> int:
        return len(self.operand_kinds) * self.num_leaves

    @property
    def num_leaf_results(self) -> int:
        return len(self.result_kinds) * self.num_leaves

    def of_leaves(self, leaves: Sequence[int], **changes: Any) -> "UpdateConfig":
        """For a call of some of the leaves."""
        of_leaf: dict[str, Any] = {
            name: tuple(getattr(self, name)[i] for i in leaves)
            for name in ("decays", "lr_scales", "leaf_ids", "shard_strides")
            if getattr(self, name)
        }
        return dataclasses.replace(self, **of_leaf, **changes)


class Scalars(NamedTuple):
    """What is the same for every leaf; with members, an optional leading axis."""

    count: Any  # int32[]: steps applied before this one
    skip_update: Any  # bool[]
    hyper_bits: Any  # uint32[9, 2]: float64 patterns, low word first
    traced: Any = ()  # float32[] each, by UpdateConfig.traced
    norms: Any = ()  # float32[]: norm, scaled_norm, with clip="norm"
    nonfinite: Any = ()  # int32[]: one, with skip_nonfinite
    gradient_scale: Any = ()  # float32[]: one, with analyze
    noise: Any = ()  # uint32[1 + leaves, 2]: one, with noise; see _noise.py
    skip_counters: Any = ()  # int32[]: skipped, consecutive, with count_step


def listed(scalars: Scalars) -> Scalars:
    """Every field as a list of arrays."""
    return Scalars._make([*([x] for x in scalars[:3]), *scalars[3:]])


def field_shapes(config: UpdateConfig) -> Scalars:
    """Of an operand of each field, the shape without members."""
    return Scalars(
        count=(),
        skip_update=(),
        hyper_bits=(len(HYPERPARAMETERS), 2),
        noise=(1 + config.num_leaves, 2),
    )


def value_shapes(config: UpdateConfig) -> list[tuple[int, ...]]:
    """Of each scalar operand, the shape without members."""
    fields = zip(config.scalar_counts, field_shapes(config), strict=True)
    return [shape for count, shape in fields for _ in range(count)]


class Buffers(NamedTuple):
    """Operand leaves, one list a kind; empty for a kind that is no operand.

    Between the calls of a mixed tree, ``copies`` has None for a leaf without one.
    """

    params: Sequence[Any]
    grads: Sequence[Any]
    mu: Sequence[Any] = ()
    nu: Sequence[Any] = ()
    nu_max: Sequence[Any] = ()
    copies: Sequence[Any] = ()  # of lower precision, of float32 parameters
    ema: Sequence[Any] = ()

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
    nu_max: Sequence[Any] = ()
    copies: Sequence[Any] = ()
    ema: Sequence[Any] = ()
    counters: Sequence[Any] = ()
    report: Sequence[Any] = ()

    @property
    def leaves(self) -> tuple[Sequence[Any], ...]:
        return self[: self._fields.index("counters")]


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
    fields, rest = [], flat
    for count in config.scalar_counts:
        field, rest = rest[:count], rest[count:]
        fields.append(field)
    (count,), (skip_update,), (hyper_bits,), *others = fields
    kinds = _by_kind(config.operand_kinds, config.num_leaves, rest[config.num_after :])
    return Operands(
        Scalars(count, skip_update, hyper_bits, *others),
        rest[: config.num_after],
        Buffers(**kinds),
    )


def flatten_results(results: Results) -> list[Any]:
    return [x for kind in results for x in kind]


def unflatten_results(config: UpdateConfig, flat: Sequence[Any]) -> Results:
    kinds = _by_kind(config.result_kinds, config.num_leaves, flat)
    others = flat[config.num_leaf_results :]
    num_counters = 3 * config.count_step
    return Results(
        **kinds, counters=others[:num_counters], report=others[num_counters:]
    )


def _by_kind(
    kinds: Sequence[str], n: int, flat: Sequence[Any]
) -> dict[str, Sequence[Any]]:
    return {kind: flat[i * n : (i + 1) * n] for i, kind in enumerate(kinds)}


class Part(NamedTuple):
    """One of several calls.

    Attributes:
      leaves: its leaves, by index.
      after: what else it waits for.
      changes: in what its configuration differs from that of all leaves.
    """

    leaves: Sequence[int]
    after: Sequence[Any] = ()
    changes: dict[str, Any] = {}


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
    if len(parts) == 1 and not parts[0].after and not parts[0].changes:
        return call(config, operands)
    results: list[Results] = []
    for part in parts:
        after = [*operands.after, *part.after]
        if results:
            after.append(results[-1].mu[0])
        counts = config.count_step and part is parts[-1]
        part_config = config.of_leaves(
            part.leaves, num_after=len(after), count_step=counts, **part.changes
        )
        scalars = _scalars_of_leaves(part_config, operands.scalars, part.leaves)
        buffers = operands.buffers.of_leaves(part.leaves)
        if not part_config.has_copies:
            buffers = buffers._replace(copies=[])
        results.append(call(part_config, Operands(scalars, after, buffers)))
    return _in_order(results, [i for part in parts for i in part.leaves])


def _scalars_of_leaves(
    config: UpdateConfig, scalars: Scalars, leaves: Sequence[int]
) -> Scalars:
    rows = np.array([0, *(1 + i for i in leaves)])  # the seed, then a row a leaf
    noise = scalars.noise if config.has_noise else []
    return scalars._replace(
        noise=[x[..., rows, :] for x in noise],
        skip_counters=scalars.skip_counters if config.count_step else [],
    )


def _in_order(results: Sequence[Results], leaves: Sequence[int]) -> Results:
    """The results of parts as those of one call; ``leaves`` are theirs in sequence."""
    places = sorted(range(len(leaves)), key=leaves.__getitem__)
    kinds: list[list[Any]] = []
    for parts in zip(*(part.leaves for part in results), strict=True):
        if not any(parts):
            kinds.append([])
            continue
        missing = [[None] * len(part.out) for part in results]
        joined = [x for kind in map(_or, parts, missing) for x in kind]
        kinds.append([joined[i] for i in places])
    return Results._make([*kinds, results[-1].counters, ()])


def _or(kind: Sequence[Any], missing: Sequence[Any]) -> Sequence[Any]:
    return kind or missing
