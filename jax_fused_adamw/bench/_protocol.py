"""Rows in turns: warm every one, check it, time it, check it again.

Inputs are made and results are read outside of the timed part. Every batch starts from
the same numbers, in buffers of its own, so that one row is in memory at a time and the
result after a batch is known in advance.
"""

import contextlib
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
from tqdm import tqdm

from jax_fused_adamw.bench import BenchError
from jax_fused_adamw.bench._measure import DeviceTime, LostEvents, profile_device
from jax_fused_adamw.bench._problem import Blocked, Stepper
from jax_fused_adamw.bench._results import BLOCKED, FAILED, MEASURED, WRONG


class Expected(Protocol):
    """What a batch must end with.

    Attributes:
      iterations: steps of a batch.
    """

    iterations: int

    def difference(self, row: Any, numbers: Any) -> str | None:
        """Says where a stepper's numbers are wrong; None where they are right."""


class Entry:
    """A row at work: its stepper while it is right, and its samples."""

    def __init__(self, row: Any, num_devices: int):
        self.row, self.num_devices = row, num_devices
        self.stepper: Stepper | None = None
        self.status, self.reason = MEASURED, None
        self.wall_ms: list[float] = []
        self.device: list[DeviceTime] = []

    def stop(self, status: str, reason: str) -> None:
        self.status, self.reason, self.stepper = status, reason, None


def has_profiler() -> bool:
    return jax.default_backend() == "gpu"


def is_profiled(row: Any) -> bool:
    """Whether the row's time is the device's."""
    return has_profiler() and row.profiled


def run_rows(
    name: str,
    problem: Any,
    rows: Sequence[Any],
    expected: Expected,
    samples: int,
    num_devices: int = 1,
) -> list[Entry]:
    """Measures the rows in turns, every other time in the opposite order.

    Args:
      name: shown beside the progress bar.
      problem: what ``row.build`` takes.
      rows: each with a ``name``, ``build``, which returns a ``Stepper``, and
        ``profiled``, whether its device time is wanted too.
      expected: what every batch is held to.
      samples: timed batches of a row.
      num_devices: how many devices, from the first one on, take every step.
    """
    entries = [Entry(row, num_devices) for row in rows]
    num_batches = len(rows) * (samples + 1)
    with tqdm(total=num_batches, desc=name, mininterval=0.5) as progress:
        for entry in _tell(entries, progress):
            _warm(entry, problem, expected)
        for sample in range(samples):
            order = entries if sample % 2 == 0 else entries[::-1]
            for entry in _tell(order, progress):
                if entry.status == MEASURED:
                    _sample(entry, expected)
    return entries


def _tell(entries: Iterable[Entry], progress: tqdm) -> Iterable[Entry]:
    for entry in entries:
        progress.set_postfix_str(entry.row.name, refresh=False)
        yield entry
        progress.update()


def _warm(entry: Entry, problem: Any, expected: Expected) -> None:
    """Compiles the row, takes a batch of steps and checks it."""
    with _stopping(entry):
        entry.stepper = entry.row.build(problem)
        _run_batch(entry, expected)


def _sample(entry: Entry, expected: Expected) -> None:
    """A timed batch; on a GPU another under the profiler, which slows the host."""
    with _stopping(entry):
        seconds = _run_batch(entry, expected)
        if entry.status == MEASURED:
            entry.wall_ms.append(1e3 * seconds / expected.iterations)
            if is_profiled(entry.row):
                _run_batch(entry, expected, profiled=True)


def _run_batch(entry: Entry, expected: Expected, profiled: bool = False) -> float:
    """Seconds of a batch whose numbers came out right; else the entry is stopped."""
    stepper, steps = entry.stepper, expected.iterations
    stepper.start()
    run = functools.partial(stepper.run, steps)
    started = time.perf_counter()
    if profiled:
        try:
            entry.device.append(profile_device(run, steps, entry.num_devices))
        except LostEvents as error:
            entry.reason = str(error)
    else:
        run()
    seconds = time.perf_counter() - started
    difference = expected.difference(entry.row, stepper.numbers())
    stepper.release()
    if difference is not None:
        entry.stop(WRONG, difference)
    return seconds


@contextlib.contextmanager
def _stopping(entry: Entry):
    """Blocked where the row cannot run here (no package, no memory), else failed."""
    try:
        yield
    except Blocked as error:
        entry.stop(BLOCKED, str(error))
    except RuntimeError as error:  # both JAX's and torch's
        line = first_line(error)
        out_of_memory = "RESOURCE_EXHAUSTED" in line or "out of memory" in line
        entry.stop(BLOCKED if out_of_memory else FAILED, line)


@contextlib.contextmanager
def fitting(name: str, advice: str):
    """Tells in one line that not even what the rows share fits into memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise BenchError(f"{name}: {first_line(error)}; {advice}") from error


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
