"""What a row of a table consists of.

    row = | key: 8 bytes | weights: dim x float32 | state: state_width x float32 | base | padding |

Only rows of a replica have a base, which is as wide as the weights (replica_table.py).
Rows are as wide as an even number of float32, so that keys stay aligned. The key stands in the row, not in
the index, so that finding a row and reading it touch the same memory.
"""

from dataclasses import dataclass

KEY_COLUMNS = 2
"""Width of the key, in float32 columns."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Columns of a row, counted in float32.

    Attributes:
        dim: Width of the weights.
        state_width: Width of the optimizer state.
        has_base: Whether rows have a base.
    """

    dim: int
    state_width: int
    has_base: bool = False

    @property
    def weights(self) -> slice:
        """Columns of the weights."""
        return slice(KEY_COLUMNS, KEY_COLUMNS + self.dim)

    @property
    def state(self) -> slice:
        """Columns of the optimizer state."""
        return slice(KEY_COLUMNS + self.dim, KEY_COLUMNS + self.dim + self.state_width)

    @property
    def base_column(self) -> int:
        """Column at which the base begins; 0 without."""
        return KEY_COLUMNS + self.dim + self.state_width if self.has_base else 0

    @property
    def stride(self) -> int:
        """From one row to the next."""
        width = KEY_COLUMNS + self.dim + self.state_width + self.has_base * self.dim
        return width + width % 2
