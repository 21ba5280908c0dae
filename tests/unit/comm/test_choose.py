"""The choice of a strategy: its arithmetic, a table fitted to cases of known slowdowns, and the measured cases."""

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlrm_overlap.bench.report import slowdowns
from dlrm_overlap.bench.report.slowdowns import RIGHT, fit_table, replay, write_table
from dlrm_overlap.comm import choose
from dlrm_overlap.comm.choose import Communication, Computation, Slowdown
from dlrm_overlap.config import InputError
from tests.conftest import read_rows

MEASURED = Path("docs/results/concurrent.csv")

TABLE: choose.Table = {
    "computations": {
        "gemm": {"tflop_per_s": 500.0, "gb_per_s": 4000.0, "call_us": 5.0},
        "lookup": {"gb_per_s": 2000.0, "call_us": 5.0},
    },
    "communications": {
        "all_to_all": {
            "collective": {"latency_us": 20.0, "gb_per_s": 300.0},
            "dma": {"latency_us": 50.0, "gb_per_s": 375.0},
        }
    },
    "strategies": {
        "serial": {"strategy": "serial", "share": None, "implementation": None},
        "limited_4": {
            "strategy": "limited", "share": 4, "implementation": "collective",
            "slowdowns": {
                "gemm, all_to_all": [1.2, 2.0, 0.0, 0.0], "gemm bound by memory, all_to_all": [1.1, 1.2, 0.0, 0.0],
                "lookup, all_to_all": [1.1, 1.2, 0.0, 0.0],
            },
        },
        "dma": {
            "strategy": "dma", "share": None, "implementation": "dma",
            "slowdowns": {
                "gemm, all_to_all": [1.05, 1.1, 0.01, 0.1], "gemm bound by memory, all_to_all": [1.2, 1.3, 0.01, 0.0],
                "lookup, all_to_all": [1.3, 1.4, 0.01, 0.0],
            },
        },
    },
}  # fmt: skip


def test_it_loads_no_torch() -> None:
    script = "import sys, dlrm_overlap.comm.choose; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_times_by_hand() -> None:
    assert choose.together_ms(2.0, 1.0, 2.0, Slowdown(1.1, 1.5, 0.0, 0.0)) == pytest.approx(1.5 + 2.0 - 1.5 / 1.1)
    assert choose.together_ms(1.0, 2.0, 1.0, Slowdown(1.5, 1.1, 0.0, 0.0)) == pytest.approx(1.5 + 2.0 - 1.5 / 1.1)
    assert choose.together_ms(1.0, 3.0, 0.5, Slowdown(1.0, 1.0, 0.25, 0.1)) == pytest.approx(3.3)
    assert choose.computation_ms(Computation("gemm", 1e12, 4e9, calls=2), TABLE) == pytest.approx(2.0 + 0.01)
    assert choose.computation_ms(Computation("gemm", 1e11, 4e9), TABLE) == pytest.approx(1.0 + 0.005)
    assert choose.computation_ms(Computation("lookup", 0.0, 4e9), TABLE) == pytest.approx(2.0 + 0.005)
    exchange = Communication("all_to_all", 400e6)
    assert choose.communication_ms(exchange, 4, TABLE, "collective") == pytest.approx(0.02 + 1.0)
    assert choose.sent_bytes(Communication("all_reduce", 400e6), 4) == 600e6
    assert choose.sent_bytes(Communication("all_reduce", 400e6), 4, "dma_gathered") == 1200e6
    bounds = [choose.bound(each, TABLE) for each in (Computation("gemm", 1e12, 1e6), Computation("gemm", 1e9, 4e9))]
    assert bounds == ["gemm", "gemm bound by memory"]


