"""Steps on meshes: every row, what it communicates, and what is refused a time."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from bench_helpers import assert_refused, canned_profile, statuses
from jax.sharding import PartitionSpec as P

from jax_fused_adamw.bench import (
    _gpt,
    _measure,
    _mesh,
    _mesh_rows,
    _protocol,
    _report,
    _results,
    _sharded,
    _sharded_report,
    _sharded_train,
)
from jax_fused_adamw.bench.__main__ import main
from jax_fused_adamw.bench._machine import describe_machine
from jax_fused_adamw.bench._mesh_rows import MESH_ROWS
from jax_fused_adamw.bench._problem import Problem
from jax_fused_adamw.bench._results import (
    ShardedModelResult,
    ShardedResults,
    ShardedRowResult,
    Spread,
)
from jax_fused_adamw.bench._workloads import Workload

pytestmark = [pytest.mark.devices(2), pytest.mark.usefixtures("small_copies")]

# Three leaves that two devices share evenly and two that they cannot; with clipping.
LEAVES = [[8, 60], [7, 64], [100, 200], [7], []]
CUT_BYTES = 4 * (8 * 60 + 7 * 64 + 100 * 200)
UPDATES = 9
QUICK = ["--sharded", "--iterations", "2", "--samples", "2"]
TINY = _gpt.Config(vocabulary=64, context=16, width=16, heads=2, num_blocks=1)


@pytest.fixture
def run(tmp_path):
    """Runs the bench on the leaves above: its exit status and its results."""
    shapes, out = tmp_path / "shapes.json", tmp_path / "out.json"
    shapes.write_text(json.dumps({"mixed": LEAVES}))

    def run(*options, updates=0):
        files = ["--shapes", str(shapes), "--json", str(out)]
        status = main([*QUICK, *files, "--updates", str(updates), *options])
        return status, _results.read(out)

    return run


def by_name(model):
    return {row.name: row for row in model.rows}


# --- The whole command ----------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "shapes.json").write_text(json.dumps({"mixed": LEAVES}))
    files = [f"--shapes={folder / 'shapes.json'}", f"--json={folder / 'run.json'}"]
    options = ["--devices", "2", "1", "--updates", str(UPDATES)]
    with pytest.MonkeyPatch.context() as patch, jax.numpy_rank_promotion("raise"):
        patch.setattr(_gpt, "TINY", TINY)
        patch.setattr(_gpt, "GPT2", TINY)
        patch.setattr(_measure, "_CPU_COPY_BYTES", 1 << 20)
        assert main([*QUICK, *files, *options, f"--plot={folder / 'a.png'}"]) == 0
    return folder


def test_every_row_is_measured_on_every_mesh(whole_run):
    results = _results.read(whole_run / "run.json")
    one, two, training = results.models
    assert [one.name, two.name] == ["mixed on 1 device", "mixed on 2 devices"]
    assert one.num_parameters == 20_936 and one.num_leaves == 5
    for model in (one, two):
        assert [row.name for row in model.rows] == list(MESH_ROWS)
        for row in model.rows:
            assert row.status == "measured", row
            assert row.percent_of_limit > 0
            assert (row.efficiency is None) == (model is one)
    fast, slow = by_name(one)["step"], by_name(two)["step"]
    if jax.default_backend() == "cpu":
        ratio = fast.wall_ms.median / slow.wall_ms.median
        assert slow.efficiency == pytest.approx(ratio / 2)
    # A device holds its half of p, m, v and g, and all of the leaves that are not cut.
    assert slow.peak_bytes < 0.6 * fast.peak_bytes
    assert training.num_devices == 2 and training.step == "train step"


def test_what_is_communicated(whole_run):
    one, two, training = _results.read(whole_run / "run.json").models
    assert all(row.collectives == {} for row in one.rows)
    for name, row in by_name(two).items():
        found = dict(row.collectives)
        if "ZeRO-1" in name:
            # XLA on a GPU may merge them, so only their size is known.
            assert found.pop("all-gather")["bytes"] == CUT_BYTES
        if "clip" in name:
            assert found.pop("all-reduce")["bytes"] <= 4 * 3 * 2 * len(LEAVES)
        assert found == {}, name
    for row in training.rows:
        assert row.collectives["all-gather"]["bytes"] >= 4 * 0.9 * (
            training.num_parameters
        )


def test_training_records_both_curves(whole_run):
    training = _results.read(whole_run / "run.json").models[-1]
    theirs, ours = training.rows
    assert theirs.name == "clip, optax.adamw" and ours.ours
    assert len(theirs.losses) == len(ours.losses) == UPDATES
    assert theirs.losses[-1] < theirs.losses[0] - 0.01
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)
    for row in (theirs, ours):
        assert row.status == "measured" and row.peak_bytes > 0
        assert row.wall_ms.min > 0 and row.device_us is None


def test_files_are_read_again(whole_run, tmp_path, capsys):
    file = whole_run / "run.json"
    assert (whole_run / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    content = json.loads(file.read_text())
    assert content["kind"] == "sharded step" and content["machine"]["command"]
    assert content["setting"]["updates"] == UPDATES
    copy = tmp_path / "copy.json"
    _results.write(_results.read(file), copy)
    assert json.loads(copy.read_text()) == content
    assert main(["--markdown", str(file)]) == 0
    table = capsys.readouterr().out
    assert table == _sharded_report.render_table(_results.read(file))
    assert "| `step+clip` | 2 | " in table and "| clip, optax.adamw | " in table
    assert main(["--compare", str(file), str(copy)]) == 0
    assert capsys.readouterr().out.count("1.000") == 2 * len(MESH_ROWS) + 2


@pytest.mark.devices(8)
def test_all_devices_by_default(run):
    status, results = run("--rows", "step+clip", "--amsgrad", "--dtype", "bfloat16")
    assert status == 0
    expected = _sharded.default_counts()
    assert expected[:4] == [1, 2, 4, 8]
    assert [model.num_devices for model in results.models] == expected
    assert set(statuses(results).values()) == {"measured"}


# --- Where leaves lie -----------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((4, 6), P(None, "fsdp")),
        ((6, 6), P("fsdp")),
        ((8, 9), P("fsdp")),
        ((3, 5), P()),
        ((), P()),
        ((0, 3), P()),
    ],
)
def test_leaf_is_cut_along_its_longest_even_dimension(shape, spec):
    assert _mesh.split_longest(_mesh.make_mesh(2), shape).spec == spec


def test_collectives_of_a_compiled_text():
    text = """
  %a = f32[] all-reduce(%x), replica_groups={{0,1}}
  %b = (f32[2,3]{1,0}, /*index=1*/bf16[4]{0}) all-reduce(%x, %y)
  %c = ((f32[4]{0}), (f32[8]{0})) all-gather-start(%x), dimensions={0}
  %d = (f32[8]{0}) all-gather-done(%c)
  %e = f32[4,8]{1,0:T(8,128)} all-gather(%x), metadata={op_name="all-gather(x)"}
  ROOT %f = f8e4m3fn[16]{0} reduce-scatter(%x), to_apply=%add
  %g = f32[2,3]{1,0} fusion(%all-reduce.1), metadata={op_name="an all-reduce(x)"}
  %h = pred[] all-reduce-start(%p)
