"""`dlrm-overlap bench report`: the CSV files of a folder as one HTML page that needs no other file, and as Markdown."""

import base64
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader

from dlrm_overlap.bench.report.measured import (
    Measured,
    Row,
    Run,
    Table,
    hardware,
    milliseconds,
    need,
    number,
    read_measured,
    runs,
    trusted,
)
from dlrm_overlap.bench.report.plots import PLOTS, Plot, step_title
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.text_table import count_of
from dlrm_overlap.observe.result_files import write_atomically

PAGE, MARKDOWN = "index.html", "report.md"
_COMMANDS = (
    "A figure's command measures one of its shapes on four GPUs, and not always that of these rows: other shapes have "
    "files of their own under configs/bench. Where rows name the commands that measured them, these are given instead."
)
_BASES = ("torchrec", "torchrec_strongest")
_BEST, _RUN = "TorchRec at its strongest", "TorchRec as people run it"
_YOURS = "For your own model, measure: dlrm-overlap bench step --config YOURS.yaml --nproc auto"
_WORDS = (
    "YOURS.yaml gives the rows, dim and ids a bag of your tables, the layers' sizes and the samples a GPU; "
    "configs/bench/step_mlperf.yaml is one to begin with. Without measuring: take the line nearest to your model, "
    "then ask how long your GPUs compute in a step. TorchRec's step takes at least as long as its host needs to issue"
    " it, which hardly depends on the batch; ours as long as the GPUs need. So the less a step computes, the more you"
    " gain.",
    "4 x 8192 samples are 4 GPUs with 8192 samples each. At its strongest, TorchRec has ids as int32 and its dense "
    "part compiled and captured in CUDA graphs. pgas and fused are backends of this project; a name with graph "
    "captures the whole step in one CUDA graph, as GraphTrainPipeline does in a TorchRec program. dcn is a DLRM with "
    "DCNv2's cross network, dot one with dot products. Where the host is short of time, each rank is held to one "
    "core, which a busy process shares. Losses were held against each other before anything was timed. Hosts differ: "
    "the same step has several lines where it was measured on several.",
)


class Section(NamedTuple):
    """A CSV file in the report."""

    measured: Measured
    plot: Plot
    table: pd.DataFrame
    """of text"""
    picture: bytes
    """SVG"""
    words: Sequence[str] = ()
    """sentences that the rows bear out"""

    @property
    def title(self) -> str:
        """The figure's title, with the file's name where that is another than the figure's."""
        name = self.measured.name
        return self.plot.title if name == self.measured.kind else f"{self.plot.title} ({name})"

    @property
    def hardware(self) -> str:
        """GPUs or CPU, versions and commits."""
        return hardware(self.measured.rows)

    @property
    def commands(self) -> list[str]:
        """The commands that the rows name, or the figure's where one of them names none."""
        named = list(dict.fromkeys(row.get("command") or "" for row in self.measured.rows))
        return [self.plot.command] if "" in named else named

    @property
    def source(self) -> str:
        """A name for the commands."""
        return "the figure's command" if self.commands == [self.plot.command] else "measured by"


def as_text(lines: Table) -> pd.DataFrame:
    """Return a table whose cells are text: - where there is none, numbers with three digits."""

    def text(cell: Any) -> str:
        if isinstance(cell, float):
            return "-" if math.isnan(cell) else f"{cell:.3g}"
        return "-" if cell is None or cell == "" else str(cell)

    return pd.DataFrame(lines, dtype=object).map(text)


def write_report(folder: Path, output: Path) -> list[str]:
    """Write the page, the Markdown, and each plot as SVG and PNG to `output`; return the files that have no plot.

    Args:
        folder: of the CSV files.
        output: made if it is not there.

    Raises:
        InputError: if `folder` has no rows that can be drawn, or `output` cannot be written.
    """
    files = [read_measured(path) for path in sorted(folder.glob("*.csv"))]
    known = sorted((each for each in files if each.kind in PLOTS), key=report_order)
    if not known:
        raise InputError(f"{folder}: no CSV file of a figure in it; give the folder that `bench` has written rows to")
    try:
        output.mkdir(parents=True, exist_ok=True)
        sections = [_draw(each, output) for each in known]
        write_atomically(output / PAGE, html_page(sections))
        write_atomically(output / MARKDOWN, markdown_page(sections))
    except OSError as error:
        raise InputError(f"--output: {output} cannot be written ({error.strerror}); give another folder") from None
    return [each.name for each in files if each.kind not in PLOTS]


