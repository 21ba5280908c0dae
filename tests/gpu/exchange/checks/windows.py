import gc
from functools import partial
from pathlib import Path

import torch

from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.windows import BufferInUseError
from tests.agreement import assert_same
from tests.gpu.exchange.place import Place, every
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table, pool_exactly

_BACKENDS = ("pgas", "fused")


def _stage(place: Place) -> tuple[Stage, list[torch.Tensor]]:
    tables = [Table(100, dim, owner) for dim in (64, 12) for owner in range(place.world_size)]
    stage = Stage(place, tables)
    return stage, stage.fill(integers=True)


@torch.no_grad()
def _check_side_by_side(place: Place, backend: str) -> None:
    """Two exchanges: the first to begin is the last to be waited for."""
    stage, everyones = _stage(place)
    first, second = (stage.exchange(ExchangeOptions(backend, slice_bags=bags)) for bags in (4, 32))
    for seed in range(20):
        batches = [Batch(place, stage.tables, [size] * place.world_size, seed) for size in (65, 130)]
        pairs = zip((first, second), batches, strict=True)
        awaitables = [exchange.start(stage.inputs(batch), batch.sizes) for exchange, batch in pairs]
        for awaitable, batch in reversed(list(zip(awaitables, batches, strict=True))):
            actual = awaitable.wait()
            assert_same(actual, pool_exactly(batch, everyones, place.rank), f"step {seed}, {batch.sizes}")
            del actual
        del awaitables, awaitable
    place.close(first, second)


def _check_held(place: Place, backend: str) -> None:
    """A forward is refused while the previous output is held, by a name or by autograd's graph, but not after."""
    stage, everyones = _stage(place)
    batch = Batch(place, stage.tables, [65] * place.world_size, seed=0)
    exchange = stage.exchange(ExchangeOptions(backend))

    def start() -> torch.Tensor:
        return exchange.start(stage.inputs(batch), batch.sizes).wait()

    def assert_refused(by: str) -> None:
        try:
            start()
        except BufferInUseError:
            return
        raise AssertionError(f"a forward overwrites what {by} holds")

    expected = pool_exactly(batch, everyones, place.rank)
    with torch.no_grad():
        held = start()[:1, :1]
        assert_refused("a view")
        del held
    loss = start().square().sum()
    assert_refused("a graph")
    loss.backward()
    with torch.no_grad():
        assert_same(start(), expected, "after the backward")
    loss = start().square().sum()
    del loss
    assert_same(start().detach(), expected, "after a forward whose output was not used")
    place.close(exchange)


def used_bytes(place: Place) -> int:
    """Return the used bytes of the GPU's memory, or of shared memory that this process maps; a collective."""
    gc.collect()
    if place.on_gpu:
        torch.cuda.empty_cache()
        place.meet()  # ranks that share this GPU have emptied their caches
        free, total = torch.cuda.mem_get_info(place.device)
        return total - free
    nameless = ("/#", "/memfd:dlrm_overlap_")  # the files of arenas
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [line.split()[0].split("-") for line in lines if any(mark in line for mark in nameless)]
    return sum(int(end, 16) - int(begin, 16) for begin, end in maps)


@torch.no_grad()
def _check_memory(place: Place, backend: str, put: str = "direct") -> None:
    """Windows and staging buffers are freed by `close`, and when windows are replaced for a larger batch."""
    stage, everyones = _stage(place)
    window_bytes = 1 << (28 if place.on_gpu else 23)
    small = Batch(place, stage.tables, [65] * place.world_size, seed=0)
    large = Batch(place, stage.tables, [-(-window_bytes // (4 * stage.columns[-1]))] * place.world_size, seed=0)
    expected = pool_exactly(small, everyones, place.rank)
    before = 0
    for cycle in range(4):
        if cycle == 1:  # the first has loaded kernels and allocated what NCCL keeps
            before = used_bytes(place)
            place.meet()
        exchange = stage.exchange(ExchangeOptions(backend, put=put))
        for batch in (small, large, small):
            actual = exchange.start(stage.inputs(batch), batch.sizes).wait()
            if batch is small:
                assert_same(actual, expected, f"cycle {cycle}")
            del actual
        place.meet()
        used = used_bytes(place) - before
        assert used >= 2 * window_bytes, f"{used} bytes in use: the check measures something else"
        place.close(exchange)
        del exchange
        place.meet()
    lost = used_bytes(place) - before
    assert lost < window_bytes // 4, f"{lost} bytes are lost after 3 exchanges of 2 windows of {window_bytes} bytes"
    place.meet()


CHECKS = (
    every("side_by_side", _check_side_by_side, backend=_BACKENDS)
    | every("held", _check_held, backend=_BACKENDS)
    | every("memory", _check_memory, backend=_BACKENDS)
    | every("memory_fused_stores", partial(_check_memory, backend="fused", put="staged"))
)
