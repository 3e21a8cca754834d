"""Steps on meshes as printed, as tables of the README, and drawn."""

import pathlib
from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

from jax_fused_adamw.bench._report import (
    describe_size,
    number,
    print_table,
    save_figure,
)
from jax_fused_adamw.bench._results import (
    MEASURED,
    ShardedModelResult,
    ShardedResults,
    ShardedRowResult,
    comparable_us,
)

_COLUMNS = (
    "row",
    "device us",
    "median",
    "comm us",
    "wall ms",
    "% of limit",
    "scaling %",
    "compile s",
    "peak MB",
)
_TRAIN_COLUMNS = ("row", "wall ms", "min", "max", "compile s", "peak MB", "losses")
_README_COLUMNS = (
    "devices",
    "us",
    "in collectives",
    "limit",
    "scaling",
    "collectives",
)
_README_TRAIN_COLUMNS = ("ms a step", "peak memory", "first loss", "last loss")


def print_results(results: ShardedResults) -> None:
    """The machine, the limit, and a table for every model on every mesh."""
    machine, setting, limit = results.machine, results.setting, results.limit
    print(
        f"{machine['num_devices']} x {machine['device']} ({machine['processor']}, "
        f"{machine['num_processors']} processors), jax {machine['versions']['jax']}, "
        f"{machine['date']}\n"
        f"{setting['dtype']} gradients, amsgrad={setting['amsgrad']}, medians of "
        f"{setting['samples']} batches\n"
        f"limit of a device: {limit['gb_per_s']:,.1f} GB/s, {limit['method']}"
    )
    for model in results.models:
        print(
            f"\n{describe_size(model)}; times of one {model.step}, "
            f"{model.iterations} in a batch"
        )
        header, cells = _COLUMNS, _cells
        if _is_train(model):
            header, cells = _TRAIN_COLUMNS, _train_cells
        print_table(header, [_pad(cells(row), header) for row in model.rows])
        for row in model.rows:
            if row.collectives is not None:
                print(f"  {row.name} communicates {_communication(row)}")
            if row.reason is not None:
                print(f"  {row.name} {row.status}: {row.reason}")
        if model.peak_bytes_in_use is not None:
            peaks = ", ".join(map(_size, model.peak_bytes_in_use))
            print(f"  in use at most, checks and all since the start: {peaks}")
    print(
        "\ndevice us: of the device that is busy the longest; median: over the devices;"
        "\ncomm us: what is said to other devices and waited for, of device us. % of"
        "\nlimit: the time in which a device copies as much as its part of the step"
        "\nmoves, over the step's. scaling %: one device's time over the sum of all"
        "\ndevices' times. Forced CPU devices share one memory, so both say nothing"
        "\nthere. peak MB: what the compiled step holds at most on a device."
    )


def _is_train(model: ShardedModelResult) -> bool:
    return model.step == "train step"


def _pad(cells: list[str], columns: Sequence[str]) -> list[str]:
    return [*cells, *[""] * (len(columns) - len(cells))]


def _cells(row: ShardedRowResult) -> list[str]:
    if row.status != MEASURED:
        return [row.name, row.status.upper()]
    device, median, communication = row.device_us, row.median_us, row.communication_us
    return [
        row.name,
        number(device and device.median, ",.1f"),
        number(median and median.median, ",.1f"),
        number(communication and communication.median, ",.1f"),
        number(row.wall_ms.median, ",.3f"),
        number(row.percent_of_limit, ".1f"),
        number(None if row.efficiency is None else 100 * row.efficiency, ".1f"),
        number(row.compile_s, ".2f"),
        number(row.peak_bytes and row.peak_bytes / 1e6, ",.1f"),
    ]


def _train_cells(row: ShardedRowResult) -> list[str]:
    if row.status != MEASURED:
        return [row.name, row.status.upper()]
    wall = row.wall_ms
    return [
        row.name,
        *(number(x, ",.3f") for x in (wall.median, wall.min, wall.max)),
        number(row.compile_s, ".2f"),
        number(row.peak_bytes and row.peak_bytes / 1e6, ",.1f"),
        f"{row.losses[0]:.4f} .. {row.losses[-1]:.4f}",
    ]


def _communication(row: ShardedRowResult) -> str:
    """``1 all-reduce (36 B), 2 all-gather (1.5 MB)``, or ``nothing``."""
    parts = [
        f"{each['count']:,} {name} ({_size(each['bytes'])})"
        for name, each in row.collectives.items()
    ]
    return ", ".join(parts) or "nothing"


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"


