"""The tables of a model, before or after it is sharded: owners, whether each is exchanged and captured, bytes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.reasons import reasons_to_fall_back, why_not_beside_graphs
from dlrm_overlap.embedding.shardings import cached_shares
from dlrm_overlap.embedding.traffic import exchanged_bytes
from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.train.graphs.capturable import (
    dense_parameters,
    first_reason,
    in_model,
    why_left_alone,
    why_not_captured,
)
from dlrm_overlap.train.graphs.optimizers import dense_optimizers, why_after_the_graph

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_MEMORIES = {
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value: "cached",
    EmbeddingComputeKernel.FUSED_UVM.value: "host",
}
"""of tables by compute kernel; all others are on the device"""


class PlannedTable(NamedTuple):
    """A table of a sharded or planned model."""

    module: str
    """path of the module that holds the table"""
    table: str
    sharding: str
    """TorchRec's sharding type"""
    ranks: tuple[int, ...]
    """owners of the shards, in their order; all ranks if it is data-parallel"""
    rows: int | None
    """of the largest shard; None if the table is data-parallel"""
    columns: int | None
    """likewise"""
    exchanged: bool
    memory: str
    """of its rows: device, cached by the exchange or, if it is not exchanged, by FBGEMM, or host"""
    captured: bool
    """whether `GraphTrainPipeline` looks it up in its graphs"""
    sent_bytes: float | None
    """ids, pooled embeddings and gradients that a rank sends in a captured step, the mean of the ranks; None if the
    table is not exchanged, or the sizes of bags were not given"""
    why_not: str | None
    """why it is not exchanged or, if it is, not captured"""


@dataclass(frozen=True)
class Explanation:
    """The tables of a model; prints as a text table."""

    tables: tuple[PlannedTable, ...]
    why_after: str | None = None
    """why the dense optimizer steps after the graphs, empty if it is captured; None if no optimizer was given"""

    def __str__(self) -> str:
        """Return a header, and a line for each table; the memory is left out if it is the device's of all."""
        elsewhere = any(each.memory != "device" for each in self.tables)
        memory = ("memory",) if elsewhere else ()
        lines = [
            ("module", "table", "sharding", "ranks", "shard", *memory, "exchanged", "captured", "sent MB", "why not")
        ]
        for each in self.tables:
            shard = f"{each.rows} x {each.columns}" if each.rows else "whole"
            exchanged, captured = ("yes" if so else "no" for so in (each.exchanged, each.captured))
            sent = "-" if each.sent_bytes is None else f"{each.sent_bytes / 1e6:.3f}"
            place = each.module, each.table, each.sharding, _in_ranges(each.ranks), shard
            memory = (each.memory,) if elsewhere else ()
            lines.append((*place, *memory, exchanged, captured, sent, each.why_not or ""))
        if self.why_after is None:
            return format_table(lines)
        optimizer = f"steps after the graphs: {self.why_after}" if self.why_after else "captured"
        return f"{format_table(lines)}\ndense optimizer: {optimizer}"


