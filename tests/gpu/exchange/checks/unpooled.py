"""Unpooled tables in eager steps, against TorchRec's; captured steps are in `graphs`."""

from dataclasses import replace
from functools import partial

from tests.agreement import WEIGHT_TOLERANCE, assert_all_near, assert_same
from tests.distributed.unpooled import Case, our_sharders, torchrec_sharders, train
from tests.gpu.exchange.place import Place, every

_CASES = {
    "mixed": Case(samples=(5, 3), pooled=True, need_indices=True),
    "row_wise": Case(plan="row_wise", samples=(5, 3), optimizer="rowwise_adagrad", few=4),
    "variable_batch": Case(samples=(5, 3), variable_batch=True, need_indices=True, clipped=True),
    "two_nodes": Case(plan="column_wise", samples=(5, 3), pooled=True, nodes=2),
    "rows_of_two_nodes": Case(samples=(6,), bags=(0, 3), steps=4, longer={99: 1}, pooled=True, nodes=2),
    "repeated": Case(samples=(4,), repeated=100_000, optimizer="rowwise_adagrad"),
}


def _check(place: Place, name: str, backend: str = "pgas") -> None:
    case = replace(_CASES[name], repeated=_CASES[name].repeated if place.on_gpu else 0)
    if place.world_size % 2:
        case = replace(case, nodes="auto")
    expected = train(case, torchrec_sharders(case), "none", place.device)
    ours = train(case, our_sharders(case, backend=backend), "graph", place.device)
    assert_same(ours["output of step 0"], expected["output of step 0"], "first output")
    tolerance = WEIGHT_TOLERANCE["fp32"] * (10 if case.repeated else 1)  # sums of many gradients
    assert_all_near(ours, expected, tolerance, f"{name}:")
    again = train(case, our_sharders(case, backend=backend), "graph", place.device)
    assert_all_near(again, ours, 0, "a second run:")


CHECKS = every("unpooled", _check, name=[*_CASES]) | every(
    "unpooled_mixed_fused", partial(_check, name="mixed", backend="fused")
)
