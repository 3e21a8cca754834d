"""The suites: which commands prove what."""

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jax_fused_adamw.bench import BenchError, _results
from jax_fused_adamw.verify._build import build
from jax_fused_adamw.verify._job import Job
from jax_fused_adamw.verify._results import (
    BLOCKED,
    FAILED,
    PASSED,
    Counts,
    Finding,
    Stop,
)

CPU = {"JAX_PLATFORMS": "cpu"}
# The GPU is the default, and there is a CPU to compare with. JAX may go on without the
# GPU, so the checks ask which backend it took.
CUDA = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

_ORACLE = "makes_each_step_of_torch or tell_amsgrad_and_maximize_apart"
_REFERENCE = "test_reference or plain_jax or xla"
# Starts of the names of files: tests of other suites, of command lines, of documents.
_NOT_HOST = ("bench", "cuda", "demo", "docs", "ladder", "large", "notebooks", "nvrtc")
_NOT_HOST += ("speed", "train_step", "verify")
_ON_CUDA = ("cuda", "cuda_stats", "stats", "clip", "trust", "bits", "spec", "in_place")
_ON_CUDA += ("cuda_precision", "cases_numeric")

Check = Callable[[], Finding]


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite.

    Attributes:
      proves: what it says when it has passed.
      checks: labels and checks of a job; a check returns a finding or raises Stop.
    """

    proves: str
    checks: Callable[[Job], Mapping[str, Check]]


def _on_cpu(facts: Mapping[str, Any]) -> str | None:
    if facts["backend"] != "cpu":
        return f"expected tests on a CPU, they ran on {facts['backend']}"
    return None


def _with_cpu_kernels(facts: Mapping[str, Any]) -> str | None:
    if not facts["cpu"]["loaded"]:
        return f"the CPU kernels were not loaded: {facts['cpu']['reason']}"
    return _on_cpu(facts)


def _oracle(job: Job) -> Mapping[str, Check]:
    has_torch = importlib.util.find_spec("torch") is not None

    def recorded() -> Finding:
        job.require("pytest")
        finding = job.test(["test_trust.py"], CPU, _on_cpu, keyword=_ORACLE)
        note = "; says nothing about kernels"
        if not has_torch:
            note += "; without torch, PyTorch's steps are only the recorded ones"
        return dataclasses.replace(finding, reason=finding.reason + note)

    def regenerated() -> Finding:
        generator = job.source() / "tests" / "fixtures" / "make_torch_fixtures.py"
        status = job.run([sys.executable, generator], CPU)
        if status != 0:
            return Finding(FAILED, f"the generator ended with {status}, expected 0")
        return Finding(PASSED, "this torch makes the recorded steps")

    return {"recorded": recorded} | ({"regenerated": regenerated} if has_torch else {})


def _reference(job: Job) -> Mapping[str, Check]:
    def check() -> Finding:
        job.require("pytest")
        files = ["test_reference.py", "test_trust.py"]
        return job.test(files, CPU, _on_cpu, keyword=_REFERENCE)

    return {"": check}


def _host(job: Job) -> Mapping[str, Check]:
    def check() -> Finding:
        job.require("pytest", "pytest_timeout", "flax", "hypothesis")
        left_out = tuple(f"test_{name}" for name in _NOT_HOST)
        names = sorted(path.name for path in (job.source() / "tests").glob("test_*.py"))
        files = [name for name in names if not name.startswith(left_out)]
        return job.test(files, CPU, _with_cpu_kernels)

    return {"": check}


def _cuda(job: Job) -> Mapping[str, Check]:
    return {
        compiler: functools.partial(_cuda_with, job, compiler)
        for compiler in job.options.compilers
    }


def _cuda_with(job: Job, compiler: str) -> Finding:
    # A cache of its own: NVRTC must compile now, and what it compiled can be counted.
    cache = job.folder / f"cache-{compiler}"
    environment = CUDA | {
        "JAX_FUSED_ADAMW_CUDA_COMPILER": compiler,
        "JAX_FUSED_ADAMW_CACHE_DIR": str(cache),
    }
    _require_cuda(job.facts(environment), compiler)
    job.require("pytest")

    def expectation(facts: Mapping[str, Any]) -> str | None:
        if facts["backend"] != "gpu":
            return f"expected tests on a GPU, they ran on {facts['backend']}"
        if not str(facts["compiler"]).startswith(compiler):
            return f"asked for {compiler}, the kernels were {facts['compiler']}"
        compiled = len(list(cache.glob("*.cubin")))
        if (compiled > 0) != (compiler == "nvrtc"):
            return f"asked for {compiler}, but NVRTC compiled {compiled} kernels"
        return None

    files = [f"test_{name}.py" for name in _ON_CUDA]
    finding = job.test(files, environment, expectation, label=compiler)
    device = (finding.facts or {}).get("device")
    reason = f"{finding.reason}, on {device}" if device else finding.reason
    return dataclasses.replace(finding, reason=reason)


def _require_cuda(facts: Mapping[str, Any], compiler: str) -> None:
    """A missing GPU is a failure; a missing compiler is not."""
    if facts["backend"] != "gpu":
        error = facts["backend_error"] or f"JAX runs on {facts['backend']}"
        needs = 'a GPU, its driver and pip install "jax[cuda13]" are needed'
        raise Stop(FAILED, f"JAX finds no CUDA device ({error}); {needs}")
    if not str(facts["compiler"]).startswith(compiler):
        reason = facts["compiler"] or facts["cuda"]["reason"]
        way_out = {
            "nvcc": "install the package where nvcc is on the PATH",
            "nvrtc": 'pip install "jax[cuda13]"',
        }
        raise Stop(BLOCKED, f"{reason}; {way_out[compiler]}")
    if not facts["cuda"]["loaded"]:
        raise Stop(
            FAILED, f"the CUDA kernels are not loaded: {facts['cuda']['reason']}"
        )


def _bench(job: Job) -> Mapping[str, Check]:
    def check() -> Finding:
        job.require("matplotlib", "tqdm")
        results = job.folder / "bench.json"
        argv = [sys.executable, "-m", "jax_fused_adamw.bench", "--elements", "1000003"]
        argv += ["--iterations", "3", "--samples", "2", "--json", str(results)]
        status = job.run(argv, {})
        try:
            return judge_bench(status, _results.read(results))
        except BenchError:
            return Finding(FAILED, f"the bench ended with {status} and left no results")

    return {"": check}


def judge_bench(exit_status: int, results: _results.Results) -> Finding:
    """Whether every row that ran was right, and one of ours was among them."""
    rows = [row for _, row in results.rows()]
    measured = [row for row in rows if row.status == _results.MEASURED]
    blocked = [row for row in rows if row.status == _results.BLOCKED]
    bad = [row for row in rows if row not in measured and row not in blocked]
    counts = Counts(len(measured), len(bad), len(blocked))
    reason = f"rows on {results.machine['device']}: {counts}"
    if bad:
        wrong = "; ".join(f"{row.name} is {row.status}: {row.reason}" for row in bad)
        return Finding(FAILED, f"{reason}: {wrong}", counts)
    if exit_status != 0:
        return Finding(FAILED, f"{reason}; the bench ended with {exit_status}", counts)
    reasons = dict.fromkeys(str(row.reason) for row in blocked)
    reason += f" ({'; '.join(reasons)})" if blocked else ""
    passed = any(row.ours for row in measured)
    return Finding(PASSED if passed else BLOCKED, reason, counts)


def _build(job: Job) -> Mapping[str, Check]:
    def kernels() -> Finding:
        job.require("pytest")
        return job.test(["test_nvrtc.py"], CPU, _on_cpu, label="nvrtc")

    checks: dict[str, Check] = {
        compiler: functools.partial(build, job, compiler)
        for compiler in job.options.compilers
    }
    # nvcc compiles all kernels in the build; NVRTC would do it one by one on a GPU.
    return checks | ({"kernels by nvrtc": kernels} if "nvrtc" in checks else {})


SUITES = {
    "oracle": Suite(
        "the float64 oracle makes the steps that PyTorch's AdamW made on a CPU; this "
        "says nothing about kernels",
        _oracle,
    ),
    "reference": Suite(
        "the update in plain JAX follows the oracle, and agrees with optax",
        _reference,
    ),
    "host": Suite(
        "the CPU kernels follow the oracle and PyTorch and keep every rule on bits, "
        "trees, buffers and bad input, as does what is built on them, on a CPU",
        _host,
    ),
    "build": Suite(
        "the source builds here, each compiler compiles every CUDA kernel, and what "
        "was built takes a right step on the CPU and, where there is one, on the GPU",
        _build,
    ),
    "cuda": Suite(
        "the CUDA kernels of each compiler follow the oracle and PyTorch and give the "
        "CPU kernels' bits on this GPU",
        _cuda,
    ),
    "bench": Suite(
        "the bench runs here and its rows are right; its times, from a short run, say "
        "nothing",
        _bench,
    ),
}
