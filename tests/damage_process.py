"""Damages each file of a checkpoint in turn; ``test_training_record_damage.py``.

Usage: damage_process.py FOLDER WORK. FOLDER has the record of steps 1, 2 and 3. Prints
as JSON, for each way to damage a file and each file of step 3, what a restore made of
it. A process of its own, since a failed read leaves threads of orbax's behind, which
write their tracebacks at any time.
"""

import json
import os
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_same_bits

import jax_fused_adamw as jfa

TX = jfa.fused_adamw(0.1)


def start():
    # Of NumPy: this process and the one that saves may have different devices.
    w = np.random.default_rng(0).standard_normal((60, 40), np.float32)
    params = {"w": jnp.array(w), "b": jnp.ones(3)}
    return {"params": params, "state": TX.init(params), "epoch": 0, "data": np.ones(9)}


LIKE = start()
TREE = LIKE | {"epoch": 7, "data": np.arange(9.0)}


def files(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def assert_saved(tree):
    assert type(tree["epoch"]) is int
    assert_same_bits(*(jax.tree.map(np.asarray, x) for x in (tree, TREE)))


def cut(path):
    os.truncate(path, max(path.stat().st_size - 1, 0))


def garble(path):
    words = bytearray(path.read_bytes())
    words[len(words) // 2] ^= 0x10
    path.write_bytes(words)


def fill(path):
    path.write_bytes(b"\0" * path.stat().st_size)


def outcome(folder):
    """Restores the latest step, which may be damaged: right data, or the one error."""
    with jfa.TrainingRecord(folder, TX) as record:
        try:
            step, tree, _ = record.restore(LIKE)
        except ValueError as error:
            told = rf"step 3 in {folder} is damaged"
            assert told in str(error) and "one of [1, 2]" in str(error)
            step, tree, _ = record.restore(LIKE, 2)
            assert step == 2
            result = "error"
        else:
            result = f"step {step}"
    assert_saved(tree)
    assert {"1", "2", "3"} <= set(os.listdir(folder))
    return result


HARMS = {"cut": cut, "garble": garble, "fill": fill, "remove": os.remove}


def main() -> None:
    good, work = map(pathlib.Path, sys.argv[1:])
    outcomes = {}
    for harm in HARMS:
        outcomes[harm] = {}
        for number, path in enumerate(files(good / "3")):
            if not path.stat().st_size:
                continue
            folder = work / f"{harm}{number}"
            shutil.copytree(good, folder)
            HARMS[harm](folder / path.relative_to(good))
            name = path.relative_to(good / "3").as_posix()
            outcomes[harm][name] = outcome(folder)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
