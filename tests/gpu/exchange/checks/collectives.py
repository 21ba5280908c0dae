"""All-to-all and all-gather into the peers' memory: of all sizes, under any delays, captured, lost peers."""

from typing import Any

import torch

from dlrm_overlap.comm.arena import Region, open_arena
from dlrm_overlap.comm.collectives import PeerCollectives
from dlrm_overlap.comm.copy_engine import CopyEngine
from tests.agreement import assert_same
from tests.distributed.collectives import Rows, check_rows
from tests.gpu.exchange.checks.faults import CULPRIT, TIMEOUT_S, flag_told_of
from tests.gpu.exchange.checks.stress import capture, take_late
from tests.gpu.exchange.place import Check, Place, every

_WAYS = ("auto", "dma", "stores")
# Rows of odd sizes; of more than one block of the kernel; of what copy engines are for.
_ROWS: Rows = [
    ((1,), torch.float32),
    ((1,), torch.int8),
    ((4099,), torch.int8),
    ((3, 333), torch.bfloat16),
    ((7, 1001), torch.float32),
    ((5,), torch.int64),
    ((100_003,), torch.float16),
    ((3 << 20,), torch.uint8),
    ((17, 65_536), torch.float32),
]
_STEPS = 1000
_SIZES = ((1 << 19, "dma"), (1001, "stores"), (77_777, "dma"), (1 << 18, "stores"))  # int32 elements of a row, way


def _check_nothing(place: Place) -> None:
    """Rows without a byte: what comes before and after them arrives, eager and replayed."""
    ranks, collectives = place.world_size, PeerCollectives(place.group, place.device, 1 << 20, 20.0)
    nothing, output = (collectives.empty((ranks, n, 4), torch.float32) for n in (0, 1))
    empty, number = torch.empty_like(nothing), torch.zeros_like(output)

    def take() -> None:
        number.add_(1 + place.rank)
        for way in _WAYS:
            way_: Any = way
            collectives.all_to_all(nothing, empty, way_).wait()
            collectives.all_gather(nothing, empty[0], way_).wait()
            collectives.all_to_all(output, number, way_).wait()

    replay = None
    for times in range(1, 5):
        if times == 3:
            replay = capture(place, take)
        (replay or take)()
        expected = torch.arange(1, ranks + 1, device=place.device).float()[:, None, None].expand_as(output) * times
        assert_same(output, expected.contiguous(), f"time {times}")
        collectives.check()
    place.meet()
    collectives.close()


def _check_rows(place: Place, way: Any) -> None:
    check_rows(lambda bound: PeerCollectives(place.group, place.device, 64 << 20, bound), way, _ROWS, place.device)


class _Steps:
    """Steps of four calls each, beside a product, whose every number is known; inputs are poisoned behind each call."""

    def __init__(self, place: Place, timeout_s: float = 20.0) -> None:
        self.place, ranks, device = place, place.world_size, place.device
        self.collectives = PeerCollectives(place.group, device, 64 << 20, timeout_s)
        self.outputs = [self.collectives.empty((ranks, size), torch.int32) for size, _ in _SIZES]
        self.inputs = [torch.empty_like(output) for output in self.outputs]
        self.patterns = [torch.arange(size, dtype=torch.int32, device=device) * 7 for size, _ in _SIZES]
        each = torch.arange(ranks, dtype=torch.int32, device=device)[:, None]
        self.sent, self.arriving = place.rank * ranks + each, each * ranks + place.rank
        self.gathered = each * ranks
        self.number = torch.zeros((), dtype=torch.int32, device=device)
        self.bad = torch.zeros((), dtype=torch.int64, device=device)
        self.factor = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16)
        self.beside = torch.cuda.Stream(device)

    def take(self) -> None:
        """Take a step; can be captured."""
        current = torch.cuda.current_stream()
        self.number += 1001
        for index, (_, way) in enumerate(_SIZES):
            output, sent, pattern = self.outputs[index], self.inputs[index], self.patterns[index]
            numbers = pattern + self.number
            output.fill_(-1)
            gathers = index == 3
            sent.copy_(numbers + (self.place.rank * self.place.world_size if gathers else self.sent))
            way_: Any = way
            if gathers:
                work = self.collectives.all_gather(output, sent[0], way_, "compute")
            else:
                work = self.collectives.all_to_all(output, sent, way_, "compute")
            self.beside.wait_stream(current)
            with torch.cuda.stream(self.beside):
                torch.mm(self.factor, self.factor)
            torch.mm(self.factor, self.factor)
            work.wait()
            sent.fill_(-2)  # whoever reads it now is late
            self.bad += (output != numbers + (self.gathered if gathers else self.arriving)).sum()
            current.wait_stream(self.beside)

    def check(self, what: str) -> None:
        """Check that all numbers of all steps were right."""
        self.place.synchronize()
        self.collectives.check()
        assert int(self.bad) == 0, f"{what}: {int(self.bad)} numbers are wrong"


