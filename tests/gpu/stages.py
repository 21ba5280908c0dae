"""The embedding stage, forward and backward, where every table is cut by rows over all ranks.

    torchrun --nproc-per-node 2 -m tests.gpu.stages --config configs/bench/dim128.yaml --output stages.csv

With both sharders the ids are at their owners before a step begins (ours as captured steps send them), and a step ends
when its outputs are complete, or its rows updated. `gpu_ms` is the GPU's time; outputs and rows must agree first.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.figures.backward import GradientBatch, make_batches
from dlrm_overlap.bench.harness.agreement import check_outputs, check_rows, disagreements
from dlrm_overlap.bench.harness.contenders import Contender, TorchRec, close_all
from dlrm_overlap.bench.harness.timing import time_alone
from dlrm_overlap.bench.harness.workload import (
    Ids,
    Workload,
    collect_garbage,
    exchange_options,
    make_workload,
    read_ids,
)
from dlrm_overlap.bench.rows import append_rows, print_table
from dlrm_overlap.config import Config
from dlrm_overlap.embedding.backends.ids import ArrivedIds
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.id_sender import IdSender
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.train.ranks import Ranks, run_on_ranks
from tests.gpu.one_gpu import torchrun_line

_OPTIMIZER, _REPETITIONS, _BAGS = "rowwise_adagrad", 30, (1, 8, 32)


class _Captured(Contender):
    """Our exchange as in captured steps: ids were published, so empty bags of row shards are not sent."""

    def __init__(self, workload: Workload, config: Config, backend: str, sparse: Sequence[KeyedJaggedTensor]) -> None:
        """Open the exchange, and send the ids `sparse` of the workload's batches to their owners; a collective."""
        super().__init__(backend, workload)
        options = exchange_options(config, backend)
        self._exchange = Exchange(workload.layout, workload.tables, options, workload.group, workload.device)
        keys, samples = sparse[0].keys(), sparse[0].stride()
        most = sparse[0].lengths().view(len(keys), samples).amax(1).tolist()
        sizes = {key: (size, size) for key, size in zip(keys, most, strict=True)}
        sender = IdSender(self._exchange, keys, BatchCapacity(samples, sizes))
        self._arrived: dict[int, ArrivedIds] = {}  # by id(batch); copies, since later ids overwrite them
        for batch, features in zip(workload.batches, sparse, strict=True):
            sender.send(features.to(workload.device))
            _, arrived = sender._sent.pop()
            assert arrived.own_offsets is not None, "tables that are cut by rows"
            offsets = arrived.own_offsets.clone()
            self._arrived[id(batch)] = arrived._replace(ids=_copied(arrived.ids), own_offsets=offsets)

    def step(self, batch: Ids) -> torch.Tensor:
        arrived = self._arrived[id(batch)]
        step = Step([arrived.ids], arrived.batch, own_offsets=arrived.own_offsets)
        return self._exchange.start_step(step).wait()

    def close(self) -> None:
        self._exchange.close()


def _copied(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(ids.keys(), ids.values().clone(), offsets=ids.offsets().clone(), stride=ids.stride())


class _Whole(Contender):
    """A contender of the forward with its backward."""

    def __init__(self, forward: Contender) -> None:
        super().__init__(forward.name, forward.workload)
        self._forward, self.close = forward, forward.close

    def step(self, batch: GradientBatch) -> None:
        with torch.enable_grad():
            pooled = self._forward.step(batch.ids)
            pooled.backward(batch.gradient.to(pooled.dtype))


def _measure_rows(config: Config, ranks: Ranks, group: dist.ProcessGroup, ids_a_bag: int) -> list[dict[str, Any]]:
    config = replace(config, data=replace(config.data, tables=replace(config.data.tables, multi_hot=ids_a_bag)))
    sparse, size = read_ids(config, group, ranks.device), ranks.world.local_world_size
    workload = make_workload(config, sparse, group, ranks.device, size, optimizer=_OPTIMIZER, cut_rows=True)
    batches = make_batches(workload)

    def contenders_of_forward() -> list[Contender]:
        return [TorchRec(workload), *(_Captured(workload, config, name, sparse) for name in ("pgas", "fused"))]

    pooling = contenders_of_forward()
    whole: list[Contender] = [_Whole(each) for each in contenders_of_forward()]
    faults = disagreements(pooling, check_outputs(pooling, workload))
    faults += disagreements(whole, check_rows(whole, workload, batches, _OPTIMIZER), "rows or states")
    rows = []
    if not faults:
        for what, contenders, each in (("forward", pooling, workload.batches), ("both", whole, batches)):
            found = time_alone([c.cycle(each) for c in contenders], _REPETITIONS, ranks.device)
            rows += [
                {"ids_a_bag": ids_a_bag, "part": what, "contender": contender.name}
                | {"gpu_ms": timing.median_ms, "host_ms": timing.host_ms}
                | {"speedup": found[0].median_ms / timing.median_ms}
                for contender, timing in zip(contenders, found, strict=True)
            ]
    elif ranks.world.rank == 0:
        print("\n".join(faults), flush=True)
    close_all([*pooling, *whole])
    return rows


def work(ranks: Ranks) -> int:
    group, found = ranks.connect(), list[dict[str, Any]]()
    config = replace(ranks.config, train=replace(ranks.config.train, precision="bf16"))
    for ids_a_bag in _BAGS:
        found += _measure_rows(config, ranks, group, ids_a_bag)
        collect_garbage(ranks.device)
    if ranks.world.rank == 0:
        print_table(found, list(found[0]) if found else ())
        about = {"dim": config.model.dim, "world_size": ranks.world.world_size}
        append_rows(Path(ranks.values.output), [row | about for row in found], torchrun_line("tests.gpu.stages"))
    return 0


def add_options(parser: Parser) -> None:
    parser.add_argument("--output", default="stages.csv", help="CSV file to append the rows to")


if __name__ == "__main__":
    sys.exit(run_on_ranks(["train"], str(__doc__), sys.argv[1:], work, add_options))
