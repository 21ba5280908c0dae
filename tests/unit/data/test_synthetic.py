import numpy as np
import pytest
import torch

from dlrm_overlap.config import DataConfig, TablesConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.synthetic import Synthetic
from dlrm_overlap.data.teacher import scores
from tests.conftest import configuration

MIXED = TablesConfig(rows=[50, 3, 40_000_000, 1], multi_hot=["0..6", 3, "2..5", 1], zipf_alpha=[1.05, 0.0, 1.0, 2.0])
LEARNABLE = TablesConfig(count=8, rows=1000)


def samples(batch: Batch) -> list[tuple]:
    """Each sample as (dense bytes, ids of each table's bag, label)."""
    tables = [table.to_dense() for table in batch.sparse.to_dict().values()]
    return [
        (batch.dense[i].numpy().tobytes(), tuple(tuple(bags[i].tolist()) for bags in tables), batch.labels[i].item())
        for i in range(len(batch.labels))
    ]


def click_probability(dataset: Synthetic, batch: Batch) -> torch.Tensor:
    """Return the teacher's probability of a click, [b] float64. No model can rank the samples better."""
    lengths = batch.sparse.lengths().view(len(dataset.rows), -1)
    arguments = (tensor.numpy() for tensor in (batch.dense, lengths, batch.sparse.values()))
    return torch.from_numpy(dataset._teacher.click_probability(*arguments))


def auroc(score: torch.Tensor, label: torch.Tensor) -> float:
    """Chance that a click has a higher score than a sample that is none (scores without ties)."""
    rank = torch.empty(len(score), dtype=torch.float64)
    rank[score.argsort()] = torch.arange(1, len(score) + 1, dtype=torch.float64)
    clicks = int(label.sum())
    return float((rank[label > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(label) - clicks)))


def test_uneven_pieces_equal_the_whole():
    dataset = Synthetic(DataConfig(tables=MIXED), "train")
    parts = [sample for first, count in ((0, 1), (1, 6), (7, 93)) for sample in samples(dataset.read(first, count))]
    assert parts == samples(dataset.read(0, 100))
    assert parts == samples(Synthetic(DataConfig(tables=MIXED), "train").read(0, 100))


def test_seeds_and_splits_are_different_streams():
    streams = [
        Synthetic(DataConfig(tables=MIXED, seed=seed), split) for seed in (0, 1, 10**9) for split in ("train", "eval")
    ]
    seen = {dense for stream in streams for dense, _, _ in samples(stream.read(0, 50))}
    assert len(seen) == 50 * len(streams)
    assert (streams[0].num_samples, streams[1].num_samples) == (None, 65536)


def test_popular_ids_come_as_often_as_they_should():
    config = DataConfig(tables=TablesConfig(rows=[100_000], multi_hot=8, zipf_alpha=1.05), dense_features=1)
    values = Synthetic(config, "train").read(0, 50_000).sparse.values().numpy()
    counts = np.sort(np.bincount(values, minlength=100_000))[::-1]
    exact = np.arange(1, 100_001) ** -1.05
    np.testing.assert_allclose(counts[:10] / values.size, exact[:10] / exact.sum(), rtol=0.03)
    # No sample repeats another's ids: the draws of neighbours do not overlap.
    assert len(np.unique(values.reshape(-1, 8), axis=0)) > 49_900


def test_draws_of_dense_features_bag_sizes_and_ids_are_independent():
    config = DataConfig(tables=TablesConfig(count=2, rows=2, multi_hot="1..4", zipf_alpha=0.0), dense_features=2)
    batch = Synthetic(config, "train").read(0, 20_000)
    lengths, values = batch.sparse.lengths().view(2, -1), batch.sparse.values()
    firsts = values[batch.sparse.offsets()[:-1]].view(2, -1)
    columns = torch.cat([batch.dense.T, lengths, firsts])
    assert (torch.corrcoef(columns.float()) - torch.eye(6)).abs().max() < 0.04  # over 5 standard errors


def test_bags_follow_their_ranges_table_after_table():
    dataset = Synthetic(DataConfig(tables=MIXED), "train")
    batch = dataset.read(5, 2000)
    lengths, values = batch.sparse.lengths().view(4, 2000), batch.sparse.values()
    assert (lengths.dtype, values.dtype) == (torch.int32, torch.int32)
    for bags, (low, high) in zip(lengths, ((0, 6), (3, 3), (2, 5), (1, 1)), strict=True):
        assert bags.unique().tolist() == list(range(low, high + 1))
    assert dataset.pooling == [3.0, 3.0, 3.5, 1.0]
    torch.testing.assert_close(lengths.double().mean(dim=1).tolist(), dataset.pooling, rtol=0.05, atol=0)
    for ids, rows in zip(values.split(lengths.sum(dim=1).tolist()), dataset.rows, strict=True):
        assert ids.min() >= 0
        assert rows is not None
        assert ids.max() < rows


