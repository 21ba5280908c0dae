"""Writes the tables and numbers that pages take from measured rows: `python -m tests.pages`.

A page has a table between two comments, and a number before one:

    <!-- rows: stage.csv | shape | baseline | pgas | speedup=baseline/pgas | where world_size=4 -->
    <!-- end -->
    It is 1.49<!-- = stage.csv | baseline/pgas --> times as fast.

A comment names files of `docs/results`, the columns that rows of one line have in common, and the cells:
`[TITLE=]EXPRESSION[@UNIT]`, see `tests.measured`. Instead of these it may begin with the name of a table in `_TABLES`.
A number may be the quotient of two, of other rows each: `FILE | EXPRESSION[@UNIT] / FILE | EXPRESSION`. The unit `more`
is by how many percent a ratio is above 1, `less` by how many it is below. In a table write `\\|` for `|`, since that
would end the cell.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_overlap.bench.figures.learning import summarise
from tests import simulated_pages
from tests.calibration import Row
from tests.measured import column, values
from tests.simulated_pages import FOLDER, Lines, read

PAGES = [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
TABLE = re.compile(r"(<!-- rows: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)( to -?\d+(?:\.\d+)?)?(<!-- = ([^>]*?) -->)")


def _same(value: float) -> float:
    return value


UNITS: dict[str, tuple[Callable[[float], float], str]] = {
    "": (_same, ""),
    "us": (lambda value: 1e3 * value, "{:.0f}"),
    "%": (lambda value: 100 * value, "{:.0f}%"),
    "more": (lambda value: 100 * (value - 1), "{:.0f}%"),
    "less": (lambda value: 100 * (1 - value), "{:.0f}%"),
    "M": (lambda value: 1e-6 * value, "{:.2f}M"),
    "GB": (lambda value: 1e-9 * value, "{:.0f} GB"),
    "x": (_same, "{:.2f}x"),
    "raw": (_same, "{:g}"),
    "e": (_same, "{:.0e}"),
}


def milliseconds(value: float) -> str:
    """Return a time in ms: two decimals, three below 1 ms."""
    return f"{value:.2f}" if value >= 0.995 else f"{value:.3f}" if value >= 0.01 else f"{value:.2g}"


def _shown(found: Sequence[float], unit: str) -> str:
    convert, form = UNITS[unit]
    shown = sorted(map(convert, found))
    texts = [form.format(value) if form else milliseconds(value) for value in shown[:1] + shown[-1:]] or ["-"]
    return " to ".join(dict.fromkeys(texts))


def _parse(spec: str) -> tuple[list[str], list[list[Row]], list[str]]:
    """Return the names of the files of a comment, the rows of each that it asks for, and its other parts."""
    names, *parts = (part.strip() for part in re.split(r"\\?\|", spec))
    where = [each.split("=") for part in parts if part.startswith("where ") for each in part.split()[1:]]
    files: list[list[Row]] = [
        [row for row in read(name) if all(row.get(k) == v for k, v in where)] for name in names.split()
    ]
    return names.split(), files, [part for part in parts if not part.startswith("where ")]


def learned(name: str, target: str = "") -> Lines:
    """Yield the lines of a table of rows of `bench learning`: means over seeds and standard deviations.

    With a target AUROC also samples and seconds at the first evaluation that reaches it, and how many seeds do.
    """
    rows = read(name)
    at_target = [f"samples to {target}", "seconds", "seeds that reach it"] if target else []
    yield ["contender", "seeds", "AUROC", "NE", "NE minus the first's, by seed", *at_target]
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    for line in summarise(rows, contenders, float(target) if target else None):
        cells = [(line.get(each), line.get(f"{each}_std"), form) for each, form in _LEARNED.items()]
        yield [
            f"`{line['contender']}`",
            str(line["seeds"]),
            *(" ± ".join(f"{each:{form}}" for each in (mean, std) if each is not None) for mean, std, form in cells),
            *(_reached(line) if target else []),
        ]


def _reached(line: Mapping[str, Any]) -> Iterator[str]:
    """Yield means over the seeds that reach the target, coefficients of variation, and how many seeds do."""
    for what, factor, unit in (("samples", 1e-6, "M"), ("seconds", 1, "")):
        mean, variation = line[f"{what}_to_target"], line[f"{what}_cv"]
        shown = "" if mean is None else f"{factor * mean:.1f}{unit}"
        yield shown if variation is None else f"{shown} ({variation:.1%})"
    yield line["reached"]


def by_dim(name: str, shown: str) -> Lines:
    """Yield the lines of a table of rows of `bench update`: a column of them, with one cell per dim."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in read(name):
        case = (row["pooling"], row["ids_by"], row["optimizer"])
        lines.setdefault(case, {})[row["dim"]] = f"{float(row[shown]):.2f}"
    dims = sorted({dim for cells in lines.values() for dim in cells}, key=int)
    yield ["pooling", "ids", "optimizer", *(f"dim {dim}" for dim in dims)]
    for case, cells in lines.items():
        yield [*case, *(cells[dim] for dim in dims)]


