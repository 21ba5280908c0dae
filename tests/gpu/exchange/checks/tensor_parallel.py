"""A top MLP that is divided over the ranks, captured and eager: the losses of one that every rank has whole."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from dlrm_overlap.config import Config
from dlrm_overlap.dense.tensor_parallel import products_of, shards_of
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import LOSS_TOLERANCE
from tests.gpu.exchange.checks.graphs import delayed
from tests.gpu.exchange.checks.training import assert_agree, make_trainer, small_config, train_steps
from tests.gpu.exchange.place import Place, every

_BORDERS = (0, 5, 12, 40)  # of segments, with an evaluation behind each: eager steps between captured ones
_RUNS = {"captured": ("graph", False), "delayed": ("graph", True), "eager": ("torchrec", False)}
"""name -> pipeline, and whether ranks are kept busy for random times"""
# In bf16 partial products are rounded before they are summed, so losses part by what rounding makes of them.
_TOLERANCE = {"fp32": LOSS_TOLERANCE["sgd"], "bf16": 1e-3}


def _config(place: Place, pipeline: str, precision: str, parallel: str) -> Config:
    """Return a small DLRM by SGD, which shows a wrong scale of the gradients at once."""
    config = small_config(place, "pgas", "sgd", pipeline=pipeline)
    model = replace(config.model, top_mlp=[64, 48, 64, 16, 8, 1], top_parallel=parallel)  # type: ignore[arg-type]
    train = replace(config.train, optimizer="sgd", lr=0.3, precision=precision)  # type: ignore[arg-type]
    return replace(config, model=model, train=train, embedding=replace(config.embedding, lr=1.0))


def _train(place: Place, config: Config, late: bool = False) -> tuple[list[float], list[float]]:
    """Return the losses of a run in segments, and those of the evaluations behind them."""
    trainer: Trainer = make_trainer(place, config)
    assert isinstance(trainer.pipeline, GraphTrainPipeline) == (config.train.pipeline == "graph")
    assert bool(shards_of(trainer.model)) == (config.model.top_parallel == "tensor" and place.world_size > 1)
    losses: list[float] = []
    evaluated: list[float] = []
    with delayed(place, trainer.pipeline, late):
        for first, end in pairwise(_BORDERS):
            losses += train_steps(place, trainer, first, end)
            evaluated.append(trainer.evaluate()["loss"])
    place.meet()
    for products in products_of(trainer.model):
        products.check()
    trainer.close()
    return losses, evaluated


def _check_losses(place: Place, precision: str, way: str) -> None:
    run: Callable[[str, str], Config] = partial(_config, place, precision=precision)
    expected, expected_evaluated = _train(place, run(pipeline="graph", parallel="data"))
    assert min(expected) < 0.98 * expected[0], "a run that learns nothing agrees with anything"
    pipeline, late = _RUNS[way]
    losses, evaluated = _train(place, run(pipeline=pipeline, parallel="tensor"), late)
    assert_agree(losses, expected, _TOLERANCE[precision], way)
    assert_agree(evaluated, expected_evaluated, _TOLERANCE[precision], f"{way}, evaluated")


CHECKS = every("tensor_parallel", _check_losses, way=list(_RUNS), precision=list(_TOLERANCE), timeout_s=40.0)
