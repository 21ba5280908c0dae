"""Loads a checkpoint into a model, whose tables of any id may have another number of rows.

With another number of buckets an id has another bucket, so a table's content is loaded by id:

    ids      each rank reads all stored ids, piece by piece, and keeps those of the buckets that it holds now
    columns  when the kept ids were last seen, and how often; these decide which ids stay if a bucket is full
    slots    are taken in the order of a hash (`placing.place`), so the result does not depend on the number of ranks
    rows     weights and optimizer states, of the ids that stay, and of the buckets' initial rows

Bucket b of B has the initial row of stored bucket b modulo S. If B is a multiple of S, the ids of b were in that
bucket, so no id's initial row changes. If B or S is a multiple of the other, the sketch of b becomes the greatest
counters of the stored buckets that had ids of b, which `IdMap.rebuild` halves if they add up to too much. Else it
begins empty.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.checkpoint.extents import Cut, Extent, local_extents
from dlrm_overlap.checkpoint.storage import load_extents, read_pieces, read_shapes
from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.embedding.id_tables.counts import id_maps_of
from dlrm_overlap.embedding.id_tables.placing import Known, place
from dlrm_overlap.embedding.id_tables.rules import IdRules
from dlrm_overlap.kernels.ids.id_map import BLANK, EMPTY, unsigned_remainder

log = logging.getLogger("dlrm_overlap")

_COLUMN = re.compile(r"(.*\._managed_collision_collection)\._managed_collision_modules\.(.+)\.(_\w+)")
_ROWS = re.compile(r".*\._embedding_module\.(?:embedding_bags|embeddings)\.(.+)\.weight")
_COLUMNS = {"_hash_zch_identities": "ids", **{f"_{name}": name for name in ("used_at", "times", "counts", "sketch")}}
"""name in a state dict -> column of `MapState`"""


def load_weights(path: Path, model: nn.Module, cuts: Mapping[str, Cut], tick: Callable[[], None]) -> None:
    """Load the weights of a checkpoint into `model`, without optimizer states; a collective.

    `cuts` maps each dense parameter that is divided over ranks to its cut. `tick` is called for each piece. Raises as
    `load_into` does.
    """
    state = model.state_dict()
    load_into(model, path, local_extents(state, {"state": {}}, cuts), tick)
    model.load_state_dict(state)


def load_into(model: nn.Module, path: Path, extents: Sequence[Extent], tick: Callable[[], None] = lambda: None) -> None:
    """Fill `extents`, those of `model` and its optimizers, from the checkpoint `path`; a collective.

    Tables of any id of our own configuration may have another number of rows than in the checkpoint.

    Raises:
        DamagedError: on all ranks, if a file is damaged. Some extents are then filled.
        InputError: on all ranks, if a tensor is missing or has another shape.
    """
    rules = {name: each for id_map in id_maps_of(model) for name, each in id_map.rules.items() if each.frozen}
    tables = _resized(path, extents, rules) if rules else []
    resized = {id(extent) for table in tables for extent in (*table.columns.values(), *table.rows, *table.kept)}
    load_extents(path, [extent for extent in extents if id(extent) not in resized], tick)
    if tables:
        _load_resized(path, tables, tick)


class _Table(NamedTuple):
    """A table of any id that has another number of rows than in the checkpoint."""

    rules: IdRules
    stored_buckets: int
    columns: dict[str, Extent]
    """column of `MapState` -> this rank's part of it, [rows of this rank, 1]"""
    rows: list[Extent]
    """this rank's weights and optimizer states"""
    kept: list[Extent]
    """not loaded, since the new value describes the new number of buckets"""
    clock: torch.Tensor
    """[2] int64, the map's"""

    @property
    def first_row(self) -> int:
        return self.columns["ids"].offsets[0]

    @property
    def local_rows(self) -> int:
        return len(self.columns["ids"].tensor)


