"""The plan by which rows of statistics become one report."""

import pytest

import jax_fused_adamw as jfa


@pytest.mark.parametrize(
    "rows, levels",
    [
        (1, ()),
        (1024, ()),
        (1025, (2,)),
        (1024 * 1024, (1024,)),
        (1024 * 1024 + 1, (1025, 2)),
        (4_194_304, (4096, 4)),
    ],
)
def test_levels_and_scratch(rows, levels):
    plan = jfa.StatsPlan(rows)
    assert plan.fan_in == 1024
    assert plan.levels == levels
    assert plan.scratch_elements == 3 * sum(levels)
    assert plan.scratch_bytes == 12 * sum(levels)
    assert plan.scratch_elements <= 12_300


@pytest.mark.parametrize("rows", [0, -1, 4_194_305])
def test_rows_out_of_range(rows):
    with pytest.raises(ValueError, match="1 to 4,194,304 rows"):
        jfa.StatsPlan(rows)


@pytest.mark.parametrize("rows", [1.0, True, None, "1"])
def test_rows_must_be_an_integer(rows):
    with pytest.raises(TypeError, match="must be an integer"):
        jfa.StatsPlan(rows)
