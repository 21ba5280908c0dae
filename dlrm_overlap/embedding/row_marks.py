"""Which of this rank's rows were updated since the marks were cleared: a bit for each row, on the rows' device."""

from collections.abc import Mapping

import torch

_WORD = 32
_CHUNK = 1 << 18  # words whose bits are listed at a time


class RowMarks:
    """The marks of several tables; updates set them, also in captured steps, and `clear` clears them.

    Args:
        rows: (lookup, table), both by index -> number of rows of this rank's shard.
    """

    def __init__(self, rows: Mapping[tuple[int, int], int], device: torch.device) -> None:
        self._rows = dict(rows)
        self._first_bits: dict[tuple[int, int], int] = {}
        bits = 0
        for table, count in self._rows.items():
            self._first_bits[table] = bits
            bits += -(-count // _WORD) * _WORD
        self.words = torch.zeros(max(1, bits // _WORD), dtype=torch.int32, device=device)
        """[n] int32: the bits of all tables; those of a table begin with a word"""

    def first_bit(self, table: tuple[int, int]) -> int:
        return self._first_bits[table]

    def words_of(self, table: tuple[int, int]) -> torch.Tensor:
        """Return the words of one table, which share memory with `words`."""
        first = self._first_bits[table] // _WORD
        return self.words[first : first + -(-self._rows[table] // _WORD)]

    def marked(self, table: tuple[int, int]) -> torch.Tensor:
        """Return [n] int64, ascending: the marked rows of a table's shard; waits for the device."""
        words = self.words_of(table)
        bits, found = torch.arange(_WORD, device=words.device), list[torch.Tensor]()
        for at in words.nonzero().flatten().split(_CHUNK):
            is_set = (words[at][:, None] >> bits) & 1 != 0
            found.append((at[:, None] * _WORD + bits)[is_set])
        return torch.cat(found) if found else words.new_empty(0, dtype=torch.int64)

    def clear(self) -> None:
        self.words.zero_()