def _check_any_delays(place: Place, mode: str) -> None:
    """Whatever rank is late; in mode mixed each rank takes each step eagerly or by its graph, as it likes."""
    steps = _Steps(place)
    steps.take()
    take_late(place, steps.take, mode, _STEPS)
    steps.check(mode)
    place.meet()
    steps.collectives.close()


def _check_engine(place: Place) -> None:
    """Copies to a peer after a counter that a kernel raises: eager, captured, replayed."""
    arena = open_arena({"rows": Region((64, 32), torch.int32)}, place.group, place.device)
    engine, peer = CopyEngine(place.device), (place.rank + 1) % place.world_size
    word = torch.zeros(2, dtype=torch.int64, device=place.device)[:1]
    number = torch.zeros((), dtype=torch.int32, device=place.device)
    source = torch.empty(64, 32, dtype=torch.int32, device=place.device)

    def step() -> None:
        number.add_(1)
        source.fill_(-1)
        word.zero_()
        engine.follow()
        torch.cuda._sleep(100_000)
        source.copy_((number * 10 + place.rank).expand_as(source))  # only the counter says that this is done
        word.add_(3)
        engine.wait_counter(word, 3)
        engine.copy(arena.view("rows", peer), source)
        engine.join()

    def check(what: str, times: int) -> None:
        place.meet()
        expected = torch.full_like(arena.local("rows"), 10 * times + (place.rank - 1) % place.world_size)
        assert_same(arena.local("rows"), expected, what)
        place.meet()

    for times in range(1, 4):
        step()
        check("eager", times)
    replay = capture(place, step)
    for times in range(4, 10):
        replay()
        check("replayed", times)
    arena.close()


def _check_lost_peer(place: Place, how: str) -> None:
    """All ranks but the culprit name the peer for which they wait in vain, in time, whatever the GPU says."""
    steps = _Steps(place, TIMEOUT_S)
    replay = None
    for _ in range(2):
        steps.take()
    if how == "captured":
        replay = capture(place, steps.take)
        replay()
    seen = 4 * (3 if replay else 2)
    place.meet()
    stalls = how == "stalls"
    if stalls and place.rank == CULPRIT:  # it lets the others begin, and sends nothing
        from dlrm_overlap.kernels.flags import meet

        flow: Any = steps.collectives._flow
        meet(flow._free, place.rank)
        place.synchronize()
    stalls_s = 2.5 * TIMEOUT_S if stalls else 0.0
    flag, told = flag_told_of(place, steps.collectives.check, "collective's flag", replay or steps.take, stalls_s)
    assert flag == [place.rank, 0, CULPRIT, seen + 1, seen], told
    place.leave()


CHECKS = (
    every("collectives", _check_rows, way=_WAYS)
    | {"collectives_of_nothing": Check(_check_nothing, gpu_only=True)}
    | {"collectives_engine": Check(_check_engine, gpu_only=True)}
    | every("collectives_delays", _check_any_delays, mode=("eager", "captured", "mixed"), gpu_only=True)
)
LOST = every("collectives_peer", _check_lost_peer, how=("dies", "stalls", "captured"), gpu_only=True, alone=True)
