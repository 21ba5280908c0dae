"""Batches that are read ahead of the steps, the ids that are sent ahead of them, and the streams of both."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection
from dlrm_overlap.embedding.steps import weights_of
from dlrm_overlap.embedding.stock import StockTables
from dlrm_overlap.train.graphs.static_batch import IdCuts, StaticBatch

log = logging.getLogger("dlrm_overlap")


class Streams:
    """The streams of a pipeline on one device; on a CPU everything runs in the order in which it is issued."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu:
            return
        current = torch.cuda.current_stream(device)
        # A step cannot be captured on the default stream, and all steps run on the one where they are captured.
        self.main_stream = current if current != torch.cuda.default_stream(device) else torch.cuda.Stream(device)
        self._device = device
        self._copy = torch.cuda.Stream(device)
        self._ids = torch.cuda.Stream(device, priority=-2)
        self._issued = [torch.cuda.Event() for _ in range(2)]
        self._called, self._copied = torch.cuda.Event(), torch.cuda.Event()

    @contextmanager
    def _main(self) -> Any:
        current = torch.cuda.current_stream(self._device)
        self._called.record(current)
        if current == self.main_stream:
            yield
            return
        self.main_stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.main_stream):
                yield
        finally:  # whoever catches an error may read the weights next
            current.wait_stream(self.main_stream)

    def main(self) -> AbstractContextManager[Any]:
        """Return a context on the steps' stream, which waits for the caller's; at its end the other way."""
        return self._main() if self._on_gpu else nullcontext()

    def step_is_issued(self, parity: int) -> None:
        """Note that all readers of the other parity's landing memory have been issued."""
        if self._on_gpu:
            self._issued[parity].record(self.main_stream)

    @contextmanager
    def _copies(self, parity: int) -> Any:
        self._copy.wait_event(self._issued[1 - parity])
        self._copy.wait_event(self._called)
        with torch.cuda.stream(self._copy):
            yield
            self._copied.record(self._copy)
        self.main_stream.wait_event(self._copied)

    def copies(self, parity: int) -> AbstractContextManager[Any]:
        """Return a context for copies to the landing place of `parity`; steps issued after it find them done.

        Copies come after the caller's earlier work on the device, such as the batch itself.
        """
        return self._copies(parity) if self._on_gpu else nullcontext()

    @contextmanager
    def _beside(self) -> Any:
        self._ids.wait_stream(self.main_stream)
        with torch.cuda.stream(self._ids):
            yield

    def ids(self) -> AbstractContextManager[Any]:
        """Return a context for work beside the step, until `join_ids`."""
        return self._beside() if self._on_gpu else nullcontext()

    def join_ids(self) -> None:
        """Make the steps' stream wait for the work beside it."""
        if self._on_gpu:
            self.main_stream.wait_stream(self._ids)


