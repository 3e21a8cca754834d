"""Reads pytest's JUnit file: counts, names and reasons, never from printed text."""

import dataclasses
import json
import pathlib
import xml.etree.ElementTree as ElementTree
from typing import Any

from jax_fused_adamw.verify._results import BLOCKED, FAILED, PASSED, Counts, Finding

_NAMES_IN_REASON = 3


@dataclasses.dataclass(frozen=True)
class Report:
    """What a JUnit file holds.

    Attributes:
      counts: a test with an error counts as failed.
      failures: names of the failed tests.
      skip_reasons: each once.
      facts: of the tests' process; None where no test got as far.
    """

    counts: Counts
    failures: list[str]
    skip_reasons: list[str]
    facts: dict[str, Any] | None


def read(path: pathlib.Path) -> Report:
    """Reads the file.

    Raises:
      OSError: there is none.
      ElementTree.ParseError: it is no XML.
    """
    root = ElementTree.parse(path).getroot()
    outcomes: dict[str, str] = {}
    skip_reasons: dict[str, None] = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        # A test that fails and then fails again in its teardown stands there twice.
        outcome = outcomes.get(name, PASSED)
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = FAILED
        elif skipped is not None and outcome != FAILED:
            outcome = BLOCKED
            skip_reasons[skipped.get("message") or "no reason given"] = None
        outcomes[name] = outcome
    count = list(outcomes.values()).count
    facts = root.find(".//property[@name='facts']")
    return Report(
        Counts(count(PASSED), count(FAILED), count(BLOCKED)),
        [name for name, outcome in outcomes.items() if outcome == FAILED],
        list(skip_reasons),
        None if facts is None else json.loads(facts.get("value")),
    )


def judge(exit_status: int, path: pathlib.Path) -> Finding:
    """What a run of pytest with ``--junitxml=path`` has shown.

    Args:
      exit_status: pytest's.
      path: of the file.

    Returns:
      A passed finding only where pytest and the file agree on it and a test ran.
    """
    if exit_status < 0:
        return Finding(FAILED, f"pytest was killed by signal {-exit_status}")
    try:
        report = read(path)
    except (OSError, ElementTree.ParseError) as error:
        reason = f"pytest ended with {exit_status} and left no results: {error}"
        return Finding(FAILED, reason)
    counts, facts = report.counts, report.facts
    if counts.failed:
        names = ", ".join(report.failures[:_NAMES_IN_REASON])
        more = ", ..." if counts.failed > _NAMES_IN_REASON else ""
        return Finding(FAILED, f"{counts}: {names}{more}", counts, facts)
    if exit_status != 0:
        reason = f"{counts}; pytest ended with {exit_status}, expected 0"
        return Finding(FAILED, reason, counts, facts)
    if not counts.passed:
        reason = f"every test was skipped: {'; '.join(report.skip_reasons)}"
        return Finding(BLOCKED, reason, counts, facts)
    skips = f" ({'; '.join(report.skip_reasons)})" if counts.skipped else ""
    return Finding(PASSED, f"{counts}{skips}", counts, facts)