def test_a_choice_by_size() -> None:
    large = choose.choose(Computation("gemm", 5e11, 1e8, 10), Communication("all_to_all", 400e6), 4, TABLE)
    assert (large.strategy, large.share, large.label) == ("dma", None, "dma")
    assert 1.05 < large.together_ms < 1.15  # by itself the computation takes 1.05 ms, the communication 0.85
    small = choose.choose(Computation("lookup", 0.0, 2e9), Communication("all_to_all", 20e6), 4, TABLE)
    assert (small.strategy, small.share, small.label) == ("limited", 4, "limited_4")
    only = choose.choose(Computation("lookup", 0.0, 2e9), Communication("all_to_all", 20e6), 4, TABLE, ("serial",))
    assert (only.strategy, only.together_ms) == ("serial", pytest.approx(1.005 + 0.02 + 0.05))


def test_likeness_by_hand() -> None:
    case = choose.Case("gemm", "all_reduce", 2.0, 1.0, 1)
    assert case.likeness(case) == 1.0
    assert case.likeness(case._replace(computation_ms=2.0 * math.exp(0.8))) == pytest.approx(1 / math.e)
    both = case._replace(computation_ms=2.0 * math.exp(1.6), communication_ms=math.exp(1.6))  # in the same ratio
    assert case.likeness(both) == both.likeness(case) == pytest.approx(1 / math.e)
    assert case.likeness(case._replace(computation="lookup")) == pytest.approx(math.exp(-4))
    assert case.likeness(case._replace(communication="all_gather")) == pytest.approx(math.exp(-9))


def test_a_prediction_counts_as_a_thousandth_of_a_case_that_is_alike() -> None:
    work, sent = Computation("lookup", 0.0, 2e9), Communication("all_to_all", 20e6)
    case = choose.Case.of(work, sent, 4, TABLE)
    predicted = {label: choose.predict_ms(work, sent, 4, TABLE, label) for label in ("limited_4", "dma")}
    lost = predicted["dma"] / predicted["limited_4"] - 1
    assert 0.01 < lost < 0.2
    for likeness in (0.9, 0.1, 0.05):
        calls = case.calls * math.exp(0.7 * math.sqrt(-math.log(likeness)))
        for share, label in ((1.1, "dma"), (0.9, "limited_4")):
            times = {"limited_4": 1.0 + share * 0.001 / likeness * lost, "dma": 1.0}
            alike = {"case": list(case._replace(calls=calls)), "together_ms": times}  # type: ignore[arg-type]
            assert choose.choose(work, sent, 4, TABLE | {"cases": [alike]}).label == label, (likeness, share)
    # Of those that are available alone, and of a case that does not have them, the prediction decides.
    other = {"case": list(case), "together_ms": {"dma_gathered": 1.0}}
    assert choose.choose(work, sent, 4, TABLE | {"cases": [other]}, ("serial", "limited")).label == "limited_4"


def test_a_case_that_was_measured_itself_is_looked_up() -> None:
    work, sent = Computation("lookup", 0.0, 2e9), Communication("all_to_all", 20e6)
    case = choose.Case.of(work, sent, 4, TABLE)
    assert choose.choose(work, sent, 4, TABLE).label == "limited_4"
    same = {"case": list(case), "together_ms": {"limited_4": 1.001, "dma": 1.0}}
    alike = {"case": list(case._replace(calls=2)), "together_ms": {"limited_4": 1.0, "dma": 1.2}}
    assert choose.choose(work, sent, 4, TABLE | {"cases": [alike, alike]}).label == "limited_4"
    assert choose.choose(work, sent, 4, TABLE | {"cases": [alike, same, alike]}).label == "dma"


def test_a_strategy_that_a_communication_has_not_is_not_chosen() -> None:
    dma = TABLE["strategies"]["dma"]
    only = TABLE | {"strategies": TABLE["strategies"] | {"dma": dma | {"slowdowns": {}}}}
    large = Computation("gemm", 5e11, 1e8, 10), Communication("all_to_all", 400e6)
    assert choose.choose(*large, 4, TABLE).label == "dma"
    assert choose.choose(*large, 4, only).label == "limited_4"


