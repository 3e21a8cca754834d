"""The command line: the options, and one line for whatever is wrong."""

import argparse
import functools
import pathlib
import signal
import sys
from collections.abc import Sequence

from jax_fused_adamw._command_line import Parser, path, whole_number
from jax_fused_adamw.verify import VerifyError, _sources, _verify
from jax_fused_adamw.verify._job import Options
from jax_fused_adamw.verify._suites import SUITES

_COMPILERS = {"both": ("nvcc", "nvrtc"), "nvcc": ("nvcc",), "nvrtc": ("nvrtc",)}


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        VerifyError,
        prog="python -m jax_fused_adamw.verify",
        description="Runs suites of checks and tells what is proven on this machine. A "
        "suite passed, failed, timed_out, or is blocked where something that it needs "
        "is missing. The exit status is 1 where one failed or timed out; blocked ones "
        "alone leave 0. Without a GPU the cuda suite fails.",
    )
    add = parser.add_argument
    add(
        "--suite",
        nargs="+",
        choices=SUITES,
        metavar="NAME",
        default=list(SUITES),
        help=f"of {', '.join(SUITES)} (default: all)",
    )
    add(
        "--compiler",
        choices=_COMPILERS,
        default="both",
        help="of the CUDA kernels, in build and cuda (default %(default)s)",
    )
    add(
        "--offline",
        action="store_true",
        help="build without a network, with the build tools that are installed",
    )
    add(
        "--timeout",
        type=whole_number(1, 1_000_000),
        default=1800,
        metavar="SECONDS",
        help="time limit of each suite (default %(default)s)",
    )
    add(
        "--source",
        type=path,
        metavar="FOLDER",
        help="checkout with tests and cc (default: the package's, else this folder)",
    )
    add(
        "--json",
        type=path,
        default=pathlib.Path("verify.json"),
        metavar="FILE",
        help="results (default %(default)s); logs lie next to it in FILE_logs",
    )
    return parser


def _run(argv: Sequence[str] | None) -> int:
    arguments = _make_parser().parse_args(argv)
    json_file = arguments.json
    if json_file.is_dir() or not json_file.parent.is_dir():
        raise VerifyError(
            f"--json {str(json_file)!r}: expected a file in a folder that exists"
        )
    options = Options(
        source=_sources.find_source(arguments.source),
        package=None,
        compilers=_COMPILERS[arguments.compiler],
        offline=arguments.offline,
    )
    names = [name for name in SUITES if name in arguments.suite]
    tell = functools.partial(print, flush=True)
    results = _verify.run_verify(names, options, arguments.timeout, json_file, tell)
    print(_verify.table(results))
    print(f"Results: {json_file}; full logs: {_verify.logs_of(json_file)}")
    return _verify.exit_status(results)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suites.

    Args:
      argv: the options; None takes those of the process.

    Returns:
      The exit status: 0; 1 where a suite failed or timed out; 2 after one line on
      stderr that says what is wrong with the command.
    """
    try:
        return _run(argv)
    except VerifyError as error:
        print(f"jax_fused_adamw.verify: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        message = "interrupted; the JSON holds the suites that had ended"
        print(f"jax_fused_adamw.verify: {message}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    # As an exception, so that a running command's processes end too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A path in the output may hold what the terminal's encoding does not.
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
