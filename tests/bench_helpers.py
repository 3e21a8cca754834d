"""What the tests of the bench share."""

from types import SimpleNamespace

from jax_fused_adamw.bench import _measure, _protocol
from jax_fused_adamw.bench.__main__ import main


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
