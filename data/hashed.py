"""Rows of a table that takes keys of any value by a hash, which may give two keys one row."""

import numpy as np


def hashed_rows(keys: np.ndarray, rows: int) -> np.ndarray:
    """Return rows [d] int32 of keys [d] int64: 1 + mix(key) % (rows - 1), since row 0 is for missing values.

    A table of one row has row 0 alone. `kernels/synthetic.py` computes the same.
    """
    mixed = keys.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio
    mixed ^= mixed >> np.uint64(32)
    return (mixed % np.uint64(max(rows - 1, 1))).astype(np.int32) + np.int32(rows > 1)
