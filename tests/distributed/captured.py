"""Captured steps on a CPU: a stand-in for a CUDA graph that takes the step again under the conditions of a replay.

A replay reads and writes the memory of its capture, with the arguments of its capture, and changes nothing on the host.
So the stand-in gives the step the id buffers of the capture, restores what a replay does not change, such as the
parameters' `grad`, and checks that every window is the captured one, and every number its argument plus its word.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.dense.flat_steps import FlatSteps
from dlrm_overlap.embedding import opening
from dlrm_overlap.embedding.backends.ids import ArrivedIds, IdExchange
from dlrm_overlap.embedding.id_sender import SentIds
from dlrm_overlap.embedding.id_tables.id_map import IdMap
from dlrm_overlap.embedding.options import StepCounters
from dlrm_overlap.train.graphs import captured
from dlrm_overlap.train.graphs.captured import CapturedStep, GraphPair
from dlrm_overlap.train.graphs.input_prefetcher import PlannedStep
from dlrm_overlap.train.graphs.model_ids import ModelIds
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from tests.distributed.interpreted import without_streams


class StandIn(CapturedStep):
    """See the module; `taken` counts captured and replayed steps."""

    taken: dict[str, int]
    ids: ModelIds
    planned: PlannedStep
    parameters: Sequence[torch.nn.Parameter]

    def __init__(
        self, step: Callable[[], Any], order: CommunicationOrder, counters: Sequence[Counters], pool: Any, stream: Any
    ) -> None:
        self._step, self._order, self._counters, self.pool = step, order, counters, pool
        self.captured_values = [[value + 1 for value in values] for values in self.values]
        self.arguments = [[counter.argument for counter in each.each] for each in counters]
        self._read = [list(sender._sent) for sender in self.ids.senders]
        self._captured = False

    def launch(self) -> Any:
        """Take the captured step, which does on the host what an eager step does."""
        assert not self._captured
        self._captured = True
        self.taken["captured"] += 1
        return self._take()

    def replay(self) -> Any:
        self.taken["replayed"] += 1
        senders = self.ids.senders
        on_the_host = [list(sender._sent) for sender in senders]
        given = {sender: self.planned.active.ids[path].tensor for sender, path in self.ids.sent_ahead}
        gradients = [parameter.grad for parameter in self.parameters]
        for sender, read in zip(senders, self._read, strict=True):
            sender._sent.clear()
            sender._sent.extend(SentIds(given[sender], _fresh_ids(arrived)) for _, arrived in read)
        output = self._take()
        for sender, sent in zip(senders, on_the_host, strict=True):
            sender._sent.clear()
            sender._sent.extend(sent)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return output

    def _take(self) -> Any:
        before = self.values
        for each in self._counters:
            each.advance()
        # The learning rate and the clock are passed on before each replay, not within a graph.
        not_refreshed = patch.object(FlatSteps, "refresh", lambda _: None)
        with without_streams(), self.ids.steady(), not_refreshed, patch.object(IdMap, "follow_clock", _not_in_a_graph):
            self._order.begin()
            output = self._step()
            self._order.end()
        assert self.values == [[value + 1 for value in values] for values in before], f"{before} to {self.values}"
        for each, values, arguments in zip(self._counters, self.captured_values, self.arguments, strict=True):
            names = ("forward", "backward", "ids", "steps") if isinstance(each, StepCounters) else ("dense gradients",)
            for name, counter, value, argument in zip(names, each.each, values, arguments, strict=True):
                assert counter.argument == argument, f"{name}: argument {counter.argument}, captured {argument}"
                assert int(counter.word) + argument == counter.value, f"{name}: what a kernel finds"
                same = name in ("steps", "dense gradients") or (counter.value - value) % 2 == 0
                assert same, f"{name}: another window than captured"
        return output


def _not_in_a_graph(_: IdMap) -> None:
    raise AssertionError("the clock is read in a captured step, which repeats the hour of its capture")


def _fresh_ids(arrived: ArrivedIds) -> ArrivedIds:
    """Return new tensors of ids in the memory of earlier ones."""
    own = _fresh(arrived.replicated) if arrived.replicated is not None else None
    return arrived._replace(ids=_fresh(arrived.ids), replicated=own)


def _fresh(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ids.keys(), ids.values(), ids.weights_or_none(), offsets=ids.offsets(), stride=ids.stride()
    )


@contextmanager
def captures() -> Iterator[dict[str, int]]:
    """Let new pipelines capture their steps by stand-ins; yields the numbers of captured and replayed steps.

    Ids are exchanged as on GPUs, into memory that is the same in every other step.
    """
    taken = {"captured": 0, "replayed": 0}
    init: Any = GraphTrainPipeline.__init__
    capture = GraphPair.capture

    def begin(pipeline: Any, *arguments: Any, **options: Any) -> None:
        init(pipeline, *arguments, **options | {"capture": True})
        pipeline._streams.main_stream = None

    def stand_in(pair: Any, buffer_index: int, step: Any, stream: Any) -> Any:
        pipeline, planned = step.func.__self__, step.args[0]
        parameters = list(pipeline._dense._flat.parameters.values())
        own = {"ids": pipeline._ids, "planned": planned, "parameters": parameters}
        with patch.object(captured, "CapturedStep", type("StandIn", (StandIn,), {"taken": taken} | own)):
            return capture(pair, buffer_index, step, stream)

    with (
        patch.object(GraphTrainPipeline, "__init__", begin),
        patch.object(GraphPair, "capture", stand_in),
        patch.object(opening, "CpuIdExchange", IdExchange),
        patch.object(torch.cuda, "synchronize", lambda *_: None),
    ):
        yield taken
