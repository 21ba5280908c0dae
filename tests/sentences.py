"""Counts turns of phrase at which strangers stumble, per 1,000 words of docstrings and comments, a line a room.

    python -m tests.sentences

`make lint` prints it, so that the counts are seen to fall. They are no rule: a sentence that needs one of these words
keeps it. Counted are clauses that begin with *what* ("what the kernel reads"), *behind* where *after* is meant or may
be, and *told*, *tells* and *tell*, where a page shows, a kernel reports, or an argument is.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TURNS = {
    "what": re.compile(r"(?<!\w)what (?!if\b)\w", re.IGNORECASE),
    "behind": re.compile(r"\bbehind\b", re.IGNORECASE),
    "told": re.compile(r"\b(told|tells?)\b", re.IGNORECASE),
}


def prose(source: str) -> Iterator[str]:
    """The docstrings of a module's source and its comments, in no order that matters."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def count(texts: Iterator[str]) -> Counter[str]:
    """How often each turn of `TURNS` occurs in the texts, and how many "words" they have."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts["words"] += len(text.split())
        counts.update({turn: len(pattern.findall(text)) for turn, pattern in TURNS.items()})
    return counts


def room(path: Path) -> str:
    """The room of a file: `embedding` for dlrm_overlap/embedding/exchange.py, `tests` for a test, `pages` for docs."""
    first, *rest = path.relative_to(ROOT).parts
    if path.suffix == ".md":
        return "pages"
    return rest[0].removesuffix(".py") if first == "dlrm_overlap" else first


def rooms() -> dict[str, Counter[str]]:
    """The counts of each room, and of all of them."""
    found: dict[str, Counter[str]] = {}
    for top in ("dlrm_overlap", "kernels", "data", "launch", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            found.setdefault(room(path), Counter()).update(count(prose(path.read_text())))
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        found.setdefault("pages", Counter()).update(count(iter([path.read_text()])))
    found["all"] = sum(found.values(), Counter())
    return found


def main() -> None:
    """Print a line a room."""
    print(f"{'per 1,000 words':16}{'words':>8}" + "".join(f"{turn:>9}" for turn in TURNS))
    for name, counts in rooms().items():
        rates = "".join(f"{1000 * counts[turn] / max(counts['words'], 1):9.1f}" for turn in TURNS)
        print(f"{name:16}{counts['words']:8}{rates}")


if __name__ == "__main__":
    main()
