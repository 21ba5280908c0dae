"""Contenders of the forward: baselines, TorchRec's own path, and our exchanges."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.bench.harness.workload import Ids, Workload
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.torchrec_private import BoundsCheckMode, SplitTableBatchedEmbeddingBagsCodegen
from dlrm_overlap.torchrec_private.attributes import names_in_output


class Contender(ABC):
    """One way to run the embedding stage; all ranks take the same steps."""

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload = name, workload
        self.columns: dict[str, Any] = {}
        """additional columns of this contender's row, in which contenders of the same name may differ"""

    @abstractmethod
    def step(self, batch: Any) -> Any:
        """Take one step; a forward takes `Ids`, a backward a `GradientBatch`.

        A forward returns this rank's pooled embeddings [b, D_total] in the model's order, valid until the next step.
        """

    def cycle(self, batches: Sequence[Any]) -> Callable[[], object]:
        following = itertools.cycle(batches)
        return lambda: self.step(next(following))

    def close(self) -> None:  # noqa: B027  most have nothing to free
        """Free memory that garbage collection does not free; no rank may be in a step."""


def close_all(contenders: Sequence[Contender]) -> None:
    """Close the contenders once no rank is in a step; a collective."""
    dist.barrier()
    for contender in contenders:
        contender.close()


