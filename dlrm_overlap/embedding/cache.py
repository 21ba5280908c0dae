"""Tables larger than the GPU: rows at home in the host's memory, and a cache of them on the GPU.

The ids of a step are at the owners of their rows one step ahead. Where they have arrived, `activate` sees that each of
their rows is in a slot of a cache, and replaces the ids by the numbers of the slots. So lookup, sort and update are
those of a table of as many rows as there are slots, in GPU memory, and nothing else knows of the cache.

    step i - 1     lookup, update ----
    step i         lookup, update of slots that were brought in during step i - 1 ----
    beside it      ids of step i + 1 arrive | find their slots | victims to the host, rows of step i + 1 to their slots

Each row that a step names has a slot, or is brought to one, from which a victim is stored to the host first. Rows of
step i + 1 stay because it needs them, those of step i because its update may be under way: a slot may be taken if its
row was named by neither. Rows that both name stay where they are, so the lookup of step i + 1 reads what the update of
step i has written. All of step i - 1 is done, since sends are at most one step ahead. So no step can name more rows
than there is room for if there are slots for two steps' ids, or for all rows of a table where these are fewer; no cache
has less, whatever share of the rows was asked for.

Of the slots that may be taken, those go first whose rows were used least: a hand goes round the slots (the clock
algorithm), and takes those that were not used since it last came by. Each further use, up to three, saves a row from
one more of its visits. Which row goes changes no result.

Where a row's slot is lies in a table of 4 bytes a row, in GPU memory. That is a thirtieth of the rows at D = 32, and
makes the cache fully associative: no two rows stand in each other's way, and slots have no tags to be searched.

Kernels find the slots (`kernels/find_slots.py`) and bring the rows (`kernels/swap_rows.py`), of sizes that the CPU
knows and with nothing read back, so they are captured with the step. FBGEMM's own cache (`lxu_cache_*`) finds the
distinct rows of a step by a sort whose result it sizes on the host, keeps the optimizers' states out of the cache, and
updates rows by FBGEMM's backward alone, so it stays with TorchRec's pipelines.

The host's memory is CUDA's managed memory, FBGEMM's default. Page-locked memory comes in pages of 4 KB, for so many of
which a GPU has no room in its tables of addresses: rows of 512 bytes, drawn from 8 GB, moved at 8.8 GB/s each way at
once, and at 30 in managed memory (H100).
"""

import logging
from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple, TypeVar

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import InputError
from dlrm_overlap.kernels.find_slots import find_slots
from dlrm_overlap.kernels.row_cache import CacheState, Swaps
from dlrm_overlap.kernels.swap_rows import swap_rows

log = logging.getLogger("dlrm_overlap")

Key = TypeVar("Key")


