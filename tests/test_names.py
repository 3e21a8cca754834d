"""The names of tests, which every worker process must agree on."""

import os
import pathlib
import subprocess
import sys

from conftest import refuse_addresses

UNNAMED = """
import pytest

@pytest.mark.parametrize("made_of", [lambda: 1], ids=str)
def test_it(made_of):
    pass
"""


def test_an_address_in_a_name_stops_the_collection(tmp_path):
    (tmp_path / "test_it.py").write_text(UNNAMED)
    argv = ["-m", "pytest", "--collect-only", "-p", "conftest", "test_it.py"]
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4  # wrong usage
    name = "test_it.py::test_it[<function <lambda> at 0x"
    assert f"names of tests (1, such as {name}" in done.stderr


def test_other_names_do_not():
    refuse_addresses(["test_it.py::test_it[function]", "test_it.py::test_0x7f"])
