"""Explains a model's tables: their owners, and whether each is exchanged and captured, or why not."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardedModule, ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from dlrm_overlap.config import InputError
from dlrm_overlap.dense.flat import unsupported_by_flat
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.id_tables.sharder import why_ids_stay
from dlrm_overlap.embedding.replicated import unsynchronized_weights
from dlrm_overlap.embedding.shardings import cached_shares
from dlrm_overlap.embedding.unsupported import unsupported_by_exchange, unsupported_by_graphs
from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.torchrec_private import (
    CwPooledEmbeddingSharding,
    EmbeddingShardingInfo,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
    TwPooledEmbeddingSharding,
)
from dlrm_overlap.torchrec_private.attributes import environment_of, shardings_by_type, tables_inside
from dlrm_overlap.torchrec_private.check import check_private_api
from dlrm_overlap.train.graphs.dense_step import dense_optimizers, dense_parameters, why_after_the_graph

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_MEMORIES = {
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value: "cached",
    EmbeddingComputeKernel.FUSED_UVM.value: "host",
}
"""compute kernel -> where the rows are; other compute kernels have them on the device"""


class PlannedTable(NamedTuple):
    """A table of a sharded or planned model. A data-parallel table has no shards, and is on all ranks."""

    module: str
    table: str
    sharding: str
    """TorchRec's sharding type"""
    ranks: tuple[int, ...]
    """owner of each shard"""
    rows: int | None
    """number of rows of the largest shard"""
    columns: int | None
    exchanged: bool
    memory: str
    """where the rows are: device, host or cached; FBGEMM caches the rows of a table that is not exchanged"""
    captured: bool
    why_not: str | None
    """why the table is not exchanged or, if it is, why its steps are not captured; None if they are"""


_LOCATION = "module", "table", "sharding", "ranks", "shard", "memory"


@dataclass(frozen=True)
class Explanation:
    """The tables of a model; `str` formats them as a text table."""

    tables: tuple[PlannedTable, ...]
    why_after: str | None = None
    """why the dense optimizer steps after the graphs; empty if it is captured, None if no optimizer was given"""

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [(*_LOCATION, "exchanged", "captured on GPUs", "why not")]
        for each in self.tables:
            shard = f"{each.rows} x {each.columns}" if each.rows else "whole"
            exchanged, captured = ("yes" if so else "no" for so in (each.exchanged, each.captured))
            where = each.module, each.table, each.sharding, _rank_text(each.ranks), shard, each.memory
            lines.append((*where, exchanged, captured, each.why_not or ""))
        if self.why_after is None:
            return format_table(lines)
        optimizer = f"steps after the graphs: {self.why_after}" if self.why_after else "captured"
        return f"{format_table(lines)}\ndense optimizer: {optimizer}"


class _Collection(NamedTuple):
    path: str
    params: Mapping[str, ParameterSharding]
    """TorchRec's sharding of each table, by name"""
    why_not: Mapping[str, str | None]
    uncaptured: str | None
    """why this module prevents the capture of steps; None if it does not"""
    cached: Collection[str] = ()


def explain(
    model: nn.Module,
    plan: ShardingPlan | None = None,
    *,
    fused_params: Mapping[str, Any] | None = None,
    optimizer: Any = None,
) -> Explanation:
    """Return, for each table, its owners and whether it is exchanged and captured, or why not.

    Args:
        model: a sharded model or, if `plan` is given, an unsharded one. For tables sharded by TorchRec, the answer
            assumes our sharder with its defaults.
        plan: the plan of an unsharded model; needs no process group.
        fused_params: parameters that the sharder would get, used only with `plan`.
        optimizer: the model's optimizer, which decides `Explanation.why_after`.

    Raises:
        InputError: if no module is sharded and there is no plan.
    """
    check_private_api()
    collections = list(_sharded(model) if plan is None else _planned(model, plan, fused_params or {}))
    if not collections:
        raise InputError("explain: no module of the model is sharded; give its plan, or shard it first")
    paths = tuple(f"{path}." for path in plan.plan) if plan is not None else ()
    dense = {name: each for name, each in dense_parameters(model).items() if not name.startswith(paths)}
    uncaptured = _first_reason(model, collections, dense) or getattr(model, _WHY_EAGER, None)
    tables = [
        _table(collection, name, sharding, uncaptured)
        for collection in collections
        for name, sharding in collection.params.items()
    ]
    if optimizer is None:
        return Explanation(tuple(tables))
    reasons = {why_after_the_graph(each, dense) for each in dense_optimizers(optimizer)} - {None}
    return Explanation(tuple(tables), ", ".join(sorted(map(str, reasons))))


