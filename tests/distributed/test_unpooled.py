"""Models with unpooled tables train under the drop-in as under stock TorchRec: outputs bit for bit, weights, states."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist
from torchrec.modules.embedding_configs import DataType

from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near, assert_same
from tests.distributed.captured import captures
from tests.distributed.models import CPU
from tests.distributed.unpooled import Case, our_sharders, stock_sharders, train
from tests.distributed.workers import cases_on_ranks

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")

STEADY = Case(samples=(6,), bags=(0, 3), steps=9, longer={99: 1})  # whose first batch is the largest
CASES = {
    "plain": Case(),
    "jagged": Case(samples=(5, 0, 3), repeated=100_000, optimizer="rowwise_adagrad"),
    "rank_0_without": Case(samples=(0, 4)),
    "pooled_beside": Case(pooled=True, need_indices=True),
    "fp16_rows": Case(rows=DataType.FP16, plan="row_wise"),
}
# how the drop-in trains, whether each distinct id travels once, and what
WAYS: dict[str, tuple[str, bool, Case]] = {
    "plain": ("none", True, CASES["plain"]),
    "all_ids": ("none", False, CASES["jagged"]),
    "jagged": ("sparse_dist", True, CASES["jagged"]),
    "pooled_beside": ("sparse_dist", True, CASES["pooled_beside"]),
    "fp16_rows": ("none", True, CASES["fp16_rows"]),
    "rank_0_without": ("none", True, CASES["rank_0_without"]),
    "graph": ("graph", True, replace(STEADY, steps=4)),
    "graph_all_ids": ("graph", False, replace(STEADY, steps=4, optimizer="rowwise_adagrad")),
    "graph_jagged": ("graph", True, replace(CASES["jagged"], repeated=1000)),
    "graph_data_parallel": ("graph", True, replace(STEADY, plan="data_parallel", steps=4, optimizer="dense_sgd")),
    "captured": ("captured", True, replace(STEADY, pooled=True)),
}
MORE: dict[str, tuple[str, bool, Case]] = {
    f"{plan}_{way}_{dedup}": (way, dedup, Case(plan=plan, optimizer=optimizer, few=4))
    for plan in ("table_wise", "column_wise", "row_wise", "one_rank")
    for way, optimizer in (("sparse_dist", "sgd"), ("graph", "rowwise_adagrad"))
    for dedup in (True, False)
} | {
    "captured_all_ids": ("captured", False, replace(STEADY, need_indices=True)),
    "captured_longer": ("captured", True, replace(STEADY, steps=13, longer={4: 4})),
}


def _compare(name: str) -> None:
    pipeline, dedup, case = (WAYS | MORE)[name]
    # Stock TorchRec pools sequences of data-parallel tables on a CPU, so there the table has one owner.
    alone = case.plan == "data_parallel"
    stock = train(replace(case, plan="mixed") if alone else case, stock_sharders(case), "none", CPU)
    if pipeline == "captured":
        with captures() as taken:
            ours = train(case, our_sharders(case, dedup=dedup), "graph", CPU)
        assert min(taken.values()) > 0, f"steps {taken}"
    else:
        ours = train(case, our_sharders(case, dedup=dedup), pipeline, CPU)
    if alone:
        stock, ours = ({key: each[key] for key in each if "whole" not in key} for each in (stock, ours))
    assert_same(ours["output of step 0"], stock["output of step 0"], f"{name}: first output")
    # Outputs of later steps are sums of rows, too, which have another order.
    tolerance = WEIGHT_TOLERANCE["fp16_rows" if case.rows == DataType.FP16 else "fp32"]
    assert_all_near(ours, stock, tolerance * (10 if case.repeated else 1), f"{name}:")
    dist.barrier()


ended, more_ended = cases_on_ranks(2, _compare, list(WAYS)), cases_on_ranks(4, _compare, list(MORE))


@pytest.mark.parametrize("name", WAYS)
def test_as_under_stock(ended: Callable[[str], None], name: str) -> None:
    ended(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_as_under_stock_on_four_ranks(more_ended: Callable[[str], None], name: str) -> None:
    more_ended(name)
