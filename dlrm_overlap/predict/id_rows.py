"""The row of each id of a table of any id, from the ids that a checkpoint stores for its rows.

    id (64 bits) -> its hash -> its bucket of 128 rows -> the row that stores the hash, or else the bucket's last row

The last row of a bucket is the initial row of the ids that have no row of their own (docs/any_ids.md). An id is
compared with all 128 of its bucket, 1 KB: about as fast as a binary search for one id among a million, and faster for a
thousand (`python -m tests.serving_deltas`). It needs no memory beyond the stored ids, and nothing to keep sorted.
"""

import numpy as np

from dlrm_overlap.kernels.ids.id_map import EMPTY, SEGMENT, mix, unsigned_remainder

_AT_A_TIME = 1024  # ids, whose buckets fill 1 MB, so that they stay in the CPU's cache


class IdRows:
    def __init__(self, stored: np.ndarray) -> None:
        """Take the hash of each row's id, [rows] int64, `EMPTY` for a row without an id; they are not copied."""
        self._stored = stored.reshape(-1, SEGMENT)

    def rows_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of ids [n] int64, and whether they are the ids' own, both [n]."""
        parts = [self._rows_of(ids[first : first + _AT_A_TIME]) for first in range(0, len(ids), _AT_A_TIME)]
        if len(parts) == 1:
            return parts[0]
        rows, known = zip(*parts, strict=True) if parts else ((np.empty(0, np.int64),), (np.empty(0, bool),))
        return np.concatenate(rows), np.concatenate(known)

    def _rows_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hashes = mix(ids)
        buckets = unsigned_remainder(hashes, len(self._stored))
        same = self._stored[buckets] == hashes[:, None]
        same[hashes == EMPTY] = False
        same[:, -1] = True  # the first of several is taken
        slots = same.argmax(1)
        return buckets * SEGMENT + slots, slots < SEGMENT - 1
