"""The tables and numbers of the pages are those of the measured rows."""

import re
from pathlib import Path

import pytest

from dlrm_overlap.bench.drift_contenders import DRIFT_USUAL
from tests import pages, pictures
from tests.measured import values
from tests.pages import FOLDER, NUMBER, PAGES, TABLE, milliseconds, origin, written
from tests.simulated_pages import read


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_writing_a_page_anew_changes_nothing(page: Path) -> None:
    assert written(page) == page.read_text(), "run `python -m tests.pages`"


def test_rows_that_lack_their_origin_are_on_a_page_that_says_so() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    shown = {name for comment in TABLE.findall(text) for name in comment[1].split()}
    for path in FOLDER.rglob("*.csv"):
        name = path.relative_to(FOLDER).as_posix()
        if (
            not re.search(r"no commit|uncommitted|no command", origin(name))
            or "calibration/" in name
            or "timeline" in name
        ):
            continue
        assert name in shown or f"`{name}`" in text, f"{name}: {origin(name)}"


def test_the_sources_of_rows_are_named() -> None:
    sources = {row["source"] for row in read("mlperf_records.csv")}
    assert len(sources) > 1
    assert set(origin("mlperf_records.csv").split(", ")) == sources


ROWS = [
    {"contender": "torchrec", "median_ms": "8", "agrees": "True"},
    {"contender": "torchrec_fp16", "median_ms": "2", "agrees": "False"},
    {"contender": "torchrec_our_dense", "median_ms": "1", "agrees": "True"},
    {"contender": "pgas", "median_ms": "4"},
    {"contender": "torchrec_bf16", "median_ms": "6", "agrees": "True"},
    {"contender": "pgas", "median_ms": "2"},
    {"contender": "nccl", "median_ms": "1", "agrees": "False"},
]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("torchrec", [8]),
        ("pgas", [4, 2]),
        ("torchrec/pgas", [2]),  # over the next row of pgas, which took turns with it
        ("torchrec_bf16/pgas", [3]),
        ("strongest", [6]),  # of those that agree
        ("strongest/pgas", [2]),  # the least of all ratios
        ("torchrec/ours", [4]),  # over the fastest of a group
        ("torchrec_fp16", [2]),
        ("torchrec-pgas", [4]),
        ("torchrec:median_ms-ours:median_ms", [6]),
        ("torchrec_fp16-pgas", []),
        ("torchrec_fp16/pgas", []),
        ("torchrec/nccl", []),
        ("fused", []),
    ],
)
def test_the_value_of_an_expression(expression: str, expected: list[float]) -> None:
    assert values(ROWS, ROWS, expression) == expected


def test_the_best_known_rate_of_links_is_the_greatest_of_all_folders() -> None:
    rows = [row for path in FOLDER.rglob("collectives.csv") for row in read(path.relative_to(FOLDER).as_posix())]
    for row in rows:
        work = {"gpu": row["gpu"], "link_gb_per_s": "1", "link_bytes": "1e6", "hbm_bytes": "0", "hbm_gb_per_s": "1"}
        (limit_ms,) = values([work], [work], ":limit_ms")
        assert 1 / limit_ms >= float(row["gb_per_s"]) - 1e-6
    assert rows


def test_a_ratio_over_a_group_whose_rows_come_first_is_over_its_fastest() -> None:
    rows = [{"contender": name, "median_ms": ms} for name, ms in (("baseline", "4"), ("torchrec", "5"), ("pgas", "1"))]
    assert values(rows, rows, "pgas/strongest") == [0.25]


def test_a_ratio_divides_by_a_row_of_the_same_seed() -> None:
    rows = [
        {"contender": name, "seed": seed, "ne": ne}
        for name, seed, ne in (("any", "0", "3"), ("any", "1", "8"), ("lfu", "1", "4"), ("lfu", "0", "1"))
    ]
    assert values(rows, rows, "any:ne/lfu:ne") == [3, 2]


def test_a_number_before_a_comment_is_replaced_and_keeps_its_decimals(tmp_path: Path) -> None:
    assert [milliseconds(value) for value in (2.567, 0.4567, 0.0012)] == ["2.57", "0.457", "0.0012"]
    page = tmp_path / "page.md"
    text = "It takes {}<!-- = four_h200/quickstart.csv | pgas_graph -->\nms, {}<!-- = {} -->, not 2."
    spec = "four_h200/quickstart.csv | torchrec/pgas_graph"
    page.write_text(text.format("9.999", "0 to 1.0", spec))
    ours, over = re.findall(NUMBER, written(page))
    assert (len(ours[0]), len(over[0])) == (len("9.999"), len("21"))
    assert written(page).endswith("not 2.")
    assert written(page) != page.read_text()


