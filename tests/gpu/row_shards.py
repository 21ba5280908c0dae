"""The command: `python -m tests.gpu.row_shards`: the kernels of tables that are cut by rows, alone on one GPU.

RANKS ranks hold a share of the rows of each table. The GPU does the work of one of them: it divides the ids of its
samples, pools its shares of all ranks' bags into a window of each rank, adds up the partial sums of its own samples,
and pushes their gradient to the owners. All windows are in its own memory, so no link is in the times. Beside it stand
`dense`, the same kernels with all partial sums and gradients, and what TorchRec does on a rank but for its collectives:
FBGEMM's division and lookup, the sum that a reduce-scatter makes of the ranks' parts, and the copies of an all-gather.
Results are compared first. `filled` is the share of partial sums that have ids, and so of bytes that links would carry.
"""

import sys
from functools import partial

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from dlrm_overlap.kernels.arguments import Bags, FeatureTable, Partials, PoolingOptions, Windows, tuning_for
from dlrm_overlap.kernels.backward.push_gradients import PartFlags, ShardTable, pushing_gradients
from dlrm_overlap.kernels.divide_ids import Shares, divide_ids
from dlrm_overlap.kernels.forward.add_partials import add_partials, partial_table
from dlrm_overlap.kernels.forward.store_pooled import store_pooled
from tests.gpu.one_gpu import capture, times_us

RANKS, TABLES, ROWS, DIM, SAMPLES = 4, 8, 1_000_000, 128, 8192
POOLING_FACTORS = (1, 8, 32)
HELD = ROWS // RANKS


