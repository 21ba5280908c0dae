"""What measured rows say: their shapes, the limits of their hardware, and ratios of contenders.

An expression is `CONTENDER[:COLUMN]`, or a ratio or difference of two: `CONTENDER[:COLUMN]/CONTENDER[:COLUMN]`, or with
`-` for `/`. The column is `median_ms` if none is given; `DERIVED` has columns that are computed, `GROUPS` names for
several contenders. Without a contender it is of every row.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache

from dlrm_overlap.bench.step_contenders import OUR_DENSE
from tests.calibration import Row
from tests.simulated_pages import FOLDER, read

GROUPS = {
    "strongest": ("baseline", "torchrec", "nccl_chunked"),  # contenders whose names begin so; the fastest counts
    "chunked": ("nccl_chunked",),
    "ours": ("pgas", "fused"),
    "ways": ("copies", "tiles", "triggered"),  # of a product that includes its communication
}


def shape(row: Row) -> str:
    """Return the shape of an embedding stage: tables a GPU, rows and dim, global batch, ids a bag, what is unusual."""
    gpus, rows = int(row["world_size"]), row["rows"]
    size = f"{int(row['tables']) // gpus}x{int(rows) / 1e6:g}M" if rows.isdigit() else f"{row['tables']} unlike tables"
    hot = "multi-hot" if row["multi_hot"].startswith("[") else row["multi_hot"]
    skewed = f", zipf {row['zipf_alpha']}" if float(row.get("zipf_alpha") or 0) else ""
    wire = f", {row['wire_dtype']}" if (row.get("wire_dtype") or "fp32") != "fp32" else ""
    return f"{size}x{row['dim']}, {row['global_batch']}, {hot}{skewed}{wire}"


def model(row: Row) -> str:
    """Return the model of a training step's row, its samples a GPU and its precision."""
    name = "DLRM-DCNv2 (MLPerf), at most 4M rows a table" if row["arch"] == "dcn" else "the same tables, dot products"
    name = "item histories of up to 2048 ids, dim 512" if "0..2048" in row["multi_hot"] else name
    return f"{name}, {int(row['global_batch']) // int(row['world_size'])} samples a GPU, {row['precision']}"


def job(row: Row) -> str:
    """Return who trained a whole job, and on what."""
    if "record" in row:
        return f"HugeCTR, {row['record']}"
    gpus = re.sub(r"NVIDIA | \d+GB HBM3", "", row["gpu"])
    backend = row.get("backend") or row["command"].partition("--embedding.backend ")[2].split()[0]
    return f"`{backend}`, {gpus}, rows up to {max(json.loads(row['rows'])) // 10**6}M"


@cache
def _best_link_gb_per_s(gpu: str) -> float:
    """Return the greatest rate at which links of such GPUs have carried bytes in a figure; 0 for none."""
    names = [path.relative_to(FOLDER).as_posix() for path in sorted(FOLDER.rglob("collectives.csv"))]
    rows = [row for name in names for row in read(name)]
    return max((float(row["gb_per_s"]) for row in rows if row["gpu"].partition(" x ")[2] == gpu), default=0.0)


def _limit_ms(row: Row) -> float:
    """Return the longer of memory's time and the links', each at its best rate: of the run, or known of such links."""
    link_gb_per_s = max(float(row["link_gb_per_s"]), _best_link_gb_per_s(row["gpu"].partition(" x ")[2]))
    hbm_ms = float(row["hbm_bytes"]) / float(row["hbm_gb_per_s"]) / 1e6
    return max(hbm_ms, float(row["link_bytes"]) / link_gb_per_s / 1e6 if link_gb_per_s else 0.0)


DERIVED: dict[str, Callable[[Row], str | float]] = {
    "shape": shape,
    "model": model,
    "job": job,
    "limit_ms": _limit_ms,
    "links_ms": lambda row: float(row["link_bytes"]) / float(row["link_gb_per_s"]) / 1e6,
    "samples_a_gpu": lambda row: 1e3 * int(row["global_batch"]) / int(row["world_size"]) / float(row["step_ms"]),
}


def column(row: Row, column: str) -> str | float:
    return DERIVED[column](row) if column in DERIVED else row[column]


def _is(row: Row, contender: str) -> bool:
    if not contender or row["contender"] == contender:
        return True
    mixed = contender == "strongest" and row["contender"].startswith(OUR_DENSE)  # not a baseline
    return row["contender"].startswith(GROUPS.get(contender, "\0")) and not mixed


_SHAPE = (
    *("arch", "optimizer", "world_size", "tables", "rows", "dim", "multi_hot", "zipf_alpha", "global_batch"),
    *("operator", "m", "k", "n", "precision", "seed"),
)


def _problem(row: Row) -> tuple[str | None, ...]:
    return tuple(row.get(name) for name in _SHAPE)


def _disagrees(row: Row) -> bool:
    return row.get("agrees") == "False"


def values(rows: Sequence[Row], own: Sequence[Row], expression: str) -> list[float]:
    """Return the values of an expression for the rows `own` of one line, among all `rows` of their file.

    A ratio divides by the next row of its denominator with the same shape, which was measured in the same turns; a
    difference subtracts that row's. If a group is named, its smallest value counts. A row whose results disagree has no
    ratio and no difference, nor has one over it.
    """
    above, below = (each.partition(":") for each in re.split("[/-]", f"{expression}/")[:2])
    found: dict[tuple[str | None, ...], list[float]] = {}
    for row in own:
        disagrees = _disagrees(row) and (any(below) or above[0] in GROUPS)
        shown = column(row, above[2] or "median_ms") if _is(row, above[0]) and not disagrees else ""
        if shown == "":
            continue
        value = float(shown)
        if any(below):
            same = [each for each in rows if _is(each, below[0]) and _problem(each) == _problem(row)]
            later = [each for each in same if rows.index(each) >= rows.index(row)]
            compared = (later or same) if below[0] in GROUPS else (later[:1] or same[-1:])
            others = [each for each in compared if not _disagrees(each)]
            if not others:
                continue
            other = min(float(column(each, below[2] or "median_ms")) for each in others)
            value = value - other if "-" in expression else value / other
        found.setdefault(_problem(row), []).append(value)
    return [value for each in found.values() for value in ([min(each)] if above[0] in GROUPS else each)]
