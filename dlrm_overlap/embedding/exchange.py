"""The embedding stage of one sharded module on one rank: forward and backward as autograd sees them."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.backends.base import BatchSizes, ExchangeOptions, Forward, HostForward, Step
from dlrm_overlap.embedding.backends.collective import CollectiveBackward, CollectiveForward
from dlrm_overlap.embedding.backends.host import Backward, HostPush
from dlrm_overlap.embedding.protocol.gradients import GradientLayout
from dlrm_overlap.embedding.protocol.layout import Layout
from dlrm_overlap.embedding.protocol.windows import WindowHeldError
from dlrm_overlap.embedding.tables import LocalTables

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def _uncompiled(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Cut a compiled model's graph here: what an exchange does is no tensor's maths, and must be done in every step."""
    disabled = torch.compiler.disable(function)

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        # Asked for first, since calling a disabled function takes half a microsecond more.
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)  # type: ignore[return-value]

    return run


def _fails_for_good(part: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Let no part of a step follow one that failed: the peers wait there, and would take a later step's data for it."""

    @wraps(part)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        self = cast("Exchange", args[0])
        if self._failure is not None:
            raise RuntimeError(
                f"exchange: {self._failure} on this rank, which cannot go on where the others wait for that step; end "
                f"all ranks and start again, from a checkpoint"
            )
        try:
            return part(*args, **kwargs)
        except WindowHeldError:  # nothing has begun
            raise
        except Exception as error:
            self._failure = f"{part.__name__} has failed ({type(error).__name__}: {error})".partition("\n")[0]
            raise

    return run


class Exchange:
    """Ids of this rank's tables in, pooled embeddings of this rank's samples out, gradients back to the rows.

    All ranks of `group` take the same steps. Windows are made at the first, a collective, and made anew when a rank
    brings more samples than any before.
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
        self.steps = 0
        """that had a backward; a run that resumes sets it, so that its stochastic rounding does not repeat itself"""
        self._arguments = layout, tables, options, group, device
        self._ways: Ways | None = None
        self._capacity = 0
        self._copies = options.copy_output and options.wire_dtype == torch.float32  # else the cast to it is a copy
        self._counts_epochs = device.type == "cuda" and options.backend != "nccl"
        self._pending: Step | None = None
        self._failure: str | None = None

    @_uncompiled
    def start(self, inputs: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int]) -> "PooledAwaitable":
        """Start a step.

        Args:
            inputs: the ids of this rank's tables, one a source of the layout: B bags a feature, rank 0's samples first.
            batch_sizes: samples of each rank.

        Returns:
            What waits for the pooled embeddings [b, D_total] of this rank's samples: the features side by side in the
            layout's order, in float32.

        Raises:
            WindowHeldError: if the output of the step before is lent and in use; nothing has begun.
            RuntimeError: within a graph's capture, or if an earlier step has failed on this rank.
        """
        if self._counts_epochs and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"backend {self.options.backend}: a forward within a CUDA graph's capture, which would replay this "
                f"step's epoch for ever; leave the embedding stage out of the graph"
            )
        step = Step(inputs, BatchSizes.of(tuple(batch_sizes)))
        if torch.is_grad_enabled():
            return PooledAwaitable(self, step, _Launch.apply(self._anchor, self, step))
        self.launch(step)
        return PooledAwaitable(self, step, None)

    @_fails_for_good
    def launch(self, step: Step) -> None:
        """Start to pool and to send."""
        if self._pending is not None:  # its flags must be awaited before the next step
            self._set_aside(self._pending)
        if self._ways is None or step.batch.most > self._capacity:
            self.close()
            self._capacity = max(1, step.batch.most)
            self._ways = make_ways(*self._arguments, samples_per_rank=self._capacity)
        self._ways.forward.launch(step)
        self._pending = step

    def _set_aside(self, step: Step) -> None:
        """Keep the pooled embeddings of a step that may still be asked for when the next has begun."""
        step.set_aside = self.collect(step, copy=True)
        if self.device.type == "cuda":
            step.set_aside_event = torch.cuda.current_stream(self.device).record_event()

    @_fails_for_good
    def collect(self, step: Step, copy: bool | None = None) -> torch.Tensor:
        """Return the pooled embeddings of a step, once.

        Args:
            copy: instead of the window that they lie in; None does as the options say.
        """
        if step is self._pending:
            self._pending = None
            return self._made().forward.collect(step, self._copies if copy is None else copy)
        pooled, step.set_aside = step.set_aside, None
        if pooled is None:
            raise RuntimeError(
                "pooled embeddings: asked for a second time, or behind a close or a failure of the exchange; keep what "
                "the first call returned"
            )
        if step.set_aside_event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(step.set_aside_event)
            pooled.record_stream(stream)
        return pooled

    def expect_gradient(self, step: Step) -> None:
        """Note that the step, whose forward has just been launched, will have a backward."""
        self._made().backward.follow(step)
        step.number = self.steps
        self.steps += 1

    @_fails_for_good
    def send_gradient(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send the gradient [b, D_total] of what `collect` returned to the rows' owners.

        If another lookup has begun since, whose rows autograd may want updated before this one's, `update` does so.
        """
        step.gradient = gradient  # held while it is read, since autograd adds in place to what nobody else holds
        step.sent = step.number == self.steps - 1
        if step.sent:
            self._made().backward.send(step, gradient)

    @_fails_for_good
    def update(self, step: Step) -> None:
        """Make what follows on the current stream see this rank's rows updated by the gradients."""
        backward = self._made().backward
        if not step.sent:
            assert step.gradient is not None
            backward.send(step, step.gradient)
        backward.update(step)
        step.gradient = None

    def _made(self) -> "Ways":
        assert self._ways is not None, "a step begins with its forward"
        return self._ways

    def check(self) -> None:
        """Raise what a kernel has recorded: an expired wait, an id outside its table. Never waits for the device."""
        if self._ways is not None:
            self._ways.forward.check()
            self._ways.backward.check()

    def close(self) -> None:
        """Give the windows back, and raise what kernels have recorded. Every rank must be through with its steps."""
        self._pending = None
        if self._ways is None:
            return
        (forward, backward), self._ways, self._capacity = self._ways, None, 0
        stopped: RuntimeError | None = None
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:  # by a kernel, whose record tells why
            stopped = error
        try:
            if self._failure is None:  # else it has been told
                forward.check()
                backward.check()
        finally:
            if stopped is None:
                backward.close()
                forward.close()
        if stopped is not None:
            raise stopped


class Ways(NamedTuple):
    """How an exchange runs."""

    forward: Forward
    backward: Backward


def make_ways(
    layout: Layout,
    tables: LocalTables,
    options: ExchangeOptions,
    group: dist.ProcessGroup,
    device: torch.device,
    samples_per_rank: int,
) -> Ways:
    """Return the ways that `options` take on `device`, for up to `samples_per_rank` samples; a collective."""
    arguments = layout, tables, options, group, device
    if options.backend == "nccl":
        return Ways(CollectiveForward(*arguments), CollectiveBackward(*arguments))
    pushes = options.backward != "collective"
    gradients = GradientLayout(layout, samples_per_rank, options.wire_dtype)
    windows: dict[str, Any] = {"samples_per_rank": samples_per_rank, "beside": gradients.regions() if pushes else {}}
    if device.type == "cuda":  # these need Triton, which a CPU does not
        from dlrm_overlap.embedding.backends.device_forward import DeviceForward
        from dlrm_overlap.embedding.backends.push import DevicePush

        forward, push = DeviceForward(*arguments, **windows), DevicePush
    else:
        forward, push = HostForward(*arguments, **windows), HostPush
    if not pushes:
        return Ways(forward, CollectiveBackward(*arguments))
    return Ways(forward, push(*arguments, gradients=gradients, arena=forward.windows.arena))


class _Launch(torch.autograd.Function):
    """The first half of the forward and the last of the backward: what is issued early and needed late.

    Autograd runs later nodes first. So in the backward `_Collect` sends the gradients, then the bottom MLP's nodes,
    made between the two, run while they travel, and the update comes last.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, exchange: Exchange, step: Step) -> torch.Tensor:
        ctx.exchange, ctx.step = exchange, step
        exchange.launch(step)
        exchange.expect_gradient(step)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None, None]:
        ctx.exchange.update(ctx.step)
        return None, None, None


class _Collect(torch.autograd.Function):
    """The second half of the forward and the first of the backward."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, exchange: Exchange, step: Step) -> torch.Tensor:
        ctx.exchange, ctx.step, ctx.token = exchange, step, token.shape
        return exchange.collect(step).float()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        ctx.exchange.send_gradient(ctx.step, gradient)
        return gradient.new_empty(ctx.token, dtype=torch.float32), None, None


class PooledAwaitable(Awaitable[torch.Tensor]):
    """The pooled embeddings of a step under way; `wait` returns them in float32."""

    def __init__(self, exchange: Exchange, step: Step, token: torch.Tensor | None) -> None:
        super().__init__()
        self._exchange, self._step, self._token = exchange, step, token

    @_uncompiled
    def wait(self) -> torch.Tensor:
        """Return the pooled embeddings [b, D_total] float32."""
        # Without Awaitable's profiler range: TorchRec puts its own around all shardings.
        if self._token is None:  # no gradient will come: autograd's bookkeeping would only take time
            return self._exchange.collect(self._step).float()
        return _Collect.apply(self._token, self._exchange, self._step)

    _wait_impl = wait
