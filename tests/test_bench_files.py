"""The bench: the files that it writes and compares, and what it refuses to read."""

import dataclasses
import json
import subprocess
import sys

import pytest
from bench_helpers import assert_refused, on_a_gpu

from jax_fused_adamw.bench import (
    BenchError,
    _experiment,
    _report,
    _results,
    _train_step,
)
from jax_fused_adamw.bench.__main__ import main
from jax_fused_adamw.bench._machine import describe_machine
from jax_fused_adamw.bench._results import ModelResult, Results, RowResult, Spread

pytestmark = pytest.mark.usefixtures("small_copies")


# --- Files ----------------------------------------------------------------------------


def make_results(step_us, peer_us=100.0, percent=50.0, status="measured", **setting):
    """A run of a step and its peer on one model."""

    def row(name, ours, us, status="measured", percent=50.0):
        if status != "measured":
            return RowResult(name, ours, status, "some reason")
        spread = Spread(us / 1e3, us / 1e3, us / 1e3)
        return RowResult(
            name, ours, status, wall_ms=spread, num_bytes=28, percent_of_limit=percent
        )

    rows = [row("step", True, step_us, status, percent)]
    if peer_us is not None:
        rows.append(row("optax.adamw", False, peer_us))
    return Results(
        machine={
            "platform": "cpu",
            "device": "cpu",
            "processor": "x",
            "date": "today",
            "versions": {"jax": "0"},
        },
        load={},
        setting={"dtype": "float32", "amsgrad": False, **setting},
        limit={"gb_per_s": 40.0, "method": "copy"},
        models=[ModelResult("mlp", 16, 33_280, rows)],
    )


BASELINE = make_results(step_us=50.0)


def test_json_comes_back_as_it_was(run_bench, tmp_path, monkeypatch):
    on_a_gpu(monkeypatch, lambda steps: steps)
    _, results = run_bench("--rows", "step", "staged", "torch-cuda-graph")
    copy = tmp_path / "copy.json"
    _results.write(results, copy)
    assert _results.read(copy) == results
    content = json.loads(copy.read_text())
    assert content["schema"] == 1
    assert content["machine"]["versions"]["jax"] and content["machine"]["command"]
    assert content["setting"]["iterations"] == 2 and content["setting"]["b2"] == 0.999
    assert set(content["load"]) == {"before", "after"}


@pytest.mark.parametrize(
    "after, words",
    [
        (make_results(step_us=52.5), []),  # 4.8 % slower
        (make_results(step_us=53.0), ["mlp step: speed", "from 2 to 1.89"]),
        (make_results(step_us=106.0, peer_us=212.0), []),  # a slower machine
        (make_results(step_us=50.0, peer_us=94.0), ["mlp step: speed"]),
        (make_results(step_us=50.0, percent=47.6), []),
        (make_results(step_us=50.0, percent=47.4), ["percent of the limit"]),
        (make_results(step_us=99.0, peer_us=None), []),
        (make_results(step_us=1.0, status="wrong"), ["mlp step is wrong: some"]),
        (make_results(step_us=1.0, status="blocked"), ["mlp step is blocked"]),
    ],
)
def test_losses_of_more_than_5_percent_are_found(after, words):
    losses = _report.find_losses(BASELINE, after)
    assert bool(losses) == bool(words)
    for word in words:
        assert any(word in loss for loss in losses)


