"""Models with unpooled tables train under the drop-in as under TorchRec: outputs bit for bit, weights, states."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType

from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near, assert_same
from tests.distributed.captured import captures
from tests.distributed.models import CPU
from tests.distributed.unpooled import DIM, TABLES, Case, batches, our_sharders, torchrec_sharders, train
from tests.distributed.workers import cases_on_ranks

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")

CACHED = "fused_uvm_caching"
STEADY = Case(samples=(6,), bags=(0, 3), steps=9, longer={99: 1})  # the first batch is the largest
CASES = {
    "jagged": Case(samples=(5, 0, 3), repeated=1000, optimizer="rowwise_adagrad"),
    "variable_batch": Case(variable_batch=True, need_indices=True),
}
# The pipeline of the drop-in, and what it trains.
WAYS: dict[str, tuple[str, Case]] = {
    "stays_with_torchrec": ("sparse_dist", replace(CASES["variable_batch"], kernel=CACHED)),  # in host memory
    "decay": ("none", Case(optimizer="decay")),  # stays with TorchRec on a CPU
    "graph_with_pooled": ("graph", Case(pooled=True, need_indices=True)),
    "graph_fp16_rows": ("graph", Case(rows=DataType.FP16, plan="row_wise")),
    "graph_rank_0_without": ("graph", Case(samples=(0, 4))),
    "graph_two_nodes": ("graph", replace(STEADY, steps=4, pooled=True, nodes=2, kernel=CACHED)),
    "graph_jagged": ("graph", CASES["jagged"]),
    "graph_data_parallel": ("graph", replace(STEADY, plan="data_parallel", steps=4, optimizer="dense_sgd")),
    "graph_variable_batch": ("graph", replace(CASES["variable_batch"], pooled=True)),
    "captured_cached": ("captured", replace(STEADY, pooled=True, kernel=CACHED)),
}
MORE: dict[str, tuple[str, Case]] = {  # plans of other kinds: `unpooled_plans`
    "graph_one_rank": ("graph", Case(plan="one_rank", optimizer="rowwise_adagrad", few=4)),
    "captured_two_nodes": ("captured", replace(STEADY, pooled=True, nodes=2)),
    "graph_two_nodes_row_wise": ("graph", replace(STEADY, plan="row_wise", steps=4, nodes=2)),
    "captured_longer": ("captured", replace(STEADY, steps=13, longer={4: 4})),
}


def _compare(name: str) -> None:
    pipeline, case = (WAYS | MORE)[name]
    # TorchRec pools sequences of data-parallel tables on a CPU, so there the table has one owner.
    alone = case.plan == "data_parallel"
    torchrec = train(replace(case, plan="mixed") if alone else case, torchrec_sharders(case), "none", CPU)
    with captures() if pipeline == "captured" else nullcontext({"captured": 1}) as taken:
        ours = train(case, our_sharders(case), "graph" if pipeline == "captured" else pipeline, CPU)
    assert min(taken.values()) > 0, f"steps {taken}"
    if pipeline == "sparse_dist":
        del torchrec["evaluated"]
    if alone:
        torchrec, ours = ({key: each[key] for key in each if "whole" not in key} for each in (torchrec, ours))
    assert_same(ours["output of step 0"], torchrec["output of step 0"], f"{name}: first output")
    # Outputs of later steps are sums of rows, too, which have another order.
    tolerance = WEIGHT_TOLERANCE["fp16_rows" if case.rows == DataType.FP16 else "fp32"]
    assert_all_near(ours, torchrec, tolerance * (10 if case.repeated else 1), f"{name}:")
    dist.barrier()


def _count_bytes(name: str) -> None:
    """Count what a step stores in windows that were filled with NaN: for each distinct id a row and a gradient."""
    case, stored, expected = replace(STEADY, few=4, steps=3, plan=name), list[int](), list[int]()

    def step(sharded: DistributedModelParallel, number: int, begins: bool) -> None:
        (exchange,) = exchanges(sharded)
        if number < case.steps - 1:
            return
        parts, rank = exchange._open(), dist.get_rank()
        assert parts.arena is not None
        windows = [parts.arena.view(f"{kind}{i}", rank) for kind in ("outputs", "gradients") for i in range(2)]
        if begins:
            for window in windows:
                window.fill_(torch.nan)
            dist.barrier()
            return
        dist.barrier()
        stored.append(sum(4 * int((~window.isnan()).sum()) for window in windows))
        (*_, batch) = batches(case, rank, placeholder=False)
        keys = {key: set(each.values().tolist()) for key, each in batch.sparse.to_dict().items()}
        distinct = {table: len(set.union(*(keys[f] for f in features))) for table, (_, features) in TABLES.items()}
        columns = 2 if name == "column_wise" else 1
        stored.append(8 * columns * sum(distinct.values()))  # ids, and the position of each slot's
        expected.append(sum(distinct.values()) * (8 * columns + 2 * 4 * DIM))

    train(case, our_sharders(case), "graph", CPU, around=step)
    everywhere = torch.tensor([float(sum(stored)), float(sum(expected))])
    dist.all_reduce(everywhere)
    assert float(everywhere[1]) == pytest.approx(float(everywhere[0]), rel=0.05)


def _look_up_by_torchrec(name: str) -> None:
    """TorchRec sends ids before a step, as its pipelines do, and looks them up after it."""
    case, sent = replace(STEADY, steps=4, kernel=CACHED, plan=name), list[Any]()

    def step(sharded: DistributedModelParallel, number: int, begins: bool) -> None:
        module: Any = sharded.module.sequences

        def send() -> Any:
            (batch,) = batches(replace(case, steps=1), dist.get_rank(), placeholder=False)
            context = module.create_context()
            return context, module.input_dist(context, batch.sparse).wait().wait()

        def look_up(sent: Any) -> torch.Tensor:
            with torch.no_grad():
                found = module.compute_and_output_dist(*sent).wait()
            return torch.cat([each.values().flatten() for _, each in sorted(found.items())])

        if begins:
            sent[:] = [send()]
        else:
            found = look_up(*sent)
            sharded.state_dict()  # it stores the rows of caches to their tables
            assert_same(found, look_up(send()), f"after step {number}")

    train(case, our_sharders(case), "graph", CPU, around=step)


KINDS = ["table_wise", "column_wise", "row_wise"]
bytes_counted = cases_on_ranks(2, _count_bytes, KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_only_rows_of_distinct_ids_are_sent(bytes_counted: Callable[[str], None], name: str) -> None:
    bytes_counted(name)


looked_up = cases_on_ranks(2, _look_up_by_torchrec, ["mixed"])


def test_torchrec_looks_up_what_captured_steps_have_written(looked_up: Callable[[str], None]) -> None:
    looked_up("mixed")


ended, more_ended = cases_on_ranks(2, _compare, list(WAYS)), cases_on_ranks(4, _compare, list(MORE))


@pytest.mark.parametrize("name", WAYS)
def test_trains_as_under_torchrec(ended: Callable[[str], None], name: str) -> None:
    ended(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_trains_as_under_torchrec_on_four_ranks(more_ended: Callable[[str], None], name: str) -> None:
    more_ended(name)
