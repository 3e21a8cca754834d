"""The demo: what it writes, that both runs are what they say, and how it refuses."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from jax_fused_adamw import _ffi
from jax_fused_adamw.demo import _data, _report, _train
from jax_fused_adamw.demo.__main__ import main
from jax_fused_adamw.demo._model import GPT

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "rhyme.txt"
    file.write_text("".join(f"{i} bottles hang on the wall\n" for i in range(400)))
    return file


@pytest.fixture(scope="module")
def run_demo(text_file, tmp_path_factory):
    """Runs the demo on the small text: its folder and its results."""

    def run(*options):
        out = tmp_path_factory.mktemp("runs") / "new" / "folder"
        status = main(["--data", str(text_file), "--out", str(out), *options])
        assert status == 0
        return out, json.loads((out / _report.JSON_FILE).read_text())

    return run


@pytest.fixture(scope="module")
def both(run_demo):
    return run_demo("--steps", "30")


def assert_refused(capsys, argv, *words):
    """Status 2, nothing on stdout, and one line on stderr that holds the words."""
    assert main([str(argument) for argument in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jax_fused_adamw.demo: ")
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
    for word in words:
        assert word in captured.err


# --- What a run leaves ----------------------------------------------------------------


def test_saves_a_plot_and_results(both):
    out, results = both
    assert sorted(f.name for f in out.iterdir()) == ["losses.png", "results.json"]
    assert (out / _report.PLOT_FILE).read_bytes().startswith(PNG_SIGNATURE)
    assert results["steps"] == 30 and results["seed"] == 0
    assert results["text"].endswith("rhyme.txt") and results["num_files"] == 1
    assert 200_000 < results["num_parameters"] < 500_000
    assert list(results["runs"]) == ["fused", "optax"]
    for run in results["runs"].values():
        assert len(run["losses"]) == 30 and np.isfinite(run["losses"]).all()
        assert run["median_step_ms"] > 0 and run["compile_seconds"] > 0


def test_model_learns(both):
    for run in both[1]["runs"].values():
        assert run["losses"][0] == pytest.approx(np.log(256), abs=0.2)
        assert run["losses"][-1] < 2.5
        assert run["held_out_loss"] < 2.5


def test_optimizers_agree(both):
    _, results = both
    fused, optax = results["runs"].values()
    np.testing.assert_allclose(fused["losses"], optax["losses"], rtol=1e-3)
    assert fused["held_out_loss"] == pytest.approx(optax["held_out_loss"], rel=0.02)
    comparison = results["comparison"]
    differences = np.abs(np.subtract(fused["losses"], optax["losses"]))
    assert comparison["largest_relative_loss_difference"] == pytest.approx(
        (differences / optax["losses"]).max()
    )
    # Not equal to the last bit: that would be one optimizer run twice.
    assert 0 < comparison["largest_parameter_difference"] < 1e-2


def test_sample_is_printable_and_printed(run_demo, capsys):
    _, results = run_demo("--steps", "2", "--optimizer", "fused")
    sample = results["sample"]
    assert sample["optimizer"] == "fused" and len(sample["text"]) == 240
    assert sample["prompt"].endswith("399 bottles hang on the wall\n")
    assert set(sample["text"]) <= {chr(c) for c in [9, 10, *range(32, 127)]}
    printed = capsys.readouterr().out
    assert sample["prompt"] + "[...]" + sample["text"] in printed
    assert printed.isascii()


def test_printable_replaces_what_a_terminal_may_not_show():
    text = np.frombuffer("a\té\x1b[0m\n".encode(), np.uint8)
    assert _report.printable(text) == "a\t...[0m\n"


def test_prints_losses_at_round_steps_and_the_last():
    assert _report.printed_steps(1) == [1]
    assert _report.printed_steps(2) == [1, 2]
    assert _report.printed_steps(120) == [1, 2, 5, 10, 20, 50, 100, 120]


def test_progress_and_losses_are_printed(run_demo, capsys):
    _, results = run_demo("--steps", "1", "--optimizer", "optax", "--seed", "3")
    captured = capsys.readouterr()
    assert "optax.adamw: 100%" in captured.err
    [loss] = results["runs"]["optax"]["losses"]
    assert f"1{loss:14.4f}\n" in captured.out
    assert list(results["runs"]) == ["optax"] and results["seed"] == 3
    assert results["comparison"] is None
    assert results["sample"]["optimizer"] == "optax"


# --- Which optimizer trains -----------------------------------------------------------


def test_only_the_fused_step_calls_the_kernel(both):
    runs = both[1]["runs"]
    assert runs["fused"]["native_calls"] == 1
    assert runs["optax"]["native_calls"] == 0


@pytest.mark.parametrize("name, target", [("fused", True), ("optax", False)])
def test_train_step_holds_the_custom_call_or_not(name, target):
    graphdef, params = nnx.split(
        GPT(8, width=8, heads=2, num_blocks=1, rngs=nnx.Rngs(0))
    )
    optimizer = _train.OPTIMIZERS[name]
    tx = optimizer.make(**_train.hyperparameters(4))
    train_step = _train.make_train_step(optimizer, tx, graphdef)
    batch = np.zeros((2, 9), np.uint8)
    text = train_step.lower(params, tx.init(params), batch).as_text()
    assert ("jax_fused_adamw_update" in text) == target


def test_matrices_decay_and_vectors_do_not():
    _, params = nnx.split(GPT(8, width=8, heads=2, num_blocks=1, rngs=nnx.Rngs(0)))
    decays = jax.tree.leaves(_train.decay_mask(params))
    assert decays == [p.ndim == 2 for p in jax.tree.leaves(params)]
    assert any(decays) and not all(decays)


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 800])
def test_learning_rate_rises_then_falls(steps):
    schedule = _train.hyperparameters(steps)["learning_rate"]
    rates = np.array([schedule(count) for count in range(steps)])
    assert (rates > 0).all() and rates.max() == pytest.approx(3e-3)
    peak = rates.argmax()
    assert (np.diff(rates[: peak + 1]) > 0).all() and (np.diff(rates[peak:]) < 0).all()


def test_model_is_causal():
    model = GPT(8, width=8, heads=2, num_blocks=2, rngs=nnx.Rngs(0))
    text = np.arange(8)[None]
    changed = np.where(np.arange(8) < 5, text, 200)
    before, after = np.asarray(model(text)), np.asarray(model(changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


# --- The text -------------------------------------------------------------------------


def test_standard_library_is_read_the_same_twice():
    first, second = _data.read_corpus(None), _data.read_corpus(None)
    assert first.num_files == second.num_files > 50
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.held_out, second.held_out)
    assert len(first.train) + len(first.held_out) <= 4_000_000
    assert b"import" in first.train.tobytes() and b"import" in first.held_out.tobytes()


def test_folder_is_read_in_order_without_what_is_not_text(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"b" * 500)
    (tmp_path / "a.md").write_bytes(b"a" * 500)
    (tmp_path / "image").write_bytes(b"\0\1\2" * 500)
    (tmp_path / ".hidden").write_bytes(b"h" * 500)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "c.txt").write_bytes(b"c" * 500)
    corpus = _data.read_corpus(tmp_path)
    text = corpus.train.tobytes() + corpus.held_out.tobytes()
    assert text == b"a" * 500 + b"b" * 500 + b"c" * 500
    assert corpus.num_files == 3 and len(corpus.held_out) == 150


def test_batches_come_from_the_seed_alone_and_stay_inside():
    text = np.arange(_data.CONTEXT + 5).astype(np.uint8)
    corpus = _data.Corpus("text", 1, train=text, held_out=text)
    starts = _data.training_batches(corpus, 50, seed=1)
    np.testing.assert_array_equal(starts, _data.training_batches(corpus, 50, seed=1))
    assert (starts != _data.training_batches(corpus, 50, seed=2)).any()
    assert set(starts.flat) == {0, 1, 2, 3, 4}
    for batches in (starts, _data.held_out_batches(corpus)):
        windows = [_data.windows(text, batch) for batch in batches]
        assert all(w.shape == (_data.BATCH, _data.CONTEXT + 1) for w in windows)


def test_shortest_text_is_enough(tmp_path, run_demo):
    file = tmp_path / "short.txt"
    file.write_text("x" * _data._MIN_BYTES)
    run_demo("--data", str(file), "--steps", "1", "--optimizer", "optax")


# --- What is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--steps", "0"], ["--steps", "from 1 to 100000", "'0'"]),
        (["--steps", "-4"], ["--steps", "'-4'"]),
        (["--steps", "many"], ["--steps", "'many'"]),
        (["--steps", "1e3"], ["--steps", "'1e3'"]),
        (["--steps", "100001"], ["--steps", "'100001'"]),
        (["--steps"], ["--steps"]),
        (["--seed", "-1"], ["--seed", "'-1'"]),
        (["--optimizer", "adam"], ["--optimizer", "adam", "both", "fused", "optax"]),
        (["--data", ""], ["--data", "path"]),
        (["--data", "/no/such/text"], ["--data '/no/such/text'", "does not exist"]),
        (["--data", "n" * 300], ["--data"]),
        (["--data", "/dev/null"], ["--data", "neither a file nor a folder"]),
        (["--out", ""], ["--out", "path"]),
        (["--step", "3"], ["--step 3"]),
        (["extra"], ["extra"]),
    ],
    ids=lambda value: " ".join(value)[:24] or None,
)
def test_wrong_option_is_one_line(capsys, argv, words):
    assert_refused(capsys, argv, *words)


@pytest.mark.parametrize("content", [b"", b"too little", b"\0 not text" * 100])
def test_unusable_text_is_one_line(capsys, tmp_path, content):
    file = tmp_path / "file.txt"
    file.write_bytes(content)
    reason = "NUL bytes" if b"\0" in content else f"holds {len(content)} bytes"
    assert_refused(capsys, ["--data", file], "file.txt", reason)
    # In a folder, one unusable file is passed over; here nothing else is left.
    assert_refused(capsys, ["--data", tmp_path], "bytes of readable text", "--data")


def test_unwritable_folder_is_one_line(capsys, text_file, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    options = ["--data", text_file, "--out"]
    assert_refused(capsys, [*options, file], "--out", "is a file")
    assert_refused(capsys, [*options, file / "below"], "--out", "cannot write")
    assert_refused(capsys, [*options, tmp_path / ("n" * 300)], "--out", "cannot write")


@pytest.mark.parametrize("name", ["flax", "matplotlib", "tqdm"])
def test_missing_package_is_one_line(capsys, monkeypatch, text_file, name):
    monkeypatch.setitem(sys.modules, name, None)
    argv = ["--data", text_file]
    assert_refused(capsys, argv, name, 'pip install ".[demo]"')


def test_missing_kernel_is_told_in_the_package_s_words(
    capsys, monkeypatch, text_file, tmp_path
):
    module = _ffi.NativeModule(jax.default_backend(), False, "it was not built")
    info = dataclasses.replace(_ffi._INFO, cpu=module, cuda=module)
    monkeypatch.setattr(_ffi, "_INFO", info)
    argv = ["--data", text_file, "--out", tmp_path / "out", "--steps", "1"]
    assert_refused(capsys, argv, "fused_adamw has no native kernel", "it was not built")
    assert not (tmp_path / "out").exists()


def test_runs_as_a_module():
    command = [sys.executable, "-m", "jax_fused_adamw.demo"]
    wrong = subprocess.run([*command, "--steps", "0"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr.count("\n") == 1 and "Traceback" not in wrong.stderr
    usage = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert usage.returncode == 0
    for option in ("--steps", "--data", "--optimizer", "--out", "--seed"):
        assert option in usage.stdout
