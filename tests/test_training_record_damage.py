"""Checkpoints that something has damaged: never other data, and one kind of error."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import damage_process
import jax
import numpy as np
import pytest
from damage_process import LIKE, TREE, TX, assert_saved, outcome

import jax_fused_adamw as jfa
from jax_fused_adamw import _record_checks

ocp = pytest.importorskip("orbax.checkpoint", reason="it comes with the test extra")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    with jfa.TrainingRecord(folder, TX) as record:
        for step in (1, 2, 3):
            record.save(step, TREE)
    return folder


def test_b54_each_file_in_turn(good, tmp_path):
    """The newest complete one, never other data, and no good one is deleted."""
    done = subprocess.run(
        [sys.executable, damage_process.__file__, good, tmp_path],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert outcomes.keys() == damage_process.HARMS.keys()
    for found in outcomes.values():
        assert set(found.values()) == {"error", "step 3"}
        for name in ("about/metadata", "tree/manifest.ocdbt"):
            assert found[name] == "error", name


def test_the_error_has_its_cause(good, tmp_path):
    shutil.copytree(good, tmp_path / "run")
    for step in (1, 2):
        shutil.rmtree(tmp_path / "run" / str(step))
    (tmp_path / "run" / "3" / "about" / "metadata").unlink()
    with jfa.TrainingRecord(tmp_path / "run", TX) as record:
        with pytest.raises(ValueError, match="there is no other") as error:
            record.restore(LIKE)
    assert isinstance(error.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("kind", [MemoryError, jax.errors.JaxRuntimeError])
def test_want_of_memory_is_no_damage(kind, good, monkeypatch):
    with jfa.TrainingRecord(good, TX) as record:

        def read(step, **items):
            raise kind("RESOURCE_EXHAUSTED")

        monkeypatch.setattr(record, "_read", read)
        with pytest.raises(kind, match="^RESOURCE_EXHAUSTED$"):
            record.restore(LIKE)


def test_b54_a_copy_is_a_checkpoint(good, tmp_path):
    """A folder that was copied, and one whose steps were copied one by one."""
    shutil.copytree(good, tmp_path / "whole")
    for step in "123":
        shutil.copytree(good / step, tmp_path / "parts" / step)
    for name in ("whole", "parts"):
        assert outcome(tmp_path / name) == "step 3"


def about(folder):
    return folder / "3" / "about" / "metadata"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"leaves"', '"leafes"'),
        ('"options"', '"optionz"'),
        ('"version"', '"Version"'),
        ('"checksums"', '"checksumr"'),
        ("{", "["),
    ],
)
def test_a_record_that_lacks_a_part(old, new, good, tmp_path):
    folder = pathlib.Path(shutil.copytree(good, tmp_path / "run"))
    text = about(folder).read_text()
    about(folder).write_text(text.replace(old, new, 1))
    assert outcome(folder) == "error"


def test_data_that_orbax_takes_for_whole(good, tmp_path, monkeypatch):
    """Each kind of leaf with one bit flipped where no file format could see it."""
    folder = shutil.copytree(good, tmp_path / "run")

    def restored_with(change):
        with jfa.TrainingRecord(folder, TX) as record:
            read = record._read

            def flipped(step, **items):
                found = read(step, **items)
                return found if "about" in items else change(found)

            monkeypatch.setattr(record, "_read", flipped)
            return record.restore(LIKE)

    def with_leaf(tree, keys, value):
        if not keys:
            return value
        return {**tree, keys[0]: with_leaf(tree[keys[0]], keys[1:], value)}

    def leaf_of(tree, keys):
        return leaf_of(tree[keys[0]], keys[1:]) if keys else tree

    assert_saved(restored_with(lambda tree: tree).tree)
    for keys, named in (
        (("params", "w"), r"\['params'\]\['w'\]"),
        (("state", "mu", "b"), r"\['state'\].mu\['b'\]"),
        (("data",), r"\['data'\]"),
        (("epoch",), r"\['epoch'\]"),
    ):

        def change(tree, keys=keys):
            leaf = np.array(leaf_of(tree, keys))
            leaf.reshape(-1).view(np.uint8)[5 % leaf.nbytes] ^= 0x04
            leaf = int(leaf) if keys == ("epoch",) else leaf
            return with_leaf(tree, keys, leaf)

        with pytest.raises(ValueError, match=f"bits of leaf {named} are not"):
            restored_with(change)


def test_a_record_without_checksums_is_restored(good, tmp_path):
    """As the first ones were."""
    folder = pathlib.Path(shutil.copytree(good, tmp_path / "run"))
    told = json.loads(about(folder).read_text())
    checksums = told.pop("checksums")
    about(folder).write_text(json.dumps(told))
    assert outcome(folder) == "step 3"
    del checksums[next(iter(checksums))]
    about(folder).write_text(json.dumps(told | {"checksums": checksums}))
    assert outcome(folder) == "error"


def damaged(good, folder, step):
    shutil.copytree(good, folder)
    (folder / str(step) / "tree" / "_METADATA").unlink()
    return folder


def test_goes_on_from_an_older_step_as_the_error_says(good, tmp_path):
    with jfa.TrainingRecord(damaged(good, tmp_path / "run", 3), TX) as record:
        with pytest.raises(ValueError, match=r"one of \[1, 2\].*manager.delete\(3\)"):
            record.restore(LIKE)
        restored = record.restore(LIKE, step=1).tree
        for step in (3, 2):
            record.manager.delete(step)
        assert record.save(2, restored)
        assert_saved(record.restore(LIKE).tree)


@pytest.mark.parametrize("step, read_only", [(1, False), (2, False), (3, True)])
def test_no_advice_to_delete_what_is_not_in_the_way(step, read_only, good, tmp_path):
    options = ocp.CheckpointManagerOptions(read_only=read_only)
    folder = damaged(good, tmp_path / "run", step)
    with jfa.TrainingRecord(folder, TX, options) as record:
        with pytest.raises(ValueError, match="may have one of") as error:
            record.restore(LIKE, step=step)
    assert "manager.delete" not in str(error.value)


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    """Nothing is left to orbax's threads, which would keep the process for minutes."""
    options = ocp.CheckpointManagerOptions(save_interval_steps=10)
    with jfa.TrainingRecord(tmp_path, TX, options) as record:
        record.save(10, TREE)
        record.wait()
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
        with pytest.raises(PermissionError, match=f"{tmp_path} cannot be written"):
            record.save(20, TREE)
        assert not record.save(11, TREE)  # a step that is left out
        for elsewhere in ("gs://bucket/run", str(tmp_path / "not yet there")):
            _record_checks.check_writable(elsewhere)
        monkeypatch.undo()
        assert record.save(20, TREE)


def test_a_folder_that_orbax_makes(tmp_path):
    options = ocp.CheckpointManagerOptions(create=False)
    with jfa.TrainingRecord(tmp_path / "later", TX, options) as record:
        assert record.save(1, TREE)