def test_the_strategies_that_are_kept_are_those_without_which_choices_lose_more() -> None:
    times = [{"a": 1.0, "b": 1.01, "c": 2.0}] * 60 + [{"a": 2.0, "b": 1.0, "c": 1.5}] * 39 + [{"a": 2.0, "c": 1.0}]

    def kept(times: list[dict[str, float]]) -> list[str]:
        cases = {(i,): {label: {"together_ms": ms} for label, ms in each.items()} for i, each in enumerate(times)}
        return slowdowns._worthwhile(cases)

    # b alone loses 1% in 60 cases, and 20%, which is the most that counts, in the one that has none: 0.8 in all.
    assert kept(times) == ["b", "a", "c"]  # a spares 0.6 of it, c the rest
    assert kept(times + times[60:99] * 8) == ["b", "a"]  # of 412 cases 0.2 are less than 0.0005 each
    assert kept([{"a": 1.0, "b": 1.0}]) == ["a"]


def test_what_the_table_does_not_know_is_refused(tmp_path: Path) -> None:
    work = Computation("gemm", 1.0, 1.0)
    with pytest.raises(InputError, match="broadcast: not in the table of slowdowns; known: all_to_all"):
        choose.choose(work, Communication("broadcast", 1.0), 4, TABLE)
    with pytest.raises(InputError, match="sort: not in the table of slowdowns; known: gemm, lookup"):
        choose.choose(Computation("sort", 1.0, 1.0), Communication("all_to_all", 1.0), 4, TABLE)
    with pytest.raises(InputError, match="none is available; the table has serial, limited_4, dma"):
        choose.choose(work, Communication("all_to_all", 1.0), 4, TABLE, available=())
    with pytest.raises(InputError, match="--write_table"):
        choose.read_table(tmp_path / "none.json")


def _rows() -> list[dict[str, Any]]:
    """Return the rows that a machine which keeps to TABLE would give."""
    rows = []
    works = [Computation("gemm", flop, 1e7, calls) for flop, calls in ((2e11, 1), (8e11, 4))]
    works += [Computation("gemm", 1e9, size, calls) for size, calls in ((4e8, 1), (2e9, 2))]
    works += [Computation("lookup", 0.0, size) for size in (2e8, 4e9)]
    for work, megabytes in itertools.product(works, (8, 64, 512)):
        sent = Communication("all_to_all", megabytes * 1e6)
        alone = {each: choose.communication_ms(sent, 4, TABLE, each) for each in ("collective", "dma")}
        for label, entry in TABLE["strategies"].items():
            rows.append(
                {"computation": str(work), "computation_kind": work.kind, "calls": work.calls, "flop": work.flop,
                 "hbm_bytes": work.hbm_bytes, "communication": "all_to_all", "megabytes": megabytes, "world_size": 4,
                 "gpu": "none", "computation_ms": choose.computation_ms(work, TABLE), "stores_alone_ms": "",
                 **{f"{each}_alone_ms": ms for each, ms in alone.items()}, "strategy": label,
                 "implementation": entry["implementation"] or "collective",
                 "together_ms": choose.predict_ms(work, sent, 4, TABLE, label)}
            )  # fmt: skip
    return rows


def test_a_fit_finds_the_slowdowns_that_made_the_cases() -> None:
    rows = _rows()
    found = fit_table(rows)
    assert found["measured_on"] == {"gpu": "none"}
    assert found["communications"].keys() == {"all_to_all"}
    for name, rates in TABLE["communications"]["all_to_all"].items():
        assert found["communications"]["all_to_all"][name] == pytest.approx(rates, rel=0.02)
    assert found["communications"]["all_to_all"].keys() == {"collective", "dma"}  # stores were left out
    for kind, rates in TABLE["computations"].items():
        assert found["computations"][kind] == pytest.approx(rates, rel=0.05, abs=2.0)
    replayed = replay(rows, found)
    assert {each.best for each in replayed} == {"limited_4", "dma"}
    assert sum(each.lost <= RIGHT for each in replayed) >= 0.9 * len(replayed)
    assert found["strategies"].keys() == {"limited_4", "dma"}  # one after the other is never worth while


