"""Writes the table of all keys in docs/configuration.md: key, default, and the string below the field in config.py.

    python -m tests.keys

`tests/unit/test_docs.py` fails while the page has another table.
"""

import ast
import dataclasses
import json
import re
from pathlib import Path

from dlrm_overlap import config
from dlrm_overlap.config import Config

PAGE = Path(__file__).resolve().parent.parent / "docs/configuration.md"
_HEAD = "| key | default | meaning |\n|---|---|---|\n"


def meanings() -> dict[tuple[str, str], str]:
    """Return (class, field) -> the string below the field."""
    found = {}
    for node in ast.parse(Path(config.__file__).read_text()).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert isinstance(field.target, ast.Name)
                    found[node.name, field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def rows(section: type = Config, prefix: str = "") -> list[str]:
    """Return a row of the table for each key of `section`, in the order of its fields."""
    found = []
    for field in dataclasses.fields(section):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            found += rows(field.type, f"{prefix}{field.name}.")
            continue
        missing = field.default is dataclasses.MISSING
        default = field.default_factory() if missing else field.default  # type: ignore[misc]
        meaning = meanings()[section.__name__, field.name].replace("|", "\\|")
        found.append(f"| `{prefix}{field.name}` | `{json.dumps(default)}` | {meaning} |")
    return found


def with_table(page: str) -> str:
    """Return the page with the table of today's keys."""
    table = _HEAD + "\n".join(rows()) + "\n"
    return re.sub(re.escape(_HEAD) + r"(?:\|.*\n)*", lambda _: table, page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
