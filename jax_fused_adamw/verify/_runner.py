"""Runs a suite's commands under one time limit and keeps what they write."""

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from jax_fused_adamw.verify._results import FAILED, TIMED_OUT, Command, Stop

_LOG_IN_JSON = 20_000  # characters


class Runner:
    """Runs commands one after the other in ``folder``, which is not the source.

    From there, ``import jax_fused_adamw`` finds the installed package.

    Attributes:
      commands: those that were run.
    """

    def __init__(self, folder: pathlib.Path, log_file: pathlib.Path, timeout: float):
        self.folder = folder
        self.commands: list[Command] = []
        self._log_file = log_file
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        log_file.write_bytes(b"")

    def run(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Returns the exit status.

        Raises:
          Stop: at the time limit, after the command and all its children were killed,
            or where the command cannot be started.
        """
        argv, environment = list(map(str, argv)), dict(environment)
        assignments = [f"{name}={value}" for name, value in environment.items()]
        started = time.monotonic()
        status = None
        with self._log_file.open("ab") as log:
            log.write(f"$ {shlex.join([*assignments, *argv])}\n".encode())
            log.flush()
            try:
                with _own_group(argv, self.folder, environment, log) as process:
                    status = process.wait(max(0.0, self._deadline - started))
            except subprocess.TimeoutExpired:
                reason = f"stopped at the time limit of {self._timeout:g} s (--timeout)"
                raise Stop(TIMED_OUT, reason) from None
            except OSError as error:
                raise Stop(FAILED, f"cannot run {argv[0]}: {error.strerror}") from error
            finally:
                seconds = round(time.monotonic() - started, 3)
                self.commands.append(Command(argv, environment, seconds, status))
        return status

    def log(self) -> str:
        """The end of the log."""
        text = self._log_file.read_text(errors="replace")
        left_out = len(text) - _LOG_IN_JSON
        if left_out <= 0:
            return text
        return f"[{left_out} characters before]\n" + text[-_LOG_IN_JSON:]


@contextlib.contextmanager
def _own_group(argv, folder, environment, log):
    """A process that leads a group; nothing of the group outlives an exception."""
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # Not reaped yet, so that the group's number is still its own.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
