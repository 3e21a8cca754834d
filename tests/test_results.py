"""The figures in the READMEs are those of the committed results files."""

import pathlib

import pytest

from jax_fused_adamw import _machine
from jax_fused_adamw.bench import _results
from jax_fused_adamw.bench._reports import report_of

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "results").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_readme_shows_the_file(file):
    pages = [ROOT / "README.md", ROOT / "notebooks" / "README.md"]
    text = "\n".join(page.read_text() for page in pages)
    results = _results.read(file)
    assert report_of(results).render_table(results) in text
    assert f"results/{file.name}" in text
    assert results.machine["command"] and results.machine["versions"]["jax"]


def test_there_are_files():
    assert len(FILES) >= 3


def test_no_folder_of_a_machine_in_the_command():
    assert _machine._without_folder("/home/me/out.json") == "out.json"
    for argument in ("-m", "jax_fused_adamw.bench", "out/a.json", "0.5"):
        assert _machine._without_folder(argument) == argument
    for file in FILES:
        assert not any(
            x.startswith("/") for x in _results.read(file).machine["command"]
        )