def explain(
    model: nn.Module,
    plan: ShardingPlan | None = None,
    *,
    fused_params: Mapping[str, Any] | None = None,
    samples: int | None = None,
    bag_sizes: Mapping[str, float] | None = None,
    distinct: Mapping[str, float] | None = None,
    optimizer: Any = None,
) -> Explanation:
    """Return of each table its owners, whether it is exchanged and captured or why not, and the bytes that travel.

    Args:
        model: sharded by our sharder, or by TorchRec's, in whose place ours with its defaults is meant; or not sharded
            yet, with a plan.
        plan: of a model that is not sharded; no process group is needed.
        fused_params: with a plan, those that the sharder will be given.
        samples: of a rank's batch, for `sent_bytes`.
        bag_sizes: feature -> mean number of ids in a bag, for `sent_bytes`.
        distinct: table of an unpooled collection -> mean number of distinct ids in a rank's batch, for `sent_bytes`; of
            one that is left out all ids travel.
        optimizer: that a `GraphTrainPipeline` will be given, for `why_after`.

    Raises:
        InputError: if no module is sharded and there is no plan, or a feature has no bag size.

    Example:
        print(explain(model, plan, samples=8192, bag_sizes={"user": 1, "clicks": 20}))
    """
    collections = list(_sharded(model) if plan is None else _planned(model, plan, fused_params or {}))
    if not collections:
        raise InputError("explain: no module of the model is sharded; give its plan, or shard it first")
    uncaptured = _why_not_captured(model, collections, plan)
    tables = []
    for collection in collections:
        for name, sharding in collection.params.items():
            why_not, shards = collection.why_not[sharding.sharding_type], _shards(sharding)
            in_step = why_not is None or sharding.sharding_type == _DATA_PARALLEL
            sent = None
            if why_not is None and samples is not None and bag_sizes is not None:
                sent = collection.sent_bytes(name, samples, bag_sizes, (distinct or {}).get(name))
            found = PlannedTable(
                module=collection.path,
                table=name,
                sharding=sharding.sharding_type,
                ranks=tuple(shard.placement.rank() for shard in shards) or tuple(sharding.ranks or ()),
                rows=max((shard.shard_sizes[0] for shard in shards), default=None),
                columns=max((shard.shard_sizes[1] for shard in shards), default=None),
                exchanged=why_not is None,
                memory="cached" if name in collection.cached else _MEMORIES.get(sharding.compute_kernel, "device"),
                captured=in_step and uncaptured is None,
                sent_bytes=sent,
                why_not=uncaptured if in_step else why_not,
            )
            tables.append(found)
    why_after = None
    if optimizer is not None:
        dense = _dense(model, plan)
        reasons = {why_after_the_graph(each, dense) for each in dense_optimizers(optimizer)} - {None}
        why_after = ", ".join(sorted(map(str, reasons)))
    return Explanation(tuple(tables), why_after)


@dataclass(frozen=True)
class _Collection:
    """A module with tables that is sharded, or would be."""

    path: str
    params: Mapping[str, ParameterSharding]
    """by table"""
    why_not: Mapping[str, str | None]
    """sharding type -> why its tables are not exchanged, or None"""
    alone: str | None = None
    """why it keeps the steps from being captured, of a module that our sharder leaves alone"""
    shardings: Mapping[str, Any] = field(default_factory=dict)
    """sharding type -> TorchRec's sharding; none of a module that our sharder leaves alone"""
    configs: Sequence[EmbeddingBagConfig | EmbeddingConfig] = ()
    """of its tables; none likewise"""
    world_size: int = 1
    wire_dtype: torch.dtype = torch.float32
    weighted: bool = False
    cached: Collection[str] = ()
    """tables whose rows the exchange caches, or would"""

    def sent_bytes(
        self, table: str, samples: int, bag_sizes: Mapping[str, float], distinct: float | None = None
    ) -> float:
        """Return the bytes that a rank sends for an exchanged table, the mean of the ranks."""
        (config,) = (config for config in self.configs if config.name == table)
        shards = _shards(self.params[table])
        row_shards = sum(shard.shard_offsets[1] == 0 for shard in shards)
        sent, away = 0.0, (self.world_size - 1) / self.world_size
        for feature in config.feature_names:
            if feature not in bag_sizes:
                raise InputError(f"explain: no bag size of feature {feature}; give the mean number of its ids")
        if isinstance(config, EmbeddingConfig):  # each id that travels is the only one of its slot
            ids = samples * sum(bag_sizes[feature] for feature in config.feature_names)
            ids = ids if distinct is None else min(ids, distinct)
            columns = len(shards) // row_shards
            return ids * exchanged_bytes(1, config.embedding_dim, 1, columns, self.wire_dtype.itemsize) * away
        for feature in config.feature_names:
            per_sample = exchanged_bytes(
                bag_sizes[feature],
                config.embedding_dim,
                row_shards,
                len(shards) // row_shards,
                self.wire_dtype.itemsize,
                id_bytes=12 if self.weighted else 8,  # float32 beside the id
            )
            sent += samples * per_sample * away
        return sent


def _shards(sharding: ParameterSharding) -> list[Any]:
    """Return the shards of a table that have rows; none if it is data-parallel."""
    spec: Any = sharding.sharding_spec
    return [] if spec is None else [shard for shard in spec.shards if shard.shard_sizes[0]]