_WHY_EAGER = "_graph_why_eager"  # attribute of a model


def note_why_eager(model: nn.Module, reason: str) -> None:
    setattr(model, _WHY_EAGER, reason)


def capture_blockers(model: nn.Module) -> str | None:
    """Return why the steps of a sharded model cannot be captured, or None; the same on every rank."""
    if not any(isinstance(module, ExchangingModule) for module in model.modules()):
        return "no module was sharded by OverlapEmbeddingBagCollectionSharder or OverlapEmbeddingCollectionSharder"
    return _first_reason(model, list(_sharded(model)), dense_parameters(model))


def _first_reason(
    model: nn.Module, collections: Sequence[_Collection], dense: Mapping[str, nn.Parameter]
) -> str | None:
    if (reason := next((each.uncaptured for each in collections if each.uncaptured), None)) is not None:
        return reason
    if not any(reason is None for each in collections for reason in each.why_not.values()):
        kinds = {sharding.sharding_type for each in collections for sharding in each.params.values()}
        cure = ", since all are data-parallel; give the planner constraints(model)" if kinds == {_DATA_PARALLEL} else ""
        return f"no table is exchanged{cure}"
    if dense.keys() <= unsynchronized_weights(model).keys():
        return "no dense parameter takes a gradient"
    reason = unsupported_by_flat(dense)
    return reason and f"dense parameter {reason}"


def _table(collection: _Collection, name: str, sharding: ParameterSharding, uncaptured: str | None) -> PlannedTable:
    why_not = collection.why_not[sharding.sharding_type]
    in_step = why_not is None or sharding.sharding_type == _DATA_PARALLEL
    spec: Any = sharding.sharding_spec  # None if the table is data-parallel
    shards = [] if spec is None else [shard for shard in spec.shards if shard.shard_sizes[0]]
    return PlannedTable(
        module=collection.path,
        table=name,
        sharding=sharding.sharding_type,
        ranks=tuple(shard.placement.rank() for shard in shards) or tuple(sharding.ranks or ()),
        rows=max((shard.shard_sizes[0] for shard in shards), default=None),
        columns=max((shard.shard_sizes[1] for shard in shards), default=None),
        exchanged=why_not is None,
        memory="cached" if name in collection.cached else _MEMORIES.get(sharding.compute_kernel, "device"),
        captured=in_step and uncaptured is None,
        why_not=uncaptured if in_step else why_not,
    )


