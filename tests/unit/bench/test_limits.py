"""The limit of the stage: its bytes against a hand-computed example."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.harness.limits import Limit, RankIds
from dlrm_overlap.embedding.layout import FeatureShard, Layout


def _shard(owner: int, dim: int, feature: int = 0) -> FeatureShard:
    name = f"t_{owner}_{feature}"
    return FeatureShard(name, owner, 0, feature, 0, feature, 0, dim, False, torch.float32, name)


def test_bytes_of_a_hand_computed_step() -> None:
    """Rank 0: 2 samples, tables of dim 4 and 8; rank 1: 1 sample, a table of dim 4; wire bf16, ids int64."""
    shards = [_shard(0, 4), _shard(0, 8, feature=1), _shard(1, 4)]
    layout = Layout(shards, [shard.name for shard in shards], world_size=2)
    ids = KeyedJaggedTensor(
        ["t_0_0", "t_0_1"], values=torch.arange(7), lengths=torch.tensor([2, 0, 3, 1, 1, 0])
    )  # 5 ids for the first table, 2 for the second
    hbm, link = RankIds(layout, 0, (2, 1), [ids]).forward_bytes(torch.bfloat16)
    rows, indices, offsets = 5 * 4 * 4 + 2 * 8 * 4, 7 * 8, 7 * 8
    assert hbm == rows + indices + offsets + 2 * (4 + 8 + 4) * 2
    assert link == 1 * (4 + 8) * 2


@pytest.mark.parametrize(
    ("optimizer", "state_of_4", "state_of_8"), [("sgd", 0, 0), ("rowwise_adagrad", 4, 4), ("adagrad", 16, 32)]
)
def test_bytes_of_a_hand_computed_backward(optimizer: str, state_of_4: int, state_of_8: int) -> None:
    """Rank 0: 2 samples, tables of dim 4 and 8; rank 1: 1 sample, a table of dim 4; wire bf16."""
    shards = [_shard(0, 4), _shard(0, 8, feature=1), _shard(1, 4)]
    layout = Layout(shards, [shard.name for shard in shards], world_size=2)
    # The first table: 5 ids of 3 rows in 2 of 3 bags; the second: 2 ids of one row in 2 of 3.
    lengths, values = torch.tensor([2, 0, 3, 1, 1, 0]), torch.tensor([7, 3, 7, 7, 9, 7, 7])
    ids = KeyedJaggedTensor(["t_0_0", "t_0_1"], values, lengths=lengths)
    own = RankIds(layout, 0, (2, 1), [ids])
    hbm, link, compulsory = own.update_bytes(torch.bfloat16, optimizer)
    rows = 3 * 2 * (4 * 4 + state_of_4) + 1 * 2 * (8 * 4 + state_of_8)
    told = 7 * 4 + 4 * 16
    sent, arrived = 2 * (4 + 8 + 4) * 4, 3 * (4 + 8) * 2
    assert hbm == rows + told + sent + arrived + 5 * 4 * 2 + 2 * 8 * 2
    assert compulsory == rows + told + sent + arrived + 2 * 4 * 2 + 2 * 8 * 2
    assert link == 2 * 4 * 2
    assert [(each.ids, each.touched_rows) for each in own.tables] == [(5, 3), (2, 1)]


def test_a_rank_without_a_table_sends_gradients_alone() -> None:
    """Rank 0: 2 samples, a table of dim 4; rank 1: 1 sample, no table; wire bf16."""
    layout = Layout([_shard(0, 4)], ["t_0_0"], world_size=2)
    none = KeyedJaggedTensor([], torch.arange(0), lengths=torch.arange(0), stride=3)
    counts = RankIds(layout, 1, (2, 1), [none]).update_bytes(torch.bfloat16, "sgd")
    assert counts == (1 * 4 * 4, 1 * 4 * 2, 1 * 4 * 4)


def test_the_slower_of_memory_and_links_is_the_limit() -> None:
    assert Limit(4_000_000, 1_000_000, hbm_gb_per_s=4.0, link_gb_per_s=0.5).ms == pytest.approx(2.0)
    assert Limit(4_000_000, 1_000_000, hbm_gb_per_s=1.0, link_gb_per_s=0.5).ms == pytest.approx(4.0)
    assert Limit(4_000_000, 0, hbm_gb_per_s=4.0, link_gb_per_s=0.0).ms == pytest.approx(1.0)