def _sharded(model: nn.Module) -> Iterator[_Collection]:
    """Yield the modules of a sharded model that have tables."""
    for name, module in model.named_modules():
        if not isinstance(module, ShardedEmbeddingModule):
            continue
        path = in_model(name)
        params = getattr(module, "module_sharding_plan", {})
        if isinstance(module, ShardedEmbeddingBagCollection):
            shardings = dict(zip(module._sharding_types, module._embedding_shardings, strict=True))
            configs, weighted = module._embedding_bag_configs, module._is_weighted
        elif isinstance(module, ShardedEmbeddingCollection):
            shardings, configs, weighted = module._sharding_type_to_sharding, module._embedding_configs, False
        else:
            yield _left_alone(path, params, module)
            continue
        cached: Collection[str] = ()
        if isinstance(module, ExchangingModule):
            why_not, cached = module.why_not_exchanged, module.cached
            wire_dtype = module.exchange.options.wire_dtype if module.exchange is not None else torch.float32
        else:
            wire_dtype = torch.float32
            cached = cached_shares(params)
            why_not = reasons_to_fall_back(shardings, module._env, wire_dtype, cached)
        world_size = module._env.world_size
        yield _Collection(path, params, why_not, None, shardings, configs, world_size, wire_dtype, weighted, cached)


def _planned(model: nn.Module, plan: ShardingPlan, fused_params: Mapping[str, Any]) -> Iterator[_Collection]:
    """Yield the modules of a model that have a plan."""
    modules: dict[str, Any] = plan.plan  # type: ignore[assignment]
    world_size = 1 + max(rank for params in modules.values() for each in params.values() for rank in each.ranks or [0])
    env = ShardingEnv.from_local(world_size, 0)
    for path, params in modules.items():
        module, given = model.get_submodule(path), dict(fused_params)
        cached = cached_shares(params)
        if type(module) is EmbeddingBagCollection:
            make = ShardedEmbeddingBagCollection
            infos = make.create_grouped_sharding_infos(module, params, "embedding_bags.", given)
            shardings = {kind: _sharding(kind, tables, env) for kind, tables in infos.items()}
            configs, weighted = module.embedding_bag_configs(), module.is_weighted()
        elif type(module) is EmbeddingCollection:
            make, device = ShardedEmbeddingCollection, torch.device("cpu")
            infos = make.create_grouped_sharding_infos(module, params, given)
            shardings = {
                kind: make.create_embedding_sharding(kind, tables, env, device) for kind, tables in infos.items()
            }
            configs, weighted = module.embedding_configs(), False
        else:
            yield _left_alone(path, params, module)
            continue
        why_not = reasons_to_fall_back(shardings, env, torch.float32, cached)
        yield _Collection(path, params, why_not, None, shardings, configs, world_size, weighted=weighted, cached=cached)


def _sharding(kind: str, tables: list[EmbeddingShardingInfo], env: ShardingEnv) -> Any:
    """Return TorchRec's sharding of some tables of a module; it need not be able to communicate.

    TorchRec makes process groups for those that are cut by rows within a host. They are exchanged where shards of
    others would be, which are made instead.
    """
    device = torch.device("cpu")
    if kind == ShardingType.TABLE_ROW_WISE.value:
        return TwPooledEmbeddingSharding(tables, env, device)
    if kind == ShardingType.GRID_SHARD.value:
        return CwPooledEmbeddingSharding(tables, env, device)
    return ShardedEmbeddingBagCollection.create_embedding_bag_sharding(tables, env, device)


def _left_alone(path: str, params: Mapping[str, ParameterSharding], module: nn.Module) -> _Collection:
    reasons = {each.sharding_type: f"{type(module).__name__} stays with TorchRec" for each in params.values()}
    return _Collection(path, params, reasons, why_left_alone(path, module, params))


def _why_not_captured(model: nn.Module, collections: Sequence[_Collection], plan: ShardingPlan | None) -> str | None:
    """Return why the steps of a model are not captured, or None; as if sharded by our sharder, if by none of ours."""
    if any(isinstance(module, ExchangingModule) for module in model.modules()):
        return why_not_captured(model)
    exchanges_some = any(reason is None for each in collections for reason in each.why_not.values())
    reasons = (each.alone or why_not_beside_graphs(each.shardings, each.why_not) for each in collections)
    return first_reason(reasons, exchanges_some, _dense(model, plan))


def _dense(model: nn.Module, plan: ShardingPlan | None) -> dict[str, nn.Parameter]:
    """Return the dense parameters that take a gradient, of a model that is sharded or has a plan."""
    tables = tuple(f"{path}." for path in plan.plan) if plan is not None else ()
    return {name: each for name, each in dense_parameters(model).items() if not name.startswith(tables)}


def _in_ranges(ranks: Sequence[int]) -> str:
    """Return ranks as text: "3", "2 0", "0-7"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks))