def render_table(results: ShardedResults) -> str:
    """The README's Markdown: steps, then training, and where it was measured."""
    steps = [model for model in results.models if not _is_train(model)]
    trained = [model for model in results.models if _is_train(model)]
    lines = []
    if steps:
        lines += _header("step", _README_COLUMNS)
        for shape in dict.fromkeys(model.shape for model in steps):
            lines += _shape_lines([m for m in steps if m.shape == shape])
        lines.append("")
    if trained:
        lines += _header("train step", _README_TRAIN_COLUMNS)
        for model in trained:
            lines.append(_heading(describe_size(model), _README_TRAIN_COLUMNS))
            lines += [_line(_readme_train_cells(row)) for row in model.rows]
        lines.append("")
    machine, versions = results.machine, results.machine["versions"]
    copy = results.limit["gb_per_s"]
    lines.append(
        f"{machine['num_devices']} x {machine['device']}, JAX {versions['jax']}, optax "
        f"{versions['optax']}, {machine['date'][:10]}, {results.setting['dtype']} "
        "gradients: microseconds of a step on the device that takes the longest; of "
        "them, what is said to other devices and waited for; the percentage of the "
        f"speed of a copy ({copy:,.0f} GB/s a device in the same run) with which it "
        "moves its part; one device's time over the sum of all devices' times; the "
        "compiled step's collectives with the bytes of their results. Memory: of the "
        "compiled step on a device."
    )
    return "\n".join(lines) + "\n"


def _header(first: str, columns: Sequence[str]) -> list[str]:
    return [_line([first, *columns]), "|---" * (len(columns) + 1) + "|"]


def _heading(title: str, columns: Sequence[str]) -> str:
    return f"| **{title}** " + "| " * len(columns) + "|"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shape_lines(models: Sequence[ShardedModelResult]) -> Iterator[str]:
    """A row's meshes below each other."""
    first = models[0]
    millions = f"{first.num_parameters / 1e6:,.4g} M parameters"
    yield _heading(f"{first.shape}: {millions}", _README_COLUMNS)
    for name in dict.fromkeys(row.name for model in models for row in model.rows):
        for model in models:
            for row in model.rows:
                if row.name == name:
                    yield _line(_readme_cells(row, model.num_devices))


def _readme_cells(row: ShardedRowResult, num_devices: int) -> list[str]:
    cells = [f"`{row.name}`", str(num_devices)]
    if row.status != MEASURED:
        return _pad([*cells, row.status], ("", *_README_COLUMNS))
    (us,), communication = comparable_us([row]), row.communication_us
    percent, efficiency = row.percent_of_limit, row.efficiency
    return [
        *cells,
        format(us, ",.0f" if us >= 100 else ",.1f"),
        "" if communication is None else f"{communication.median:,.1f}",
        "" if percent is None else f"{percent:.1f} %",
        "" if efficiency is None else f"{efficiency:.0%}",
        _communication(row),
    ]


def _readme_train_cells(row: ShardedRowResult) -> list[str]:
    if row.status != MEASURED:
        return _pad([row.name, row.status], ("", *_README_TRAIN_COLUMNS))
    peak = row.peak_bytes
    return [
        row.name,
        f"{row.wall_ms.median:,.2f}",
        "" if peak is None else f"{peak / 1e6:,.0f} MB",
        *(f"{loss:.4f}" for loss in (row.losses[0], row.losses[-1])),
    ]


def save_plot(results: ShardedResults, path: pathlib.Path) -> None:
    """Draws each row's time over the number of devices, and the losses of training."""
    groups: dict[str, list[ShardedModelResult]] = {}
    for model in results.models:
        groups.setdefault(model.shape, []).append(model)
    figure = Figure(figsize=(8, 1 + 3.5 * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), squeeze=False)[:, 0]
    for ax, (shape, models) in zip(axes, groups.items(), strict=True):
        ax.set_title(shape, fontsize=10)
        if _is_train(models[0]):
            _plot_losses(ax, models[0])
        else:
            _plot_scaling(ax, models)
        if ax.lines:
            ax.legend(fontsize=8)
    most = max((model.num_devices for model in results.models), default=1)
    figure.suptitle(f"up to {most} x {results.machine['device']}")
    save_figure(figure, path)


def _plot_scaling(ax, models: Sequence[ShardedModelResult]) -> None:
    for name in dict.fromkeys(row.name for model in models for row in model.rows):
        points = [
            (model.num_devices, row)
            for model in models
            for row in model.rows
            if row.name == name and row.status == MEASURED
        ]
        if points:
            counts, rows = zip(*points, strict=True)
            style = "o-" if rows[0].ours else "o--"
            ax.plot(counts, comparable_us(rows), style, label=name)
    counts = [model.num_devices for model in models]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("devices")
    ax.set_ylabel("us of a step")


def _plot_losses(ax, model: ShardedModelResult) -> None:
    for row in model.rows:
        if row.losses is not None:
            ax.plot(row.losses, "-" if row.ours else "--", label=row.name)
    ax.set_xlabel("update")
    ax.set_ylabel("loss")
