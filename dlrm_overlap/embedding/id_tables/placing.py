"""Gives slots to the ids of a table that is loaded, as training gives them to new ids.

In each bucket the ids that the eviction policy values most stay, if there are more than slots. These take slots in the
order of a hash, each the first empty one from its home on. So the result depends on the ids, and on what is known of
them, but not on the slots that they had before or on the number of ranks.
"""

from typing import NamedTuple

import numpy as np
import torch

from dlrm_overlap.embedding.id_tables.rules import IdRules
from dlrm_overlap.kernels.ids.id_map import murmur, segments_of, turns_of, unsigned_remainder
from dlrm_overlap.kernels.ids.reference import scores


class Known(NamedTuple):
    """What a checkpoint has of ids, [n] each."""

    ids: torch.Tensor
    """int64"""
    used_at: torch.Tensor
    """int32: last training step that used the id"""
    times: torch.Tensor | None = None
    """int32, see `MapState`; None if the policy needs none"""
    counts: torch.Tensor | None = None
    """int32, see `MapState`; None if the policy needs none"""


def place(known: Known, rules: IdRules, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [m] int64 each: which of the ids stay, as positions in `known`, and their rows in the whole table.

    `step` is the number of training steps. The ids of a bucket must all be in `known`, each once.
    """
    assert segments_of(rules.open_slots) == 1, "one segment a bucket"
    buckets = unsigned_remainder(known.ids, rules.buckets).numpy()
    turns = turns_of(known.ids).numpy()
    used = known.used_at.numpy()
    times = used if known.times is None else known.times.numpy()
    counts = None if known.counts is None else known.counts.numpy()
    score = scores(int(rules.policy), times.astype(np.int64), counts, used, step)
    # Choose the ids that stay: of each bucket those with the greatest scores, then those whose turn is earlier.
    by_value = np.lexsort((turns, -score, buckets))
    stay = by_value[_places(buckets[by_value]) < rules.open_slots]
    # Each takes a slot in its turn, the k-th ids of all buckets at once.
    stay = stay[np.lexsort((turns[stay], buckets[stay]))]
    home = unsigned_remainder(murmur(known.ids), rules.open_slots).numpy()
    slots, (present, local) = home[stay], np.unique(buckets[stay], return_inverse=True)
    taken = np.zeros((len(present), rules.open_slots), bool)
    places = _places(buckets[stay])
    order = np.argsort(places, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(places[order])) + 1):
        looking = members
        while len(looking := looking[taken[local[looking], slots[looking]]]):
            slots[looking] = (slots[looking] + 1) % rules.open_slots
        taken[local[members], slots[members]] = True
    return torch.from_numpy(stay), torch.from_numpy(buckets[stay] * rules.size + slots)


def _places(buckets: np.ndarray) -> np.ndarray:
    """Return the place of each in its run of equal numbers, [n]."""
    starts = np.flatnonzero(np.diff(buckets, prepend=-1))
    lengths = np.diff(np.append(starts, len(buckets)))
    return np.arange(len(buckets)) - np.repeat(starts, lengths)
