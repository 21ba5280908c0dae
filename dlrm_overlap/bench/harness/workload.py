"""The contenders' workload: sharded tables, and batches of ids."""

import gc
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import CRITEO_TABLES, Config, InputError
from dlrm_overlap.data.loader import open_datasets, open_files
from dlrm_overlap.embedding.configured_sharders import build_sharders
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.shardings import build_layout, model_order
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.torchrec_private import ShardedEmbeddingBagCollection
from dlrm_overlap.torchrec_private.attributes import lookups_of, shardings_by_type
from dlrm_overlap.train.model import build_model

_CPU = torch.device("cpu")
BATCHES = 4  # used in turn, so that no step finds the rows of the previous one in a cache


def with_keys(section: Any, keys: Mapping[str, Any]) -> Any:
    """Return `section`, a configuration or part of one, with the values of dotted keys replaced."""
    changes: dict[str, Any] = {}
    for name in dict.fromkeys(key.partition(".")[0] for key in keys):
        inner = {key.removeprefix(f"{name}."): value for key, value in keys.items() if key.startswith(f"{name}.")}
        changes[name] = with_keys(getattr(section, name), inner) if inner else keys[name]
    return replace(section, **changes)


def shape_of(config: Config, world_size: int, tables_per_rank: int | None) -> Config:
    """Return `config` for the backend `pgas` and, if given, with `tables_per_rank` tables per rank."""
    keys: dict[str, Any] = {"embedding.backend": "pgas"}
    if tables_per_rank is not None:
        keys["data.tables.count"] = tables_per_rank * world_size
    elif (count := config.data.tables.number(world_size)) < world_size:
        raise InputError(f"data.tables.count: {count} tables for {world_size} ranks; each takes at least one")
    config.train.samples_per_rank(world_size)
    return with_keys(config, keys)


class Ids(NamedTuple):
    context: Any
    """context of a TorchRec step, filled by input_dist"""
    inputs: Any
    """KJTList of one KeyedJaggedTensor, int64: bags of all B samples for each table of this rank"""


@dataclass(frozen=True)
class Workload:
    module: ShardedEmbeddingBagCollection
    layout: Layout
    tables: LocalTables
    group: dist.ProcessGroup
    device: torch.device
    batch_sizes: tuple[int, ...]
    """samples of each rank"""
    wire_dtype: torch.dtype
    output_dtype: torch.dtype
    """dtype of every contender's output: bfloat16 if `wire_dtype` and `train.precision` are bfloat16, else float32"""
    batches: list[Ids]

    @property
    def rank(self) -> int:
        return self.group.rank()


def read_ids(config: Config, group: dist.ProcessGroup, device: torch.device = _CPU) -> list[KeyedJaggedTensor]:
    """Return this rank's ids of `BATCHES` batches; `device` only affects how fast they are made."""
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
    """Shard the tables of `config` and send this rank's batches `sparse` (`read_ids`) to their owners; a collective.

    Rank r owns the r-th T / W tables, whole, so that the baseline unpacks by one concatenation. If `cut_rows`, each
    table is cut by rows over all ranks. Updates round rows to nearest, so that contenders can be compared.
    """
    # Wire and output dtype, the same for all contenders.
    world_size = group.size()
    data, _ = open_datasets(config.data)
    tables = len(data.rows)
    rows = [count for count in data.rows if count is not None]
    if len(rows) < tables:
        raise InputError("data.tables.ids: any, but this figure times tables whose rows are known; take ids rows")
    collection = build_model(config.model, config.embedding, rows, data.dense_features, 0).embedding
    ours = exchange_options(config, "pgas")
    # Resolved for pgas: TorchRec's backend would resolve auto to fp32.
    wire_dtype = replace(config.embedding, backend="pgas").resolved_wire_dtype(config.train.precision)
    about_tables: dict[str, Any] = {"stochastic_rounding": False}
    if ours.output_dtype == torch.bfloat16 and device.type == "cuda":  # FBGEMM has no such output on CPUs
        about_tables["output_dtype"] = SparseType.BF16
        wire_dtype = "fp32"  # TorchRec need not cast
    # Shard by TorchRec, whole tables or rows.
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
    names = model_order(collection.embedding_bag_configs())
    layout = build_layout(list(shardings_by_type(module).values()), names, world_size)
    return Workload(
        module=module,
        layout=layout,
        tables=LocalTables.of(lookups_of(module)),
        group=group,
        device=device,
        batch_sizes=(config.train.samples_per_rank(world_size),) * world_size,
        wire_dtype=ours.wire_dtype,
        output_dtype=ours.output_dtype,
        batches=[_send_ids(module, ids, device) for ids in sparse],
    )


def _send_ids(module: ShardedEmbeddingBagCollection, sparse: KeyedJaggedTensor, device: torch.device) -> Ids:
    # FBGEMM need not cast int64.
    values, lengths = (part.to(device, torch.int64) for part in (sparse.values(), sparse.lengths()))
    context = module.create_context()
    inputs = module.input_dist(context, KeyedJaggedTensor(sparse.keys(), values, lengths=lengths)).wait().wait()
    inputs[0].offsets()  # computes the offsets and keeps them for all contenders
    return Ids(context, inputs)


def exchange_options(config: Config, backend: str) -> ExchangeOptions:
    sharder: Any = build_sharders(replace(config.embedding, backend=backend), config.train.precision)[0]
    return sharder.options


def describe_work(config: Config, world_size: int) -> dict[str, Any]:
    """Return the columns of a row that are the same for all contenders of one configuration.

    `multi_hot` and `zipf_alpha` are keys of synthetic samples, so they are None for files.
    """
    tables, train, is_synthetic = config.data.tables, config.train, config.data.kind == "synthetic"
    number, rows, most = tables.number(CRITEO_TABLES), tables.rows, tables.max_rows or math.inf
    if config.data.kind == "prepared":  # its files name the tables
        rows = open_files(config.data, config.data.path).rows
        number = len(rows)
    elif rows is not None:
        rows = [min(each, most) for each in rows] if isinstance(rows, list) else min(rows, most)
    return {
        "world_size": world_size,
        "tables": number,
        "rows": str(rows),
        "dim": config.model.dim,
        "multi_hot": str(tables.multi_hot) if is_synthetic else None,
        "zipf_alpha": str(tables.zipf_alpha) if is_synthetic else None,
        "global_batch": train.samples_per_rank(world_size) * world_size,
        "arch": config.model.arch,
        "optimizer": config.embedding.optimizer,
        "weight_dtype": config.embedding.weight_dtype,
    }


def config_digest(config: Config) -> str:
    """Return text that differs if two configurations differ in more than logs and checkpoints."""
    sections = config.as_dict()
    work = {name: sections[name] for name in ("model", "data", "embedding", "train")}
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:12]


def describe(config: Config, world_size: int) -> dict[str, Any]:
    precision = config.train.precision
    return describe_work(config, world_size) | {
        "precision": precision,
        "wire_dtype": config.embedding.resolved_wire_dtype(precision),
    }
