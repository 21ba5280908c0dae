"""`bench partial_sums`: how many bytes travel of tables that are cut by rows?

All tables are cut over all ranks, and every bag has L ids, of rows drawn alike. A row is a pooling factor L: the bytes
that a rank gets from its peers in a step whose ids the exchange sends, on average over ranks and batches. They are
counted where they arrive: a window is filled with NaN before the step, and each element that is none after it was
stored. Forward they are partial sums, backward gradients. Beside them are the bytes that TorchRec's dense
reduce-scatter and all-gather carry, each, and the part of these that is expected: with a chance of 1 - (1 - 1/W)^L a
bag has ids of an owner's rows. Outputs are compared with those of TorchRec's sharded module first, and if they differ
no row is reported.
"""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.harness.agreement import TOLERANCE
from dlrm_overlap.bench.harness.contenders import TorchRec
from dlrm_overlap.bench.harness.limits import describe
from dlrm_overlap.bench.harness.turns import greatest
from dlrm_overlap.bench.harness.workload import Workload, make_workload, read_ids
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import PartialSumsRequest, with_tables
from dlrm_overlap.embedding.backends.base import WindowBackward, WindowForward
from dlrm_overlap.embedding.id_layout import BatchBound, IdLayout, joined
from dlrm_overlap.embedding.opening import Halves, open_halves
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.traffic import filled_share
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.train.ranks import Ranks

_SHOWN = ("world_size", "multi_hot", "forward_bytes", "backward_bytes", "torchrec_bytes", "expected_bytes")


class Counted:
    """An exchange of a workload whose ids it sends itself, and the bytes that arrive in its steps."""

    def __init__(self, workload: Workload, options: ExchangeOptions, ids_a_bag: int) -> None:
        """Open the exchange; all ranks call this."""
        self._workload, self._samples = workload, workload.batch_sizes[workload.rank]
        self._layout = joined(workload.layout)
        names = sorted({shard.feature_name for shards in self._layout.by_owner for shard in shards})
        bound = BatchBound(self._samples, dict.fromkeys(names, (ids_a_bag, ids_a_bag)))
        ids = IdLayout(self._layout, names, bound)
        about = workload.group, workload.device, self._samples, StepCounters(workload.device)
        self._halves: Halves = open_halves(ExchangeContext(self._layout, workload.tables, options, *about, ids=ids))
        forward, backward = self._halves.forward, self._halves.backward
        assert isinstance(forward, WindowForward)
        assert isinstance(backward, WindowBackward)
        self._forward, self._backward = forward, backward

    def step(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, int, int]:
        """Take a step of this rank's ids; all ranks call this.

        Returns:
            The pooled embeddings [b, D_total], and the bytes that arrived from peers: of the forward, of the backward.
        """
        assert self._halves.ids is not None
        arrived = self._halves.ids.send(features, self._samples)
        step = Step([arrived.ids], arrived.batch)
        step.own_offsets = arrived.own_offsets
        for pair in (self._forward.windows, self._backward.windows):
            self._clear(pair)
        self._meet()
        self._forward.start(step)
        self._meet()  # all has been stored, and nothing been added up
        forward_bytes = self._arrived_forward()
        self._backward.note_forward(step)
        pooled = self._forward.finish(step, copy=True)
        self._backward.start(step, torch.ones_like(pooled))
        self._meet()
        backward_bytes = self._arrived_backward(step)
        self._backward.finish(step)
        self._meet()
        return pooled, forward_bytes, backward_bytes

    def _clear(self, pair: WindowPair) -> None:
        for name in pair.names:
            pair.arena.local(name).fill_(torch.nan)

    def _meet(self) -> None:
        """Wait until every rank has done all that it has issued."""
        if self._workload.device.type == "cuda":
            torch.cuda.synchronize(self._workload.device)
        dist.barrier(self._workload.group)

    def _arrived_forward(self) -> int:
        window, rank = self._forward.windows.local, self._workload.rank
        return sum(
            _stored_bytes(window[:, (column := self._forward.column(shard)) : column + shard.dim])
            for owner, shards in enumerate(self._layout.by_owner)
            for shard in shards
            if owner != rank
        )

    def _arrived_backward(self, step: Step) -> int:
        first, total = step.batch.first_sample[self._workload.rank], 0
        for shard in self._layout.by_owner[self._workload.rank]:
            rows = self._backward.gradient_of(shard, self._backward.windows.local, step.batch.total)
            total += _stored_bytes(rows[:first]) + _stored_bytes(rows[first + self._samples :])
        return total

    def close(self) -> None:
        """Free the windows. Every rank must have finished its steps."""
        self._halves.close()


def _stored_bytes(window: torch.Tensor) -> int:
    return int((~window.isnan()).sum()) * window.element_size()


def run(request: PartialSumsRequest, ranks: Ranks) -> int:
    """Count the figure; on rank 0 print its table and append its rows. All ranks call this.

    Returns:
        The exit code: 1 if outputs differ from TorchRec's, and there is no row.
    """
    group, world_size = ranks.connect(), ranks.world.world_size
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for ids_a_bag in request.pooling_factors:
        config = with_tables(ranks.config, multi_hot=ids_a_bag, zipf_alpha=0.0)
        sparse = read_ids(config, group, ranks.device)
        local_size = ranks.world.local_world_size
        workload = make_workload(config, sparse, group, ranks.device, local_size, cut_rows=True)
        counted = Counted(workload, workload.exchange_options(config.embedding, "pgas"), ids_a_bag)
        torchrec, found, difference = TorchRec(workload), torch.zeros(2, dtype=torch.int64), 0.0
        for ids, features in zip(workload.batches, sparse, strict=True):
            expected = torchrec.step(ids).detach().clone()  # before the rows are updated
            pooled, *arrived = counted.step(features.to(ranks.device))
            differs = (pooled - expected).abs().max() / expected.abs().max()
            difference = max(difference, float(differs.nan_to_num(torch.inf)))
            found += torch.tensor(arrived)
        counted.close()
        (worst,), tolerance = greatest([difference], ranks.device, group), TOLERANCE[workload.wire_dtype]
        if not worst <= tolerance:
            faults.append(f"pgas, {ids_a_bag} ids a bag: outputs differ from TorchRec's by {worst:.1e}; no row")
        dist.all_reduce(found := found.to(ranks.device), group=group)
        forward_bytes, backward_bytes = (round(int(each) / world_size / len(sparse)) for each in found)
        peers = sum(workload.batch_sizes) - workload.batch_sizes[workload.rank]
        dense_bytes = peers * workload.layout.total_dim * workload.wire_dtype.itemsize
        rows.append(
            {"kind": request.kind}
            | describe(config, workload)
            | {"forward_bytes": forward_bytes, "backward_bytes": backward_bytes, "torchrec_bytes": dense_bytes}
            | {"expected_bytes": round(dense_bytes * filled_share(ids_a_bag, 1 / world_size))}
        )
    if ranks.world.rank == 0:
        title = "bytes that a rank gets from its peers in a step"
        report([] if faults else rows, faults, request.output, _SHOWN, title)
    return 1 if faults else 0
