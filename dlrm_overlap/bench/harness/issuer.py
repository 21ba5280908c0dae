"""Issues a computation and a communication that do not depend on each other, by the strategies that the machine has.

Agrawal, Aga, Pati and Islam (ConCCL, ISPASS) name most strategies: plain concurrency, prioritisation by the order of
issue and by streams, partitions of the multiprocessors, and copies by DMA engines.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.communications import Communication
from dlrm_overlap.comm.every_rank import on_every_rank
from dlrm_overlap.config import InputError

log = logging.getLogger("dlrm_overlap")


@dataclass(frozen=True)
class Strategy:
    """One way to issue both."""

    name: str
    implementation: str | None
    """of the communication; None: the one that is fastest alone"""
    concurrent: bool = True
    first: bool = True
    """whether the communication is issued before the computation"""
    urgent: bool = False
    """whether the communication's stream has a high priority, the computation's a low one"""
    partition: int | None = None
    """multiprocessors that are the communication's own, by two green contexts"""
    carved: int | None = None
    """multiprocessors that cuBLAS leaves free, which binds neither side"""


LIMITED = 28
"""thread blocks that NCCL is limited to, and multiprocessors that they have, in a partition"""
STRATEGIES = (
    Strategy("serial", None, concurrent=False, first=False),
    Strategy("plain", "collective", first=False),
    Strategy("priority", "collective", urgent=True),
    Strategy(f"partition_{LIMITED}", "limited", partition=LIMITED),
    Strategy("stores_apart", "stores", urgent=True),
    Strategy("dma_apart", "dma", urgent=True),
    Strategy("dma_carved_4", "dma", urgent=True, carved=4),
    Strategy("dma_partition_12", "dma", partition=12),
)
_ON_CPU = ("serial", "plain", "dma_apart")  # which has no streams or multiprocessors to share


class Partition(NamedTuple):
    """A GPU cut in two. Its contexts live as long as the process."""

    computation: torch.cuda.Stream
    communication: torch.cuda.Stream


def make_partition(device: torch.device, sms: int) -> Partition:
    """Leave about `sms` multiprocessors of `device` to a communication, and the others to a computation.

    Multiprocessors come in groups, of 8 on an H100: of its 132, one who asks for 12 leaves 120, for 10 alike.

    Source: CUDA driver API, section "Green Contexts".

    Raises:
        InputError: if the machine cannot do that.
    """
    try:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("green contexts: cuda.bindings is missing; pip install cuda-python") from None

    def call(name: str, *arguments: Any) -> Any:
        function = getattr(driver, name, None)
        if function is None:
            raise InputError(f"green contexts: cuda.bindings has no {name}; take a newer cuda-python")
        status, *found = function(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise InputError(f"green contexts: {name} gives {status.name}; take a newer driver")
        return found[0] if len(found) == 1 else found

    index = torch.device(device).index
    handle = call("cuDeviceGet", index)
    whole = call("cuDeviceGetDevResource", handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    groups, count, rest = call("cuDevSmResourceSplitByCount", 1, whole, 0, whole.sm.smCount - sms)
    if count != 1 or not rest.sm.smCount:
        raise InputError(f"green contexts: {whole.sm.smCount} multiprocessors cannot be cut at {sms}; leave more")
    streams = []
    for resource in (groups[0], rest):
        description = call("cuDevResourceGenerateDesc", [resource], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call("cuGreenCtxCreate", description, handle, flags)
        stream = call("cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
        streams.append(torch.cuda.ExternalStream(int(stream), device=device))
    return Partition(*streams)


class Issuer:
    """Issues computations and communications by strategies, on streams of its own; on a CPU from one thread."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Make the streams and partitions; `strategies` then has those that are possible here. A collective."""
        self._cuda, self._device = device.type == "cuda", device
        self._partitions: dict[int, Partition] = {}
        self.strategies = [each for each in STRATEGIES if self._cuda or each.name in _ON_CPU]
        if not self._cuda:
            return
        least, most = torch.cuda.Stream.priority_range()  # pyright: ignore[reportCallIssue]
        self._computing = torch.cuda.Stream(device, priority=least)
        self._sending = torch.cuda.Stream(device, priority=least)
        self._urgent = torch.cuda.Stream(device, priority=most)
        try:
            for sms in {each.partition for each in self.strategies if each.partition}:
                self._partitions[sms] = on_every_rank(lambda sms=sms: make_partition(device, sms), group)
        except InputError as error:
            log.warning("bench concurrent: without partitions: %s", error)
            self.strategies = [each for each in self.strategies if not each.partition]

    def stream(self) -> AbstractContextManager[object]:
        """Return a context in which the current stream is one of the least priority.

        Timed work belongs on it: a computation then stays on the stream that it has alone, but for partitions.
        """
        return torch.cuda.stream(self._computing) if self._cuda else nullcontext()

    def issue(self, strategy: Strategy, compute: Callable[[], object], communication: Communication) -> None:
        """Issue both; the current stream waits for both in the end.

        The computation is issued on the current stream, but under a partition. The communication begins and ends on a
        stream of its own, so that no kernel that waits for a peer is in the computation's way.
        """
        if not self._cuda:
            wait = communication.begin() if strategy.first else None
            compute()
            (wait or communication.begin())()
            return
        main = torch.cuda.current_stream(self._device)
        computing = sending = main
        if strategy.partition:
            computing, sending = self._partitions[strategy.partition]
        elif strategy.concurrent:
            sending = self._urgent if strategy.urgent else self._sending
        beside = {computing, sending} - {main}
        for stream in beside:
            stream.wait_stream(main)

        def communicate() -> None:
            with torch.cuda.stream(sending):
                communication.run()

        sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        if strategy.first:
            communicate()
        with torch.cuda.stream(computing), products_on(sms - strategy.carved if strategy.carved else None):
            compute()
        if not strategy.first:
            communicate()
        for stream in beside:
            main.wait_stream(stream)


@contextmanager
def products_on(multiprocessors: int | None) -> Iterator[None]:
    """Let cuBLAS's products that this thread issues meanwhile take so many multiprocessors, or all of them if None.

    A product takes one program a multiprocessor, all at once. Where a kernel holds some, the product's last programs
    start when the first end, and it takes twice as long; given a smaller number, it is cut for that. On an H200 the
    gradient of three weights of [3456, 512] from 8192 samples takes 121 us alone, 217 beside 11 programs that copy, and
    142 on 116 of 132 multiprocessors beside them. Can be captured. Source: resource partitioning, ConCCL (Agrawal et
    al., ISPASS).

    Raises:
        InputError: if there is no cuBLAS that takes such a number.
    """
    if multiprocessors is None:
        yield
        return
    _set(multiprocessors)
    try:
        yield
    finally:
        _set(0)  # all


def _set(multiprocessors: int) -> None:
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    status = _library().cublasSetSmCountTarget(handle, ctypes.c_int(multiprocessors))
    if status != 0:
        raise InputError(
            f"bench concurrent: cuBLAS returned {status} for {multiprocessors} multiprocessors; take the torch that "
            f"`doctor` names"
        )


@lru_cache
def _library() -> ctypes.CDLL:
    """Return the cuBLAS that torch has loaded."""
    name = f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)
        library.cublasSetSmCountTarget  # noqa: B018  it is looked up when it is named
    except (OSError, AttributeError) as error:
        raise InputError(
            f"bench concurrent: {error}, which carved strategies need; take the torch that `doctor` names"
        ) from None
    return library
