"""What the package's command lines share: one line for whatever is wrong."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any


class Parser(argparse.ArgumentParser):
    """Tells a wrong option as every other mistake is told, without the usage."""

    def __init__(self, error_type: type[Exception], **options: Any):
        super().__init__(**options, allow_abbrev=False)
        self._error_type = error_type

    def error(self, message: str):
        raise self._error_type(message)


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {low} to {high}, got {text!r}"
            )
        return int(text)

    return convert


def path(text: str) -> pathlib.Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return pathlib.Path(text)
