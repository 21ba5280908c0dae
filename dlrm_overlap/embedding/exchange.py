"""The embedding stage of one sharded module on one rank, in the order of a step.

(before)          an `IdSender`, or TorchRec's input_dist, sends ids to the owners of their rows
start             StartExchange.forward -> start_forward: owners pool, and send pooled embeddings
.. the model's bottom MLP ..
wait              FinishExchange.forward -> finish_forward: pooled embeddings of this rank's samples are here
.. interaction, top MLP, loss, and their backward ..
(autograd)        FinishExchange.backward -> start_backward: gradients leave for the owners of the rows
.. the bottom MLP's backward ..
(autograd)        StartExchange.backward -> finish_backward: this rank's rows are updated
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, wraps
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.comm.counters import Counter
from dlrm_overlap.comm.order import CommunicationOrder, uncompiled
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.base import gradient_scale
from dlrm_overlap.embedding.backends.ids import IdExchange, IdTables
from dlrm_overlap.embedding.backends.local import LocalState
from dlrm_overlap.embedding.id_layout import IdLayout
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.opening import ExchangeParts, build_exchange, reach_of
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.steps import BatchSizes, PendingBackward, Step
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.embedding.windows import BufferInUseError

Part = TypeVar("Part", bound=Callable[..., Any])

_EAGER = nullcontext()  # reused, since creating one takes a microsecond


def poison_on_error(part: Part) -> Part:
    """Return the method, which raises a RuntimeError if a method of its object with this decorator has failed before.

    Peers wait for the step that failed, and would take the data of a later step for that step's data. The object has an
    attribute `failure`: None, then the text of the first failure. The method leaves inference mode, because
    training could not write to tensors made in it.
    """

    @wraps(part)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.failure is not None:
            raise RuntimeError(
                f"exchange: {self.failure} on this rank, which cannot go on where the others wait for that step; end "
                f"all ranks and start again, from a checkpoint"
            )
        try:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    return part(self, *args, **kwargs)
            return part(self, *args, **kwargs)
        except BufferInUseError:  # nothing has begun
            raise
        except Exception as error:
            self.failure = failure_of(part.__name__, error)
            raise

    return cast(Part, run)


def failure_of(what: str, error: Exception) -> str:
    """Return the text of `Exchange.failure` after an error."""
    return f"{what} has failed ({type(error).__name__}: {error})".partition("\n")[0]


def others_are_sent() -> InputError:
    return InputError(
        "exchange: a forward, but ids of another batch are under way to the owners of their rows, and must be looked "
        "up first; evaluate by the pipeline's progress, or call its reset before"
    )


class WindowInputDist(Protocol):
    """See `dlrm_overlap.embedding.window_input_dist`."""

    def check(self) -> None: ...

    def close(self) -> None: ...


class Exchange:
    """Looks up ids in this rank's tables, returns pooled embeddings of its samples, and sends back their gradients.

    All ranks of `group` take the same steps. The first step makes the windows, which is a collective; so does a step in
    which a rank has more samples than any rank had before.
    """

    def __init__(
        self,
        layout: Layout,
        tables: LocalTables,
        options: ExchangeOptions,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        device = self._anchor.device  # with its index
        self.layout, self.options = layout, options
        self.device = device
        self.counters = StepCounters(device)
        self._replicated: ReplicatedTables | None = None
        self.order = CommunicationOrder()
        """order of communication in captured steps; exchanges that are captured together share one"""
        self.tables = tables
        self.id_tables: IdTables | None = None
        """this rank's shards of tables of any id; an `IdSender` gives them the ids that have arrived"""
        self._group = group
        self._parts: ExchangeParts | None = None
        self._closed = 0  # number of calls of `close`
        self._capacity = 0
        self._copies = options.copy_output and options.output_dtype == options.wire_dtype  # else the cast is a copy
        self._counts_epochs = device.type == "cuda" and BACKENDS[options.backend].stores_to_peers
        self._clips = True  # clip gradients before they are sent
        self._pending: RunningStep | None = None
        self.failure: str | None = None
        self._ids: IdLayout | None = None
        self._sent: deque[Any] = deque()
        self.window_input_dist: WindowInputDist | None = None
        """sends the ids in TorchRec's pipelines; None if TorchRec does"""
        # Lowest priority: the small kernels of a bottom MLP should not wait for the many programs of a lookup.
        self._lookup_stream = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None
        self._unfinished: list[RunningStep] = []

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group

    @cached_property
    def reach(self) -> Reach:
        """Which ranks this one reaches by stores; the first access is a collective."""
        return reach_of(self.options, self._group, self.device)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of rows, and how often windows were freed; captured steps are valid while these do not change."""
        replicated = self._replicated.storage() if self._replicated is not None else ()
        return self._closed, *self.tables.storage(), *replicated

    def receive_ids(self, ids: IdLayout, replicated: ReplicatedTables | None, sent: deque[Any]) -> None:
        """From now on, look up the ids that an `IdSender` sends; a collective, while no rank is in a step.

        Args:
            replicated: tables that every rank holds, if this exchange looks them up.
            sent: the sender's queue of ids whose steps have not started; `close` clears it.
        """
        self.close()
        self.layout, self._replicated, self._ids, self._sent = ids.layout, replicated, ids, sent
        self.window_input_dist = None
        _ = self.id_exchange

    @property
    def id_exchange(self) -> IdExchange:
        """The part that sends ids; the first access after `close` makes the windows again, which is a collective."""
        assert self._ids is not None, "an exchange whose ids TorchRec sends"
        ids = self._require(self._ids.batch_capacity.samples).ids
        assert ids is not None
        return ids

    @uncompiled
    def start(self, inputs: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int]) -> "PooledAwaitable":
        """Start a step on the current stream; every rank must do so.

        Args:
            inputs: ids of this rank's tables, one tensor for each input of the layout, with B bags a feature; the bags
                of rank 0's samples come first. Weights of ids are float32, and get a gradient if they require one.
            batch_sizes: samples of each rank.

        Returns:
            An awaitable of the pooled embeddings [b, D_total] of this rank's samples, of the options' `output_dtype`.
            If they are a view of a window with leading columns, the leading columns precede each row in its storage.

        Raises:
            BufferInUseError: if the previous step's output is a view of the window and in use; nothing has begun.
            InputError: if an `IdSender` sends the ids and tables are cached, data-parallel or row-wise, or if ids that
                it has sent wait for their step; nothing has begun.
            RuntimeError: in the capture of a graph, or if an earlier step has failed on this rank.
        """
        if self._ids is not None and (what := self._only_from_senders):
            raise InputError(
                f"exchange: TorchRec has sent the ids, but {what} tables are looked up for the ids that "
                f"GraphTrainPipeline sends; train and evaluate this model with that pipeline only, or shard it again"
            )
        if self._sent:
            raise others_are_sent()
        return self.start_step(Step(inputs, BatchSizes.of(tuple(batch_sizes))))

    @property
    def _only_from_senders(self) -> str:
        """Which tables need what only an `IdSender` knows, such as this rank's empty bags; empty if none."""
        if self.tables.fractions:
            return "cached"
        if self._replicated is not None:
            return "data-parallel"
        return "row-wise" if self.layout.added_up else ""

    def start_step(self, step: Step) -> "PooledAwaitable":
        if self._counts_epochs and not self.order.is_captured and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"backend {self.options.backend}: a forward within a CUDA graph's capture, which would replay this "
                f"step's epoch for ever; leave the embedding stage out of the graph"
            )
        running = RunningStep(step)
        if torch.is_grad_enabled():
            trained = [w for ids in step.inputs if (w := ids.weights_or_none()) is not None and w.requires_grad]
            return PooledAwaitable(self, running, StartExchange.apply(self._anchor, self, running, *trained))
        self.start_forward(running)
        if self.tables.count_evaluation():
            self.follow_rules()
        return PooledAwaitable(self, running, None)

    @poison_on_error
    def start_forward(self, running: "RunningStep") -> None:
        step = running.step
        if (before := self._pending) is not None:  # wait for its flags now; its output may still be asked for
            before.set_aside = self.finish_forward(before, copy=True)
            if self.device.type == "cuda":
                before.set_aside_event = torch.cuda.current_stream(self.device).record_event()
        parts = self._require(step.batch.most)
        running.ids_epoch = self.counters.ids.value
        self.tables.read_again()
        if self._ids is not None and self.device.type == "cuda":  # ids that were checked when they arrived
            running.ids_ready = torch.cuda.current_stream(self.device).record_event()
        with self._lookup_context():
            running.forward = parts.forward.start(step)
            if parts.local is not None:
                running.local = parts.local.pool(step)
        self._pending = running

    def _lookup_context(self) -> AbstractContextManager[Any]:
        """In a captured step, look up on a stream that runs concurrently with the model."""
        return torch.cuda.stream(self._lookup_stream) if self.order.is_captured else _EAGER

    def _require(self, samples: int) -> ExchangeParts:
        """Return the parts; a collective if they must be made for more samples of a rank than before."""
        if self._parts is None or samples > self._capacity:
            self._close_parts()
            self._capacity = max(1, samples)
            fixed = self.layout, self.tables, self.options, self._group, self.device
            order = nullcontext() if self.device.type == "cpu" else self.order
            kept = self.counters, order, self._ids, self._replicated, self.reach
            self._parts = build_exchange(ExchangeContext(*fixed, self._capacity, *kept))
            if self._ids is not None:
                rank, ranks = self._group.rank(), self._group.size()
                capacities = [self._ids.arriving([feature], ranks) for feature in self._ids.features(rank)]
                self.tables.open_caches(self.layout.by_owner[rank], capacities, self.device)
        return self._parts

    @poison_on_error
    def finish_forward(self, running: "RunningStep", copy: bool | None = None) -> torch.Tensor:
        """Wait for the pooled embeddings [b, D_total], of the options' `output_dtype`, and return them once.

        On GPUs the current stream waits. `copy` overrides `ExchangeOptions.copy_output`.
        """
        if running is self._pending:
            self._pending = None
            assert self._parts is not None
            pooled = self._parts.forward.finish(running.forward, self._copies if copy is None else copy)
            running.forward = None
            return pooled.to(self.options.output_dtype)
        pooled, running.set_aside = running.set_aside, None
        if pooled is None:
            raise RuntimeError(
                "pooled embeddings: asked for a second time, or after a close or a failure of the exchange; keep what "
                "the first call returned"
            )
        if running.set_aside_event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(running.set_aside_event)
            pooled.record_stream(stream)
        return pooled

    def expect_gradient(self, running: "RunningStep", trains_weights: bool = False) -> None:
        number, backward = self.counters.steps.value, self._open().backward
        with self._lookup_context():
            running.pending = backward.note_forward(running.step, number, trains_weights, running.ids_ready)
        self.counters.steps.value += 1

    @poison_on_error
    def start_backward(self, running: "RunningStep", gradient: torch.Tensor) -> None:
        """Start to send the gradient [b, D_total] to the rows' owners.

        If another step with a backward has begun since, `finish_backward` sends the gradient instead, because autograd
        may need the rows of the other step first.
        """
        running.gradient = (
            gradient  # autograd adds in place to tensors without other owners, so hold it while it is read
        )
        parts, pending = self._open(), running.pending
        assert pending is not None, "a step that expects a gradient"
        running.sent = pending.number == self.counters.steps.value - 1
        if running.sent:
            self._start_backward(parts, running)
        if parts.local is not None and running.local is not None:
            parts.local.start_backward(running.local, gradient)

    @poison_on_error
    def finish_backward(self, running: "RunningStep") -> Sequence[torch.Tensor]:
        """Make the current stream wait until this rank's rows are updated.

        Returns the gradients of the ids' weights, see `Backward.finish`. In a captured step it returns none, and
        `finish_rows` waits.
        """
        parts = self._open()
        if not running.sent:
            self._start_backward(parts, running)
        if parts.local is not None:
            parts.local.finish_backward()
        if self.order.is_captured:  # while a step is captured, which ends with `finish_rows`
            self._unfinished.append(running)
            return ()
        return self._finish(parts, running)

    def finish_rows(self) -> None:
        while self._unfinished:
            self._finish(self._open(), self._unfinished.pop(0))

    def _start_backward(self, parts: ExchangeParts, running: "RunningStep") -> None:
        pending, gradient = running.pending, running.gradient
        assert pending is not None
        assert gradient is not None
        if self._ids is not None and self.counters.ids.value > running.ids_epoch + 1:
            raise InputError(
                f"exchange: a backward after {self.counters.ids.value - running.ids_epoch} later forwards, but the "
                f"second one has overwritten the ids of its step; call each backward before the second later forward"
            )
        running.backward = parts.backward.start(pending, self.clipped(gradient) if self._clips else gradient)

    def clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient clipped as FBGEMM would clip it at the rows' owners."""
        if (most := self.options.max_gradient) is None:
            return gradient
        most /= gradient_scale(self.layout.world_size)
        return gradient.clamp(-most, most)

    def _finish(self, parts: ExchangeParts, running: "RunningStep") -> Sequence[torch.Tensor]:
        weights_gradients = parts.backward.finish(running.backward)
        running.backward = running.gradient = None
        return weights_gradients

    def _open(self) -> ExchangeParts:
        assert self._parts is not None, "a step begins with its forward"
        return self._parts

    def join_stream(self) -> None:
        """Make the current stream wait for the stream of the last forward; call it before a capture, not in one."""
        if self._parts is not None:
            self._parts.forward.join_stream()

    def follow_rules(self, capture: bool = False) -> None:
        """Write the optimizers' parameters where captured steps read them; see `Backward.follow_rules`."""
        if self._parts is not None:
            self._parts.backward.follow_rules(capture)

    def skip(self, counter: Counter) -> None:
        """Take an epoch in which nothing is stored, of the windows whose epochs `counter` counts; a collective."""
        parts, counters = self._open(), self.counters
        of = {counters.forward: parts.forward, counters.backward: parts.backward, counters.ids: parts.ids}
        of[counter].skip()

    def check(self) -> None:
        """Raise the faults that kernels have recorded, such as an expired wait; never waits for the device."""
        parts = self._parts
        for part in (self.window_input_dist, *((parts.ids, parts.forward, parts.backward) if parts else ())):
            if part is not None:
                part.check()

    def close(self) -> None:
        """Wait for the device, free the windows, and raise recorded faults; every rank must have finished its steps."""
        errors, windows = list[Exception](), self.window_input_dist
        for close in (self._close_parts, *([] if windows is None else [windows.close])):
            try:
                close()
            except Exception as error:  # the first one says why
                errors.append(error)
        if errors:
            raise errors[0]

    def _close_parts(self) -> None:
        self._pending = None
        self._sent.clear()
        if self._parts is None:
            return
        parts = self._parts
        stopped: RuntimeError | None = None
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:  # a kernel has stopped the GPU; its record says why
            stopped = error
        try:
            if self.failure is None:  # else it has been raised already
                self.check()
        finally:
            self._parts, self._capacity = None, 0
            self._closed += 1
            self.tables.close_caches(write_back=stopped is None and self.failure is None)
            if stopped is None:
                parts.close()
        if stopped is not None:
            raise stopped


