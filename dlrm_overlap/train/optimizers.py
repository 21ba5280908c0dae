"""The optimizers of tables and dense part, and the learning rates that they take in the steps of a run."""

from collections.abc import Callable
from functools import partial

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from dlrm_overlap.config import TrainConfig
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.optimizer import FlatOptimizer
from dlrm_overlap.train.graphs.parts import dense_parameters


def build_dense_optimizer(
    model: DistributedModelParallel, config: TrainConfig, flat: FlatParameters | None = None
) -> KeyedOptimizer:
    """Return the optimizer of the dense part, over `flat` if it is given. The tables' is fused into their backward."""
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": partial(torch.optim.Adagrad, eps=config.eps),
        "adam": partial(torch.optim.Adam, eps=config.eps),
    }
    parameters = dense_parameters(model)
    if flat is not None:
        shadow = torch.bfloat16 if config.precision == "bf16" else None
        kind, numbers = config.optimizer, (config.lr, config.eps)
        return KeyedOptimizerWrapper(parameters, lambda _: FlatOptimizer(flat, kind, *numbers, shadow_dtype=shadow))
    return KeyedOptimizerWrapper(parameters, lambda params: makers[config.optimizer](params, lr=config.lr))


def build_optimizer(
    model: DistributedModelParallel, config: TrainConfig, flat: FlatParameters | None = None
) -> CombinedOptimizer:
    """Return one optimizer over the tables and the dense part, which is `flat` if that is given."""
    return CombinedOptimizer([model.fused_optimizer, ("dense", build_dense_optimizer(model, config, flat))])


class LearningRate:
    """Linear warm-up, then a constant, then a quadratic decay to zero (MLPerf's schedule), for all parameters alike."""

    def __init__(self, optimizer: CombinedOptimizer, config: TrainConfig) -> None:
        self.config = config
        self.optimizer = optimizer
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.current: float | None = None

    def factor(self, step: int) -> float:
        """Return what the configured learning rates are multiplied by at `step`, counted from 0."""
        config = self.config
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.decay_steps and step >= config.decay_start_step:
            done = min(step - config.decay_start_step, config.decay_steps) / config.decay_steps
            return (1.0 - done) ** 2
        return 1.0

    def set(self, step: int) -> None:
        """Set the learning rates of `step`, counted from 0, where they differ from those of the step before."""
        factor = self.factor(step)
        if factor != self.current:
            for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = lr * factor  # type: ignore[index]
            self.current = factor