def report_order(measured: Measured) -> tuple[int, bool, str]:
    """Return the rank of a file in the report: by figure, the one of the figure's own name first."""
    return list(PLOTS).index(measured.kind), measured.name != measured.kind, measured.name


def make_section(measured: Measured, picture: bytes = b"") -> Section:
    """Return the section of a file, its table and words made of its rows."""
    plot = PLOTS[measured.kind]
    return Section(measured, plot, as_text(plot.table(measured)), picture, plot.words(measured))


def _draw(measured: Measured, output: Path) -> Section:
    """Return the section of a file, and write its plot."""
    try:
        picture, section = PLOTS[measured.kind].draw(measured), make_section(measured)
    except KeyError as error:
        raise InputError(f"{measured.name}.csv: no column or contender {error}, which the plot needs") from None
    except InputError as error:
        raise InputError(f"{measured.name}.csv: {error}") from None
    first, *more = section.commands
    others = f", and {count_of(len(more), 'other command')}" if more else ""
    picture.caption(section.hardware, f"{section.source}: {first}{others}")
    svg = picture.svg()
    (output / f"{measured.name}.svg").write_bytes(svg)
    picture.save_png(output / f"{measured.name}.png")
    return section._replace(picture=svg)


def headline(sections: Iterable[Section]) -> pd.DataFrame | None:
    """Return the answer to "how much faster is my job": a line for each step that was measured under TorchRec too.

    The best contender is the fastest of ours whose losses were the reference's.
    """
    lines: Table = []
    for section, run, best in _steps(sections):
        device = re.sub(r"^\d+ x ", "", best.get("gpu") or "CPU, a rehearsal")  # the title has their number
        times = [milliseconds(number(run[name], "median_ms")) if name in run else "-" for name in _BASES]
        over = ["-" if each is None else f"{each:.3g}x" for each in _speedups(best)]
        lines.append(
            {
                "training step": f"{step_title(best)}, {device}".replace("\n", ", "),
                "speedup over TorchRec as run": over[0],  # the speedups first: a narrow page cuts the table
                "over its strongest": over[1],
                "TorchRec as run, ms": times[0],
                "at its strongest, ms": times[1],
                "ours, ms": milliseconds(number(best, "median_ms")),
                "ours is": best["contender"],
                "CSV file": section.measured.name,
            }
        )
    return as_text(lines) if lines else None


def _steps(sections: Iterable[Section]) -> Iterator[tuple[Section, Run, Row]]:
    """Return each measured step with a speedup over TorchRec, with the row of the best contender of ours."""
    for section in sections:
        if section.measured.kind == "step":
            for run in runs(section.measured.rows):
                ours = [row for name, row in run.items() if not name.startswith("torchrec") and trusted(row)]
                best = min(ours, key=lambda row: need(row, "median_ms"), default=None)
                if best and any(each is not None for each in _speedups(best)):
                    yield section, run, best


def _speedups(row: Row) -> list[float | None]:
    return [number(row, f"speedup_over_{name}") for name in _BASES]


def answer(sections: Iterable[Section]) -> str:
    """Return the headline's sentence: from how many to how many times as fast a step is, on GPUs."""
    found = [_speedups(best) for _, _, best in _steps(sections) if best.get("gpu")]
    if not found:
        return f"No step was measured on GPUs against TorchRec. {_YOURS}"
    as_run, strongest = ([each for each in column if each is not None] for column in zip(*found, strict=True))
    parts = [
        f"{_span(over)} times as fast as under {name}" for over, name in ((strongest, _BEST), (as_run, _RUN)) if over
    ]
    return f"On the steps below a training step is {', and '.join(parts)}. {_YOURS}"


def _span(values: Sequence[float]) -> str:
    low, high = (f"{each:.2g}" for each in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def html_page(sections: Sequence[Section]) -> str:
    """Return the page: nothing in it is loaded from elsewhere."""
    contents: dict[str, list[str]] = {}
    for each in sections:
        contents.setdefault(each.plot.title, []).append(each.measured.name)
    return _render("page.html.j2", sections, contents=contents)


def markdown_page(sections: Sequence[Section]) -> str:
    """Return the same as Markdown, with the plots as files beside it."""
    return _render("page.md.j2", sections, page=PAGE)


def _render(template: str, sections: Sequence[Section], **more: Any) -> str:
    loader = PackageLoader("dlrm_overlap.bench.report", ".")
    environment = Environment(loader=loader, autoescape=template.endswith(".html.j2"), keep_trailing_newline=True)
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    shared = {"headline": headline(sections), "answer": answer(sections), "words": _WORDS, "commands": _COMMANDS}
    return environment.get_template(template).render(sections=sections, **shared, **more)
