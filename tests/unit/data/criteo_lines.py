"""Criteo's text for tests, and its meaning in plain Python."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_overlap.data.prepare import prepare_files
from dlrm_overlap.data.records import RecordLayout
from dlrm_overlap.data.schema import criteo_schema

ROWS = [3 + 5 * t for t in range(26)]


def prepare_criteo(
    source: Path, target: Path, rows: int | None = None, min_count: int | None = None, **options: Any
) -> RecordLayout:
    layout, _ = prepare_files(source, target, criteo_schema(rows, min_count), **options)
    return layout


def random_lines(n: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)

    def count() -> str:
        if rng.random() < 0.2:
            return ""
        return str(rng.integers(-3, 10 ** int(rng.integers(1, 18))))

    def category() -> str:
        if rng.random() < 0.2:
            return ""
        text = f"{rng.integers(2**32):08x}" if rng.random() < 0.5 else f"{rng.zipf(1.3) % 2**12:x}"
        return text.upper() if rng.random() < 0.1 else text

    lines = []
    for _ in range(n):
        fields = [str(rng.integers(2)), *(count() for _ in range(13)), *(category() for _ in range(26))]
        lines.append("\t".join(fields).encode())
    return lines


def parse_plainly(lines: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The oracle: labels, dense, categories, missing."""
    fields = [line.decode().split("\t") for line in lines]
    dense = [[math.log1p(max(0, int(count or "0"))) for count in row[1:14]] for row in fields]
    return (
        np.array([float(row[0]) for row in fields]),
        np.array(dense),
        np.array([[int(value or "0", 16) for value in row[14:]] for row in fields]),
        np.array([[value == "" for value in row[14:]] for row in fields]),
    )


def hash_plainly(key: int, rows: int) -> int:
    mixed = key * 0x9E3779B97F4A7C15 % 2**64
    mixed ^= mixed >> 32
    return 1 + mixed % (rows - 1) if rows > 1 else 0


def hash_all(values: np.ndarray, rows: int) -> np.ndarray:
    return np.vectorize(lambda value: hash_plainly(int(value), rows), otypes=[np.int64])(values)


def with_field(line: bytes, column: int, field: bytes) -> bytes:
    fields = line.split(b"\t")
    fields[column - 1] = field
    return b"\t".join(fields)
