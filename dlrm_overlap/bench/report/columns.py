"""The columns that the rows of several figures share."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dlrm_overlap.bench.harness.limits import Limit
from dlrm_overlap.bench.harness.rounds import Timing
from dlrm_overlap.bench.harness.workload import BATCHES, Workload
from dlrm_overlap.config import CRITEO_TABLES, Config, TablesConfig
from dlrm_overlap.embedding.options import WIRE_DTYPES


def describe(config: Config, workload: Workload) -> dict[str, Any]:
    """Return the columns of the embedding stage's shape."""
    names = {dtype: name for name, dtype in WIRE_DTYPES.items()}
    return {
        "world_size": workload.group.size(),
        **describe_tables(config),
        "global_batch": sum(workload.batch_sizes),
        "batches": BATCHES,
        "id_dtype": "int64",
        "weight_dtype": config.embedding.weight_dtype,
        "wire_dtype": names[workload.wire_dtype],
        "output_dtype": names[workload.output_dtype],
    }


def describe_tables(config: Config) -> dict[str, Any]:
    """Return the columns of the tables. A list in the configuration is written as one value."""
    tables = config.data.tables
    return {
        "tables": tables.number(CRITEO_TABLES),
        "rows": str(_capped_rows(tables)),
        "dim": config.model.dim,
        "multi_hot": str(tables.multi_hot),
        "zipf_alpha": str(tables.zipf_alpha),
    }


def _capped_rows(tables: TablesConfig) -> int | Sequence[int] | None:
    """Return the rows of the tables, at most `max_rows` each."""
    if tables.max_rows is None or tables.rows is None:
        return tables.rows
    most = tables.max_rows
    return [min(rows, most) for rows in tables.rows] if isinstance(tables.rows, list) else min(tables.rows, most)


def times(timing: Timing, baseline: Timing, limit: Limit) -> dict[str, Any]:
    """Return the columns of a contender's times, and of how they compare with the limit and with the baseline's."""
    median = timing.times.median_ms
    return {
        "steps": timing.steps,
        **asdict(timing.times),
        "host_ms": timing.host_ms,
        **asdict(limit),
        "limit_ms": limit.ms,
        "fraction_of_limit": limit.ms / median,
        "speedup": baseline.times.median_ms / median,
    }
