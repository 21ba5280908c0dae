"""An exchange as autograd and TorchRec see it: two nodes around the bottom MLP, and an awaitable of the embeddings."""

from typing import TYPE_CHECKING, Any

import torch
from torchrec.distributed.types import Awaitable

from dlrm_overlap.comm.order import uncompiled
from dlrm_overlap.embedding.protocol.step import Step

if TYPE_CHECKING:
    from dlrm_overlap.embedding.exchange import Exchange


class StartExchange(torch.autograd.Function):
    """The first half of the forward and the last of the backward: what is issued early and needed late.

    Autograd runs later nodes first. So in the backward `FinishExchange` sends the gradients; then the bottom MLP's
    nodes, made between the two, run while gradients travel; and the update comes last.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, exchange: "Exchange", step: Step) -> torch.Tensor:
        """Start the step's forward; return a token of no elements, which `FinishExchange` takes."""
        ctx.exchange, ctx.step = exchange, step
        exchange.start_forward(step)
        exchange.expect_gradient(step)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None, None]:
        """Make what autograd issues next wait for the update of this rank's rows."""
        ctx.exchange.finish_backward(ctx.step)
        return None, None, None


class FinishExchange(torch.autograd.Function):
    """The second half of the forward and the first of the backward."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, exchange: "Exchange", step: Step) -> torch.Tensor:
        """Return the pooled embeddings [b, D_total], of the exchange's `output_dtype`."""
        ctx.exchange, ctx.step, ctx.token = exchange, step, token.shape
        return finish_in_type(exchange, step)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Start to send the gradient [b, D_total] of the pooled embeddings to the owners of the rows."""
        (gradient,) = gradients
        ctx.exchange.start_backward(ctx.step, gradient)
        return gradient.new_empty(ctx.token, dtype=torch.float32), None, None


def finish_in_type(exchange: "Exchange", step: Step) -> torch.Tensor:
    """Return the pooled embeddings [b, D_total], of the exchange's `output_dtype`."""
    pooled, dtype = exchange.finish_forward(step), exchange.options.output_dtype
    return pooled if pooled.dtype == dtype else pooled.to(dtype)


class PooledAwaitable(Awaitable[torch.Tensor]):
    """The pooled embeddings of a step under way."""

    def __init__(self, exchange: "Exchange", step: Step, token: torch.Tensor | None) -> None:
        super().__init__()
        self._exchange, self._step, self._token = exchange, step, token

    @uncompiled
    def wait(self) -> torch.Tensor:
        """Return the pooled embeddings [b, D_total], of the exchange's `output_dtype`."""
        # Without Awaitable's profiler range: TorchRec puts its own around all shardings.
        if self._token is None:  # no gradient will come: autograd's bookkeeping would only take time
            return finish_in_type(self._exchange, self._step)
        return FinishExchange.apply(self._token, self._exchange, self._step)

    _wait_impl = wait
