"""Verify: what counts as proven, what is killed, and what the JSON holds."""

import functools
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jax_fused_adamw.verify import _build, _junit, _sources, _suites, _verify
from jax_fused_adamw.verify.__main__ import main
from jax_fused_adamw.verify._facts import gather
from jax_fused_adamw.verify._job import Job, Options
from jax_fused_adamw.verify._results import Counts, Finding, Stop
from jax_fused_adamw.verify._runner import Runner, _own_group

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


# --- Commands and their time limit ----------------------------------------------------


def is_alive(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_time_limit_kills_children_and_keeps_the_log(tmp_path):
    parent = (
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(99)']\n"
        "child = subprocess.Popen(sleep)\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(99)\n"
    )
    runner = Runner(tmp_path, tmp_path / "log", timeout=1)
    started = time.monotonic()
    with pytest.raises(Stop) as stop:
        runner.run([sys.executable, "-c", parent], {})
    assert time.monotonic() - started < 20
    assert stop.value.status == "timed_out" and "--timeout" in stop.value.reason
    pid = int(runner.log().split()[-1])
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)
    assert [command.exit_status for command in runner.commands] == [None]
    with pytest.raises(Stop):  # the limit is the suite's, not a command's
        runner.run([sys.executable, "-c", "import time; time.sleep(99)"], {})