def _resized(path: Path, extents: Sequence[Extent], rules: Mapping[str, IdRules]) -> list[_Table]:
    shapes = read_shapes(path)
    found: dict[str, _Table] = {}
    named = {extent.name: extent for extent in extents}
    for extent in extents:
        match = _COLUMN.fullmatch(extent.path[-1])
        if match and match[2] in rules and match[3] == "_hash_zch_identities":
            stored = shapes.get(extent.name, extent.shape)[0]
            if stored != extent.shape[0]:
                of, clock = rules[match[2]], named[f"model.{match[1]}._clock"].tensor
                found[match[2]] = _Table(of, stored // of.size, {}, [], [], clock)
    for extent in extents:
        column, row = (pattern.fullmatch(extent.path[at]) for pattern, at in ((_COLUMN, -1), (_ROWS, _key_of(extent))))
        if column and column[2] in found and extent.path[0] == "model":
            table, name = found[column[2]], _COLUMNS.get(column[3])
            if name is None:
                table.kept.append(extent)
            else:
                table.columns[name] = extent
        elif row and row[1] in found and extent.shape and extent.shape[0] == found[row[1]].rules.rows:
            found[row[1]].rows.append(extent)
    return list(found.values())


def _key_of(extent: Extent) -> int:
    """Return which key of the path names the weight."""
    return -1 if extent.path[0] == "model" else -2


class _Wanted(NamedTuple):
    """Rows of a stored tensor, and where they go; both in the order of `source`."""

    source: torch.Tensor
    """[n] int64, ascending: rows in the checkpoint"""
    target: torch.Tensor
    """[n] int64: rows of `into`"""
    into: torch.Tensor
    folds: bool = False
    """whether a target row occurs several times and keeps the greatest value"""

    def take(self, first: int, piece: torch.Tensor) -> None:
        """Copy what is wanted of a piece, whose first row is `first`."""
        begin, end = torch.searchsorted(self.source, torch.tensor([first, first + len(piece)])).tolist()
        rows = piece[self.source[begin:end] - first].to(self.into.device, self.into.dtype)
        target, into = self.target[begin:end].to(self.into.device), self.into.detach()
        if self.folds:
            into.view(-1).scatter_reduce_(0, target, rows.view(-1), "amax")
        else:
            into[target] = rows.view(len(rows), *into.shape[1:])


def _wanted(source: torch.Tensor, target: torch.Tensor, into: torch.Tensor, folds: bool = False) -> _Wanted:
    order = torch.argsort(source)
    return _Wanted(source[order], target[order], into, folds)


def _read(path: Path, wanted: Iterable[tuple[str, _Wanted]], tick: Callable[[], None]) -> None:
    by_name = dict(wanted)
    read_pieces(
        path,
        {name: each.source for name, each in by_name.items()},
        lambda name, first, piece: by_name[name].take(first, piece),
        tick,
    )


def _load_resized(path: Path, tables: Sequence[_Table], tick: Callable[[], None]) -> None:
    # Which stored ids have a bucket on this rank, and what is known of them.
    mine: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {table.columns["ids"].name: [] for table in tables}
    of = {table.columns["ids"].name: table for table in tables}

    def keep(name: str, first: int, piece: torch.Tensor) -> None:
        ids, table = piece.flatten(), of[name]
        row = unsigned_remainder(ids, table.rules.buckets) * table.rules.size - table.first_row
        here = ((ids != EMPTY) & (row >= 0) & (row < table.local_rows)).nonzero().flatten()
        mine[name].append((ids[here], here + first))

    read_pieces(path, dict.fromkeys(mine), keep, tick)
    # Pieces are read in an order that depends on the ranks that wrote them.
    in_order = [sorted(each, key=lambda part: int(part[1][0]) if len(part[1]) else -1) for each in mine.values()]
    stored = [(torch.cat([part[0] for part in each]), torch.cat([part[1] for part in each])) for each in in_order]
    known: list[dict[str, torch.Tensor]] = []
    wanted: list[tuple[str, _Wanted]] = []
    for table, (_, source) in zip(tables, stored, strict=True):
        known.append({name: torch.empty(len(source), dtype=torch.int32) for name in _known_columns(table)})
        everything = torch.arange(len(source))
        wanted += [(table.columns[name].name, _Wanted(source, everything, into)) for name, into in known[-1].items()]
    _read(path, wanted, tick)
    # The slots of those that stay, and the rows that these and the buckets need.
    wanted, dropped = [], []
    for table, (ids, source), columns in zip(tables, stored, known, strict=True):
        stay, row = place(Known(ids, **columns), table.rules, int(table.clock[0]))
        dropped.append(len(ids) - len(stay))
        local = row - table.first_row
        for name, extent in table.columns.items():
            into = extent.tensor.detach().view(-1)
            into.fill_(BLANK[name])
            if name != "sketch":
                values = ids if name == "ids" else columns[name]
                into[local.to(into.device)] = values[stay].to(into.device)
        origins, initials = _initial_rows(table)
        pairs = torch.cat([source[stay], origins]), torch.cat([local, initials])
        wanted += [(extent.name, _wanted(*pairs, extent.tensor)) for extent in table.rows]
        if "sketch" in table.columns and (cells := _cells(table)) is not None:
            extent = table.columns["sketch"]
            wanted.append((extent.name, _wanted(*cells, extent.tensor, folds=True)))
    _read(path, wanted, tick)
    _report(tables, dropped)


def _known_columns(table: _Table) -> list[str]:
    return [name for name in table.columns if name not in ("ids", "sketch")]


def _buckets_here(table: _Table) -> torch.Tensor:
    """Return [n] int64: the buckets on this rank."""
    first, size = table.first_row, table.rules.size
    return torch.arange(first // size, (first + table.local_rows) // size)


def _initial_rows(table: _Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n] int64 each: stored initial rows, and the rows on this rank that take them."""
    size, reserved = table.rules.size, torch.arange(table.rules.open_slots, table.rules.size)
    buckets = _buckets_here(table)
    source = (buckets % table.stored_buckets)[:, None] * size + reserved
    return source.flatten(), (buckets[:, None] * size + reserved - table.first_row).flatten()


def _cells(table: _Table) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return [n] int64 each: counters of the stored sketch, and those on this rank that take them; None if no sketch.

    A bucket has as many counters as rows, stored in the same way.
    """
    now, before, size = table.rules.buckets, table.stored_buckets, table.rules.size
    if now % before and before % now:
        return None
    buckets, cell = _buckets_here(table), torch.arange(size)
    turns = torch.arange(max(1, before // now))  # several stored buckets become one
    source = (buckets[:, None] % min(now, before) + turns * now)[:, :, None] * size + cell
    target = (buckets[:, None, None] * size + cell - table.first_row).expand_as(source)
    return source.flatten(), target.flatten()


def _report(tables: Sequence[_Table], dropped: Sequence[int]) -> None:
    everywhere = [list(dropped)]
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        everywhere = gathered(list(dropped), dist.group.WORLD)
        if dist.get_rank():
            return
    for table, *counts in zip(tables, *everywhere, strict=True):
        rules, name = table.rules, table.rules.name
        if lost := sum(counts):
            log.warning(
                "checkpoint: table %s: %d ids lost their rows, since %d stored rows became %d and a bucket of %d rows "
                "was full; they are those that embedding.id_tables.eviction evicts first. Raise "
                "embedding.id_tables.rows to keep them",
                name,
                lost,
                table.stored_buckets * rules.size,
                rules.rows,
                rules.size,
            )
        if "sketch" in table.columns and _cells(table) is None:
            log.warning(
                "checkpoint: table %s: sightings for embedding.id_tables.admit_after are counted from 0 again, since "
                "neither of %d stored rows and %d rows is a multiple of the other; set embedding.id_tables.rows to a "
                "multiple to keep them",
                name,
                table.stored_buckets * rules.size,
                rules.rows,
            )
