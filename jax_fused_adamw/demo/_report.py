"""What the demo prints and saves."""

import dataclasses
import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from jax_fused_adamw.demo import DemoError
from jax_fused_adamw.demo._train import Run

JSON_FILE = "results.json"
PLOT_FILE = "losses.png"


def printed_steps(steps: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... and the last step."""
    round_steps = (m * 10**k for k in range(len(str(steps))) for m in (1, 2, 5))
    return sorted({s for s in round_steps if s < steps} | {steps})


def printable(text: np.ndarray) -> str:
    """Bytes as ASCII that any terminal shows; a dot for everything else."""
    keep = {*b"\t\n", *range(ord(" "), ord("~") + 1)}
    return "".join(chr(b) if b in keep else "." for b in text.tolist())


def print_setting(setting: dict[str, Any], kernels: str) -> None:
    """What is trained, on what, where."""
    print(
        "text:   {num_bytes:,} bytes of {text}; the last tenth is held out\n"
        "model:  {num_parameters:,} parameters, context of {context} bytes\n"
        "run:    {steps} x {batch} windows, seed {seed}\n"
        "device: {device}, jax {jax}".format(**setting)
    )
    print(kernels, flush=True)


def relative_differences(fused: Run, optax: Run) -> np.ndarray:
    """|fused loss - optax loss| / optax loss, for every step."""
    losses = np.array([fused.losses, optax.losses])
    return np.abs(losses[0] - losses[1]) / losses[1]


def compare(fused: Run, optax: Run) -> dict[str, float]:
    """How far apart two runs from one start have come."""
    held_out_difference = abs(fused.held_out_loss - optax.held_out_loss)
    differences = jax.tree.map(jnp.subtract, fused.params, optax.params)
    return {
        "largest_relative_loss_difference": relative_differences(fused, optax).max(),
        "relative_held_out_difference": held_out_difference / optax.held_out_loss,
        "largest_parameter_difference": _largest(differences),
        "largest_parameter": _largest(optax.params),
    }


def _largest(tree: Any) -> float:
    """The greatest magnitude in any leaf."""
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


def print_losses(runs: list[Run]) -> None:
    """The training loss of each run at a few steps, and their difference."""
    print("\nTraining loss, in nats a byte:")
    titles = [run.label for run in runs]
    if len(runs) == 2:
        titles.append("relative difference")
        differences = relative_differences(*runs)
    print("  ".join(f"{title:>12}" for title in ["step", *titles]))
    for step in printed_steps(len(runs[0].losses)):
        cells = [f"{step:12}", *(f"{run.losses[step - 1]:12.4f}" for run in runs)]
        if len(runs) == 2:
            cells.append(f"{differences[step - 1]:19.1e}")
        print("  ".join(cells))


def print_summary(runs: list[Run], comparison: dict[str, float] | None) -> None:
    """Held-out loss, times and kernel calls of each run, and how they differ."""
    rows = {
        "held-out loss": [f"{run.held_out_loss:.4f}" for run in runs],
        "median ms a step": [f"{run.median_step_ms:.2f}" for run in runs],
        "seconds to compile": [f"{run.compile_seconds:.1f}" for run in runs],
        "kernel calls in a step": [str(run.native_calls) for run in runs],
    }
    print("\n" + " " * 24 + "".join(f"{run.label:>14}" for run in runs))
    for title, cells in rows.items():
        print(f"{title:24}" + "".join(f"{cell:>14}" for cell in cells))
    if comparison is None:
        return
    print(
        "\nLargest parameter difference: {largest_parameter_difference:.1e}, where "
        "parameters reach {largest_parameter:.2f}.\n"
        "Relative difference of the held-out losses: "
        "{relative_held_out_difference:.1e}.\n"
        "A step of a model this small is nearly all forward and backward pass: expect\n"
        "near-equal times, and more of a difference from what else the machine does.\n"
        "This compares results, not speed.".format(**comparison)
    )


def print_sample(label: str, prompt: str, text: str) -> None:
    """The prompt, and what the model writes after it."""
    print(f"\nThe end of the held-out text, [...], and what the model of {label} adds:")
    print(f"{prompt}[...]{text}")


def figures(run: Run) -> dict[str, Any]:
    """A run as JSON takes it: everything but the parameters."""
    values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    del values["params"]
    return values


def prepare_folder(out: pathlib.Path) -> None:
    """Makes the output folder, and proves it writable before the training."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except FileExistsError as error:
        raise DemoError(f"--out {str(out)!r} is a file; name a folder") from error
    except OSError as error:
        raise _cannot_write(out, error) from error


def save(out: pathlib.Path, results: dict[str, Any], runs: list[Run]) -> None:
    """Writes the results as JSON and the plot as PNG into the folder."""
    try:
        (out / JSON_FILE).write_text(json.dumps(results, indent=2) + "\n")
        _plot(runs).savefig(out / PLOT_FILE, dpi=120)
    except OSError as error:
        raise _cannot_write(out, error) from error


def _cannot_write(out: pathlib.Path, error: OSError) -> DemoError:
    return DemoError(f"--out {str(out)!r}: cannot write there: {error.strerror}")


def _plot(runs: list[Run]) -> Figure:
    figure = Figure(figsize=(7, 3 * len(runs) + 1), layout="constrained")
    axes = figure.subplots(len(runs), sharex=True, squeeze=False)[:, 0]
    steps = range(1, len(runs[0].losses) + 1)
    marker = "o" if len(steps) == 1 else None
    for run, style in zip(runs, ("-", "--"), strict=False):
        axes[0].plot(steps, run.losses, style, marker=marker, label=run.label)
    axes[0].set_ylabel("training loss (nats a byte)")
    axes[0].legend()
    if len(runs) == 2:
        axes[1].plot(steps, relative_differences(*runs), color="C2", marker=marker)
        axes[1].set_ylabel("relative difference")
        # Linear below float32's own resolution, so that equal losses show as zero.
        axes[1].set_yscale("symlog", linthresh=1e-7)
    axes[-1].set_xlabel("step")
    return figure
