import pytest
import torch
import triton
import triton.language as tl

from dlrm_overlap.comm.device_errors import DeviceErrorRecord, ExchangeTimeoutError
from dlrm_overlap.kernels.flags import Flags, signal_flags, wait_flags
from dlrm_overlap.kernels.primitives import BAD_ID, record
from tests.agreement import assert_same
from tests.kernels.compiling import run_without_interpreter
from tests.kernels.emulation import CLOCK, CPU, interpreted

pytestmark = interpreted


def _flags(ready: list[torch.Tensor], rank: int, counts: list[int], record: DeviceErrorRecord) -> Flags:
    addresses = torch.tensor([each.data_ptr() for each in ready])
    return Flags(addresses, CLOCK, ready[rank], torch.tensor(counts).int(), timeout=3, status=record.status)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_a_rank_signals_every_rank(world_size: int) -> None:
    ready = [torch.full((world_size, 4), 6) for _ in range(world_size)]
    rank, slot, epoch = world_size // 2, 2, 7
    signal_flags(_flags(ready, rank, [0] * world_size, DeviceErrorRecord(CPU)), rank, slot, epoch)
    expected = torch.full((world_size, 4), 6)
    expected[rank, slot] = epoch
    for peer, flags in enumerate(ready):
        assert_same(flags, expected, f"flags at rank {peer}")


def _wait(ready: torch.Tensor, counts: list[int], epoch: int) -> list[int] | None:
    """Let rank 1 wait, and return the record of a wait that expired."""
    record = DeviceErrorRecord(CPU)
    before = ready.clone()
    wait_flags(_flags([ready] * len(counts), 1, counts, record), 1, epoch)
    assert_same(ready, before, "flags")
    assert record.bad_id() is None
    return record.expired()


def test_a_wait_returns_when_all_flags_have_reached_the_epoch() -> None:
    ready = torch.tensor([[4, 5, 0], [0, 0, 0], [4, 4, 4]])
    assert _wait(ready, counts=[2, 0, 3], epoch=4) is None


@pytest.mark.parametrize("peer", [0, 1, 2])
@pytest.mark.parametrize("slot", [0, 3, 699])  # 2,100 flags: three programs of 1,024
def test_a_wait_that_expires_names_the_flag(peer: int, slot: int) -> None:
    ready = torch.full((3, 700), 9)
    ready[peer, slot] = 8
    assert _wait(ready, counts=[700] * 3, epoch=9) == [1, peer, slot, 9, 8]


def test_no_wait_is_for_unused_flags() -> None:
    ready = torch.full((3, 5), 9)
    ready[0, 2:], ready[1, 1:] = 0, 0
    assert _wait(ready, counts=[2, 1, 5], epoch=9) is None
    assert _wait(ready, counts=[2, 2, 5], epoch=9) == [1, 1, 1, 9, 0]


def test_a_wait_that_expires_names_the_flag_of_the_lowest_epoch() -> None:
    ready = torch.full((3, 5), 9)
    ready[0, 1], ready[2, 3], ready[2, 4] = 8, 2, 7
    assert _wait(ready, counts=[5] * 3, epoch=9) == [1, 2, 3, 9, 2]


@triton.jit
def _record(status, a, b, c, KIND: tl.constexpr):
    zero = tl.full((), 0, tl.int64)
    record(status, KIND, a + zero, b + zero, c + zero, zero, zero)


def _record_bad_id(records: DeviceErrorRecord, feature: int, sample: int, rows: int) -> None:
    _record[(1,)](records.status, feature, sample, rows, KIND=BAD_ID)


def test_a_bad_id_and_a_wait_that_expires_later_are_both_recorded() -> None:
    records = DeviceErrorRecord(CPU)
    _record_bad_id(records, 4, 5, 6)
    assert (records.bad_id(), records.expired(), records.empty) == ([4, 5, 6], None, False)
    records.raise_expired(3, "part")  # no wait has expired
    wait_flags(_flags([torch.tensor([[3]])], 0, [1], records), 0, epoch=4)
    assert records.expired() == [0, 0, 0, 4, 3]
    with pytest.raises(ExchangeTimeoutError, match="rank 0 waited 3 s for part 0 of rank 0: expected epoch 4, seen 3;"):
        records.raise_expired(3, "part")
    _record_bad_id(records, 7, 8, 9)
    assert records.bad_id() == [4, 5, 6], "the first one stays"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["waits", "vectors"])
def test_compiled_kernels_are_as_they_must_be(module: str) -> None:
    """All warps decide by one time, words have 16 bytes, and products use tensor cores: see the modules."""
    run_without_interpreter(f"tests.kernels.{module}")
