"""The command line: the options, and one line for whatever is wrong."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from jax_fused_adamw._command_line import Parser, path, whole_number
from jax_fused_adamw.demo import DemoError
from jax_fused_adamw.demo._data import read_corpus

_OPTIMIZERS = {"both": ("fused", "optax"), "fused": ("fused",), "optax": ("optax",)}


def _parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        DemoError,
        prog="python -m jax_fused_adamw.demo",
        description="Trains a small byte-level GPT with fused_adamw, then again with "
        "optax.adamw from the same start on the same batches, and compares the two.",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(1, 100_000),
        default=800,
        help="training steps of each run (default %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=path,
        metavar="PATH",
        help="a text file or a folder of them (default: Python's standard library)",
    )
    parser.add_argument(
        "--optimizer",
        choices=_OPTIMIZERS,
        default="both",
        help="what to train with (default %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=path,
        metavar="FOLDER",
        default="demo_output",
        help="where plot and results are saved (default %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**31 - 1),
        default=0,
        help="of the first parameters, the batches, the sample (default %(default)s)",
    )
    return parser.parse_args(argv)


def _require_packages() -> None:
    for name in ("flax", "matplotlib", "tqdm"):
        if importlib.util.find_spec(name) is None:
            raise DemoError(f'{name} is missing: pip install ".[demo]"')


def _run(argv: Sequence[str] | None) -> None:
    options = _parse_options(argv)
    corpus = read_corpus(options.data)
    _require_packages()
    # Not at the top: it imports the packages that may be missing.
    from jax_fused_adamw.demo._experiment import run_experiment

    run_experiment(
        optimizers=_OPTIMIZERS[options.optimizer],
        corpus=corpus,
        steps=options.steps,
        seed=options.seed,
        out=options.out,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Args:
      argv: the options; None takes those of the process.

    Returns:
      The exit status: 0, or 2 after one line on stderr that says what is wrong.
    """
    try:
        _run(argv)
    except DemoError as error:
        print(f"jax_fused_adamw.demo: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # A path in the output may hold what the terminal's encoding does not.
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
