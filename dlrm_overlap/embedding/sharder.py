"""TorchRec's sharders with the exchange of a backend."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypedDict, Unpack, get_type_hints

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
)

from dlrm_overlap.backends import BACKENDS, EXCHANGED
from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.config import InputError, NonNegativeInt, PositiveInt, Seconds, SliceBags, ValueRule
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.options import PUTS, WIRE_DTYPES, ExchangeOptions
from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection
from dlrm_overlap.embedding.sharded_unpooled import OverlapShardedEmbeddingCollection
from dlrm_overlap.embedding.shardings import cached_shares, exchanging_group
from dlrm_overlap.embedding.unsupported import POOLED_OPS, UNPOOLED_OPS, precisions
from dlrm_overlap.kernels.schedule import SCHEDULES
from dlrm_overlap.launching.parsing import convert, new_name, new_value, words_of
from dlrm_overlap.torchrec_private.check import check_private_api


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
    """type of the output of exchanged tables: "fp32", the default, or `wire_dtype`; for unpooled tables any if
    `wire_dtype` is "fp32". `output_dtype` in `fused_params` sets both types, and the output type of tables that stay
    with TorchRec"""


class PooledArguments(_BothArguments, total=False):
    """Arguments of the pooled sharder; those without a description are keys of section `embedding`."""

    backend: Annotated[str, _one_of(EXCHANGED)]
    """pgas, the default, fused or nccl"""
    put: Annotated[str, _one_of(PUTS)]
    internode: Annotated[str, _one_of(("messages", "puts"))]
    aggregate_bytes: NonNegativeInt
    copy_output: bool
    """if True, the default, the output is a copy; if False, a view of the window that peers store into. Then drop all
    references to the view before the module's next forward, which raises `BufferInUseError` otherwise"""
    output_order: Annotated[str, _one_of(("plan", "model"))]
    """order of the features in the output: "plan", TorchRec's and the default, or "model", the unsharded module's"""
    input_dist: Annotated[str, _one_of(("auto", "windows", "torchrec"))]
    """how TorchRec's pipelines send ids: "windows", by our kernels, "torchrec", by its collectives, or "auto", the
    default, which is windows on GPUs"""
    leading_columns: NonNegativeInt
    """columns in front of each row of pooled embeddings, with `copy_output` False; see the module's `leading_columns`
    """


class UnpooledArguments(_BothArguments, total=False):
    backend: Annotated[str, _one_of(_STORING)]
    """pgas, the default, or fused"""


