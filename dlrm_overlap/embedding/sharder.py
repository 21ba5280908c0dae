"""The drop-in: TorchRec's sharder with the embedding exchange of a backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypedDict, Unpack

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
    CommOp,
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dlrm_overlap.backends import BACKENDS, EXCHANGED
from dlrm_overlap.config import EmbeddingConfig, InputError, NonNegativeInt
from dlrm_overlap.embedding.options import PUTS, WIRE_DTYPES, ExchangeOptions
from dlrm_overlap.embedding.reasons import precisions
from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection
from dlrm_overlap.embedding.sharded_unpooled import OverlapShardedEmbeddingCollection
from dlrm_overlap.embedding.shardings import cached_shares, exchanging_group
from dlrm_overlap.embedding.tables import OPTIMIZERS
from dlrm_overlap.kernels.schedule import SCHEDULES
from dlrm_overlap.launching.parsing import convert, words_of

_OPTIMIZERS = {name: optimizer for optimizer, name in OPTIMIZERS.items()}


_KEYS = "backend", "schedule", "slice_bags", "programs_per_sm", "wait_timeout_s", "hosts"
"""keys of the section `embedding` that the sharders take as they are"""
_POOLED_KEYS = "put", "between_hosts", "aggregate_bytes"
"""more of those, of the sharder of pooled tables"""


class ExchangeArguments(TypedDict, total=False):
    """Arguments of both sharders: the configuration's keys of section `embedding`, and the type of the output.

    Raises:
        InputError: by the sharder, if a value breaks a rule.
    """

    backend: str
    """pgas, the default, fused or, of pooled tables, nccl"""
    schedule: str
    slice_bags: int
    programs_per_sm: int | None
    wire_dtype: str
    wait_timeout_s: float
    hosts: int | Literal["auto"]
    output_dtype: str
    """type of the output of exchanged tables: "fp32", the default, or that of the wire; of unpooled tables any of its
    types where the wire's is fp32. `output_dtype` in `fused_params` sets both, and the type of the tables that stay
    with TorchRec"""


class PooledArguments(ExchangeArguments, total=False):
    """Arguments of the sharder of pooled tables."""

    put: str
    between_hosts: str
    aggregate_bytes: int
    leading_columns: int
    """number of columns in front of the pooled embeddings in each row of a window, under `copy_output` False; the
    module's `leading_columns` is 0 where there are none"""


class OverlapEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder with another exchange, for any model that `DistributedModelParallel` takes.

    Exchanged are shards of every type but data-parallel, in the memory of their rank's device or cached there, with
    SGD, Adagrad, Adam, LAMB or their row-wise forms. All other tables stay with TorchRec, and the log has the reason
    once; captured steps look up data-parallel tables, too. Checkpoints are TorchRec's own, and so is the order of the
    output's columns. docs/torchrec.md has the differences.

    Example:
        DistributedModelParallel(model, sharders=[OverlapEmbeddingBagCollectionSharder(backend="pgas")])
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        sharded_module_order_overwrite: list[str] | None = None,
        *,
        copy_output: bool = True,
        output_order: str = "plan",
        **given: Unpack[PooledArguments],
    ) -> None:
        """Take TorchRec's arguments, the form of the output, and those of `PooledArguments`.

        Args:
            qcomm_codecs_registry: fp32, bf16 or fp16, alike both ways, becomes `wire_dtype`; under other codecs tables
                stay with TorchRec.
            copy_output: return a copy of the pooled embeddings. False returns the window into which peers have stored
                them, and saves the copy; drop all references to it before the module's next forward, which raises
                `WindowHeldError` otherwise.
            output_order: order of the features in the output: "plan", as under TorchRec, or "model", as in the
                unsharded module.
        """
        super().__init__(fused_params, qcomm_codecs_registry, sharded_module_order_overwrite)
        _check_named(given, PooledArguments)
        _check_known("output_order", output_order, ("plan", "model"))
        self.output_order = output_order
        self.options = make_options(precisions(qcomm_codecs_registry), EXCHANGED, copy_output=copy_output, **given)

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> OverlapShardedEmbeddingBagCollection:
        """Shard `module` by the plan's `params`.

        Raises:
            InputError: on every rank, if ranks have unlike plans.
        """
        more = {"sharded_module_order_overwrite": self._sharded_module_order_overwrite}
        more |= {"output_order": self.output_order}
        return _shard(self, module, params, env, device, module_fqn, **more)

    @property
    def sharded_module_type(self) -> type[OverlapShardedEmbeddingBagCollection]:
        """Return the type of the modules that `shard` returns."""
        return OverlapShardedEmbeddingBagCollection


class OverlapEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """TorchRec's sharder of unpooled tables with another exchange, for any model that `DistributedModelParallel` takes.

    Each distinct id of a table travels once, and so does its row, and the sum of its gradients, in the steps of
    `GraphTrainPipeline`; those of TorchRec's pipelines stay with TorchRec. Exchanged are shards as under
    `OverlapEmbeddingBagCollectionSharder`. The output is TorchRec's.

    Example:
        DistributedModelParallel(model, sharders=[OverlapEmbeddingCollectionSharder(), ..])
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        *,
        dedup: bool | Literal["auto"] = "auto",
        **given: Unpack[ExchangeArguments],
    ) -> None:
        """Take TorchRec's arguments, and those of `ExchangeArguments`.

        Args:
            use_index_dedup: of the steps that stay with TorchRec.
            dedup: whether each distinct id of a batch travels once, or as often as it is there; auto does the former
                unless more than 0.9 of the ids of the first batch are distinct.
        """
        super().__init__(fused_params, qcomm_codecs_registry, use_index_dedup)
        _check_named(given, ExchangeArguments)
        if dedup not in (True, False, "auto"):
            raise InputError(f"dedup: {dedup!r} is not known; take True, False or auto")
        self.dedup = dedup
        asked = precisions(qcomm_codecs_registry, [CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL])
        storing = [name for name, each in BACKENDS.items() if each.stores_to_peers]
        self.options = make_options(asked, storing, is_pooled=False, **given)

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> OverlapShardedEmbeddingCollection:
        """Shard `module` by the plan's `params`.

        Raises:
            InputError: on every rank, if ranks have unlike plans.
        """
        more = {"use_index_dedup": self._use_index_dedup, "dedup": self.dedup}
        return _shard(self, module, params, env, device, module_fqn, **more)

    @property
    def sharded_module_type(self) -> type[OverlapShardedEmbeddingCollection]:
        """Return the type of the modules that `shard` returns."""
        return OverlapShardedEmbeddingCollection


def _shard(
    sharder: Any,
    module: nn.Module,
    params: dict[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None,
    module_fqn: str | None,
    **more: Any,
) -> Any:
    """Return a sharder's sharded module; a collective.

    Tables that the exchange caches are in the host's memory. Where it caches none, FBGEMM does, and they stay with
    TorchRec.

    Raises:
        InputError: see `require_same_plan`.
    """
    require_same_plan(params, env)
    options: ExchangeOptions = sharder.options
    # The replicas of 2D parallelism are averaged where FBGEMM keeps the rows.
    caches = BACKENDS[options.backend].stores_to_peers and options.resolved_backward == "push"
    cached = cached_shares(params) if caches and not isinstance(env, ShardingEnv2D) else {}
    kernel = EmbeddingComputeKernel.FUSED_UVM.value
    at_home = {name: replace(params[name], compute_kernel=kernel, cache_params=None) for name in cached}
    return sharder.sharded_module_type(
        module,
        params | at_home,
        env,
        sharder.fused_params,
        device,
        qcomm_codecs_registry=sharder.qcomm_codecs_registry,
        module_fqn=module_fqn,
        options=options,
        cached=cached,
        **more,
    )


def _check_named(given: Mapping[str, Any], arguments: type) -> None:
    """Check that arguments have names of `arguments`, a TypedDict.

    Raises:
        TypeError: if one has not, as of any function.
    """
    if unknown := sorted(given.keys() - arguments.__annotations__.keys()):
        raise TypeError(f"sharder: unexpected arguments {', '.join(unknown)}")


def _check_known(name: str, value: str, known: Sequence[str]) -> None:
    """Check that a value of an argument is one of those known.

    Raises:
        InputError: if it is not.
    """
    if value not in known:
        raise InputError(f"{name}: {value!r} is not known; take one of {', '.join(known)}")


def make_options(
    asked: set[str],
    backends: Sequence[str],
    *,
    backend: str = "pgas",
    wire_dtype: str = "fp32",
    output_dtype: str = "fp32",
    is_pooled: bool = True,
    **given: Any,
) -> ExchangeOptions:
    """Return the options of an exchange, once their values are checked.

    Args:
        asked: precisions that codecs ask for; one that the wire has becomes the wire's.
        backends: those that may be taken.
        is_pooled: whether the tables are pooled; the rows of others are narrowed where they have arrived.
        given: others of `ExchangeOptions`.

    Raises:
        InputError: if a value breaks a rule.
    """
    given["backend"] = backend
    for name, known in (
        ("backend", backends),
        ("schedule", SCHEDULES),
        ("put", PUTS),
        ("between_hosts", ("messages", "puts")),
    ):
        if name in given:
            _check_known(name, given[name], known)
    _check_known("wire_dtype", wire_dtype, tuple(WIRE_DTYPES))
    if wire_dtype != "fp32" and asked and asked != {wire_dtype}:
        found = " and ".join(sorted(asked))
        raise InputError(f"wire_dtype: {wire_dtype!r}, but qcomm_codecs_registry has {found}; give one of the two")
    if len(asked) == 1 and asked <= WIRE_DTYPES.keys():
        (wire_dtype,) = asked
    _check_known("output_dtype", output_dtype, tuple(WIRE_DTYPES))
    if output_dtype not in ("fp32", wire_dtype) and (is_pooled or wire_dtype != "fp32"):
        raise InputError(f"output_dtype: {output_dtype!r}, but the wire's type is {wire_dtype}; take fp32 or that")
    kinds: dict[str, Any] = {each.name: each.type for each in fields(EmbeddingConfig)}
    kinds["leading_columns"] = NonNegativeInt
    checked = {"slice_bags", "programs_per_sm", "wait_timeout_s", "hosts", "aggregate_bytes", "leading_columns"}
    for name in sorted(checked & given.keys()):
        try:
            given[name] = convert(kinds[name], given[name])
        except ValueError:
            raise InputError(f"{name}: {given[name]!r} is not {words_of(kinds[name])}") from None
    return ExchangeOptions(wire_dtype=WIRE_DTYPES[wire_dtype], output_dtype=WIRE_DTYPES[output_dtype], **given)


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
            wire_dtype=pooled_wire,
            **{name: getattr(config, name) for name in (*_KEYS, *_POOLED_KEYS)},
            copy_output=False,  # our model lets go of it in its forward, and reads it in the model's order
            output_order="model",
            output_dtype=dense_dtype if dense_dtype == pooled_wire else "fp32",
            leading_columns=leading_columns if dense_dtype == pooled_wire else 0,
        )
    if backend.stores_to_peers:
        unpooled = OverlapEmbeddingCollectionSharder(
            dict(about_tables),
            wire_dtype=unpooled_wire,
            output_dtype=dense_dtype if unpooled_wire in ("fp32", dense_dtype) else "fp32",
            **{name: getattr(config, name) for name in _KEYS},
        )
    return [pooled, unpooled]


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
    ours: dict[type, Callable[[], ModuleSharder[Any]]] = {
        EmbeddingBagCollectionSharder: OverlapEmbeddingBagCollectionSharder,
        EmbeddingCollectionSharder: OverlapEmbeddingCollectionSharder,
    }
    return [ours[type(each)]() if type(each) in ours else each for each in get_torchrec_sharders()]


def require_same_plan(plan: Mapping[str, ParameterSharding], env: ShardingEnv) -> None:
    """Check that every rank shards a module by the same plan; a collective.

    Args:
        plan: of the module, by table.

    Raises:
        InputError: on every rank, naming the first table that another rank shards otherwise than the first one.
    """
    group = exchanging_group(env)
    mine = {name: f"{each.sharding_type} by {each.compute_kernel} on ranks {each.ranks}" for name, each in plan.items()}
    plans = [mine] * group.size()
    dist.all_gather_object(plans, mine, group)
    for rank, plan_there in enumerate(plans):
        for name in sorted({*plans[0], *plan_there}):
            first, other = (each.get(name, "in no way") for each in (plans[0], plan_there))
            if first != other:
                raise InputError(
                    f"plan: rank 0 shards table {name} {first}, rank {rank} {other}; give all ranks one plan, as the "
                    f"planner's collective_plan does"
                )
