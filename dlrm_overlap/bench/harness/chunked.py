"""The baseline as a skilled user would write it: in chunks, so that NCCL sends one while FBGEMM looks up the next."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.workload import Ids, Workload


class Chunked(Contender):
    """FBGEMM's lookup of some tables after the other; each chunk's All-to-All and unpacking beside the next lookup.

    A chunk is some of every owner's tables, for all samples. Lookups are on the current stream, the collectives on
    NCCL's, and the unpacking on a third, which alone waits for the collectives: so no lookup waits for anything. The
    ids of a chunk lie together, as TorchRec's input_dist would bring them if each chunk were a group of tables of its
    own; that costs no time here. On a CPU, which has no streams, the chunks come one after the other.
    """

    def __init__(self, workload: Workload, chunks: int) -> None:
        """Cut each owner's tables into `chunks` parts, of which none may be empty."""
        super().__init__(f"nccl_chunked_{chunks}", workload)
        layout, rank = workload.layout, workload.rank
        assert layout.sent_in_order, "owners hold their tables in the model's order"
        dims = [[shard.dim for shard in shards] for shards in layout.by_owner]
        borders = [[chunk * len(own) // chunks for chunk in range(chunks + 1)] for own in dims]
        # [chunk][owner]
        self._dims = [[sum(own[b[k] : b[k + 1]]) for own, b in zip(dims, borders, strict=True)] for k in range(chunks)]
        starts = [0, *accumulate(layout.owner_dims)]
        self._columns = [
            [start + sum(own[: b[k]]) for start, own, b in zip(starts, dims, borders, strict=False)]
            for k in range(chunks)
        ]
        self._alike = len({tuple(own) for own in dims}) == 1
        self._samples, self._rank = workload.batch_sizes[rank], rank
        (lookup,) = workload.tables.lookups
        self._lookups = split_lookup(lookup, borders[rank])
        tables = [last - first for first, last in pairwise(borders[rank])]
        self._ids = {id(ids): ids.inputs[0].split(tables) for ids in workload.batches}
        on_gpu = workload.device.type == "cuda"
        self._beside: Any = torch.cuda.Stream(workload.device) if on_gpu else None

    def step(self, batch: Ids) -> torch.Tensor:
        """Run the stage."""
        workload = self.workload
        shape = self._samples, workload.layout.total_dim
        output = torch.empty(shape, dtype=workload.output_dtype, device=workload.device)
        held = []  # until the current stream is behind those that read and write them
        for k, (lookup, ids) in enumerate(zip(self._lookups, self._ids[id(batch)], strict=True)):
            sent, received, work = self._send(lookup(ids.values(), ids.offsets()), k)
            with torch.cuda.stream(self._beside) if self._beside else nullcontext():
                work.wait()
                self._unpack(received, output, k)
            held += [sent, received]
        if self._beside:
            torch.cuda.current_stream(workload.device).wait_stream(self._beside)
        return output

    def _send(self, pooled: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Start chunk k's All-to-All; return what is sent, what is received, and what waits for it."""
        workload = self.workload
        sent = pooled.to(workload.wire_dtype)
        receive_sizes = [self._samples * dim for dim in self._dims[k]]
        send_sizes = [size * self._dims[k][self._rank] for size in workload.batch_sizes]
        received = sent.new_empty(sum(receive_sizes))
        sizes = receive_sizes, send_sizes
        work = dist.all_to_all_single(received, sent.view(-1), *sizes, group=workload.group, async_op=True)
        return sent, received, work

    def _unpack(self, received: torch.Tensor, output: torch.Tensor, k: int) -> None:
        """Copy a chunk's columns of each owner to where the model reads them, in one copy if owners are alike."""
        dims, columns, mine = self._dims[k], self._columns[k], self._samples
        if self._alike:
            by_owner = output.view(mine, len(dims), -1)[:, :, columns[0] : columns[0] + dims[0]]
            by_owner.copy_(received.view(len(dims), mine, -1).transpose(0, 1))
            return
        for part, column, dim in zip(received.split([mine * dim for dim in dims]), columns, dims, strict=True):
            output[:, column : column + dim].copy_(part.view(mine, dim))


def make_chunked(workload: Workload) -> list[Contender]:
    """Return contenders of 2, 4 and 8 chunks, as far as every rank has so many tables; a rank alone has none."""
    fewest = min(map(len, workload.layout.by_owner))
    return [Chunked(workload, n) for n in (2, 4, 8) if n <= fewest] if workload.group.size() > 1 else []


def split_lookup(
    lookup: SplitTableBatchedEmbeddingBagsCodegen, borders: Sequence[int]
) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return lookups of the tables [borders[i], borders[i + 1]) of `lookup` that read its rows where they are.

    They deliver the type that it delivers, so that no chunk is cast which all at once is not.
    """
    name = "weights_host" if lookup.use_cpu else "weights_dev"
    weights = getattr(lookup, name).detach()
    offsets: Any = lookup.weights_physical_offsets
    places = [*offsets, weights.numel()]
    parts = []
    for first, last in pairwise(borders):
        part = SplitTableBatchedEmbeddingBagsCodegen(
            lookup.embedding_specs[first:last],
            pooling_mode=lookup.pooling_mode,
            weights_precision=lookup.weights_precision,
            output_dtype=SparseType.from_int(lookup.output_dtype),
            optimizer=EmbOptimType.EXACT_SGD,  # has no state
            bounds_check_mode=BoundsCheckMode(lookup.bounds_check_mode_int),
            device=weights.device,
        )
        view = weights[places[first] : places[last]]
        is_parameter = isinstance(getattr(part, name), torch.nn.Parameter)
        setattr(part, name, torch.nn.Parameter(view) if is_parameter else view)  # frees its own
        parts.append(part)
    return parts
