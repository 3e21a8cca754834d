"""Verify: what counts as proven, what is killed, and what the JSON holds."""

import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from jax_fused_adamw.verify import _sources, _suites, _verify
from jax_fused_adamw.verify.__main__ import main
from jax_fused_adamw.verify._facts import gather
from jax_fused_adamw.verify._results import Counts, Finding, Stop
from jax_fused_adamw.verify._runner import Runner, _own_group

ROOT = pathlib.Path(__file__).parent.parent
OWN = gather()


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
