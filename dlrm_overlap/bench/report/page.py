"""`dlrm-overlap bench report`: the CSV files of a folder as one HTML page that needs no other file."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader

from dlrm_overlap.bench.report.drawing import svg
from dlrm_overlap.bench.report.measured import Measured, hardware, read_measured
from dlrm_overlap.bench.report.plots import PLOTS, Plot
from dlrm_overlap.config import InputError
from dlrm_overlap.observe.result_files import write_atomically

PAGE = "index.html"


class Section(NamedTuple):
    """A CSV file in the report."""

    measured: Measured
    plot: Plot
    table: str
    """HTML"""
    commands: Sequence[str]
    """those that the rows name, or the figure's where one of them names none"""
    picture: bytes
    """SVG"""

    @property
    def title(self) -> str:
        """The figure's title, with the file's name where that is another than the figure's."""
        name = self.measured.name
        return self.plot.title if name == self.measured.kind else f"{self.plot.title} ({name})"

    @property
    def hardware(self) -> str:
        """GPUs or CPU, versions and commits."""
        return hardware(self.measured.rows)


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
            (output / f"{each.measured.name}.svg").write_bytes(each.picture)
        write_atomically(output / PAGE, html_page(sections))
    except OSError as error:
        raise InputError(f"--output: {output} cannot be written ({error.strerror}); give another folder") from None
    return [each.name for each in files if each not in known]


def make_section(measured: Measured) -> Section:
    """Return the section of a file: its plot and table.

    Raises:
        InputError: naming the file, if a column that the plot needs is missing or no number.
    """
    plot = PLOTS[measured.kind]
    named = list(dict.fromkeys(row.get("command") or "" for row in measured.rows))
    commands = [plot.command] if "" in named else named
    try:
        lines = plot.table(measured)
        picture = svg(plot.draw(measured), hardware(measured.rows), commands[0])
    except KeyError as error:
        raise InputError(f"{measured.name}.csv: no column or contender {error}, which the plot needs") from None
    except InputError as error:
        raise InputError(f"{measured.name}.csv: {error}") from None
    table = pd.DataFrame(lines).to_html(index=False, border=0, na_rep="-", float_format="{:.3g}".format)
    return Section(measured, plot, table, commands, picture)


def html_page(sections: Sequence[Section]) -> str:
    """Return the page: nothing in it is loaded from elsewhere."""
    environment = Environment(loader=PackageLoader("dlrm_overlap.bench.report", "."), autoescape=True)
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    return environment.get_template("page.html.j2").render(sections=sections)
