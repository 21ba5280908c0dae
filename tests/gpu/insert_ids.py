"""The command: `python -m tests.gpu.insert_ids`, on one GPU, in about half a minute.

Times the map of a table of any id, with the initial rows of new ids: batches of new ids into a table that fills up and
then evicts, and batches of which 2% are new. FBGEMM's operator `zero_collision_hash`, if it is installed, takes these
ids, too; it fills no rows.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import torch

from dlrm_overlap.embedding.id_tables.id_map import IdMap
from dlrm_overlap.embedding.id_tables.rules import IdRules
from dlrm_overlap.kernels.ids.id_map import EMPTY, SEGMENT, Policy, Totals
from dlrm_overlap.kernels.reference import split_words
from tests.gpu.one_gpu import run_parts

ROWS, NEW_IDS, DIM = 1 << 22, 1_000_000, 128
STEP_IDS = 1_750_000  # of a rank in a step of MLPerf's DLRM-DCNv2 with 8192 samples a rank
DEVICE = torch.device("cuda", 0)


def random_ids(count: int, seed: int) -> torch.Tensor:
    """Return [count] int64 from 0 on, without twins for all practical purposes."""
    return torch.randint(2**63 - 1, (count,), generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def times_us(call: Callable[[torch.Tensor], object], batches: Sequence[torch.Tensor]) -> list[float]:
    """Return the GPU's time of each call."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    torch.cuda._sleep(20_000_000)  # so that the CPU is ahead
    events[0].record()
    for batch, event in zip(batches, events[1:], strict=True):
        call(batch)
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)]


class Mapped:
    """A table of any id on this GPU, whose rows have one optimizer state each."""

    def __init__(self, policy: Policy) -> None:
        rules = IdRules("t", ROWS, ROWS // SEGMENT, reserved=1, policy=policy, frozen=True)
        self.map = IdMap([rules], {"t": (0, ROWS)}, DEVICE, lambda: True)
        rows = torch.randn(ROWS, DIM, device=DEVICE), torch.zeros(ROWS, device=DEVICE)
        self.map.bind(lambda _: rows, {})
        self._offsets: dict[int, torch.Tensor] = {}
        self._features = self.map.features_of([("t", "f")])

    def __call__(self, ids: torch.Tensor) -> None:
        low, high = split_words(ids)
        if ids.numel() not in self._offsets:  # a copy to the GPU, for which the CPU waits
            self._offsets[ids.numel()] = torch.tensor([0, ids.numel()], device=DEVICE)
        offsets = self._offsets[ids.numel()]
        self.map.fill(self.map.map((low, high), torch.empty_like(ids), offsets, 1, self._features))


def stream(known: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Return batches of STEP_IDS ids: by Zipf's law with exponent 1 of `known`, and 2% new ones."""
    generator, batches = torch.Generator(DEVICE).manual_seed(1), []
    for step in range(steps):
        drawn = torch.rand(STEP_IDS, generator=generator, device=DEVICE, dtype=torch.float64)
        ids = known[(known.numel() ** drawn).long().clamp(max=known.numel() - 1)]
        new = torch.rand(STEP_IDS, generator=generator, device=DEVICE) < 0.02
        batches.append(random_ids(STEP_IDS, 1000 + step).where(new, ids))
    return batches


def time_map(name: str, call: Callable[[torch.Tensor], object], used: Callable[[], float]) -> None:
    """Print the times of `call`; `used` returns the share of the rows in use."""
    call(random_ids(1000, 90))  # compiles the kernels
    torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)  # memory that PyTorch keeps, so no call waits for more
    for turn in range(2 * ROWS // NEW_IDS):
        (us,) = times_us(call, [random_ids(NEW_IDS, turn)])
        print(f"{name}: {NEW_IDS} new ids {us:8.0f} us, then {used():4.0%} of the rows in use", flush=True)
    batches = stream(random_ids(NEW_IDS, 0), 12)
    us = statistics.median(times_us(call, batches)[2:])
    print(f"{name}: {STEP_IDS} ids of which 2% are new {us:8.0f} us", flush=True)


def time_ours(policy: Policy) -> None:
    mapped = Mapped(policy)
    time_map(policy.name, mapped, lambda: mapped.map.used() / mapped.map.rows)
    print(f"{policy.name}: {mapped.map.total(Totals.EVICTED)} ids evicted, {mapped.map.total(Totals.NO_ROOM)} no room")


def time_fbgemm() -> None:
    """Time FBGEMM's operator on one bucket, in which ids whose time has passed are evicted."""
    import fbgemm_gpu  # noqa: F401  registers operators

    ids = torch.full((ROWS, 1), EMPTY, dtype=torch.int64, device=DEVICE)
    hours = torch.full((ROWS, 1), -1, dtype=torch.int32, device=DEVICE)

    def call(batch: torch.Tensor) -> None:
        sizes, firsts = torch.full_like(batch, ROWS), torch.zeros_like(batch)
        times = torch.ones_like(batch, dtype=torch.int32)
        torch.ops.fbgemm.zero_collision_hash(
            batch, ids, SEGMENT, True, -1, False, sizes, firsts, hours, False, False, False, times, 2, 1
        )

    time_map("FBGEMM", call, lambda: float((ids != EMPTY).float().mean()))


def main() -> int:
    """Time the maps; return 1 if a part fails, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("tests.gpu.insert_ids: no GPU is there, and one must be; run it where nvidia-smi shows one")
        return 2
    torch.cuda.set_device(DEVICE)
    gpu = torch.cuda.get_device_name(DEVICE)
    parts: dict[str, Callable[[], None]] = {
        f"{each.name}, on {gpu}": partial(time_ours, each) for each in (Policy.LRU, Policy.LFU)
    }
    if find_spec("fbgemm_gpu") is not None:
        parts["FBGEMM's operator"] = time_fbgemm
    return int(run_parts(parts) > 0)


if __name__ == "__main__":
    sys.exit(main())
