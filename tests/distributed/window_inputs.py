"""Models whose ids are sent through windows in TorchRec's pipelines, and by TorchRec. Imports no pytest."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.torchrec_private import WeightDecayMode
from tests.agreement import assert_same
from tests.distributed.models import MEAN, SUM, Model, Shards, Tables, draw_ids, make_plan, train

TABLES: Tables = {
    "narrow": (30, 4, ["f0"], SUM),
    "two_features": (50, 64, ["shared", "f2"], SUM),
    "cut_by_rows": (40, 8, ["f4", "shared"], SUM),
    "mean": (20, 8, ["f3"], MEAN),
}
OTHER_TABLES: Tables = {"other": (25, 8, ["f5"], SUM)}
ROWS = {"f4": 40, "f2": 50, "unused": 3, "f0": 30, "f5": 25, "f3": 20, "shared": 40}
WHOLE: Shards = {"narrow": [0], "two_features": [1], "cut_by_rows": [0], "mean": [1]}
BY_ROWS = row_wise(compute_kernel="fused")
EVERY_KIND: Shards = {"narrow": [0], "two_features": [1, 0], "cut_by_rows": BY_ROWS, "mean": [1]}


@dataclass(frozen=True)
class Case:
    plan: Shards = field(default_factory=lambda: EVERY_KIND)
    other: Shards = field(default_factory=lambda: {"other": [0]})
    pipeline: Any = "sparse_dist"
    """see `open_pipeline`"""
    samples: Sequence[tuple[int, int]] = ((5, 5),) * 4
    """of each rank, by step"""
    bags: Sequence[tuple[int, int]] = ((0, 3),) * 4
    """least and most ids of a bag, by step"""
    weighted: Sequence[bool] = (False,) * 4
    """whether ids have weights, by step"""
    sent: int = 3
    """batches whose ids are sent through windows: TorchRec sends those of the first"""


class _Reset(TrainPipelineSparseDist[Any, Any]):
    """Evaluates a batch, and forgets the batches that are under way, before its third step."""

    steps = 0
    rest: Iterator[Any] = iter(())

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        self.steps += 1
        if self.steps == 3:
            batches, model = list(dataloader_iter), cast("torch.nn.Module", self._model)
            self.rest = itertools.cycle(batches)
            self.reset()
            model.eval()
            with torch.no_grad():
                super().progress(iter(batches))
            model.train()
            self.reset()
        return super().progress(self.rest if self.steps >= 3 else dataloader_iter)


class _Tracked(TrainPipelineSparseDist[Any, Any]):
    """Tracks lookups from the third step on, whose ids have been sent by then."""

    steps, seen = 0, 0

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        self.steps += 1
        model = cast("torch.nn.Module", self._model)
        modules: list[Any] = [each for each in model.modules() if isinstance(each, ExchangingModule)]
        if self.steps == 3:
            for each in modules:
                each.register_post_lookup_tracker_fn(self._count)
        output, seen = super().progress(dataloader_iter), self.seen
        assert bool(seen) == (self.steps >= 3), f"{seen} lookups were tracked by the end of step {self.steps}"
        self.seen = 0
        return output

    def _count(self, *_: Any) -> None:
        self.seen += 1


CASES = {
    "every kind of sharding": Case(),
    "whole tables": Case(WHOLE),
    "a rank without tables": Case({name: [1] for name in TABLES}),
    "tables that TorchRec looks up": Case(EVERY_KIND | {"narrow": []}),
    "means of tables that are cut by rows": Case(EVERY_KIND | {"mean": BY_ROWS}),
    "without a pipeline": Case(pipeline="none"),
    "evaluations and forgotten batches": Case(
        pipeline=_Reset, samples=((5, 5),) * 6, bags=((0, 3),) * 6, weighted=(False,) * 6, sent=9
    ),
    "a tracker from the third step on": Case(pipeline=_Tracked, sent=2),
    "known lengths": Case(bags=((2, 2),) * 4),
    "known lengths and fewer samples": Case(WHOLE, bags=((2, 2),) * 4, samples=((5, 5), (5, 5), (2, 5), (5, 3))),
    "known lengths and no samples": Case(WHOLE, bags=((2, 2),) * 4, samples=((5, 5), (5, 5), (0, 5), (5, 3))),
    "longer bags": Case(bags=((0, 3), (1, 2), (0, 9), (3, 20))),
    "lengths are known no more": Case(bags=((2, 2), (2, 2), (1, 3), (2, 2))),
    # FBGEMM cannot divide a batch without samples by rows, on GPUs.
    "other samples": Case(WHOLE, samples=((5, 5), (2, 9), (4, 0), (12, 3))),
    "no samples": Case(WHOLE, samples=((5, 5), (0, 0), (0, 0), (5, 5))),
    "some weights": Case(weighted=(False, False, True, False), sent=2),
    "known lengths, weights and shorter bags": Case(
        bags=((2, 2), (2, 2), (2, 2), (0, 2)), weighted=(False, False, True, False), sent=2
    ),
    "weights from the second batch on": Case(weighted=(False, True, True, True), sent=0),
}
if "free_features_storage_early" in signature(TrainPipelineSparseDist).parameters:  # not in every release
    CASES["ids that the pipeline frees early"] = Case(
        pipeline=partial(TrainPipelineSparseDist, free_features_storage_early=True), other={"other": []}, sent=0
    )


def _batches(case: Case, repeats: int) -> Iterator[Batch]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for samples, (least, most), weighted in repeats * list(zip(case.samples, case.bags, case.weighted, strict=True)):
        mine = samples[rank % 2]
        lengths = torch.randint(least, most + 1, (len(ROWS), mine), generator=generator)
        weights = torch.tensor([-2.0, 0.25, 1.0]) if weighted else None
        sparse = draw_ids(generator, ROWS, list(lengths), torch.int64, weights)
        yield Batch(torch.rand(mine, 1, generator=generator), sparse, torch.empty(0))


def _train(case: Case, sharder: Any, device: torch.device, repeats: int) -> tuple[dict[str, Any], list[int]]:
    """Return the result of `train`, and the number of batches whose ids each module has sent through windows.

    On GPUs the ranks are slow in turns.
    """
    model, sent, calls = Model(TABLES, OTHER_TABLES), list[int](), itertools.count()

    def hesitate(*_: Any) -> None:
        if next(calls) % dist.get_world_size() == dist.get_rank():
            torch.cuda._sleep(2_000_000)  # about a millisecond

    def count(sharded: DistributedModelParallel, _: Any) -> None:
        sent.extend(exchange.counters.ids.value for exchange in exchanges(sharded))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()  # before windows are freed

    if device.type == "cuda":
        model.dense.register_forward_pre_hook(hesitate)
    plan = make_plan(model, case.plan, case.other, sharder, device_type=device.type)
    batches = list(_batches(case, repeats))
    return train(model, plan, sharder, batches, case.pipeline, after=count, device=device), sent


def compare(name: str, device: torch.device, repeats: int = 1) -> None:
    """Check that outputs, rows and states have the same bits as if TorchRec had sent the ids; a collective."""
    case, params = CASES[name], {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5, "eps": 1e-3}
    params |= {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2}  # so a gradient of zero changes a row
    sharders = (OverlapEmbeddingBagCollectionSharder(dict(params), input_dist=by) for by in ("torchrec", "windows"))
    (expected, never), (ours, sent) = (_train(case, sharder, device, repeats) for sharder in sharders)
    assert set(never) == {0}
    assert repeats > 1 or set(sent) == {case.sent}, f"{name}: {sent} batches through windows"
    for part in ("weights", "states"):
        for key, tensor in expected[part].items():
            assert_same(ours[part][key], tensor, f"{name}: {key}")
    for step, outputs in enumerate(expected["outputs"]):
        for key, output in outputs.items():
            assert_same(ours["outputs"][step][key], output, f"{name}: step {step}, output {key}")