@pytest.mark.parametrize(
    "after, words",
    [
        (make_results(50.0, dtype="bfloat16"), "dtype is 'float32'.*'bfloat16'"),
        (make_results(50.0, amsgrad=True), "amsgrad"),
        (dataclasses.replace(BASELINE, models=[]), "no row of this package"),
        (
            dataclasses.replace(
                BASELINE, machine={**BASELINE.machine, "processor": "y"}
            ),
            "processor",
        ),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(after, words):
    with pytest.raises(BenchError, match=words):
        _report.find_losses(BASELINE, after)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--dtype", "bfloat16"], ["dtype is 'float32'", "'bfloat16'"]),
        (["--amsgrad"], ["amsgrad"]),
        (["--elements", "7"], ["the baseline has none of 7 elements"]),
        (["--ladder"], ["the baseline has none of"]),
        (["--train-step"], ["two runs of one kind"]),
    ],
    ids=lambda value: " ".join(value)[:24],
)
def test_a_baseline_is_refused_before_the_run(
    capsys, monkeypatch, tmp_path, options, words
):
    def measured(*args):
        raise AssertionError("measured")

    monkeypatch.setattr(_experiment, "run_bench", measured)
    monkeypatch.setattr(_train_step, "run_train_steps", measured)
    baseline = dataclasses.replace(BASELINE, machine=describe_machine())
    file = tmp_path / "baseline.json"
    _results.write(baseline, file)
    assert_refused(capsys, ["--check", file, *options], *words)


@pytest.mark.parametrize("factor, expected", [(100.0, 0), (0.01, 1)])
def test_check_decides_the_exit_status(run_bench, tmp_path, capsys, factor, expected):
    rows = ["--rows", "step", "optax.adamw"]
    _, results = run_bench(*rows)
    content = dataclasses.asdict(results)
    for model in content["models"]:
        ours = model["rows"][0]
        ours["percent_of_limit"] /= factor
        for spread in filter(None, (ours["wall_ms"], ours["device_us"])):
            spread.update({name: us * factor for name, us in spread.items()})
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps({"schema": 1, **content}))
    assert run_bench(*rows, "--check", str(baseline))[0] == expected
    assert ("LOST: tiny step: " in capsys.readouterr().out) == bool(expected)


def test_each_row_is_held_against_its_own_peer():
    (model,) = BASELINE.models
    step, peer = model.rows

    def with_clip(peer_ms):
        clip = dataclasses.replace(step, name="step+clip", peer="optax.adamw+clip")
        spread = Spread(peer_ms, peer_ms, peer_ms)
        theirs = dataclasses.replace(peer, name="optax.adamw+clip", wall_ms=spread)
        rows = [step, peer, clip, theirs]
        return dataclasses.replace(
            BASELINE, models=[dataclasses.replace(model, rows=rows)]
        )

    (loss,) = _report.find_losses(with_clip(0.2), with_clip(0.1))
    assert loss == (
        "mlp step+clip: speed as a multiple of optax.adamw+clip's fell from 4 to 2"
    )


def test_device_time_is_never_held_against_wall_time():
    step, peer = BASELINE.models[0].rows
    on_device = dataclasses.replace(step, device_us=Spread(5.0, 5.0, 5.0))
    assert _results.comparable_us([on_device]) == [5.0]
    assert _results.comparable_us([on_device, on_device]) == [5.0, 5.0]
    assert _results.comparable_us([on_device, peer]) == [50.0, 100.0]


