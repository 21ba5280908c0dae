"""The embedding stage of one sharded module on one rank: forward and backward as autograd sees them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.collective import CollectiveBackward, CollectiveForward
from dlrm_overlap.embedding.forward import BatchSizes, ExchangeOptions, Forward, HostForward, Step
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
        self._forward: Forward | None = None
        self._capacity = 0
        self._pending: Step | None = None
        self._backward = CollectiveBackward(layout, tables, options.wire_dtype, group, device)
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
        if self._forward is None or step.batch.most > self._capacity:
            self.close()
            self._capacity = max(1, step.batch.most)
            self._forward = make_forward(*self._arguments, samples_per_rank=self._capacity)
        assert self._forward is not None
        self._forward.launch(step)
        self._pending = step

    def collect(self, step: Step) -> torch.Tensor:
        """Return the pooled embeddings of the step under way."""
        assert self._forward is not None
        assert step is self._pending
        self._pending = None
        return self._forward.collect(step)

    def send_gradient(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send the gradient [b, D_total] of what `collect` returned to the rows' owners."""
        self._backward.send(step, gradient)

    def update(self, step: Step) -> None:
        """Wait for the gradients of this rank's rows and update them."""
        self._backward.update(step)

    def check(self) -> None:
        """Raise what a kernel has recorded: an expired wait, an id outside its table. Never waits for the device."""
        if self._forward is not None:
            self._forward.check()

    def close(self) -> None:
        """Give the windows back. Every rank must be through with its steps."""
        if self._forward is not None:
            self._forward.close()
        self._forward, self._capacity = None, 0


def make_forward(
    layout: Layout,
    tables: LocalTables,
    options: ExchangeOptions,
    group: dist.ProcessGroup,
    device: torch.device,
    samples_per_rank: int,
) -> Forward:
    """Return the way that `options.backend` takes on `device`, for up to `samples_per_rank` samples; a collective."""
    arguments = layout, tables, options, group, device
    if options.backend == "nccl":
        return CollectiveForward(*arguments)
    if device.type == "cuda":
        from dlrm_overlap.embedding.device_forward import DeviceForward  # needs Triton, which a CPU does not

        return DeviceForward(*arguments, samples_per_rank=samples_per_rank)
    return HostForward(*arguments, samples_per_rank=samples_per_rank)


class _Launch(torch.autograd.Function):
    """The first half of the forward and the last of the backward: what is issued early and needed late.

    Autograd runs later nodes first. So in the backward `_Collect` sends the gradients, then the bottom MLP's nodes,
    made between the two, run while they travel, and the update comes last.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, exchange: Exchange, step: Step) -> torch.Tensor:
        ctx.exchange, ctx.step = exchange, step
        exchange.launch(step)
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
        return exchange.collect(step)

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
        return _Collect.apply(self._token, self._exchange, self._step).float()
