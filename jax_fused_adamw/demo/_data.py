"""The text: where it comes from, what is held out, and the order of the batches."""

import dataclasses
import os
import pathlib
import sysconfig
from collections.abc import Iterable, Iterator

import numpy as np

from jax_fused_adamw.demo import DemoError

CONTEXT = 64  # bytes that the model sees
BATCH = 8  # windows in a batch
_MAX_BYTES = 4_000_000
_HELD_OUT_BATCHES = 16
# A tenth is held out, and that tenth must hold one window and its next byte.
_MIN_BYTES = 10 * (CONTEXT + 1)
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, both uint8 arrays."""

    source: str
    num_files: int
    train: np.ndarray
    held_out: np.ndarray


def read_corpus(path: pathlib.Path | None) -> Corpus:
    """Reads at most 4 MB of text; the last tenth of it is held out.

    Args:
      path: a text file, or a folder whose text files are read in sorted order, hidden
        ones excepted. None is the source of Python's standard library.

    Raises:
      DemoError: nothing there, nothing readable, or too little of it.
    """
    if path is None:
        source = "Python's standard library"
        texts = _read_folder(pathlib.Path(sysconfig.get_path("stdlib")), ".py")
    else:
        source = str(path)
        texts = _read_path(path)
    texts = list(_limit(texts))
    data = np.frombuffer(b"".join(texts), np.uint8)
    if len(data) < _MIN_BYTES:
        raise DemoError(
            f"{source!r} holds {len(data)} bytes of readable text, and the demo needs "
            f"{_MIN_BYTES}; name a larger file or folder with --data"
        )
    split = len(data) - len(data) // 10
    return Corpus(source, len(texts), data[:split], data[split:])


def _read_path(path: pathlib.Path) -> Iterator[bytes]:
    try:
        if path.is_dir():
            return _read_folder(path, "")
        if path.is_file():
            return iter([_read_text(path)])
        problem = "neither a file nor a folder" if path.exists() else "does not exist"
    except OSError as error:
        problem = error.strerror
    except ValueError as error:
        problem = str(error)
    raise DemoError(f"--data {str(path)!r}: {problem}")


def _read_folder(root: pathlib.Path, suffix: str) -> Iterator[bytes]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            f for f in folders if f not in _NOT_LIBRARY and not f.startswith(".")
        )
        for name in sorted(names):
            file = pathlib.Path(folder, name)
            if name.startswith(".") or not name.endswith(suffix) or not file.is_file():
                continue
            try:
                yield _read_text(file)
            except (OSError, ValueError):
                continue


def _read_text(file: pathlib.Path) -> bytes:
    with file.open("rb") as opened:
        text = opened.read(_MAX_BYTES)
    if b"\0" in text:
        raise ValueError("is not a text file: it holds NUL bytes")
    return text


def _limit(texts: Iterable[bytes]) -> Iterator[bytes]:
    left = _MAX_BYTES
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def training_batches(corpus: Corpus, steps: int, seed: int) -> np.ndarray:
    """Where the windows of every step start: int64 [steps, batch], from the seed."""
    last = len(corpus.train) - CONTEXT
    return np.random.default_rng(seed).integers(0, last, (steps, BATCH))


def held_out_batches(corpus: Corpus) -> np.ndarray:
    """Where the held-out windows start: int64 [batches, batch], the same every time."""
    last = len(corpus.held_out) - CONTEXT - 1
    starts = np.linspace(0, last, _HELD_OUT_BATCHES * BATCH).astype(int)
    return starts.reshape(_HELD_OUT_BATCHES, BATCH)


def windows(data: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The context and its next byte from each start: uint8 [batch, context + 1]."""
    return data[starts[:, None] + np.arange(CONTEXT + 1)]
