"""`dlrm-overlap bench report`: the CSV files of a folder as one HTML page that needs no other file."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader

from dlrm_overlap.bench.report.measured import Measured, hardware, read_measured
from dlrm_overlap.bench.report.plots import PLOTS, svg
from dlrm_overlap.config import InputError
from dlrm_overlap.observe.result_files import write_atomically

PAGE = "index.html"


class Section(NamedTuple):
    """A CSV file in the report."""

    name: str
    """the file's, without .csv"""
    title: str
    reading: str
    table: str
    """HTML"""
    hardware: str
    """GPUs or CPU, versions and commits"""
    commands: Sequence[str]
    """those that the rows name"""
    picture: str
    """SVG, in base64"""


def write_report(folder: Path, output: Path) -> list[str]:
    """Write the page, and each plot as SVG, to `output`; return the files that have no plot.

    Args:
        folder: of the CSV files.
        output: made if it is not there.

    Raises:
        InputError: if `folder` has no rows that can be drawn, or `output` cannot be written.
    """
    files = [read_measured(path) for path in sorted(folder.glob("*.csv"))]
    known = [each for kind in PLOTS for each in files if each.kind == kind]
    if not known:
        raise InputError(f"{folder}: no CSV file of a figure in it; give the folder that `bench` has written rows to")
    try:
        output.mkdir(parents=True, exist_ok=True)
        sections = [make_section(each) for each in known]
        for each in sections:
            (output / f"{each.name}.svg").write_bytes(base64.b64decode(each.picture))
        write_atomically(output / PAGE, html_page(sections))
    except OSError as error:
        raise InputError(f"--output: {output} cannot be written ({error.strerror}); give another folder") from None
    return [each.name for each in files if each not in known]


def make_section(measured: Measured) -> Section:
    """Return the section of a file: its plot and table.

    Raises:
        InputError: naming the file, if a column that the plot needs is missing or no number.
    """
    plot, name = PLOTS[measured.kind], measured.name
    commands = list(dict.fromkeys(command for row in measured.rows if (command := row.get("command"))))
    made_by = hardware(measured.rows)
    try:
        figure, lines = plot.draw(measured.rows)
    except KeyError as error:
        raise InputError(f"{name}.csv: no column or contender {error}, which the plot needs") from None
    except ValueError as error:
        raise InputError(f"{name}.csv: {error}; repair the row, or measure again") from None
    table = lines.to_html(index=False, border=0, na_rep="-", float_format="{:.4g}".format)
    title = plot.title if name == measured.kind else f"{plot.title} ({name})"
    picture = base64.b64encode(svg(figure, made_by, *commands[:1])).decode()
    return Section(name, title, plot.reading, table, made_by, commands, picture)


def html_page(sections: Sequence[Section]) -> str:
    """Return the page: nothing in it is loaded from elsewhere."""
    environment = Environment(loader=PackageLoader("dlrm_overlap.bench.report", "."), autoescape=True)
    return environment.get_template("page.html.j2").render(sections=sections)
