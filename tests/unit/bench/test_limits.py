from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.harness.limits import Limit, count_tables, find_floor, find_limit
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.embedding.traffic import ShardTraffic, count_dense, pooling_bytes, update_bytes
from tests.conftest import configuration

# The first table: 5 ids of 3 rows in 2 of 3 bags; the second: 2 ids of one row in 2 of 3.
LENGTHS, VALUES = torch.tensor([2, 0, 3, 1, 1, 0]), torch.tensor([7, 3, 7, 7, 9, 7, 7])
# Rank 0: 2 samples, tables of dim 4 and 8; rank 1: 1 sample, a table of dim 4; wire bf16.
OF_RANK_0: dict[str, Any] = {"samples": 3, "own_samples": 2, "total_dim": 16, "owner_dim": 12, "wire_bytes": 2}


def _tables() -> list[ShardTraffic]:
    every = KeyedJaggedTensor(["a", "b"], VALUES, lengths=LENGTHS).split([1, 1])
    return [count_tables(table, dim, 4)[0] for table, dim in zip(every, (4, 8), strict=True)]


def test_the_bytes_of_a_forward_are_the_hand_computed_ones() -> None:
    tables = _tables()
    assert tables == [ShardTraffic(5, 3, 2, 4, 4), ShardTraffic(2, 1, 2, 8, 4)]
    hbm, link = pooling_bytes(tables, **OF_RANK_0, id_bytes=8)
    assert hbm == 5 * 4 * 4 + 2 * 8 * 4 + 7 * 8 + 2 * (4 + 8 + 4) * 2
    assert link == 1 * (4 + 8) * 2


@pytest.mark.parametrize(
    ("optimizer", "state_of_4", "state_of_8"), [("sgd", 0, 0), ("rowwise_adagrad", 4, 4), ("adagrad", 16, 32)]
)
def test_the_bytes_of_a_backward_are_the_hand_computed_ones(optimizer: str, state_of_4: int, state_of_8: int) -> None:
    hbm, compulsory, link = update_bytes(_tables(), **OF_RANK_0, gradient_bytes=4, optimizer=optimizer)
    rows = 3 * 2 * (4 * 4 + state_of_4) + 1 * 2 * (8 * 4 + state_of_8)
    descriptors = 7 * 4 + 4 * 16
    sent, arrived = 2 * (4 + 8 + 4) * 4, 3 * (4 + 8) * 2
    assert hbm == rows + descriptors + sent + arrived + 5 * 4 * 2 + 2 * 8 * 2
    assert compulsory == rows + descriptors + sent + arrived + 2 * 4 * 2 + 2 * 8 * 2
    assert link == 2 * 4 * 2


def test_the_limit_of_a_single_rank_is_its_memory_bandwidth(workload: Workload) -> None:
    limit, ids = find_limit(workload, (4.0, 0.0))
    bags = workload.batches[0].inputs[0]
    assert ids == bags.values().numel()
    assert limit.hbm_bytes == ids * (16 * 4 + 8) + (6 * 128 + 1) * 8 + 128 * 6 * 16 * 4
    assert (limit.link_bytes, limit.link_ms, limit.hbm_ms) == (0, 0.0, limit.hbm_bytes / 4e6)
    assert find_limit(workload, (4.0, 0.0), "adagrad")[0].hbm_bytes > limit.hbm_bytes
    assert Limit(4, 1_000_000, hbm_gb_per_s=4.0, link_gb_per_s=0.5).link_ms == pytest.approx(2.0)


@pytest.mark.parametrize(("wire_dtype", "wire"), [("fp32", 4), ("auto", 2)])
def test_the_floor_of_a_step_is_the_hand_computed_one(wire_dtype: str, wire: int) -> None:
    """Two ranks of 2 samples, two tables of dim 4; int32 ids, SGD, bf16. Gradients are in the wire's type.

    The samples name rows of the first table 6 times, 4 rows of them, in 3 of the 4 bags; of the other 5 times, 2, in 2.
    """
    keys = ["--embedding.optimizer", "sgd", "--train.precision", "bf16", "--embedding.wire_dtype", wire_dtype]
    keys += ["--model.dim", "4", "--model.bottom_mlp", "[4]"]
    config = configuration("--config", "configs/quickstart.yaml", *keys)
    values = torch.tensor([5, 5, 6, 7, 8, 7, 1, 1, 2, 2, 2], dtype=torch.int32)
    lengths = torch.tensor([1, 2, 0, 3, 0, 4, 1, 0], dtype=torch.int32)
    batch = SimpleNamespace(sparse=KeyedJaggedTensor(["a", "b"], values, lengths=lengths))
    data = SimpleNamespace(read=lambda first, count: batch, rows=[9, 9], dense_features=13)
    world = SimpleNamespace(world_size=2)
    trainer: Any = SimpleNamespace(config=config, world=world, samples_per_rank=2, global_batch=4, train_data=data)
    floor = find_floor(trainer, (4.0, 0.5))
    dense = count_dense(config.model, 2, 13, 2)
    ids = (11 * 4 + 8 * 4) / 2
    forward = 3 * 4 * 4 + ids + 2 * 8 * wire
    update = 3 * (2 * 4 * 4 + 16) + 11 / 2 * 4 + 2 * 8 * wire + 4 * 4 * wire + 5 / 2 * 4 * wire
    assert floor["hbm_bytes"] == forward + update + 4 * dense.parameters + 2 * dense.outputs
    assert floor["link_bytes"] == 2 * 4 * wire + 2 * 4 * wire + ids / 2 + 4 * dense.parameters
    times = [dense.flop / 790e9, floor["hbm_bytes"] / 4e6, floor["link_bytes"] / 0.5e6]
    assert [floor[name] for name in ("dense_ms", "hbm_ms", "link_ms")] == pytest.approx(times)
    assert (floor["floor_ms"], floor["floor_sum_ms"]) == pytest.approx((max(times), sum(times)))
