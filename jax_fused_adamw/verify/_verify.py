"""Runs suites one after the other, and writes the JSON after each of them."""

import dataclasses
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax_fused_adamw._machine import describe_process, query_gpus
from jax_fused_adamw.verify import VerifyError, _sources
from jax_fused_adamw.verify._job import Job, Options
from jax_fused_adamw.verify._results import (
    BLOCKED,
    FAILED,
    TIMED_OUT,
    Finding,
    Stop,
    SuiteResult,
    join_reasons,
    sum_counts,
    worst,
)
from jax_fused_adamw.verify._runner import Runner
from jax_fused_adamw.verify._suites import CPU, SUITES

SCHEMA = 1
_GPU_FIELDS = ("name", "driver_version", "memory.total", "compute_cap")
# What changes what is tested, where it is inherited. Not pip's: it may hold passwords.
_ENVIRONMENT = ("JAX_", "XLA_", "CUDA", "OMP_", "PYTHON", "PYTEST_", "CXX")


def run_verify(
    names: Sequence[str],
    options: Options,
    timeout: float,
    json_file: pathlib.Path,
    tell: Callable[[str], None],
) -> list[SuiteResult]:
    """Runs the suites.

    Args:
      names: keys of ``SUITES``.
      options: for every suite; ``package`` is found out here.
      timeout: seconds of each suite.
      json_file: written after every suite, so that an interrupted run leaves what it
        has; full logs lie in ``logs_of(json_file)``.
      tell: prints a line of progress.

    Raises:
      VerifyError: the JSON or the logs cannot be written.
    """
    logs = logs_of(json_file)
    try:
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise VerifyError(f"{str(logs)!r}: cannot make: {error.strerror}") from error
    options = dataclasses.replace(options, package=_find_package(logs, timeout))
    about = _describe(options, timeout)
    for note in about["notes"]:
        tell(f"note: {note}")
    results: list[SuiteResult] = []
    for number, name in enumerate(names, start=1):
        tell(f"[{number}/{len(names)}] {name}: at most {timeout:g} s")
        results.append(run_suite(name, options, timeout, logs))
        tell(f"    {results[-1].status} in {results[-1].seconds:.0f} s")
        _write(json_file, about, names, results)
    if options.source is not None:
        after = _sources.describe_source(options.source)
        if after["sha256"] != about["source"]["sha256"]:
            about["notes"].append("the source changed while the suites ran")
            tell(f"note: {about['notes'][-1]}")
            _write(json_file, about, names, results)
    return results


def logs_of(json_file: pathlib.Path) -> pathlib.Path:
    """The folder next to the JSON with the full logs and the tests' JUnit files."""
    return json_file.with_name(f"{json_file.stem}_logs")


def run_suite(
    name: str, options: Options, timeout: float, logs: pathlib.Path
) -> SuiteResult:
    """Runs all checks of one suite."""
    started = time.monotonic()
    log_file = logs.resolve() / f"{name}.log"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Resolved: paths that processes report are compared with it.
        runner = Runner(pathlib.Path(folder).resolve(), log_file, timeout)
        checks = SUITES[name].checks(Job(options, runner, logs.resolve() / name))
        findings = [_attempt(label, check) for label, check in checks.items()]
        log = runner.log()
    return SuiteResult(
        name=name,
        proves=SUITES[name].proves,
        status=worst(finding.status for finding in findings),
        reason=join_reasons(findings),
        seconds=round(time.monotonic() - started, 3),
        counts=sum_counts(findings),
        findings=findings,
        commands=runner.commands,
        log=log,
        log_file=str(log_file),
    )


def _attempt(label: str, check: Callable[[], Finding]) -> Finding:
    try:
        finding = check()
    except Stop as stop:
        finding = Finding(stop.status, stop.reason)
    return dataclasses.replace(finding, label=label)


def _find_package(logs: pathlib.Path, timeout: float) -> dict[str, Any] | None:
    """Facts of the package that the suites' commands will import, on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        log_file = logs.resolve() / "package.log"
        runner = Runner(pathlib.Path(folder), log_file, timeout)
        job = Job(Options(None, None, (), False), runner, logs)
        try:
            return job.facts(CPU)
        except Stop:
            return None


def _describe(options: Options, timeout: float) -> dict[str, Any]:
    source = options.source and _sources.describe_source(options.source)
    return {
        "schema": SCHEMA,
        "machine": describe_process() | {"gpus": query_gpus(_GPU_FIELDS)},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_ENVIRONMENT)
        },
        "options": {
            "compilers": list(options.compilers),
            "offline": options.offline,
            "timeout": timeout,
        },
        "source": source,
        "package": options.package,
        "notes": _stale_modules(options),
    }


def _stale_modules(options: Options) -> list[str]:
    if options.source is None or options.package is None:
        return []
    modules = filter(None, options.package["modules"].values())
    paths = [pathlib.Path(module["file"]) for module in modules]
    newer = {path.name: _sources.newer_than(options.source, path) for path in paths}
    return [
        f"{changed} is newer than the installed {name}; pip install it again before "
        "trusting host, cuda and bench"
        for name, changed in newer.items()
        if changed is not None
    ]


def _write(
    path: pathlib.Path,
    about: dict[str, Any],
    names: Sequence[str],
    results: Sequence[SuiteResult],
) -> None:
    content = about | {
        "complete": len(results) == len(names),
        "asked": list(names),
        "suites": {result.name: dataclasses.asdict(result) for result in results},
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        reason = f"--json {str(path)!r}: cannot write: {error.strerror}"
        raise VerifyError(reason) from error


def exit_status(results: Sequence[SuiteResult]) -> int:
    """1 where a suite failed or ran out of time; a blocked one is no failure."""
    return int(any(result.status in (FAILED, TIMED_OUT) for result in results))


def table(results: Sequence[SuiteResult]) -> str:
    """A line a suite, and one that says what was not proven."""
    lines = [
        f"{suite.name:<10} {suite.status:<10} {suite.seconds:6.0f} s  {suite.reason}"
        for suite in results
    ]
    for status in (FAILED, TIMED_OUT, BLOCKED):
        names = [result.name for result in results if result.status == status]
        if names:
            lines.append(f"Not proven, {status}: {', '.join(names)}")
    return "\n".join(lines)
