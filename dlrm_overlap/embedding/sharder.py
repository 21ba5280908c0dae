"""The drop-in: TorchRec's sharder with the embedding exchange of a backend."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypedDict, Unpack, get_type_hints

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import get_default_sharders as get_torchrec_sharders
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
)

from dlrm_overlap.backends import BACKENDS, EXCHANGED
from dlrm_overlap.config import EmbeddingConfig, InputError, NonNegativeInt, PositiveInt, Seconds, SliceBags, ValueRule
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.options import PUTS, WIRE_DTYPES, ExchangeOptions
from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection
from dlrm_overlap.embedding.sharded_unpooled import OverlapShardedEmbeddingCollection
from dlrm_overlap.embedding.shardings import cached_shares, exchanging_group
from dlrm_overlap.embedding.tables import OPTIMIZERS
from dlrm_overlap.embedding.unsupported import POOLED_OPS, UNPOOLED_OPS, precisions
from dlrm_overlap.kernels.schedule import SCHEDULES
from dlrm_overlap.launching.parsing import convert, new_name, new_value, words_of

_OPTIMIZERS = {name: optimizer for optimizer, name in OPTIMIZERS.items()}


def _one_of(known: Collection[str]) -> ValueRule:
    return ValueRule(f"one of {', '.join(map(repr, known))}", known.__contains__)


_STORING = [name for name, backend in BACKENDS.items() if backend.stores_to_peers]
_Precision = Annotated[str, _one_of(WIRE_DTYPES)]


class _BothArguments(TypedDict, total=False):
    schedule: Annotated[str, _one_of(SCHEDULES)]
    slice_bags: SliceBags
    programs_per_sm: PositiveInt | None
    wire_dtype: _Precision
    wait_timeout_s: Seconds
    nodes: PositiveInt | Literal["auto"]
    output_dtype: _Precision
    """type of the output of exchanged tables: "fp32", the default, or that of the wire; of unpooled tables any of its
    types where the wire's is fp32. `output_dtype` in `fused_params` sets both, and the type of the tables that stay
    with TorchRec"""


class PooledArguments(_BothArguments, total=False):
    """Arguments of the sharder of pooled tables: the configuration's keys of section `embedding`, and the output's.

    Raises:
        InputError: by the sharder, if a value breaks a rule.
    """

    backend: Annotated[str, _one_of(EXCHANGED)]
    """pgas, the default, fused or nccl"""
    put: Annotated[str, _one_of(PUTS)]
    internode: Annotated[str, _one_of(("messages", "puts"))]
    aggregate_bytes: NonNegativeInt
    copy_output: bool
    """return a copy of the pooled embeddings, the default. False returns the window into which peers have stored them,
    and saves the copy; drop all references to it before the module's next forward, which raises `BufferInUseError`
    otherwise"""
    output_order: Annotated[str, _one_of(("plan", "model"))]
    """order of the features in the output: "plan", the default, as under TorchRec, or as in the unsharded module"""
    leading_columns: NonNegativeInt
    """number of columns in front of the pooled embeddings in each row of a window, under `copy_output` False; the
    module's `leading_columns` is 0 where there are none"""


class UnpooledArguments(_BothArguments, total=False):
    """Arguments of the sharder of unpooled tables, likewise."""

    backend: Annotated[str, _one_of(_STORING)]
    """pgas, the default, or fused"""


