"""What checks and suites find, and how findings add up."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

PASSED, FAILED, BLOCKED, TIMED_OUT = "passed", "failed", "blocked", "timed_out"
_WORST_FIRST = (FAILED, TIMED_OUT, BLOCKED, PASSED)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Tests, or rows of the bench."""

    passed: int
    failed: int
    skipped: int

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
        )

    def __str__(self) -> str:
        named = [f"{n} {name}" for name, n in dataclasses.asdict(self).items() if n]
        return ", ".join(named) or "nothing ran"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
      status: ``"passed"``, ``"failed"``, ``"blocked"`` (something that it needs is not
        here) or ``"timed_out"``.
      reason: one line.
      counts: None where nothing was counted.
      facts: what the checked process said of itself; see ``_facts``.
      label: which of a suite's checks, where it has several.
    """

    status: str
    reason: str
    counts: Counts | None = None
    facts: dict[str, Any] | None = None
    label: str = ""


class Stop(Exception):
    """Ends a check early with a status and a reason."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that was run.

    Attributes:
      argv: its words.
      environment: the variables that were set for it; it inherits the others.
      seconds: how long it took.
      exit_status: negative for a signal; None if it was killed at the time limit.
    """

    argv: list[str]
    environment: dict[str, str]
    seconds: float
    exit_status: int | None


@dataclasses.dataclass(frozen=True)
class SuiteResult:
    """The outcome of a suite: the worst of its findings.

    Attributes:
      name: as ``--suite`` takes it.
      proves: what it says about the package when it has passed.
      status: as of a finding.
      reason: the findings' reasons.
      seconds: of all commands and what is between them.
      counts: sums; None where nothing was counted.
      findings: one a check.
      commands: in order.
      log: the end of what the commands wrote.
      log_file: all of it.
    """

    name: str
    proves: str
    status: str
    reason: str
    seconds: float
    counts: Counts | None
    findings: list[Finding]
    commands: list[Command]
    log: str
    log_file: str


def worst(statuses: Iterable[str]) -> str:
    """The one that speaks for all."""
    return min(statuses, key=_WORST_FIRST.index)


def sum_counts(findings: Sequence[Finding]) -> Counts | None:
    counted = [finding.counts for finding in findings if finding.counts is not None]
    return sum(counted[1:], counted[0]) if counted else None


def join_reasons(findings: Sequence[Finding]) -> str:
    """One line; labels with the same reason share it."""
    labels: dict[str, list[str]] = {}
    for finding in findings:
        labels.setdefault(finding.reason, []).append(finding.label)
    return "; ".join(
        f"{', '.join(names)}: {reason}" if all(names) else reason
        for reason, names in labels.items()
    )
