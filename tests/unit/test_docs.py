"""README's config table says what config.py says: every key, its default and its meaning."""

import ast
import dataclasses
import json
from pathlib import Path

from dlrm_overlap import config
from dlrm_overlap.config import Config


def _meanings() -> dict[tuple[str, str], str]:
    """Return (class, field) -> the string below the field."""
    found = {}
    for node in ast.parse(Path(config.__file__).read_text()).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert isinstance(field.target, ast.Name)
                    found[node.name, field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def _rows(section: type, prefix: str = "") -> list[str]:
    rows = []
    for field in dataclasses.fields(section):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            rows += _rows(field.type, f"{prefix}{field.name}.")
            continue
        missing = field.default is dataclasses.MISSING
        default = field.default_factory() if missing else field.default  # type: ignore[misc]
        meaning = _meanings()[section.__name__, field.name].replace("|", "\\|")
        rows.append(f"| `{prefix}{field.name}` | `{json.dumps(default)}` | {meaning} |")
    return rows


def test_readme_has_every_key_and_no_other() -> None:
    lines = Path("README.md").read_text().splitlines()
    start = lines.index("| key | default | meaning |") + 2
    rows = _rows(Config)
    assert lines[start : start + len(rows) + 1] == [*rows, ""]
