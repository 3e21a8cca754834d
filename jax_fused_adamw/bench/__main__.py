"""The command line: the options, and one line for whatever is wrong."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from jax_fused_adamw._command_line import Parser, path, whole_number
from jax_fused_adamw.bench import BenchError
from jax_fused_adamw.bench._shapes import (
    SHAPES,
    Leaves,
    import_shapes,
    named,
    read_shapes,
)

_QUICK_SHAPES = ("mlp", "resnet50")
_ITERATIONS = {"cpu": 10, "gpu": 20}
# What the ladder decides itself.
_OF_THE_ISOLATED_STEP = (
    "rows",
    "dtype",
    "amsgrad",
    "shape",
    "shapes",
    "module",
    "elements",
)


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        BenchError,
        prog="python -m jax_fused_adamw.bench",
        description="Times optimizer steps on float32 parameters, each against the "
        "bandwidth of a copy in the same run. A row whose numbers are wrong shows no "
        "time, and makes the exit status 1; a row that cannot run here says why.",
    )
    add = parser.add_argument
    _add_models(parser.add_argument_group("what to update"))
    add("--rows", nargs="+", metavar="ROW", help="some of the rows (default: all)")
    add(
        "--ladder",
        action="store_true",
        help="instead, the steps from a plain loop to the packed kernel, on sizes of "
        "their own",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the gradients (default %(default)s)",
    )
    add("--amsgrad", action="store_true", help="AMSGrad instead of AdamW")
    add(
        "--iterations",
        type=whole_number(1, 100_000),
        metavar="N",
        help="steps of a batch (default {cpu} on a CPU, {gpu} on a GPU)".format(
            **_ITERATIONS
        ),
    )
    add(
        "--samples",
        type=whole_number(1, 10_000),
        default=5,
        metavar="N",
        help="timed batches of every row (default %(default)s)",
    )
    _add_train_step(parser.add_argument_group("whole train steps"))
    _add_files(parser.add_argument_group("files"))
    return parser


def _add_train_step(group) -> None:
    group.add_argument(
        "--train-step",
        action="store_true",
        help="time train steps of a GPT (GPT-2 on a GPU, else a tiny one) and of PPO "
        "instead of optimizer steps",
    )
    group.add_argument(
        "--batch",
        nargs="+",
        type=whole_number(1, 100_000),
        metavar="N",
        default=[],
        help="sequences in the GPT's batch (default: 4 and, on a GPU, the largest "
        "power of two times 4 that fits)",
    )


def _add_models(group) -> None:
    group.add_argument(
        "--shape",
        nargs="+",
        choices=SHAPES,
        metavar="NAME",
        default=[],
        help=f"of {', '.join(SHAPES)} (default: all on a GPU, else "
        f"{' and '.join(_QUICK_SHAPES)})",
    )
    group.add_argument(
        "--shapes",
        type=path,
        metavar="FILE",
        help='JSON: {"name": [[2, 3], [3]], ...}',
    )
    group.add_argument(
        "--module",
        metavar="PKG:FUNCTION",
        help="a function without arguments that returns parameters or their shapes",
    )
    group.add_argument(
        "--elements",
        type=whole_number(1, 2**31 - 1),
        metavar="N",
        help="one leaf of N parameters",
    )


def _add_files(group) -> None:
    group.add_argument("--json", type=path, metavar="FILE", help="save the results")
    group.add_argument(
        "--plot",
        type=path,
        metavar="FILE",
        help="draw the percentages of the limit, or what train steps consist of",
    )
    group.add_argument(
        "--markdown",
        type=path,
        metavar="FILE",
        help="print a result file as a Markdown table, and measure nothing",
    )
    group.add_argument(
        "--compare",
        nargs=2,
        type=path,
        metavar=("A", "B"),
        help="print two result files side by side, and measure nothing",
    )
    group.add_argument(
        "--check",
        type=path,
        metavar="BASELINE",
        help="exit with 1 where ours, as a ratio to the same rule in optax or a "
        "percentage of the limit, has lost more than 5 %% against this result file",
    )


def _require_packages() -> None:
    for name in ("matplotlib", "tqdm"):
        if importlib.util.find_spec(name) is None:
            raise BenchError(f'{name} is missing: pip install ".[bench]"')


def _models(options: argparse.Namespace, platform: str) -> dict[str, Leaves]:
    models = {name: named(name) for name in options.shape}
    if options.shapes is not None:
        models |= read_shapes(options.shapes)
    if options.module is not None:
        models |= import_shapes(options.module)
    if options.elements is not None:
        models[f"{options.elements:,} elements"] = [(options.elements,)]
    default = SHAPES if platform == "gpu" else _QUICK_SHAPES
    return models or {name: named(name) for name in default}


def _run(argv: Sequence[str] | None) -> int:
    parser = _make_parser()
    options = parser.parse_args(argv)
    _check_ladder(options, parser)
    _check_train_step(options, parser)
    _require_packages()
    # Not at the top: they import the packages that may be missing.
    from jax_fused_adamw.bench import _report, _results, _train_report

    if options.compare is not None and options.markdown is not None:
        raise BenchError("--compare and --markdown print saved runs: give one of them")
    if options.compare is not None:
        _report.print_comparison(*map(_results.read, options.compare))
        return 0
    if options.markdown is not None:
        results = _results.read(options.markdown)
        is_train = results.kind == _results.TrainResults.kind
        report = _train_report if is_train else _report
        print(report.render_table(results), end="")
        return 0
    _check_paths(options)
    if options.plot is not None:
        _report.check_plot_path(options.plot)
    baseline = None if options.check is None else _results.read(options.check)

    def save(results) -> None:
        if options.json is not None:
            _results.write(results, options.json)

    if options.train_step:
        report, results = _train_report, _measure_train_steps(options, baseline, save)
    else:
        report, results = _report, _measure_optimizer_steps(options, baseline, save)
    report.print_results(results)
    save(results)
    if options.plot is not None:
        report.save_plot(results, options.plot)
    losses = [] if baseline is None else _report.find_losses(baseline, results)
    for loss in losses:
        print(f"LOST: {loss}")
    bad = (_results.WRONG, _results.FAILED)
    wrong = any(row.status in bad for _, row in results.rows())
    return 1 if wrong or losses else 0


def _measure_optimizer_steps(options: argparse.Namespace, baseline, save):
    from jax_fused_adamw.bench import _experiment, _ladder, _results

    unknown = set(options.rows or ()) - set(_experiment.ROWS)
    if unknown:
        raise BenchError(
            f"argument --rows: expected some of {', '.join(_experiment.ROWS)}; got "
            f"{', '.join(sorted(unknown))}"
        )
    platform = _platform()
    if options.ladder:
        models, rows = _ladder.ladder_models(), _ladder.LADDER_ROWS
    else:
        models = _models(options, platform)
        rows = [_experiment.ROWS[name] for name in options.rows or _experiment.ROWS]
    if baseline is not None:
        setting = {"dtype": options.dtype, "amsgrad": options.amsgrad}
        _check_baseline(baseline, _results.Results, setting, limit={})
        if set(models).isdisjoint(model.name for model in baseline.models):
            raise BenchError(
                f"--check: the baseline has none of {', '.join(models)}; measure one "
                "for it with --json"
            )
    how = _experiment.Options(
        dtype=options.dtype,
        amsgrad=options.amsgrad,
        iterations=options.iterations or _ITERATIONS.get(platform, 10),
        samples=options.samples,
    )
    return _experiment.run_bench(models, rows, how, save)


def _measure_train_steps(options: argparse.Namespace, baseline, save):
    from jax_fused_adamw.bench import _results, _train_step

    _platform()
    if baseline is not None:
        _check_baseline(baseline, _results.TrainResults, {})
    return _train_step.run_train_steps(
        options.batch, options.iterations, options.samples, save
    )


def _check_baseline(baseline, kind, setting, **others) -> None:
    """Refuses before the measurement what would be refused after it."""
    from jax_fused_adamw.bench import _machine, _report

    machine = _machine.describe_machine()
    planned = kind(machine=machine, load={}, setting=setting, models=[], **others)
    _report.require_comparable(baseline, planned)


def _check_train_step(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    """Refuses options that mean nothing with --train-step, or nothing without it."""
    if not options.train_step and options.batch:
        raise BenchError("--batch is the batch of --train-step; give both")
    if options.train_step:
        _refuse(
            ("ladder", *_OF_THE_ISOLATED_STEP),
            options,
            parser,
            "--{name} is of the isolated optimizer step; --train-step takes --batch, "
            "--iterations and --samples",
        )


def _check_ladder(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.ladder and not options.train_step:
        _refuse(
            _OF_THE_ISOLATED_STEP,
            options,
            parser,
            "--ladder has rows, sizes and gradients of its own: leave out --{name}",
        )


def _refuse(names: Sequence[str], options, parser, message: str) -> None:
    """Raises for the first option that is not at its default."""
    for name in names:
        if getattr(options, name) != parser.get_default(name):
            raise BenchError(message.format(name=name))


def _check_paths(options: argparse.Namespace) -> None:
    """Finds a folder that is missing before the measurement, not after it."""
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise BenchError(
                f"--{name} {str(path)!r}: expected a file in a folder that exists"
            )


def _platform() -> str:
    import jax

    try:
        return jax.default_backend()
    except RuntimeError as error:
        raise BenchError(str(error).splitlines()[0]) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench.

    Args:
      argv: the options; None takes those of the process.

    Returns:
      The exit status: 0; 1 where a row is wrong or ``--check`` finds a loss; 2 after
      one line on stderr that says what is wrong with the command.
    """
    try:
        return _run(argv)
    except BenchError as error:
        print(f"jax_fused_adamw.bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    # JAX would take three quarters of a GPU's memory, and torch's rows need some too.
    # Train steps do without torch, and large batches need memory in one piece.
    if "--train-step" not in sys.argv:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # torch's CPU threads would spin, and fight with JAX's for the same processors.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A path in the output may hold what the terminal's encoding does not.
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
