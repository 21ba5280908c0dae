"""Updates of the dense weights by the owners of shares, who store the new weights at all ranks.

Every rank owns a share of each range of the flat gradient. Its kernel (`kernels.dense.update_share`) adds up the
gradients of all ranks, takes the optimizer's step on its float32 weights and states, and stores the new weights in the
shadows of all ranks, from which the model reads them. Gradients, weights and shadow are in shared memory:

    step e, rank r           ready e | wait for all ready flags | update r's share of range 0 | ready e of range 1 ..
    rank r, current stream                                   wait for the flags of all ranges | next forward

**One shadow is enough.** An owner overwrites weights of rank r after r's ready flag e of their range, and signals its
own flag of the range afterwards.

- *Before:* r signals ready once the gradients of the range's parameters are reported as complete, and its stream has
  waited for the streams that wrote them. `CastWeights` reports them after the backward of the head, or of the bottom
  MLP, which reads the parameters; the deferred products that follow read none. So r's reads of step e have ended.
- *After:* r's next forward follows its wait for the flags e of all owners and ranges. So it reads new weights only.

The last range may be deferred (`DeferredRange`): its ready e and its update come at the beginning of step e + 1, while
rows are looked up. The proof holds, since r waits for the flags before its forward reads weights of the range, so also
before its backward writes gradients there. If the range is updated between two steps instead, the second step signals e
again, and changes nothing, because the lines are masked.

The same holds for the float32 weights that a model reads, such as biases that it does not cast. For gradients the proof
in `dense.stores` applies: an owner signals after it has read them.

**Stale weights.** Until `gather`, a rank's float32 weights and optimizer states are up to date only in its shares.
Gradients stay the rank's own: nobody stores the mean.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.dense.stores import GradientPiece, StoreReduction
from dlrm_overlap.kernels.dense.arguments import LINE, SharedWeights
from dlrm_overlap.kernels.dense.update_share import update_share


class OwnerUpdates(StoreReduction):
    """Reduces ranges of the flat gradient and updates their weights, in one kernel for each range.

    It has the methods of `CollectiveReduction`, but leaves the gradients as they are.
    """

    def __init__(
        self,
        flat: FlatParameters,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        ranges: Sequence[tuple[int, int]],
        options: StoreOptions,
        steps: FlatSteps,
        in_float32: Collection[str],
    ) -> None:
        """A collective, with the errors of `StoreReduction`.

        Args:
            flat: has a shadow, equal on all ranks, as are the weights.
            options: `piece_elements` is not used, as no rank has anything to do when a part of a range has arrived.
            steps: takes the optimizer's steps. It must be the only one of `flat`.
            in_float32: names of parameters of `flat` that the model reads in float32.
        """
        assert flat.shadow is not None, "the parameters were made flat without shadow_dtype"
        elements = flat.weights.tensor.numel()
        regions = {"weights": Region((elements,), torch.float32)}
        regions["shadow"] = Region((elements,), flat.shadow.tensor.dtype)
        whole = options._replace(piece_elements=max(1, flat.shared_end))
        super().__init__(flat, group, dtype, ranges, whole, regions)
        self._steps, self._group = steps, group
        flat.keep_weights_in(self._arena.local("weights"), self._arena.local("shadow"))
        float32_lines = torch.zeros(elements // LINE, dtype=torch.int32, device=flat.device)
        for name in in_float32:
            position = flat.every_position[name]
            float32_lines[position.begin // LINE : -(-position.end // LINE)] = 1
        gradients, weights, shadows = (self._arena.addresses(name) for name in ("gradients", "weights", "shadow"))
        self._shared = SharedWeights(gradients, weights, shadows, float32_lines)
        self.is_stale = False
        """True if the other ranks' shares of float32 weights and states are out of date; the caller sets it"""
        self._reduced = 0
        """1 + the number of the range that was reduced last"""
        self._masked: tuple[torch.Tensor, torch.Tensor] | None = None
        """lines of `FlatUpdate.rows`, and their values"""

    @torch.no_grad()
    def reduce(self, number: int) -> None:
        if number == 0:
            self._steps.begin()
        super().reduce(number)
        self._reduced = number + 1

    def _average(self, piece: GradientPiece) -> None:
        update_share(
            self._steps.update,
            self._shared,
            self._dtype,
            piece.first(self._rank),
            piece.lines(self._rank),
            self._flags[0],
            self._programs_done,
            self._rank,
            piece.slot,
            self._epochs.each[0].argument,
            self._options.programs,
        )

    @torch.no_grad()
    def arrivals(self, stream: torch.cuda.Stream | None) -> Iterator[int]:
        """Make the current stream wait for the new weights of all reduced ranges, then yield `shared_end` once."""
        self.wait_last(stream)
        yield self._flat.shared_end

    def wait_last(self, stream: torch.cuda.Stream | None) -> None:
        """Make the current stream wait for the range that was reduced last, and for all ranges before it."""
        if stream is not None:
            torch.cuda.current_stream(self._flat.device).wait_stream(stream)
        self._wait(self._cut[self._reduced - 1].pieces[-1].slot)

    def mask(self, elements: tuple[int, int]) -> None:
        """Let updates leave the elements [first, end) unchanged until `unmask`, after earlier work of the stream."""
        first, end = elements
        lines = self._steps.update.rows[first // LINE : end // LINE]
        self._masked = lines, lines.clone()
        lines.fill_(-1)

    def unmask(self) -> None:
        """Undo `mask`, after earlier work of the current stream."""
        if self._masked is not None:
            lines, values = self._masked
            lines.copy_(values)
            self._masked = None

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the float32 weights and the optimizer's states from their owners, unless they are up to date.

        A collective, on the current stream; no rank may be in a step.
        """
        if not self.is_stale:
            return
        for tensor in (self._steps.update.weights, *self._steps.update.states):
            for _, pieces in self._cut:
                for piece in pieces:
                    self._gather_piece(tensor, piece)
        self.is_stale = False

    def _gather_piece(self, tensor: torch.Tensor, piece: GradientPiece) -> None:
        for owner in range(self._group.size()):
            first, lines = piece.first(owner), piece.lines(owner)
            if lines:
                dist.broadcast(tensor[first * LINE : (first + lines) * LINE], group=self._group, group_src=owner)

    def _leave_shared_memory(self) -> None:
        super()._leave_shared_memory()
        assert self._flat.shadow is not None
        self._flat.keep_weights_in(
            torch.empty_like(self._flat.weights.tensor), torch.empty_like(self._flat.shadow.tensor)
        )


class DeferredRange:
    """The last range of the gradient, which every step except the first updates for the step before.

    A step calls `reduce`, then `wait` before it reads weights of the range or writes its gradients. All steps issue the
    same kernels, so that they can be captured.
    """

    def __init__(
        self,
        owners: OwnerUpdates,
        ranges: Sequence[tuple[int, int]],
        stream: torch.cuda.Stream | None,
        order: AbstractContextManager[object],
    ) -> None:
        """Defer the last of the ranges that `owners` reduces, on `stream`."""
        self._owners, self._range, self._stream, self._order = owners, ranges[-1], stream, order
        self._number = len(ranges) - 1
        self.is_begun = False
        """True once steps begin with `reduce`; the first step reduces the range itself"""
        self._is_awaited = False
        """True between `reduce` and `wait`"""
        self._is_due = False
        """True if the last step has left the range to the next one"""

    def reduce(self) -> None:
        """Begin a step: update the range by the gradients of the step before, after the current stream's work."""
        if not self.is_begun:
            return
        self._is_awaited = True
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), self._order:
            self._owners.reduce(self._number)

    def wait(self) -> None:
        """Make the current stream wait for the update, unless it has done so in this step."""
        if self._is_awaited:
            self._is_awaited = False
            self._owners.wait_last(self._stream)

    def step_is_issued(self) -> None:
        """Note that a step was issued, perhaps as the replay of a graph. Call it after each step, not in a capture."""
        if self.is_begun:
            self._owners.unmask()
            self._is_due = True
        else:
            self.is_begun = True
            self._owners.mask(self._range)

    def flush(self) -> None:
        """Update the range now if the last step has left it to the next one; a collective between two steps."""
        if self._is_due:
            self.reduce()
            self.wait()
            self._owners.mask(self._range)
            self._is_due = False
