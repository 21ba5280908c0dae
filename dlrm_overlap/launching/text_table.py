"""Text for a terminal: tables, counts, durations and escapes."""

from collections.abc import Sequence


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Return a table whose first line is the header; numbers and "-" are right-aligned."""
    columns = []
    for cells in zip(*lines, strict=True):
        width = max(map(len, cells))
        numbers = all(map(_is_number, cells[1:]))
        columns.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def plain(text: str) -> str:
    """Return `text` with non-printable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count_of(number: int, noun: str) -> str:
    """Return "1 line", "2 lines"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return "45 s", "5 min 12 s", "1 h 12 min", "3 d 4 h": the largest unit and the next one; at least "1 s"."""
    rest, parts = max(1, round(seconds)), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        parts.append(f"{count} {unit}" if count else "")
    first = next(i for i, part in enumerate(parts) if part)
    return " ".join(filter(None, parts[first : first + 2]))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell == "-"
    return True
