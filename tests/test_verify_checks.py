"""Verify's checks: what counts as passed, failed and blocked, over played processes."""

import functools
import importlib.util
import json
import pathlib
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from jax_fused_adamw.verify import _build, _junit, _suites
from jax_fused_adamw.verify._facts import gather
from jax_fused_adamw.verify._job import Job, Options
from jax_fused_adamw.verify._results import Counts, Stop

ROOT = pathlib.Path(__file__).parent.parent
OWN = gather()
ON_GPU = OWN | {
    "backend": "gpu",
    "device": "a GPU",
    "cuda": {"loaded": True, "reason": None},
}


def junit(*cases, facts=None):
    """A file of pytest's; a case is a name and what is inside of its element."""
    text = "".join(
        f'<testcase classname="test_x" name="{name}">{inside}</testcase>'
        for name, inside in cases
    )
    quoted = json.dumps(facts).replace('"', "&quot;")
    properties = f'<properties><property name="facts" value="{quoted}"/></properties>'
    return f"<testsuites><testsuite>{properties}{text}</testsuite></testsuites>"


ONE_PASSED = ("a", "")
ONE_SKIPPED = ("s", '<skipped message="no tool"/>')


# --- JUnit files ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "exit_status, cases, status, counts, words",
    [
        (0, [ONE_PASSED, ("b", "")], "passed", (2, 0, 0), "2 passed"),
        (0, [ONE_PASSED, ONE_SKIPPED], "passed", (1, 0, 1), "1 skipped (no tool)"),
        (1, [ONE_PASSED, ("f", "<failure/>")], "failed", (1, 1, 0), "test_x::f"),
        (1, [ONE_PASSED, ("f", "<error/>")], "failed", (1, 1, 0), "test_x::f"),
        (1, [("f", "<failure/>"), ("f", "<error/>")], "failed", (0, 1, 0), ""),
        (0, [ONE_PASSED, ("f", "<failure/>")], "failed", (1, 1, 0), "1 failed"),
        (0, [ONE_SKIPPED], "blocked", (0, 0, 1), "no tool"),
        (2, [ONE_PASSED], "failed", (1, 0, 0), "expected 0"),
        (5, [], "failed", (0, 0, 0), "nothing ran"),
        (-11, [ONE_PASSED], "failed", None, "signal 11"),
    ],
)
def test_judge(tmp_path, exit_status, cases, status, counts, words):
    file = tmp_path / "x.xml"
    file.write_text(junit(*cases))
    finding = _junit.judge(exit_status, file)
    assert finding.status == status and words in finding.reason
    assert finding.counts == (counts and Counts(*counts))


@pytest.mark.parametrize("text", [None, "", "<testsuites>"])
def test_without_a_readable_file_nothing_is_counted(tmp_path, text):
    file = tmp_path / "x.xml"
    if text is not None:
        file.write_text(text)
    finding = _junit.judge(0, file)
    assert finding.status == "failed" and finding.counts is None


# --- Checks over a runner that plays the processes ------------------------------------


class PlayedRunner:
    """Answers commands: facts and JUnit files as given, and exit statuses."""

    def __init__(self, folder, facts=OWN, tests=None, statuses=None):
        self.folder, self.facts, self.tests = folder, facts, tests
        self.statuses = statuses or {}
        self.ran = []

    def run(self, argv, environment):
        argv = list(map(str, argv))
        self.ran.append((argv, environment))
        if argv[-2].endswith("_facts"):
            facts = self.facts
            if callable(facts):
                facts = facts(environment)
            pathlib.Path(argv[-1]).write_text(json.dumps(facts))
        for word in argv:
            if word.startswith("--junitxml="):
                pathlib.Path(word.partition("=")[2]).write_text(self.tests)
        line = " ".join(argv)
        return next((n for part, n in self.statuses.items() if part in line), 0)

    def command(self, part):
        """The one command that holds the words, and its environment."""
        [found] = [ran for ran in self.ran if part in " ".join(ran[0])]
        return found


def make_job(runner, tmp_path, offline=False, source=ROOT, package=OWN):
    options = Options(source, package, ("nvcc", "nvrtc"), offline)
    return Job(options, runner, tmp_path / "results")


def outcome(check):
    try:
        return check()
    except Stop as stopped:
        return stopped


def all_passed(facts):
    return junit(ONE_PASSED, facts=facts)


