"""What the drop-in refuses: arguments that break a rule, when it is made, and batches beyond their bound."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder, OverlapEmbeddingCollectionSharder
from dlrm_overlap.embedding.unpooled import ExpandRows
from dlrm_overlap.embedding.weights import initialise_tables
from tests.agreement import assert_same
from tests.conftest import refuses
from tests.distributed.models import CPU


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"backend": "torchrec"}, "backend: 'torchrec' is not one of 'nccl', 'pgas', 'fused'"),
        ({"schedule": "x"}, "schedule: 'x' is not one of 'linear', 'remote_first', 'balanced'"),
        ({"put": "x"}, "put: 'x' is not one of 'direct', 'staged'"),
        ({"wire_dtype": "x"}, "wire_dtype: 'x' is not one of 'fp32', 'bf16', 'fp16'"),
        ({"output_order": "x"}, "output_order: 'x' is not one of 'plan', 'model'"),
        ({"slice_bags": 3}, "slice_bags: 3 is not a power of two from 4 on"),
        ({"output_dtype": "bf16"}, "output_dtype: 'bf16', but the wire's type is fp32"),
        ({"programs_per_sm": 0}, "programs_per_sm: 0 is not a whole number from 1 to 2^31 - 1 or null"),
        ({"programs_per_sm": 1.5}, "programs_per_sm: 1.5 is not a whole number from 1 to 2^31 - 1 or null"),
        ({"leading_columns": -4}, "leading_columns: -4 is not a whole number from 0 to 2^31 - 1"),
    ],
)
def test_a_value_that_breaks_a_rule(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        OverlapEmbeddingBagCollectionSharder(**arguments)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"backend": "nccl"}, "backend: 'nccl' is not one of 'pgas', 'fused'"),
        ({"output_dtype": "bf16", "wire_dtype": "fp16"}, "output_dtype: 'bf16', but the wire's type is fp16"),
        ({"output_dtype": "fp8"}, "output_dtype: 'fp8' is not one of 'fp32', 'bf16', 'fp16'"),
    ],
)
def test_a_value_that_breaks_a_rule_of_unpooled_tables(arguments: dict[str, Any], told: str) -> None:
    with refuses(told):
        OverlapEmbeddingCollectionSharder(**arguments)


def test_arguments_are_taken_as_they_are_checked() -> None:
    options = OverlapEmbeddingBagCollectionSharder(wait_timeout_s="5", slice_bags=np.int64(8)).options  # type: ignore[arg-type]
    assert (options.wait_timeout_s, options.slice_bags) == (5.0, 8)
    with pytest.raises(TypeError, match="unexpected arguments is_pooled, max_gradient"):
        OverlapEmbeddingBagCollectionSharder(max_gradient=1.0, is_pooled=False)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected arguments leading_columns"):
        OverlapEmbeddingCollectionSharder(leading_columns=8)  # type: ignore[call-arg]


def _unpooled(group: dist.ProcessGroup, rows: Mapping[str, int], **options: Any) -> Any:
    """Return a sharded collection of tables t_x, each of a feature x."""
    configs = [
        EmbeddingConfig(name=f"t_{feature}", num_embeddings=count, embedding_dim=4, feature_names=[feature])
        for feature, count in rows.items()
    ]
    module = EmbeddingCollection(configs, device=torch.device("meta"))
    sharder = OverlapEmbeddingCollectionSharder({"learning_rate": 1.0}, **options)
    ways = {config.name: table_wise(0, compute_kernel="fused") for config in configs}
    plan = construct_module_sharding_plan(module, ways, sharder, 1, 1, "cpu")  # type: ignore[arg-type]
    sharded = sharder.shard(module, dict(plan), ShardingEnv.from_process_group(group), CPU)
    initialise_tables(sharded, seed=0)
    return sharded


def test_a_batch_beyond_the_bound_of_its_distinct_ids(world_of_one: dist.ProcessGroup) -> None:
    """One that nobody has counted is found where its ids arrive; one that is within it gives its rows."""
    sharded = _unpooled(world_of_one, {"f": 9})
    sharded.take_ids(["f"], BatchCapacity(2, {"f": (0, 4)}, distinct={"t_f": 2}))
    ids = KeyedJaggedTensor(["f"], torch.tensor([8, 0, 8, 8]), lengths=torch.tensor([3, 1]))
    (shard,) = sharded.state_dict()["embeddings.t_f.weight"].local_shards()
    with torch.no_grad():
        assert_same(sharded(ids)["f"].values(), shard.tensor[ids.values()], "rows")
        more = KeyedJaggedTensor(["f"], torch.tensor([8, 0, 8, 1]), lengths=torch.tensor([3, 1]))
        with pytest.raises(
            ValueError, match="has 3 distinct ids of table t_f, beyond its capacity of 2; raise the capacity"
        ):
            sharded(more)
    sharded.exchange.close()


@pytest.mark.parametrize("id", [(1 << 32) + 3, -(1 << 32) + 3])
def test_unpooled_ids_beyond_32_bits_are_outside_their_table(world_of_one: dist.ProcessGroup, id: int) -> None:
    """FBGEMM's default takes row 0 then, and never the row of the lower bits."""
    sharded = _unpooled(world_of_one, {"f": 9})
    sharded.take_ids(["f"], BatchCapacity(1, {"f": (0, 2)}))
    (shard,) = sharded.state_dict()["embeddings.t_f.weight"].local_shards()
    with torch.no_grad():
        found = sharded(KeyedJaggedTensor(["f"], torch.tensor([8, id]), lengths=torch.tensor([2])))["f"].values()
    assert_same(found[:2], shard.tensor[[8, 0]], "rows")
    sharded.exchange.close()


