"""The bench: every row, through the command, and what blocks one."""

import contextlib
import dataclasses
import importlib.util
import sys
from types import SimpleNamespace

import pytest
from bench_helpers import reasons, statuses

from jax_fused_adamw import _ffi
from jax_fused_adamw.bench import BenchError, _experiment, _results, _shapes, _torch
from jax_fused_adamw.bench.__main__ import main
from jax_fused_adamw.bench._experiment import DEFAULT_ROWS, ROWS

QUICK = ["--iterations", "2", "--samples", "2"]
TORCH_GRAPHS = {"torch-cuda-graph", "torch-cuda-graph+clip"}
TORCH_ROWS = {"torch-fused", "torch-foreach", "torch-fused+clip", *TORCH_GRAPHS}
# Of 20,000 parameters the gradients are long enough to be clipped.
CLIPPED = [*QUICK, "--elements", "20000"]
HAS_TORCH = importlib.util.find_spec("torch") is not None
pytestmark = pytest.mark.usefixtures("small_copies")


# --- Every row, through the command ---------------------------------------------------


@pytest.mark.platform("cpu")
@pytest.mark.parametrize(
    "options", [[], ["--amsgrad"], ["--dtype", "bfloat16"]], ids=" ".join
)
def test_every_row_by_default_is_measured_or_says_why_not(run_bench, capsys, options):
    status, results = run_bench(*options)
    assert status == 0
    assert [model.name for model in results.models] == ["tiny", "one"]
    for model in results.models:
        assert [row.name for row in model.rows] == list(DEFAULT_ROWS)
    for _, row in results.rows():
        if row.name in TORCH_ROWS:
            continue  # below
        assert row.status == "measured", row
        assert 0 < row.wall_ms.min <= row.wall_ms.median <= row.wall_ms.max
        assert row.device_us is None and row.launches is None
        assert (row.percent_of_limit is None) == (row.name == "skipped")
        assert row.peer == (
            "optax.adamw+clip" if "+clip" in row.name else "optax.adamw"
        )
    for name in TORCH_GRAPHS:
        assert statuses(results)["tiny", name] == "blocked"
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
        expected = "blocked" if row.name in TORCH_GRAPHS else "measured"
        assert row.status == expected, row


@pytest.mark.parametrize(
    "options", [[], ["--amsgrad"], ["--dtype", "bfloat16"]], ids=" ".join
)
def test_every_row_clips_to_the_same_gradients(tmp_path, options):
    out = tmp_path / "results.json"
    rows = [name for name in ROWS if "+clip" in name]
    options = [*options, "--rows", *rows, "--json", str(out)]
    assert main([*CLIPPED, *options]) == 0
    results = _results.read(out)
    assert results.setting["max_grad_norm"] == 0.5
    for _, row in results.rows():
        assert row.status == "measured" or row.name in TORCH_ROWS, row


@pytest.mark.platform("cpu")
@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
@pytest.mark.parametrize("row", sorted(TORCH_GRAPHS))
def test_graph_starts_over_after_its_warm_up_and_capture(run_bench, monkeypatch, row):
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
        stack=torch.stack,
        clamp=torch.clamp,
        linalg=torch.linalg,
        _foreach_norm=torch._foreach_norm,
        mul=torch.mul,
    )
    monkeypatch.setattr(_torch, "_import_torch", lambda problem, graph: fake)
    _, results = run_bench("--rows", row, "--amsgrad")
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


# --- What is blocked ------------------------------------------------------------------


def test_missing_kernel_blocks_ours_and_not_the_others(run_bench, monkeypatch):
    module = _ffi.NativeModule("cpu", False, "it was not built")
    info = dataclasses.replace(_ffi._INFO, cpu=module, cuda=module)
    monkeypatch.setattr(_ffi, "_INFO", info)
    ours = {"step", "step+clip", "skipped+clip"}
    status, results = run_bench("--rows", *sorted(ours), "optax.adamw")
    assert status == 0
    for name in ours:
        assert statuses(results)["tiny", name] == "blocked"
        assert reasons(results)[name] == "no kernel: it was not built"
    assert statuses(results)["tiny", "optax.adamw"] == "measured"


def test_missing_torch_blocks_its_rows(run_bench, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, results = run_bench("--rows", *sorted(TORCH_ROWS))
    assert status == 0
    assert set(statuses(results).values()) == {"blocked"}
    for name in ("torch-fused", "torch-fused+clip"):
        assert reasons(results)[name] == "torch is not installed"
    assert capsys.readouterr().out.count("BLOCKED") == 10


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
