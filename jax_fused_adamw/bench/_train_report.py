"""Whole train steps as printed, as a table of the README, and drawn."""

import pathlib

from matplotlib.figure import Figure

from jax_fused_adamw.bench._report import (
    describe_size,
    number,
    print_table,
    save_figure,
)
from jax_fused_adamw.bench._results import (
    MEASURED,
    TrainResults,
    TrainRowResult,
    WorkloadResult,
    comparable_us,
)

_COLUMNS = (
    "row",
    "wall us",
    "min",
    "max",
    "no graphs us",
    "device us",
    "launches",
    "optimizer %",
    "compile s",
    "peak MB",
)
_README_COLUMNS = ("us a step", "optimizer", "launches", "compile", "peak memory")


def print_results(results: TrainResults) -> None:
    """The machine, the setting, and a table for every workload."""
    machine, setting = results.machine, results.setting
    print(
        f"{machine['device']} ({machine['processor']}, {machine['num_processors']} "
        f"processors), jax {machine['versions']['jax']}, {machine['date']}\n"
        f"float32 parameters; GPT: {setting['activations']} activations, "
        f"{setting['attention']} attention; medians of {setting['samples']} batches"
    )
    for model in results.models:
        print(f"\n{describe_size(model)}; times of a {model.step}")
        print_table(_COLUMNS, [_cells(row) for row in model.rows])
        for row in model.rows:
            if row.reason is not None:
                print(f"  {row.name} {row.status}: {row.reason}")
            if row.no_graphs_reason is not None:
                print(f"  {row.name} without CUDA graphs: {row.no_graphs_reason}")
    print(
        "\noptimizer %: what a step takes longer than a program that returns loss and"
        "\nfloat32 gradients, as a share of the step; of device time where there is a"
        "\nprofiler, else of wall time. bf16 grads: of bfloat16 copies, which our step"
        "\nhas written and optax's casts; it may take less than that program."
        "\nno graphs: wall time without CUDA graphs; the profiler never sees them."
        "\nA row's losses are within "
        f"{setting['tolerance']:.0%} of\noptax's with the same rule, measured on the "
        "distance that these move."
    )


def _cells(row: TrainRowResult) -> list[str]:
    if row.status != MEASURED:
        return [row.name, row.status.upper(), *[""] * (len(_COLUMNS) - 2)]
    wall, device, no_graphs = row.wall_ms, row.device_us, row.no_graphs_ms
    share = row.optimizer_share
    return [
        row.name,
        number(1e3 * wall.median, ",.1f"),
        number(1e3 * wall.min, ",.1f"),
        number(1e3 * wall.max, ",.1f"),
        number(no_graphs and 1e3 * no_graphs.median, ",.1f"),
        number(device and device.median, ",.1f"),
        number(row.launches, ",.1f"),
        number(None if share is None else 100 * share, ".1f"),
        number(row.compile_s, ".2f"),
        number(row.peak_bytes and row.peak_bytes / 1e6, ",.1f"),
    ]


def render_table(results: TrainResults) -> str:
    """The README's Markdown: a table for all workloads, and where it was measured."""
    lines = [f"| step | {' | '.join(_README_COLUMNS)} |", "|---" * 6 + "|"]
    for model in results.models:
        lines.append(
            f"| **{describe_size(model)}** " + "| " * len(_README_COLUMNS) + "|"
        )
        lines += [f"| {' | '.join(_readme_cells(row))} |" for row in model.rows]
    machine = results.machine
    versions = machine["versions"]
    rows = [row for model in results.models for row in model.rows]
    by_device = any(row.device_us is not None for row in rows)
    lines += [
        "",
        f"{machine['device']}, JAX {versions['jax']}, optax {versions['optax']}, "
        f"{machine['date'][:10]}; wall time, medians of {results.setting['samples']}. "
        "Optimizer: what the step takes longer than its gradients alone, as a share of "
        f"the step{', both in device time' if by_device else ''}.",
    ]
    return "\n".join(lines) + "\n"


def _readme_cells(row: TrainRowResult) -> list[str]:
    if row.status != MEASURED:
        return [f"{row.name}", row.status, *[""] * (len(_README_COLUMNS) - 1)]
    share, peak = row.optimizer_share, row.peak_bytes
    us = 1e3 * row.wall_ms.median
    return [
        row.name,
        format(us, ",.0f" if us >= 1000 else ",.1f"),
        "" if share is None else f"{share:.1%}",
        "" if row.launches is None else f"{row.launches:,.0f}",
        f"{row.compile_s:.1f} s",
        "" if peak is None else f"{peak / 1e6:,.0f} MB",
    ]


def save_plot(results: TrainResults, path: pathlib.Path) -> None:
    """Draws every step as a bar of two parts: its gradients and its optimizer."""
    figure = Figure(figsize=(8, 1 + 2.2 * len(results.models)), layout="constrained")
    axes = figure.subplots(len(results.models), squeeze=False)[:, 0]
    for ax, model in zip(axes, results.models, strict=True):
        _plot_workload(ax, model)
    parts = axes[0].get_legend_handles_labels()
    figure.legend(*parts, loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(results.machine["device"])
    save_figure(figure, path)


def _plot_workload(ax, model: WorkloadResult) -> None:
    rows = [row for row in model.rows if row.optimizer_share is not None][::-1]
    ax.set_title(describe_size(model), fontsize=10)
    ax.set_xlabel(f"us of a {model.step}")
    if not rows:
        return
    names = [row.name for row in rows]
    steps = comparable_us(rows)
    shares = [row.optimizer_share for row in rows]
    gradients = [us * (1 - share) for us, share in zip(steps, shares, strict=True)]
    optimizers = [us * share for us, share in zip(steps, shares, strict=True)]
    ax.barh(names, gradients, color="0.8", label="gradients")
    colors = ["C0" if row.ours else "0.5" for row in rows]
    bars = ax.barh(names, optimizers, left=gradients, color=colors, label="optimizer")
    ax.bar_label(bars, [f"{share:.0%}" for share in shares], padding=3, fontsize=8)
    ax.margins(x=0.1)
