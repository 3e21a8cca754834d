"""The options of the bench, and which of them go together."""

import argparse
from collections.abc import Sequence

from jax_fused_adamw._command_line import Parser, path, whole_number
from jax_fused_adamw.bench import BenchError
from jax_fused_adamw.bench._shapes import SHAPES

# Where neither --shape nor the like says what to update: on a GPU, and elsewhere.
SHAPES_ON_GPU, QUICK_SHAPES = tuple(SHAPES), ("mlp", "resnet50")
SHARDED_ON_GPU, QUICK_SHARDED = ("gpt2", "llama_1b"), ("mlp",)
ITERATIONS = {"cpu": 10, "gpu": 20}
_OF_THE_ISOLATED_STEP = ("dtype", "amsgrad", "shape", "shapes", "module", "elements")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        BenchError,
        prog="python -m jax_fused_adamw.bench",
        description="Times optimizer steps on float32 parameters, each against the "
        "bandwidth of a copy in the same run. A row whose numbers are wrong shows no "
        "time, and makes the exit status 1; a row that cannot run here says why.",
    )
    add = parser.add_argument
    _add_models(parser.add_argument_group("what to update"))
    add(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="some of the rows (default: all whose state is two float32 moments); of "
        "--train-step each next to the row of optax that it is compared with",
    )
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
            **ITERATIONS
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
    _add_sharded(parser.add_argument_group("several devices"))
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


def _add_sharded(group) -> None:
    group.add_argument(
        "--sharded",
        action="store_true",
        help="instead, optimizer steps with every leaf cut over 1, 2, 4, ... devices "
        f"(on a GPU {' and '.join(SHARDED_ON_GPU)} by default), then FSDP training of "
        "a GPT on all of them",
    )
    group.add_argument(
        "--devices",
        nargs="+",
        type=whole_number(1, 100_000),
        metavar="N",
        default=[],
        help="how many, one mesh each; scaling is measured against 1",
    )
    group.add_argument(
        "--updates",
        type=whole_number(0, 100_000),
        default=100,
        metavar="N",
        help="of the training; 0 leaves it out (default %(default)s)",
    )


def _add_models(group) -> None:
    group.add_argument(
        "--shape",
        nargs="+",
        choices=SHAPES,
        metavar="NAME",
        default=[],
        help=f"of {', '.join(SHAPES)} (default: all on a GPU, else "
        f"{' and '.join(QUICK_SHAPES)})",
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


def check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuses options that mean nothing together."""
    if options.compare is not None and options.markdown is not None:
        raise BenchError("--compare and --markdown print saved runs: give one of them")
    _check_train_step(options, parser)
    _check_sharded(options, parser)
    _check_ladder(options, parser)


def _check_train_step(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    """Refuses options that mean nothing with --train-step, or nothing without it."""
    if not options.train_step and options.batch:
        raise BenchError("--batch is the batch of --train-step; give both")
    if options.train_step:
        _refuse(
            ("ladder", "sharded", *_OF_THE_ISOLATED_STEP),
            options,
            parser,
            "--{name} is of the isolated optimizer step; --train-step takes --batch, "
            "--rows, --iterations and --samples",
        )


def _check_sharded(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    if options.sharded:
        message = "--sharded is a run of its own: leave out --{name}"
        _refuse(("ladder",), options, parser, message)
    else:
        message = "--{name} is of --sharded; give both"
        _refuse(("devices", "updates"), options, parser, message)


def _check_ladder(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.ladder and not options.train_step:
        _refuse(
            ("rows", *_OF_THE_ISOLATED_STEP),
            options,
            parser,
            "--ladder has rows, sizes and gradients of its own: leave out --{name}",
        )


def _refuse(names: Sequence[str], options, parser, message: str) -> None:
    """Raises for the first option that is not at its default."""
    for name in names:
        if getattr(options, name) != parser.get_default(name):
            raise BenchError(message.format(name=name))


def check_paths(options: argparse.Namespace) -> None:
    """Finds a folder that is missing before the measurement, not after it."""
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise BenchError(
                f"--{name} {str(path)!r}: expected a file in a folder that exists"
            )
