"""The report's numbers are those of the CSV files, and the page needs nothing else."""

import base64
import csv
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dlrm_overlap.bench.report.measured import Measured, hardware, read_measured, runs
from dlrm_overlap.bench.report.page import (
    Section,
    answer,
    headline,
    html_page,
    make_section,
    markdown_page,
    write_report,
)
from dlrm_overlap.bench.report.plots import PLOTS
from dlrm_overlap.cli import main
from dlrm_overlap.config import InputError
from tests.conftest import dump_page, need_browser, read_rows

RESULTS = Path("docs/results")


def _rewrite(source: Path, target: Path, contender: str, **changes: str) -> None:
    """Copy a CSV file with other values in the first row of `contender`."""
    rows = read_rows(source)
    next(row for row in rows if row["contender"] == contender).update(changes)
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _section(measured: Measured) -> Section:
    return make_section(measured, b"<svg/>")


def _lines(sections: list[Section]) -> list[list[str]]:
    table = headline(sections)
    assert table is not None
    return table.to_numpy().tolist()


def test_a_changed_row_changes_plot_page_and_markdown(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "slice.csv", tmp_path / "slice.csv")
    (tmp_path / "notes.csv").write_text("remark\nnone\n")
    assert main(["bench", "report", str(tmp_path)]) == 0
    output = tmp_path / "report"
    first = {path.name: path.read_bytes() for path in output.iterdir()}
    assert set(first) == {"index.html", "report.md", "slice.svg", "slice.png"}
    assert b"1.89" in first["report.md"]
    assert b"77.25" not in first["index.html"]
    write_report(tmp_path, output)
    assert first == {path.name: path.read_bytes() for path in output.iterdir()}, "the same rows give the same files"
    _rewrite(RESULTS / "slice.csv", tmp_path / "slice.csv", "pgas", median_ms="77.25")
    assert write_report(tmp_path, output) == ["notes"]
    for path in output.iterdir():
        assert path.read_bytes() != first[path.name], path.name
    assert "| pgas | - | 1.89 | 77.25 | 1.90 |" in (output / "report.md").read_text()
    assert "<td>77.25</td>" in (output / "index.html").read_text()


@pytest.mark.parametrize("name", ["slice", "occupancy"])
def test_a_sweep_of_fused_with_staged_slices_is_drawn(name: str) -> None:
    measured = read_measured(RESULTS / f"{name}.csv")
    rows = [{**row, "contender": row["contender"].replace("fused", "fused_stores")} for row in measured.rows]
    drawn = PLOTS[name].draw(measured._replace(rows=rows)).svg().decode()
    assert ">fused_stores</text>" in drawn
    assert ">4.78</text>" in drawn


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = html_page([_section(read_measured(RESULTS / name)) for name in ("step.csv", "stage.csv")])
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", page)
    assert "<script" not in page
    assert "@import" not in page


def test_the_commands_are_those_of_the_rows_where_all_name_theirs() -> None:
    measured = read_measured(RESULTS / "slice.csv")
    figure = PLOTS["slice"].command
    assert f"`{figure}`" in markdown_page([_section(measured)])
    named = [{**row, "command": f"dlrm-overlap bench slice --seed {i // 2}"} for i, row in enumerate(measured.rows)]
    page = markdown_page([_section(measured._replace(rows=named))])
    assert figure not in page
    assert all(f"--seed {i}`" in page for i in range(4))
    half = [*named[1:], {**named[0], "command": ""}]
    assert f"`{figure}`" in markdown_page([_section(measured._replace(rows=half))])


def test_a_contender_whose_losses_differ_gets_no_speedup_and_is_not_the_fastest(tmp_path: Path) -> None:
    path = tmp_path / "step.csv"
    _rewrite(RESULTS / "step.csv", path, "pgas_graph", agrees="False", median_ms="0.5")
    section = _section(read_measured(path))
    assert _lines([section])[0][6] == "fused_graph"
    (line,) = [line for line in section.table.to_numpy().tolist() if line[1] == "pgas_graph" and line[3] == "0.500"]
    assert line[-1] == "False", "the table says that its losses differ"


