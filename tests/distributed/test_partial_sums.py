"""If tables are cut by rows, bags without ids of an owner's rows are sent neither way: bytes are counted.

Windows are filled with NaN before a step, and elements that are numbers after it have arrived. TorchRec's bytes are
those of its dense collectives. A bag of L ids has one of an owner's rows with the probability 1 - (1 - 1/W)^L. The
shares are in `docs/results/row_bytes.csv`.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.harness.agreement import TOLERANCE
from dlrm_overlap.bench.harness.contenders import TorchRec
from dlrm_overlap.bench.harness.workload import Workload, exchange_options, make_workload, read_ids
from dlrm_overlap.config import Config
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.embedding.backends.base import WindowBackward
from dlrm_overlap.embedding.backends.pgas import ZeroCopyForward
from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout, joined
from dlrm_overlap.embedding.opening import ExchangeParts, build_exchange
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.traffic import partial_sums
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels import reference
from tests.calibration import read_rows
from tests.conftest import configuration
from tests.distributed.models import CPU, world
from tests.distributed.workers import run_ranks
from tests.simulated_pages import FOLDER

ROWS, IDS_A_BAG = 1024, (1, 2, 8, 32)


class Counted:
    """An exchange of a workload that sends the ids, and counts the bytes that arrive in its steps."""

    def __init__(self, workload: Workload, options: ExchangeOptions, ids_a_bag: int) -> None:
        """Open the exchange; all ranks call this."""
        self._workload, self._samples = workload, workload.batch_sizes[workload.rank]
        self._layout = joined(workload.layout)
        names = sorted({shard.feature_name for shards in self._layout.by_owner for shard in shards})
        ids = IdLayout(self._layout, names, BatchCapacity(self._samples, dict.fromkeys(names, (ids_a_bag, ids_a_bag))))
        about = workload.group, workload.device, self._samples, StepCounters(workload.device)
        self._parts: ExchangeParts = build_exchange(
            ExchangeContext(self._layout, workload.tables, options, *about, ids=ids)
        )
        forward, backward = self._parts.forward, self._parts.backward
        assert isinstance(forward, ZeroCopyForward)
        assert isinstance(backward, WindowBackward)
        self._forward, self._backward = forward, backward

    def step(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, int, int]:
        """Return pooled embeddings [b, D_total], and the bytes that arrived from peers in forward and backward."""
        assert self._parts.ids is not None
        arrived = self._parts.ids.send(features, self._samples)
        step = Step([arrived.ids], arrived.batch, own_offsets=arrived.own_offsets)
        for pair in (self._forward.windows, self._backward.windows):
            self._clear(pair)
        self._meet()
        started = self._forward.start(step)
        self._meet()  # all is stored, but not yet added up
        forward_bytes = self._arrived_forward()
        pending = self._backward.note_forward(step)
        pooled = self._forward.finish(started, copy=True)
        pushed = self._backward.start(pending, torch.ones_like(pooled))
        self._meet()
        backward_bytes = self._arrived_backward(step)
        self._backward.finish(pushed)
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
        for rows in self._backward.gradients.views(shards, window, step.batch.total).values():
            total += _stored_bytes(rows[:first]) + _stored_bytes(rows[first + self._samples :])
        return total

    def close(self) -> None:
        """Free the windows. Every rank must have finished its steps."""
        self._parts.close()


def _stored_bytes(window: torch.Tensor) -> int:
    return int((~window.isnan()).sum()) * window.element_size()


def _noting(name: str, moved: list[int]) -> Any:
    """Return a patch of a collective of dense tensors that notes the bytes a rank gets from its peers."""
    collective = getattr(dist, name)

    def note(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
        moved.append(abs(output.nbytes - given.nbytes))  # one holds all ranks' parts, the other one rank's
        return collective(output, given, **options)

    return patch.object(dist, name, note)


def _count(folder: Path) -> None:
    """Count the bytes of some batches for each bag size, by our exchange and by TorchRec's, both ways."""
    group, found = world(), {}
    for ids_a_bag in IDS_A_BAG:
        config = _config(ids_a_bag)
        sparse = read_ids(config, group)
        workload = make_workload(config, sparse, group, CPU, group.size(), cut_rows=True)
        counted = Counted(workload, exchange_options(config, "pgas"), ids_a_bag)
        torchrec, arrived = TorchRec(workload), torch.zeros(2, dtype=torch.int64)
        for ids, features in zip(workload.batches, sparse, strict=True):
            expected = torchrec.step(ids).detach().clone()  # before the rows are updated
            pooled, *both_ways = counted.step(features)
            assert (pooled - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()
            arrived += torch.tensor(both_ways)
        counted.close()
        dist.all_reduce(arrived)
        moved: list[int] = []
        with _noting("reduce_scatter_tensor", moved), _noting("all_gather_into_tensor", moved):
            torchrec.step(workload.batches[0]).sum().backward()
        dense = torch.tensor(moved) * len(sparse)
        dist.all_reduce(dense)
        found[ids_a_bag] = (*arrived.tolist(), *dense.tolist())
    if group.rank() == 0:
        torch.save(found, folder / "bytes.pt")


def _config(ids_a_bag: int) -> Config:
    shape = {"data.tables.multi_hot": ids_a_bag, "data.tables.rows": ROWS, "train.global_batch_size": 1024}
    return configuration("--config", "configs/bench/tiny.yaml", *(f"--{key}={value}" for key, value in shape.items()))


def _check(ranks: int, ids_a_bag: int, share: float, by: str) -> None:
    """Compare a share of the bytes with the formula, and with the page's number."""
    assert share == pytest.approx(partial_sums(ids_a_bag, ranks) / ranks, rel=0.02)
    row = {"ranks": str(ranks), "ids_a_bag": str(ids_a_bag), "by": by, "share": f"{share:.1%}"}
    assert row in [{name: line[name] for name in row} for line in read_rows(FOLDER / "row_bytes.csv")]


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_bags_without_ids_of_an_owners_rows_are_not_sent(tmp_path: Path, ranks: int) -> None:
    run_ranks(_count, ranks, tmp_path)
    for ids_a_bag, (forward, backward, scattered, gathered) in torch.load(tmp_path / "bytes.pt").items():
        assert (forward, scattered) == (backward, gathered), "the gradient of each partial sum returns"
        _check(ranks, ids_a_bag, forward / scattered, "counted")


@pytest.mark.parametrize("ranks", [16, 64])
@pytest.mark.parametrize("ids_a_bag", IDS_A_BAG)
def test_bags_of_more_ranks_follow_the_formula(ranks: int, ids_a_bag: int) -> None:
    """The ids of a batch are divided among owners; only bags with ids are sent."""
    samples, rows = 64 * 64, ROWS // ranks
    ids = open_datasets(_config(ids_a_bag).data)[0].read(0, samples).sparse
    owners = [(owner * rows, (owner + 1) * rows) for owner in range(ranks)]
    shares = [(feature, *owned) for feature in range(len(ids.keys())) for owned in owners]
    _, _, lengths = reference.divide_ids(ids.values().int(), ids.offsets(), shares, samples)
    filled = (lengths.view(-1, ranks, ranks, samples // ranks) > 0).float()  # of each feature, owner and sample's rank
    from_peers = filled.mean(dim=(0, 3)).masked_fill(torch.eye(ranks) > 0, 0.0)
    _check(ranks, ids_a_bag, float(from_peers.sum()) / (ranks * (ranks - 1)), "simulated")
