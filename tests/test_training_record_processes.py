"""A record of arrays that no process holds alone."""

import pytest
from two_processes import run_in_two_processes

pytest.importorskip("orbax.checkpoint", reason="it comes with the test extra")


def test_two_processes_save_and_restore(tmp_path):
    for index, text in enumerate(run_in_two_processes("record_process.py", tmp_path)):
        assert f"restored by {index}" in text
