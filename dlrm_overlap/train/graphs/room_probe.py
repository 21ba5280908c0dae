"""Finds out whether a model reads the room that captured steps have behind ids and rows.

Sizes in a CUDA graph are fixed, so `values()` of ids, and of rows of unpooled tables, has room for the most ids, and is
0 after those of the batch. Most models cut values by `lengths()` or `offsets()`, and never see the room. For a model
that does see it, as by a mean over `values()`, a captured step would be wrong.

So a model is run again on the batch of an eager step: without room, with room for twice as many ids, and with NaN in
the room. If loss or output differ, the model reads the room. The runs have no collective and no trace: the embedding
modules return what they returned in the step, and buffers, parameters and random generators are as before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dlrm_overlap.embedding.exchanging_module import Deferred, ExchangingModule
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.train.graphs.constants import difference
from dlrm_overlap.train.graphs.static_batch import BatchTensors, PaddedKeyedJaggedTensor, replace_leaves

_MORE = 8  # ids for which there is room beyond twice those of a feature
_TOLERANCE, _TOLERANCE_16 = 1e-3, 2e-2  # of sums in another order, relative to a tensor's greatest element


class RoomProbe:
    """Runs a model again on the batch of one step.

    Example:
        probe = RoomProbe(model, modules, bound, batch)
        with probe.recording():
            step(batch)
        reason = probe.why_reads_room(model, agreement.any_is)
    """

    def __init__(
        self, model: nn.Module, modules: Sequence[ExchangingModule[Any]], bound: BatchCapacity, batch: Any
    ) -> None:
        """Copy a batch that has no room behind its ids, before its step, which may change it.

        Args:
            model: whose embedding modules are `modules`.
            bound: by which captured steps have room.
            batch: on the device.
        """
        self._modules, self._capacity = modules, bound
        self._batch = replace_leaves(batch, partial(self._copy, fill=None))
        self._results: dict[nn.Module, Any] = {}
        exchanged = {inner for module in modules for inner in module.modules()}
        self._dense = [module for module in model.modules() if module not in exchanged]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context for the step, in which each embedding module is called once."""

        def record(module: nn.Module, _: Any, output: Any) -> None:
            output.callbacks.append(partial(self._keep, module))

        hooks = [module.register_forward_hook(record) for module in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _keep(self, module: nn.Module, result: Any) -> Any:
        with torch.no_grad():
            self._results[module] = self._result(module, result, None)
        return result

    def why_reads_room(self, forward: Callable[[Any], Any], any_is: Callable[[bool], bool]) -> str:
        """Return why the model's steps cannot be captured, empty if they can; a collective.

        Args:
            forward: returns loss and output of a batch.
            any_is: returns whether something is true on any rank.
        """
        exact = self._run(forward, None)
        # Zeros come first: kernels that check their input, as binary cross-entropy's does, end the process at NaN.
        for fill in (0.0, torch.nan):
            reason = _difference(exact, self._run(forward, fill))
            if any_is(bool(reason)):
                return reason or "another rank has found out"
        return ""

    def _run(self, forward: Callable[[Any], Any], fill: float | None) -> BatchTensors | Exception:
        """Return the loss and the output with `fill` in the room, or without room, or the error that was raised."""
        device = next((p.device for module in self._dense for p in module.parameters(recurse=False)), None)
        devices = [device.index] if device is not None and device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._state_kept(), self._replaying(fill):
            try:
                loss, output = forward(replace_leaves(self._batch, partial(self._copy, fill=fill)))
                return BatchTensors((loss, output))
            except Exception as error:  # whatever a user's model raises
                return error

    def _room(self, feature: str, count: int) -> int:
        """Return the room for `count` ids of a feature: none more where captured steps have none either."""
        least, most = self._capacity.bag_sizes.get(feature, (0, 1))
        is_full = least == most and self._capacity.capacity([feature]) == [count]
        return count if is_full else 2 * count + _MORE

    def _copy(self, leaf: Any, fill: float | None) -> Any:
        if not isinstance(leaf, PaddedKeyedJaggedTensor):
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        counts, keys = leaf.capacities, leaf.keys()
        rooms = counts if fill is None else list(map(self._room, keys, counts))
        more = sum(rooms) - sum(counts)
        weights = leaf.weights_or_none()
        weights = None if weights is None else _with_more(weights, more, fill)
        tensors = _with_more(leaf.values(), more, 0), weights, leaf.lengths().clone()
        return PaddedKeyedJaggedTensor(
            keys, *tensors, leaf.stride(), rooms, rooms == counts, leaf.inverse_indices_or_none()
        )

    def _result(self, module: Any, result: Any, fill: float | None) -> Any:
        """Return a copy of what an embedding module has returned, with room behind the rows of unpooled tables."""
        if isinstance(result, KeyedTensor):
            values, front = result.values(), getattr(module, "leading_columns", 0)
            whole = values.new_zeros(values.shape[0], front + values.shape[1])
            copied = whole[:, front:].copy_(values).requires_grad_()
            return KeyedTensor(result.keys(), result.length_per_key(), copied)
        features = {sequence.name: sequence.feature for sequence in module.sender.distinct.sequences}
        found = {}
        for name, rows in result.items():
            count = rows.values().shape[0]
            more = 0 if fill is None else self._room(features[name], count) - count
            ids = rows.weights_or_none()
            ids = None if ids is None else _with_more(ids, more, 0)
            values = _with_more(rows.values().detach(), more, fill).requires_grad_()
            found[name] = JaggedTensor(values, ids, lengths=rows.lengths().clone())
        return found

    @contextmanager
    def _replaying(self, fill: float | None) -> Iterator[None]:
        """Have the embedding modules return what they returned in the step."""

        def result_of(module: nn.Module) -> Any:
            with torch.no_grad():
                return self._result(module, self._results[module], fill)

        def replay(module: nn.Module, *_: Any, **__: Any) -> Any:
            return Deferred(partial(result_of, module))

        for module in self._modules:
            module.forward = torch.compiler.disable(partial(replay, module))
        try:
            yield
        finally:
            for module in self._modules:
                del module.forward

    @contextmanager
    def _state_kept(self) -> Iterator[None]:
        """Leave parameters, buffers and attributes as they are, and keep dropout from depending on sizes."""
        attributes = [dict(vars(module)) for module in self._dense]
        dropping = [module for module in self._dense if isinstance(module, _DropoutNd) and module.training]
        held: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
            (tensors, name, tensor, tensor.detach().clone())
            for module in self._dense
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        for module in dropping:
            module.training = False
        try:
            yield
        finally:
            for module, before in zip(self._dense, attributes, strict=True):
                vars(module).update(before)
            with torch.no_grad():
                for tensors, name, tensor, before in held:
                    tensors[name] = tensor
                    tensor.copy_(before)


def _with_more(tensor: torch.Tensor, more: int, fill: float | None) -> torch.Tensor:
    """Return a copy of a tensor with so many more rows of `fill`, or of 0 where it cannot be NaN."""
    value = fill if fill is not None and tensor.is_floating_point() else 0
    return torch.cat([tensor, tensor.new_full((more, *tensor.shape[1:]), value)])


def _difference(exact: BatchTensors | Exception, found: BatchTensors | Exception) -> str:
    """Return how loss or output differ between two runs, empty if they do not."""
    if isinstance(exact, Exception):
        return f"it cannot be run twice on a batch ({_described(exact)})"
    if isinstance(found, Exception):
        return f"with room behind its ids it fails ({_described(found)})"
    if exact.keys() != found.keys() or difference(exact.constants, found.constants):
        return "its output has other parts with room behind its ids"
    for path, tensor in exact.items():
        if reason := _why_not_near(tensor, found[path]):
            return f"{'the loss' if path.partition('.')[0] == '0' else 'an output'} {reason}"
    return ""


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _why_not_near(exact: Any, found: Any) -> str:
    if isinstance(exact, KeyedJaggedTensor):
        exact, found = exact.values(), found.values()
    if exact.shape != found.shape:
        return "has another size with room behind the ids"
    if not exact.is_floating_point():
        return "" if torch.equal(exact, found) else "differs with room behind the ids"
    if (found.isnan() & ~exact.isnan()).any():
        return "becomes NaN with NaN in the room behind the ids"
    ours, theirs = (each.detach().double().nan_to_num() for each in (found, exact))
    tolerance = _TOLERANCE if exact.dtype.itemsize > 2 else _TOLERANCE_16
    scale = theirs.abs().max() if theirs.numel() else 0.0
    return "" if ((ours - theirs).abs() <= tolerance * scale).all() else "differs with room behind the ids"
