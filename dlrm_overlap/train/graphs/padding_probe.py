"""Finds out whether a model reads the padding of captured steps, such as by a mean over `values()` of ids.

The model is run again on the batch of an eager step: without padding, padded with zeros, and padded with NaN. If loss,
output or the ids that it gives to embedding modules differ, the model reads the padding. These runs call no collective
and leave no trace: the embedding modules return what they returned in the step, and parameters, buffers and random
generators are restored.
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
from dlrm_overlap.embedding.steps import weights_of
from dlrm_overlap.torchrec_private import maybe_td_to_kjt
from dlrm_overlap.train.graphs.constants import difference
from dlrm_overlap.train.graphs.static_batch import BatchTensors, PaddedKeyedJaggedTensor, replace_leaves

_EXTRA = 8  # ids of padding, in addition to the ids of a feature
# Of sums in another order, relative to the largest element of a tensor; the second for 16-bit types.
_TOLERANCE, _TOLERANCE_16 = 1e-3, 2e-2


class PaddingProbe:
    def __init__(
        self, model: nn.Module, modules: Sequence[ExchangingModule[Any]], capacity: BatchCapacity, batch: Any
    ) -> None:
        """Copy `batch`, unpadded and on the device, before its step in `recording`, which may change it."""
        self._modules, self._capacity = modules, capacity
        self._batch = replace_leaves(batch, partial(self._copy, fill=None))
        self._results: dict[nn.Module, Any] = {}
        self._ids: dict[nn.Module, list[torch.Tensor]] = {}
        """what the model gives to each embedding module in the run without padding, see `_ids_of`"""
        self._differing_ids = ""
        exchanged = {inner for module in modules for inner in module.modules()}
        self._dense = [module for module in model.modules() if module not in exchanged]

    @contextmanager
    def recording(self) -> Iterator[None]:
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

    def why_padding_is_read(self, forward: Callable[[Any], Any], any_is: Callable[[bool], bool]) -> str:
        """Return how padding changes loss or output, on this rank or another; empty if it does not. A collective.

        `forward` returns loss and output of a batch; `any_is` returns whether something is true on any rank.
        """
        exact = self._run(forward, None)
        # Zeros come first: kernels that check their input, such as binary cross-entropy's, end the process at NaN.
        for fill in (0.0, torch.nan):
            found = self._run(forward, fill)
            reason = self._differing_ids or _difference(exact, found)
            if any_is(bool(reason)):
                return reason or "another rank has found out"
        return ""

    def _run(self, forward: Callable[[Any], Any], fill: float | None) -> BatchTensors | Exception:
        """Return loss and output, or the error raised; the batch is padded with `fill`, or not at all if it is None."""
        device = next((p.device for module in self._dense for p in module.parameters(recurse=False)), None)
        devices = [device.index] if device is not None and device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._state_kept(), self._replaying(fill):
            try:
                loss, output = forward(replace_leaves(self._batch, partial(self._copy, fill=fill)))
                return BatchTensors((loss, output))
            except Exception as error:  # of any type: the model is the user's
                return error

    def _padded_count(self, feature: str, count: int) -> int:
        least, most = self._capacity.bag_sizes.get(feature, (0, 1))
        is_full = least == most and self._capacity.capacity([feature]) == [count]
        return count if is_full else 2 * count + _EXTRA

    def _copy(self, leaf: Any, fill: float | None) -> Any:
        if not isinstance(leaf, PaddedKeyedJaggedTensor):
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        counts, keys = leaf.capacities, leaf.keys()
        sizes = counts if fill is None else list(map(self._padded_count, keys, counts))
        padding = sum(sizes) - sum(counts)
        weights = leaf.weights_or_none()
        weights = None if weights is None else _pad(weights, padding, fill)
        tensors = _pad(leaf.values(), padding, 0), weights, leaf.lengths().clone()
        return PaddedKeyedJaggedTensor(
            keys, *tensors, leaf.stride(), sizes, sizes == counts, leaf.inverse_indices_or_none()
        )

    def _result(self, module: Any, result: Any, fill: float | None) -> Any:
        """Return a copy of an embedding module's result. Unless `fill` is None, rows of unpooled tables are padded."""
        if isinstance(result, KeyedTensor):
            values, front = result.values(), getattr(module, "leading_columns", 0)
            whole = values.new_zeros(values.shape[0], front + values.shape[1])
            copied = whole[:, front:].copy_(values).requires_grad_()
            return KeyedTensor(result.keys(), result.length_per_key(), copied)
        features = {sequence.name: sequence.feature for sequence in module.sender.distinct.sequences}
        found = {}
        for name, rows in result.items():
            count = rows.values().shape[0]
            padding = 0 if fill is None else self._padded_count(features[name], count) - count
            ids = rows.weights_or_none()
            ids = None if ids is None else _pad(ids, padding, 0)
            values = _pad(rows.values().detach(), padding, fill).requires_grad_()
            found[name] = JaggedTensor(values, ids, lengths=rows.lengths().clone())
        return found

    @contextmanager
    def _replaying(self, fill: float | None) -> Iterator[None]:
        def result_of(module: nn.Module) -> Any:
            with torch.no_grad():
                return self._result(module, self._results[module], fill)

        def replay(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
            given = _ids_of(maybe_td_to_kjt(*inputs, *keywords.values()))
            if fill is None:
                self._ids[module] = given
            elif any(map(_why_not_near, self._ids.get(module, given), given)):
                self._differing_ids = "the ids that it makes for an embedding collection differ with padded ids"
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
        """Disable dropout, which depends on sizes, and restore parameters, buffers and attributes at the end."""
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


@torch.no_grad()
def _ids_of(ids: KeyedJaggedTensor) -> list[torch.Tensor]:
    """Return copies of the lengths, of the ids that they count, and of the weights of these ids, if any."""
    lengths, weights = ids.lengths(), weights_of(ids)
    count = int(lengths.sum())
    counted = [ids.values()[:count], *([] if weights is None else [weights[:count]])]
    return [each.detach().clone() for each in (lengths, *counted)]


def _pad(tensor: torch.Tensor, rows: int, fill: float | None) -> torch.Tensor:
    value = fill if fill is not None and tensor.is_floating_point() else 0
    return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), value)])


def _difference(exact: BatchTensors | Exception, found: BatchTensors | Exception) -> str:
    if isinstance(exact, Exception):
        return f"it cannot be run twice on a batch ({_described(exact)})"
    if isinstance(found, Exception):
        return f"with padded ids it fails ({_described(found)})"
    if exact.keys() != found.keys() or difference(exact.constants, found.constants):
        return "its output has other parts with padded ids"
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
        return "has another size with padded ids"
    if not exact.is_floating_point():
        return "" if torch.equal(exact, found) else "differs with padded ids"
    if (found.isnan() & ~exact.isnan()).any():
        return "becomes NaN if ids are padded with NaN"
    ours, theirs = (each.detach().double().nan_to_num() for each in (found, exact))
    tolerance = _TOLERANCE if exact.dtype.itemsize > 2 else _TOLERANCE_16
    scale = theirs.abs().max() if theirs.numel() else 0.0
    return "" if ((ours - theirs).abs() <= tolerance * scale).all() else "differs with padded ids"
