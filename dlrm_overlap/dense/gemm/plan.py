"""How a rank's rows are cut, so that little is seen of the communication before the first product and after the last.

Each part costs a copy and a product of its own. So only the rows of the peers at both ends are cut, and these into few.
"""

_FINE, _COARSE = 8, 256  # rows: 16 bytes divide 8 of two bytes each; cuBLAS's tiles divide 256


def halve(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut the rows of a rank into at most `parts` ranges, each half of the rest, the last as large as that before.

    The product of such a range ends before the next range is there, if it takes less than half as long; so only the
    product of the last, small range is seen. Ranges begin at multiples of 256, or 8.

    Example: 8192 rows in 4: 0 .. 4096, 4096 .. 6144, 6144 .. 7168, 7168 .. 8192.
    """
    step = _COARSE if rows >= _COARSE << parts else _FINE
    ranges, begin = [], 0
    while len(ranges) < parts - 1 and rows - begin > step:
        end = begin + -(-(rows - begin) // (2 * step)) * step
        ranges.append((begin, end))
        begin = end
    return [*ranges, (begin, rows)]


def double(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut the rows of a rank as `halve` does, but the small ranges first: each is multiplied while the last is sent.

    Example: 8192 rows in 4: 0 .. 1024, 1024 .. 2048, 2048 .. 4096, 4096 .. 8192.
    """
    sizes = [end - begin for begin, end in halve(rows, parts)][::-1]
    step = _COARSE if sizes[0] >= _COARSE else _FINE
    ends = [min(rows, -(-sum(sizes[: count + 1]) // step) * step) for count in range(len(sizes))]
    return [(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if begin < end]