@pytest.mark.parametrize("suite", ["oracle", "reference", "host"])
@pytest.mark.parametrize("change", [{}, {"backend": "gpu"}, None])
def test_tests_must_say_that_they_ran_on_the_cpu(tmp_path, suite, change):
    facts = None if change is None else OWN | {"backend": "cpu"} | change
    runner = PlayedRunner(tmp_path, tests=all_passed(facts))
    checks = _suites.SUITES[suite].checks(make_job(runner, tmp_path))
    finding = outcome(next(iter(checks.values())))
    assert finding.status == ("passed" if change == {} else "failed"), finding
    argv, environment = runner.command("-m pytest")
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["PYTEST_ADDOPTS"] == ""


def test_reference_takes_the_twin_and_its_links(tmp_path):
    runner = PlayedRunner(tmp_path, tests=all_passed(OWN | {"backend": "cpu"}))
    outcome(_suites.SUITES["reference"].checks(make_job(runner, tmp_path))[""])
    argv, _ = runner.command("-m pytest")
    argv = [word for word in argv if not word.startswith("--junitxml")]
    collect = [*argv, "--collect-only"]
    listed = subprocess.run(collect, capture_output=True, text=True, cwd=tmp_path)
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    assert any("test_reference.py::test_nan" in name for name in names)
    assert any("test_plain_jax_agrees_with_optax" in name for name in names)
    assert any("test_mask_follows_oracle[xla]" in name for name in names)
    assert not [name for name in names if "ffi" in name or "native" in name]


@pytest.mark.parametrize("status", ["passed", "failed"])
def test_with_torch_the_recorded_steps_are_made_again(tmp_path, monkeypatch, status):
    find = importlib.util.find_spec

    def find_torch(name):
        return object() if name == "torch" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_torch)
    statuses = {"make_torch_fixtures": int(status == "failed")}
    runner = PlayedRunner(tmp_path, statuses=statuses)
    checks = _suites.SUITES["oracle"].checks(make_job(runner, tmp_path))
    assert outcome(checks["regenerated"]).status == status
    assert "--write" not in runner.command("make_torch_fixtures")[0]


def test_host_takes_every_file_of_tests_but_those_of_other_suites(tmp_path):
    runner = PlayedRunner(tmp_path, tests=all_passed(OWN | {"backend": "cpu"}))
    outcome(_suites.SUITES["host"].checks(make_job(runner, tmp_path))[""])
    argv, _ = runner.command("-m pytest")
    files = {pathlib.Path(word).name for word in argv if word.endswith(".py")}
    assert {"test_bits.py", "test_in_place.py", "test_random_trees.py"} <= files
    others = ("test_cuda", "test_verify", "test_bench", "test_train_step")
    assert not [name for name in files if name.startswith(others)]
    for name in _suites._NOT_HOST + _suites._ON_CUDA:
        assert (ROOT / "tests" / f"test_{name}.py").is_file(), name


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
@pytest.mark.parametrize(
    "used, backend, compiled, right",
    [
        ("nvcc", "gpu", 0, "nvcc"),
        ("nvrtc 13.0", "gpu", 2, "nvrtc"),
        ("nvrtc 13.0", "gpu", 0, None),
        ("nvcc", "gpu", 2, None),
        ("nvcc", "cpu", 0, None),
        ("nvrtc 13.0", "cpu", 2, None),
    ],
)
def test_cuda_tests_must_have_used_the_compiler(
    tmp_path, compiler, used, backend, compiled, right
):
    cache = tmp_path / f"cache-{compiler}"
    cache.mkdir()
    for i in range(compiled):
        (cache / f"{i}.cubin").touch()
    tests = all_passed(ON_GPU | {"compiler": used, "backend": backend})
    facts = ON_GPU | {"compiler": f"{compiler} 1"}
    runner = PlayedRunner(tmp_path, facts, tests)
    check = _suites.SUITES["cuda"].checks(make_job(runner, tmp_path))[compiler]
    finding = outcome(check)
    assert finding.status == ("passed" if compiler == right else "failed"), finding
    argv, environment = runner.command("-m pytest")
    assert environment["JAX_FUSED_ADAMW_CUDA_COMPILER"] == compiler
    assert environment["JAX_PLATFORMS"].startswith("cuda")
    assert any(word.endswith("test_cuda.py") for word in argv)


