"""What is printed, drawn and compared."""

import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from jax_fused_adamw.bench import BenchError
from jax_fused_adamw.bench._results import (
    MEASURED,
    ModelResult,
    Results,
    RowResult,
    Run,
    Timed,
    comparable_us,
)

ALLOWED_LOSS = 0.05
_COLUMNS = (
    "row",
    "device us",
    "launches",
    "wall ms",
    "min",
    "max",
    "compile s",
    "peak MB",
    "bytes",
    "% of limit",
)


def print_results(results: Results) -> None:
    """The machine, the limit, and a table for every model."""
    machine, setting, limit = results.machine, results.setting, results.limit
    print(
        f"{machine['device']} ({machine['processor']}, {machine['num_processors']} "
        f"processors), jax {machine['versions']['jax']}, {machine['date']}\n"
        f"{setting['dtype']} gradients, amsgrad={setting['amsgrad']}, medians of "
        f"{setting['samples']} batches of {setting['iterations']} steps\n"
        f"limit: {limit['gb_per_s']:,.1f} GB/s, {limit['method']}"
    )
    for model in results.models:
        print(f"\n{describe_size(model)}")
        print_table(_COLUMNS, [_cells(row) for row in model.rows])
        for row in model.rows:
            if row.reason is not None:
                print(f"  {row.name} {row.status}: {row.reason}")
    print(
        "\nbytes: memory traffic of a parameter, counted, not measured. % of limit: the"
        "\ntime in which a copy moves as much, over the step's; beyond 100 it came from"
        "\na cache."
    )


def _cells(row: RowResult) -> list[str]:
    if row.status != MEASURED:
        return [row.name, row.status.upper(), *[""] * (len(_COLUMNS) - 2)]
    wall, device = row.wall_ms, row.device_us
    return [
        row.name,
        number(device and device.median, ",.1f"),
        number(row.launches, "d"),
        number(wall.median, ",.3f"),
        number(wall.min, ",.3f"),
        number(wall.max, ",.3f"),
        number(row.compile_s, ".2f"),
        number(row.peak_bytes and row.peak_bytes / 1e6, ",.1f"),
        number(row.num_bytes, "d"),
        number(row.percent_of_limit, ".1f"),
    ]


def describe_size(model: Any) -> str:
    """``name: 23 parameters in 3 leaves``."""
    leaves = "leaf" if model.num_leaves == 1 else "leaves"
    return (
        f"{model.name}: {model.num_parameters:,} parameters in "
        f"{model.num_leaves:,} {leaves}"
    )


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Right-aligned but for the first column."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def render_table(results: Results) -> str:
    """The README's Markdown: a line for each row, a column for each model."""
    names = dict.fromkeys(row.name for _, row in results.rows())
    lines = [f"| | {' | '.join(map(_title, results.models))} |"]
    lines.append("|---" * (len(results.models) + 1) + "|")
    columns = [
        {row.name: _markdown_cell(row) for row in m.rows} for m in results.models
    ]
    for name in names:
        cells = " | ".join(column.get(name, "") for column in columns)
        lines.append(f"| `{name}` | {cells} |")
    machine, copy = results.machine, results.limit["gb_per_s"]
    lines += [
        "",
        f"{machine['device']}, JAX {machine['versions']['jax']}, "
        f"{machine['date'][:10]}, {results.setting['dtype']} gradients: microseconds "
        "of a step; the percentage of the speed of a copy "
        f"({copy:,.0f} GB/s in the same run); kernels and copies launched.",
    ]
    return "\n".join(lines) + "\n"


def _title(model: ModelResult) -> str:
    leaves = "leaf" if model.num_leaves == 1 else "leaves"
    millions = f"{model.num_parameters / 1e6:,.3g} M"
    return f"{model.name} ({model.num_leaves:,} {leaves}, {millions})"


def _markdown_cell(row: RowResult) -> str:
    if row.status != MEASURED:
        return row.status
    (us,) = comparable_us([row])
    parts = [format(us, ",.0f" if us >= 100 else ",.1f")]
    if row.percent_of_limit is not None:
        parts.append(f"{row.percent_of_limit:.1f} %")
    if row.launches is not None:
        parts.append(f"{row.launches:,d}")
    return ", ".join(parts)


def check_plot_path(path: pathlib.Path) -> None:
    """Raises a BenchError where matplotlib knows no such kind of file."""
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise BenchError(
            f"--plot {str(path)!r}: expected a name that ends in one of "
            f"{', '.join('.' + kind for kind in kinds)}"
        )


def save_plot(results: Results, path: pathlib.Path) -> None:
    """Draws a bar for the share of the limit that every measured row reaches."""
    num_bars = sum(len(model.rows) for model in results.models)
    height = 1 + 0.6 * len(results.models) + 0.2 * num_bars
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots(len(results.models), sharex=True, squeeze=False)[:, 0]
    for ax, model in zip(axes, results.models, strict=True):
        _plot_model(ax, model)
    axes[-1].set_xlabel(
        f"percent of the limit, a copy at {results.limit['gb_per_s']:,.0f} GB/s"
    )
    figure.suptitle(results.machine["device"])
    save_figure(figure, path)