def test_interrupt_ends_the_command(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(99)"]
    with pytest.raises(KeyboardInterrupt):
        with _own_group(sleep, tmp_path, {}, subprocess.DEVNULL) as process:
            raise KeyboardInterrupt
    assert process.poll() == -signal.SIGKILL


def test_commands_are_recorded_as_they_ran(tmp_path):
    runner = Runner(tmp_path, tmp_path / "log", timeout=60)
    code = "import os, sys; print(os.getcwd(), os.environ['A B']); sys.exit(3)"
    argv = [sys.executable, "-c", code]
    assert runner.run(argv, {"A B": "set"}) == 3
    [command] = runner.commands
    assert (command.argv, command.environment) == (argv, {"A B": "set"})
    assert command.exit_status == 3 and command.seconds > 0
    assert f"{tmp_path} set" in runner.log()
    with pytest.raises(Stop, match="cannot run"):
        runner.run([str(tmp_path / "nothing")], {})


def test_long_logs_are_cut_in_front(tmp_path):
    runner = Runner(tmp_path, tmp_path / "log", timeout=60)
    runner.run([sys.executable, "-c", "print('x' * 100_000 + 'end')"], {})
    assert len(runner.log()) < 21_000 and runner.log().endswith("end\n")
    assert (tmp_path / "log").stat().st_size > 100_000


# --- Suites made up of planted checks -------------------------------------------------


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """Runs the command, but for its look for the package: exit status and JSON."""
    monkeypatch.setattr(_verify, "_find_package", lambda *arguments: OWN)

    def run(*options, source=ROOT):
        file = tmp_path / "verify.json"
        argv = ["--json", str(file), *options]
        status = main(argv if source is None else [*argv, "--source", str(source)])
        return status, json.loads(file.read_text())

    return run


def stop(status):
    raise Stop(status, f"why {status}")


def plant(monkeypatch, name, *checks):
    made = {str(i): check for i, check in enumerate(checks)}
    suite = _suites.Suite("a planted truth", lambda job: made)
    monkeypatch.setitem(_suites.SUITES, name, suite)


def passes():
    return Finding("passed", "right", Counts(2, 0, 1))


@pytest.mark.parametrize(
    "others, expected, exit_status",
    [
        ([], "passed", 0),
        (["blocked"], "blocked", 0),
        (["timed_out", "blocked"], "timed_out", 1),
        (["blocked", "failed", "timed_out"], "failed", 1),
    ],
)
def test_worst_check_speaks_for_the_suite(
    verify, monkeypatch, capsys, others, expected, exit_status
):
    checks = [functools.partial(stop, other) for other in others]
    plant(monkeypatch, "host", passes, *checks)
    status, results = verify("--suite", "host")
    assert status == exit_status
    suite = results["suites"]["host"]
    assert suite["status"] == expected
    assert suite["counts"] == {"passed": 2, "failed": 0, "skipped": 1}
    assert all(f"why {other}" in suite["reason"] for other in others)
    printed = capsys.readouterr().out
    assert suite["reason"] in printed and "verify.json" in printed
    assert (f"Not proven, {expected}: host" in printed) == (expected != "passed")


def test_interrupted_run_leaves_what_it_has(verify, monkeypatch, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    plant(monkeypatch, "oracle", passes)
    plant(monkeypatch, "reference", interrupt)
    status, results = verify("--suite", "reference", "oracle")
    assert status == 130 and not results["complete"]
    assert list(results["suites"]) == ["oracle"]


def test_json_is_complete(verify, monkeypatch):
    monkeypatch.setenv("JAX_SOMETHING", "inherited")
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:password@index.example")
    plant(monkeypatch, "host", passes)
    _, results = verify("--suite", "host", "--timeout", "77", "--compiler", "nvcc")
    assert results["complete"] and results["schema"] == _verify.SCHEMA
    options = {"compilers": ["nvcc"], "offline": False, "timeout": 77}
    assert results["options"] == options
    assert results["machine"]["command"] and results["machine"]["date"]
    assert results["machine"]["versions"]["jax"]
    assert results["environment"]["JAX_SOMETHING"] == "inherited"
    assert "password" not in json.dumps(results)
    assert results["source"] == _sources.describe_source(ROOT)
    assert results["package"] == OWN
    assert set(results["suites"]["host"]) == {
        *("name", "proves", "status", "reason", "seconds", "counts", "findings"),
        *("commands", "log", "log_file"),
    }


@pytest.mark.parametrize(
    "options, word",
    [
        (["--suite", "gpu"], "oracle"),
        (["--timeout", "0"], "--timeout"),
        (["--compiler", "gcc"], "nvrtc"),
        (["--json", "no/such/folder/x.json"], "folder that exists"),
        (["--source", "cc"], "pyproject.toml"),
    ],
)
def test_mistakes_take_one_line(capsys, options, word):
    assert main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("jax_fused_adamw.verify: ") and error.count("\n") == 1
    assert word in error


# --- Real suites ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the source that a test may spoil."""
    copy = tmp_path_factory.mktemp("source") / "copy"
    copy.mkdir()
    ignore = shutil.ignore_patterns("*.so", "__pycache__", ".*", "build")
    for name in ("cc", "cmake", "jax_fused_adamw", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def test_oracle_suite(tmp_path, capsys):
    """All of it, in processes of its own."""
    file = tmp_path / "out.json"
    argv = ["--suite", "oracle", "--source", str(ROOT), "--json", str(file)]
    assert main(argv) == 0
    results = json.loads(file.read_text())
    suite = results["suites"]["oracle"]
    assert suite["status"] == "passed" and suite["counts"]["passed"] == 24
    assert "nothing about kernels" in suite["reason"]
    command = suite["commands"][0]
    assert command["environment"]["JAX_PLATFORMS"] == "cpu"
    assert "pytest" in command["argv"] and command["exit_status"] == 0
    assert suite["findings"][0]["facts"]["backend"] == "cpu"
    assert results["package"]["modules"] == OWN["modules"]
    assert "24 passed" in suite["log"]
    assert pathlib.Path(suite["log_file"]).read_text() == suite["log"]
    assert (tmp_path / "out_logs" / "oracle-tests.xml").is_file()


def test_planted_mistake_fails_the_suite(verify, checkout):
    oracle = checkout / "tests" / "oracle.py"
    right = oracle.read_text()
    oracle.write_text(right.replace("mu_hat / (", "1.001 * mu_hat / ("))
    try:
        status, results = verify("--suite", "oracle", source=checkout)
    finally:
        oracle.write_text(right)
    suite = results["suites"]["oracle"]
    assert status == 1 and suite["status"] == "failed"
    assert suite["counts"]["failed"] == 12
    assert "test_oracle_makes_each_step_of_torch" in suite["reason"]


def test_missing_gpu_fails_cuda(verify, monkeypatch):
    """Even where the source is missing too, which alone would block it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(_sources, "find_source", lambda given: None)
    status, results = verify("--suite", "cuda", "--compiler", "nvrtc", source=None)
    suite = results["suites"]["cuda"]
    assert status == 1 and suite["status"] == "failed" and suite["counts"] is None
    assert "no CUDA device" in suite["reason"]
    [command] = suite["commands"]
    assert command["environment"]["JAX_PLATFORMS"].startswith("cuda")
    assert command["environment"]["JAX_FUSED_ADAMW_CUDA_COMPILER"] == "nvrtc"


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


def test_host_takes_every_file_of_tests_but_those_of_other_suites(tmp_path):
    runner = PlayedRunner(tmp_path, tests=all_passed(OWN | {"backend": "cpu"}))
    outcome(_suites.SUITES["host"].checks(make_job(runner, tmp_path))[""])
    argv, _ = runner.command("-m pytest")
    files = {pathlib.Path(word).name for word in argv if word.endswith(".py")}
    assert {"test_bits.py", "test_in_place.py", "test_random_trees.py"} <= files
    assert not {"test_cuda.py", "test_verify.py", "test_bench.py"} & files
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
        ("host", "haiku", "pip install dm-haiku"),
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


def test_another_package_than_the_source_blocks(tmp_path, checkout):
    job = make_job(PlayedRunner(tmp_path), tmp_path, source=checkout)
    added = checkout / "jax_fused_adamw" / "_added.py"
    added.touch()
    try:
        stopped = outcome(_suites.SUITES["reference"].checks(job)[""])
    finally:
        added.unlink()
    assert stopped.status == "blocked" and "other Python files" in stopped.reason
    job = make_job(PlayedRunner(tmp_path), tmp_path, package=None)
    stopped = outcome(_suites.SUITES["reference"].checks(job)[""])
    assert stopped.status == "blocked" and "pip install" in stopped.reason


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


# --- Which source ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cc", "cmake", "jax_fused_adamw", "tests"])
def test_hashes_follow_files(checkout, name):
    before = _sources.describe_source(checkout)["sha256"]
    added = checkout / name / "deeper" / "file.txt"
    added.parent.mkdir()
    try:
        for made in ("a.so", "b.pyc"):
            (added.parent / made).write_text("made by a build")
        assert _sources.describe_source(checkout)["sha256"] == before
        added.write_text("1")
        first = _sources.describe_source(checkout)["sha256"]
        added.write_text("2")
        second = _sources.describe_source(checkout)["sha256"]
    finally:
        shutil.rmtree(added.parent)
    for one, other in ((before, first), (first, second)):
        assert {key for key in one if one[key] != other[key]} == {"all", name}
    assert _sources.describe_source(checkout)["sha256"] == before


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_commit_and_whether_files_differ(checkout):
    assert _sources.describe_source(checkout)["git"] is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-C", checkout]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    try:
        clean = _sources.describe_source(checkout)["git"]
        (checkout / "added").touch()
        dirty = _sources.describe_source(checkout)["git"]
    finally:
        (checkout / "added").unlink()
        shutil.rmtree(checkout / ".git")
    assert len(clean["commit"]) == 40 and not clean["dirty"]
    assert dirty == clean | {"dirty": True}


def test_source_is_found(checkout, monkeypatch):
    monkeypatch.setattr(_sources.jfa, "__file__", "/nowhere/jax_fused_adamw/x.py")
    monkeypatch.chdir(checkout / "tests")
    assert _sources.find_source(None) is None
    monkeypatch.chdir(checkout)
    assert _sources.find_source(None) == checkout
    package = ROOT / "jax_fused_adamw" / "__init__.py"
    monkeypatch.setattr(_sources.jfa, "__file__", str(package))
    assert _sources.find_source(None) == ROOT


def test_changes_during_and_since_the_build_are_noted(verify, monkeypatch, checkout):
    changed = checkout / "cc" / "core" / "adamw.h"
    right = changed.read_text()

    def change():
        changed.write_text(right + "\n")
        return passes()

    plant(monkeypatch, "host", change)
    os.utime(changed, (2**32, 2**32))
    try:
        _, results = verify("--suite", "host", source=checkout)
    finally:
        changed.write_text(right)
    since, during = results["notes"][0], results["notes"][-1]
    assert "cc/core/adamw.h is newer" in since
    assert "changed while" in during