class _Stage:
    """The row shards of one rank of RANKS, the first, and bags of `ids` ids each."""

    def __init__(self, ids: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(ids)
        self.every = torch.randint(0, ROWS, (TABLES, RANKS * SAMPLES, ids), device=device, generator=generator)
        mine = self.every < HELD
        lengths = mine.sum(2).flatten()
        self.filled = float((lengths > 0).float().mean())
        self.values = self.every[mine].int()
        self.offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        self.lookup = SplitTableBatchedEmbeddingBagsCodegen(
            [(HELD, DIM, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * TABLES, device=device
        )
        for weight in self.lookup.split_embedding_weights():
            weight.normal_(generator=generator)
        self.total_dim, self.stride = TABLES * DIM, RANKS * TABLES * DIM
        self.windows = torch.zeros(RANKS, SAMPLES, self.stride, device=device)
        self.gradient = torch.randn(SAMPLES, self.total_dim, device=device, generator=generator)
        self.pushed = torch.zeros(RANKS, RANKS * SAMPLES * self.total_dim, device=device)
        self.device = device
        self._publish(ids)
        self._prepare()

    def _publish(self, ids: int) -> None:
        """Make the window of this rank's ids, as `IdLayout` has it."""
        room, bags = TABLES * SAMPLES * ids, TABLES * SAMPLES
        ends = [*(HELD * (w + 1) for w in range(RANKS - 1)), 1 << 32]
        entries = [[t, w * HELD, end] for t in range(TABLES) for w, end in enumerate(ends)]
        self.shares = Shares(torch.tensor(entries, device=self.device), room, room, room, 2 * room, TABLES)
        self.ids_window = torch.zeros(2 * room + (TABLES + 1 + TABLES * RANKS) * SAMPLES + 1, device=self.device).int()
        self.own = self.every[:, :SAMPLES].contiguous()
        self.ids_window[:room] = self.own.flatten()
        self.ids_window[2 * room :][: bags + 1] = torch.arange(bags + 1, device=self.device) * ids
        self.counts = torch.full((1 + TABLES * RANKS * SAMPLES,), room, device=self.device).int()
        self.divide()
        self.share_offsets = self.ids_window[2 * room + (TABLES + 1) * SAMPLES :]
        self.own_offsets = torch.arange(bags + 1, device=self.device) * ids
        self.block_sizes = torch.full((TABLES,), HELD, device=self.device)

    def _prepare(self) -> None:
        """Make the tables of addresses, without and with parts that are left out."""
        tensor = partial(torch.tensor, device=self.device)
        weights, both = self.lookup.split_embedding_weights(), (False, True)
        self._first = tensor([rank * SAMPLES for rank in range(RANKS + 1)]).int()
        self._into = Windows(tensor([window.data_ptr() for window in self.windows]), self.stride, torch.float32)
        self._status = torch.zeros(3, dtype=torch.int64, device=self.device)
        entries = [[[w.data_ptr(), HELD, t * DIM, t, 0, some] for t, w in enumerate(weights)] for some in both]
        self._tables = [FeatureTable(tensor(entries[some]), DIM, torch.float32, 16, 16, some) for some in both]
        sums = [
            Partials([(t + w * TABLES) * DIM for w in range(RANKS)], DIM, [t * RANKS + w for w in range(RANKS)])
            for t in range(TABLES)
        ]
        self._partials = partial_table(sums, 16, self.device)
        self._flags = torch.zeros(RANKS, RANKS, 1, dtype=torch.int64, device=self.device)
        done, clock = (torch.zeros(1, dtype=dtype, device=self.device) for dtype in (torch.int32, torch.int64))
        flags = PartFlags(tensor([each.data_ptr() for each in self._flags]), done, clock)
        into = Windows(tensor([each.data_ptr() for each in self.pushed]), 0, torch.float32)
        self._pushes = []
        for some in both:
            places = [[[t * DIM] * 2 + [2 + t * RANKS + w if some else 1] for t in range(TABLES)] for w in range(RANKS)]
            table = ShardTable(tensor([places]), tensor([TABLES]).int(), DIM, 16, 16)
            self._pushes += pushing_gradients(
                self.gradient, [table], into, flags, rank=0, schedule="balanced", first_sample=0,
                batch=RANKS * SAMPLES, most_samples=SAMPLES, scale=1.0, programs=66, first_part=0, end_part=1,
                offsets=self.share_offsets if some else None,
            )  # fmt: skip

    def divide(self) -> None:
        """Divide this rank's ids by owner."""
        divide_ids(self.ids_window, self.shares, SAMPLES, self.counts)

    def divide_by_fbgemm(self) -> None:
        """Divide them as TorchRec does."""
        lengths = self.own_offsets.diff()
        torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths, self.own.flatten(), False, False, self.block_sizes, RANKS, None
        )

    def pool(self, leaves_out: bool) -> None:
        """Store this rank's partial sums into the windows of all ranks."""
        bags = Bags(self.values, self.offsets, self._first, RANKS * SAMPLES, SAMPLES)
        short = self.values.numel() <= self.offsets.numel()
        options = PoolingOptions(0, "balanced", tuning_for(DIM, 4, short=short), check_ids=False)
        store_pooled(bags, self._tables[leaves_out], self._into, self._status, options)

    def pool_by_fbgemm(self) -> torch.Tensor:
        """Return the partial sums [RANKS * b, D_total] as FBGEMM pools them."""
        return self.lookup(self.values, self.offsets)

    def add(self, leaves_out: bool) -> None:
        """Add up the partial sums in this rank's window."""
        add_partials(self.windows[0], self._partials, self.share_offsets if leaves_out else None)

    def push(self, leaves_out: bool) -> None:
        """Push the gradient to the owners, this rank among them."""
        self._pushes[leaves_out](self.gradient, *([self.share_offsets] if leaves_out else []), 1)

    def check(self) -> None:
        """Check that each kernel's result is FBGEMM's or PyTorch's."""
        expected = self.pool_by_fbgemm().view(RANKS, SAMPLES, self.total_dim)
        for leaves_out in (False, True):
            self.windows.fill_(0 if leaves_out else torch.nan)
            self.pool(leaves_out)
            torch.testing.assert_close(self.windows[:, :, : self.total_dim], expected)
        owner = torch.div(self.own, HELD, rounding_mode="floor")
        has_ids = torch.stack([(owner == w).any(2) for w in range(RANKS)], 1)  # [tables, ranks, samples]
        assert torch.equal(self.share_offsets.diff() > 0, has_ids.flatten())
        parts = torch.randn(SAMPLES, RANKS, TABLES, DIM, device=self.device)
        filled = torch.where(has_ids.permute(2, 1, 0)[..., None], parts, 0)
        for leaves_out, given in ((False, parts), (True, filled)):
            self.windows[0] = parts.flatten(1)
            self.add(leaves_out)
            total = given[:, 0].clone()
            for other in range(1, RANKS):
                total += given[:, other]
            torch.testing.assert_close(self.windows[0, :, : self.total_dim], total.flatten(1))
        for leaves_out in (False, True):
            self.pushed.zero_()
            self.push(leaves_out)
            here = self.pushed.view(RANKS, TABLES, RANKS * SAMPLES, DIM)[:, :, :SAMPLES]
            wanted = self.gradient.view(SAMPLES, TABLES, DIM).transpose(0, 1).expand(RANKS, -1, -1, -1)
            if leaves_out:
                wanted = torch.where(has_ids.transpose(0, 1)[..., None], wanted, 0)
            torch.testing.assert_close(here, wanted)


def main() -> int:
    """Print the table; return 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("tests.gpu.row_shards: no GPU is there, and one must be", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name(device)}, us; {RANKS} ranks of {SAMPLES} samples, {TABLES} tables, dim {DIM}")
    print(f"{'ids':>4} {'filled':>6}  part" + "".join(f"{name:>10}" for name in ("ours", "dense", "stock")))
    for ids in POOLING_FACTORS:
        with torch.no_grad():
            stage = _Stage(ids, device)
            stage.check()
            received = torch.randn(RANKS, SAMPLES, stage.total_dim, device=device)
            gathered = torch.empty_like(received)
            parts = {
                "divide": (stage.divide, stage.divide, stage.divide_by_fbgemm),
                "pool": (lambda s=stage: s.pool(True), lambda s=stage: s.pool(False), stage.pool_by_fbgemm),
                "add": (lambda s=stage: s.add(True), lambda s=stage: s.add(False), lambda r=received: r.sum(0)),
                "push": (
                    lambda s=stage: s.push(True),
                    lambda s=stage: s.push(False),
                    lambda s=stage, g=gathered: g.copy_(s.gradient.expand_as(g)),
                ),
            }
            for name, ways in parts.items():
                taken = times_us([capture(way) for way in ways])
                print(f"{ids:4} {stage.filled:6.3f}  {name:6}" + "".join(f"{each:10.1f}" for each in taken), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
