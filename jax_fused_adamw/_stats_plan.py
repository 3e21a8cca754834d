"""How many rows of statistics a tree has, and how they are merged."""

import dataclasses
import numbers

FAN_IN = 1024
MAX_ROWS = 4096 * FAN_IN
ROW_ELEMENTS = 3  # sum of squares, max_abs, non-finite count: a row of 12 bytes


@dataclasses.dataclass(frozen=True)
class StatsPlan:
    """The merging of ``rows`` rows of gradient statistics into one report.

    Every chunk of a gradient gives one row. Each merge takes up to ``fan_in`` of the
    rows before it, in order, so that the result depends on the tree alone and not on
    the machine. Up to ``fan_in`` rows are merged at once, the most in three merges.

    Args:
      rows: how many rows there are at first, 1 to 4,194,304.

    Raises:
      ValueError: another number of rows.
      TypeError: not an integer.

    Examples:
      >>> import jax_fused_adamw as jfa
      >>> jfa.StatsPlan(1024).levels
      ()
      >>> jfa.StatsPlan(4_194_304).levels, jfa.StatsPlan(4_194_304).scratch_bytes
      ((4096, 4), 49200)
    """

    rows: int

    def __post_init__(self):
        if not isinstance(self.rows, numbers.Integral) or isinstance(self.rows, bool):
            raise TypeError(f"StatsPlan: rows must be an integer, got {self.rows!r}")
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(
                f"StatsPlan: expected 1 to {MAX_ROWS:,} rows, got {self.rows:,}; a "
                "larger tree takes larger chunks, not more rows"
            )

    @property
    def fan_in(self) -> int:
        """Rows that one merge takes at most.

        Examples:
          >>> import jax_fused_adamw as jfa
          >>> jfa.StatsPlan(5000).fan_in
          1024
        """
        return FAN_IN

    @property
    def levels(self) -> tuple[int, ...]:
        """Row counts after each merge but the last, which leaves the report.

        Examples:
          >>> import jax_fused_adamw as jfa
          >>> jfa.StatsPlan(5000).levels
          (5,)
        """
        levels = []
        rows = self.rows
        while rows > FAN_IN:
            rows = -(-rows // FAN_IN)
            levels.append(rows)
        return tuple(levels)

    @property
    def scratch_elements(self) -> int:
        """Float32 elements for the levels; first rows and the report left out.

        Examples:
          >>> import jax_fused_adamw as jfa
          >>> jfa.StatsPlan(5000).scratch_elements  # 5 rows of 3
          15
        """
        return ROW_ELEMENTS * sum(self.levels)

    @property
    def scratch_bytes(self) -> int:
        """The same in bytes.

        Examples:
          >>> import jax_fused_adamw as jfa
          >>> jfa.StatsPlan(5000).scratch_bytes
          60
        """
        return 4 * self.scratch_elements
