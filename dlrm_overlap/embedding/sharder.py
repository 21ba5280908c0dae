"""The drop-in: TorchRec's sharder with the embedding exchange of a backend. The only file that subclasses TorchRec."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.modules.embedding_configs import PoolingType, data_type_to_dtype
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_overlap.config import EmbeddingConfig, InputError
from dlrm_overlap.embedding.backward import BACKWARDS
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.forward import BACKENDS, ExchangeOptions
from dlrm_overlap.embedding.layout import Layout, Piece
from dlrm_overlap.embedding.row_update import only_fbgemm, unsupported
from dlrm_overlap.embedding.tables import OPTIMIZERS, LocalTables
from dlrm_overlap.kernels.schedule import SCHEDULES

log = logging.getLogger("dlrm_overlap")

_OPTIMIZERS = {name: optimizer for optimizer, name in OPTIMIZERS.items()}
_MOST_COLUMNS = 1024  # of a shard: a program holds whole rows in registers
_WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class OverlapShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """TorchRec's sharded module, whose table-wise and column-wise shards exchange through an `Exchange`.

    What an exchange cannot take falls back, sharding by sharding, to TorchRec's own lookup and output_dist. The output
    holds the exchanged features first, in the order of the unsharded module, then the others in TorchRec's.
    """

    def __init__(self, *args: Any, options: ExchangeOptions, **kwargs: Any) -> None:
        """Take TorchRec's arguments, and how to exchange."""
        super().__init__(*args, **kwargs)
        self._options = options
        self.exchange: Exchange | None = None
        self._set_up_exchange()

    def _set_up_exchange(self) -> None:
        reasons = [self._reason_to_fall_back(sharding) for sharding in self._embedding_shardings]
        for sharding_type, reason in zip(self._sharding_types, reasons, strict=True):
            if reason and self._env.rank == 0:
                log.warning(
                    "backend %s: %s tables stay with TorchRec: %s", self._options.backend, sharding_type, reason
                )
        self._exchanged = [i for i, reason in enumerate(reasons) if reason is None]
        if not self._exchanged:
            return
        group, device = self._env.process_group, self._device
        assert group is not None
        assert device is not None
        shardings: list[Any] = [self._embedding_shardings[i] for i in self._exchanged]
        others: list[Any] = [s for s, reason in zip(self._embedding_shardings, reasons, strict=True) if reason]
        layout = build_layout(shardings, [config.name for config in self._embedding_bag_configs], group.size())
        tables = LocalTables.of([self._lookups[i] for i in self._exchanged])
        self.exchange = Exchange(layout, tables, self._options_for(shardings), group, device)
        self._output_names = layout.names + [name for sharding in others for name in sharding.embedding_names()]
        self._output_dims = layout.dims + [dim for sharding in others for dim in sharding.embedding_dims()]

    def _options_for(self, shardings: Sequence[Any]) -> ExchangeOptions:
        """Return the options, with the collective's backward where the rows' update is FBGEMM's alone."""
        options = self._options
        groups = [
            g for sharding in shardings for groups in sharding._grouped_embedding_configs_per_rank for g in groups
        ]
        reasons = {reason for group in groups if (reason := only_fbgemm(group.fused_params or {}, options.backward))}
        if options.backend == "nccl" or options.backward == "collective" or not reasons:
            return options
        if self._env.rank == 0:
            log.warning("backward %s: gradients go by the collective: %s", options.backward, ", ".join(sorted(reasons)))
        return replace(options, backward="collective")

    def _reason_to_fall_back(self, sharding: Any) -> str | None:
        """Return why a sharding cannot be exchanged, alike on all ranks, or None if it can."""
        if type(sharding) not in (TwPooledEmbeddingSharding, CwPooledEmbeddingSharding):
            return "only table-wise and column-wise shards are exchanged"
        if self._is_weighted:
            return "bags have weights"
        if isinstance(self._env, ShardingEnv2D):
            return "2D parallelism"
        if sharding.qcomm_codecs_registry:
            return "quantised communication: use wire_dtype instead"
        for group in (group for groups in sharding._grouped_embedding_configs_per_rank for group in groups):
            kernels = {table.compute_kernel for table in group.embedding_tables}
            if kernels != {EmbeddingComputeKernel.FUSED}:
                return f"compute kernel {' '.join(sorted(kernel.value for kernel in kernels))}"
            if group.has_feature_processor:
                return "feature processors"
            if max(table.local_cols for table in group.embedding_tables) > _MOST_COLUMNS:
                return f"shards of more than {_MOST_COLUMNS} columns"
            if data_type_to_dtype(group.data_type) not in _WIRE_DTYPES.values():
                return f"rows of type {group.data_type.value}"
            params = group.fused_params or {}
            if params.get("output_dtype", SparseType.FP32) != SparseType.FP32:
                return f"output of type {params['output_dtype']}"
            if (reason := unsupported(params)) is not None:
                return reason
        return None

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Look up and exchange; TorchRec's train pipelines call this with ids that are already at their owners."""
        if self.exchange is None or ctx.variable_batch_per_feature or self.post_lookup_tracker_fn is not None:
            return super().compute_and_output_dist(ctx, input)
        batch_sizes = ctx.sharding_contexts[self._exchanged[0]].batch_size_per_rank  # type: ignore[union-attr]
        awaitables: list[Awaitable[torch.Tensor]] = [
            self.exchange.start([input[i] for i in self._exchanged], batch_sizes)
        ]
        for i, (lookup, output_dist) in enumerate(zip(self._lookups, self._output_dists, strict=True)):
            if i not in self._exchanged:
                awaitables.append(output_dist(lookup(input[i]), ctx.sharding_contexts[i]))
        awaitable = EmbeddingBagCollectionAwaitable(
            awaitables=awaitables,
            embedding_dims=self._output_dims,
            embedding_names=self._output_names,
            module_fqn=self._module_fqn,
        )
        if self._has_mean_pooling_callback:
            assert ctx.divisor is not None
            awaitable.callbacks.append(partial(self._divide, divisor=ctx.divisor))
        return awaitable

    def _divide(self, pooled: KeyedTensor, divisor: torch.Tensor) -> KeyedTensor:
        """Divide by the bags' lengths where row-wise shards hold parts of a mean; TorchRec's order, then ours."""
        divisors = dict(zip(self._embedding_names, divisor.split(self._embedding_dims, dim=1), strict=True))
        values = pooled.values() / torch.cat([divisors[name] for name in pooled.keys()], dim=1)  # noqa: SIM118
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), values)

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        """Reshard as TorchRec does, then lay out the exchange anew."""
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None
        super().update_shards(*args, **kwargs)
        self._set_up_exchange()


