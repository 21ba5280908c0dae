"""Of tables that are cut by rows, a bag without ids of an owner's rows travels neither way: bytes are counted.

They are counted where they arrive: a window is filled with NaN before the step, and each element that is none after it
was stored. With a chance of 1 - (1 - 1/W)^L a bag of L ids has one of an owner's rows.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.harness.agreement import TOLERANCE
from dlrm_overlap.bench.harness.contenders import TorchRec
from dlrm_overlap.bench.harness.workload import Workload, make_workload, read_ids
from dlrm_overlap.embedding.backends.base import WindowBackward, WindowForward
from dlrm_overlap.embedding.id_layout import BatchBound, IdLayout, joined
from dlrm_overlap.embedding.opening import Halves, open_halves
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.traffic import filled_share
from dlrm_overlap.embedding.windows import WindowPair
from tests.conftest import configuration
from tests.distributed.models import CPU, world
from tests.distributed.workers import run_ranks


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
        shards, window = self._layout.by_owner[self._workload.rank], self._backward.windows.local
        for rows in self._backward.gradients_of(shards, window, step.batch.total).values():
            total += _stored_bytes(rows[:first]) + _stored_bytes(rows[first + self._samples :])
        return total

    def close(self) -> None:
        """Free the windows. Every rank must have finished its steps."""
        self._halves.close()


def _stored_bytes(window: torch.Tensor) -> int:
    return int((~window.isnan()).sum()) * window.element_size()


def _count(_: Path, ids_a_bag: int) -> None:
    shape = ["--data.tables.multi_hot", str(ids_a_bag), "--train.global_batch_size", "2048"]
    config, group = configuration("--config", "configs/bench/tiny.yaml", *shape), world()
    sparse = read_ids(config, group)
    workload = make_workload(config, sparse, group, CPU, 2, cut_rows=True)
    counted = Counted(workload, workload.exchange_options(config.embedding, "pgas"), ids_a_bag)
    torchrec, found = TorchRec(workload), torch.zeros(2, dtype=torch.int64)
    for ids, features in zip(workload.batches, sparse, strict=True):
        expected = torchrec.step(ids).detach().clone()  # before the rows are updated
        pooled, *arrived = counted.step(features)
        assert (pooled - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()
        found += torch.tensor(arrived)
    counted.close()
    dist.all_reduce(found)
    dense_bytes = 1024 * workload.layout.total_dim * 4 * len(sparse) * 2  # of TorchRec's collectives, on both ranks
    filled = filled_share(ids_a_bag, 1 / 2)
    assert (found / dense_bytes).tolist() == pytest.approx([filled, filled], rel=0.02)


@pytest.mark.parametrize("ids_a_bag", [1, 2])
def test_bags_without_ids_of_an_owners_rows_do_not_travel(tmp_path: Path, ids_a_bag: int) -> None:
    run_ranks(_count, 2, tmp_path, ids_a_bag)
