"""Writes the tables and numbers that pages take from measured rows: `python -m tests.pages`.

A page has a table between two comments, and a number before one:

    <!-- rows: stage.csv | shape | baseline | pgas | speedup=baseline/pgas | where world_size=4 -->
    <!-- end -->
    It is 1.49<!-- = stage.csv | baseline/pgas --> times as fast.

A comment names files of `docs/results`, the columns that rows of one line have in common, and the cells:
`[TITLE=]EXPRESSION[@UNIT]`, see `tests.measured`. Instead of these it may begin with the name of a table in `_TABLES`.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_overlap.bench.figures.learning import summarise
from tests import simulated_pages
from tests.calibration import Row
from tests.measured import column, values
from tests.simulated_pages import FOLDER, Lines, read

PAGES = [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
TABLE = re.compile(r"(<!-- rows: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(\d+(?:\.\d+)?)( to \d+(?:\.\d+)?)?(<!-- = ([^>]*?) -->)")
UNITS = {
    "us": (1e3, "{:.0f}"),
    "%": (100, "{:.0f}%"),
    "M": (1e-6, "{:.2f}M"),
    "x": (1, "{:.2f}x"),
    "raw": (1, "{:g}"),
    "e": (1, "{:.0e}"),
}


def milliseconds(value: float) -> str:
    """Return a time in ms: two decimals, three below 1 ms."""
    return f"{value:.2f}" if value >= 0.995 else f"{value:.3f}" if value >= 0.01 else f"{value:.2g}"


def _shown(found: Sequence[float], unit: str) -> str:
    factor, form = UNITS.get(unit, (1, ""))
    ends = [min(found), max(found)] if found else []
    texts = [form.format(factor * value) if form else milliseconds(value) for value in ends] or ["-"]
    return " to ".join(dict.fromkeys(texts))


def _parse(spec: str) -> tuple[list[str], list[list[Row]], list[str]]:
    """Return the names of the files of a comment, the rows of each that it asks for, and its other parts."""
    names, *parts = (part.strip() for part in spec.split("|"))
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
            *("" if mean is None else f"{mean:{form}} ± {std or 0:{form}}" for mean, std, form in cells),
            *(_reached(line) if target else []),
        ]


def _reached(line: Mapping[str, Any]) -> Iterator[str]:
    """Yield means over the seeds that reach the target, coefficients of variation, and how many seeds do."""
    for what, factor, unit in (("samples", 1e-6, "M"), ("seconds", 1, "")):
        mean, variation = line[f"{what}_to_target"], line[f"{what}_cv"]
        shown = "" if mean is None else f"{factor * mean:.1f}{unit}"
        yield shown if variation is None else f"{shown} ({variation:.1%})"
    yield line["reached"]


_LEARNED = {"auroc": ".4f", "ne": ".4f", "ne_difference": ".6f"}
_TABLES = {**simulated_pages.TABLES, "learned": learned}


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
    """Return the commits that rows name, or their source, and what they do not name."""
    rows = read(name)
    commits = sorted({row.get("commit", "") for row in rows} - {""})
    text = f"commit {', '.join(commits)}" if commits else rows[0].get("source") or "no commit"
    text = text.replace("-dirty", " with uncommitted changes")
    has_command = all(row.get("command") or row.get("source") for row in rows)
    return text if name.startswith("simulated") or has_command else f"{text}, no command"


def _number(found: re.Match[str]) -> str:
    """Return a number, or the least and the greatest if they differ, with as many decimals as the text has."""
    if found[4].startswith("simulated "):
        expression, _, unit = found[4].removeprefix("simulated ").partition("@")
        result = simulated_pages.NUMBERS[expression]()
    else:
        _, files, (expression, *_) = _parse(found[4])
        expression, _, unit = expression.partition("@")
        result = [value for rows in files for value in values(rows, rows, expression)]
    decimals, factor = len(found[1].partition(".")[2]), UNITS[unit][0] if unit else 1
    ends = (f"{factor * value:.{decimals}f}" for value in (min(result), max(result)))
    return " to ".join(dict.fromkeys(ends)) + found[3]


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