def _sharded(model: nn.Module) -> Iterator[_Collection]:
    """Yield the modules that have tables; if none uses our sharder, described as our sharder would shard them."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, ShardedModule)}
    ours = any(isinstance(module, ExchangingModule) for module in modules.values())
    entries = [module.entry for module in modules.values() if isinstance(module, ExchangingModule)]
    around = {each for entry in entries for each in entry.modules()}
    wrappers: dict[str, nn.Module] = {}  # prefix of names -> module that calls the lookups of the collection inside it
    for name, module in modules.items():
        path = name.replace("_dmp_wrapped_module.", "").removeprefix("module.")  # strip the names of DMP and DDP
        params: Mapping[str, ParameterSharding] = getattr(module, "module_sharding_plan", {})
        wrapper = next((each for prefix, each in wrappers.items() if name.startswith(prefix)), None)
        if wrapper is not None:
            yield _left_alone(path, params, wrapper)
        elif module in around and not isinstance(module, ExchangingModule):
            continue  # maps the ids of the module inside it
        elif isinstance(module, ExchangingModule):
            uncaptured = module.why_ids_are_not_taken()
            yield _Collection(path, params, module.unsupported_reasons, uncaptured, module.cached)
        elif not ours and isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            yield _as_if_exchanged(path, params, shardings_by_type(module), environment_of(module))
        else:
            if not isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection):  # which takes our sharder
                wrappers[f"{name}."] = module
            yield _left_alone(path, params, module)


def _planned(model: nn.Module, plan: ShardingPlan, fused_params: Mapping[str, Any]) -> Iterator[_Collection]:
    modules: dict[str, Any] = plan.plan  # type: ignore[assignment]
    world_size = 1 + max(rank for params in modules.values() for each in params.values() for rank in each.ranks or [0])
    env, device = ShardingEnv.from_local(world_size, 0), torch.device("cpu")
    for path, params in modules.items():
        module, given, uncaptured = model.get_submodule(path), dict(fused_params), None
        if isinstance(module, FeatureProcessedEmbeddingBagCollection):  # whose sharder takes ours
            uncaptured = _left_alone(path, {}, module).uncaptured
            ((name, module),) = [
                item for item in module.named_children() if isinstance(item[1], EmbeddingBagCollection)
            ]
            path = f"{path}.{name}"
        if (
            isinstance(module, ManagedCollisionEmbeddingBagCollection | ManagedCollisionEmbeddingCollection)
            and why_ids_stay(module) is None
        ):
            module = tables_inside(module)
        if type(module) is EmbeddingBagCollection:
            pooled = ShardedEmbeddingBagCollection
            infos = pooled.create_grouped_sharding_infos(module, params, "embedding_bags.", given)
            shardings = {kind: _sharding(kind, tables, env) for kind, tables in infos.items()}
        elif type(module) is EmbeddingCollection:
            unpooled = ShardedEmbeddingCollection
            infos = unpooled.create_grouped_sharding_infos(module, params, given)
            shardings = {
                kind: unpooled.create_embedding_sharding(kind, tables, env, device) for kind, tables in infos.items()
            }
        else:
            yield _left_alone(path, params, module)
            continue
        found = _as_if_exchanged(path, params, shardings, env)
        yield found._replace(uncaptured=uncaptured or found.uncaptured)


def _as_if_exchanged(
    path: str, params: Mapping[str, ParameterSharding], shardings: Mapping[str, Any], env: ShardingEnv
) -> _Collection:
    cached = cached_shares(params)
    why_not = unsupported_by_exchange(shardings, env, torch.float32, cached)
    return _Collection(path, params, why_not, unsupported_by_graphs(shardings, why_not), cached)


def _left_alone(path: str, params: Mapping[str, ParameterSharding], module: nn.Module) -> _Collection:
    kind = type(module).__name__.removeprefix("Sharded")
    why_not: dict[str, str | None] = {each.sharding_type: f"{kind} stays with TorchRec" for each in params.values()}
    tables = f", with tables {', '.join(params)}," if params else ""
    return _Collection(path, params, why_not, f"{kind} {path}{tables} stays with TorchRec, which waits for the host")


def _sharding(kind: str, tables: list[EmbeddingShardingInfo], env: ShardingEnv) -> Any:
    """Return TorchRec's sharding of tables, or a similar one that makes no process group."""
    device = torch.device("cpu")
    if kind == ShardingType.TABLE_ROW_WISE.value:
        return TwPooledEmbeddingSharding(tables, env, device)
    if kind == ShardingType.GRID_SHARD.value:
        return CwPooledEmbeddingSharding(tables, env, device)
    return ShardedEmbeddingBagCollection.create_embedding_bag_sharding(tables, env, device)


def _rank_text(ranks: Sequence[int]) -> str:
    # "3", "2 0", "0-7"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks))