def test_the_page_begins_with_how_much_faster_a_step_is(tmp_path: Path) -> None:
    path = tmp_path / "step.csv"
    _rewrite(RESULTS / "step.csv", path, "pgas_graph", speedup_over_torchrec_strongest="1.5", median_ms="7.5")
    _rewrite(path, path, "fused_graph", agrees="False")
    sections = [_section(read_measured(path)), _section(read_measured(RESULTS / "wide.csv"))]
    first, *others = _lines(sections)
    assert first[1:] == ["4.66x", "1.5x", "12.52", "8.69", "7.50", "pgas_graph", "step"]
    assert len(others) == 4, "no line for wide.csv, which TorchRec has no row in"
    told = answer(sections)
    assert told.startswith(
        "On the steps below a training step is 1.5 to 16 times as fast as under TorchRec at its strongest, and 2.6 to "
        "20 times as fast as under TorchRec as people run it."
    )
    page = html_page(sections)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert page.index(told) < page.index("<table>") < page.index("YOURS.yaml gives") < page.index("All figures")
    _rewrite(path, path, "torchrec", median_ms="0.1")
    assert _lines([_section(read_measured(path))])[0][6] == "pgas_graph", "the reference is none of ours"
    on_cpu = [
        _section(each.measured._replace(rows=[{**row, "gpu": ""} for row in each.measured.rows])) for each in sections
    ]
    assert answer(on_cpu).startswith("No step was measured on GPUs")


def test_the_ablations_table_says_what_each_contender_is() -> None:
    table = PLOTS["ablation"].table(read_measured(RESULTS / "ablation.csv"))
    told = {line["contender"]: line["what it is"] for line in table}
    assert told["torchrec_int32"] == "torchrec with ids as int32"
    assert told["pgas_graph_no_compile"] == "pgas_graph without the compiled dense part; eager operators, captured"
    assert {name for name, words in told.items() if words == "-"} == {"torchrec", "pgas_graph"}


def test_relative_bars_have_relative_numbers() -> None:
    measured = read_measured(RESULTS / "stage.csv")
    picture = PLOTS["stage"].draw(measured).svg().decode()
    above = re.findall(r">(\d\.\d\d)</text>", picture)
    assert above.count("1.00") >= 5, "the baseline's own"
    assert "0.73" in above
    assert "baseline 5.76 ms" in picture
    assert ">5.76<" not in picture


def test_rows_of_a_cpu_are_labelled_so() -> None:
    measured = read_measured(RESULTS / "stage.csv")
    rows = [{**row, "gpu": ""} for row in measured.rows]
    assert hardware(rows).startswith("CPU, a rehearsal and no figure: Intel")
    assert hardware(measured.rows).startswith("4 x NVIDIA H200, torch 2.11.0+cu130, nccl 2.28.9")
    assert "CPU, a rehearsal" in markdown_page([_section(measured._replace(rows=rows))])


def test_a_run_ends_where_a_contender_comes_again() -> None:
    rows = [{"contender": name, "dim": dim} for name, dim in (("a", "8"), ("b", "8"), ("a", "8"), ("b", "16"))]
    assert [list(run) for run in runs(rows)] == [["a", "b"], ["a"], ["b"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"slice\.csv: no rows"),
        ("kind,contender\nslice\n", r"slice\.csv: no rows, or not as many cells"),
        ("kind,contender\nslice,pgas\n", r"slice\.csv: column median_ms: empty, or not there"),
        ("kind,contender,median_ms\nslice,pgas,fast\n", r"slice\.csv: column median_ms: 'fast' is not a number"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_told_in_a_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "slice.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        write_report(tmp_path, tmp_path / "report")


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no CSV file of a figure"):
        write_report(tmp_path, tmp_path / "report")


class _Document(HTMLParser):
    """What a page holds: cells of each row, pictures; a tag that is closed where another is open fails."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.pictures: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.pictures.append(dict(attrs)["src"] or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("img", "meta"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_the_page_is_whole_html_with_every_row_and_picture() -> None:
    sections = [_section(read_measured(RESULTS / name)) for name in ("step.csv", "slice.csv")]
    document = _Document(html_page(sections))
    for section in sections:
        assert all(line in document.rows for line in [list(section.table), *section.table.to_numpy().tolist()])
    pictures = [base64.b64decode(each.removeprefix("data:image/svg+xml;base64,")) for each in document.pictures]
    assert pictures == [section.picture for section in sections]


def test_markup_in_a_files_name_is_text(tmp_path: Path) -> None:
    name = 'a"><img src=x onerror=alert(1)>'
    shutil.copy(RESULTS / "slice.csv", tmp_path / f"{name}.csv")
    sections = [_section(read_measured(tmp_path / f"{name}.csv"))]
    document = _Document(html_page(sections))
    assert [each for each in document.pictures if not each.startswith("data:")] == []
    assert "<img" not in markdown_page(sections)


@pytest.mark.slow
def test_a_browser_shows_the_page_from_a_file(tmp_path: Path) -> None:
    need_browser(tmp_path / "profile")
    shutil.copy(RESULTS / "step.csv", tmp_path / "step.csv")
    write_report(tmp_path, tmp_path)
    shown = dump_page((tmp_path / "index.html").as_uri(), tmp_path / "profile")
    assert "<title>dlrm-overlap: report</title>" in shown
    assert shown.count("<img") == 1
    for row in read_measured(tmp_path / "step.csv").rows:
        assert f'<td class="text">{row["contender"]}</td>' in shown
    assert "4.66x" in shown