class ReadAhead:
    """Takes batches to where the steps read them, and their ids to the owners of the rows, while earlier steps run.

    Batch i and step i have the parity i mod 2. Each parity has two places on the device, whose addresses stay:

        landing place    batch i + 2 is copied here from the host, once step i has been issued
        working place    the batch is copied on to here, beside step i + 1; step i + 2 reads it, and its ids are sent
    """

    def __init__(
        self,
        modules: Sequence[OverlapShardedEmbeddingBagCollection],
        device: torch.device,
        bound: BatchBound,
        streams: Streams,
        order: CommunicationOrder,
    ) -> None:
        """Take the modules whose ids are sent, the bound of the batches, and the order of a captured step."""
        self._modules, self._device, self._bound, self._streams, self._order = modules, device, bound, streams, order
        self._landing: list[StaticBatch] = []
        self._working: list[StaticBatch] = []
        self._senders: list[tuple[Exchange, int]] = []
        """the exchanges whose ids are sent a step ahead, and which leaf of the batch those are"""
        self._stock: list[tuple[StockTables, int]] = []
        self.made_in_model = False
        """whether the model itself makes ids of tables that stay with TorchRec, which it needs before a graph"""
        self.ids_are_sent = False
        """whether the ids of the next step are under way"""
        self.reset()

    def reset(self) -> None:
        """Forget batches and ids that were read and sent for steps that have not been taken."""
        self._held, self._exhausted = [False, False], False
        self.forget_sent_ids()

    def holds(self, parity: int) -> bool:
        """Return whether a batch of `parity` was read whose step has not been taken."""
        return self._held[parity]

    def batch(self, parity: int) -> Any:
        """Return the batch that the steps of `parity` read, made of tensors that stay."""
        return self._working[parity].batch

    def begin(self, batches: Iterator[Any], parity: int) -> None:
        """Read the next two batches while nothing is held; the first one, of `parity`, is brought in.

        Raises:
            StopIteration: if there is none.
        """
        self._exhausted = False
        self.land(batches, parity)
        if not self._held[parity]:
            raise StopIteration
        self.land(batches, 1 - parity)
        self._take_over(parity)
        self._streams.step_is_issued(1 - parity)

    def land(self, batches: Iterator[Any], parity: int) -> None:
        """Copy the next batch, if there is one, to the landing place of `parity`."""
        with self._streams.copies(parity):
            batch = None if self._exhausted else next(batches, None)
            self._exhausted = batch is None
            if batch is None:
                return
            if not self._landing:
                cuts = IdCuts()
                static = [StaticBatch(batch, self._device, self._bound, cuts) for _ in range(4)]
                self._landing, self._working = static[:2], static[2:]
            self._landing[parity].fill(batch)
        self._held[parity] = True

    def bring_in(self, parity: int) -> None:
        """Copy the batch of `parity` from its landing to its working place, and send its ids."""
        self._take_over(parity)
        self.send_ids(parity)

    def _take_over(self, parity: int) -> None:
        self._working[parity].copy_from(self._landing[parity])
        self._working[parity].renew()

    def release(self, parity: int) -> None:
        """Note that the step on the batch of `parity` has been issued."""
        self._streams.step_is_issued(parity)
        self._held[parity] = False

    def send_ids(self, parity: int) -> None:
        """Send the ids of the batch at the working place of `parity` to the owners of their rows."""
        for exchange, index in self._senders:
            ids = self._working[parity].ids(index)
            exchange.send_ids(ids.tensor, ids.count)
        self.ids_are_sent = True

    def stock_tables(self, parity: int) -> list[tuple[StockTables, KeyedJaggedTensor]]:
        """Return the tables that stay with TorchRec, each with its ids in the batch of `parity`."""
        return [(tables, self._working[parity].ids(index).tensor) for tables, index in self._stock]

    def forget_sent_ids(self) -> None:
        """Forget ids that were sent for a step that does not come next."""
        for module in self._modules:
            if module.exchange is not None:
                module.exchange.forget_sent_ids()
        self.ids_are_sent = False

    def sends(self, exchange: Exchange) -> bool:
        """Return whether the ids of `exchange` are sent a step ahead."""
        return any(sender is exchange for sender, _ in self._senders)

    @contextmanager
    def finding_ids(self) -> Iterator[None]:
        """Let the modules take ids, once they are given some, and find out which of the batch's they are given.

        Raises:
            InputError: if the model calls a module twice.
        """
        found = set[nn.Module]()

        def find(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            assert isinstance(module, OverlapShardedEmbeddingBagCollection)
            (features,) = (*inputs, *keywords.values())
            if module in found:
                raise InputError(
                    "GraphTrainPipeline: the model calls an embedding collection twice in a step, and captured steps "
                    "send its ids once; give all ids to one call, or use TorchRec's pipeline"
                )
            found.add(module)
            module.take_ids(features.keys(), self._bound, self._order, weights_of(features) is not None)
            index = next((i for batch in self._working if (i := batch.find(features)) is not None), None)
            if index is not None:
                self._senders += [(module.exchange, index)] if module.exchange is not None else []
                self._stock += [(module.stock, index)] if module.stock is not None else []
            else:
                self.made_in_model |= module.stock is not None
                log.info("train pipeline: ids that the model makes itself are sent in their own step, none ahead")

        self._senders.clear()  # of a first step that failed
        self._stock.clear()
        hooks = [module.register_forward_pre_hook(find, with_kwargs=True) for module in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
