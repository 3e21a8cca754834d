"""A record of arrays that no process holds alone."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

pytest.importorskip("orbax.checkpoint", reason="it comes with the test extra")


def test_two_processes_save_and_restore(tmp_path):
    script = pathlib.Path(__file__).with_name("record_process.py")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    logs = [tmp_path / f"{index}.log" for index in "01"]
    processes = []
    try:
        for index, log in zip("01", logs, strict=True):
            with open(log, "w") as out:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, script, address, index, tmp_path / "run"],
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
    for index, log in zip("01", logs, strict=True):
        assert f"restored by {index}" in log.read_text()
