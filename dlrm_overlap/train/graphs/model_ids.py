"""The ids that a model's embedding modules look up."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.ids import IdTables
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.id_sender import IdSender
from dlrm_overlap.embedding.steps import weights_of
from dlrm_overlap.embedding.torchrec_tables import TorchRecTables
from dlrm_overlap.torchrec_private import maybe_td_to_kjt
from dlrm_overlap.train.graphs.static_batch import StaticBatch

log = logging.getLogger("dlrm_overlap")


class ModelIds:
    """Sends the ids of a static batch to the owners of their rows, for all modules of a model."""

    def __init__(self, modules: Sequence[ExchangingModule[Any]], order: CommunicationOrder) -> None:
        self._modules, self._order, self._is_steady = modules, order, False
        self.unpooled_features = {feature for module in modules for feature in module.unpooled_features}
        self.sent_ahead: list[tuple[IdSender, str]] = []
        """senders whose ids are in the batch, each with the path of its ids in the batch"""
        self._torchrec: list[tuple[TorchRecTables, str]] = []
        self.block_capture = False
        """True if the model computes ids that the host needs before a graph's launch: those of tables that stay with
        TorchRec, or whose `IdTables` wait"""
        self.are_sent = False
        """True if the ids of the next step were sent"""
        self._loads = 0

    @property
    def senders(self) -> list[IdSender]:
        return [module.sender for module in self._modules if module.sender is not None]

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Return a context in which every step has the same batch size on each rank as the first step."""
        self._set_steady(True)
        try:
            yield
        finally:
            self._set_steady(False)

    def _set_steady(self, is_steady: bool) -> None:
        self._is_steady = is_steady
        for sender in self.senders:
            sender.is_steady = is_steady

    def send(self, batch: StaticBatch) -> None:
        for sender, path in self.sent_ahead:
            ids = batch.ids[path]
            sender.send(ids.tensor, ids.count)
        self.are_sent = True

    @property
    def id_tables(self) -> list[IdTables]:
        exchanges = (sender.exchange for sender in self.senders)
        return [each.id_tables for each in exchanges if each.id_tables is not None]

    def prepare_step(self) -> None:
        """Do on the host what tables of any id need between the arrival of a step's ids and the step."""
        for sender, _ in self.sent_ahead:
            if sender.exchange.id_tables is not None:
                sender.exchange.id_tables.prepare_step()

    def forget(self) -> None:
        for sender in self.senders:
            sender.forget()
        self.are_sent = False

    def follow_loads(self) -> None:
        """Forget ids that were sent if tables of any id were loaded since, whose rows they had."""
        if (loads := sum(module.loads for module in self._modules)) != self._loads:
            self._loads = loads
            self.forget()

    def torchrec_tables(self, batch: StaticBatch) -> list[tuple[TorchRecTables, KeyedJaggedTensor]]:
        return [(tables, batch.ids[path].tensor) for tables, path in self._torchrec]

    def forget_memory(self) -> None:
        for tables, _ in self._torchrec:
            tables.forget_memory()

    @contextmanager
    def finding(self, batch: StaticBatch, capacity: BatchCapacity) -> Iterator[None]:
        """Return a context for the first step, which makes each module's sender and finds its ids in the batch.

        Raises:
            InputError: if the model calls a module twice.
        """
        found = set[nn.Module]()

        def find(entry: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            module = of_entry[entry]
            features = maybe_td_to_kjt(*inputs, *keywords.values())
            if module in found:
                raise InputError(
                    "GraphTrainPipeline: the model calls an embedding collection twice in a step, and captured steps "
                    "send its ids once; give all ids to one call, or use TorchRec's pipeline"
                )
            found.add(module)
            path = batch.path_of(features)
            # Distinct ids are only counted for ids that are in the batch.
            largest = capacity if path is not None else replace(capacity, distinct={})
            module.take_ids(features.keys(), largest, self._order, weights_of(features) is not None)
            if module.sender is not None:
                module.sender.is_steady = self._is_steady
            if path is not None:
                self.sent_ahead += [(module.sender, path)] if module.sender is not None else []
                self._torchrec += [(module.torchrec_tables, path)] if module.torchrec_tables is not None else []
            else:
                tables = module.exchange.id_tables if module.exchange is not None else None
                self.block_capture |= module.torchrec_tables is not None or (tables is not None and tables.waits)
                log.info("train pipeline: ids that the model makes itself are sent in their own step, none ahead")

        # A first step that failed may have found some.
        self.sent_ahead.clear()
        self._torchrec.clear()
        of_entry = {module.entry: module for module in self._modules}
        hooks = [entry.register_forward_pre_hook(find, with_kwargs=True) for entry in of_entry]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
