"""A batch of the ring is never overwritten while it is held, and a dead reader is reported."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.ring import Form, Lent, Ring
from tests.conftest import refuses, wait_until


def form_of(samples: int, dense: int, tables: int, max_ids: int) -> Form:
    ids = ((samples * tables,), torch.int32), ((samples * max_ids,), torch.int32)
    return [((samples, dense), torch.float32), *ids, ((samples,), torch.float32)]


FORM = form_of(64, 3, tables=2, max_ids=5)


def batch_of(step: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a batch whose numbers are all `step`, with step % 4 % 3 ids a bag."""
    lengths = torch.full((2 * 64,), step % 4 % 3, dtype=torch.int32)
    values = torch.full((int(lengths.sum()),), step, dtype=torch.int32)
    return torch.full((64, 3), float(step)), lengths, values, torch.full((64,), float(step))


def assert_is(lent: Lent, step: int) -> None:
    for found, expected in zip(lent[0], batch_of(step), strict=True):
        assert torch.equal(found, expected)


def ring_of(steps: int, workers: int, slots_per_worker: int, pin: bool) -> AbstractContextManager[Ring]:
    return closing(Ring(batch_of, range(steps), FORM, workers, slots_per_worker, pin))


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a ring return views of its memory without a GPU, where nothing can be page-locked."""

    if not torch.cuda.is_available():
        runtime = SimpleNamespace(cudaHostRegister=lambda *_: None, cudaHostUnregister=lambda *_: None)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize(("workers", "slots_per_worker"), [(1, 1), (2, 1), (1, 3), (3, 2), (4, 1)])
def test_every_batch_once_and_in_order(workers: int, slots_per_worker: int) -> None:
    with ring_of(50, workers, slots_per_worker, pin=False) as ring:
        batches = list(ring)
        assert len(batches) == 50
        for step, batch in enumerate(batches):
            assert_is(batch, step)


@pytest.mark.usefixtures("pinning")
@pytest.mark.parametrize(("workers", "slots_per_worker", "held"), [(1, 2, 1), (2, 2, 3), (3, 1, 2), (1, 5, 4)])
def test_a_held_batch_stays_as_it_was(workers: int, slots_per_worker: int, held: int) -> None:
    with ring_of(60, workers, slots_per_worker, pin=True) as ring:
        window: list[Lent] = []
        for step, batch in enumerate(ring):
            window.append(batch)
            del batch
            if step % 7 == 0:
                time.sleep(0.01)  # lets the readers overtake, if they can
            for age, kept in enumerate(reversed(window)):
                assert_is(kept, step - age)
            del kept
            window = window[-held:] if held > 1 else []


@pytest.mark.usefixtures("pinning")
def test_readers_wait_for_what_is_held() -> None:
    with ring_of(10, 2, 1, pin=True) as ring:
        first, second = next(ring), next(ring)
        time.sleep(0.2)
        assert not ring._pipes[0][0].poll(0)
        assert_is(first, 0)
        assert_is(second, 1)
        del first
        assert_is(next(ring), 2)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, r"loader process 1 of 2 \(pid \d+\) ended by SIGKILL, and step 3"),
        (signal.SIGSTOP, "loader process 1 of 2 .* batch of step 3 in 1 s"),
    ],
)
def test_a_killed_or_stopped_reader_is_reported_and_ended(number: signal.Signals, told: str) -> None:
    def read(step: int) -> tuple[torch.Tensor, ...]:
        if step == 3:
            os.kill(os.getpid(), number)
        return batch_of(step)

    ring = Ring(read, range(10), FORM, workers=2, slots_per_worker=2, pin=False, timeout_s=1.0)
    readers = list(ring._workers)
    begin = time.monotonic()
    with closing(ring), refuses(told):
        list(ring)
    assert time.monotonic() - begin < 10
    assert not any(reader.is_alive() for reader in readers)


def test_readers_ignore_what_asks_the_training_process_to_end() -> None:
    with ring_of(20, 2, 1, pin=False) as ring:
        next(ring)
        for reader in ring._workers:
            assert reader.pid is not None
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(reader.pid, number)
        assert len(list(ring)) == 19


def test_readers_killed_at_any_moment_never_hold_up_the_end() -> None:
    for _ in range(40):
        ring = Ring(batch_of, range(1000), FORM, workers=1, slots_per_worker=1, pin=False)
        next(ring)
        time.sleep(random.random() * 2e-3)
        ring._workers[0].kill()
        begin = time.monotonic()
        ring.close()
        assert time.monotonic() - begin < 5


@pytest.mark.slow
def test_readers_end_with_a_process_that_never_closes_its_ring(tmp_path: Path) -> None:
    program = "from tests.unit.data.test_ring import *; ring = Ring(batch_of, range(9), FORM, 2, 1, False); "
    program += "next(ring); print(*(reader.pid for reader in ring._workers), flush=True); "
    for end in ("", "os.kill(os.getpid(), signal.SIGKILL)"):
        done = subprocess.run([sys.executable, "-c", program + end], capture_output=True, text=True, timeout=30)
        readers = [Path(f"/proc/{pid}") for pid in done.stdout.split()]
        assert len(readers) == 2, done.stderr
        wait_until(lambda readers=readers: not any(reader.exists() for reader in readers), 5, "readers live on")


@pytest.mark.gpu
@pytest.mark.parametrize("run_ahead", [1, 4])
def test_copies_to_the_gpu_end_before_their_memory_is_used_again(run_ahead: int) -> None:
    """Large batches, few slots, and a delayed copy stream: what arrives must be what was read."""
    form = form_of(200_000, 13, tables=1, max_ids=10)

    def read(step: int) -> tuple[torch.Tensor, ...]:
        lengths = torch.full((200_000,), 10, dtype=torch.int32)
        values = torch.full((2_000_000,), step, dtype=torch.int32)
        return torch.full((200_000, 13), float(step)), lengths, values, torch.full((200_000,), 1.0)

    device, stream = torch.device("cuda"), torch.cuda.Stream()
    ring = Ring(read, range(60), form, workers=3, slots_per_worker=run_ahead, pin=True)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    with torch.cuda.stream(stream):
        for step, (tensors, lease) in enumerate(ring):
            torch.cuda._sleep(3_000_000)  # about 1.5 ms in which the copies after it cannot start
            batch = Batch.from_tensors(*tensors)
            batch.lease = lease
            arrived = batch.to(device, non_blocking=True)
            del batch, tensors, lease
            wrong += (arrived.dense != step).sum() + (arrived.sparse.values() != step).sum()
    ring.close()
    assert wrong.item() == 0


def test_tensors_of_a_slot_begin_where_a_kernel_reads_16_bytes_at_a_time() -> None:
    with closing(Ring(lambda _: (), range(0), [((7,), torch.uint8), ((50, 20), torch.uint8)], 1, 3, False)) as ring:
        assert all(tensor.storage_offset() % 16 == 0 for slot in ring._slots for tensor in slot)
        assert ring._slots[2][1].shape == (50, 20)