def build_layout(shardings: Sequence[Any], tables: Sequence[str], world_size: int) -> Layout:
    """Lay out table-wise and column-wise shardings, the output's features in the order of `tables`.

    All ranks build the same from the plan.
    """
    pieces: list[Piece] = []
    names: dict[str, list[str]] = {}
    for owner in range(world_size):
        group = 0
        for source, sharding in enumerate(shardings):
            position = 0
            for config in sharding._grouped_embedding_configs_per_rank[owner]:
                for index, table in enumerate(config.embedding_tables):
                    names[table.name] = table.embedding_names
                    for name in table.embedding_names:
                        pieces.append(
                            Piece(
                                name=name,
                                owner=owner,
                                source=source,
                                position=position,
                                group=group,
                                table=index,
                                first_column=table.local_metadata.shard_offsets[1],
                                dim=table.local_cols,
                                mean=config.pooling == PoolingType.MEAN,
                                dtype=data_type_to_dtype(config.data_type),
                            )
                        )
                        position += 1
                group += 1
    return Layout(pieces, [name for table in tables for name in names.get(table, [])], world_size)


class OverlapEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder with another exchange: any model that `DistributedModelParallel` takes gets it by this.

    Table-wise and column-wise shards in GPU memory (or the host's, for CPU ranks) with SGD, Adagrad or row-wise Adagrad
    are exchanged; all else stays with TorchRec, which the log says once. Checkpoints are TorchRec's own.

    Example:
        DistributedModelParallel(model, sharders=[OverlapEmbeddingBagCollectionSharder(backend="pgas")])
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        sharded_module_order_overwrite: list[str] | None = None,
        *,
        backend: str = "pgas",
        schedule: str = "auto",
        slice_bags: int = EmbeddingConfig.slice_bags,
        programs_per_sm: int | None = None,
        wire_dtype: str = "fp32",
        wait_timeout_s: float = EmbeddingConfig.wait_timeout_s,
        backward: str = "auto",
    ) -> None:
        """Take TorchRec's arguments, then the configuration's keys of section `embedding`.

        Raises:
            InputError: if a value breaks a rule.
        """
        super().__init__(fused_params, qcomm_codecs_registry, sharded_module_order_overwrite)
        for name, value, known in (
            ("backend", backend, BACKENDS),
            ("schedule", schedule, ("auto", *SCHEDULES)),
            ("wire_dtype", wire_dtype, tuple(_WIRE_DTYPES)),
            ("backward", backward, ("auto", *BACKWARDS)),
        ):
            if value not in known:
                raise InputError(f"{name}: {value!r} is not known; take one of {', '.join(known)}")
        # The configuration's own checks of the other keys.
        EmbeddingConfig(slice_bags=slice_bags, programs_per_sm=programs_per_sm, wait_timeout_s=wait_timeout_s)
        self.options = ExchangeOptions(
            backend,
            schedule,
            slice_bags,
            programs_per_sm,
            _WIRE_DTYPES[wire_dtype],
            wait_timeout_s,
            backward="push" if backward == "auto" else backward,
        )

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> OverlapShardedEmbeddingBagCollection:
        """Shard `module` as the plan's `params` say."""
        return OverlapShardedEmbeddingBagCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
            options=self.options,
        )

    @property
    def sharded_module_type(self) -> type[OverlapShardedEmbeddingBagCollection]:
        """Return the type of what `shard` returns."""
        return OverlapShardedEmbeddingBagCollection


def exchanges(model: nn.Module) -> list[Exchange]:
    """Return the exchanges of a sharded model."""
    modules = (m for m in model.modules() if isinstance(m, OverlapShardedEmbeddingBagCollection))
    return [module.exchange for module in modules if module.exchange is not None]


def build_sharder(config: EmbeddingConfig) -> EmbeddingBagCollectionSharder:
    """Return the sharder of the configured backend, with the table optimizer fused into the backward.

    Ids were checked where they were read; the kernels' own check stays on and stops the run, since FBGEMM's default
    would map a bad id to row 0 and go on.
    """
    fused_params: dict[str, Any] = {
        "optimizer": _OPTIMIZERS[config.optimizer],
        "learning_rate": config.lr,
        "eps": config.eps,
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    if config.backend != "torchrec":
        return OverlapEmbeddingBagCollectionSharder(
            fused_params,
            backend=config.backend,
            schedule=config.schedule,
            slice_bags=config.slice_bags,
            programs_per_sm=config.programs_per_sm,
            wire_dtype=config.wire_dtype,
            wait_timeout_s=config.wait_timeout_s,
            backward=config.backward,
        )
    codecs = None
    if config.wire_dtype != "fp32":
        wire = CommType(config.wire_dtype)
        codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=wire, backward_precision=wire))
    return EmbeddingBagCollectionSharder(fused_params=fused_params, qcomm_codecs_registry=codecs)