def test_compare_prints_what_both_have(tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    _results.write(BASELINE, a)
    _results.write(make_results(step_us=75.0, peer_us=None), b)
    assert main(["--compare", str(a), str(b)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["mlp", "step", "50.0", "75.0", "1.500"]
    _results.write(make_results(1.0, peer_us=None, status="wrong"), b)
    assert_refused(capsys, ["--compare", a, b], "no measured row in common")


def test_what_a_killed_run_has_measured_is_saved(run_bench, tmp_path, monkeypatch):
    file = tmp_path / "partial.json"
    measure = _experiment._measure_model

    def killed(name, *arguments):
        if name == "one":
            raise KeyboardInterrupt
        return measure(name, *arguments)

    monkeypatch.setattr(_experiment, "_measure_model", killed)
    with pytest.raises(KeyboardInterrupt):
        run_bench("--rows", "step", "--json", str(file))
    assert [model.name for model in _results.read(file).models] == ["tiny"]


def test_markdown_shows_rows_of_all_models_and_what_is_not_measured(tmp_path, capsys):
    file = tmp_path / "a.json"
    results = make_results(step_us=50.0, percent=47.6)
    (model,) = results.models
    other = dataclasses.replace(model, name="other", rows=model.rows[1:])
    wrong = make_results(1.0, peer_us=None, status="wrong").models[0]
    models = [model, other, dataclasses.replace(wrong, name="third")]
    _results.write(dataclasses.replace(results, models=models), file)
    assert main(["--markdown", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].count("16 leaves, 0.0333 M") == 3
    assert lines[2] == "| `step` | 50.0, 47.6 % |  | wrong |"
    assert lines[3] == "| `optax.adamw` | 100, 50.0 % | 100, 50.0 % |  |"
    assert "40 GB/s" in lines[-1] and "float32 gradients" in lines[-1]


# --- What is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--iterations", "0"], ["--iterations", "from 1 to 100000", "'0'"]),
        (["--samples", "many"], ["--samples", "'many'"]),
        (["--elements", "-3"], ["--elements", "'-3'"]),
        (["--dtype", "float64"], ["--dtype", "float64", "bfloat16"]),
        (["--shape", "gpt5"], ["--shape", "gpt5", "gpt2"]),
        (["--shape"], ["--shape"]),
        (["--rows", "ours"], ["--rows", "alias=False", "got ours"]),
        (["--shapes", "/no/such/file"], ["--shapes '/no/such/file'", "cannot read"]),
        (["--module", "json"], ["--module 'json'", "pkg.module:function"]),
        (["--module", "no_such:f"], ["--module 'no_such:f'", "ModuleNotFoundError"]),
        (["--module", "json:f"], ["AttributeError", "'f'"]),
        (["--module", "json:dumps"], ["TypeError"]),
        (["--check", "/no/such/file"], ["/no/such/file"]),
        (["--compare", "/no/such/file"], ["--compare", "2 arguments"]),
        (["--compare", "a", "b", "--markdown", "c"], ["--markdown", "give one"]),
        (["--json", "/no/such/folder/x"], ["--json", "folder that exists"]),
        (["--plot", "/tmp"], ["--plot", "folder that exists"]),
        (["--plot", "bars.txt"], ["--plot 'bars.txt'", ".png"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
    ids=lambda value: " ".join(value)[:24] or None,
)
def test_wrong_option_is_one_line(capsys, argv, words):
    assert_refused(capsys, argv, *words)


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", ["not JSON"]),
        ("[[2, 3]]", ['{"name":', "[[2, 3]]"]),
        ("{}", ['{"name":']),
        ('{"a": []}', ["'a' is []"]),
        ('{"a": [2, 3]}', ["'a' holds 2", "positive whole numbers"]),
        ('{"a": [[2, 0]]}', ["'a' holds [2, 0]"]),
        ('{"a": [[2.5]]}', ["'a' holds [2.5]"]),
        ('{"a": [[true]]}', ["'a' holds [True]"]),
    ],
)
def test_unusable_shapes_are_one_line(capsys, tmp_path, content, words):
    file = tmp_path / "shapes.json"
    file.write_text(content)
    assert_refused(capsys, ["--shapes", file], "--shapes", *words)


@pytest.mark.parametrize(
    "content, words",
    [
        ("text", ["cannot read results"]),
        ("[]", ["schema 1, got None"]),
        ('{"schema": 0}', ["schema 1, got 0"]),
        ('{"schema": 1}', ["not a results file"]),
    ],
)
def test_unusable_results_are_one_line(capsys, tmp_path, content, words):
    file = tmp_path / "results.json"
    file.write_text(content)
    assert_refused(capsys, ["--check", file], "results.json", *words)


@pytest.mark.parametrize("name", ["matplotlib", "tqdm"])
def test_missing_package_is_one_line(capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert_refused(capsys, [], name, 'pip install ".[bench]"')


def test_runs_as_a_module():
    command = [sys.executable, "-m", "jax_fused_adamw.bench"]
    wrong = subprocess.run([*command, "--samples", "0"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr.count("\n") == 1 and "Traceback" not in wrong.stderr
    usage = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert usage.returncode == 0
    for option in ("--shape", "--shapes", "--module", "--elements", "--check"):
        assert option in usage.stdout
