"""A computation beside a communication: the numbers of a case, the cases, the checks, and a rehearsal on one rank."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.bench.figures import concurrent
from dlrm_overlap.bench.harness.communications import Payload, by_collective, wrong
from dlrm_overlap.bench.harness.timing import Turns
from dlrm_overlap.bench.report.concurrent import summarise
from dlrm_overlap.bench.request import ConcurrentRequest
from dlrm_overlap.train.ranks import Ranks
from tests.conftest import read_rows
from tests.pages import limit_by_memory

CPU = torch.device("cpu")


def test_classes_are_told_by_the_times_alone() -> None:
    assert [concurrent.classify(c, 1.0) for c in (1.16, 1.15, 1.0, 0.87, 0.86)] == [
        "G-long", "GC-equal", "GC-equal", "GC-equal", "C-long",
    ]  # fmt: skip


def test_fraction_of_ideal_by_hand() -> None:
    assert concurrent.fraction_of_ideal(3.0, 1.0, 3.5)["fraction_of_ideal"] == pytest.approx(3 / 7)
    assert concurrent.fraction_of_ideal(2.0, 2.0, 2.0) == {"ideal": 2.0, "speedup": 2.0, "fraction_of_ideal": 1.0}
    assert concurrent.fraction_of_ideal(1.0, 3.0, 4.0)["fraction_of_ideal"] == 0.0


def test_every_computation_meets_every_communication_at_every_ratio() -> None:
    names = ["gemm_8192", "gemm_4096", "lookup", "optimizer"]
    cases = concurrent.make_cases(names, "cuda")
    assert {case[:2] + case[3:] for case in cases} == {
        (name, kind, ratio) for name in names for kind in concurrent.KINDS for ratio in (0.4, 0.7, 0.95, 1.05, 1.6, 2.5)
    }
    assert all(1 <= case.megabytes <= 512 for case in cases)
    assert {case.megabytes for case in cases if case.computation == "gemm_8192"} == {512}
    payloads = [case[1:3] for case in cases]
    assert [case.megabytes for case in cases] == sorted(case.megabytes for case in cases)
    assert len(set(payloads)) == 1 + sum(a != b for a, b in itertools.pairwise(payloads))  # in one go


@pytest.mark.parametrize("kind", concurrent.KINDS)
def test_a_wrong_result_is_found(kind: str, world_of_one: dist.ProcessGroup) -> None:
    made = by_collective(Payload(kind, 1024, world_of_one, CPU), world_of_one)
    assert wrong({"right": (made, made.run)}) == []

    def nearly() -> None:
        made.run()
        made.result.view(-1)[-1] += 1e-3

    assert wrong({"right": (made, made.run), "nearly": (made, nearly)}) == ["nearly"]


def test_pieces_are_timed_in_turns(world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    reduce = dist.all_reduce

    def as_nccl(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        assert tensor.is_contiguous(), "which gloo does not ask for"
        return reduce(tensor, *arguments, **options)

    monkeypatch.setattr(dist, "all_reduce", as_nccl)

    def sleeping() -> None:
        order.append("b")
        time.sleep(0.02)

    timed = Turns(world_of_one, CPU).time([lambda: order.append("a"), sleeping, lambda: order.append("c")], 4)
    assert "".join(order[:6]) == "abcabc", "twice to warm up"
    rounds = ["".join(order[i : i + 3]) for i in range(6, 18, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1, "in no fixed order"
    assert all(0 <= each.p10_ms <= each.median_ms <= each.p90_ms for each in timed)
    assert timed[1].p10_ms >= 20 > max(timed[0].p10_ms, timed[2].p10_ms), "each time is its own piece's"


def test_a_summary_averages_by_class_and_takes_the_best() -> None:
    rows = [
        {"computation": c, "calls": 1, "communication": "all_reduce", "megabytes": 1.0, "class": name,
         "computation_kind": "lookup", "flop": "0.0", "hbm_bytes": "1e9", "world_size": "2",
         "strategy": strategy, "together_ms": ms, "speedup": 2 / ms, "fraction_of_ideal": 2 / ms - 1}
        for c, name, times in (("x", "G-long", (2.0, 1.0)), ("y", "C-long", (1.6, 2.0)))
        for strategy, ms in zip(("serial", "dma_aside"), times, strict=True)
    ]  # fmt: skip
    serial, dma, best = summarise(rows)
    assert (serial["G-long"], serial["C-long"], serial["GC-equal"], serial["best"]) == (0.0, 0.25, None, 1)
    assert (dma["all"], dma["mean_speedup"], dma["best"]) == (0.5, 1.5, 1)
    assert (best["all"], best["best"]) == (0.625, 2)


def test_the_limit_by_memory_by_hand() -> None:
    case = {"computation": "x", "calls": 1, "communication": "all_gather", "megabytes": 1.0, "world_size": 2}
    lookup = case | {"computation_ms": 2.0, "communication_ms": 1.0, "hbm_bytes": 8e9, "link_bytes": 0.42e9}
    product = lookup | {"computation": "y", "hbm_bytes": 1e9}  # which leaves room enough
    assert limit_by_memory([lookup, lookup]) == pytest.approx((3 / 2.2 - 1) / 0.5)
    exchange = lookup | {"communication": "all_to_all", "link_bytes": 0.21e9}  # and as much to the rank itself
    assert limit_by_memory([exchange]) == pytest.approx((3 / 2.2 - 1) / 0.5)
    assert limit_by_memory([lookup, product]) == pytest.approx(((3 / 2.2 - 1) / 0.5 + 1) / 2)


def test_a_rehearsal_on_one_rank_writes_a_row_a_strategy(tmp_path: Path, world_of_one: dist.ProcessGroup) -> None:
    request = ConcurrentRequest("concurrent", tmp_path / "rows.csv", repetitions=2)
    ranks = SimpleNamespace(connect=lambda: world_of_one, device=CPU, world=SimpleNamespace(rank=0))
    assert concurrent.run(request, cast(Ranks, ranks)) == 0
    rows = read_rows(request.output)
    cases: dict[Any, list[str]] = {}
    for row in rows:
        cases.setdefault((row["computation"], row["communication"]), []).append(row["strategy"])
        value = {key: float(row[key]) for key in row if key.endswith("_ms") and row[key]}
        speedup = (value["computation_ms"] + value["communication_ms"]) / value["together_ms"]
        assert float(row["speedup"]) == pytest.approx(speedup, rel=1e-2)
    assert len(cases) == 9
    for (_, communication), names in cases.items():
        copies = "dma_averaged" if communication == "all_reduce" else "dma_apart"
        assert names == ["serial", "plain", copies]
