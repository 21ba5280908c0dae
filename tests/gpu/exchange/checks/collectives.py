import torch

from dlrm_overlap.bench.harness.peer_memory import PeerMemory
from dlrm_overlap.comm.arena import Region, open_arena
from dlrm_overlap.comm.copy_engine import CopyEngine
from tests.agreement import assert_same
from tests.distributed.collectives import check_rows
from tests.gpu.exchange.checks.stress import capture
from tests.gpu.exchange.place import Check, Place, every


def _check_rows(place: Place, way: str) -> None:
    check_rows(way, place.group, place.device)


def _check_engine(place: Place) -> None:
    """Copies to a peer that wait for a counter of a kernel: eager, captured, replayed."""
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
        source.copy_((number * 10 + place.rank).expand_as(source))  # only the counter tells that this is done
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


_ON_GPUS = [way for way in PeerMemory.ways if way != "stores"]
CHECKS = (
    every("collectives", _check_rows, way=["stores"])
    | every("collectives", _check_rows, way=_ON_GPUS, gpu_only=True)
    | {"collectives_engine": Check(_check_engine, gpu_only=True)}
)
