"""The files and functions that the diagram of a captured step in docs/architecture.md names exist."""

import ast
import re
from pathlib import Path

_HEADING = "## A captured step, file by file"
_LINE = re.compile(r"^.{10}([a-z_/]+\.py) +(.*)$")


def _lines() -> list[tuple[Path, str]]:
    """Return each file of the diagram, and the text beside it."""
    section = Path("docs/architecture.md").read_text().partition(_HEADING)[2].split("```")[1]
    return [(Path("dlrm_overlap", m[1]), m[2]) for line in section.splitlines() if (m := _LINE.match(line))]


def _defined(file: Path) -> set[str]:
    """Return the names of a file's functions and classes, and those of methods with that of their class in front."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_each_file_and_function_of_the_diagram_is_there() -> None:
    lines = _lines()
    assert lines
    everywhere = set().union(*(_defined(file) for file, _ in lines))
    for file, text in lines:
        hands_on = text.partition(":")[0].partition(",")[0].split(" -> ")
        assert hands_on[0] in _defined(file), f"{file}: {hands_on[0]}"
        for name in hands_on[1:]:
            assert name in everywhere, f"{file}: {name}"
