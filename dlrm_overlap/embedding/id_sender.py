"""Sends the ids of this rank's samples to the owners of their rows."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.comm.order import uncompiled
from dlrm_overlap.embedding.backends.ids import ArrivedIds
from dlrm_overlap.embedding.exchange import Exchange, PooledAwaitable, others_are_sent, poison_on_error
from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout, joined
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.steps import Step, padded


class SentIds(NamedTuple):
    features: KeyedJaggedTensor
    arrived: ArrivedIds


class IdSender:
    """Sends the ids of this rank's samples to the owners of their rows, and starts the lookup of ids that have arrived.

    It replaces TorchRec's input_dist, and sends the ids of a step during the step before. The constructor is a
    collective: it allocates the windows of the exchange and of the ids. From then on the exchange looks up only ids
    from this sender.

    Args:
        exchange: looks up the ids.
        keys: features in the order of every batch, the same on all ranks.
        capacity: largest numbers of samples and ids in a batch, for which windows are allocated.
        layout: tables of the exchange, with replicated tables if the exchange looks them up; None is `exchange.layout`.
        replicated: replicated (data-parallel) tables; the exchange adds to the `.grad` of their weights.
        weighted: True if the ids of every batch on every rank have weights.
        mixes: see `IdLayout.mixes`.
        change_ids: changes the ids of each batch, not their number, before they are sent.

    Raises:
        InputError: on all ranks, if a feature is not in `capacity`, or a rank has no memory for the windows.
    """

    def __init__(
        self,
        exchange: Exchange,
        keys: Sequence[str],
        capacity: BatchCapacity,
        layout: Layout | None = None,
        replicated: ReplicatedTables | None = None,
        weighted: bool = False,
        mixes: bool = False,
        change_ids: Callable[[KeyedJaggedTensor], KeyedJaggedTensor] | None = None,
    ) -> None:
        self.exchange = exchange
        self._keys, self._replicated, self._weighted = list(keys), replicated, weighted
        self._mixes, self._change_ids = mixes, change_ids
        self._layout = joined(layout or exchange.layout)
        self._sent: deque[SentIds] = deque()
        self.is_steady = False
        """True while every step has the same batch size on each rank; otherwise the ranks gather their sizes in each
        step, for which the host waits"""
        self._steady_samples: int | None = None
        self.set_capacity(capacity)

    def set_capacity(self, capacity: BatchCapacity) -> None:
        """Make the windows again for batches of another capacity; a collective, while no rank is in a step."""
        self.capacity = capacity
        self.exchange.receive_ids(self._id_layout(capacity), self._replicated, self._sent)

    def _id_layout(self, capacity: BatchCapacity) -> IdLayout:
        return IdLayout(self._layout, self._keys, capacity, self._weighted, self._mixes)

    def begin_steady(self) -> None:
        """Let the next steady step gather the batch sizes of all ranks, for itself and later ones."""
        self._steady_samples = None

    @property
    def failure(self) -> str | None:
        return self.exchange.failure

    @failure.setter
    def failure(self, failure: str) -> None:
        self.exchange.failure = failure

    def send(self, features: KeyedJaggedTensor, count: torch.Tensor | None = None) -> None:
        """Send the ids of a step on the current stream; a collective. For `count` see `IdExchange.send`."""
        self._sent.append(SentIds(features, self._send(features, count)))

    def forget(self) -> None:
        self._sent.clear()

    @uncompiled
    def start(self, features: KeyedJaggedTensor) -> PooledAwaitable:
        """Start the step of `features`; if no sent ids wait for their step, send `features` first.

        Raises:
            InputError: if other ids wait for their step, which a peer may have started; raised before the step begins.
        """
        sent = self._first(features)
        if sent.features is not padded(features):
            raise others_are_sent()
        self._sent.popleft()
        arrived = sent.arrived
        if self.exchange.id_tables is not None and not self.exchange.order.is_captured:
            self.exchange.id_tables.prepare_step()
        step = Step([arrived.ids], arrived.batch, arrived.replicated, arrived.own_offsets)
        awaitable = self.exchange.start_step(step)
        awaitable.samples = sent.features.stride()
        return awaitable

    def _first(self, features: KeyedJaggedTensor) -> SentIds:
        if not self._sent:
            self.send(padded(features))
        return self._sent[0]

    @poison_on_error
    def _send(self, features: KeyedJaggedTensor, count: torch.Tensor | None) -> ArrivedIds:
        ids = self.exchange.id_exchange
        if self._change_ids is not None:
            features = self._change_ids(features)
        arrived = ids.send(features, self._most_samples(features.stride(), ids.group), count)
        tables, id_tables = self.exchange.tables, self.exchange.id_tables
        assert arrived.high is None or id_tables is not None, "tables of any id need id_tables"
        # Ids become rows, rows become slots of caches, then new ids get their first rows, in the slots.
        new = id_tables.activate(arrived) if id_tables is not None else None
        if tables.fractions:
            tables.activate(arrived.ids)
        if id_tables is not None and new is not None:
            id_tables.fill(new)
        return arrived

    def _most_samples(self, samples: int, group: dist.ProcessGroup) -> int:
        """Return the largest number of samples of a rank, to which batches are padded; a collective unless known."""
        if self.is_steady and self._steady_samples is not None:
            return self._steady_samples
        agreed = max(1, *gathered(samples, group))
        if self.is_steady:
            self._steady_samples = agreed
        return agreed