def test_gradients_of_unpooled_rows_are_clipped_before_they_are_summed() -> None:
    """As FBGEMM clips those of each id; two ids share the slot of row 1."""
    exchange = SimpleNamespace(expanded_dtype=torch.float32, clipped=lambda gradient: gradient.clamp(-1, 1))
    sender: Any = SimpleNamespace(sums=None, dim=2, exchange=exchange)
    distinct: Any = SimpleNamespace(slots=torch.tensor([1, 0, 1, -1], dtype=torch.int32))
    slots = torch.arange(4.0).view(1, 4).requires_grad_()
    rows = ExpandRows.apply(slots, sender, distinct)
    assert rows.tolist() == [[2, 3], [0, 1], [2, 3], [0, 0]]
    rows.backward(torch.tensor([[3.0, 0.5], [-2.0, 0.25], [0.5, 0.5], [9.0, 9.0]]))
    assert slots.grad is not None
    assert slots.grad.tolist() == [[-1.0, 0.25, 1.5, 1.0]]


def test_rows_are_narrowed_where_they_arrive(world_of_one: dist.ProcessGroup) -> None:
    """Sums of their gradients are not: 1 + 2^-8 is no number of bf16, in which gradients come."""
    sharded = _unpooled(world_of_one, {"f": 9}, output_dtype="bf16")
    sharded.take_ids(["f"], BatchCapacity(2, {"f": (0, 4)}))
    (shard,) = sharded.state_dict()["embeddings.t_f.weight"].local_shards()
    wanted, ids = shard.tensor.clone(), KeyedJaggedTensor(["f"], torch.tensor([8, 0, 8]), lengths=torch.tensor([2, 1]))
    rows = sharded(ids)["f"].values()
    assert_same(rows[:3], wanted[ids.values()].bfloat16(), "rows")
    gradient = torch.zeros_like(rows)
    gradient[0], gradient[2] = 1, 2**-8
    rows.backward(gradient)
    wanted[8] -= 1 + 2**-8
    assert_same(shard.tensor, wanted, "updated rows")
    sharded.exchange.close()


def test_memory_is_that_of_the_bounds_of_distinct_ids(world_of_one: dist.ProcessGroup) -> None:
    """Of 98% duplicates, and of one table that has most of the distinct ids, which are in several blocks of slots."""
    distinct = {"f": 2000, "g": 8, "h": 8, "i": 8}
    sharded, samples = _unpooled(world_of_one, dict.fromkeys(distinct, 5000)), 100
    bound = BatchCapacity(
        samples,
        dict.fromkeys(distinct, (0, 1000)),
        dict.fromkeys(distinct, 100_000),
        {f"t_{feature}": most for feature, most in distinct.items()},
    )
    sharded.take_ids(list(distinct), bound)
    arena = sharded.exchange._open().arena
    windows = [arena.local(f"{kind}{turn}") for kind in ("outputs", "gradients") for turn in range(2)]
    assert all(window.numel() <= 9 / 8 * sum(distinct.values()) * 4 for window in windows)

    def ids(more: int) -> KeyedJaggedTensor:
        of_f = torch.randperm(2000 + more).repeat(10)
        values = torch.cat([of_f, *[torch.arange(8).repeat(3)] * 3])
        lengths = [len(of_f), *[0] * (samples - 1), *[24, *[0] * (samples - 1)] * 3]
        return KeyedJaggedTensor(list(distinct), values, lengths=torch.tensor(lengths))

    with torch.no_grad():
        batch = ids(0)
        found = sharded(batch)
        for feature, each in batch.to_dict().items():
            (shard,) = sharded.state_dict()[f"embeddings.t_{feature}.weight"].local_shards()
            assert_same(found[feature].values()[: len(each.values())], shard.tensor[each.values()], feature)
        with pytest.raises(ValueError, match="has 2001 distinct ids of table t_f, beyond its capacity of 2000"):
            sharded(ids(1))
    sharded.exchange.close()
