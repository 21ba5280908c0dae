"""Tables larger than the GPU: rows in host memory, and a cache of them on the GPU.

Ids reach the owners of their rows one step ahead. `activate` then loads each named row into a slot of the cache, and
replaces the ids by slot numbers: lookup, sort and update see a table on the GPU with one row for each slot.

    step i - 1     lookup, update ----
    step i         lookup, update of slots that were loaded during step i - 1 ----
    meanwhile      ids of step i + 1 arrive | find their slots | evict rows to the host, load rows of step i + 1

A row may be evicted if neither step i + 1, which needs its rows, nor step i, whose update may be running, names it;
step i - 1 is done. A row that both name keeps its slot, so step i + 1 reads what step i has written. So slots for the
ids of two steps always suffice, and no cache has fewer unless it has all rows.

Tables of any id map their ids to rows first, and fill the rows of new ids last (`IdSender`):

    ids -> rows (`IdMap.map`) -> slots (`activate`) -> first rows into the slots of new ids (`IdMap.fill`)

So a row is filled where the step looks it up, whatever the row held for an evicted id, there or in host memory. Rows
that are never trained, from which others are filled, are resident: each has a slot of its own beyond those that rows
take in turns. So the update knows these rows by their slots.

Rows are evicted by the CLOCK algorithm. A table of 4 bytes a row in GPU memory maps rows to slots, so the cache is
fully associative. Launch sizes are fixed and nothing is read back, so the kernels are captured with the step. Host
memory is CUDA's managed memory (docs/results/lab.md).
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
    """The cache of the rows of some tables and of their optimizer's states, on one rank.

    Rows are numbered across the tables, 0 .. R - 1. `rows` are the tensors that lookup and update work on, [S + P, D]
    or [S + P]; P resident rows have the last slots. Methods issue work on the current stream.

    Args:
        host_rows: the weights [R, D] and the states, each [R, D] or [R], contiguous.
        slots: S, at least the ids of two steps, or all other rows.
        resident: [P] int64 on the CPU, rows that steps look up, but do not update.

    Raises:
        InputError: if there is no room for the slots.
    """

    def __init__(
        self,
        host_rows: Sequence[torch.Tensor],
        slots: int,
        device: torch.device,
        resident: torch.Tensor | None = None,
    ) -> None:
        self.host_rows, count = list(host_rows), host_rows[0].shape[0]
        kept = 0 if resident is None else resident.numel()
        self.slots = slots = min(slots, count - kept)
        try:
            self._resident = None if resident is None else resident.to(device)
            self.rows = [
                torch.empty((slots + kept, *host.shape[1:]), dtype=host.dtype, device=device) for host in host_rows
            ]
            self._state = CacheState.empty(count, slots, device, self._resident)
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"embedding.memory: no room on {device} for a cache of {slots} of {count} rows, which is the share "
                f"embedding.cache_fraction or two steps' ids; lower the share or the batch, or use more ranks"
            ) from error
        self._read_resident()

    def slots_of(self, first: int, count: int) -> torch.Tensor:
        """Return the slots of rows first .. first + count - 1, [count] int32, a view; -1 of rows without one."""
        return self._state.slot_of[first : first + count]

    def find(self, ids: KeyedJaggedTensor, first_rows: torch.Tensor) -> Swaps:
        """Find slots for the rows of the next step, and write slot numbers over its int32 ids; call `swap` next.

        The step before the previous one must be done.

        Args:
            first_rows: [F + 1] int64, by feature: number of the first row of its table; negative leaves its ids
                unchanged. The last entry is for ids after all bags.
        """
        return find_slots(self._state, ids.values(), ids.offsets(), ids.stride(), first_rows)

    def swap(self, swaps: Swaps) -> None:
        for host, cached in zip(self.host_rows, self.rows, strict=True):
            swap_rows(host, cached, swaps)

    def write_back(self) -> None:
        """Copy all cached rows to host memory; they also stay in the cache."""
        self._move(leaving=self._state.row_in, entering=self._none)

    def read_again(self) -> None:
        self._move(leaving=self._none, entering=self._state.row_in)
        self._read_resident()

    def _read_resident(self) -> None:
        if (rows := self._resident) is not None and rows.numel():
            slots = torch.arange(self.slots, self.slots + rows.numel(), device=rows.device)
            count = torch.full((1,), rows.numel(), dtype=torch.int64, device=rows.device)
            self.swap(Swaps(slots, torch.full_like(rows, -1), rows, count))

    @property
    def _none(self) -> torch.Tensor:
        return torch.full_like(self._state.row_in, -1)

    def _move(self, leaving: torch.Tensor, entering: torch.Tensor) -> None:
        count = torch.full((1,), self.slots, dtype=torch.int64, device=leaving.device)
        self.swap(Swaps(torch.arange(self.slots, device=leaving.device), leaving, entering, count))


def activate(caches: Sequence[tuple[RowCache, torch.Tensor]], ids: KeyedJaggedTensor) -> None:
    """Load the rows of a step into caches, each given with its `first_rows`, and replace the ids by slot numbers.

    All slots are found before any row is moved, because moves last until the next step's matrix products fill the GPU.
    """
    found = [cache.find(ids, first_rows) for cache, first_rows in caches]
    for (cache, _), swaps in zip(caches, found, strict=True):
        cache.swap(swaps)


class CachedTable(NamedTuple):
    host_rows: Sequence[torch.Tensor]
    """weights [rows, D], then states"""
    fraction: float
    """share of the rows that have slots"""
    ids: int
    """largest number of ids of a step"""
    resident: torch.Tensor | None = None
    """rows of the table that are not updated, [p] int64 on the CPU"""


def make_caches(tables: Mapping[Key, CachedTable], device: torch.device) -> list[tuple[RowCache, dict[Key, int]]]:
    """Return the caches of some tables, each with table -> number of the table's first row in the cache.

    Consecutive tables that are adjacent in memory share a cache.
    """
    together: list[list[Key]] = []
    for key, table in tables.items():
        if together and _are_adjacent(tables[together[-1][-1]].host_rows, table.host_rows):
            together[-1].append(key)
        else:
            together.append([key])
    made = []
    for keys in together:
        firsts, total, share, named = dict[Key, int](), 0, 0, 0
        for key in keys:
            count = tables[key].host_rows[0].shape[0]
            firsts[key] = total
            total += count
            share += ceil(count * tables[key].fraction)
            named += min(count, 2 * tables[key].ids)
        joined = [host.as_strided((total, *host.shape[1:]), host.stride()) for host in tables[keys[0]].host_rows]
        residents = [firsts[key] + rows for key in keys if (rows := tables[key].resident) is not None]
        resident = torch.cat(residents) if residents else None
        cache = RowCache(joined, max(1, share, named), device, resident)
        why = f" instead of {share}, since two steps may name as many" if share < named else ""
        if resident is not None:
            why += f"; {resident.numel()} more for rows that are not trained"
        log.info("cache: %d slots for %d rows of %d tables%s", cache.slots, total, len(keys), why)
        made.append((cache, firsts))
    return made


def _are_adjacent(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(
        one.data_ptr() + one.nbytes == other.data_ptr()
        and one.shape[1:] == other.shape[1:]
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in zip(before, after, strict=True)
    )
