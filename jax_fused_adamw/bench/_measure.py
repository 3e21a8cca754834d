"""Device time from the profiler, and the limit: how fast this machine copies."""

import concurrent.futures
import dataclasses
import glob
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fused_adamw._machine import num_processors

_PLANE = "/device:GPU:{}"
GPU_PLANE = _PLANE.format(0)
# NCCL's kernels, and those that XLA has of its own for small messages.
_COMMUNICATION = re.compile(
    "nccl|all_?reduce|all_?gather|reduce_?scatter|multi_?gpu", re.IGNORECASE
)
_CPU_COPY_BYTES = 1 << 28  # beyond any cache but the very largest
_GPU_COPY_BYTES = 1 << 30
_COPIES = 20


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """What a device did in a step; of several, the one that was busy the longest.

    Attributes:
      us: durations of its events added up, gaps between them left out.
      launches: events, which are kernels and copies.
      communication_us: of ``us``, the kernels that talk to other devices, with the
        time in which they wait for those.
      median_us: the median over several devices; None of a single one.
    """

    us: float
    launches: int
    communication_us: float = 0.0
    median_us: float | None = None


class LostEvents(Exception):
    """The profile is not that of equal steps, so its sum is not their time."""


def read_device_time(profile: Any, steps: int, num_devices: int = 1) -> DeviceTime:
    """Adds up the stream events of each GPU in a ``jax.profiler.ProfileData``.

    Args:
      profile: of ``steps`` equal steps and nothing else.
      steps: how many.
      num_devices: how many GPUs took them, from the first one on.

    Raises:
      LostEvents: no event, or a number of them that the steps cannot share equally.
    """
    times = [_read_plane(profile, _PLANE.format(i), steps) for i in range(num_devices)]
    slowest = max(times, key=lambda time: time.us)
    if num_devices == 1:
        return slowest
    median_us = statistics.median(time.us for time in times)
    return dataclasses.replace(slowest, median_us=median_us)


def _read_plane(profile: Any, plane_name: str, steps: int) -> DeviceTime:
    events = [
        event
        for plane in profile.planes
        if plane.name == plane_name
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    if not events or len(events) % steps:
        raise LostEvents(f"the profiler saw {len(events)} events in {steps} steps")

    def us_of_a_step(events: list[Any]) -> float:
        return sum(event.duration_ns for event in events) / steps / 1e3

    communication = [event for event in events if _COMMUNICATION.search(event.name)]
    return DeviceTime(
        us_of_a_step(events), len(events) // steps, us_of_a_step(communication)
    )


def profile_device(
    run: Callable[[], None], steps: int, num_devices: int = 1
) -> DeviceTime:
    """Runs ``run()``, which takes ``steps`` steps and waits, under the profiler."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
        return read_device_time(profile, steps, num_devices)


@dataclasses.dataclass(frozen=True)
class Limit:
    """Copy bandwidth of the machine.

    Attributes:
      gb_per_s: 10^9 bytes a second, read and written bytes both counted.
      method: how it was measured.
    """

    gb_per_s: float
    method: str


def measure_limit(platform: str) -> Limit:
    """The fastest copy this machine shows, in the same process as the rows."""
    if platform == "gpu":
        return _gpu_limit()
    return max(_xla_limit(), _numpy_limit(), key=lambda limit: limit.gb_per_s)


def _scale(x: jax.Array) -> jax.Array:
    return x * jnp.float32(1.0000001)  # XLA would drop a factor of 1


def _gpu_limit() -> Limit:
    x = jnp.ones(_GPU_COPY_BYTES // 4, jnp.float32)
    scale = jax.jit(_scale)

    def run():
        for _ in range(_COPIES):
            y = scale(x)
        y.block_until_ready()

    run()
    us = statistics.median(profile_device(run, _COPIES).us for _ in range(3))
    method = f"x * 1.0000001 of {x.nbytes >> 20} MiB, device time by the profiler"
    return Limit(2 * x.nbytes / us / 1e3, method)


def _xla_limit() -> Limit:
    # In place, as the optimizer works: new memory would cost page faults.
    scale = jax.jit(_scale, donate_argnums=0)
    x = jax.block_until_ready(jnp.ones(_CPU_COPY_BYTES // 4, jnp.float32))
    num_bytes = x.nbytes
    best = float("inf")
    for _ in range(_COPIES // 2):
        started = time.perf_counter()
        x = jax.block_until_ready(scale(x))
        best = min(best, time.perf_counter() - started)
    method = (
        f"x * 1.0000001 of {num_bytes >> 20} MiB by XLA, the best of {_COPIES // 2}"
    )
    return Limit(2 * num_bytes / best / 1e9, method)


def _numpy_limit() -> Limit:
    threads = num_processors()
    sources = np.array_split(np.ones(_CPU_COPY_BYTES // 4, np.float32), threads)
    copies = [np.zeros_like(source) for source in sources]
    best = float("inf")
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(_COPIES // 2):
            started = time.perf_counter()
            list(pool.map(np.copyto, copies, sources))
            best = min(best, time.perf_counter() - started)
    method = (
        f"numpy copy of {_CPU_COPY_BYTES >> 20} MiB in {threads} threads, the best of "
        f"{_COPIES // 2}"
    )
    return Limit(2 * _CPU_COPY_BYTES / best / 1e9, method)


def percent_of_limit(num_bytes: int, seconds: float, limit: Limit) -> float:
    """How much of the copy bandwidth a step that moves ``num_bytes`` reaches.

    More than 100 means that part of them stayed in a cache.
    """
    return 100 * num_bytes / limit.gb_per_s / 1e9 / seconds
