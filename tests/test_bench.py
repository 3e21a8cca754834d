"""The bench: its arithmetic, what it refuses to time, and what it writes."""

import contextlib
import dataclasses
import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fused_adamw import _ffi
from jax_fused_adamw.bench import (
    BenchError,
    _check,
    _experiment,
    _measure,
    _protocol,
    _report,
    _results,
    _rows,
    _shapes,
    _torch,
)
from jax_fused_adamw.bench.__main__ import main
from jax_fused_adamw.bench._experiment import ROWS
from jax_fused_adamw.bench._problem import Numbers, Problem
from jax_fused_adamw.bench._results import ModelResult, Results, RowResult, Spread

QUICK = ["--iterations", "2", "--samples", "2"]
TINY = {"tiny": [[5, 3], [7], []], "one": [[64]]}
TORCH_ROWS = {"torch-fused", "torch-foreach", "torch-cuda-graph"}
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setattr(_measure, "_CPU_COPY_BYTES", 1 << 20)


@pytest.fixture
def shapes_file(tmp_path):
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps(TINY))
    return file


@pytest.fixture
def run_bench(tmp_path, shapes_file):
    """Runs the command on the tiny shapes: its exit status and its results."""

    def run(*options):
        out = tmp_path / "results.json"
        argv = ["--shapes", str(shapes_file), "--json", str(out), *QUICK, *options]
        status = main(argv)
        return status, _results.read(out)

    return run


def statuses(results):
    return {(model, row.name): row.status for model, row in results.rows()}