def test_a_table_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowdowns, "_PARTS", 2)  # fewer fits
    path = tmp_path / "folder" / "table.json"
    text = write_table(path, _rows())
    assert f"slowdowns in {path}: " in text
    assert "Of cases that were left out" in text
    assert "Of products that were left out" in text
    table = choose.read_table(path)
    assert table["world_size"] == 4
    assert choose.choose(Computation("gemm", 5e11, 1e8), Communication("all_to_all", 400e6), 4, table).label == "dma"


def test_a_product_is_left_out_with_all_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[set[str]] = []

    def fit(rows: list[dict[str, Any]]) -> choose.Table:
        fitted.append({row["computation"] for row in rows})
        return TABLE

    monkeypatch.setattr(slowdowns, "fit_table", fit)
    rows = _rows()
    names = list(dict.fromkeys(row["computation"] for row in rows if row["flop"]))
    alone = [row for row in rows if row["computation"] != names[1]]  # the other bound by multiplication is alone then
    found = slowdowns.leave_products_out(rows)
    assert {each.case[0] for each in found} == set(names)
    assert len(found) == 3 * len(names)  # each with three communications
    assert all(len(each) == len(fitted[0]) - 1 for each in fitted[1:])
    assert {each.case[0] for each in slowdowns.leave_products_out(alone)} == set(names[2:])


def _told_by_the_page(found: list[slowdowns.Replay]) -> bool:
    return slowdowns._tell(found) in " ".join(Path("docs/results/concurrent.md").read_text().split())


def test_the_package_s_table_chooses_well_in_the_measured_cases() -> None:
    found = replay(read_rows(MEASURED), choose.read_table())
    assert len(found) >= 30
    wrong = [each for each in found if each.lost > RIGHT]
    assert len(wrong) <= 0.1 * len(found), wrong
    assert _told_by_the_page(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["concurrent", "concurrent_captured", "concurrent_repeated"])
def test_the_page_tells_how_often_choices_are_right(name: str) -> None:
    rows = read_rows(MEASURED.with_name(f"{name}.csv"))
    assert _told_by_the_page(replay(rows, fit_table(rows)))
    assert _told_by_the_page(slowdowns.cross_validate(rows))
    assert _told_by_the_page(slowdowns.leave_products_out(rows))


@pytest.mark.slow
def test_the_page_tells_what_more_cases_bring() -> None:
    rows, others = (read_rows(MEASURED.with_name(f"concurrent_{name}.csv")) for name in ("repeated", "sizes"))
    known = set(slowdowns._by_case(rows))
    new = [row for row in others if tuple(row[key] for key in slowdowns._CASE) not in known]
    assert _told_by_the_page(replay(new, fit_table(rows)))
    assert _told_by_the_page(replay(rows + others, fit_table(rows + others)))
    assert _told_by_the_page(slowdowns.cross_validate(rows + others))


@pytest.mark.slow
def test_a_table_chooses_well_when_its_cases_are_measured_again() -> None:
    """All-reduces have changed between the two, and some strategies were measured once only."""
    before, again = (
        [row for row in read_rows(MEASURED.with_name(f"{name}.csv")) if row["communication"] != "all_reduce"]
        for name in ("concurrent_captured", "concurrent_repeated")
    )
    strategies = {row["strategy"] for row in again}
    found = replay(again, fit_table([row for row in before if row["strategy"] in strategies]))
    assert sum(each.lost <= RIGHT for each in found) >= 0.9 * len(found)
    assert _told_by_the_page(found)
