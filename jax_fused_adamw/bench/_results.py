"""What a run leaves, and its JSON file."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

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
class RowResult:
    """One row on one model. Only a measured one has times.

    Attributes:
      name: of the row.
      ours: whether it is this package's.
      status: ``"measured"``, ``"wrong"``, ``"blocked"`` (it cannot run here) or
        ``"failed"``.
      reason: why it is not measured, or a measured one has no device time.
      num_bytes: counted memory traffic of a parameter.
      wall_ms: of a step, one number a sample.
      device_us: of a step, by the profiler; None where it sees no device.
      launches: kernels and copies of a step.
      compile_s: seconds to trace and compile.
      peak_bytes: what the compiled step holds at most.
      percent_of_limit: share of the copy bandwidth.
    """

    name: str
    ours: bool
    status: str
    reason: str | None = None
    num_bytes: int | None = None
    wall_ms: Spread | None = None
    device_us: Spread | None = None
    launches: int | None = None
    compile_s: float | None = None
    peak_bytes: int | None = None
    percent_of_limit: float | None = None


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """All rows on one model."""

    name: str
    num_leaves: int
    num_parameters: int
    rows: list[RowResult]


@dataclasses.dataclass(frozen=True)
class Results:
    """A whole run.

    Attributes:
      machine: of ``describe_machine``.
      load: ``before`` and ``after``, of ``describe_load``.
      setting: hyperparameters and options, every one of them.
      limit: copy bandwidth and how it was measured.
      models: one result each.
    """

    machine: dict[str, Any]
    load: dict[str, Any]
    setting: dict[str, Any]
    limit: dict[str, Any]
    models: list[ModelResult]

    def rows(self) -> Iterator[tuple[str, RowResult]]:
        for model in self.models:
            for row in model.rows:
                yield model.name, row


def comparable_us(rows: Sequence[RowResult]) -> list[float]:
    """Median time of a step of each measured row.

    The device's where every row has it, else wall time of all: never one against the
    other.
    """
    if all(row.device_us is not None for row in rows):
        return [row.device_us.median for row in rows]
    return [1e3 * row.wall_ms.median for row in rows]


def write(results: Results, path: pathlib.Path) -> None:
    """Writes the JSON file."""
    content = {"schema": SCHEMA, **dataclasses.asdict(results)}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise BenchError(
            f"--json {str(path)!r}: cannot write: {error.strerror}"
        ) from error


def read(path: pathlib.Path) -> Results:
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
        models = [
            ModelResult(**model | {"rows": [_row(row) for row in model["rows"]]})
            for model in content.pop("models")
        ]
        return Results(models=models, **content)
    except (KeyError, TypeError) as error:
        raise BenchError(f"{str(path)!r}: not a results file: {error}") from error


def _row(fields: dict[str, Any]) -> RowResult:
    spreads = {
        name: Spread(**fields[name])
        for name in ("wall_ms", "device_us")
        if fields[name] is not None
    }
    return RowResult(**fields | spreads)
