"""What a number depends on besides the code: machine, versions, load, command."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from typing import Any

import jax

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._measure import num_processors

_PACKAGES = ("jax_fused_adamw", "jax", "jaxlib", "optax", "numpy", "torch")
_ENVIRONMENT = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "OMP_WAIT_POLICY")
_GPU_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "utilization.gpu",
)


def describe_machine() -> dict[str, Any]:
    """Everything that does not change while the bench runs, for the JSON."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "processor": _processor(),
        "num_processors": num_processors(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "kernels": str(jfa.kernel_info()),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [pathlib.Path(sys.executable).name, *sys.orig_argv[1:]],
    }


def describe_load() -> dict[str, Any]:
    """What does change: taken before and after the measurement."""
    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return {"load_average": load, "gpus": _query_gpus()}


def _processor() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _query_gpus() -> list[dict[str, str]] | None:
    """One dictionary a GPU; None without ``nvidia-smi`` or where it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = [
        "nvidia-smi",
        f"--query-gpu={','.join(_GPU_FIELDS)}",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [
        dict(zip(_GPU_FIELDS, map(str.strip, line.split(",")), strict=False))
        for line in done.stdout.splitlines()
        if line.strip()
    ]