class RowCache:
    """The cache of the rows of some tables, and of their optimizer's states, on one rank.

    Row numbers count the rows of the tables one after the other, 0 .. R - 1. `rows` are the tensors that lookup and
    update work on: [S, D] or [S], as many and of the same types as those at home.
    """

    def __init__(self, homes: Sequence[torch.Tensor], slots: int, device: torch.device) -> None:
        """Make an empty cache.

        Args:
            homes: the weights [R, D] and the states, each [R, D] or [R], contiguous.
            slots: S, at least as many as two steps can name, or R.

        Raises:
            InputError: if there is no room for the slots.
        """
        self.homes, count = list(homes), homes[0].shape[0]
        self.slots = slots = min(slots, count)
        try:
            self.rows = [torch.empty((slots, *home.shape[1:]), dtype=home.dtype, device=device) for home in homes]
            self._state = CacheState.empty(count, slots, device)
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"embedding.memory: no room on {device} for a cache of {slots} of {count} rows, which is the share "
                f"embedding.cache_fraction or two steps' ids; lower the share or the batch, or use more ranks"
            ) from error
        self.brought = torch.zeros(1, dtype=torch.int64, device=device)
        """rows that have come to the cache in all steps so far"""

    def find(self, ids: KeyedJaggedTensor, first_rows: torch.Tensor) -> Swaps:
        """Find slots for the rows of a step, and replace its int32 ids by them; on the current stream.

        Steps come in the order of their calls, and the step before the last is done. `swap` must bring the rows that
        are returned before their slots are read.

        Args:
            first_rows: [F + 1] int64, by feature: the number of the first row of its table; below 0 leaves its ids as
                they are. The last is of ids after all bags.
        """
        swaps = find_slots(self._state, ids.values(), ids.offsets(), ids.stride(), first_rows)
        self.brought.add_(swaps.count)
        return swaps

    def swap(self, swaps: Swaps) -> None:
        """Store rows that leave their slots to their tables, and bring others to the slots; on the current stream."""
        for home, cached in zip(self.homes, self.rows, strict=True):
            swap_rows(home, cached, swaps)

    def write_back(self) -> None:
        """Store all rows of the cache to their tables, and keep them; on the current stream."""
        self._move(leaving=self._state.row_in, entering=self._none)

    def read_again(self) -> None:
        """Read all rows of the cache from their tables, which may have been written to; on the current stream."""
        self._move(leaving=self._none, entering=self._state.row_in)

    @property
    def _none(self) -> torch.Tensor:
        return torch.full_like(self._state.row_in, -1)

    def _move(self, leaving: torch.Tensor, entering: torch.Tensor) -> None:
        count = torch.full((1,), self.slots, dtype=torch.int64, device=leaving.device)
        self.swap(Swaps(torch.arange(self.slots, device=leaving.device), leaving, entering, count))


def activate(caches: Sequence[tuple[RowCache, torch.Tensor]], ids: KeyedJaggedTensor) -> None:
    """Bring the rows of a step to caches, each with its `first_rows`, and replace its ids by slots.

    Slots of all caches are found before rows of any move, since that takes until the step's products have begun, which
    fill the multiprocessors that finding slots would wait for.
    """
    found = [cache.find(ids, first_rows) for cache, first_rows in caches]
    for (cache, _), swaps in zip(caches, found, strict=True):
        cache.swap(swaps)


class HomeTable(NamedTuple):
    """A table that is to be cached."""

    homes: Sequence[torch.Tensor]
    """its weights [rows, D] and its states"""
    fraction: float
    """of the rows, for which there are slots"""
    ids: int
    """the most ids of a step"""


def make_caches(tables: Mapping[Key, HomeTable], device: torch.device) -> list[tuple[RowCache, dict[Key, int]]]:
    """Return the caches of some tables, in whose order those that lie side by side at home share one.

    Returns:
        Each cache, and of each of its tables the first row in the cache's count.
    """
    together: list[list[Key]] = []
    for key, table in tables.items():
        if together and _are_adjacent(tables[together[-1][-1]].homes, table.homes):
            together[-1].append(key)
        else:
            together.append([key])
    made = []
    for keys in together:
        firsts, total, share, named = dict[Key, int](), 0, 0, 0
        for key in keys:
            count = tables[key].homes[0].shape[0]
            firsts[key] = total
            total += count
            share += ceil(count * tables[key].fraction)
            named += min(count, 2 * tables[key].ids)
        homes = [home.as_strided((total, *home.shape[1:]), home.stride()) for home in tables[keys[0]].homes]
        cache = RowCache(homes, max(1, share, named), device)
        why = f", where {share} were asked for, since two steps may name as many" if share < named else ""
        log.info("cache: %d slots for %d rows of %d tables%s", cache.slots, total, len(keys), why)
        made.append((cache, firsts))
    return made


def _are_adjacent(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Return whether the rows of one table, and their states, end where those of another begin."""
    return len(before) == len(after) and all(
        one.data_ptr() + one.nbytes == other.data_ptr()
        and one.shape[1:] == other.shape[1:]
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in zip(before, after, strict=True)
    )
