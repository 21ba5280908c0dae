"""Variable batches: each step is exchanged and captured, and trains as TorchRec does.

TorchRec gets a bag for each sample, since FBGEMM's lookups take no variable batch on a CPU.
"""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.embedding.variable_batch import gathering, of_samples, with_bags_of_samples, with_even_batches
from dlrm_overlap.train.graphs.static_batch import with_even_batches_of
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near, assert_same
from tests.conftest import refuses
from tests.distributed.captured import captures
from tests.distributed.models import CPU, MEAN, SUM, Model, Table, Tables, make_plan, open_pipeline, sharding_of, train
from tests.distributed.workers import logged_messages, run_ranks

STEPS = 7
# A capacity that is learnt from so few samples grows, and steps are eager.
CAPACITY = BatchCapacity(4, dict.fromkeys("fghij", (0, 3)))
TABLES: Tables = {
    "whole": (20, 8, ["f", "g"], MEAN),
    "shared": (20, 4, ["g"], SUM),
    "columns": (30, 16, ["h"], SUM),
    "of_a_node": (22, 8, ["i", "g"], SUM),
    "grid": (9, 16, ["f"], SUM),
}
OTHERS: Tables = {"rows": (21, 8, ["i"], SUM), "mean_of_rows": (11, 4, ["j"], MEAN)}
FEATURES = list("fghij")
LOCAL = 2  # ranks of a node
BY_ROWS: Any = dict.fromkeys(OTHERS, row_wise(compute_kernel="fused"))


def _batches(samples: int) -> list[Batch]:
    """Return batches in which f and i have few bags, h one for each sample, and g and j one or all in turns."""
    generator, batches = torch.Generator().manual_seed(dist.get_rank()), []
    for step in range(STEPS):
        few, turns = 1 + (step + dist.get_rank()) % 3, samples if step % 2 else 1
        sizes = [few, turns, samples, few, turns]
        lengths = [torch.randint(0, 4, (size,), generator=generator) for size in sizes]
        inverse = torch.stack([torch.randint(0, size, (samples,), generator=generator) for size in sizes])
        ids = torch.randint(0, 9, (int(sum(each.sum() for each in lengths)),), generator=generator)
        sparse = KeyedJaggedTensor(
            FEATURES,
            ids,
            lengths=torch.cat(lengths),
            stride_per_key_per_rank=[[size] for size in sizes],
            inverse_indices=(FEATURES, inverse),
        )
        batches.append(Batch(torch.rand(samples, 1, generator=generator), sparse, torch.empty(0)))
    return batches


def _expanded(batch: Batch) -> Batch:
    """Return the batch with a bag for each sample."""
    values, lengths = [], []
    for bags, of_feature in zip(batch.sparse.to_dict().values(), batch.sparse.inverse_indices()[1], strict=True):
        every = bags.to_dense()
        values += [every[int(number)] for number in of_feature]
        lengths += [each.numel() for each in values[-len(of_feature) :]]
    sparse = KeyedJaggedTensor(batch.sparse.keys(), torch.cat(values), lengths=torch.tensor(lengths))
    return Batch(batch.dense, sparse, batch.labels)


def _with_inverse_indices(batch: Batch) -> Batch:
    """Return the batch of one stride with inverse indices, which are not for the lookup then."""
    ids, samples = batch.sparse, batch.sparse.stride()
    inverse = ids.keys(), torch.zeros(len(ids.keys()), samples, dtype=torch.int64)
    sparse = KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths(), stride=samples, inverse_indices=inverse)
    return Batch(batch.dense, sparse, batch.labels)


