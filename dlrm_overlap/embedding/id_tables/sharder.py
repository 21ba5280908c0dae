"""TorchRec's sharders of pooled and unpooled tables of any id, with another exchange."""

import logging
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.id_tables.mch import OverlapShardedMchEmbeddingBagCollection, has_mch
from dlrm_overlap.embedding.id_tables.module import check_rows, rules_of
from dlrm_overlap.embedding.id_tables.rules import IdRules
from dlrm_overlap.embedding.id_tables.sharded import (
    OverlapShardedManagedCollisionCollection,
    OverlapShardedManagedCollisionEmbeddingBagCollection,
    OverlapShardedManagedCollisionEmbeddingCollection,
)
from dlrm_overlap.embedding.sharder import (
    OverlapEmbeddingBagCollectionSharder,
    OverlapEmbeddingCollectionSharder,
    PooledArguments,
    UnpooledArguments,
)
from dlrm_overlap.embedding.shardings import exchanging_group
from dlrm_overlap.torchrec_private import (
    ManagedCollisionCollectionSharder,
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
)
from dlrm_overlap.torchrec_private.attributes import collision_modules_of

log = logging.getLogger("dlrm_overlap")

FUSED, CACHED = EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.FUSED_UVM_CACHING.value


class _CollectionSharder(ManagedCollisionCollectionSharder):
    def __init__(self, rules: list[IdRules]) -> None:
        super().__init__()
        self._rules = rules

    def shard(self, module: Any, params: dict[str, ParameterSharding], **kwargs: Any) -> Any:  # type: ignore[override]
        return OverlapShardedManagedCollisionCollection(module, params, rules=self._rules, **kwargs)