_LEARNED = {"auroc": ".4f", "ne": ".4f", "ne_difference": ".6f"}
_TABLES = {**simulated_pages.TABLES, "learned": learned, "by_dim": by_dim}


def table(spec: str) -> Lines:
    """Yield the lines of a table, those of the head first."""
    if spec.split()[0] in _TABLES:
        name, *arguments = spec.split()
        yield from _TABLES[name](*arguments)
        return
    _, files, (keys, *cells) = _parse(spec)
    units = [cell.partition("@")[2] or ("x" if "/" in cell else "") for cell in cells]
    parts = [cell.partition("@")[0].rpartition("=") for cell in cells]
    yield [*keys.split(), *(title or expression.replace("/", " / ") for title, _, expression in parts)]
    for rows in files:
        lines: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            line = tuple(f"`{row[key]}`" if key == "contender" else str(column(row, key)) for key in keys.split())
            lines.setdefault(line, []).append(row)
        for line, own in lines.items():
            found = [values(rows, own, expression) for *_, expression in parts]
            if any(found):
                yield [*line, *map(_shown, found, units)]


def region(page: Path, spec: str) -> str:
    """Return a table, and below it which rows it is made of."""
    head, *body = (f"| {' | '.join(line)} |" for line in table(spec))
    text = "\n".join([head, "|---" * (head.count(" | ") + 1) + "|", *body])
    made_of: dict[str, dict[str, str]] = {}
    for name in (each for each in spec.split() if each.endswith(".csv")):
        shown = name.rpartition("/")[0] or name  # a folder stands for its files
        made_of.setdefault(origin(name), {})[shown] = f"[{shown}]({os.path.relpath(FOLDER / shown, page.parent)})"
    rows = "; ".join(f"{', '.join(links.values())}: {text}" for text, links in made_of.items())
    return f"{text}\n\nRows: {rows}.\n" if rows else f"{text}\n"


def origin(name: str) -> str:
    """Return the commits that rows name, or their sources, and what they do not name."""
    rows = read(name)
    commits = sorted({row.get("commit", "") for row in rows} - {""})
    sources = ", ".join(dict.fromkeys(row.get("source", "") for row in rows))
    text = f"commit {', '.join(commits)}" if commits else sources or "no commit"
    text = text.replace("-dirty", " with uncommitted changes")
    has_command = all(row.get("command") or row.get("source") for row in rows)
    return text if name.startswith("simulated") or has_command else f"{text}, no command"


def _found(spec: str) -> tuple[list[float], str]:
    """Return the values that a comment before a number asks for, or their quotients, and the unit."""
    above, *below = spec.split(" / ")
    if above.startswith("simulated "):
        name, _, unit = above.removeprefix("simulated ").partition("@")
        found = simulated_pages.NUMBERS[name]()
    else:
        _, files, (cell, *_) = _parse(above)
        expression, _, unit = cell.partition("@")
        found = [value for rows in files for value in values(rows, rows, expression)]
    for other in below:
        found = [value / divisor for value in found for divisor in _found(other)[0]]
    return found, unit


def _number(match: re.Match[str]) -> str:
    """Return a number, or the least and the greatest if they differ, with as many decimals as the text has."""
    found, unit = _found(match[4])
    if not found:
        raise ValueError(f"no row has a value for: {match[4]}")
    decimals, (convert, _) = len(match[1].partition(".")[2]), UNITS[unit]
    shown = sorted(map(convert, found))
    return " to ".join(dict.fromkeys(f"{value:.{decimals}f}" for value in (shown[0], shown[-1]))) + match[3]


def written(page: Path) -> str:
    """Return the text of a page with its tables and numbers made again from the rows."""
    text = NUMBER.sub(_number, page.read_text())
    return TABLE.sub(lambda found: f"{found[1]}{region(page, found[2])}{found[3]}", text)


def main() -> None:
    """Write the pages that change."""
    for page in PAGES:
        text = written(page)
        if text != page.read_text():
            page.write_text(text)
            print(page)


if __name__ == "__main__":
    main()
