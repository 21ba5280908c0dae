"""The kernels that bring the ids of some features here, out of the windows in which ranks have published them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dlrm_overlap.comm.record import Record
from dlrm_overlap.embedding.protocol.cache import StepCache
from dlrm_overlap.embedding.protocol.crossing import published_window
from dlrm_overlap.embedding.protocol.ids import IdLayout
from dlrm_overlap.embedding.protocol.windows import WindowPair
from dlrm_overlap.kernels.ids.pull_ids import BLOCK_IDS, Places, Published, place_ids, pull_ids, pull_tasks

Bags = tuple[torch.Tensor, torch.Tensor]
"""ids, bag after bag, and the offsets of the bags"""


class _DevicePlaces(NamedTuple):
    """What one number of samples needs on the device."""

    places: Places
    tasks: torch.Tensor
    total: int
    """ids of a rank's batch, where lengths are known"""
    arrived: list[Bags]
    """where ids arrive: those of even epochs, those of odd ones"""


class IdPull:
    """The kernels that read the ids of some features out of the windows of some ranks, on the device."""

    def __init__(
        self, ids: IdLayout, windows: WindowPair, sources: range, features: Sequence[int], rows: Sequence[int]
    ) -> None:
        """Take the ranks to read from, and of each feature its index in the keys and the rows of its table."""
        self._ids, self._features, self._sources = ids, features, len(sources)
        self._device, self._known = windows.arena.device, ids.bound.known_lengths
        self.record = Record(self._device)
        numbers = self._tensor(features), self._tensor(rows), self._tensor(ids.capacity)
        seen = [[published_window(windows.arena, name, rank) for rank in sources] for name in windows.names]
        addresses = [torch.tensor([each.data_ptr() for each in one], device=self._device) for one in seen]
        self._published = [Published(each, ids.offsets_at, *numbers) for each in addresses]
        room = ids.arriving(features, self._sources)
        self._values = [torch.zeros(room, dtype=torch.int32, device=self._device) for _ in range(2)]
        self._places = StepCache[int, _DevicePlaces]()
        """by samples of a rank"""

    def _tensor(self, numbers: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._device)

    def _places_of(self, samples: int) -> _DevicePlaces:
        """Return what batches of `samples` need; that allocates memory."""
        sources, features = self._sources, len(self._features)
        values = self._values
        if self._known:
            firsts, counts, arrivals, starts = self._ids.known_places(self._features, sources, samples)
            places = Places(self._tensor(firsts), self._tensor(counts), self._tensor([*arrivals, starts[-1]]))
            offsets = [self._ids.known_offsets(self._features, sources * samples).to(self._device)] * 2
            values = [each[: starts[-1]] for each in values]
        else:
            pairs = features * sources
            places = Places(*(self._tensor([0] * n) for n in (pairs, pairs, pairs + 1)))
            offsets = [self._tensor([0] * ((features + 1) * sources * samples + 1)) for _ in range(2)]
        capacities = [self._ids.capacity[feature] for feature in self._features]
        padded = 0 if self._known else self._values[0].numel()
        tasks = pull_tasks(capacities, sources, samples, padded, BLOCK_IDS)
        arrived = list(zip(values, offsets, strict=True))
        return _DevicePlaces(
            places, self._tensor(tasks).reshape(len(tasks), 3), self._ids.known_total(samples), arrived
        )

    def __call__(self, samples: int, parity: int, check: bool) -> Bags:
        """Read the ids that the ranks have published in the windows of `parity`; `check` holds them against tables."""
        found = self._places.get(samples, self._places_of, samples)
        published, status = self._published[parity], self.record.status
        place_ids(published, found.places, status, samples, not self._known, found.total)
        values, offsets = found.arrived[parity]
        lengths = not self._known
        pull_ids(published, found.places, found.tasks, values, offsets, status, samples, lengths=lengths, check=check)
        return values, offsets
