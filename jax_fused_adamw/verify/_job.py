"""What every check uses: the options, the commands, and what must be there first."""

import dataclasses
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_fused_adamw.verify import _junit, _sources
from jax_fused_adamw.verify._results import BLOCKED, FAILED, PASSED, Finding, Stop
from jax_fused_adamw.verify._runner import Runner

_DISTRIBUTIONS = {"pytest_timeout": "pytest-timeout"}

# Given the facts of the tests' process, what is wrong with it; None if nothing is.
Expectation = Callable[[Mapping[str, Any]], str | None]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to verify, and how.

    Attributes:
      source: the checkout; None where there is none.
      package: facts of a process that imports the installed package; None where it
        cannot be imported.
      compilers: of CUDA kernels: some of ``"nvcc"`` and ``"nvrtc"``.
      offline: whether builds must do without a network.
    """

    source: pathlib.Path | None
    package: Mapping[str, Any] | None
    compilers: tuple[str, ...]
    offline: bool


class Job:
    """One suite at work.

    Attributes:
      options: of the command line.
      folder: an empty one of the suite's own, where its commands run.
    """

    def __init__(self, options: Options, runner: Runner, results: pathlib.Path):
        self.options = options
        self.run = runner.run
        self.folder = runner.folder
        self._results = results  # JUnit files stay: <results>-<label>.xml

    def source(self) -> pathlib.Path:
        if self.options.source is None:
            reason = (
                "needs the source: run it in a checkout of jax_fused_adamw, or name "
                "one with --source"
            )
            raise Stop(BLOCKED, reason)
        return self.options.source

    def require(self, *modules: str) -> None:
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            names = [_DISTRIBUTIONS.get(name, name) for name in missing]
            reason = f"not installed: {', '.join(names)}; pip install {' '.join(names)}"
            raise Stop(BLOCKED, reason)

    def facts(
        self,
        environment: Mapping[str, str],
        python: Sequence[str] = (sys.executable,),
    ) -> dict[str, Any]:
        """What a new process with this environment says of itself."""
        path = self.folder / "facts.json"
        path.unlink(missing_ok=True)
        argv = [*python, "-m", "jax_fused_adamw.verify._facts", str(path)]
        status = self.run(argv, environment)
        if status != 0 or not path.is_file():
            reason = f"jax_fused_adamw cannot be imported (exit status {status})"
            raise Stop(FAILED, reason)
        return json.loads(path.read_text())

    def test(
        self,
        files: Sequence[str],
        environment: Mapping[str, str],
        expectation: Expectation,
        keyword: str = "",
        label: str = "tests",
    ) -> Finding:
        """Runs tests of the source on the installed package.

        Args:
          files: of the folder ``tests``.
          environment: variables to set.
          expectation: what the tests' process must have been.
          keyword: as pytest's ``-k`` takes it; all tests where it is empty.
          label: names the JUnit file.
        """
        source = self.source()
        self._require_same_package(source)
        junit = self._results.with_name(f"{self._results.name}-{label}.xml")
        junit.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        argv += ["-p", "jax_fused_adamw.verify._plugin"]
        argv += ["-c", source / "pyproject.toml", f"--junitxml={junit}"]
        argv += ["-k", keyword, *(source / "tests" / file for file in files)]
        # The user's own options could deselect tests.
        status = self.run(argv, {"PYTEST_ADDOPTS": "", **environment})
        finding = _junit.judge(status, junit)
        if finding.status != PASSED:
            return finding
        if finding.facts is None:
            wrong = "the tests' process did not say which kernels it had"
        else:
            wrong = expectation(finding.facts)
        if wrong is None:
            return finding
        return dataclasses.replace(finding, status=FAILED, reason=wrong)

    def _require_same_package(self, source: pathlib.Path) -> None:
        package = self.options.package
        way_out = f"pip install {source}"
        if package is None:
            reason = f"jax_fused_adamw cannot be imported from elsewhere: {way_out}"
            raise Stop(FAILED, reason)
        if not _sources.same_python(source, pathlib.Path(package["package"])):
            reason = (
                f"the tests are of {source}, and the package in {package['package']} "
                f"has other Python files: {way_out}, or name its --source"
            )
            raise Stop(BLOCKED, reason)
