"""The kernels' maths in plain PyTorch: the standard of the kernels' tests, and the arithmetic of CPUs."""

from collections.abc import Sequence

import torch

from dlrm_overlap.kernels.arguments import EVERY_BAG, Partials


def pool(
    weight: torch.Tensor,
    lengths: torch.Tensor,
    values: torch.Tensor,
    mean: bool = False,
    id_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum or mean of the rows of each bag of one table; an empty bag gives zeros.

    Args:
        weight: [rows, D], any float type.
        lengths: [n] int, ids of each bag.
        values: [sum of lengths] int, row ids, bag after bag.
        mean: divide the sum by the number of ids.
        id_weights: [sum of lengths] float32, by which each id's row is multiplied; None: ids have none.

    Returns:
        [n, D] float32. The rows are added up in the order of `values`, in float32.

    Example:
        lengths [1, 0, 2], values [5, 7, 7]: row 5; zeros; row 7 twice.
    """
    bag = torch.repeat_interleave(lengths.long())
    pooled = torch.zeros(lengths.numel(), weight.shape[1], dtype=torch.float32, device=weight.device)
    rows = weight[values.long()].float()
    pooled.index_add_(0, bag, rows if id_weights is None else rows * id_weights[:, None])
    if mean:
        pooled *= (1.0 / lengths.clamp(min=1).float())[:, None]
    return pooled


def divide_ids(
    values: torch.Tensor, offsets: torch.Tensor, shares: Sequence[tuple[int, int, int]], samples: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ids of each share, less its first one, where each is in `values`, and the lengths of the bags.

    The lengths are [shares * samples].

    Args:
        values: [n] int32, ids, bag after bag.
        offsets: [features * samples + 1] int32, of the bags.
        shares: feature, first id and end of each; a negative id counts as 2^32 more.
        samples: of a feature.
    """
    lengths, ids, positions = [], [], []
    for feature, first, end in shares:
        bags = offsets[feature * samples : (feature + 1) * samples + 1].long()
        here = values[int(bags[0]) : int(bags[-1])].long() % (1 << 32)
        inside = (here >= first) & (here < end)
        bag = torch.repeat_interleave(bags.diff())[inside]
        lengths.append(torch.bincount(bag, minlength=samples))
        ids.append(here[inside] - first)
        positions.append(int(bags[0]) + inside.nonzero().flatten())
    return torch.cat(ids).to(torch.int32), torch.cat(positions), torch.cat(lengths)


def add_partials(window: torch.Tensor, sums: Sequence[Partials], offsets: torch.Tensor | None = None) -> None:
    """Add up the partial sums in a window [b, columns], in float32, in the order of the row shards; in place.

    Args:
        sums: where they are.
        offsets: [shares * b + 1] int32, of the bags of each share; the partial sum of an empty bag has not arrived and
            is not read. None: all have arrived.
    """
    for sum in sums:
        total = torch.zeros(window.shape[0], sum.dim, dtype=torch.float32, device=window.device)
        for number, column in enumerate(sum.columns):
            part = window[:, column : column + sum.dim].float()
            if offsets is not None and sum.shares[number] != EVERY_BAG:
                filled = have_ids(offsets, sum.shares[number], window.shape[0])
                part = part.masked_fill(~filled[:, None], 0.0)
            total += part
        window[:, sum.columns[0] : sum.columns[0] + sum.dim] = total


def have_ids(offsets: torch.Tensor, feature: int, samples: int) -> torch.Tensor:
    """Return [samples] bool: which of a feature's bags have ids, by the offsets [features * samples + 1] of all."""
    return offsets[feature * samples : (feature + 1) * samples + 1].diff() > 0


def pull_ids(
    published: Sequence[tuple[torch.Tensor, torch.Tensor]], requested: Sequence[int], samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the features `requested`, each with the bags of the first rank's samples first.

    Args:
        published: of each rank, the ids of all features, bag after bag, and the offsets [features * samples + 1] of the
            bags, both int.
        requested: index of each feature that is asked for.
        samples: of a rank, b.

    Returns:
        values [n] and offsets [len(requested) * W * b + 1], of the types in which they are published.

    Example:
        Two ranks of 1 sample publish f: [5], g: [7, 7] and f: [], g: [2]. Of g arrive the values 7 7 2, offsets 0 2 3.
    """
    values, lengths = [published[0][0][:0]], [published[0][1][:0]]
    for feature in requested:
        for ids, offsets in published:
            bags = offsets[feature * samples : (feature + 1) * samples + 1]
            values.append(ids[int(bags[0]) : int(bags[-1])])
            lengths.append(bags.diff())
    ends = torch.cat(lengths).cumsum(0, dtype=lengths[0].dtype)
    return torch.cat(values), torch.cat([ends.new_zeros(1), ends])


def expand_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return [m, D]: the row of `rows` [n, D] that each of `places` [m] names, or zeros where it is negative."""
    return rows[places.clamp(min=0).long()].masked_fill((places < 0)[:, None], 0.0)


def sum_rows(gradient: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows, D] float32: the sum of the gradients [n, D] of each place, in their order; of negative ones none.

    Args:
        places: [n] int, the row of each gradient.
    """
    named = (places >= 0).nonzero().flatten()
    sums = torch.zeros(rows, gradient.shape[1], device=gradient.device)
    return sums.index_add_(0, places[named].long(), gradient[named].float())


def unpack(records: torch.Tensor, fields: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the numbers of records, [words * b] int32: of field after field, all of sample 0, of sample 1, and so on.

    Args:
        records: [b, record_bytes] uint8.
        fields: each of offset, width, count, kind, modulus, start: `kernels/unpack.py` says what they are.

    Example:
        One field of two numbers of 2 bytes, records 7 0 8 0 and 9 0 0 1: 7, 8, 9, 256.
    """
    found = []
    for offset, width, count, kind, modulus, _ in fields:
        numbers = records[:, offset : offset + count * width].reshape(-1, width)
        padded = numbers.new_zeros(len(numbers), 4)
        padded[:, :width] = numbers
        words = padded.view(torch.int32).flatten()
        if modulus:
            words %= modulus
        if kind == 1:
            words = words.float().view(torch.int32)
        elif kind == 2:
            words = words.to(torch.int16).view(torch.float16).float().view(torch.int32)
        found.append(words)
    return torch.cat(found)