def assert_refused(capsys, argv, *words):
    """Status 2, nothing on stdout, and one line on stderr that holds the words."""
    assert main([str(argument) for argument in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jax_fused_adamw.bench: ")
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
    for word in words:
        assert word in captured.err


# --- Every row, through the command ---------------------------------------------------


@pytest.mark.platform("cpu")
@pytest.mark.parametrize(
    "options", [[], ["--amsgrad"], ["--dtype", "bfloat16"]], ids=" ".join
)
def test_every_row_is_measured_or_says_why_not(run_bench, capsys, options):
    status, results = run_bench(*options)
    assert status == 0
    assert [model.name for model in results.models] == ["tiny", "one"]
    for model in results.models:
        assert [row.name for row in model.rows] == list(ROWS)
    for _, row in results.rows():
        if row.name in TORCH_ROWS:
            continue  # below
        assert row.status == "measured", row
        assert 0 < row.wall_ms.min <= row.wall_ms.median <= row.wall_ms.max
        assert row.device_us is None and row.launches is None
        assert (row.percent_of_limit is None) == (row.name == "skipped")
    graph = results.models[0].rows[-1]
    assert graph.name == "torch-cuda-graph" and graph.status == "blocked"
    captured = capsys.readouterr()
    assert "tiny: 23 parameters in 3 leaves" in captured.out
    assert "one: 64 parameters in 1 leaf\n" in captured.out
    assert "torch-cuda-graph blocked: " in captured.out
    assert "tiny: 100%" in captured.err


@pytest.mark.platform("cpu")
@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
@pytest.mark.parametrize("options", [[], ["--amsgrad"]], ids=" ".join)
def test_torch_computes_the_same_step(run_bench, options):
    _, results = run_bench("--rows", *sorted(TORCH_ROWS), *options)
    for _, row in results.rows():
        expected = "blocked" if row.name == "torch-cuda-graph" else "measured"
        assert row.status == expected, row


@pytest.mark.platform("cpu")
@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
def test_graph_starts_over_after_its_warm_up_and_capture(run_bench, monkeypatch):
    import torch

    steps = []

    class Graph:
        def replay(self):
            steps[-1]()

    @contextlib.contextmanager
    def graph(graph):
        yield

    class Optimizer(torch.optim.AdamW):
        def __init__(self, params, **options):
            super().__init__(params, **options | {"capturable": False})
            steps.append(self.step)

    cuda = SimpleNamespace(
        Stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
        current_stream=lambda: None,
        stream=lambda stream: contextlib.nullcontext(),
        CUDAGraph=Graph,
        graph=graph,
    )
    fake = SimpleNamespace(
        cuda=cuda,
        optim=SimpleNamespace(AdamW=Optimizer),
        from_dlpack=torch.from_dlpack,
        tensor=torch.tensor,
    )
    monkeypatch.setattr(_torch, "_import_torch", lambda problem, graph: fake)
    _, results = run_bench("--rows", "torch-cuda-graph", "--amsgrad")
    assert set(statuses(results).values()) == {"measured"}


def test_rows_that_are_asked_for_come_in_that_order(run_bench):
    _, results = run_bench("--rows", "optax.adamw", "step", "--dtype", "float16")
    assert [row.name for row in results.models[0].rows] == ["optax.adamw", "step"]
    assert set(statuses(results).values()) == {"measured"}
    assert results.setting["dtype"] == "float16"


def test_one_leaf_and_a_plot(tmp_path):
    plot = tmp_path / "bars.png"
    json_file = tmp_path / "results.json"
    options = ["--elements", "1000", "--rows", "step", "skipped", "torch-cuda-graph"]
    assert main([*QUICK, *options, "--plot", str(plot), "--json", str(json_file)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (model,) = _results.read(json_file).models
    assert (model.name, model.num_leaves) == ("1,000 elements", 1)


def test_module_function_gives_parameters_or_shapes(tmp_path, monkeypatch):
    (tmp_path / "my_bench_model.py").write_text(
        "import numpy as np\n"
        "def params():\n"
        "    return {'w': np.ones((2, 3), np.float32), 'b': np.ones(3, np.float32)}\n"
        "def shapes():\n"
        "    return [(4, 5), [6], ()]\n"
        "def halves():\n"
        "    return {'w': np.ones(3, np.float16)}\n"
        "def nothing():\n"
        "    return {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    imported = _shapes.import_shapes("my_bench_model:params")
    assert imported == {"params": [(3,), (2, 3)]}
    imported = _shapes.import_shapes("my_bench_model:shapes")
    assert imported == {"shapes": [(4, 5), (6,), ()]}
    with pytest.raises(BenchError, match="float16.*float32 parameters"):
        _shapes.import_shapes("my_bench_model:halves")
    with pytest.raises(BenchError, match="a tree of arrays or a list of shapes"):
        _shapes.import_shapes("my_bench_model:nothing")
    assert main([*QUICK, "--module", "my_bench_model:params", "--rows", "step"]) == 0


@pytest.mark.parametrize(
    "name, leaves, parameters",
    [
        ("mlp", 16, 33_280),
        ("resnet50", 161, 25_557_032),
        ("gpt2", 148, 124_439_808),
        ("vit_b16", 152, 86_567_656),
        ("llama_1b", 201, 1_100_048_384),
        ("small1000", 1000, 8_256_000),
        ("one_leaf", 1, 268_435_456),
    ],
)
def test_known_models_have_their_published_size(name, leaves, parameters):
    shapes = _shapes.named(name)
    assert (len(shapes), _shapes.num_parameters(shapes)) == (leaves, parameters)


# --- Correctness before speed ---------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, where",
    [
        ("LEARNING_RATE", 1.01e-3, "params"),
        ("B1", 0.909, "mu"),
        ("B2", 0.99, "nu"),
        ("WEIGHT_DECAY", 0.0, "params"),
        ("EPS", 1e-2, "params"),
        ("START_COUNT", 3, "params"),
    ],
)
def test_wrong_step_shows_its_difference_and_no_speed(
    run_bench, capsys, monkeypatch, name, value, where
):
    monkeypatch.setattr(_rows, name, value)
    status, results = run_bench("--rows", "step", "optax.adamw")
    assert status == 1
    assert set(statuses(results).values()) == {"wrong"}
    for _, row in results.rows():
        assert f"{where} of leaf 0" in row.reason
        assert "differ from the reference by up to" in row.reason
        assert row.wall_ms is row.percent_of_limit is row.compile_s is None
    printed = capsys.readouterr().out
    assert printed.count("WRONG") == 4
    assert "step wrong: " in printed and "elements differ" in printed


def test_rows_take_turns_from_one_start_in_alternating_order(run_bench, monkeypatch):
    batches = []
    run_batch = _protocol._run_batch

    def recorded(entry, expected, **options):
        if not options.get("profiled"):  # a GPU has one more after each timed batch
            batches.append(entry.row.name)
        return run_batch(entry, expected, **options)

    monkeypatch.setattr(_protocol, "_run_batch", recorded)
    _, results = run_bench("--rows", "step", "staged", "--samples", "3")
    warm_up, forth, back = ["step", "staged"], ["step", "staged"], ["staged", "step"]
    assert batches == 2 * [*warm_up, *forth, *back, *forth]


def test_row_that_goes_wrong_later_loses_its_times(run_bench, monkeypatch):
    class Fickle(_rows.JaxStepper):
        batches = 0

        def run(self, steps):
            self.batches += 1
            super().run(steps + (self.batches == 3))

    monkeypatch.setattr(_rows, "JaxStepper", Fickle)
    status, results = run_bench("--rows", "step")
    assert status == 1
    assert set(statuses(results).values()) == {"wrong"}


def test_wrong_pass_of_the_staged_step_is_found(run_bench, monkeypatch):
    write = _rows._write_parameter
    monkeypatch.setattr(_rows, "_write_parameter", lambda p, u: write(p, 1.01 * u))
    assert run_bench("--rows", "staged", "step")[0] == 1


def test_skipped_step_must_change_no_bit(run_bench, monkeypatch):
    monkeypatch.setitem(
        _experiment.ROWS, "step", dataclasses.replace(ROWS["step"], skips=True)
    )
    status, results = run_bench("--rows", "step", "skipped")
    assert status == 1
    assert statuses(results)["tiny", "step"] == "wrong"
    assert statuses(results)["tiny", "skipped"] == "measured"


def test_amsgrad_rules_are_told_apart(run_bench, monkeypatch):
    row = dataclasses.replace(ROWS["step"], optax_amsgrad=True)
    monkeypatch.setitem(_experiment.ROWS, "step", row)
    assert run_bench("--rows", "step")[0] == 0
    assert run_bench("--rows", "step", "--amsgrad")[0] == 1


def test_nan_is_a_difference():
    start = Problem([(3,)], "float32", False).start()
    broken = start._replace(nu=[start.nu[0].at[1].set(jnp.nan)])
    found = _check.difference(broken, start, _check.tolerances(5))
    assert found.startswith("nu of leaf 0 (3,): 1 of 3 elements differ")
    assert _check.difference(start, broken, _check.tolerances(5)) is not None
    assert _check.difference(start, start, _check.EXACT) is None


def test_reference_is_the_definition_in_float64():
    problem = Problem([(50,)], "float32", False)
    p, m, v = (np.asarray(x[0], np.float64) for x in problem.start()[:3])
    g = np.asarray(problem.grads[0], np.float64)
    for t in (3, 4, 5):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
        p = p - 1e-3 * (m_hat / (np.sqrt(v_hat) + 1e-8) + 0.01 * p)
    expected = Numbers([p], [m], [v], [])
    got = _check.reference(problem, 3, optax_amsgrad=False)
    for name, (absolute, relative) in _check.tolerances(3).items():
        for a, b in zip(getattr(got, name), getattr(expected, name), strict=True):
            np.testing.assert_allclose(a, b, atol=absolute, rtol=relative)


def test_start_is_the_same_each_time_and_tells_buffers_apart():
    problem = Problem([(40, 5), (40, 5)], "bfloat16", True)
    first, second = problem.start(), problem.start()
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert problem.grads[0].dtype == "bfloat16"
    leaves = [np.asarray(leaf) for part in first for leaf in part]
    assert len({leaf.tobytes() for leaf in leaves}) == len(leaves) == 8
    assert (leaves[4] > 0).all() and abs(np.mean(leaves[0])) < 0.02
    above = np.mean(np.asarray(first.nu_max[0]) > np.asarray(first.nu[0]))
    assert 0.3 < above < 0.7


# --- What is blocked ------------------------------------------------------------------


def reasons(results):
    return {row.name: row.reason for row in results.models[0].rows}


def test_missing_kernel_blocks_ours_and_not_the_others(run_bench, monkeypatch):
    module = _ffi.NativeModule("cpu", False, "it was not built")
    info = dataclasses.replace(_ffi._INFO, cpu=module, cuda=module)
    monkeypatch.setattr(_ffi, "_INFO", info)
    status, results = run_bench("--rows", "step", "optax.adamw")
    assert status == 0
    assert statuses(results)["tiny", "step"] == "blocked"
    assert statuses(results)["tiny", "optax.adamw"] == "measured"
    assert reasons(results)["step"] == "no kernel: it was not built"


def test_missing_torch_blocks_its_rows(run_bench, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, results = run_bench("--rows", *sorted(TORCH_ROWS))
    assert status == 0
    assert set(statuses(results).values()) == {"blocked"}
    assert reasons(results)["torch-fused"] == "torch is not installed"
    assert capsys.readouterr().out.count("BLOCKED") == 6


def test_no_memory_blocks_the_row(run_bench, monkeypatch):
    def build(problem):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore of it")

    row = dataclasses.replace(ROWS["update"], build=build)
    monkeypatch.setitem(_experiment.ROWS, "update", row)
    status, results = run_bench("--rows", "update", "step")
    assert status == 0
    assert reasons(results)["update"] == "RESOURCE_EXHAUSTED: out of memory"
    assert statuses(results)["tiny", "step"] == "measured"


def test_a_row_that_crashes_fails_the_command(run_bench, monkeypatch):
    def build(problem):
        raise RuntimeError("INTERNAL: something broke\nmore of it")

    row = dataclasses.replace(ROWS["update"], build=build)
    monkeypatch.setitem(_experiment.ROWS, "update", row)
    status, results = run_bench("--rows", "update", "step")
    assert status == 1
    assert statuses(results)["tiny", "update"] == "failed"
    assert reasons(results)["update"] == "INTERNAL: something broke"
    assert statuses(results)["tiny", "step"] == "measured"


# --- Arithmetic -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, dtype, amsgrad, num_bytes",
    [
        ("step", "float32", False, 28),
        ("step", "float32", True, 36),
        ("step", "bfloat16", False, 26),
        ("in_place", "float16", True, 34),
        ("alias=False", "float32", False, 28),
        ("update", "float32", False, 40),
        ("update", "bfloat16", True, 46),
        ("skipped", "float32", False, 0),
        ("optax.adamw", "float32", False, 28),
        ("staged", "float32", False, 48),
        ("staged", "float32", True, 60),
        ("staged", "bfloat16", False, 44),
        ("torch-fused", "float32", False, 28),
    ],
)
def test_bytes_are_counted(name, dtype, amsgrad, num_bytes):
    assert ROWS[name].num_bytes(Problem([(2,)], dtype, amsgrad)) == num_bytes


def test_percent_of_limit():
    limit = _measure.Limit(gb_per_s=100.0, method="")
    # 28 MB take 280 us at 100 GB/s.
    assert _measure.percent_of_limit(28_000_000, 560e-6, limit) == pytest.approx(50)


def canned_profile(lines, plane=_measure.GPU_PLANE):
    """As jax.profiler.ProfileData has it; lines: name to durations in ns."""
    return SimpleNamespace(
        planes=[
            SimpleNamespace(name="/host:CPU", lines=[]),
            SimpleNamespace(
                name=plane,
                lines=[
                    SimpleNamespace(
                        name=name,
                        events=[SimpleNamespace(duration_ns=d) for d in durations],
                    )
                    for name, durations in lines.items()
                ],
            ),
        ]
    )


def test_device_time_is_the_sum_of_the_streams_events():
    lines = {
        "Stream #13(Compute)": [1000.0, 2000.0, 3000.0],
        "Stream #14(MemcpyD2D)": [500.0],
        "XLA Modules": [100_000.0],
        "Steps": [100_000.0, 100_000.0],
    }
    time = _measure.read_device_time(canned_profile(lines), steps=2)
    assert time == _measure.DeviceTime(us=3.25, launches=2)


def test_profile_with_lost_events_is_refused():
    lines = {"Stream #13(Compute)": [1000.0] * 5}
    for profile in (
        canned_profile(lines),
        canned_profile({}),
        canned_profile({"Steps": [1.0] * 2}),
        canned_profile({"Stream #1": [1.0] * 2}, plane="/device:GPU:1"),
    ):
        with pytest.raises(_measure.LostEvents, match="events in 2 steps"):
            _measure.read_device_time(profile, steps=2)


def on_a_gpu(monkeypatch, num_events):
    """Runs the steps here and reads the device's time from a canned profile."""

    def profile_device(run, steps):
        run()
        events = {"Stream #13(Compute)": [2000.0] * num_events(steps)}
        return _measure.read_device_time(canned_profile(events), steps)

    monkeypatch.setattr(_protocol, "has_profiler", lambda: True)
    monkeypatch.setattr(_protocol, "profile_device", profile_device)


def test_device_time_decides_where_there_is_a_profiler(run_bench, monkeypatch):
    on_a_gpu(monkeypatch, lambda steps: 3 * steps)
    _, results = run_bench("--rows", "step")
    row = results.models[1].rows[0]
    assert row.device_us == Spread(6.0, 6.0, 6.0) and row.launches == 3
    limit = results.limit["gb_per_s"]
    assert row.percent_of_limit == pytest.approx(100 * 64 * 28 / 6e-6 / limit / 1e9)


def test_wall_time_never_stands_in_for_the_device_s(run_bench, monkeypatch):
    on_a_gpu(monkeypatch, lambda steps: 3 * steps - 1)
    _, results = run_bench("--rows", "step")
    row = results.models[0].rows[0]
    assert row.status == "measured" and row.wall_ms is not None
    assert row.device_us is row.launches is row.percent_of_limit is None
    assert row.reason == "the profiler saw 5 events in 2 steps"


def test_cpu_limit_is_the_faster_copy():
    limit = _measure.measure_limit("cpu")
    assert limit.gb_per_s > 0
    assert "XLA" in limit.method or "threads" in limit.method


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
        machine={"platform": "cpu", "device": "cpu", "processor": "x", "date": "today"},
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
        (["--json", "/no/such/folder/x"], ["--json", "folder that exists"]),
        (["--plot", "/tmp"], ["--plot", "folder that exists"]),
        (["--plot", "bars.txt"], ["--plot 'bars.txt'", ".png"]),
        (["--ladder"], ["--ladder"]),
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
    assert_refused(capsys, [], name, 'pip install "jax_fused_adamw[bench]"')


def test_runs_as_a_module():
    command = [sys.executable, "-m", "jax_fused_adamw.bench"]
    wrong = subprocess.run([*command, "--samples", "0"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr.count("\n") == 1 and "Traceback" not in wrong.stderr
    usage = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert usage.returncode == 0
    for option in ("--shape", "--shapes", "--module", "--elements", "--check"):
        assert option in usage.stdout