class _ExchangingSharder:
    _sharded: type[ExchangingModule[Any]]

    def _take(self, given: Mapping[str, Any], kinds: type, asked: set[str], **defaults: Any) -> dict[str, Any]:
        """Check arguments by the TypedDict `kinds`, set `options`, and return the arguments that are in `defaults`.

        `asked` are the precisions of the codecs, see `precisions`.
        """
        # Names and values of earlier versions, then types and rules.
        known = get_type_hints(kinds, include_extras=True)
        given = {new_name(f"embedding.{name}").removeprefix("embedding."): value for name, value in given.items()}
        given = {name: new_value(f"embedding.{name}", value) for name, value in given.items()}
        if unknown := sorted(given.keys() - known):
            raise TypeError(f"sharder: unexpected arguments {', '.join(unknown)}")
        checked = dict[str, Any]()
        for name, value in given.items():
            try:  # item() converts NumPy's numbers
                checked[name] = convert(known[name], value.item() if hasattr(value, "item") else value)
            except ValueError:
                raise InputError(f"{name}: {value!r} is not {words_of(known[name])}") from None
        # Types of the wire and of the output.
        wire, output = checked.pop("wire_dtype", "fp32"), checked.pop("output_dtype", "fp32")
        if "wire_dtype" in given and asked and asked != {wire}:
            found = " and ".join(sorted(asked))
            raise InputError(f"wire_dtype: {wire!r}, but qcomm_codecs_registry has {found}; give one of the two")
        if len(asked) == 1 and asked <= WIRE_DTYPES.keys():
            (wire,) = asked
        # Unpooled rows are narrowed after they have arrived.
        if output not in ("fp32", wire) and (kinds is PooledArguments or wire != "fp32"):
            raise InputError(f"output_dtype: {output!r}, but the wire's type is {wire}; give fp32 or the wire's type")
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

        Tables with compute kernel `fused_uvm_caching` are in host memory, and the exchange caches their rows. If it
        cannot cache, they stay with TorchRec.

        Raises:
            InputError: on every rank, if the ranks' plans differ.
        """
        require_same_plan(params, env)
        options = self.options
        # 2D parallelism averages replicas in FBGEMM's storage, not in caches.
        caches = BACKENDS[options.backend].stores_to_peers and options.resolved_backward == "push"
        cached = cached_shares(params) if caches and not isinstance(env, ShardingEnv2D) else {}
        kernel = EmbeddingComputeKernel.FUSED_UVM.value
        in_host_memory = {name: replace(params[name], compute_kernel=kernel, cache_params=None) for name in cached}
        return self._sharded(
            module,
            params | in_host_memory,
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
        return self._sharded


class OverlapEmbeddingBagCollectionSharder(_ExchangingSharder, EmbeddingBagCollectionSharder):
    """TorchRec's sharder with another exchange, for any model that `DistributedModelParallel` takes.

    It exchanges shards of every type but data-parallel, in the memory of their rank's device or cached there, with SGD,
    Adagrad, Adam, LAMB or their row-wise forms. All other tables stay with TorchRec, which the log explains once;
    captured steps look up data-parallel tables, too. docs/torchrec.md has the differences.

    Example:
        DistributedModelParallel(model, sharders=[OverlapEmbeddingBagCollectionSharder(backend="pgas")])

    Args:
        qcomm_codecs_registry: fp32, bf16 or fp16 in both directions becomes `wire_dtype`; with other codecs tables stay
            with TorchRec.
        given: see `PooledArguments`.
    """

    _sharded = OverlapShardedEmbeddingBagCollection

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        sharded_module_order_overwrite: list[str] | None = None,
        **given: Unpack[PooledArguments],
    ) -> None:
        check_private_api()
        super().__init__(fused_params, qcomm_codecs_registry, sharded_module_order_overwrite)
        asked = precisions(qcomm_codecs_registry, POOLED_OPS)
        defaults = {"output_order": "plan", "input_dist": "auto"}
        self._of_module = self._take({"copy_output": True, **given}, PooledArguments, asked, **defaults)
        self._of_module["sharded_module_order_overwrite"] = sharded_module_order_overwrite


class OverlapEmbeddingCollectionSharder(_ExchangingSharder, EmbeddingCollectionSharder):
    """TorchRec's sharder of unpooled tables with another exchange, for any model that `DistributedModelParallel` takes.

    It exchanges the same shards as `OverlapEmbeddingBagCollectionSharder`, in steps of `GraphTrainPipeline`: each
    distinct id of a table, its row and the sum of its gradients are sent once. Steps of TorchRec's pipelines stay with
    TorchRec, and only these steps use `use_index_dedup`.

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
        check_private_api()
        super().__init__(fused_params, qcomm_codecs_registry, use_index_dedup)
        asked = precisions(qcomm_codecs_registry, UNPOOLED_OPS)
        self._of_module = self._take(given, UnpooledArguments, asked) | {"use_index_dedup": use_index_dedup}


def require_same_plan(plan: Mapping[str, ParameterSharding], env: ShardingEnv) -> None:
    """Raise an InputError on every rank if two ranks shard a table differently; a collective."""
    group = exchanging_group(env)
    mine = {name: f"{each.sharding_type} by {each.compute_kernel} on ranks {each.ranks}" for name, each in plan.items()}
    plans = gathered(mine, group)
    for rank, other in enumerate(plans):
        if unlike := plans[0].items() ^ other.items():
            name, _ = min(unlike)
            first, there = (each.get(name, "not at all") for each in (plans[0], other))
            raise InputError(
                f"plan: rank 0 shards table {name} {first}, rank {rank} {there}; give all ranks one plan, as the "
                f"planner's collective_plan does"
            )
