"""The command `python -m tests.keys` writes the table of all keys in docs/configuration.md.

A row has the key, the default, and the string below the field in config.py. `tests/unit/test_docs.py` fails while the
page has another table.
"""

import json
import re
from pathlib import Path

from dlrm_overlap.config import Config
from dlrm_overlap.launching.parsing import keys_of, meanings_of

PAGE = Path(__file__).resolve().parent.parent / "docs/configuration.md"
_HEAD = "| key | default | meaning |\n|---|---|---|\n"


def rows() -> list[str]:
    found = []
    for key in keys_of(Config):
        meaning = meanings_of(key.section)[key.name.rpartition(".")[2]].replace("|", "\\|")
        found.append(f"| `{key.name}` | `{json.dumps(key.default)}` | {meaning} |")
    return found


def with_table(page: str) -> str:
    """Return the page with the current table."""
    table = _HEAD + "\n".join(rows()) + "\n"
    return re.sub(re.escape(_HEAD) + r"(?:\|.*\n)*", lambda _: table, page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
