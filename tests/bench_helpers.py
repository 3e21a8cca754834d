"""What the tests of the bench share."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jax_fused_adamw.bench import _measure, _protocol
from jax_fused_adamw.bench.__main__ import main
from jax_fused_adamw.bench._workloads import Workload

TOY_UPDATES = 4


def statuses(results):
    return {(model, row.name): row.status for model, row in results.rows()}


def assert_refused(capsys, argv, *words):
    """Status 2, nothing on stdout, and one line on stderr that holds the words."""
    assert main([str(argument) for argument in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jax_fused_adamw.bench: ")
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
    for word in words:
        assert word in captured.err


def reasons(results):
    return {row.name: row.reason for row in results.models[0].rows}


def canned_profile(lines, plane=_measure.GPU_PLANE):
    """As jax.profiler.ProfileData has it; lines: name to durations in ns."""
    return SimpleNamespace(
        planes=[
            SimpleNamespace(name="/host:CPU", lines=[]),
            SimpleNamespace(
                name=plane,
                lines=[
                    SimpleNamespace(
                        name=name,
                        events=[
                            SimpleNamespace(name="kernel", duration_ns=d)
                            for d in durations
                        ],
                    )
                    for name, durations in lines.items()
                ],
            ),
        ]
    )


def on_a_gpu(monkeypatch, num_events):
    """Runs the steps here and reads the device's time from a canned profile."""

    def profile_device(run, steps, num_devices):
        run()
        events = {"Stream #13(Compute)": [2000.0] * num_events(steps)}
        return _measure.read_device_time(canned_profile(events), steps, num_devices)

    monkeypatch.setattr(_protocol, "has_profiler", lambda: True)
    monkeypatch.setattr(_protocol, "profile_device", profile_device)


def toy_workload():
    """The same minibatch four times, so that the loss moves by the updates alone."""

    def batch():
        x = jax.random.normal(jax.random.key(0), (1, 8, 3)).repeat(TOY_UPDATES, axis=0)
        return x, 5.0 + x.sum(-1)

    def loss_fn(params, batch):
        x, y = batch
        return jnp.square(x @ params["w"] + params["b"][0] - y).mean()

    return Workload(
        name="toy",
        step="minibatch update",
        init=lambda: {"w": jnp.zeros(3), "b": jnp.zeros(1)},
        make_batch=batch,
        loss_fn=loss_fn,
        updates=TOY_UPDATES,
    )
