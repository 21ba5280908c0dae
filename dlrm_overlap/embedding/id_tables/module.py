"""The module of a table of any id in our own configuration, and the rules of TorchRec's modules."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection

from dlrm_overlap.config import IdTablesConfig, InputError
from dlrm_overlap.embedding.id_tables.rules import EVERY_ID, IdRules
from dlrm_overlap.kernels.ids.id_map import CELLS, SEGMENT, Policy
from dlrm_overlap.torchrec_private.attributes import zch_settings_of
from dlrm_overlap.torchrec_private.mpzch import HashZchEvictionPolicyName, HashZchManagedCollisionModule

_PERCENT_OF_ONE = 1  # of 128 slots, rounded down, is one slot
_MOST_SIGHTINGS = 1 << 30  # a step adds to sums of 32 bits that are below this
_POLICIES = {
    "none": Policy.NONE,
    "lru": Policy.LRU,
    "lfu": Policy.LFU,
    "distance_lfu": Policy.DISTANCE_LFU,
    "ttl": Policy.TTL,
}


class IdTableModule(HashZchManagedCollisionModule):
    """TorchRec's MPZCH module with the rules of section `embedding.id_tables`.

    A bucket has 128 slots, of which one is reserved; its row is the initial row of the bucket's ids. TorchRec alone,
    which trains this module with backend `torchrec`, knows no rules but those of its own module: it admits every id,
    and shares rows where there is no room.

    Args:
        name: of the table.
        rows: a multiple of 128 times the number of ranks.
    """

    def __init__(self, name: str, rows: int, device: torch.device, config: IdTablesConfig, **given: Any) -> None:
        given = {"total_num_buckets": rows // SEGMENT} | given
        super().__init__(
            zch_size=rows,
            device=device,
            name=name,
            max_probe=SEGMENT,
            opt_in_prob=100,
            percent_reserved_slots=_PERCENT_OF_ONE,
            **given,
        )
        self.config = config

    def use_state(self, columns: Mapping[str, torch.Tensor]) -> None:
        """Keep columns of the map's state, each [rows] int32, in state dicts."""
        for name, column in columns.items():
            self.register_buffer(f"_{name}", column.view(-1, 1))

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> "IdTableModule":
        first, end = (row // SEGMENT for row in output_id_range)
        assert self._name is not None
        return IdTableModule(
            self._name,
            output_id_range[1] - output_id_range[0],
            device or self.device,
            self.config,
            total_num_buckets=self._buckets,
            output_segments=self._output_segments,
            start_bucket=first,
            end_bucket=end,
        )


def collection_of_any_id(
    tables: Sequence[EmbeddingBagConfig], config: IdTablesConfig, device: torch.device
) -> ManagedCollisionEmbeddingBagCollection:
    """Return a collection of pooled tables of any id, with the rules of section `embedding.id_tables`."""
    collection = _collision_collection(tables, config, device)
    return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(list(tables), device=device), collection)


def sequences_of_any_id(
    tables: Sequence[EmbeddingConfig], config: IdTablesConfig, device: torch.device
) -> ManagedCollisionEmbeddingCollection:
    """Return a collection of unpooled tables of any id, with the rules of section `embedding.id_tables`."""
    collection = _collision_collection(tables, config, device)
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(list(tables), device=device), collection)


def _collision_collection(
    tables: Sequence[BaseEmbeddingConfig], config: IdTablesConfig, device: torch.device
) -> ManagedCollisionCollection:
    modules: dict[str, Any] = {
        each.name: IdTableModule(each.name, each.num_embeddings, device, config) for each in tables
    }
    return ManagedCollisionCollection(modules, list(tables))


def rules_of(module: torch.nn.Module, name: str, rows: int, features: Sequence[str]) -> IdRules | str:
    """Return the rules of a table's managed collision module, or why its ids stay with TorchRec.

    `rows` are those of the whole table.
    """
    if isinstance(module, IdTableModule):
        config = module.config
        return IdRules(
            name,
            rows,
            rows // SEGMENT,
            reserved=1,
            policy=_POLICIES[config.eviction],
            lifetime=config.ttl_steps or 0,
            admit_after=config.admit_after,
            halve_at=_halve_at(config),
            admit_below=round(config.admit_share * EVERY_ID),
            frozen=True,
            mixes=True,
        )
    if not isinstance(module, HashZchManagedCollisionModule):
        return f"{type(module).__name__} of table {name}"
    given = zch_settings_of(module)
    if len({end - begin for begin, end in pairwise(given.segments)}) > 1:
        return f"buckets of different sizes of table {name}"
    if given.disable_fallback:
        return f"disable_fallback of table {name}, which shortens bags"
    if given.max_probe > SEGMENT:
        return f"max_probe {given.max_probe} of table {name}: the most is {SEGMENT}"
    if given.has_extras:
        return f"custom metadata or TensorBoard of table {name}"
    policy, lifetime, lifetimes, config = Policy.NONE, 0, {}, given.eviction_config
    if given.eviction is not None and config is not None:
        # TorchRec's LRU evicts the oldest of the ids whose time has passed, too.
        policy = Policy.TTL
        if given.eviction == HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION:
            lifetimes = dict(zip(config.features, config.per_feature_ttl or (), strict=True))
        else:
            lifetime = config.single_ttl or 0
    suffix = given.read_only_suffix
    reading = {feature for feature in features if suffix and feature.lower().endswith(suffix)}
    return IdRules(
        name,
        rows,
        module.buckets(),
        reserved=max(0, module.get_reserved_slots_per_bucket()),
        probes=given.max_probe,
        policy=policy,
        lifetime=lifetime,
        lifetimes=lifetimes,
        in_hours=True,
        admit_below=EVERY_ID if given.opt_in_prob == -1 else given.opt_in_prob * EVERY_ID // 100,
        reading=frozenset(reading),
    )


def _halve_at(config: IdTablesConfig) -> int:
    """Return `IdRules.halve_at`."""
    if config.admit_memory is None or config.admit_after == 1:
        return 0
    return min(max(1, round(config.admit_memory * (config.admit_after - 1) * CELLS)), _MOST_SIGHTINGS)


def check_rows(rules: IdRules, ranks: int) -> None:
    """Raise an InputError unless all ranks have the same number of whole buckets."""
    if rules.rows % rules.buckets or rules.buckets % ranks:
        raise InputError(
            f"table {rules.name}: {rules.buckets} buckets of {rules.rows} rows on {ranks} ranks; the rows must be a "
            f"multiple of the buckets, and these a multiple of the ranks"
        )
