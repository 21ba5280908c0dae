"""`dlrm-overlap bench report`: the CSV files of a folder as one HTML page that needs no other file, and as Markdown."""

import base64
import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from dlrm_overlap.bench.report.measured import (
    Measured,
    Row,
    Run,
    Table,
    cells,
    hardware,
    milliseconds,
    need,
    number,
    read_measured,
    runs,
    trusted,
)
from dlrm_overlap.bench.report.plots import PLOTS, Plot
from dlrm_overlap.bench.report.step_plots import step_title
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.text_table import count_of, markdown_table
from dlrm_overlap.observe.result_files import write_atomically

PAGE, MARKDOWN, JSON = "index.html", "report.md", "rows.json"
_MOST_ROWS = 100  # of a file whose rows are all on the page; longer ones are in their plot and its table
_ENVIRONMENT = ("gpu", "cpu", "python", "torch", "cuda", "nccl", "fbgemm", "torchrec", "triton", "numpy", "commit")
_COMMANDS = (
    "A figure's command measures one of its shapes on four GPUs, and not always that of these rows: other shapes have "
    "files of their own under configs/bench. Where rows name the commands that measured them, these are told instead."
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
_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #111 }
img { max-width: 100% } table { border-collapse: collapse; font-size: 13px; margin: .6em 0 }
td, th { padding: .15em .6em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th, .text { text-align: left } td:first-child { min-width: 11em }
code, .from { font: 12px monospace; color: #333; overflow-wrap: anywhere } .wide { overflow-x: auto }
@media (max-width: 50em) { .wide > img { max-width: none; width: 54em } }
"""


class Section(NamedTuple):
    """What the report says of one CSV file."""

    measured: Measured
    plot: Plot
    table: Table
    picture: bytes
    """SVG"""
    words: Sequence[str] = ()
    """sentences that the rows bear out"""


def write_report(folder: Path, output: Path, as_json: bool = False) -> list[str]:
    """Write the page, the Markdown, and each plot as SVG and PNG to `output`; return the files that have no plot.

    Args:
        folder: of the CSV files.
        output: made if it is not there.
        as_json: write the rows of all files to `rows.json` too.

    Raises:
        InputError: if `folder` has no rows that can be drawn, or `output` cannot be written.
    """
    files = [read_measured(path) for path in sorted(folder.glob("*.csv"))]
    known = [each for each in files if each.kind in PLOTS]
    if not known:
        raise InputError(f"{folder}: no CSV file of a figure in it; give the folder that `bench` has written rows to")
    known.sort(key=report_order)
    try:
        output.mkdir(parents=True, exist_ok=True)
        sections = [_section(each, output) for each in known]
        write_atomically(output / PAGE, html_page(sections))
        write_atomically(output / MARKDOWN, markdown_page(sections))
        if as_json:
            write_atomically(output / JSON, rows_as_json(files))
    except OSError as error:
        raise InputError(f"--output: {output} cannot be written ({error.strerror}); give another folder") from None
    return [each.name for each in files if each.kind not in PLOTS]


def rows_as_json(files: Iterable[Measured]) -> str:
    """Return file -> its kind and rows as JSON: finite numbers as numbers, versions as text, an empty cell as null."""
    found = {
        each.name: {"kind": each.kind, "rows": [{name: _value(name, row[name]) for name in row} for row in each.rows]}
        for each in files
    }
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _value(column: str, cell: str) -> float | str | None:
    if column not in _ENVIRONMENT:
        for read in (int, float):
            with contextlib.suppress(ValueError):
                found = read(cell)
                return found if math.isfinite(found) else cell
    return cell or None


def report_order(measured: Measured) -> tuple[int, bool, str]:
    """Return where the report has a file: by figure, the one of the figure's own name first."""
    return list(PLOTS).index(measured.kind), measured.name != measured.kind, measured.name


def _section(measured: Measured, output: Path) -> Section:
    plot = PLOTS[measured.kind]
    try:
        picture, table, words = plot.draw(measured), plot.table(measured), plot.words(measured)
    except KeyError as error:
        raise InputError(f"{measured.name}.csv: no column or contender {error}, which the plot needs") from None
    except InputError as error:
        raise InputError(f"{measured.name}.csv: {error}") from None
    what, (first, *more) = _commands(measured, plot)
    others = f", and {count_of(len(more), 'other command')}" if more else ""
    picture.caption(hardware(measured.rows), f"{what}: {first}{others}")
    svg = picture.svg()
    (output / f"{measured.name}.svg").write_bytes(svg)
    picture.save_png(output / f"{measured.name}.png")
    return Section(measured, plot, table, svg, words)


def _commands(measured: Measured, plot: Plot) -> tuple[str, list[str]]:
    """Return the commands that the rows name, or the figure's where one of them names none, and what they are."""
    named = list(dict.fromkeys(row.get("command") or "" for row in measured.rows))
    return ("the figure's command", [plot.command]) if "" in named else ("measured by", named)


def headline(sections: Iterable[Section]) -> Table:
    """Return the answer to "how much faster is my job": a line for each step that was measured under TorchRec too.

    The best contender is the fastest of ours whose losses were the reference's.
    """
    # The speedups first: a narrow page cuts the table.
    lines = [["training step", "speedup over TorchRec as run", "over its strongest", "TorchRec as run, ms"]]
    lines[0] += ["at its strongest, ms", "ours, ms", "ours is", "CSV file"]
    for section, run, best in _steps(sections):
        device = re.sub(r"^\d+ x ", "", best.get("gpu") or "CPU, a rehearsal")  # how many the title tells
        title = f"{step_title(best)}, {device}".replace("\n", ", ")
        times = [milliseconds(number(run[name], "median_ms")) if name in run else "-" for name in _BASES]
        over = ["-" if each is None else f"{each:.3g}x" for each in _speedups(best)]
        ours = [milliseconds(number(best, "median_ms")), best["contender"]]
        lines.append([title, *over, *times, *ours, section.measured.name])
    return lines if len(lines) > 1 else []


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
    told = [
        f"{_span(over)} times as fast as under {name}" for over, name in ((strongest, _BEST), (as_run, _RUN)) if over
    ]
    return f"On the steps below a training step is {', and '.join(told)}. {_YOURS}"


def _span(values: Sequence[float]) -> str:
    low, high = (f"{each:.2g}" for each in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def html_page(sections: Sequence[Section]) -> str:
    """Return the page: nothing in it is loaded from elsewhere."""
    parts = ["<h1>dlrm-overlap: what was measured</h1>"]
    if table := headline(sections):
        parts += ["<h2>How much faster is a training step?</h2>", f"<p><b>{escape(answer(sections))}</b></p>"]
        parts += [_html_table(table), *(f"<p>{words}</p>" for words in _WORDS)]
    parts += ["<h2>All figures</h2>", f"<ul>{_contents(sections)}</ul>", f"<p>{_COMMANDS}</p>"]
    for section in sections:
        measured, plot = section.measured, section.plot
        what, commands = _commands(measured, plot)
        data = base64.b64encode(section.picture).decode()
        parts += [
            f'<h2 id="{escape(measured.name)}">{escape(_title(section))}</h2>',
            f"<p>{escape(plot.reading)}</p>",
            *(f"<p>{escape(text)}</p>" for text in section.words),
            f'<div class="wide"><img alt="{escape(plot.title)}" src="data:image/svg+xml;base64,{data}"></div>',
            _html_table(section.table),
            f'<p class="from">{escape(measured.name)}.csv: {escape(hardware(measured.rows))}</p>',
            f"<p>{what.capitalize()}: {', '.join(f'<code>{escape(each)}</code>' for each in commands)}</p>",
        ]
        if len(measured.rows) <= _MOST_ROWS:
            table = _html_table(_varying(measured.rows))
            parts.append(f"<details><summary>All rows, columns that differ</summary>{table}</details>")
    parts += ["<h2>Environment</h2>", _html_table(_environments(sections))]
    body = "\n".join(parts)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>dlrm-overlap: report</title><style>{_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _contents(sections: Sequence[Section]) -> str:
    """Return an item a figure, with a link to the section of each of its files."""
    links: dict[str, list[str]] = {}
    for section in sections:
        name = section.measured.name
        links.setdefault(section.plot.title, []).append(f'<a href="#{quote(name)}">{escape(name)}</a>')
    return "".join(f"<li>{escape(title)}: {', '.join(found)}</li>" for title, found in links.items())


def markdown_page(sections: Sequence[Section]) -> str:
    """Return the same as Markdown, with the plots as files beside it."""
    parts = [
        "# What was measured",
        f"Made from the CSV files by `dlrm-overlap bench report`; [{PAGE}]({PAGE}) is the same as one page.",
    ]
    if table := headline(sections):
        parts += ["## How much faster is a training step?", f"**{answer(sections)}**", markdown_table(table), *_WORDS]
    parts.append(_COMMANDS)
    for section in sections:
        measured, plot = section.measured, section.plot
        what, commands = _commands(measured, plot)
        parts += [
            f"## {escape(_title(section), quote=False)}",
            plot.reading,
            *section.words,
            f"![{plot.title}]({quote(measured.name)}.svg)",
            markdown_table(section.table),
            f"{hardware(measured.rows)}. {what.capitalize()}: {', '.join(f'`{each}`' for each in commands)}",
        ]
    return "\n\n".join(parts) + "\n"


def _title(section: Section) -> str:
    name, kind = section.measured.name, section.measured.kind
    return section.plot.title if name == kind else f"{section.plot.title} ({name})"


def _varying(rows: Sequence[Row]) -> Table:
    """Return the columns in which rows differ."""
    columns = [name for name in rows[0] if any(row[name] != rows[0][name] for row in rows)] or list(rows[0])
    return [columns, *([row[name] or "-" for name in columns] for row in rows)]


def _environments(sections: Sequence[Section]) -> Table:
    def told(row: Mapping[str, str]) -> list[str]:
        return [row.get(name) or "-" for name in _ENVIRONMENT]

    found = [(section.measured.name, told(row)) for section in sections for row in section.measured.rows]
    unique = list(dict.fromkeys((name, *row) for name, row in found))
    return cells([["file", *_ENVIRONMENT], *unique])


def _html_table(table: Table) -> str:
    head, *lines = table
    body = "".join(f"<tr>{''.join(map(_html_cell, line))}</tr>" for line in lines)
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="wide"><table><tr>{titles}</tr>{body}</table></div>'


def _html_cell(cell: str) -> str:
    is_text = re.match(r"[A-Za-z]", cell)
    return f"<td{' class=text' if is_text else ''}>{escape(cell)}</td>"