def save_figure(figure: Figure, path: pathlib.Path) -> None:
    """Writes it as the kind of file that the name asks for."""
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise BenchError(f"--plot {str(path)!r}: cannot write: {error}") from error


def _plot_model(ax, model: ModelResult) -> None:
    rows = [row for row in model.rows if row.percent_of_limit is not None][::-1]
    percents = [row.percent_of_limit for row in rows]
    colors = ["C0" if row.ours else "0.6" for row in rows]
    bars = ax.barh([row.name for row in rows], percents, color=colors)
    ax.bar_label(bars, fmt="%.0f", padding=3)
    ax.axvline(100, color="C3", linewidth=1)
    ax.set_title(f"{model.name}, {model.num_parameters:,} parameters", fontsize=10)
    ax.margins(x=0.1)


def print_comparison(before: Run, after: Run) -> None:
    """The time of every row that both have measured.

    Raises:
      BenchError: runs of two kinds, or nothing that both have measured.
    """
    _require_one_kind("--compare", before, after)
    old = _measured(before)
    pairs = [
        (key, old[key], row) for key, row in _measured(after).items() if key in old
    ]
    if not pairs:
        raise BenchError("--compare: the two files have no measured row in common")
    for title, results in (("A", before), ("B", after)):
        setting = [f"{name}={results.setting[name]}" for name in results.compared]
        machine = results.machine
        print(f"{title}: {', '.join([machine['device'], machine['date'], *setting])}")
    rows = []
    for (model, name), *both in pairs:
        a, b = comparable_us(both)
        rows.append([f"{model} {name}", f"{a:,.1f}", f"{b:,.1f}", f"{b / a:.3f}"])
    print_table(["row", "A us", "B us", "B / A"], rows)


def _require_one_kind(option: str, before: Run, after: Run) -> None:
    if before.kind != after.kind:
        raise BenchError(
            f"{option}: expected two runs of one kind, got one of the {before.kind} "
            f"and one of the {after.kind}"
        )


def _measured(results: Run) -> dict[tuple[str, str], Timed]:
    return {
        (model, row.name): row
        for model, row in results.rows()
        if row.status == MEASURED
    }


def find_losses(baseline: Run, results: Run) -> list[str]:
    """Where this package has become slower by more than 5 %, one line each.

    Times are not compared, since machines drift, but what is relative to the same run:
    the ratio to the same rule in optax, and the percentage of the limit.

    Args:
      baseline: an earlier run.
      results: of the same kind, with the same options, on the same device.

    Raises:
      BenchError: runs that cannot be compared, or have no row in common.
    """
    require_comparable(baseline, results)
    new = {(model, row.name): row for model, row in results.rows()}
    losses, num_compared = [], 0
    for key, before in _measured(baseline).items():
        if not before.ours or key not in new:
            continue
        after, title = new[key], " ".join(key)
        if after.status != MEASURED:
            num_compared += 1
            losses.append(f"{title} is {after.status}: {after.reason}")
            continue
        figures = _figures(key, baseline, results)
        num_compared += len(figures)
        losses += [
            f"{title}: {name} fell from {old:.3g} to {figure:.3g}"
            for name, old, figure in figures
            if figure < old * (1 - ALLOWED_LOSS)
        ]
    if not num_compared:
        raise BenchError(
            "--check: no row of this package can be compared with its peer or the "
            "limit in both runs"
        )
    return losses


def require_comparable(baseline: Run, results: Run) -> None:
    """Raises BenchError unless both are of one kind, machine and setting.

    Args:
      baseline: an earlier run.
      results: another, or what is known of it before it is measured.
    """
    _require_one_kind("--check", baseline, results)
    machine = ("device", "processor") if _on_cpu(results) else ("device",)
    for kind, names in (("machine", machine), ("setting", results.compared)):
        for name in names:
            old = getattr(baseline, kind)[name]
            new = getattr(results, kind).get(name, old)
            if old != new:
                raise BenchError(
                    f"--check: the baseline's {name} is {old!r} and this run's {new!r};"
                    " measure a baseline for it with --json"
                )


def _on_cpu(results: Run) -> bool:
    return results.machine["platform"] == "cpu"


def _figures(
    key: tuple[str, str], baseline: Run, results: Run
) -> list[tuple[str, float, float]]:
    """``name, before, after`` of what both runs have; more is better."""
    runs = [_measured(baseline), _measured(results)]
    percents = [getattr(run[key], "percent_of_limit", None) for run in runs]
    efficiencies = [getattr(run[key], "efficiency", None) for run in runs]
    peer = runs[1][key].peer
    rows = [run.get(k) for run in runs for k in (key, (key[0], peer))]
    speeds = [None, None]
    if None not in rows:
        ours, theirs, our_new, their_new = comparable_us(rows)
        speeds = [theirs / ours, their_new / our_new]
    figures = [
        (f"speed as a multiple of {peer}'s", *speeds),
        ("percent of the limit", *percents),
        ("scaling efficiency", *efficiencies),
    ]
    return [figure for figure in figures if None not in figure]