"""
    assert _mesh.find_collectives(text) == {
        "all-gather": {"count": 2, "bytes": 32 + 128},
        "all-reduce": {"count": 3, "bytes": 4 + 24 + 8 + 1},
        "reduce-scatter": {"count": 1, "bytes": 16},
    }


@pytest.mark.parametrize("name", MESH_ROWS)
def test_steps_start_with_nothing_left_to_send(name):
    """A profile is of equal steps: the first one may copy nothing to a device."""
    whole = Problem([(8, 60), (7,)], "float32", amsgrad=False)
    stepper = MESH_ROWS[name].build(_mesh.MeshProblem(whole, _mesh.make_mesh(2)))
    stepper.start()
    start = jax.tree.leaves((stepper._params, stepper._state, stepper._grads))
    places = [leaf.sharding for leaf in start]
    assert all(place.num_devices == 2 for place in places)
    stepper.run(1)
    end = jax.tree.leaves((stepper._params, stepper._state, stepper._grads))
    for leaf, place in zip(end, places, strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


# --- Correctness before speed ---------------------------------------------------------


def test_wrong_row_shows_its_difference_and_no_time(run, monkeypatch):
    twice = functools.partial(_mesh_rows.build_optax, stepper=_mesh_rows.MeshStepper)
    wrong = functools.partial(twice, wrap=lambda tx: optax.chain(tx, optax.scale(1.01)))
    row = dataclasses.replace(MESH_ROWS["optax.adamw"], build=wrong)
    monkeypatch.setitem(MESH_ROWS, "optax.adamw", row)
    status, results = run("--rows", "step", "optax.adamw", "--devices", "1", "2")
    assert status == 1
    for model in results.models:
        assert by_name(model)["step"].status == "measured"
        row = by_name(model)["optax.adamw"]
        assert row.status == "wrong" and "differ from the reference" in row.reason
        assert row.wall_ms is row.efficiency is row.collectives is None


@pytest.mark.parametrize("name", ["step", "step+clip"])
def test_ours_must_have_the_bits_of_one_device(run, monkeypatch, name):
    def other_bits(problem, steps, report):
        assert (report is None) == ("clip" not in name)
        numbers = _mesh_rows.run_on_one_device(problem, steps, report)
        numbers.mu[0] = numbers.mu[0] * (1 + 2.0**-23)
        return numbers

    monkeypatch.setattr(_sharded, "run_on_one_device", other_bits)
    status, results = run("--rows", name, "--devices", "2")
    row = results.models[0].rows[0]
    assert status == 1 and row.status == "wrong"
    assert row.reason.startswith("not the bits of one device: mu of leaf 0")


def toy_workload(config, batch, attention):
    """Least squares, in no time."""

    def loss_fn(params, x):
        return jnp.square(x @ params["w"] + params["b"][0] - 5.0).mean()

    return Workload(
        name="toy",
        step="train step",
        init=lambda: {"w": jnp.zeros(4), "b": jnp.zeros(1)},
        make_batch=lambda: jax.random.normal(jax.random.key(0), (batch, 4)),
        loss_fn=loss_fn,
    )


def test_wrong_training_keeps_its_curve_and_shows_no_time(monkeypatch):
    monkeypatch.setattr(_sharded_train, "gpt_workload", toy_workload)
    ours = dataclasses.replace(_sharded_train.OURS_CLIPPED, make=lambda: optax.sgd(0.1))
    monkeypatch.setattr(_sharded_train, "OURS_CLIPPED", ours)
    theirs, ours = _sharded_train.measure_training(2, UPDATES, 1).rows
    assert theirs.status == "measured" and ours.status == "wrong"
    assert ours.wall_ms is None and len(ours.losses) == UPDATES


# --- On GPUs --------------------------------------------------------------------------


def profile_of(*devices):
    """A profile; devices: name to durations in ns of the events of each GPU."""
    planes = []
    for i, events in enumerate(devices):
        lines = {"Stream #7": list(events.values())}
        plane = canned_profile(lines, plane=f"/device:GPU:{i}").planes[1]
        for event, name in zip(plane.lines[0].events, events, strict=True):
            event.name = name
        planes.append(plane)
    profile = canned_profile({})
    profile.planes = planes
    return profile


def test_device_time_is_that_of_the_busiest_and_tells_communication():
    first = {"update": 6000.0, "ncclDevKernel_AllReduce_Sum_f32": 2000.0}
    second = {"update": 6000.0, "ncclDevKernel_AllReduce_Sum_f32": 4000.0}
    profile = profile_of(first, second)
    time = _measure.read_device_time(profile, steps=2, num_devices=2)
    assert time == _measure.DeviceTime(
        us=5.0, launches=1, communication_us=2.0, median_us=4.5
    )
    alone = _measure.read_device_time(profile, steps=1)
    assert alone == _measure.DeviceTime(us=8.0, launches=2, communication_us=2.0)
    with pytest.raises(_measure.LostEvents, match="0 events in 1 steps"):
        _measure.read_device_time(profile, steps=1, num_devices=3)


def test_device_time_of_all_devices_is_what_scales(run, monkeypatch):
    def profile_device(run, steps, num_devices):
        run()
        if num_devices == 1:
            return _measure.DeviceTime(12.0, 2)
        return _measure.DeviceTime(8.0, 3, communication_us=1.5, median_us=7.0)

    monkeypatch.setattr(_protocol, "has_profiler", lambda: True)
    monkeypatch.setattr(_protocol, "profile_device", profile_device)
    _, results = run("--rows", "step+clip", "--devices", "1", "2")
    one, two = (model.rows[0] for model in results.models)
    assert one.median_us is None and one.communication_us.median == 0.0
    assert two.device_us == Spread(8.0, 8.0, 8.0) and two.launches == 3
    assert two.median_us.median == 7.0 and two.communication_us.median == 1.5
    assert two.efficiency == 0.75
    table = _sharded_report.render_table(results)
    assert "| `step+clip` | 2 | 8.0 | 1.5 | " in table and " | 75% | " in table


# --- Files, and what is refused -------------------------------------------------------


def make_results(efficiency):
    row = ShardedRowResult(
        "step",
        True,
        "measured",
        wall_ms=Spread(1.0, 1.0, 1.0),
        efficiency=efficiency,
        collectives={},
    )
    model = ShardedModelResult(
        name="mixed on 2 devices",
        shape="mixed",
        num_devices=2,
        step="optimizer step",
        iterations=2,
        num_leaves=1,
        num_parameters=4,
        peak_bytes_in_use=None,
        rows=[row],
    )
    machine = {"platform": "gpu", "device": "x"}
    setting = {"dtype": "float32", "amsgrad": False}
    return ShardedResults(machine, {}, setting, [model], {})


def test_check_finds_lost_scaling():
    losses = _report.find_losses(make_results(0.9), make_results(0.8))
    assert losses == [
        "mixed on 2 devices step: scaling efficiency fell from 0.9 to 0.8"
    ]
    assert _report.find_losses(make_results(0.9), make_results(0.88)) == []


def test_baseline_without_the_model_is_refused(tmp_path, capsys):
    baseline = tmp_path / "baseline.json"
    results = make_results(0.9)
    device = jax.devices()[0]
    machine = {"platform": device.platform, "device": device.device_kind}
    machine["processor"] = describe_machine()["processor"]
    _results.write(dataclasses.replace(results, machine=machine), baseline)
    argv = [*QUICK, "--elements", "8", "--check", baseline]
    assert_refused(capsys, argv, "the baseline has none of 8 elements")


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--devices", "2"], ["--devices is of --sharded"]),
        (["--updates", "3"], ["--updates is of --sharded"]),
        (["--sharded", "--ladder"], ["leave out --ladder"]),
        (["--sharded", "--batch", "4"], ["--batch is the batch of --train-step"]),
        (["--sharded", "--train-step"], ["--sharded is of the isolated"]),
        (["--sharded", "--devices", "0"], ["--devices", "'0'"]),
        (["--sharded", "--devices", "1", "999"], ["--devices: expected at most"]),
        (["--sharded", "--rows", "staged"], ["--rows", "step+clip, ZeRO-1", "staged"]),
    ],
    ids=lambda value: " ".join(value)[:32],
)
def test_wrong_option_is_one_line(capsys, argv, words):
    assert_refused(capsys, argv, *words)


def test_one_device_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert_refused(capsys, ["--sharded"], "needs several devices", "XLA_FLAGS")