class Baseline(Contender):
    """FBGEMM's lookup, `all_to_all_single`, then unpacking (Chen et al. 2024). A single rank only looks up."""

    def __init__(self, workload: Workload) -> None:
        super().__init__("baseline", workload)
        layout, rank = workload.layout, workload.rank
        assert layout.sent_in_order, "owners hold their tables in the model's order"
        (self._lookup,) = workload.tables.lookups
        self._samples = workload.batch_sizes[rank]
        self._send_sizes = [size * layout.owner_dims[rank] for size in workload.batch_sizes]
        self._receive_sizes = [self._samples * dim for dim in layout.owner_dims]

    def step(self, batch: Ids, mark: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Take one step, calling `mark` after the lookup and after the All-to-All."""
        bags = batch.inputs[0]
        pooled = self._lookup(bags.values(), bags.offsets()).to(self.workload.wire_dtype)
        mark()
        if len(self._receive_sizes) == 1:
            mark()
            return pooled.to(self.workload.output_dtype)
        received = pooled.new_empty(sum(self._receive_sizes))
        dist.all_to_all_single(received, pooled.view(-1), self._receive_sizes, self._send_sizes)
        mark()
        parts = [part.view(self._samples, -1) for part in received.split(self._receive_sizes)]
        return torch.cat(parts, dim=1).to(self.workload.output_dtype)


class Chunked(Contender):
    """The baseline in chunks of tables, whose All-to-All and unpacking overlap with the next lookup.

    All owners must have tables of the same dims. Unpacking has its own stream, and no other stream waits for the
    collectives. Arranging the ids of a chunk is not timed.
    """

    def __init__(self, workload: Workload, chunks: int) -> None:
        """Split each owner's tables into `chunks` parts, none of them empty."""
        super().__init__(f"nccl_chunked_{chunks}", workload)
        dims = [shard.dim for shard in workload.layout.by_owner[workload.rank]]
        borders = [chunk * len(dims) // chunks for chunk in range(chunks + 1)]
        (lookup,) = workload.tables.lookups
        self._lookups = split_lookup(lookup, borders)
        self._columns = [(sum(dims[:first]), sum(dims[:last])) for first, last in itertools.pairwise(borders)]
        counts = [last - first for first, last in itertools.pairwise(borders)]
        self._ids = {id(ids): ids.inputs[0].split(counts) for ids in workload.batches}
        self._side_stream: Any = torch.cuda.Stream(workload.device) if workload.device.type == "cuda" else None

    def step(self, batch: Ids) -> torch.Tensor:
        workload, samples = self.workload, self.workload.batch_sizes[self.workload.rank]
        owners, columns = len(workload.batch_sizes), self._columns[-1][1]
        output = torch.empty(samples, owners, columns, dtype=workload.output_dtype, device=workload.device)
        held = []  # keeps tensors alive until the current stream has waited for the streams that use them
        for lookup, ids, (first, last) in zip(self._lookups, self._ids[id(batch)], self._columns, strict=True):
            sent = lookup(ids.values(), ids.offsets()).to(workload.wire_dtype)
            received = torch.empty_like(sent)
            work: Any = dist.all_to_all_single(received, sent, async_op=True)
            with torch.cuda.stream(self._side_stream) if self._side_stream else nullcontext():
                work.wait()
                output[:, :, first:last].copy_(received.view(owners, samples, -1).transpose(0, 1))
            held += [sent, received]
        if self._side_stream:
            torch.cuda.current_stream(workload.device).wait_stream(self._side_stream)
        return output.flatten(1)


def make_chunked(workload: Workload) -> list[Contender]:
    """Return contenders of 2, 4 and 8 chunks, if owners have that many tables; none for one rank or unequal dims."""
    dims = [[shard.dim for shard in shards] for shards in workload.layout.by_owner]
    takes_part = len(dims) > 1 and all(each == dims[0] for each in dims)
    return [Chunked(workload, chunks) for chunks in (2, 4, 8) if takes_part and chunks <= len(dims[0])]


def split_lookup(
    lookup: SplitTableBatchedEmbeddingBagsCodegen, borders: Sequence[int]
) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return lookups of the tables [borders[i], borders[i + 1]) that share the rows of `lookup`."""
    name = "weights_host" if lookup.use_cpu else "weights_dev"
    weights = getattr(lookup, name).detach()
    physical_offsets: Any = lookup.weights_physical_offsets
    offsets = [*physical_offsets, weights.numel()]
    parts = []
    for first, last in itertools.pairwise(borders):
        part = SplitTableBatchedEmbeddingBagsCodegen(
            lookup.embedding_specs[first:last],
            pooling_mode=lookup.pooling_mode,
            weights_precision=lookup.weights_precision,
            output_dtype=SparseType.from_int(lookup.output_dtype),
            optimizer=EmbOptimType.EXACT_SGD,  # has no state
            bounds_check_mode=BoundsCheckMode(lookup.bounds_check_mode_int),
            device=weights.device,
        )
        view = weights[offsets[first] : offsets[last]]
        is_parameter = isinstance(getattr(part, name), torch.nn.Parameter)
        setattr(part, name, torch.nn.Parameter(view) if is_parameter else view)  # frees the part's own memory
        parts.append(part)
    return parts


class TorchRec(Contender):
    def __init__(self, workload: Workload) -> None:
        super().__init__("torchrec", workload)
        assert names_in_output(workload.module) == workload.layout.names

    def step(self, batch: Ids) -> torch.Tensor:
        pooled = self.workload.module.compute_and_output_dist(batch.context, batch.inputs).wait().values()
        return pooled.to(self.workload.output_dtype)


class Overlap(Contender):
    """One of our exchanges. Its name ends in `_stores` if the put is staged, in `_copied` if the output is a copy."""

    def __init__(self, workload: Workload, options: ExchangeOptions) -> None:
        names = ["schedule"]
        if has_slices := BACKENDS[options.backend].has_slices:
            names += ["put", "slice_bags", "programs_per_sm"]
        put = "_stores" if has_slices and options.put == "staged" else ""
        super().__init__(options.backend + put + "_copied" * options.copy_output, workload)
        self.columns = {name: getattr(options, name) for name in names}
        forward = replace(options, backward="collective")  # another backward would allocate unused windows
        self._exchange = Exchange(workload.layout, workload.tables, forward, workload.group, workload.device)

    def step(self, batch: Ids) -> torch.Tensor:
        return self._exchange.start(list(batch.inputs), self.workload.batch_sizes).wait()

    def close(self) -> None:
        self._exchange.close()