class _ExchangingSharder:
    """What both sharders do beside TorchRec's."""

    _sharded: type[ExchangingModule[Any]]
    """of the modules that `shard` returns"""

    def _take(self, given: Mapping[str, Any], kinds: type, asked: set[str], **defaults: Any) -> dict[str, Any]:
        """Check arguments of `kinds`, a TypedDict, make `options` of them, and return those that have `defaults`.

        One precision that codecs have `asked` for becomes the wire's.

        Raises:
            TypeError: if an argument has no such name.
            InputError: if a value breaks a rule.
        """
        known = get_type_hints(kinds, include_extras=True)
        given = {new_name(f"embedding.{name}").removeprefix("embedding."): value for name, value in given.items()}
        given = {name: new_value(f"embedding.{name}", value) for name, value in given.items()}
        if unknown := sorted(given.keys() - known):
            raise TypeError(f"sharder: unexpected arguments {', '.join(unknown)}")
        checked = dict[str, Any]()
        for name, value in given.items():
            try:  # NumPy's numbers have a Python number as item
                checked[name] = convert(known[name], value.item() if hasattr(value, "item") else value)
            except ValueError:
                raise InputError(f"{name}: {value!r} is not {words_of(known[name])}") from None
        wire, output = checked.pop("wire_dtype", "fp32"), checked.pop("output_dtype", "fp32")
        if wire != "fp32" and asked and asked != {wire}:
            found = " and ".join(sorted(asked))
            raise InputError(f"wire_dtype: {wire!r}, but qcomm_codecs_registry has {found}; give one of the two")
        if len(asked) == 1 and asked <= WIRE_DTYPES.keys():
            (wire,) = asked
        # Rows of unpooled tables are narrowed where they have arrived.
        if output not in ("fp32", wire) and (kinds is PooledArguments or wire != "fp32"):
            raise InputError(f"output_dtype: {output!r}, but the wire's type is {wire}; take fp32 or that")
        own = {name: checked.pop(name, default) for name, default in defaults.items()}
        self.options = ExchangeOptions(wire_dtype=WIRE_DTYPES[wire], output_dtype=WIRE_DTYPES[output], **checked)
        return own

    def shard(
        self: Any,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Return `module`, sharded by the plan's `params`; a collective.

        Tables that the exchange caches are in the host's memory. Where it caches none, FBGEMM does, and they stay with
        TorchRec.

        Raises:
            InputError: on every rank, if ranks have unlike plans.
        """
        require_same_plan(params, env)
        options = self.options
        # The replicas of 2D parallelism are averaged where FBGEMM keeps the rows.
        caches = BACKENDS[options.backend].stores_to_peers and options.resolved_backward == "push"
        cached = cached_shares(params) if caches and not isinstance(env, ShardingEnv2D) else {}
        kernel = EmbeddingComputeKernel.FUSED_UVM.value
        at_home = {name: replace(params[name], compute_kernel=kernel, cache_params=None) for name in cached}
        return self._sharded(
            module,
            params | at_home,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            options=options,
            cached=cached,
            **self._of_module,
        )

    @property
    def sharded_module_type(self) -> Any:
        """Return the type of the modules that `shard` returns."""
        return self._sharded


class OverlapEmbeddingBagCollectionSharder(_ExchangingSharder, EmbeddingBagCollectionSharder):
    """TorchRec's sharder with another exchange, for any model that `DistributedModelParallel` takes.

    Exchanged are shards of every type but data-parallel, in the memory of their rank's device or cached there, with
    SGD, Adagrad, Adam, LAMB or their row-wise forms. All other tables stay with TorchRec, and the log has the reason
    once; captured steps look up data-parallel tables, too. Checkpoints are TorchRec's own, and so is the order of the
    output's columns. docs/torchrec.md has the differences.

    Example:
        DistributedModelParallel(model, sharders=[OverlapEmbeddingBagCollectionSharder(backend="pgas")])
    """

    _sharded = OverlapShardedEmbeddingBagCollection

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        sharded_module_order_overwrite: list[str] | None = None,
        **given: Unpack[PooledArguments],
    ) -> None:
        """Take TorchRec's arguments, and those of `PooledArguments`.

        Args:
            qcomm_codecs_registry: fp32, bf16 or fp16, alike both ways, becomes `wire_dtype`; under other codecs tables
                stay with TorchRec.
        """
        super().__init__(fused_params, qcomm_codecs_registry, sharded_module_order_overwrite)
        asked = precisions(qcomm_codecs_registry, POOLED_OPS)
        self._of_module = self._take({"copy_output": True, **given}, PooledArguments, asked, output_order="plan")
        self._of_module["sharded_module_order_overwrite"] = sharded_module_order_overwrite


class OverlapEmbeddingCollectionSharder(_ExchangingSharder, EmbeddingCollectionSharder):
    """TorchRec's sharder of unpooled tables with another exchange, for any model that `DistributedModelParallel` takes.

    Each distinct id of a table travels once, and so does its row, and the sum of its gradients, in the steps of
    `GraphTrainPipeline`; those of TorchRec's pipelines stay with TorchRec. Exchanged are shards as under
    `OverlapEmbeddingBagCollectionSharder`. The output is TorchRec's.

    Example:
        DistributedModelParallel(model, sharders=[OverlapEmbeddingCollectionSharder(), ..])
    """

    _sharded = OverlapShardedEmbeddingCollection

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        **given: Unpack[UnpooledArguments],
    ) -> None:
        """Take TorchRec's arguments, `use_index_dedup` for its own steps, and those of `UnpooledArguments`."""
        super().__init__(fused_params, qcomm_codecs_registry, use_index_dedup)
        asked = precisions(qcomm_codecs_registry, UNPOOLED_OPS)
        self._of_module = self._take(given, UnpooledArguments, asked) | {"use_index_dedup": use_index_dedup}


def build_sharders(
    config: EmbeddingConfig,
    precision: str = "fp32",
    leading_columns: int = 0,
    fused_params: Mapping[str, Any] | None = None,
) -> list[ModuleSharder[Any]]:
    """Return the sharders of pooled and of unpooled tables for the configured backend.

    The table optimizer is fused into the backward. Where pooled embeddings travel in the type of the dense part, fp32
    or bf16 by `precision`, they are returned in it, after `leading_columns` columns for tensors that the model joins
    with them; else they are float32. Rows of unpooled tables travel in `config.wire_dtype`, as fp32 under auto.

    `fused_params` are extra ones that TorchRec passes to FBGEMM; they override those of the keys.
    """
    about_tables, backend = fused_params_of(config, fused_params), BACKENDS[config.backend]
    pooled_wire = config.resolved_wire_dtype(precision)
    unpooled_wire = "fp32" if config.wire_dtype == "auto" else config.wire_dtype
    dense_dtype = "bf16" if precision == "bf16" else "fp32"
    pooled = EmbeddingBagCollectionSharder(dict(about_tables), _codecs(pooled_wire))
    unpooled = EmbeddingCollectionSharder(dict(about_tables), _codecs(unpooled_wire))
    if backend.forward is not None:
        pooled = OverlapEmbeddingBagCollectionSharder(
            about_tables,
            **_keys_of(config, PooledArguments, pooled_wire),
            copy_output=False,  # our model lets go of it in its forward, and reads it in the model's order
            output_order="model",
            output_dtype=dense_dtype if dense_dtype == pooled_wire else "fp32",
            leading_columns=leading_columns if dense_dtype == pooled_wire else 0,
        )
    if backend.stores_to_peers:
        unpooled = OverlapEmbeddingCollectionSharder(
            dict(about_tables),
            **_keys_of(config, UnpooledArguments, unpooled_wire),
            output_dtype=dense_dtype if unpooled_wire in ("fp32", dense_dtype) else "fp32",
        )
    return [pooled, unpooled]


def _keys_of(config: EmbeddingConfig, arguments: type, wire_dtype: str) -> dict[str, Any]:
    """Return the values of the keys that a sharder takes."""
    values = vars(config) | {"wire_dtype": wire_dtype}
    return {name: value for name, value in values.items() if name in arguments.__annotations__}


def fused_params_of(config: EmbeddingConfig, fused_params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the parameters of FBGEMM's lookups: of the keys, and `fused_params`, which override them.

    An id outside its table stops the run; FBGEMM's default would take row 0 instead.
    """
    return {
        "optimizer": _OPTIMIZERS[config.optimizer],
        "learning_rate": config.lr,
        "eps": config.eps,
        "bounds_check_mode": BoundsCheckMode.FATAL,
        **(fused_params or {}),
    }


def _codecs(wire_dtype: str) -> dict[str, QuantizedCommCodecs] | None:
    """Return TorchRec's codecs of the wire's type, None for fp32."""
    if wire_dtype == "fp32":
        return None
    wire = CommType(wire_dtype)
    return get_qcomm_codecs_registry(QCommsConfig(forward_precision=wire, backward_precision=wire))


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """Return TorchRec's default sharders, with ours in the place of those of pooled and of unpooled tables."""
    ours: dict[type, Any] = {
        EmbeddingBagCollectionSharder: OverlapEmbeddingBagCollectionSharder,
        EmbeddingCollectionSharder: OverlapEmbeddingCollectionSharder,
    }
    return [ours[type(each)]() if type(each) in ours else each for each in get_torchrec_sharders()]


def require_same_plan(plan: Mapping[str, ParameterSharding], env: ShardingEnv) -> None:
    """Check that every rank shards a module by the same plan, given by table; a collective.

    Raises:
        InputError: on every rank, naming the first table that another rank shards otherwise than the first one.
    """
    group = exchanging_group(env)
    mine = {name: f"{each.sharding_type} by {each.compute_kernel} on ranks {each.ranks}" for name, each in plan.items()}
    plans = [mine] * group.size()
    dist.all_gather_object(plans, mine, group)
    for rank, other in enumerate(plans):
        if unlike := plans[0].items() ^ other.items():
            name, _ = min(unlike)
            first, there = (each.get(name, "in no way") for each in (plans[0], other))
            raise InputError(
                f"plan: rank 0 shards table {name} {first}, rank {rank} {there}; give all ranks one plan, as the "
                f"planner's collective_plan does"
            )
