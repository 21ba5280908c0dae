"""The state of a cache of rows, and the rows that move between the cache and its table."""

from typing import NamedTuple

import torch

MOST_USES = 3
"""upper limit of a row's reference counter"""
_NEVER = -2  # earlier than any step, so that the first step may replace the slot


class CacheState(NamedTuple):
    """Which of R rows have one of the S slots of a cache, and when they were used.

    P resident rows have the slots from S on, which they keep.

    Example: 3 rows and 2 slots, row 2 in the first slot: `slot_of` -1 -1 0, `row_in` 2 -1.
    """

    slot_of: torch.Tensor
    """[R] int32: -1 without a slot"""
    row_in: torch.Tensor
    """[S] int64: -1 without a row"""
    used_at: torch.Tensor
    """[S + P] int32: last step that used the slot"""
    uses: torch.Tensor
    """[S] int32: reference counters; a use adds 1, up to `MOST_USES`, the clock's hand subtracts 1"""
    named: torch.Tensor
    """[ceil(R / 32)] int32: a bit for each row, 0 between steps"""
    clock: torch.Tensor
    """[3] int64: number of the next step, and the slot at the hand, twice"""

    @classmethod
    def empty(cls, rows: int, slots: int, device: torch.device, resident: torch.Tensor | None = None) -> "CacheState":
        """Return the state of a cache without rows but the resident ones, [P] int64."""
        kept = 0 if resident is None else resident.numel()
        slot_of = torch.full((rows,), -1, dtype=torch.int32, device=device)
        if resident is not None:
            slot_of[resident] = torch.arange(slots, slots + kept, dtype=torch.int32, device=device)
        return cls(
            slot_of,
            torch.full((slots,), -1, dtype=torch.int64, device=device),
            torch.full((slots + kept,), _NEVER, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(-(-rows // 32), dtype=torch.int32, device=device),
            torch.zeros(3, dtype=torch.int64, device=device),
        )


class Swaps(NamedTuple):
    """Rows that move between a cache and its table: entry i stores a slot to a row, then another row to the slot.

    No slot and no row is in two entries.
    """

    slots: torch.Tensor
    leaving: torch.Tensor
    """[n] int64: row that receives the slot's content; negative for none"""
    entering: torch.Tensor
    """[n] int64: row that moves into the slot; negative for none"""
    count: torch.Tensor
    """[1] int64: number of valid entries"""
