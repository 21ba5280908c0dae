"""The workload of the contenders: a shape, its sharded tables, and batches of ids."""

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import CRITEO_TABLES, Config, InputError
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.sharder import build_sharders
from dlrm_overlap.embedding.shardings import build_layout, model_order
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.train.model import build_model

_CPU = torch.device("cpu")
BATCHES = 4  # used in turn, so that no step finds the rows of the previous one in a cache


def with_keys(section: Any, keys: Mapping[str, Any]) -> Any:
    """Return a configuration, or a section, with other values of some dotted keys.

    Raises:
        InputError: if the keys contradict each other.
    """
    changes: dict[str, Any] = {}
    for name in dict.fromkeys(key.partition(".")[0] for key in keys):
        inner = {key.removeprefix(f"{name}."): value for key, value in keys.items() if key.startswith(f"{name}.")}
        changes[name] = with_keys(getattr(section, name), inner) if inner else keys[name]
    return replace(section, **changes)


def shape_of(config: Config, world_size: int, tables_per_rank: int | None) -> Config:
    """Return `config` with `tables_per_rank` tables for each rank, if given, and the dtypes of our exchanges.

    Raises:
        InputError: if there are fewer tables than ranks, or the samples cannot be divided among the ranks.
    """
    keys: dict[str, Any] = {"embedding.backend": "pgas"}
    if tables_per_rank is not None:
        keys["data.tables.count"] = tables_per_rank * world_size
    elif (count := config.data.tables.number(world_size)) < world_size:
        raise InputError(f"data.tables.count: {count} tables for {world_size} ranks; each takes at least one")
    config.train.samples_per_rank(world_size)
    return with_keys(config, keys)


class Ids(NamedTuple):
    """The ids of a batch on the ranks that own their rows."""

    context: Any
    """context that TorchRec's input_dist has filled"""
    inputs: Any
    """a KJTList of one KeyedJaggedTensor: B bags for each table of this rank, values and lengths int64"""


@dataclass(frozen=True)
class Workload:
    """Tables sharded over all ranks, and batches of ids for them."""

    module: ShardedEmbeddingBagCollection
    layout: Layout
    tables: LocalTables
    group: dist.ProcessGroup
    device: torch.device
    batch_sizes: tuple[int, ...]
    """samples of each rank"""
    wire_dtype: torch.dtype
    output_dtype: torch.dtype
    """of the pooled embeddings of every contender: bfloat16 if the wire and `train.precision` are, else float32"""
    batches: list[Ids]

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.group.rank()


def read_ids(config: Config, group: dist.ProcessGroup, device: torch.device = _CPU) -> list[KeyedJaggedTensor]:
    """Return the ids of this rank's samples in `BATCHES` batches, in the dtypes of the data set.

    Synthetic ones are generated on `device`, with the same result on every device.
    """
    data, _ = open_datasets(config.data, device)
    samples = config.train.samples_per_rank(group.size())
    firsts = [(batch * group.size() + group.rank()) * samples for batch in range(BATCHES)]
    return [data.read(first, samples).sparse for first in firsts]


def collect_garbage(device: torch.device) -> None:
    """Free the memory of unused workloads; sharded modules have reference cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def make_workload(
    config: Config,
    sparse: Sequence[KeyedJaggedTensor],
    group: dist.ProcessGroup,
    device: torch.device,
    local_world_size: int,
    optimizer: str = "sgd",
    cut_rows: bool = False,
) -> Workload:
    """Shard the tables of `config` over all ranks and send the ids `sparse` to their owners; a collective.

    Each table is on one rank, the first T / W on rank 0 and so on, so that the baseline unpacks by one concatenation;
    or, with `cut_rows`, each is cut by rows over all ranks. All contenders share TorchRec's FBGEMM storage. Rows
    narrower than float32 are rounded to nearest, not stochastically, so that updates can be compared. Ids are int64,
    FBGEMM's own type, so that no contender has to cast.

    Args:
        sparse: this rank's batches, from `read_ids`.
        optimizer: of the rows; the default has no state.
    """
    world_size = group.size()
    data, _ = open_datasets(config.data)
    tables = len(data.rows)
    collection = build_model(config.model, config.embedding, list(data.rows), data.dense_features, 0).embedding
    ours = exchange_options(config, "pgas")
    # Resolved for pgas: TorchRec's backend would resolve auto to fp32.
    wire_dtype = replace(config.embedding, backend="pgas").resolved_wire_dtype(config.train.precision)
    about_tables: dict[str, Any] = {"stochastic_rounding": False}
    if ours.output_dtype == torch.bfloat16 and device.type == "cuda":  # FBGEMM has no such output on CPUs
        about_tables["output_dtype"] = SparseType.BF16
        wire_dtype = "fp32"  # TorchRec need not cast
    keys = {"backend": "torchrec", "optimizer": optimizer, "wire_dtype": wire_dtype}
    sharder: Any = build_sharders(with_keys(config.embedding, keys), fused_params=about_tables)[0]
    shardings = {
        table.name: row_wise() if cut_rows else table_wise(rank=t * world_size // tables)
        for t, table in enumerate(collection.embedding_bag_configs())
    }
    plan = construct_module_sharding_plan(collection, shardings, sharder, local_world_size, world_size, device.type)
    for sharding in plan.values():
        sharding.compute_kernel = EmbeddingComputeKernel.FUSED.value
    module = sharder.shard(collection, plan, ShardingEnv.from_process_group(group), device)
    initialise_tables(module, config.train.seed)
    layout = build_layout(module._embedding_shardings, model_order(collection.embedding_bag_configs()), world_size)
    return Workload(
        module=module,
        layout=layout,
        tables=LocalTables.of(module._lookups),
        group=group,
        device=device,
        batch_sizes=(config.train.samples_per_rank(world_size),) * world_size,
        wire_dtype=ours.wire_dtype,
        output_dtype=ours.output_dtype,
        batches=[_send_ids(module, ids, device) for ids in sparse],
    )


def _send_ids(module: ShardedEmbeddingBagCollection, sparse: KeyedJaggedTensor, device: torch.device) -> Ids:
    values, lengths = (part.to(device, torch.int64) for part in (sparse.values(), sparse.lengths()))
    context = module.create_context()
    inputs = module.input_dist(context, KeyedJaggedTensor(sparse.keys(), values, lengths=lengths)).wait().wait()
    inputs[0].offsets()  # computes the offsets and keeps them for all contenders
    return Ids(context, inputs)


def exchange_options(config: Config, backend: str) -> ExchangeOptions:
    """Return the options that `config` gives to an exchange of `backend`, one of `backends.EXCHANGED`."""
    sharder: Any = build_sharders(replace(config.embedding, backend=backend), config.train.precision)[0]
    return sharder.options


def describe(config: Config, world_size: int) -> dict[str, Any]:
    """Return the columns of a run's shape; a list in the configuration becomes one value."""
    tables, train = config.data.tables, config.train
    rows, most = tables.rows, tables.max_rows or math.inf
    return {
        "world_size": world_size,
        "tables": tables.number(CRITEO_TABLES),
        "rows": str([min(each, most) for each in rows] if isinstance(rows, list) else rows and min(rows, most)),
        "dim": config.model.dim,
        "multi_hot": str(tables.multi_hot),
        "zipf_alpha": str(tables.zipf_alpha),
        "global_batch": train.samples_per_rank(world_size) * world_size,
        "arch": config.model.arch,
        "precision": train.precision,
        "optimizer": config.embedding.optimizer,
        "weight_dtype": config.embedding.weight_dtype,
        "wire_dtype": config.embedding.resolved_wire_dtype(train.precision),
    }
