"""Refuses to read dense weights and optimizer states while only their owners have them up to date."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from dlrm_overlap.config import InputError


def _never() -> bool:
    return False


class _Refusal:
    """A hook that raises an `InputError` while weights are stale; a copy of it, in a copy of the model, never does."""

    def __init__(self, are_stale: Callable[[], bool], in_training: bool) -> None:
        self._are_stale, self._in_training = are_stale, in_training

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._in_training or not module.training:
            self.check()

    def check(self) -> None:
        if self._are_stale():
            raise InputError(
                "dense_update: owner, so after a step each rank has only its share of the float32 dense weights and "
                "optimizer states; call the pipeline's gather_dense() on all ranks before they are read"
            )

    def __reduce__(self) -> tuple[Any, ...]:  # for copy.deepcopy and pickle
        self.check()
        return _Refusal, (_never, self._in_training)


class StaleWeights:
    """Guards the state dicts and copies of a model, the state dicts of its optimizers, and forwards in evaluation mode.

    It does not notice a program that reads the data of a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Collection[nn.Parameter],
        optimizers: Iterable[Any],
        are_stale: Callable[[], bool],
    ) -> None:
        """Guard the modules that have any of `parameters`, and `optimizers`, until `close`."""
        self.are_stale, self._optimizers = are_stale, list(optimizers)
        self._handles = list[Any]()
        self._refuse = _Refusal(are_stale, in_training=True)
        guarded = {id(parameter) for parameter in parameters}
        for module in model.modules():
            if any(id(parameter) in guarded for parameter in module.parameters(recurse=False)):
                self._handles.append(module.register_state_dict_pre_hook(self._refuse))
            if any(id(parameter) in guarded for parameter in module.parameters()):
                self._handles.append(module.register_forward_pre_hook(_Refusal(are_stale, in_training=False)))
        for optimizer in self._optimizers:
            optimizer.state_dict = self._guarded(optimizer.state_dict)  # TorchRec's optimizers call no hooks

    def _guarded(self, state_dict: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            self._refuse.check()
            return state_dict(*arguments, **options)

        return guarded

    def check(self) -> None:
        """Raise an `InputError` if the weights are stale."""
        self._refuse.check()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            del optimizer.state_dict
