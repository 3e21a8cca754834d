"""A run that is killed while it saves, again and again; ``test_training_record.py``.

Usage: saving_process.py FOLDER KILLS. Each child restores the latest checkpoint,
compares it with an uninterrupted run of that many steps and goes on training and
saving until it is killed; the last one ends by itself. Prints as JSON for each child
the step it has resumed from, how it ended and what it left half-written.
"""

import json
import os
import random
import select
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jax_fused_adamw as jfa

# JAX is imported, and not used, before the fork: a child then starts in no time.
SECONDS = 0.25  # in which a child is killed; a save takes about a tenth of it
OPTIONS = ocp.CheckpointManagerOptions(max_to_keep=3)


def start(tx):
    params = {"w": jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64), "b": jnp.ones(3)}
    return {"params": params, "state": tx.init(params)}


def child(folder: str, ready: int, is_last: bool) -> None:
    inner = jfa.fused_adamw(0.1, mu_dtype=jnp.bfloat16)
    tx = jfa.accumulate(inner, 3)

    @jax.jit
    def train(tree):
        params, state = jfa.step(tx, tree["params"], tree["state"], tree["params"])
        return {"params": params, "state": state}

    with jfa.TrainingRecord(folder, inner, OPTIONS) as record:
        step, tree = 0, start(tx)
        if record.latest_step() is not None:
            step, tree, _ = record.restore(tree)
        expected = start(tx)
        for _ in range(step):
            expected = train(expected)
        leaves = zip(*map(jax.tree.leaves, (tree, expected)), strict=True)
        for got, wanted in leaves:
            assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes(), step
        resumed = step
        while True:
            tree, step = train(tree), step + 1
            record.save(step, tree)
            if step == resumed + 1:  # every child gets on by one step at least
                record.wait()
                os.write(ready, resumed.to_bytes(4, "little"))
                if is_last:
                    break


def run_child(folder: str, seconds: float | None) -> tuple[int, int, list[str]]:
    """The step it resumed from, its wait status and what it has left half-written.

    Seconds of None let it end by itself.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(folder, writer, is_last=seconds is None)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    try:
        is_ready, _, _ = select.select([reader], [], [], 60)
        step = os.read(reader, 4) if is_ready else b""
        if step and seconds is not None:
            time.sleep(seconds)
        if seconds is not None or not step:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(reader)
    half = [name for name in os.listdir(folder) if not name.isdigit()]
    return int.from_bytes(step, "little") if step else -1, status, half


def main() -> None:
    folder, kills = sys.argv[1], int(sys.argv[2])
    moments = random.Random(20)
    ends = [run_child(folder, moments.uniform(0, SECONDS)) for _ in range(kills)]
    ends.append(run_child(folder, None))
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
