"""Who is measured, over the same rows and the same ids: the baseline, TorchRec's own path, and the exchanges."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import Config, EmbeddingConfig
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.forward import ExchangeOptions
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder, build_layout, build_sharder
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.kernels.schedule import resolve_schedule
from dlrm_overlap.model import build_model

BATCHES = 4  # take turns, so that no step finds the rows of the one before in a cache


class Ids(NamedTuple):
    """A batch's ids, on the ranks that hold their rows."""

    context: Any
    """TorchRec's, from its input_dist"""
    inputs: Any
    """KJTList of one KeyedJaggedTensor: B bags a table of this rank, values and lengths int64"""


@dataclass(frozen=True)
class Workload:
    """Tables sharded over the ranks of a group, and batches of ids for them."""

    module: ShardedEmbeddingBagCollection
    layout: Layout
    tables: LocalTables
    group: dist.ProcessGroup
    device: torch.device
    batch_sizes: tuple[int, ...]
    """samples of each rank"""
    wire_dtype: torch.dtype
    batches: list[Ids]

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.group.rank()


def make_workload(
    config: Config, group: dist.ProcessGroup, device: torch.device, local_world_size: int, check_ids: bool
) -> Workload:
    """Shard the tables of `config` over `group` and bring the ids of `BATCHES` batches to their owners.

    Tables lie whole on one rank, the first T / W on rank 0 and so on, so that the baseline's unpacking is one
    concatenation, without a permutation. TorchRec shards them; every contender reads the same FBGEMM storage. SGD,
    since it keeps no state: nothing is trained. Ids are int64, FBGEMM's own type, so that nobody has to cast them.
    """
    rank, world_size = group.rank(), group.size()
    data, _ = open_datasets(config.data)
    tables = len(data.rows)
    collection = build_model(config.model, config.embedding, list(data.rows), data.dense_features, 0).embedding
    sharder: Any = build_sharder(replace(config.embedding, backend="torchrec", optimizer="sgd"))
    if not check_ids:
        sharder.fused_params["bounds_check_mode"] = BoundsCheckMode.NONE
    places = {
        table.name: table_wise(rank=t * world_size // tables, compute_kernel="fused")
        for t, table in enumerate(collection.embedding_bag_configs())
    }
    local_size = min(local_world_size, world_size)
    plan = construct_module_sharding_plan(collection, places, sharder, local_size, world_size, device.type)
    environment = ShardingEnv.from_local(world_size, rank)  # `from_process_group` waits for ranks outside the group
    environment.process_group = group
    module = sharder.shard(collection, plan, environment, device)
    initialise_tables(module, config.train.seed)

    samples = config.train.samples_per_rank(world_size)
    with ThreadPoolExecutor(BATCHES) as pool:
        firsts = [(batch * world_size + rank) * samples for batch in range(BATCHES)]
        batches = list(pool.map(lambda first: data.read(first, samples), firsts))
    layout = build_layout(module._embedding_shardings, [c.name for c in collection.embedding_bag_configs()], world_size)
    return Workload(
        module=module,
        layout=layout,
        tables=LocalTables.of(module._lookups),
        group=group,
        device=device,
        batch_sizes=(samples,) * world_size,
        wire_dtype=exchange_options(config.embedding, "pgas").wire_dtype,
        batches=[_bring_ids(module, batch.sparse, device) for batch in batches],
    )


def _bring_ids(module: ShardedEmbeddingBagCollection, sparse: KeyedJaggedTensor, device: torch.device) -> Ids:
    values, lengths = (part.to(device, torch.int64) for part in (sparse.values(), sparse.lengths()))
    context = module.create_context()
    inputs = module.input_dist(context, KeyedJaggedTensor(sparse.keys(), values, lengths=lengths)).wait().wait()
    inputs[0].offsets()  # computes and keeps them, for all contenders
    return Ids(context, inputs)


class Contender(ABC):
    """One way to run the stage. All ranks take the same steps."""

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload = name, workload

    def columns(self) -> dict[str, Any]:
        """Return the settings that tell this contender from others of its name."""
        return {"schedule": None, "slice_bags": None, "programs_per_sm": None}

    @abstractmethod
    def step(self, ids: Ids) -> torch.Tensor:
        """Return the pooled embeddings [b, D_total] float32 of this rank's samples, in the model's feature order.

        They are valid until the next step.
        """

    def close(self) -> None:  # noqa: B027  most have nothing to release
        """Release what outlives Python references. Every rank must be through with its steps."""


class Baseline(Contender):
    """FBGEMM's lookup, `all_to_all_single`, then the unpacking (Chen et al. 2024). A rank alone only looks up."""

    def __init__(self, workload: Workload) -> None:
        super().__init__("baseline", workload)
        layout, rank = workload.layout, workload.rank
        assert layout.sent_in_order, "owners hold their tables in the model's order"
        (self._lookup,) = workload.tables.lookups
        self._samples = workload.batch_sizes[rank]
        self._send_sizes = [size * layout.owner_dims[rank] for size in workload.batch_sizes]
        self._receive_sizes = [self._samples * dim for dim in layout.owner_dims]

    def step(self, ids: Ids, mark: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Run the stage, calling `mark` between lookup, All-to-All and unpacking."""
        bags = ids.inputs[0]
        pooled = self._lookup(bags.values(), bags.offsets()).to(self.workload.wire_dtype)
        mark()
        if len(self._receive_sizes) == 1:
            mark()
            return pooled.float()
        received = pooled.new_empty(sum(self._receive_sizes))
        sizes = self._receive_sizes, self._send_sizes
        work = dist.all_to_all_single(received, pooled.view(-1), *sizes, group=self.workload.group, async_op=True)
        assert work is not None
        work.wait()
        mark()
        parts = [part.view(self._samples, -1) for part in received.split(self._receive_sizes)]
        return torch.cat(parts, dim=1).float()


class TorchRec(Contender):
    """TorchRec's sharded module as its train pipeline calls it, waited for."""

    def __init__(self, workload: Workload) -> None:
        super().__init__("torchrec", workload)
        assert workload.module._embedding_names == workload.layout.names

    def step(self, ids: Ids) -> torch.Tensor:
        """Run the stage."""
        return self.workload.module.compute_and_output_dist(ids.context, ids.inputs).wait().values()


class Overlap(Contender):
    """An exchange: `nccl`, `pgas` or `fused`."""

    def __init__(self, workload: Workload, options: ExchangeOptions) -> None:
        super().__init__(options.backend, workload)
        self.options = options
        self._exchange = Exchange(workload.layout, workload.tables, options, workload.group, workload.device)

    def columns(self) -> dict[str, Any]:
        """Return what the backend's options are."""
        fused = self.name == "fused"
        return {
            "schedule": resolve_schedule(self.options.schedule, load_store_peers=True),
            "slice_bags": self.options.slice_bags if fused else None,
            "programs_per_sm": self.options.programs_per_sm if fused else None,
        }

    def step(self, ids: Ids) -> torch.Tensor:
        """Run the stage."""
        return self._exchange.start(list(ids.inputs), self.workload.batch_sizes).wait()

    def close(self) -> None:
        """Give the windows back."""
        self._exchange.close()


def exchange_options(config: EmbeddingConfig, backend: str) -> ExchangeOptions:
    """Return the options that `config` stands for under `backend`, an exchange's."""
    sharder = build_sharder(replace(config, backend=backend))
    assert isinstance(sharder, OverlapEmbeddingBagCollectionSharder)
    return sharder.options
