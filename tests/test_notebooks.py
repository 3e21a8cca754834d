"""Every notebook runs from top to bottom, and is committed without outputs."""

import os
import pathlib

import pytest

nbformat = pytest.importorskip("nbformat", reason="it comes with the test extra")
nbclient = pytest.importorskip("nbclient", reason="it comes with the test extra")

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    # A reader has one device where the suite forces eight.
    client.execute(env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_committed_without_outputs_and_listed(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    assert f"[{path.name}]({path.name})" in (FOLDER / "README.md").read_text()


def test_there_are_notebooks():
    assert NOTEBOOKS
