"""The groups of rows in which a message is sent to another node, computed by both sender and receiver.

A put costs a network card some hundred ns, whatever its size, so each group is one put of at least `aggregate_bytes`.

Source: the aggregator of Chen et al. 2024, without its limit of the time that a group waits.
"""


def group_rows(row_bytes: int, aggregate_bytes: int, least_rows: int = 1) -> int:
    """Return the smallest multiple of `least_rows` that has `aggregate_bytes` bytes."""
    return least_rows * max(1, -(-aggregate_bytes // (least_rows * max(1, row_bytes))))
