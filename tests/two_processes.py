"""Starts a script in two processes that share a mesh of 2 x 4 CPU devices."""

import os
import pathlib
import socket
import subprocess
import sys


def run_in_two_processes(script: str, folder: pathlib.Path) -> list[str]:
    """Runs ``script ADDRESS INDEX FOLDER`` twice; returns what each has printed."""
    path = pathlib.Path(__file__).with_name(script)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    logs = [folder / f"{index}.log" for index in "01"]
    processes = []
    try:
        for index, log in zip("01", logs, strict=True):
            with open(log, "w") as out:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, path, address, index, folder],
                        env=environment,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=120) == 0, log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [log.read_text() for log in logs]