@pytest.mark.parametrize(
    "change, status, word",
    [
        ({"compiler": "NVRTC is missing"}, "blocked", "jax[cuda13]"),
        ({"compiler": None}, "blocked", "no module"),
        ({"compiler": "nvrtc 13.0"}, "failed", "no module"),
        ({"backend": "cpu", "compiler": "NVRTC is missing"}, "failed", "device"),
    ],
)
def test_missing_compiler_blocks_what_a_missing_gpu_fails(
    tmp_path, change, status, word
):
    unloaded = {"cuda": {"loaded": False, "reason": "no module"}}
    runner = PlayedRunner(tmp_path, ON_GPU | unloaded | change)
    check = _suites.SUITES["cuda"].checks(make_job(runner, tmp_path))["nvrtc"]
    stopped = outcome(check)
    assert stopped.status == status and word in stopped.reason


@pytest.mark.parametrize("suite", ["oracle", "reference", "host", "build"])
def test_without_a_source_suites_are_blocked(tmp_path, suite):
    job = make_job(PlayedRunner(tmp_path), tmp_path, source=None)
    for check in _suites.SUITES[suite].checks(job).values():
        stopped = outcome(check)
        assert stopped.status == "blocked" and "--source" in stopped.reason


@pytest.mark.parametrize(
    "suite, missing, command",
    [
        ("oracle", "pytest", "pip install pytest"),
        ("host", "pytest_timeout", "pip install pytest-timeout"),
        ("bench", "tqdm", "pip install tqdm"),
    ],
)
def test_missing_packages_block(tmp_path, monkeypatch, suite, missing, command):
    find = importlib.util.find_spec

    def find_others(name):
        return None if name == missing else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    job = make_job(PlayedRunner(tmp_path), tmp_path)
    stopped = outcome(next(iter(_suites.SUITES[suite].checks(job).values())))
    assert stopped.status == "blocked" and command in stopped.reason


def test_another_package_than_the_source_blocks(tmp_path):
    package = tmp_path / "package"
    shutil.copytree(ROOT / "jax_fused_adamw", package)
    (package / "_added.py").touch()
    other = OWN | {"package": str(package)}
    job = make_job(PlayedRunner(tmp_path), tmp_path, package=other)
    stopped = outcome(_suites.SUITES["reference"].checks(job)[""])
    assert stopped.status == "blocked" and "other Python files" in stopped.reason
    job = make_job(PlayedRunner(tmp_path), tmp_path, package=None)
    stopped = outcome(_suites.SUITES["reference"].checks(job)[""])
    assert stopped.status == "failed" and "pip install" in stopped.reason


# --- The build suite ------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder of tools that is all there is; returns what puts one in."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    which = functools.partial(shutil.which, path=str(folder))
    monkeypatch.setattr(_build.shutil, "which", lambda name, path: which(name))
    monkeypatch.setattr(_build, "version", lambda name: "1")

    def put(*names):
        for name in names:
            (folder / name).touch(mode=0o755)

    return put


def built(tmp_path, compiler, gpu=False, change=None):
    """Facts of what was built: with a GPU only where JAX was asked for it."""

    def facts(environment):
        package = str(tmp_path / compiler / "jax_fused_adamw")
        on_gpu = gpu and environment["JAX_PLATFORMS"].startswith("cuda")
        base = ON_GPU if on_gpu else OWN | {"backend": "cpu"}
        return base | {"package": package, "compiler": f"{compiler} 1"} | (change or {})

    return facts


@pytest.mark.parametrize("compiler, option", [("nvcc", "ON"), ("nvrtc", "OFF")])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("offline", [False, True])
def test_build(tmp_path, tools, compiler, option, gpu, offline):
    tools("g++", "nvcc", "cmake", "ninja")
    runner = PlayedRunner(tmp_path, built(tmp_path, compiler, gpu))
    job = make_job(runner, tmp_path, offline)
    finding = outcome(_suites.SUITES["build"].checks(job)[compiler])
    assert finding.status == "passed", finding.reason
    argv, _ = runner.command("pip install")
    assert f"cmake.define.JAX_FUSED_ADAMW_CUDA={option}" in argv
    assert ("--no-index" in argv) == ("--no-build-isolation" in argv) == offline
    steps = [argv for argv, _ in runner.ran if "gpu_smoke" in " ".join(argv)]
    assert [argv[-1] for argv in steps] == [compiler] * gpu
    assert ("no CUDA device" in finding.reason) != gpu


