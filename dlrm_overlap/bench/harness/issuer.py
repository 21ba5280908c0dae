"""Issues a computation and a communication that do not depend on each other, by the strategies that the machine has."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.concurrent_strategies import COPY_SHARES, SHARES, Strategy
from dlrm_overlap.bench.harness.communications import Communication
from dlrm_overlap.bench.harness.timing import capture
from dlrm_overlap.comm.every_rank import on_every_rank
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.cast import products_on

log = logging.getLogger("dlrm_overlap")


class Partition(NamedTuple):
    """A GPU cut in two. Its contexts live as long as the process."""

    computation: torch.cuda.Stream
    communication: torch.cuda.Stream
    sms: int
    """multiprocessors of the communication"""


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
        raise InputError(
            f"green contexts: {whole.sm.smCount} multiprocessors cannot be cut into {whole.sm.smCount - sms} and "
            f"{sms}; leave more to the communication"
        )
    streams = []
    for resource in (groups[0], rest):
        description = call("cuDevResourceGenerateDesc", [resource], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call("cuGreenCtxCreate", description, handle, flags)
        stream = call("cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
        streams.append(torch.cuda.ExternalStream(int(stream), device=device))
    return Partition(streams[0], streams[1], rest.sm.smCount)


class Issuer:
    """Issues computations and communications by strategies, on streams of its own; on a CPU from one thread."""

    def __init__(
        self, strategies: Sequence[Strategy], group: dist.ProcessGroup, device: torch.device, captured: bool = False
    ) -> None:
        """Make the streams and partitions, and log which the machine lacks. All ranks of `group` call this.

        Args:
            strategies: those that are asked for; `strategies` then has those of them that are possible here.
            group: of the communications.
            device: of this rank.
            captured: whether the strategies are to be captured in a CUDA graph, too, before they are found possible.
        """
        self._cuda, self._device, self._captured = device.type == "cuda", device, captured
        self._partitions: dict[int, Partition] = {}
        self._tried: set[str] = set()
        self.strategies = list(strategies)
        if not self._cuda:
            log.info("bench concurrent: a CPU has no streams or multiprocessors to share; left are serial, plain, dma")
            self.strategies = [each for each in self.strategies if each.name in ("serial", "plain", "dma")]
            return
        least, most = torch.cuda.Stream.priority_range()  # pyright: ignore[reportCallIssue]
        self._computing = torch.cuda.Stream(device, priority=least)
        self._sending = torch.cuda.Stream(device, priority=least)
        self._urgent = torch.cuda.Stream(device, priority=most)
        if not any(each.partitioned for each in self.strategies):
            return
        try:
            for share in sorted({*SHARES, *COPY_SHARES}):
                self._partitions[share] = on_every_rank(lambda share=share: make_partition(device, share), group)
        except InputError as error:
            log.warning("bench concurrent: without partitions: %s", error)
            self.strategies = [each for each in self.strategies if not each.partitioned]

    def stream(self) -> AbstractContextManager[object]:
        """Return a context in which the current stream is one of the least priority.

        Timed work belongs on it: a computation then stays on the stream that it has alone, but for partitions.
        """
        return torch.cuda.stream(self._computing) if self._cuda else nullcontext()

    @torch.no_grad()
    def possible(self, by_name: Mapping[str, Communication], group: dist.ProcessGroup) -> list[Strategy]:
        """Return the strategies whose implementation is in `by_name`, and that raise no error here.

        Each is tried once; one that the machine refuses is logged, and left out from then on. A collective.
        """
        kept = []
        for strategy in list(self.strategies):
            communication = by_name.get(strategy.implementation or "collective")
            if communication is None:
                continue
            if strategy.label not in self._tried:
                self._tried.add(strategy.label)
                try:
                    on_every_rank(partial(self._try, strategy, communication), group)
                except InputError as error:
                    log.warning("bench concurrent: without %s: %s", strategy.label, error)
                    self.strategies.remove(strategy)
                    continue
            kept.append(strategy)
        return kept

    def _try(self, strategy: Strategy, communication: Communication) -> None:
        """Run `strategy` with a small computation.

        Raises:
            InputError: if the machine refuses.
        """
        try:
            square = torch.ones(256, 256, device=self._device)
            piece = partial(self.issue, strategy, lambda: square @ square, communication)
            (capture(piece, self._device) if self._captured else piece)()
            if self._cuda:
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise InputError(f"{strategy.label}: {str(error).partition(chr(10))[0]}") from error

    def sms(self, strategy: Strategy) -> int | None:
        """Return the multiprocessors that `strategy` leaves to the communication, or None."""
        if strategy.partitioned and strategy.share is not None:
            return self._partitions[strategy.share].sms
        return strategy.share if strategy.carved else None

    def issue(self, strategy: Strategy, compute: Callable[[], object], communication: Communication) -> None:
        """Issue both; the current stream waits for both in the end.

        The computation is issued on the current stream, but under a partition. A communication that has streams of its
        own begins and ends there, too, as in a training step, so that no kernel that waits for a peer is in the
        computation's way. One that is issued `aside` only ends there, one `apart` does neither.
        """
        if not self._cuda:
            compute_first = not (strategy.concurrent and strategy.communication_first)
            order = (compute, communication.begin) if compute_first else (communication.begin, compute)
            for part in (*order, communication.finish):
                part()
            return
        main = torch.cuda.current_stream(self._device)
        computing, sending = self._streams(strategy, communication, main)
        for stream in {computing, sending} - {main}:
            stream.wait_stream(main)

        def begin() -> None:
            with torch.cuda.stream(sending):
                communication.begin()
                if strategy.apart:
                    communication.finish()

        if strategy.communication_first and strategy.concurrent:
            begin()
        with torch.cuda.stream(computing), products_on(self._left_to_products(strategy)):
            compute()
        if not (strategy.communication_first and strategy.concurrent):
            begin()
        if sending != computing:
            computing.wait_stream(sending)
        if not strategy.apart:
            with torch.cuda.stream(computing):
                communication.finish()
        if computing != main:
            main.wait_stream(computing)

    def _left_to_products(self, strategy: Strategy) -> int | None:
        if not strategy.carved or strategy.share is None:
            return None
        return torch.cuda.get_device_properties(self._device).multi_processor_count - strategy.share

    def _streams(
        self, strategy: Strategy, communication: Communication, main: torch.cuda.Stream
    ) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams of the computation and of the communication."""
        if not strategy.concurrent:
            return main, main
        if strategy.partitioned:
            assert strategy.share is not None
            partition = self._partitions[strategy.share]
            return partition.computation, partition.communication
        if communication.forks and not strategy.aside:
            return main, main
        return main, self._urgent if strategy.urgent else self._sending
