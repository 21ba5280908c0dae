"""Ids are numbered so that their remainders by the ranks are the ranks that TorchRec would send them to."""

import pytest
import torch

from dlrm_overlap.embedding.id_tables.mch_tables import ShareOfRange, decoded, encoded
from dlrm_overlap.kernels.ids.id_map import unsigned_remainder

GREATEST = 2**63 - 1


def _owners(ids: torch.Tensor, size: int, ranks: int) -> torch.Tensor:
    """Return the ranks [n] that FBGEMM's operator, which TorchRec calls, sends each id to."""
    lengths, found, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.tensor([ids.numel()]),
        ids,
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.tensor([size]),
        my_size=ranks,
        total_num_blocks=torch.tensor([ranks]),
        keep_orig_idx=True,
    )
    by_id = dict(zip(found.tolist(), torch.repeat_interleave(lengths).tolist(), strict=True))
    return torch.tensor([by_id[id] for id in ids.tolist()])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("input_size", [0, 1, 1000, 2**40 + 7, 2**62, GREATEST])
def test_ids_go_to_the_ranks_of_torchrec(input_size: int, ranks: int) -> None:
    share = ShareOfRange.of(input_size, ranks)
    if share.why_not is not None:
        assert (input_size, ranks) == (GREATEST, 3)
        return
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(-(2**63), GREATEST, (200,), generator=generator), torch.arange(-20, 1100)]
    near = [edge + torch.arange(-9, 9) for edge in (share.size, min(share.size * ranks, GREATEST - 9), input_size - 9)]
    ids = torch.cat([*drawn, *near, torch.tensor([GREATEST, -(2**63)])]).unique()
    numbers = encoded(ids, share.size, ranks)
    owners = unsigned_remainder(numbers, ranks)
    assert torch.equal(owners, _owners(ids, share.size, ranks))
    assert numbers.unique().numel() == ids.numel()
    for rank in range(ranks):
        mine = owners == rank
        assert torch.equal(decoded(numbers[mine], share, rank), ids[mine])