@pytest.mark.parametrize(
    "compiler, gpu, statuses, change, status",
    [
        ("nvcc", False, {"pip install": 1}, {}, "failed"),
        ("nvcc", False, {"linspace": 1}, {}, "failed"),
        ("nvcc", True, {"gpu_smoke": 1}, {}, "failed"),
        ("nvcc", False, {}, {"package": "elsewhere"}, "failed"),
        ("nvcc", False, {}, {"cpu": {"loaded": False, "reason": "x"}}, "failed"),
        ("nvcc", False, {}, {"compiler": "nvrtc 13.0"}, "failed"),
        ("nvrtc", False, {}, {"compiler": "NVRTC is missing"}, "blocked"),
    ],
)
def test_build_that_is_not_proven(
    tmp_path, tools, compiler, gpu, statuses, change, status
):
    tools("g++", "nvcc")
    facts = built(tmp_path, compiler, gpu, change)
    runner = PlayedRunner(tmp_path, facts, statuses=statuses)
    check = _suites.SUITES["build"].checks(make_job(runner, tmp_path))[compiler]
    assert outcome(check).status == status


@pytest.mark.parametrize("compilers", [("nvcc",), ("nvrtc",), ("nvcc", "nvrtc")])
def test_build_compiles_every_kernel_with_each_compiler(tmp_path, compilers):
    runner = PlayedRunner(tmp_path, tests=all_passed(OWN | {"backend": "cpu"}))
    job = Job(Options(ROOT, OWN, compilers, False), runner, tmp_path / "results")
    checks = _suites.SUITES["build"].checks(job)
    assert list(checks)[: len(compilers)] == list(compilers)
    assert ("kernels by nvrtc" in checks) == ("nvrtc" in compilers)
    if "nvrtc" in compilers:
        assert outcome(checks["kernels by nvrtc"]).status == "passed"
        assert any("test_nvrtc.py" in word for word in runner.ran[0][0])


@pytest.mark.parametrize(
    "there, compiler, offline, missing",
    [
        (["nvcc"], "nvrtc", False, "C++ compiler"),
        (["g++"], "nvcc", False, "nvcc"),
        (["g++", "ninja"], "nvrtc", True, "pip install cmake"),
        (["g++", "cmake"], "nvrtc", True, "pip install ninja"),
    ],
)
def test_missing_tools_block_the_build(
    tmp_path, tools, there, compiler, offline, missing
):
    tools(*there)
    job = make_job(PlayedRunner(tmp_path), tmp_path, offline)
    stopped = outcome(_suites.SUITES["build"].checks(job)[compiler])
    assert stopped.status == "blocked" and missing in stopped.reason


@pytest.mark.parametrize("offline", [False, True])
def test_missing_build_requirement_blocks_only_offline(
    tmp_path, tools, monkeypatch, offline
):
    tools("g++", "cmake", "make")
    monkeypatch.setattr(
        _build, "version", lambda name: None if name == "nanobind" else "1"
    )
    runner = PlayedRunner(tmp_path, built(tmp_path, "nvrtc"))
    job = make_job(runner, tmp_path, offline)
    finding = outcome(_suites.SUITES["build"].checks(job)["nvrtc"])
    assert finding.status == ("blocked" if offline else "passed")
    assert ("pip install nanobind" in finding.reason) == offline


# --- The bench suite ------------------------------------------------------------------


def row(name, status, ours=True):
    return SimpleNamespace(name=name, status=status, ours=ours, reason=f"{name} why")


@pytest.mark.parametrize(
    "rows, exit_status, status, counts",
    [
        ([row("a", "measured"), row("b", "blocked")], 0, "passed", (1, 0, 1)),
        ([row("a", "measured"), row("b", "wrong")], 1, "failed", (1, 1, 0)),
        ([row("a", "measured"), row("b", "failed")], 1, "failed", (1, 1, 0)),
        ([row("a", "measured")], 1, "failed", (1, 0, 0)),
        ([row("a", "blocked")], 0, "blocked", (0, 0, 1)),
        ([row("a", "measured", ours=False)], 0, "blocked", (1, 0, 0)),
    ],
)
def test_judge_bench(rows, exit_status, status, counts):
    results = SimpleNamespace(
        machine={"device": "cpu"}, rows=lambda: [("model", row) for row in rows]
    )
    finding = _suites.judge_bench(exit_status, results)
    assert finding.status == status and finding.counts == Counts(*counts)
    assert all(f"{row.name} why" in finding.reason for row in rows[1:])


def test_bench_without_results_fails(tmp_path):
    runner = PlayedRunner(tmp_path, statuses={"bench": 2})
    finding = outcome(_suites.SUITES["bench"].checks(make_job(runner, tmp_path))[""])
    assert finding.status == "failed" and "ended with 2" in finding.reason
