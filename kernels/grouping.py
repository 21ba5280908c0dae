"""The groups in which a message from a rank to another node leaves, alike at both ends.

A put costs a network card some hundred ns, whatever its bytes. So a message is cut into groups of equal numbers of
rows, each of at least `aggregate_bytes`, the last one excepted. A group leaves as one put when its last row is
finished. Its offset in the message is fixed, and so are the bytes that arrive.

Source: the aggregator that Chen et al. 2024 propose for several nodes. Theirs also sends what has waited for long: in
the simulation of 16 nodes no bound of the wait changes a step's time.
"""


def group_rows(row_bytes: int, aggregate_bytes: int, least_rows: int = 1) -> int:
    """Return the rows of a group: the least multiple of `least_rows` that has so many bytes, of rows of `row_bytes`.

    Example: 512 bytes a row, 64 KB a group: 128 rows.
    """
    return least_rows * max(1, -(-aggregate_bytes // (least_rows * max(1, row_bytes))))
