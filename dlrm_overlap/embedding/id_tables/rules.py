"""Which ids of a table get a row, and which lose it again."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    admit_below: int = EVERY_ID
    """an id gets a slot if a hash of 32 bits is less than this"""
    reading: frozenset[str] = frozenset()
    """features that insert no ids, and whose sightings count as no use"""
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
