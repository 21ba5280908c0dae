"""The embedding stage of one sharded module on one rank: forward and backward as autograd sees them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.backward import Backward, HostPush
from dlrm_overlap.embedding.collective import CollectiveBackward, CollectiveForward
from dlrm_overlap.embedding.forward import BatchSizes, ExchangeOptions, Forward, HostForward, Step
from dlrm_overlap.embedding.gradients import GradientLayout
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.tables import LocalTables


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
        self.layout, self.options = layout, options
        self._arguments = layout, tables, options, group, device
        self._ways: Ways | None = None
        self._capacity = 0
        self._pending: Step | None = None
        self._anchor = torch.empty(0, device=device, requires_grad=True)

    def start(self, inputs: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int]) -> "PooledAwaitable":
        """Start a step.

        Args:
            inputs: the ids of this rank's tables, one a source of the layout: B bags a feature, rank 0's samples first.
            batch_sizes: samples of each rank.

        Returns:
            What waits for the pooled embeddings [b, D_total] of this rank's samples: the features side by side in the
            layout's order, in float32.
        """
        step = Step(inputs, BatchSizes.of(tuple(batch_sizes)))
        if torch.is_grad_enabled():
            return PooledAwaitable(self, step, _Launch.apply(self._anchor, self, step))
        self.launch(step)
        return PooledAwaitable(self, step, None)

    def launch(self, step: Step) -> None:
        """Start to pool and to send."""
        if self._pending is not None:
            self.collect(self._pending)  # nobody wanted it; its flags must still be awaited before the next step
        if self._ways is None or step.batch.most > self._capacity:
            self.close()
            self._capacity = max(1, step.batch.most)
            self._ways = make_ways(*self._arguments, samples_per_rank=self._capacity)
        self._ways.forward.launch(step)
        self._pending = step

    def collect(self, step: Step) -> torch.Tensor:
        """Return the pooled embeddings of the step under way."""
        assert step is self._pending
        self._pending = None
        return self._made().forward.collect(step)

    def expect_gradient(self, step: Step) -> None:
        """Note that the step, whose forward has just been launched, will have a backward."""
        self._made().backward.follow(step)

    def send_gradient(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send the gradient [b, D_total] of what `collect` returned to the rows' owners."""
        self._made().backward.send(step, gradient)

    def update(self, step: Step) -> None:
        """Let what follows see this rank's rows updated by the gradients."""
        self._made().backward.update(step)

    def _made(self) -> "Ways":
        assert self._ways is not None, "a step begins with its forward"
        return self._ways

    def check(self) -> None:
        """Raise what a kernel has recorded: an expired wait, an id outside its table. Never waits for the device."""
        if self._ways is not None:
            self._ways.forward.check()
            self._ways.backward.check()

    def close(self) -> None:
        """Give the windows back. Every rank must be through with its steps."""
        if self._ways is not None:
            self._ways.backward.close()
            self._ways.forward.close()
        self._ways, self._capacity = None, 0


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
        from dlrm_overlap.embedding.device_backward import DevicePush
        from dlrm_overlap.embedding.device_forward import DeviceForward

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

    def wait(self) -> torch.Tensor:
        """Return the pooled embeddings [b, D_total] float32."""
        return self._wait_impl()  # without Awaitable's profiler range: TorchRec puts its own around all shardings

    def _wait_impl(self) -> torch.Tensor:
        if self._token is None:  # no gradient will come: autograd's bookkeeping would only take time
            return self._exchange.collect(self._step).float()
        return _Collect.apply(self._token, self._exchange, self._step)
