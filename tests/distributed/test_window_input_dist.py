"""Ids through windows in TorchRec's pipelines: what is trained has the same bits as if TorchRec had sent the ids."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from tests.agreement import assert_same
from tests.distributed.models import MEAN, SUM, Model, Shards, Tables, draw_ids, make_plan, train
from tests.distributed.workers import cases_on_ranks

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


CASES = {
    "every kind of sharding": Case(),
    "whole tables": Case(WHOLE),
    "a rank without tables": Case({name: [1] for name in TABLES}),
    "means of tables that are cut by rows": Case(EVERY_KIND | {"mean": BY_ROWS}),
    "without a pipeline": Case(pipeline="none"),
    "evaluations and forgotten batches": Case(
        pipeline=_Reset, samples=((5, 5),) * 6, bags=((0, 3),) * 6, weighted=(False,) * 6, sent=9
    ),
    "known lengths": Case(bags=((2, 2),) * 4),
    "longer bags": Case(bags=((0, 3), (1, 2), (0, 9), (3, 20))),
    "lengths are known no more": Case(bags=((2, 2), (2, 2), (1, 3), (2, 2))),
    "other samples": Case(samples=((5, 5), (2, 9), (4, 0), (12, 3))),
    "no samples": Case(samples=((5, 5), (0, 0), (0, 0), (5, 5))),
    "some weights": Case(weighted=(False, False, True, False), sent=2),
    "weights from the second batch on": Case(weighted=(False, True, True, True), sent=0),
}


def _batches(case: Case) -> Iterator[Batch]:
    generator, rank = torch.Generator().manual_seed(dist.get_rank()), dist.get_rank()
    for samples, (least, most), weighted in zip(case.samples, case.bags, case.weighted, strict=True):
        lengths = torch.randint(least, most + 1, (len(ROWS), samples[rank]), generator=generator)
        weights = torch.tensor([-2.0, 0.25, 1.0]) if weighted else None
        sparse = draw_ids(generator, ROWS, list(lengths), torch.int64, weights)
        yield Batch(torch.rand(samples[rank], 1, generator=generator), sparse, torch.empty(0))


def _train(case: Case, sharder: Any) -> tuple[dict[str, Any], list[int]]:
    """Return the result of `train`, and the number of batches whose ids each module has sent through windows."""
    model, sent = Model(TABLES, OTHER_TABLES), list[int]()

    def count(sharded: DistributedModelParallel, _: Any) -> None:
        sent.extend(exchange.counters.ids.value for exchange in exchanges(sharded))

    plan = make_plan(model, case.plan, {"other": [0]}, sharder)
    return train(model, plan, sharder, list(_batches(case)), case.pipeline, after=count), sent


def _compare(name: str) -> None:
    case, params = CASES[name], {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5, "eps": 1e-3}
    sharders = (OverlapEmbeddingBagCollectionSharder(dict(params), input_dist=by) for by in ("torchrec", "windows"))
    (expected, never), (ours, sent) = (_train(case, sharder) for sharder in sharders)
    assert (never, sent) == ([0, 0], [case.sent] * 2)
    for part in ("weights", "states"):
        for key, tensor in expected[part].items():
            assert_same(ours[part][key], tensor, f"{name}: {key}")
    for step, outputs in enumerate(expected["outputs"]):
        for key, output in outputs.items():
            assert_same(ours["outputs"][step][key], output, f"{name}: step {step}, output {key}")


ended = cases_on_ranks(2, _compare, list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_with_torchrecs_input_dist(ended: Callable[[str], None], name: str) -> None:
    ended(name)
