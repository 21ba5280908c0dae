"""Records and maps the ids of TorchRec's MCH modules in captured steps.

The flow of data:

1. `encoded` replaces an id by a number whose remainder by the W ranks is the id's owner, as TorchRec's
   division of `input_hash_size` gives it. So the ids are sent like those of tables of W buckets (`IdLayout`).
2. `activate`, during the step before: the owner decodes the ids, appends them to the history after the ids of the
   steps taken, and replaces them by rows. All shapes are fixed, and the host reads nothing.
3. `prepare_step`, on the host, before the step: the appended ids count from now on. If the step ends an interval,
   TorchRec's module evicts ids, evicted rows get their initial values, and the step's ids are mapped again.

So a step's ids are recorded, then ids are evicted, then the step's ids are mapped, as in TorchRec's module; evicted
rows change after the update of the step before. Ids that are sent but never looked up are overwritten in the history.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.backends.ids import ArrivedIds
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.id_tables.id_map import with_values
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.kernels.ids.id_map import Claims
from dlrm_overlap.kernels.reference import joined_words
from dlrm_overlap.torchrec_private.mch import MchMap

_NO_TABLE = -1
_BUFFERS = 2  # of arrived ids, for steps of even and odd number


class ShareOfRange(NamedTuple):
    """How the ids of a table are divided over `ranks` ranks: id i from 0 to size * ranks belongs to rank i // size."""

    size: int
    """ids of a rank; 0 if every id belongs to the rank that is its unsigned remainder by the ranks"""
    ranks: int

    @classmethod
    def of(cls, input_size: int, ranks: int) -> "ShareOfRange":
        return cls(-(-input_size // ranks), ranks)

    @property
    def why_not(self) -> str | None:
        """Why ids cannot be encoded, if so: the numbers would exceed 64 bits."""
        if self.size * self.ranks <= 1 << 63:
            return None
        return f"an input_hash_size that exceeds 2^63 once it is a multiple of {self.ranks} ranks"


def encoded(ids: torch.Tensor, size: torch.Tensor | int, ranks: int) -> torch.Tensor:
    """Return [n] int64 numbers whose unsigned remainders by `ranks` are the owners of ids [n] int64.

    `size` is `ShareOfRange.size`, for each id or for all.
    """
    sizes = torch.as_tensor(size, device=ids.device)
    inside = (ids >= 0) & (ids <= sizes * ranks - 1)  # 2^63 - 1 if the product is 2^63, which wraps
    divisors = sizes.clamp(min=1)
    return torch.where(inside, ids % divisors * ranks + ids // divisors, ids)


def decoded(numbers: torch.Tensor, share: ShareOfRange, rank: int) -> torch.Tensor:
    """Return the ids [n] int64 of rank `rank` that `encoded` gave `numbers` [n] int64."""
    inside = (numbers >= 0) & (numbers <= share.size * share.ranks - 1)
    return torch.where(inside, numbers // share.ranks + rank * share.size, numbers)


class MchSender:
    """Encodes the ids of a batch before they are sent; `shares` are by feature."""

    def __init__(self, shares: Mapping[str, ShareOfRange], ranks: int) -> None:
        self._shares, self._ranks = shares, ranks
        self._sizes: dict[tuple[str, ...], torch.Tensor] = {}

    def __call__(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        ids, keys = features.values().long(), tuple(features.keys())
        if keys not in self._sizes:
            sizes = [self._shares[key].size if key in self._shares else 0 for key in keys]
            self._sizes[keys] = torch.tensor(sizes, device=ids.device)
        sizes = self._sizes[keys][_number_of_key(features, len(keys))]
        return with_values(features, encoded(ids, sizes, self._ranks))


class _Arrived(NamedTuple):
    """The ids of a step, which are mapped again after an eviction."""

    ids: torch.Tensor
    """[n] int64, decoded"""
    tables: torch.Tensor
    """[n] int64: the number of each id's table"""
    rows: torch.Tensor
    """[n] int32: where the step reads rows"""


class MchTables:
    """The `IdTables` of an exchange whose tables have MCH modules.

    Args:
        maps: by table.
        shares: by table.
        evict: gives the rows that TorchRec's modules have evicted their initial values.
        is_training: whether ids that are looked up are recorded.
    """

    waits = True

    def __init__(
        self,
        maps: Mapping[str, MchMap],
        shares: Mapping[str, ShareOfRange],
        exchange: Exchange,
        rank: int,
        evict: Callable[[], None],
        is_training: Callable[[], bool],
    ) -> None:
        self._names, self._maps, self._shares = list(maps), list(maps.values()), [shares[name] for name in maps]
        self._exchange, self._rank, self._evict, self._is_training = exchange, rank, evict, is_training
        self._arrived: dict[int, _Arrived] = {}
        """by the address of the rows, in the order in which the memory was first used"""
        self._tables: tuple[Layout, torch.Tensor] | None = None
        device = exchange.device
        self._recorded = torch.tensor([each.recorded for each in self._maps], device=device)
        """[tables]: ids in each history, of the steps that were taken"""
        self._appended = self._recorded.clone()
        """[tables]: `_recorded` plus the ids of the step whose ids have arrived"""
        self._is_new_step = True

    def activate(self, arrived: ArrivedIds) -> None:
        assert arrived.high is not None, "ids of 64 bits"
        keyed, low = arrived.ids, arrived.ids.values()
        tables = self._tables_of(keyed)[_number_of_key(keyed, len(keyed.keys()))]
        numbers = joined_words(low, arrived.high)
        here = self._memory(low)
        here.tables.copy_(tables)
        here.ids.copy_(numbers)
        for number, share in enumerate(self._shares):
            own = tables == number
            torch.where(own, decoded(numbers, share, self._rank), here.ids, out=here.ids)
            if self._is_training():
                self._append(number, here.ids, own)
        self._map(here)
        self._is_new_step = True

    def _append(self, number: int, ids: torch.Tensor, own: torch.Tensor) -> None:
        found = self._maps[number]
        if not found.is_open:
            found.open_history(lambda: int(own.sum()))
            self._recorded[number] = found.recorded  # in steps of TorchRec's pipelines before
        room = found.history.numel() - 1
        at = (self._recorded[number] + own.cumsum(0) - 1).clamp(max=room)
        at = torch.where(own, at, room)
        found.history.scatter_(0, at, ids)
        if found.times is not None:
            found.times.scatter_(0, at, (found.now + 1).expand_as(at))
        self._appended[number] = (self._recorded[number] + own.sum()).clamp(max=room)

    def _map(self, arrived: _Arrived) -> None:
        """Write the rows of ids, numbered within the shard; ids without a row get the shard's last one."""
        for number, found in enumerate(self._maps):
            at = torch.searchsorted(found.ids[:-1], arrived.ids)
            rows = torch.where(found.ids[at] == arrived.ids, found.rows[at] - found.first_row, found.rows.numel() - 1)
            torch.where(arrived.tables == number, rows.int(), arrived.rows, out=arrived.rows)

    def _memory(self, rows: torch.Tensor) -> _Arrived:
        """Return memory for the ids that become `rows`, the same for the same rows: captured steps write to it."""
        kept = self._arrived.get(rows.data_ptr())
        if kept is None or kept.rows.shape != rows.shape:
            ids, tables = (torch.empty_like(rows, dtype=torch.int64) for _ in range(2))
            self._arrived.pop(rows.data_ptr(), None)
            self._arrived[rows.data_ptr()] = kept = _Arrived(ids, tables, rows)
            for oldest in list(self._arrived)[:-_BUFFERS]:
                del self._arrived[oldest]
        return kept

    def _tables_of(self, arrived: KeyedJaggedTensor) -> torch.Tensor:
        """Return [features] int64: the number of each arrived feature's table, or `_NO_TABLE`."""
        layout = self._exchange.layout
        if self._tables is None or self._tables[0] is not layout or self._tables[1].numel() != len(arrived.keys()):
            numbers = {where: self._names.index(name) for name, where in self._exchange.tables.numbers_of.items()}
            shards = layout.by_owner[self._rank]
            of = [numbers[shard.lookup, shard.table] if shard.buckets else _NO_TABLE for shard in shards]
            of += [_NO_TABLE] * (len(arrived.keys()) - len(of))  # padding
            self._tables = layout, torch.tensor(of, device=self._exchange.device)
        return self._tables[1]

    def follow_clock(self) -> None:
        """Do nothing: the time is the number of steps."""

    def expect(self, is_taken: bool) -> None:
        self._is_new_step |= is_taken

    @torch.no_grad()
    def fill(self, claims: Claims) -> None:
        raise AssertionError("TorchRec's module gives new ids their first rows")

    def prepare_step(self) -> None:
        if not self._is_new_step or not self._is_training():
            return
        self._is_new_step = False
        self._recorded.copy_(self._appended)
        ending = [number for number, each in enumerate(self._maps) if each.begin_step()]
        if not ending:
            return
        recorded: Sequence[int] = self._recorded.tolist()
        for number in ending:
            self._maps[number].evict(recorded[number])
            self._recorded[number] = 0
        self._evict()
        for each in self._arrived.values():
            self._map(each)


def _number_of_key(features: KeyedJaggedTensor, keys: int) -> torch.Tensor:
    """Return [n] int64: the number of each id's feature; ids after all bags count to the last of `keys` features."""
    ends = features.offsets()[features.stride() :: features.stride()].long().contiguous()
    at = torch.arange(features.values().numel(), device=ends.device)
    return torch.searchsorted(ends, at, right=True).clamp(max=keys - 1)
