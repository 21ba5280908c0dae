"""Batches that are read ahead of the steps, and the ids that are sent ahead of them."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from dlrm_overlap.comm.order import CommunicationOrder, Streams
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.steps import weights_of
from dlrm_overlap.embedding.torchrec_tables import TorchRecTables
from dlrm_overlap.train.graphs.capacity import CapacityTracker, PendingResult, ended
from dlrm_overlap.train.graphs.static_batch import BatchTensors, StaticBatch, on_device, with_even_batches_of

log = logging.getLogger("dlrm_overlap")


@dataclass
class PrefetchedBatch:
    """A batch that waits for its step, or the end of them."""

    batch: BatchTensors | None
    """as it was read; None where it has been copied, and where there is none"""
    place: StaticBatch | None
    """where it is copied to if a captured step takes it"""
    answer: PendingResult
    """what all ranks bring to the step"""
    is_captured: bool | None = None
    """whether a captured step takes it, on all ranks, once that is known"""


class InputPrefetcher:
    """Takes batches to where the steps read them, and their ids to the owners of the rows, while earlier steps run.

    Batch i and step i use buffer i mod 2. Each buffer has two parts on the device, whose addresses stay:

        staging part     batch i + 2 is copied here from the host, once step i has been issued
        active part      the batch is copied on to here, alongside step i + 1; step i + 2 reads it, and its ids are sent
    """

    def __init__(
        self,
        modules: Sequence[ExchangingModule[Any]],
        device: torch.device,
        bound: CapacityTracker,
        streams: Streams,
        order: CommunicationOrder,
    ) -> None:
        """Take the modules whose ids are sent, the bound of the batches, and the order of a captured step."""
        self._modules, self._device, self._capacity, self._streams, self._order = modules, device, bound, streams, order
        self.unpooled_features = {feature for module in modules for feature in module.unpooled_features}
        self._staging: list[StaticBatch] = []
        self._active: list[StaticBatch] = []
        self._senders: list[tuple[Exchange, str]] = []
        """the exchanges whose ids are sent a step ahead, and the place of those in the batch"""
        self._stock: list[tuple[TorchRecTables, str]] = []
        self.made_in_model = False
        """whether the model itself makes ids of tables that stay with TorchRec, which it needs before a graph"""
        self.ids_are_sent = False
        """whether the ids of the next step are under way"""
        self._told: set[str] = set()
        """parts of batches that were found to differ"""
        self.reset()

    def reset(self) -> None:
        """Forget batches and ids that were read and sent for steps that have not been taken."""
        self._held: list[PrefetchedBatch | None] = [None, None]
        self.is_exhausted = False
        """whether this rank has read its last batch"""
        self.forget_sent_ids()

    def find(self, buffer_index: int) -> PrefetchedBatch | None:
        """Return the batch in a buffer that waits for its step, None if a rank has none; may wait for the ranks."""
        held = self._held[buffer_index]
        if held is not None and held.is_captured is None:
            numbers = held.answer.wait()
            if ended(numbers):
                if held.place is not None:
                    log.warning("train pipeline: a batch is left out, since another rank has no more")
                self._held[buffer_index] = None
                return None
            held.is_captured = self._capacity.are_captured(numbers)
            if held.is_captured and held.batch is not None:
                assert held.place is not None
                with self._streams.copies(buffer_index, later=True):  # beside the step before
                    held.place.fill(held.batch)
        return held

    def ensure_staged(self, buffer_index: int) -> None:
        """Copy the batch of `buffer_index` to where a replay reads it, where its ids were not counted on the CPU."""
        if (held := self._held[buffer_index]) is not None and held.batch is not None:
            self.find(buffer_index)

    def is_captured(self, buffer_index: int) -> bool:
        """Return whether every rank has a batch in this buffer that a captured step takes; may wait for the ranks."""
        return (held := self.find(buffer_index)) is not None and bool(held.is_captured)

    def batch(self, buffer_index: int, exact: bool = True) -> Any:
        """Return the batch of `buffer_index` on the device.

        Args:
            exact: return ids without room behind them, as eager steps read them. Otherwise a batch that a captured step
                takes is made of tensors that stay.
        """
        held = self._held[buffer_index]
        assert held is not None
        if held.is_captured:
            return self._active[buffer_index].exact() if exact else self._active[buffer_index].batch
        if held.batch is not None:
            return on_device(held.batch.batch, self._device)
        assert held.place is not None
        held.place.renew()
        return held.place.exact() if exact else held.place.batch

    def make_room(self, numbers: np.ndarray) -> None:
        """Let the bound grow to batches of such greatest numbers; see `forget_places`."""
        self.forget_places()
        self._capacity.grow(numbers)
        self._take_bound()

    def forget_places(self) -> None:
        """Let the next batch be the first of others like it. Batches that are held are taken as they are."""
        for held in map(self.find, range(2)):
            if held is not None:
                held.is_captured = False
        self._staging, self._active = [], []
        self.forget_sent_ids()
        for stock, _ in self._stock:
            stock.forget_memory()

    def _take_bound(self) -> None:
        """Make windows by the bound, where they are made by another one; all ranks do so."""
        if all(exchange.bound in (None, self._capacity.capacity) for exchange in self.exchanges):
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._capacity.agreement.any_is(False)  # no rank gives its windows back while another reads them
        for exchange in self.exchanges:
            exchange.take_bound(self._capacity.capacity)

    def begin(self, batches: Iterator[Any], buffer_index: int) -> None:
        """Read the next two batches while nothing is held, the first one of `buffer_index`.

        Raises:
            StopIteration: if a rank has none.
        """
        self.reset()
        self.stage(batches, buffer_index)
        self.stage(batches, 1 - buffer_index)
        if self.find(buffer_index) is None:
            raise StopIteration

    def stage(self, batches: Iterator[Any], buffer_index: int) -> None:
        """Copy the next batch, if there is one, to the staging part of a buffer, and ask for the sizes on all ranks.

        Where there are no places, they are made like this batch, for which all ranks wait.
        """
        with self._streams.copies(buffer_index):
            given = None if self.is_exhausted else next(batches, None)
            self.is_exhausted = given is None
            batch = None if given is None else with_even_batches_of(given, self.unpooled_features)
            if not self._staging and not self._make_places(batch):
                self.is_exhausted = True
                return
            if batch is None:
                self._held[buffer_index] = PrefetchedBatch(None, None, self._capacity.ask(None))
                return
            place = self._staging[buffer_index]
            unlike, described = place.why_not(batch), self._capacity.describe(batch)
            lands = unlike is None and self._capacity.is_within(described)
            if lands:
                place.fill(batch)
            answer = self._capacity.ask(
                described,
                [each.tensor for each in place.ids.values()] if lands else batch.ids,
                unlike=unlike is not None,
            )
            if not lands and not (unlike is None and described.are_pending):
                batch = batch.kept()  # its step is eager
            self._held[buffer_index] = PrefetchedBatch(None if lands else batch, place, answer)
            if unlike is not None and unlike.needs_word and unlike.path not in self._told:
                self._told.add(unlike.path)
                log.warning("train pipeline: the step of such a batch is eager: %s", unlike.reason)

    def _make_places(self, example: BatchTensors | None) -> bool:
        """Make places for batches like `example`, if every rank has one; return whether it has."""
        if not self._capacity.learn(example) or example is None:
            return False
        self._take_bound()
        static = [StaticBatch(example.batch, self._device, self._capacity.capacity) for _ in range(4)]
        self._staging, self._active = static[:2], static[2:]
        for exchange in self.exchanges:
            exchange.begin_steady()
        return True

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchange of each module that has one."""
        return [module.exchange for module in self._modules if module.exchange is not None]

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Return a context for steps that are captured, and those like them: ranks need not agree on their samples."""
        for exchange in self.exchanges:
            exchange.steady = True
        try:
            yield
        finally:
            for exchange in self.exchanges:
                exchange.steady = False

    def activate(self, buffer_index: int) -> None:
        """Copy the batch of `buffer_index` from its staging to its active part, and send its ids."""
        self._active[buffer_index].take_over(self._staging[buffer_index])
        self.send_ids(buffer_index)

    def bring_back(self, buffer_index: int) -> None:
        """Copy the batch of `buffer_index` to its active part in its own step, where the step before has not."""
        self._active[buffer_index].take_over(self._staging[buffer_index])
        self._streams.step_is_issued(1 - buffer_index)

    def release(self, buffer_index: int) -> None:
        """Note that the step on the batch of `buffer_index` has been issued."""
        self._streams.step_is_issued(buffer_index)
        self._held[buffer_index] = None

    def send_ids(self, buffer_index: int) -> None:
        """Send the ids of the batch in the active part of `buffer_index` to the owners of their rows."""
        for exchange, place in self._senders:
            ids = self._active[buffer_index].ids[place]
            exchange.send_ids(ids.tensor, ids.count)
        self.ids_are_sent = True

    def stock_tables(self, buffer_index: int) -> list[tuple[TorchRecTables, KeyedJaggedTensor]]:
        """Return the tables that stay with TorchRec, each with its ids in the batch of `buffer_index`."""
        return [(tables, self._active[buffer_index].ids[place].tensor) for tables, place in self._stock]

    def forget_sent_ids(self) -> None:
        """Forget ids that were sent for a step that does not come next."""
        for exchange in self.exchanges:
            exchange.forget_sent_ids()
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
            assert isinstance(module, ExchangingModule)
            features = maybe_td_to_kjt(*inputs, *keywords.values())
            if module in found:
                raise InputError(
                    "GraphTrainPipeline: the model calls an embedding collection twice in a step, and captured steps "
                    "send its ids once; give all ids to one call, or use TorchRec's pipeline"
                )
            found.add(module)
            place = next((at for batch in self._active if (at := batch.find(features)) is not None), None)
            bound = self._capacity.capacity
            if place is None:  # of these ids nobody has counted the distinct ones
                bound = replace(bound, distinct={})
            module.take_ids(features.keys(), bound, self._order, weights_of(features) is not None)
            if place is not None:
                self._senders += [(module.exchange, place)] if module.exchange is not None else []
                self._stock += [(module.torchrec_tables, place)] if module.torchrec_tables is not None else []
            else:
                self.made_in_model |= module.torchrec_tables is not None
                log.info("train pipeline: ids that the model makes itself are sent in their own step, none ahead")

        self._senders.clear()  # of a first step that failed
        self._stock.clear()
        hooks = [module.register_forward_pre_hook(find, with_kwargs=True) for module in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
