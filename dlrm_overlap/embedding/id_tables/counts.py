"""What becomes of the ids that tables of any id see in training."""

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.id_tables.id_map import IdMap
from dlrm_overlap.kernels.ids.id_map import Totals

log = logging.getLogger("dlrm_overlap")

_WARN_ABOVE = 0.01
"""share of the ids of some steps that found no row"""


class IdCounts:
    """Counts of all ranks since the last call; a model without tables of any id has none."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.fullest: dict[str, float] = {}
        """table -> the greatest share of its rows in use on a rank, as of the last `take`"""
        self._maps, self._device = list(id_maps_of(model)), device
        self._before, self._warned = self._sums() if self._maps else None, False

    @property
    def tables(self) -> list[str]:
        """The tables whose ids are counted."""
        return [name for each in self._maps for name in each.rules]

    def _sums(self) -> torch.Tensor:
        """Return [Totals] float64: the totals of this rank."""
        return torch.stack([each.state.totals.sum(1) for each in self._maps]).sum(0).double()

    def take(self) -> dict[str, float]:
        """Return metrics of the steps since the last call, the same on every rank; a collective.

        They are ids that got a row and that lost it, the shares of the ids seen that were not admitted and that found
        no row, and the shares of the rows that are in use: of all tables together, and of each table on the rank where
        the share is greatest.
        """
        if self._before is None:
            return {}
        sums = self._sums()
        since, self._before = sums - self._before, sums
        used, rows = sum(each.used() for each in self._maps), sum(each.rows for each in self._maps)
        found = torch.cat([since, torch.tensor([used, rows], dtype=torch.float64, device=self._device)])
        dist.all_reduce(found)
        *counts, in_use, all_rows = found.tolist()
        shares = torch.cat([each.shares() for each in self._maps])
        dist.all_reduce(shares, dist.ReduceOp.MAX)
        self.fullest = dict(zip(self.tables, shares.tolist(), strict=True))
        seen = max(counts[Totals.SEEN], 1.0)
        no_room = counts[Totals.NO_ROOM] / seen
        if no_room > _WARN_ABOVE and not self._warned and dist.get_rank() == 0:
            log.warning(
                "tables of any id: %.1f%% of the ids found no row, since every row that they may have was in use; they "
                "read an initial row and were not trained. Raise embedding.id_tables.rows. Later ones are counted in "
                "the metric ids_no_room",
                100 * no_room,
            )
            self._warned = True
        return {
            "ids_inserted": counts[Totals.INSERTED],
            "ids_evicted": counts[Totals.EVICTED],
            "ids_not_admitted": counts[Totals.NOT_ADMITTED] / seen,
            "ids_no_room": no_room,
            "ids_rows_used": in_use / all_rows,
            **{f"ids_rows_used/{table}": share for table, share in self.fullest.items()},
        }


def id_maps_of(model: nn.Module) -> Iterator[IdMap]:
    for module in model.modules():
        if isinstance(module, ExchangingModule) and module.id_map is not None:
            yield module.id_map