class _MapsIdsSharder:
    """Shards collections whose ids a map takes; others stay with TorchRec. A subclass is also TorchRec's sharder."""

    _sharded: type[nn.Module]
    _torchrec: type[Any]
    """TorchRec's sharder"""
    _tables_argument: str
    """name of its argument for the sharder of the tables"""
    _is_pooled = False
    """whether it also takes collections with `MCHManagedCollisionModule`, and tables in host memory"""

    def __init__(self, tables: Any, torchrec_tables: Any, codecs: dict[str, QuantizedCommCodecs] | None) -> None:
        """Take the sharders of the tables with our exchange, and with TorchRec's."""
        ours: dict[str, Any] = {self._tables_argument: tables, "qcomm_codecs_registry": codecs}
        super().__init__(**ours)
        self._tables, self._stock = tables, self._torchrec(**ours | {self._tables_argument: torchrec_tables})

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return row-wise alone, on CPUs too, where TorchRec's planner knows none for such tables."""
        return [ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the kernel for rows in their rank's device memory and, for pooled tables on GPUs, for cached rows."""
        return [FUSED, CACHED] if compute_device_type == "cuda" and self._is_pooled else [FUSED]

    def shard(
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Return `module`, sharded by the plan's `params`; a collective.

        Raises:
            InputError: if the ranks do not have the same number of whole buckets, or their plans differ.
        """
        options = self._tables.options
        is_mch = self._is_pooled and has_mch(module)
        caches = BACKENDS[options.backend].stores_to_peers and options.resolved_backward == "push"
        stays = _why_plan_stays(params, env, caches and self._is_pooled and not is_mch)
        found = stays or ([] if is_mch else _rules(module))
        if isinstance(found, str):
            if env.rank == 0:
                log.warning("%s stays with TorchRec: %s", module_fqn or type(module).__name__, found)
            return self._stock.shard(module, params, env, device, module_fqn)
        if is_mch:
            return OverlapShardedMchEmbeddingBagCollection(
                module,
                params,
                ebc_sharder=self._tables,
                mc_sharder=ManagedCollisionCollectionSharder(),
                env=env,
                device=device or torch.device("cuda"),
            )
        kinds: dict[str, Any] = {self._tables_argument: self._tables}
        for rules in found:
            check_rows(rules, exchanging_group(env).size())
            if rules.frozen and options.resolved_backward == "collective":
                raise InputError(
                    f"embedding.backend: {options.backend} updates rows by FBGEMM, which would train the initial rows "
                    f"of tables of any id; take pgas or fused"
                )
        return self._sharded(
            module,
            params,
            **kinds,
            mc_sharder=_CollectionSharder(found),
            env=env,
            device=device or torch.device("cuda"),
        )


class OverlapManagedCollisionEmbeddingBagCollectionSharder(
    _MapsIdsSharder, ManagedCollisionEmbeddingBagCollectionSharder
):
    """TorchRec's sharder of `ManagedCollisionEmbeddingBagCollection`, with our map of ids and our exchange.

    It takes collections whose tables have `HashZchManagedCollisionModule`, and collections whose tables have
    `MCHManagedCollisionModule`. If a table has another module or arguments that the map does not know, the collection
    stays with TorchRec, and the log says why.

    Example:
        DistributedModelParallel(model, sharders=[OverlapManagedCollisionEmbeddingBagCollectionSharder(), ..])

    Args:
        given: see `PooledArguments`.
    """

    _sharded, _tables_argument = OverlapShardedManagedCollisionEmbeddingBagCollection, "ebc_sharder"
    _torchrec = ManagedCollisionEmbeddingBagCollectionSharder
    _is_pooled = True

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        **given: Unpack[PooledArguments],
    ) -> None:
        super().__init__(
            OverlapEmbeddingBagCollectionSharder(fused_params, qcomm_codecs_registry, **given),
            EmbeddingBagCollectionSharder(fused_params, qcomm_codecs_registry),
            qcomm_codecs_registry,
        )


class OverlapManagedCollisionEmbeddingCollectionSharder(_MapsIdsSharder, ManagedCollisionEmbeddingCollectionSharder):
    """TorchRec's sharder of `ManagedCollisionEmbeddingCollection`, with our map of ids and our exchange.

    It takes tables in GPU memory with `HashZchManagedCollisionModule`; other collections stay with TorchRec, and the
    log says why. In steps of `GraphTrainPipeline` each distinct id of a table, its row and the sum of its gradients are
    sent once. Steps of TorchRec's pipelines map ids in the same way, and look up the rows by TorchRec.

    Example:
        DistributedModelParallel(model, sharders=[OverlapManagedCollisionEmbeddingCollectionSharder(), ..])

    Args:
        given: see `UnpooledArguments`.
    """

    _sharded, _tables_argument = OverlapShardedManagedCollisionEmbeddingCollection, "ec_sharder"
    _torchrec = ManagedCollisionEmbeddingCollectionSharder

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        **given: Unpack[UnpooledArguments],
    ) -> None:
        super().__init__(
            OverlapEmbeddingCollectionSharder(fused_params, qcomm_codecs_registry, **given),
            EmbeddingCollectionSharder(fused_params, qcomm_codecs_registry),
            qcomm_codecs_registry,
        )


def _why_plan_stays(params: Mapping[str, ParameterSharding], env: ShardingEnv, caches: bool) -> str | None:
    if isinstance(env, ShardingEnv2D):
        return "2D parallelism"
    kernels = {each.compute_kernel for each in params.values()} - {FUSED, *([CACHED] if caches else [])}
    return f"compute kernel {kernels.pop()}" if kernels else None


def why_ids_stay(module: Any) -> str | None:
    """Return why the ids of an unsharded collection would stay with TorchRec; None if they would not."""
    found = [] if has_mch(module) else _rules(module)
    return found if isinstance(found, str) else None


def _rules(module: Any) -> list[IdRules] | str:
    """Return the rules of a collection's tables, or why its ids stay with TorchRec."""
    modules: Mapping[str, tuple[nn.Module, int, list[str]]] = collision_modules_of(module)
    found = [rules_of(each, name, rows, features) for name, (each, rows, features) in modules.items()]
    if (reason := next((each for each in found if isinstance(each, str)), None)) is not None:
        return reason
    rules = [each for each in found if isinstance(each, IdRules)]
    clocks = {(each.in_hours, each.mixes) for each in rules}
    return rules if len(clocks) == 1 else "one collection has tables of our configuration and of TorchRec's modules"
