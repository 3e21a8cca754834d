"""The command line: the options, and one line for whatever is wrong."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from jax_fused_adamw.bench import BenchError
from jax_fused_adamw.bench._options import (
    ITERATIONS,
    QUICK_SHAPES,
    QUICK_SHARDED,
    SHAPES_ON_GPU,
    SHARDED_ON_GPU,
    check_options,
    check_paths,
    make_parser,
)
from jax_fused_adamw.bench._shapes import (
    Leaves,
    import_shapes,
    named,
    read_shapes,
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
    on_gpu, elsewhere = SHAPES_ON_GPU, QUICK_SHAPES
    if options.sharded:
        on_gpu, elsewhere = SHARDED_ON_GPU, QUICK_SHARDED
    default = on_gpu if platform == "gpu" else elsewhere
    return models or {name: named(name) for name in default}


def _run(argv: Sequence[str] | None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    check_options(options, parser)
    _require_packages()
    # Not at the top: they import the packages that may be missing.
    from jax_fused_adamw.bench import _report, _results
    from jax_fused_adamw.bench._reports import report_of

    if options.compare is not None:
        _report.print_comparison(*map(_results.read, options.compare))
        return 0
    if options.markdown is not None:
        results = _results.read(options.markdown)
        print(report_of(results).render_table(results), end="")
        return 0
    check_paths(options)
    if options.plot is not None:
        _report.check_plot_path(options.plot)
    baseline = None if options.check is None else _results.read(options.check)

    def save(results) -> None:
        if options.json is not None:
            _results.write(results, options.json)

    measure = _measure_train_steps if options.train_step else _measure_optimizer_steps
    results = measure(options, baseline, save)
    report = report_of(results)
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

    all_rows, kind = _experiment.ROWS, _results.Results
    default = _experiment.DEFAULT_ROWS
    if options.sharded:
        from jax_fused_adamw.bench._mesh_rows import MESH_ROWS

        all_rows, kind = MESH_ROWS, _results.ShardedResults
        default = MESH_ROWS
    _check_rows(options, all_rows)
    platform = _platform()
    if options.ladder:
        models, rows = _ladder.ladder_models(), _ladder.LADDER_ROWS
    else:
        models = _models(options, platform)
        rows = [all_rows[name] for name in options.rows or default]
    if baseline is not None:
        setting = {"dtype": options.dtype, "amsgrad": options.amsgrad}
        _check_baseline(baseline, kind, setting, limit={})
        _check_common(baseline, models)
    how = _experiment.Options(
        dtype=options.dtype,
        amsgrad=options.amsgrad,
        iterations=options.iterations or ITERATIONS.get(platform, 10),
        samples=options.samples,
    )
    if not options.sharded:
        return _experiment.run_bench(models, rows, how, save)
    from jax_fused_adamw.bench import _sharded

    counts = options.devices or _sharded.default_counts()
    _sharded.check_counts(counts)
    return _sharded.run_sharded(models, rows, counts, options.updates, how, save)


def _check_rows(options: argparse.Namespace, rows) -> None:
    unknown = set(options.rows or ()) - set(rows)
    if unknown:
        raise BenchError(
            f"argument --rows: expected some of {', '.join(rows)}; got "
            f"{', '.join(sorted(unknown))}"
        )


def _check_common(baseline, models: dict[str, Leaves]) -> None:
    measured = {getattr(model, "shape", model.name) for model in baseline.models}
    if measured.isdisjoint(models):
        raise BenchError(
            f"--check: the baseline has none of {', '.join(models)}; measure one "
            "for it with --json"
        )


def _measure_train_steps(options: argparse.Namespace, baseline, save):
    from jax_fused_adamw.bench import _results, _train_step

    _check_rows(options, [each.name for each in _train_step.OPTIMIZERS])
    _platform()
    if baseline is not None:
        _check_baseline(baseline, _results.TrainResults, {})
    return _train_step.run_train_steps(
        options.batch, options.iterations, options.samples, save, options.rows or ()
    )


def _check_baseline(baseline, kind, setting, **others) -> None:
    """Refuses before the measurement what would be refused after it."""
    from jax_fused_adamw.bench import _machine, _report

    machine = _machine.describe_machine()
    planned = kind(machine=machine, load={}, setting=setting, models=[], **others)
    _report.require_comparable(baseline, planned)


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