def _train(sharder: Any, pipeline: str, batches: list[Batch], capacity: BatchCapacity | None = None) -> dict[str, Any]:
    model, ranks = Model(TABLES, OTHERS), list(range(dist.get_world_size()))

    def cut_by_nodes(name: str, kind: str, owners: list[int], cuts: int) -> Any:
        return sharding_of(Table(*TABLES[name][:3], False, kind, owners, cuts))

    shards: Any = {"whole": [0], "shared": [0], "columns": [1, 0]}  # rank 1 has no whole table
    shards["of_a_node"] = cut_by_nodes("of_a_node", "table_row_wise", ranks[-LOCAL:], 1)
    shards["grid"] = cut_by_nodes("grid", "grid_shard", ranks, len(ranks) // LOCAL)
    plan = make_plan(model, shards, BY_ROWS, sharder, local_size=LOCAL)
    evaluated = []

    def evaluate(sharded: DistributedModelParallel, optimizer: CombinedOptimizer) -> None:
        """Evaluate before the first step, when no exchange takes ids yet."""
        sharded.eval()
        with torch.no_grad():
            evaluated.append(open_pipeline(pipeline, sharded, optimizer, capacity, CPU).progress(iter(batches[:1])))
        sharded.train()

    given = train(model, plan, sharder, batches, pipeline, before=evaluate, capacity=capacity)
    return given | {"outputs": evaluated + given["outputs"]}


def _check(_: Path) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL)  # TorchRec reads it
    params = {"learning_rate": 0.5}
    whole = [_expanded(batch) for batch in _batches(4)]
    torchrec, messages = _train(EmbeddingBagCollectionSharder(dict(params)), "none", whole), logged_messages()
    unused = [_with_inverse_indices(batch) for batch in whole]
    variable = [(pipeline, _batches(4)) for pipeline in ("none", "sparse_dist", "graph", "captured")]
    for pipeline, batches in (*variable, ("none", unused), ("graph", unused)):
        sharder, captured = OverlapEmbeddingBagCollectionSharder(dict(params)), pipeline == "captured"
        with captures() if captured else nullcontext() as taken:
            ours = _train(sharder, "graph" if captured else pipeline, batches, CAPACITY if captured else None)
        assert taken in (None, {"captured": 2, "replayed": STEPS - 5}), taken
        for step, pair in enumerate(zip(ours["outputs"], torchrec["outputs"], strict=True)):
            assert_all_near(*pair, WEIGHT_TOLERANCE["fp32"], f"{pipeline}, step {step}, output")
        assert_all_near(ours["weights"], torchrec["weights"], WEIGHT_TOLERANCE["fp32"], f"{pipeline}, weights")
        assert not [message for message in messages if "TorchRec" in message], messages


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_they_are_trained_as_by_torchrec(tmp_path: Path, ranks: int) -> None:
    run_ranks(_check, ranks, tmp_path)


def _ids(**more: Any) -> KeyedJaggedTensor:
    values, lengths = torch.tensor([5, 7, 1, 2, 3]), torch.ones(5).int()
    return KeyedJaggedTensor(["f", "g"], values, lengths=lengths, stride_per_key_per_rank=[[2], [3]], **more)


def test_empty_bags_are_added_and_not_used() -> None:
    inverse = ["g", "f"], torch.tensor([[0, 1, 2], [0, 1, 0]])
    even = with_even_batches(_ids(inverse_indices=inverse))
    assert even.stride_per_key() == [3, 3]
    assert_same(even.lengths(), torch.tensor([1, 1, 0, 1, 1, 1]).int(), "lengths")
    pooled = KeyedTensor(["f", "g@t"], [1, 1], torch.tensor([[5, 1], [7, 2], [0, 3]]))
    assert_same(of_samples(pooled, inverse).values(), torch.tensor([[5, 1], [7, 2], [5, 3]]), "pooled")
    assert with_even_batches(even) is even
    assert gathering(even) is even.inverse_indices_or_none() is not None


def test_inverse_indices_of_other_batches_are_for_the_model_alone() -> None:
    inverse = ["f", "g"], torch.tensor([[0, 0], [1, 0]])
    ids = KeyedJaggedTensor(["f", "g"], torch.arange(4), lengths=torch.ones(4).int(), inverse_indices=inverse)
    assert with_even_batches(ids) is ids
    assert gathering(ids) is None


def test_shared_bags_are_repeated() -> None:
    inverse = ["g", "f"], torch.tensor([[0, 1, 2], [0, 1, 0]])
    ids = with_bags_of_samples(_ids(inverse_indices=inverse))
    assert ids.stride_per_key() == [3, 3]
    assert_same(ids.values(), torch.tensor([5, 7, 5, 1, 2, 3]), "ids")
    assert with_bags_of_samples(ids) is ids
    counts = [len(with_even_batches_of(_ids(inverse_indices=inverse), each).ids[0].values()) for each in ("", "f")]
    assert counts == [5, 6], "they are repeated for unpooled tables only"


def test_without_inverse_indices_they_are_refused() -> None:
    with refuses("without inverse_indices; give the KeyedJaggedTensor the bag of every sample"):
        with_even_batches(_ids())