def test_a_number_of_several_rows_shows_the_least_and_the_greatest(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It takes 1.00<!-- = four_h200/step_mlperf.csv | pgas_graph:busy_ms --> ms.")
    rows = values(read("four_h200/step_mlperf.csv"), read("four_h200/step_mlperf.csv"), "pgas_graph:busy_ms")
    assert f"takes {min(rows):.2f} to {max(rows):.2f}<" in written(page)


def test_units_and_quotients_of_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a.csv": ROWS, "b.csv": [{"contender": "pgas", "median_ms": "5"}]}
    monkeypatch.setattr(pages, "read", files.__getitem__)
    page = tmp_path / "page.md"

    def number(spec: str) -> str:
        page.write_text(f"It is 1<!-- = {spec} -->.")
        return written(page).removeprefix("It is ").partition("<")[0]

    assert number("a.csv | torchrec/ours@more") == "300"
    assert number("a.csv | ours/torchrec@less") == "75"
    assert number("a.csv | torchrec/torchrec_bf16@less") == "-33"
    assert number("a.csv | torchrec / b.csv | pgas") == "2"
    assert number("a.csv | pgas@more / b.csv | pgas") == "-60 to -20"
    with pytest.raises(ValueError, match="no row has a value for: b"):
        number("b.csv | torchrec")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_comment_of_a_number_follows_one(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- = ") == len(NUMBER.findall(text)), "a comment that follows no number changes nothing"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_comment_in_a_table_does_not_end_its_cell(page: Path) -> None:
    cells = [line for line in page.read_text().splitlines() if line.startswith("|")]
    shown = [line for line in cells if re.search(r"[^\\]\|", " ".join(comment[3] for comment in NUMBER.findall(line)))]
    assert not shown, r"a browser shows the comment: write \| for |"


def test_the_parts_of_the_gain_add_up_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        "torchrec_strongest": 5.0,
        "torchrec_strongest_default_plan": 4.5,
        "torchrec_strongest_fp16": 3.0,  # disagrees
        "torchrec_our_dense": 4.25,
        "pgas_graph_no_capture": 3.5,
        "pgas_graph": 2.25,
    }
    rows = [f"{name},{ms},{name != 'torchrec_strongest_fp16'}" for name, ms in times.items()]
    monkeypatch.setattr(pictures, "PART_ROWS", tmp_path / "rows.csv")
    monkeypatch.setattr(pictures, "STEP_PARTS", tmp_path / "parts.svg")
    pictures.draw_step_parts()
    assert not pictures.STEP_PARTS.exists(), "there are no rows"
    pictures.PART_ROWS.write_text("\n".join(["contender,work_ms,agrees", *rows]))
    parts, left_ms = pictures.step_parts()
    assert (parts, left_ms) == ([("dense part", 0.25), ("exchange", 0.75), ("CUDA graph", 1.25)], 2.25)
    pytest.importorskip("matplotlib")
    pictures.draw_step_parts()
    shown = re.findall(r"<text [^>]*>([^<]*)</text>", pictures.STEP_PARTS.read_text())
    assert {name for name, _ in parts} | {"0.25", "0.75", "1.25", "2.25"} <= set(shown)


@pytest.mark.skipif(not pictures.PART_ROWS.exists(), reason="these contenders have no rows")
def test_the_picture_of_the_parts_has_the_numbers_of_the_rows() -> None:
    shown = re.findall(r"<text [^>]*>([^<]*)</text>", pictures.STEP_PARTS.read_text())
    parts, left_ms = pictures.step_parts()
    assert {f"{ms:.2f}" for ms in [left_ms, *(ms for _, ms in parts)]} <= set(shown), "run `python -m tests.pictures`"


def test_the_pictures_have_the_numbers_of_the_rows() -> None:
    shown = re.findall(r"<text [^>]*>([^<]*)</text>", pictures.STEP_TIMES.read_text())
    for title, ms in pictures.step_times():
        assert title in shown
        assert {f"{value:.2f}" for value in ms} <= set(shown), f"{title}: run `python -m tests.pictures`"


def test_the_timelines_are_those_of_the_rows() -> None:
    shown = re.findall(r"<text [^>]*>([^<]*)</text>", pictures.TIMELINES.read_text())
    rows = read(f"{pictures.TIMELINE_ROWS}/timeline_mlperf.csv")
    for contender, title in pictures.TIMELINE_CONTENDERS.items():
        end_ms = max(float(row["end_us"]) for row in rows if row["contender"] == contender) / 1e3
        assert f"{title}: {end_ms:.2f} ms" in shown, "run `python -m tests.pictures`"


@pytest.mark.parametrize("name", pictures.DRIFTS)
def test_the_curves_of_drifting_ids_end_in_the_means_of_the_rows(name: str) -> None:
    shown = re.findall(r"<text [^>]*>([^<]*)</text>", (pictures.FOLDER / f"{name}.svg").read_text())
    curves = pictures.drift_curves(name)
    assert set(curves) >= set(DRIFT_USUAL) - {"any_admit_2", "any_admit_2_forever"}
    assert {label for label, _ in curves.values()} <= set(shown), "run `python -m tests.pictures`"


def test_the_curves_end_in_the_values_of_the_rows() -> None:
    shown = re.findall(r"<text [^>]*>([^<]*)</text>", pictures.CURVES.read_text())
    rows = read(pictures.CURVE_ROWS)
    curves = {(row["name"], row["metric"]) for row in rows}
    assert len(curves) == 6
    for curve in curves:
        own = [row for row in rows if (row["name"], row["metric"]) == curve]
        assert pictures.curve_label(own) in shown, "run `python -m tests.pictures`"


def test_the_table_of_learned_metrics_has_the_way_to_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {("torchrec", 0): (0.80, 0.90), ("torchrec", 1): (0.91, 0.92), ("pgas", 0): (0.88, 0.89)}
    rows = [
        {"contender": name, "seed": str(seed), "samples": str(k * 1_000_000), "seconds": str(10 * k)}
        | {"auroc": str(auroc), "ne": "0.8"}
        for (name, seed), curve in runs.items()
        for k, auroc in enumerate(curve, 1)
    ]
    monkeypatch.setattr(pages, "read", lambda _: rows)
    head, torchrec, pgas = pages.learned("learning.csv", "0.9")
    assert head[5:] == ["samples to 0.9", "seconds", "seeds that reach it"]
    assert torchrec[5:] == ["1.5M (47.1%)", "15.0 (47.1%)", "2 of 2"]
    assert pgas[5:] == ["", "", "0 of 1"]
    assert (torchrec[2], pgas[2]) == ("0.9100 ± 0.0141", "0.8900"), "one seed has no spread"
