"""The contenders of `bench drift`: ways to give ids their rows. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Design:
    """How the tables whose `data.tables.ids` are any get their rows."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    """keys of the configuration, and their values"""
    hashed: bool = False
    """whether an id's row is a hash of it, see `data.tables.hashed_rows`"""
    rows: Literal[1, 2, "unlimited"] = 1
    """rows of a table, in multiples of the configured rows; unlimited: twice its distinct ids"""


_OURS = {"embedding.backend": "pgas"}
_EVICTION = "embedding.id_tables.eviction"
_ADMIT_2 = _OURS | {_EVICTION: "lru", "embedding.id_tables.admit_after": 2}

DRIFT_CONTENDERS: Mapping[str, Design] = {
    "modulus": Design(_OURS, hashed=True),
    "modulus_twice": Design(_OURS, hashed=True, rows=2),
    "mpzch": Design({"embedding.backend": "torchrec", "train.pipeline": "torchrec"}),
    "any": Design(_OURS | {_EVICTION: "lru"}),
    "any_lfu": Design(_OURS | {_EVICTION: "lfu"}),
    "any_distance_lfu": Design(_OURS | {_EVICTION: "distance_lfu"}),
    "any_admit_2": Design(_ADMIT_2),
    "any_admit_2_forever": Design(_ADMIT_2 | {"embedding.id_tables.admit_memory": None}),
    "unlimited": Design(_OURS | {_EVICTION: "none"}, rows="unlimited"),
}
DRIFT_USUAL = tuple(name for name in DRIFT_CONTENDERS if name != "mpzch")
"""the default of `bench drift`; TorchRec's MPZCH needs GPUs"""
