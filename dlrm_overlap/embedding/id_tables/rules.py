"""Which ids of a table get a row, and which lose it again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrm_overlap.config import IdTablesConfig, InputError
from dlrm_overlap.kernels.ids.id_map import SEGMENT, Policy

EVERY_ID = 1 << 32


@dataclass(frozen=True)
class IdRules:
    """The rules of a table of any id; see `kernels.ids.id_map` for the layout of its slots."""

    name: str
    rows: int
    """slots on all ranks"""
    buckets: int
    """number of buckets on all ranks, all of the same size"""
    reserved: int = 0
    """slots at the end of each bucket for ids without a slot; 0: these ids share other ids' slots"""
    probes: int = SEGMENT
    """upper limit of the slots in which an id may be"""
    policy: Policy = Policy.LRU
    lifetime: int = 0
    """`Policy.TTL`: time for which an id keeps its slot after it was seen"""
    lifetimes: Mapping[str, int] = field(default_factory=dict)
    """feature -> its own lifetime"""
    in_hours: bool = False
    """whether times are hours; else training steps"""
    admit_after: int = 1
    """sightings after which an id gets a slot; 1 is at once"""
    halve_at: int = 0
    """sum of the counters of sightings in 128 slots at which they are halved; 0: never"""
    admit_below: int = EVERY_ID
    """an id gets a slot if a hash of 32 bits is less than this"""
    reading: frozenset[str] = frozenset()
    """features that insert no ids, and whose sightings do not count as uses"""
    frozen: bool = False
    """whether the rows of reserved slots are not trained: they are the initial rows of their buckets' ids"""
    mixes: bool = False
    """whether ids are replaced by a bijective hash first, so that ids in regular steps spread over all buckets"""

    @property
    def size(self) -> int:
        return self.rows // self.buckets

    @property
    def open_slots(self) -> int:
        return self.size - self.reserved


def for_each_table(key: str, given: int | list[int], tables: int) -> list[int]:
    """Return the value of a key of `embedding.id_tables` for each table; an InputError if it has another number."""
    values = given if isinstance(given, list) else [given] * tables
    if len(values) != tables:
        raise InputError(
            f"embedding.id_tables.{key}: {len(values)} numbers for {tables} tables of any id; give one, or one for each"
        )
    return values


def map_bytes(config: IdTablesConfig) -> int:
    """Return the bytes of GPU memory for each row of a table, by which ids are mapped to rows; see `MapState`."""
    times, counts = config.eviction == "ttl", config.eviction in ("lfu", "distance_lfu")
    return 13 + 4 * times + 4 * counts + 4 * (config.admit_after > 1)


def rows_of_tables(rows: Sequence[int | None], config: IdTablesConfig, ranks: int) -> list[int]:
    """Return the rows of each table; None stands for a table of any id, whose rows `config` gives.

    Raises:
        InputError: if `config` has no rows for such tables, or another number of them.
    """
    names = [index for index, count in enumerate(rows) if count is None]
    if not names:
        return [count for count in rows if count is not None]
    if config.rows is None:
        raise InputError(
            f"embedding.id_tables.rows: null, but {len(names)} tables take any id; give their rows, one number or one "
            f"for each"
        )
    given = for_each_table("rows", config.rows, len(names))
    step = SEGMENT * ranks
    rounded = iter(-(-count // step) * step for count in given)
    return [next(rounded) if count is None else count for count in rows]
