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
from dlrm_overlap.embedding.stock import StockTables
from dlrm_overlap.train.graphs.bounds import Answer, LearntBound, ended
from dlrm_overlap.train.graphs.static_batch import Leaves, StaticBatch, on_device, with_even_batches_of

log = logging.getLogger("dlrm_overlap")


@dataclass
class Held:
    """A batch that waits for its step, or the end of them."""

    batch: Leaves | None
    """as it was read; None where it has been copied, and where there is none"""
    place: StaticBatch | None
    """where it is copied to if a captured step takes it"""
    answer: Answer
    """what all ranks bring to the step"""
    is_captured: bool | None = None
    """whether a captured step takes it, on all ranks, once that is known"""


class ReadAhead:
    """Takes batches to where the steps read them, and their ids to the owners of the rows, while earlier steps run.

    Batch i and step i have the parity i mod 2. Each parity has two places on the device, whose addresses stay:

        landing place    batch i + 2 is copied here from the host, once step i has been issued
        working place    the batch is copied on to here, beside step i + 1; step i + 2 reads it, and its ids are sent
    """

    def __init__(
        self,
        modules: Sequence[ExchangingModule[Any]],
        device: torch.device,
        bound: LearntBound,
        streams: Streams,
        order: CommunicationOrder,
    ) -> None:
        """Take the modules whose ids are sent, the bound of the batches, and the order of a captured step."""
        self._modules, self._device, self._bound, self._streams, self._order = modules, device, bound, streams, order
        self.unpooled_features = {feature for module in modules for feature in module.unpooled_features}
        self._landing: list[StaticBatch] = []
        self._working: list[StaticBatch] = []
        self._senders: list[tuple[Exchange, str]] = []
        """the exchanges whose ids are sent a step ahead, and the place of those in the batch"""
        self._stock: list[tuple[StockTables, str]] = []
        self.made_in_model = False
        """whether the model itself makes ids of tables that stay with TorchRec, which it needs before a graph"""
        self.ids_are_sent = False
        """whether the ids of the next step are under way"""
        self._told: set[str] = set()
        """parts of batches that were found to differ"""
        self.reset()

    def reset(self) -> None:
        """Forget batches and ids that were read and sent for steps that have not been taken."""
        self._held: list[Held | None] = [None, None]
        self.is_exhausted = False
        """whether this rank has read its last batch"""
        self.forget_sent_ids()

    def find(self, parity: int) -> Held | None:
        """Return the batch of `parity` that waits for its step, None if a rank has none; may wait for the ranks."""
        held = self._held[parity]
        if held is not None and held.is_captured is None:
            numbers = held.answer.wait()
            if ended(numbers):
                if held.place is not None:
                    log.warning("train pipeline: a batch is left out, since another rank has no more")
                self._held[parity] = None
                return None
            held.is_captured = self._bound.are_captured(numbers)
            if held.is_captured and held.batch is not None:
                assert held.place is not None
                with self._streams.copies(parity, later=True):  # beside the step before
                    held.place.fill(held.batch)
        return held

    def settle(self, parity: int) -> None:
        """Copy the batch of `parity` to where a replay reads it, where its ids were not counted on the CPU."""
        if (held := self._held[parity]) is not None and held.batch is not None:
            self.find(parity)

    def is_captured(self, parity: int) -> bool:
        """Return whether every rank has a batch of `parity` that a captured step takes; may wait for the ranks."""
        return (held := self.find(parity)) is not None and bool(held.is_captured)

    def batch(self, parity: int, exact: bool = True) -> Any:
        """Return the batch of `parity` on the device.

        Args:
            exact: return ids without room behind them, as eager steps read them. Otherwise a batch that a captured step
                takes is made of tensors that stay.
        """
        held = self._held[parity]
        assert held is not None
        if held.is_captured:
            return self._working[parity].exact() if exact else self._working[parity].batch
        if held.batch is not None:
            return on_device(held.batch.batch, self._device)
        assert held.place is not None
        held.place.renew()
        return held.place.exact() if exact else held.place.batch

    def make_room(self, numbers: np.ndarray) -> None:
        """Let the bound grow to batches of such greatest numbers; see `forget_places`."""
        self.forget_places()
        self._bound.grow(numbers)
        self._take_bound()

    def forget_places(self) -> None:
        """Let the next batch be the first of others like it. Batches that are held are taken as they are."""
        for held in map(self.find, range(2)):
            if held is not None:
                held.is_captured = False
        self._landing, self._working = [], []
        self.forget_sent_ids()
        for stock, _ in self._stock:
            stock.forget_memory()

    def _take_bound(self) -> None:
        """Make windows by the bound, where they are made by another one; all ranks do so."""
        if all(exchange.bound in (None, self._bound.bound) for exchange in self.exchanges):
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._bound.agreement.any_is(False)  # no rank gives its windows back while another reads them
        for exchange in self.exchanges:
            exchange.take_bound(self._bound.bound)

    def begin(self, batches: Iterator[Any], parity: int) -> None:
        """Read the next two batches while nothing is held, the first one of `parity`.

        Raises:
            StopIteration: if a rank has none.
        """
        self.reset()
        self.land(batches, parity)
        self.land(batches, 1 - parity)
        if self.find(parity) is None:
            raise StopIteration

    def land(self, batches: Iterator[Any], parity: int) -> None:
        """Copy the next batch, if there is one, to the landing place of `parity`, and ask what all ranks bring with it.

        Where there are no places, they are made like this batch, for which all ranks wait.
        """
        with self._streams.copies(parity):
            given = None if self.is_exhausted else next(batches, None)
            self.is_exhausted = given is None
            batch = None if given is None else with_even_batches_of(given, self.unpooled_features)
            if not self._landing and not self._make_places(batch):
                self.is_exhausted = True
                return
            if batch is None:
                self._held[parity] = Held(None, None, self._bound.ask(None))
                return
            place = self._landing[parity]
            unlike, described = place.why_not(batch), self._bound.describe(batch)
            lands = unlike is None and self._bound.is_within(described)
            if lands:
                place.fill(batch)
            answer = self._bound.ask(
                described,
                [each.tensor for each in place.ids.values()] if lands else batch.ids,
                unlike=unlike is not None,
            )
            if not lands and not (unlike is None and described.are_pending):
                batch = batch.kept()  # its step is eager
            self._held[parity] = Held(None if lands else batch, place, answer)
            if unlike is not None and unlike.needs_word and unlike.path not in self._told:
                self._told.add(unlike.path)
                log.warning("train pipeline: the step of such a batch is eager: %s", unlike.reason)

    def _make_places(self, example: Leaves | None) -> bool:
        """Make places for batches like `example`, if every rank has one; return whether it has."""
        if not self._bound.learn(example) or example is None:
            return False
        self._take_bound()
        static = [StaticBatch(example.batch, self._device, self._bound.bound) for _ in range(4)]
        self._landing, self._working = static[:2], static[2:]
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

    def bring_in(self, parity: int) -> None:
        """Copy the batch of `parity` from its landing to its working place, and send its ids."""
        self._working[parity].take_over(self._landing[parity])
        self.send_ids(parity)

    def bring_back(self, parity: int) -> None:
        """Copy the batch of `parity` to its working place in its own step, where the step before has not."""
        self._working[parity].take_over(self._landing[parity])
        self._streams.step_is_issued(1 - parity)

    def release(self, parity: int) -> None:
        """Note that the step on the batch of `parity` has been issued."""
        self._streams.step_is_issued(parity)
        self._held[parity] = None

    def send_ids(self, parity: int) -> None:
        """Send the ids of the batch at the working place of `parity` to the owners of their rows."""
        for exchange, place in self._senders:
            ids = self._working[parity].ids[place]
            exchange.send_ids(ids.tensor, ids.count)
        self.ids_are_sent = True

    def stock_tables(self, parity: int) -> list[tuple[StockTables, KeyedJaggedTensor]]:
        """Return the tables that stay with TorchRec, each with its ids in the batch of `parity`."""
        return [(tables, self._working[parity].ids[place].tensor) for tables, place in self._stock]

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
            place = next((at for batch in self._working if (at := batch.find(features)) is not None), None)
            bound = self._bound.bound
            if place is None:  # of these ids nobody has counted the distinct ones
                bound = replace(bound, distinct={})
            module.take_ids(features.keys(), bound, self._order, weights_of(features) is not None)
            if place is not None:
                self._senders += [(module.exchange, place)] if module.exchange is not None else []
                self._stock += [(module.stock, place)] if module.stock is not None else []
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
