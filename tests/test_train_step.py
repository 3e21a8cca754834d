"""Whole train steps: what is trained, what is refused a time, device time."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bench_helpers import TOY_UPDATES, reasons, statuses, toy_workload

from jax_fused_adamw import _ffi
from jax_fused_adamw.bench import (
    _gpt,
    _measure,
    _ppo,
    _protocol,
    _results,
    _shapes,
    _train_report,
    _train_rows,
    _train_step,
)
from jax_fused_adamw.bench.__main__ import main
from jax_fused_adamw.bench._results import (
    Spread,
    TrainResults,
)
from jax_fused_adamw.bench._train_rows import OPTIMIZERS, Optimizer
from jax_fused_adamw.bench._workloads import Workload, largest_batch, ppo_workload

ALL_NAMES = [_train_step.GRADIENTS, *(each.name for each in OPTIMIZERS)]
# Those that a workload in float32 has too.
NAMES = ALL_NAMES[:6]
PLAIN, CLIPPED, IF_FINITE, OURS, OURS_CLIPPED = NAMES[1:]


@pytest.fixture
def run_toy(monkeypatch):
    """Runs the named optimizers on the toy alone."""

    def run(*names):
        chosen = [each for each in _train_step.OPTIMIZERS if each.name in names]
        monkeypatch.setattr(_train_step, "OPTIMIZERS", chosen)
        models = [_train_step._measure_workload(toy_workload(), 2, 2, graphs=True)]
        return TrainResults({}, {}, {}, models)

    return run


def replace_optimizer(monkeypatch, name, make):
    changed = [
        dataclasses.replace(each, make=make) if each.name == name else each
        for each in OPTIMIZERS
    ]
    monkeypatch.setattr(_train_step, "OPTIMIZERS", changed)


def by_name(results):
    return {row.name: row for row in results.models[0].rows}


# --- The whole command ----------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train_step")
    files = {name: folder / name for name in ("run.json", "bars.png")}
    options = ["--train-step", "--batch", "2", "--iterations", "2", "--samples", "2"]
    saved = ["--json", str(files["run.json"]), "--plot", str(files["bars.png"])]
    with pytest.MonkeyPatch.context() as patch, jax.numpy_rank_promotion("raise"):
        patch.setattr(_gpt, "TINY", _gpt.Config(64, 16, 16, 2, 1))
        assert main([*options, *saved]) == 0
    return files


@pytest.mark.platform("cpu")
def test_every_row_is_measured_on_both_workloads(whole_run):
    results = _results.read(whole_run["run.json"])
    gpt, ppo = results.models
    assert gpt.name == "tiny GPT, 2 x 16 tokens" and gpt.num_leaves == 16
    assert "lax.scan" in ppo.name and ppo.num_leaves == 12
    for model, names in ((gpt, ALL_NAMES), (ppo, NAMES)):
        assert [row.name for row in model.rows] == names
        gradients, *rows = model.rows
        assert gradients.optimizer_share is None
        for row in rows:
            assert row.status == "measured", row
            assert row.wall_ms.min <= row.wall_ms.median <= row.wall_ms.max
            extra = row.wall_ms.median - gradients.wall_ms.median
            assert row.optimizer_share == pytest.approx(extra / row.wall_ms.median)
            assert row.compile_s > 0
            # Parameters and two moments are arguments, whatever else there is.
            assert row.peak_bytes > 12 * model.num_parameters
            assert row.device_us is row.launches is row.no_graphs_ms is None


@pytest.mark.parametrize(
    "names, chosen",
    [
        ([], [each.name for each in OPTIMIZERS]),
        ([OURS], [PLAIN, OURS]),
        ([OURS_CLIPPED, OURS], [PLAIN, CLIPPED, OURS, OURS_CLIPPED]),
        ([PLAIN], [PLAIN]),
    ],
    ids=len,
)
def test_chosen_rows_come_behind_those_that_they_are_compared_with(names, chosen):
    model = _train_step._measure_workload(toy_workload(), 1, 1, False, names)
    suited = [name for name in chosen if not name.startswith("bf16")]  # to the toy
    assert [row.name for row in model.rows] == ["gradients only", *suited]
    assert {row.status for row in model.rows} == {"measured"}


@pytest.mark.platform("cpu")
def test_files_are_read_again(whole_run, tmp_path, capsys):
    file = whole_run["run.json"]
    assert whole_run["bars.png"].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    content = json.loads(file.read_text())
    assert content["kind"] == "train step" and content["machine"]["command"]
    assert content["setting"]["tolerance"] == _train_step.TOLERANCE
    copy = tmp_path / "copy.json"
    _results.write(_results.read(file), copy)
    assert json.loads(copy.read_text()) == content
    assert main(["--markdown", str(file)]) == 0
    table = capsys.readouterr().out
    assert table == _train_report.render_table(_results.read(file))
    assert main(["--compare", str(file), str(copy)]) == 0
    assert capsys.readouterr().out.count("1.000") == len(ALL_NAMES + NAMES)


# --- What is trained ------------------------------------------------------------------


def test_gpt2_has_its_published_leaves():
    params = jax.eval_shape(lambda: _gpt.init(_gpt.GPT2))
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(params))
    assert shapes == sorted(_shapes.named("gpt2"))


def test_gpt_sees_no_token_that_it_predicts():
    params, tokens = _gpt.init(_gpt.TINY), _gpt.tokens(_gpt.TINY, 2)

    def losses(tokens):
        return _gpt.loss_fn(params, tokens, heads=4, attention="xla")

    first = losses(tokens)
    assert first == pytest.approx(np.log(_gpt.TINY.vocabulary), rel=0.01)
    # Only the mean tells; the last target changes a single one of 64 losses.
    changed = losses(tokens.at[0, -1].add(1))
    assert 0 < abs(changed - first) < 1.0 / 64


def test_a_scan_takes_the_same_updates_as_single_steps():
    scanned = ppo_workload()
    update = OPTIMIZERS[0].update
    single = dataclasses.replace(scanned, updates=1).train_step(update)
    params = scanned.init()
    state = OPTIMIZERS[0].make().init(params)
    _, _, losses = jax.jit(scanned.train_step(update))(params, state, scanned.batch)
    step, expected = jax.jit(single), []
    for i in range(_ppo.MINIBATCHES):
        minibatch = jax.tree.map(lambda x, i=i: x[i], scanned.batch)
        params, state, loss = step(params, state, minibatch)
        expected.append(loss)
    np.testing.assert_allclose(losses, np.array(expected), rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_loss():
    workload = toy_workload()
    params = workload.init()
    grads, losses = workload.gradients(params, workload.batch)
    last = jax.tree.map(lambda x: x[-1], workload.batch)
    expected = jax.grad(workload.loss_fn)(params, last)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), grads, expected)
    assert losses.shape == (TOY_UPDATES,)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.name)
def test_rule_is_what_the_name_says(optimizer):
    params = {"w": jnp.ones(3)}
    start = optimizer.make().init(params)

    def moments(scale):
        grads = {"w": jnp.array([100.0, 200.0, 300.0]) * scale}
        params_and_state = optimizer.update(grads, start, {"w": jnp.ones(3)})
        return params_and_state[0]["w"], optax.tree.get(params_and_state[1], "mu")["w"]

    clips = np.allclose(moments(1.0)[1], moments(10.0)[1])
    assert clips == ("clip" in optimizer.name) == optimizer.peer.endswith(CLIPPED)
    after_nan = moments(jnp.nan)[0]
    assert np.isfinite(after_nan).all() == ("if finite" in optimizer.name)


# --- Correctness before speed ---------------------------------------------------------


def test_losses_are_compared_before_chance_parts_them():
    expected = np.linspace(10.0, 5.0, 20)
    for update, is_wrong in ((0, True), (7, True), (8, False), (19, False)):
        losses = expected.copy()
        losses[update] += 0.3
        reason = _train_step.losses_differ(losses, expected, "peer")
        assert (reason is not None) == is_wrong


def test_wrong_optimizer_shows_its_difference_and_no_time(run_toy, monkeypatch):
    wrong = lambda: optax.adamw(1.1 * _train_rows.LEARNING_RATE)  # noqa: E731
    replace_optimizer(monkeypatch, OURS, wrong)
    results = run_toy(PLAIN, CLIPPED, OURS, OURS_CLIPPED)
    assert statuses(results)["toy", OURS] == "wrong"
    assert list(statuses(results).values()).count("measured") == 4
    row = by_name(results)[OURS]
    assert f"losses differ from those of {PLAIN} by up to" in row.reason
    assert row.wall_ms is row.optimizer_share is row.compile_s is None


def test_clipped_rows_are_held_to_the_clipped_rule(run_toy, monkeypatch):
    replace_optimizer(monkeypatch, CLIPPED, lambda: optax.sgd(1e-3))
    results = run_toy(PLAIN, CLIPPED, OURS, OURS_CLIPPED)
    assert statuses(results)["toy", OURS] == "measured"
    assert statuses(results)["toy", OURS_CLIPPED] == "wrong"
    assert CLIPPED in reasons(results)[OURS_CLIPPED]


@pytest.mark.parametrize(
    "losses, wrong",
    [
        ([3.0, 2.0, 1.0], False),
        ([3.0, 2.019, 0.981], False),
        ([3.0, 2.021, 1.0], True),
        ([3.0, 2.0, np.nan], True),
    ],
)
def test_losses_may_differ_by_a_share_of_their_way(losses, wrong):
    expected = np.array([3.0, 2.0, 1.0])
    assert _train_step.TOLERANCE == 0.01
    found = _train_step.losses_differ(np.array(losses), expected, "peer")
    assert (found is not None) == wrong
    if wrong:
        assert found.startswith("1 of 3 losses differ from those of peer")


def test_a_nan_is_no_reference(run_toy, monkeypatch):
    replace_optimizer(monkeypatch, PLAIN, lambda: optax.sgd(float("nan")))
    results = run_toy(PLAIN, OURS)
    assert reasons(results)[PLAIN] == "a loss is not finite"
    assert statuses(results)["toy", PLAIN] == "wrong"
    assert statuses(results)["toy", OURS] == "blocked"


# --- What is blocked ------------------------------------------------------------------


def test_missing_kernel_blocks_ours_and_not_the_others(run_toy, monkeypatch):
    module = _ffi.NativeModule("cpu", False, "it was not built")
    info = dataclasses.replace(_ffi._INFO, cpu=module, cuda=module)
    monkeypatch.setattr(_ffi, "_INFO", info)
    results = run_toy(PLAIN, OURS)
    assert reasons(results)[OURS] == "no kernel: it was not built"
    assert statuses(results)["toy", PLAIN] == "measured"


def test_no_memory_for_the_peer_blocks_its_followers(run_toy, monkeypatch):
    def make():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore of it")

    replace_optimizer(monkeypatch, CLIPPED, make)
    results = run_toy(PLAIN, CLIPPED, OURS, OURS_CLIPPED)
    assert reasons(results)[CLIPPED] == "RESOURCE_EXHAUSTED: out of memory"
    assert statuses(results)["toy", OURS_CLIPPED] == "blocked"
    assert f"no {CLIPPED}" in reasons(results)[OURS_CLIPPED]
    assert statuses(results)["toy", OURS] == "measured"


def test_without_gradients_alone_there_is_no_share(run_toy, monkeypatch):
    def gradients(self, params, batch):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Workload, "gradients", gradients)
    results = run_toy(PLAIN)
    assert statuses(results)["toy", _train_step.GRADIENTS] == "blocked"
    assert by_name(results)[PLAIN].status == "measured"
    assert by_name(results)[PLAIN].optimizer_share is None


# --- On a GPU -------------------------------------------------------------------------


@pytest.fixture
def profiler(monkeypatch):
    """2 us of gradients an update, 1 us more of optax, half of that of ours."""

    def profile_device(run, steps, num_devices):
        run()
        optimizer = run.func.__self__._optimizer
        us, launches = {None: (8.0, 40), OURS: (10.0, 48)}.get(
            optimizer and optimizer.name, (12.0, 80)
        )
        return _measure.DeviceTime(us, launches)

    monkeypatch.setattr(_protocol, "has_profiler", lambda: True)
    monkeypatch.setattr(_protocol, "profile_device", profile_device)


def test_device_time_of_an_update_is_split(run_toy, profiler):
    rows = by_name(run_toy(PLAIN, OURS))
    assert rows[_train_step.GRADIENTS].device_us == Spread(2.0, 2.0, 2.0)
    assert rows[PLAIN].device_us.median == 3.0 and rows[PLAIN].launches == 20
    assert rows[PLAIN].optimizer_share == pytest.approx(1 / 3)
    assert rows[OURS].optimizer_share == pytest.approx(0.5 / 2.5)
    assert rows[OURS].no_graphs_ms.median > 0 and rows[OURS].no_graphs_reason is None


def test_lost_events_leave_no_share(run_toy, profiler, monkeypatch):
    def profile_device(run, steps, num_devices):
        run()
        raise _measure.LostEvents("the profiler saw 5 events in 2 steps")

    monkeypatch.setattr(_protocol, "profile_device", profile_device)
    row = by_name(run_toy(PLAIN))[PLAIN]
    assert row.status == "measured" and row.reason.startswith("the profiler saw 5")
    assert row.device_us is row.launches is row.optimizer_share is None


def test_refused_compiler_option_is_told(run_toy, profiler, monkeypatch):
    monkeypatch.setattr(_train_step, "_NO_GRAPHS", {"xla_gpu_no_such_option": ""})
    row = by_name(run_toy(PLAIN))[PLAIN]
    assert row.status == "measured" and row.no_graphs_ms is None
    assert "xla_gpu_no_such_option" in row.no_graphs_reason


def test_wrong_without_graphs_is_wrong(run_toy, profiler, monkeypatch):
    stepper = _train_step.TrainStepper
    wrong = Optimizer("wrong", lambda: optax.sgd(0.5), PLAIN)

    def build(workload, optimizer, compiler_options=None):
        return stepper(workload, wrong if compiler_options else optimizer)

    monkeypatch.setattr(_train_step, "TrainStepper", build)
    row = by_name(run_toy(PLAIN))[PLAIN]
    assert row.status == "wrong" and row.wall_ms is None
    assert row.reason.startswith("without CUDA graphs, ")


@pytest.mark.parametrize(
    "fixed, each, limit, largest, compiled",
    [
        (10, 1, 100, 64, [4, 16, 32, 64]),
        (0, 1, 100, 64, [4, 64]),
        (0, 1, 3, 4, [4, 8]),  # not even the first
        (50, 10, 100, 4, [4, 8]),
        (0, None, 100, 4, [4, 8]),  # does not compile
    ],
)
def test_largest_batch(fixed, each, limit, largest, compiled):
    asked = []

    def peak_bytes(batch):
        asked.append(batch)
        return None if each is None else fixed + each * batch

    assert largest_batch(peak_bytes, 4, limit) == largest
    assert sorted(asked) == compiled


def test_batches_by_default_fit_the_device(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 1000}

    class Stepper:
        def __init__(self, workload, optimizer):
            self.peak_bytes = 10 * workload

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    monkeypatch.setattr(_train_step, "TrainStepper", Stepper)
    assert _train_step._default_batches(lambda batch: batch) == [4, 64]
