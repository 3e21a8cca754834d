"""What a result depends on besides the code. Starts no JAX backend."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_PACKAGES = ("jax_fused_adamw", "jax", "jaxlib", "optax", "numpy", "torch")


def describe_process() -> dict[str, Any]:
    """Processor, system, versions, date and command of this process."""
    return {
        "processor": _processor(),
        "num_processors": num_processors(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [*map(_without_folder, [sys.executable, *sys.orig_argv[1:]])],
    }


def _without_folder(argument: str) -> str:
    """Where files lie on this machine is nobody else's business."""
    path = pathlib.Path(argument)
    return path.name if path.is_absolute() else argument


def num_processors() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def version(name: str) -> str | None:
    """Of an installed distribution; None where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def query_gpus(fields: Sequence[str]) -> list[dict[str, str]] | None:
    """One dictionary a GPU; None without ``nvidia-smi`` or where it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [
        dict(zip(fields, map(str.strip, line.split(",")), strict=False))
        for line in done.stdout.splitlines()
        if line.strip()
    ]


def _processor() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
