"""What a run leaves, and its JSON file."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from jax_fused_adamw.bench import BenchError

SCHEMA = 1
MEASURED, WRONG, BLOCKED, FAILED = "measured", "wrong", "blocked", "failed"


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the samples."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        return cls(statistics.median(samples), min(samples), max(samples))


@dataclasses.dataclass(frozen=True)
class Timed:
    """What every row has. Only a measured one has times.

    Attributes:
      name: of the row.
      ours: whether it is this package's.
      status: ``"measured"``, ``"wrong"``, ``"blocked"`` (it cannot run here) or
        ``"failed"``.
      reason: why it is not measured, or a measured one has no device time.
      wall_ms: of a step, one number a sample.
      device_us: of a step, by the profiler; None where it sees no device.
      launches: kernels and copies of a step.
      compile_s: seconds to trace and compile.
      peak_bytes: what the compiled step holds at most.
    """

    name: str
    ours: bool
    status: str
    reason: str | None = None
    wall_ms: Spread | None = None
    device_us: Spread | None = None
    launches: float | None = None
    compile_s: float | None = None
    peak_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class RowResult(Timed):
    """A row of the isolated optimizer step.

    Attributes:
      num_bytes: counted memory traffic of a parameter.
      percent_of_limit: share of the copy bandwidth.
      peer: the row of optax that follows the same rule.
    """

    num_bytes: int | None = None
    percent_of_limit: float | None = None
    peer: str = "optax.adamw"


@dataclasses.dataclass(frozen=True)
class TrainRowResult(Timed):
    """A row of whole train steps.

    Attributes:
      peer: the row of optax that follows the same rule; None for the first row, which
        takes gradients and no step.
      optimizer_share: what a step takes longer than its gradients, as a share of it.
      no_graphs_ms: wall time of a step without CUDA graphs.
      no_graphs_reason: why that is not measured.
    """

    peer: str | None = None
    optimizer_share: float | None = None
    no_graphs_ms: Spread | None = None
    no_graphs_reason: str | None = None


@dataclasses.dataclass(frozen=True)
class ShardedRowResult(RowResult):
    """A row on a mesh; its times are those of the device that takes the longest.

    Attributes:
      median_us: of a step, the median over the devices.
      communication_us: of ``device_us``, what is said to other devices and waited for.
      efficiency: one device's time over the sum of all devices' times.
      collectives: of the compiled step, by name: ``count`` and ``bytes`` of results.
      losses: of a train run, one a step.
    """

    median_us: Spread | None = None
    communication_us: Spread | None = None
    efficiency: float | None = None
    collectives: dict[str, dict[str, int]] | None = None
    losses: list[float] | None = None


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """All rows on one model."""

    name: str
    num_leaves: int
    num_parameters: int
    rows: list[RowResult]


@dataclasses.dataclass(frozen=True)
class WorkloadResult:
    """All rows on one workload; the first one takes gradients and no step.

    Attributes:
      name: of the workload.
      step: what is timed, in words.
      iterations: steps of a batch.
      num_leaves: of the parameters.
      num_parameters: in them.
      rows: one result each.
    """

    name: str
    step: str
    iterations: int
    num_leaves: int
    num_parameters: int
    rows: list[TrainRowResult]


@dataclasses.dataclass(frozen=True)
class ShardedModelResult:
    """All rows of one model on one mesh.

    Attributes:
      name: of model and mesh.
      shape: of the model.
      num_devices: of the mesh.
      step: what is timed, in words.
      iterations: steps of a batch.
      num_leaves: of the parameters.
      num_parameters: in them.
      peak_bytes_in_use: what each device's allocator held at most, all rows, checks
        and earlier models of the process included; None where it does not tell.
      rows: one result each.
    """

    name: str
    shape: str
    num_devices: int
    step: str
    iterations: int
    num_leaves: int
    num_parameters: int
    peak_bytes_in_use: list[int] | None
    rows: list[ShardedRowResult]


@dataclasses.dataclass(frozen=True)
class Run:
    """What every kind of run has.

    Attributes:
      machine: of ``describe_machine``.
      load: ``before`` and ``after``, of ``describe_load``.
      setting: hyperparameters and options, every one of them.
      models: one result each.
      kind: its name in a file.
      compared: entries of ``setting`` that two runs must share to be compared.
    """

    machine: dict[str, Any]
    load: dict[str, Any]
    setting: dict[str, Any]
    models: list[Any]
    kind: ClassVar[str]
    compared: ClassVar[tuple[str, ...]]

    def rows(self) -> Iterator[tuple[str, Any]]:
        for model in self.models:
            for row in model.rows:
                yield model.name, row


@dataclasses.dataclass(frozen=True)
class Results(Run):
    """A run of isolated optimizer steps.

    Attributes:
      limit: copy bandwidth and how it was measured.
      models: one :class:`ModelResult` each.
    """

    limit: dict[str, Any]
    kind = "optimizer step"
    compared = ("dtype", "amsgrad")


@dataclasses.dataclass(frozen=True)
class TrainResults(Run):
    """A run of whole train steps; ``models`` holds a :class:`WorkloadResult` each."""

    kind = "train step"
    compared = ("attention", "activations")


@dataclasses.dataclass(frozen=True)
class ShardedResults(Results):
    """A run on meshes; ``models`` holds a :class:`ShardedModelResult` each."""

    kind = "sharded step"


# Of a run, of its models and of their rows, by kind.
_CLASSES = {
    Results.kind: (Results, ModelResult, RowResult),
    TrainResults.kind: (TrainResults, WorkloadResult, TrainRowResult),
    ShardedResults.kind: (ShardedResults, ShardedModelResult, ShardedRowResult),
}
_SPREADS = ("wall_ms", "device_us", "no_graphs_ms", "median_us", "communication_us")


def comparable_us(rows: Sequence[Timed]) -> list[float]:
    """Median time of a step of each measured row.

    The device's where every row has it, else wall time of all: never one against the
    other.
    """
    if all(row.device_us is not None for row in rows):
        return [row.device_us.median for row in rows]
    return [1e3 * row.wall_ms.median for row in rows]


def write(results: Run, path: pathlib.Path) -> None:
    """Writes the JSON file."""
    content = {"schema": SCHEMA, "kind": results.kind, **dataclasses.asdict(results)}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise BenchError(
            f"--json {str(path)!r}: cannot write: {error.strerror}"
        ) from error


def read(path: pathlib.Path) -> Run:
    """Reads what :func:`write` wrote.

    Raises:
      BenchError: no such file, another schema, or not a results file at all.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{str(path)!r}: cannot read results: {error}") from error
    schema = content.pop("schema", None) if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise BenchError(
            f"{str(path)!r}: expected results of schema {SCHEMA}, got {schema}; "
            "measure again with --json"
        )
    try:
        run, model, row = _CLASSES[content.pop("kind", Results.kind)]
        models = [
            model(**fields | {"rows": [_row(row, each) for each in fields["rows"]]})
            for fields in content.pop("models")
        ]
        return run(models=models, **content)
    except (KeyError, TypeError) as error:
        raise BenchError(f"{str(path)!r}: not a results file: {error}") from error


def _row(row: type[Timed], fields: dict[str, Any]) -> Timed:
    spreads = {
        name: Spread(**fields[name])
        for name in _SPREADS
        if fields.get(name) is not None
    }
    return row(**fields | spreads)
