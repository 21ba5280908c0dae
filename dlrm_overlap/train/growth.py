"""When tables of any id get more rows, and how many (`embedding.id_tables.grow_at`).

    a log line      on every rank: the greatest share of a table's rows in use; above `grow_at` the segment ends
    segment's end   the pipeline is empty: save, close the model, build it with more rows, load, train on

Loading places the ids by their new buckets (`checkpoint.loading`). Since rows double, no id's initial row changes.
"""

import logging
from collections.abc import Mapping

from dlrm_overlap.config import IdTablesConfig, InputError
from dlrm_overlap.embedding.id_tables.rules import for_each_table

log = logging.getLogger("dlrm_overlap")


class Growth:
    """Doubles the rows of tables that are nearly full; the same on every rank.

    Args:
        rows: table of any id -> its rows.
        backend: the backend in use.
        counts: whether the backend counts rows in use.

    Raises:
        InputError: if tables are to grow, but `counts` is false.
    """

    def __init__(self, config: IdTablesConfig, rows: Mapping[str, int], backend: str, counts: bool) -> None:
        self._at, self.rows = config.grow_at, dict(rows)
        self._limits: dict[str, int] = {}
        self._told: set[str] = set()
        if self._at is None or not rows:
            self._at = None
            return
        if not counts:
            raise InputError(
                f"embedding.id_tables.grow_at: {config.grow_at}, but with backend {backend} TorchRec maps the ids, and "
                f"its tables do not grow; take pgas or fused"
            )
        if config.max_rows is not None:
            self._limits = dict(zip(rows, for_each_table("max_rows", config.max_rows, len(rows)), strict=True))

    def due(self, fullest: Mapping[str, float]) -> dict[str, int]:
        """Return the tables that grow, each with its new rows; `fullest` has the shares of their rows in use."""
        if self._at is None:
            return {}
        found = {}
        for name, share in fullest.items():
            if share <= self._at:
                continue
            if 2 * self.rows[name] <= self._limits.get(name, 2 * self.rows[name]):
                found[name] = 2 * self.rows[name]
            elif name not in self._told:
                self._told.add(name)
                log.info(
                    "growth: table %s has %.0f%% of %d rows in use, and twice the rows are more than "
                    "embedding.id_tables.max_rows %d; it keeps its rows",
                    name,
                    100 * share,
                    self.rows[name],
                    self._limits[name],
                )
        return found
