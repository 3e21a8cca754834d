"""Whole train steps: tables, comparisons, and what the command refuses."""

import pytest
from bench_helpers import assert_refused

from jax_fused_adamw.bench import (
    BenchError,
    _report,
    _results,
    _train_report,
    _train_step,
)
from jax_fused_adamw.bench._results import (
    Spread,
    TrainResults,
    TrainRowResult,
    WorkloadResult,
)
from jax_fused_adamw.bench._train_rows import OPTIMIZERS

PLAIN, CLIPPED, _, OURS, OURS_CLIPPED, *_ = (each.name for each in OPTIMIZERS)


# --- Files ----------------------------------------------------------------------------


def make_results(ours_us, clipped_us=80.0, attention="xla", status="measured"):
    """Gradients of 60 us; 100 us with optax.adamw, 120 us with clipping."""

    def row(name, us, peer, status="measured"):
        if status != "measured":
            return TrainRowResult(name, name == OURS, status, "a reason", peer=peer)
        return TrainRowResult(
            name,
            peer is not None and "fused" in name,
            status,
            wall_ms=Spread(us / 1e3, us / 1e3, us / 1e3),
            launches=20.0,
            compile_s=1.26,
            peak_bytes=1_500_000,
            peer=peer,
            optimizer_share=None if peer is None else (us - 60) / us,
        )

    rows = [
        row(_train_step.GRADIENTS, 60.0, None),
        row(PLAIN, 100.0, PLAIN),
        row(CLIPPED, 120.0, CLIPPED),
        row(OURS, ours_us, PLAIN, status),
        row(OURS_CLIPPED, clipped_us, CLIPPED),
    ]
    machine = {
        "platform": "cpu",
        "device": "cpu",
        "processor": "x",
        "date": "2026-11-29T12:00:00+00:00",
        "versions": {"jax": "0.10.2", "optax": "0.2.8"},
    }
    return TrainResults(
        machine=machine,
        load={},
        setting={"attention": attention, "activations": "bfloat16", "samples": 3},
        models=[WorkloadResult("toy", "train step", 5, 2, 4_000, rows)],
    )


BASELINE = make_results(ours_us=80.0)


def test_table_of_the_readme():
    lines = _train_report.render_table(make_results(80.0)).splitlines()
    assert lines[2].startswith("| **toy: 4,000 parameters in 2 leaves** |")
    assert f"| {OURS} | 80.0 | 25.0% | 20 | 1.3 s | 2 MB |" in lines
    assert {line.count("|") for line in lines[:-2]} == {7}
    assert lines[-1].startswith("cpu, JAX 0.10.2, optax 0.2.8, 2026-11-29; ")
    wrong = _train_report.render_table(make_results(80.0, status="wrong"))
    assert f"| {OURS} | wrong | " in wrong


@pytest.mark.parametrize(
    "after, word",
    [
        (make_results(ours_us=83.0), None),
        (make_results(ours_us=85.0), f"toy {OURS}: speed as a multiple of {PLAIN}'s"),
        (make_results(80.0, clipped_us=85.0), f"a multiple of {CLIPPED}'s"),
        (make_results(80.0, status="wrong"), f"toy {OURS} is wrong: a reason"),
    ],
)
def test_check_holds_a_row_against_its_own_rule(after, word):
    losses = _report.find_losses(BASELINE, after)
    assert len(losses) == (word is not None)
    assert all(word in loss for loss in losses)


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys):
    with pytest.raises(BenchError, match="attention is 'xla'.*'cudnn'"):
        _report.find_losses(BASELINE, make_results(80.0, attention="cudnn"))
    steps = _results.Results(BASELINE.machine, {}, {}, [], {})
    with pytest.raises(BenchError, match="the optimizer step and one of the train"):
        _report.find_losses(steps, BASELINE)
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    _results.write(steps, a)
    _results.write(BASELINE, b)
    assert_refused(capsys, ["--compare", a, b], "two runs of one kind")


# --- What is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        ["--shape", "gpt2"],
        ["--shapes", "file"],
        ["--module", "a:b"],
        ["--elements", "3"],
        ["--dtype", "bfloat16"],
        ["--amsgrad"],
    ],
    ids=lambda option: option[0],
)
def test_options_of_the_isolated_step_are_refused(capsys, option):
    words = (f"{option[0]} is of the isolated optimizer step", "--batch")
    assert_refused(capsys, ["--train-step", *option], *words)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--batch", "4"], ["--batch is the batch of --train-step"]),
        (["--train-step", "--batch", "0"], ["--batch", "'0'"]),
        (["--train-step", "--batch"], ["--batch"]),
        (["--train-step", "--rows", "step"], ["--rows", "fused_adamw", "got step"]),
        (["--markdown", "/no/such/file"], ["/no/such/file", "cannot read"]),
    ],
    ids=lambda value: " ".join(value)[:24],
)
def test_wrong_option_is_one_line(capsys, argv, words):
    assert_refused(capsys, argv, *words)