class RunningStep:
    """A step in progress; only its `Exchange` writes the fields."""

    forward: object = None
    local: LocalState | None = None
    set_aside: torch.Tensor | None = None
    """a copy of the pooled embeddings, if the next step began before `finish_forward` of this one"""
    set_aside_event: torch.Event | None = None
    """the event after which `set_aside` may be read, on GPUs"""
    ids_ready: torch.Event | None = None
    """see `PendingBackward`; None if TorchRec has sent the ids"""
    ids_epoch: int = 0
    """epoch of the ids when the step began; an `IdSender` overwrites the step's ids two epochs later"""
    pending: PendingBackward | None = None
    gradient: torch.Tensor | None = None
    """[b, D_total], until the rows are updated"""
    sent: bool = False
    backward: object = None

    def __init__(self, step: Step) -> None:
        self.step = step


class StartExchange(torch.autograd.Function):
    """The first half of a step's forward and the last half of its backward: work that is issued early and needed late.

    Autograd runs the nodes that were made last first. So in the backward `FinishExchange` starts to send gradients. The
    nodes of the bottom MLP, made between the two functions, run meanwhile. `StartExchange` waits for the update last.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, exchange: Exchange, running: RunningStep, *trained: torch.Tensor
    ) -> torch.Tensor:
        """Return a token of no elements for `FinishExchange`; `trained` are ids' weights that require a gradient."""
        ctx.exchange, ctx.running = exchange, running
        exchange.start_forward(running)
        exchange.expect_gradient(running, bool(trained))
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *ctx.exchange.finish_backward(ctx.running)


class FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, exchange: Exchange, running: RunningStep) -> torch.Tensor:
        ctx.exchange, ctx.running, ctx.token = exchange, running, token.shape
        return exchange.finish_forward(running)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        ctx.exchange.start_backward(ctx.running, gradient)
        return gradient.new_empty(ctx.token, dtype=torch.float32), None, None


class PooledAwaitable(Awaitable[torch.Tensor]):
    def __init__(self, exchange: Exchange, running: RunningStep, token: torch.Tensor | None) -> None:
        super().__init__()
        self._exchange, self._running, self._token = exchange, running, token
        self.samples: int | None = None
        """number of this rank's samples, if its batch was padded with samples without ids"""

    @uncompiled
    def wait(self) -> torch.Tensor:
        """Return the pooled embeddings [b, D_total], of the exchange's `output_dtype`; on GPUs the stream waits."""
        # Without Awaitable's profiler range: TorchRec puts its own around all shardings.
        if self._token is None:  # no gradient will come: autograd's bookkeeping would only take time
            pooled = self._exchange.finish_forward(self._running)
        else:
            pooled = FinishExchange.apply(self._token, self._exchange, self._running)
        return pooled if self.samples in (None, pooled.shape[0]) else pooled[: self.samples]

    _wait_impl = wait
