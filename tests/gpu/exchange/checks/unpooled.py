"""Unpooled tables, most in eager steps: outputs, rows and states of stock TorchRec. More captured are in `graphs`."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

from dlrm_overlap.embedding import distinct
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near, assert_same
from tests.distributed.unpooled import Case, our_sharders, stock_sharders, train
from tests.gpu.exchange.place import Check, Place

_CASES = {
    "mixed": Case(samples=(5, 3), pooled=True, need_indices=True),
    "row_wise": Case(plan="row_wise", samples=(5, 3), optimizer="rowwise_adagrad", few=4),
    "own_batches": Case(samples=(5, 3), own_batches=True, need_indices=True, clipped=True),
    "repeated": Case(samples=(4,), repeated=100_000, optimizer="rowwise_adagrad"),
}


def _check(place: Place, name: str, dedup: bool, backend: str = "pgas") -> None:
    case = replace(_CASES[name], repeated=_CASES[name].repeated if place.on_gpu else 0)
    stock = train(case, stock_sharders(case), "none", place.device)
    ours = train(case, our_sharders(case, dedup=dedup, backend=backend), "none", place.device)
    assert_same(ours["output of step 0"], stock["output of step 0"], "first output")
    tolerance = WEIGHT_TOLERANCE["fp32"] * (10 if case.repeated else 1)  # sums of so many gradients
    assert_all_near(ours, stock, tolerance, f"{name}:")
    again = train(case, our_sharders(case, dedup=dedup, backend=backend), "none", place.device)
    assert_all_near(again, ours, 0, "a second run:")


def _check_captured(place: Place, plan: str, two_hosts: bool) -> None:
    """Captured, where most tables have several blocks of slots; or between two hosts or, of odd ranks, a host each."""
    hosts = 1 if not two_hosts else place.world_size if place.world_size % 2 else 2
    case = Case(plan=plan, samples=(6,), bags=(0, 3), steps=9, longer={99: 1}, pooled=True, hosts=hosts)
    stock = train(case, stock_sharders(case), "none", place.device)
    with patch.object(distinct, "_LEAST_BLOCK", 1):
        ours = train(case, our_sharders(case, dedup=True), "graph", place.device)
    assert_same(ours["output of step 0"], stock["output of step 0"], "first output")
    assert_all_near(ours, stock, WEIGHT_TOLERANCE["fp32"], "captured:")


CHECKS = {
    f"unpooled_{name}_{'distinct' if dedup else 'all'}": Check(partial(_check, name=name, dedup=dedup))
    for name in _CASES
    for dedup in (True, False)
} | {
    "unpooled_mixed_fused": Check(partial(_check, name="mixed", dedup=True, backend="fused")),
    "unpooled_blocks": Check(partial(_check_captured, plan="mixed", two_hosts=False)),
    "hosts_captured_unpooled": Check(partial(_check_captured, plan="column_wise", two_hosts=True)),
}