def test_dense_features_are_near_normal():
    dense = Synthetic(DataConfig(tables=LEARNABLE), "train").read(0, 20_000).dense
    assert (dense.shape, dense.dtype) == ((20_000, 13), torch.float32)
    assert dense.abs().max() < 3.5
    assert dense.mean(dim=0).abs().max() < 0.03
    assert (dense.std(dim=0) - 1).abs().max() < 0.03
    assert (torch.corrcoef(dense.T) - torch.eye(13)).abs().max() < 0.04


@pytest.mark.parametrize(
    "tables",
    [
        LEARNABLE,
        TablesConfig(count=26, rows=100_000, multi_hot="0..8"),
        TablesConfig(count=3, rows=40_000_000, zipf_alpha=0.0, multi_hot=20),
        TablesConfig(rows=[3, 10, 4, 60], zipf_alpha=1.5, multi_hot=[1, 2, "0..1", 40]),
        TablesConfig(count=1, rows=500),
        TablesConfig(rows=[100, 1000, 10_000], zipf_alpha=[1.05, 1.05, 1.75], multi_hot=[2, 1, "0..64"], half_life=4),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_teacher_is_good_not_perfect(tables: TablesConfig, seed: int):
    dataset = Synthetic(DataConfig(tables=tables, seed=seed), "train")
    batch = dataset.read(0, 16384)
    probability = click_probability(dataset, batch)
    assert set(batch.labels.unique().tolist()) == {0.0, 1.0}
    assert batch.labels.dtype == torch.float32
    assert 0.25 < batch.labels.mean() < 0.5
    assert abs(probability.mean() - batch.labels.mean()) < 0.015  # 4 standard errors
    assert 0.87 < auroc(probability, batch.labels) < 0.92


def test_teacher_multiplies_dense_features_and_tables():
    dataset = Synthetic(DataConfig(tables=TablesConfig(count=3, rows=100), dense_features=2), "train")

    def mixed_difference(first: int, second: int) -> float:
        """How far two of the inputs, [2 dense features, 3 ids], are from adding their effects to the logit."""
        inputs = torch.zeros(4, 5)
        inputs[:, first], inputs[:, second] = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
        ids = inputs[:, 2:].T.flatten().int()
        batch = Batch.from_tensors(inputs[:, :2].contiguous(), torch.ones_like(ids), ids, torch.zeros(4))
        neither, one, other, both = click_probability(dataset, batch).logit().tolist()
        return abs(both - one - other + neither)

    coupled = {(0, 2), (1, 3), (2, 3), (3, 4)}  # each dense feature with its table, each table with the next
    for pair in ((i, j) for j in range(5) for i in range(j)):
        assert (mixed_difference(*pair) > 1e-3) == (pair in coupled), pair


def test_ids_count_by_their_position_where_a_table_has_a_half_life():
    """Two samples of 3 ids each, one with the first two exchanged: the first id counts twice as much as the second."""
    tables = TablesConfig(rows=50, multi_hot=[3, 3], half_life=[0, 1])
    dataset = Synthetic(DataConfig(tables=tables, dense_features=1), "train")
    teacher, lengths = dataset._teacher, np.full((2, 2), 3, dtype=np.int32)
    first, second = (scores(np.array([id_], dtype=np.int32), teacher.keys[1]).astype(float) for id_ in (7, 8))
    same = [1, 2, 3, 2, 1, 3]  # the order of a table without a half-life makes no difference
    values = np.array([*same, 7, 8, 9, 8, 7, 9], dtype=np.int32)
    signals = teacher._signals(lengths, values)
    assert signals[0, 0] == signals[0, 1]
    factor = teacher.factors[teacher.factor_starts[1] + 3]
    assert signals[1, 0] - signals[1, 1] == pytest.approx((256 - 128) * (first - second) * factor)


@pytest.mark.parametrize("name", ["sequence", "bench/step_sequence"])
def test_the_ids_of_a_batch_of_histories_repeat_as_in_logs(name: str):
    """98% of MLPerf's do. It is the skew, `data.tables.zipf_alpha`, that makes them repeat."""
    config = configuration("--config", f"configs/{name}.yaml")
    assert isinstance(config.data.tables.rows, list)
    batch = Synthetic(config.data, "train").read(0, config.train.batch_size)
    history = config.model.sequence.history
    assert history is not None
    lengths = batch.sparse.lengths().view(len(config.data.tables.rows), -1).sum(1).tolist()
    ids = batch.sparse.values().split(lengths)[history]
    assert 0.97 < 1 - len(ids.unique()) / len(ids) < 0.99


def test_clicks_follow_the_sigmoid_of_the_teachers_logit():
    dataset = Synthetic(DataConfig(tables=LEARNABLE), "train")
    dense = np.linspace(-20, 20, 4001, dtype=np.float32)[:, None].repeat(13, axis=1)  # logits beyond the curve's ends
    lengths, values = np.zeros((8, 4001), dtype=np.int32) + 1, np.zeros(8 * 4001, dtype=np.int32)
    teacher = dataset._teacher
    logit = teacher.logit(dense, lengths, values)
    assert logit.min() < -16
    assert logit.max() > 16
    exact = torch.from_numpy(logit).sigmoid().numpy()
    np.testing.assert_allclose(teacher.click_probability(dense, lengths, values), exact, rtol=0, atol=3e-6)
