"""A top MLP that is divided over the ranks has the losses of a replicated one, captured and eager."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dlrm_overlap.config import Config
from tests.agreement import LOSS_TOLERANCE
from tests.gpu.exchange.checks.graphs import train_in_segments
from tests.gpu.exchange.checks.training import small_config
from tests.gpu.exchange.place import Place, every

_BORDERS = (0, 5, 12, 40)  # of segments, with an evaluation after each: eager steps between captured ones
# Name -> pipeline, and whether ranks are delayed by random times.
_RUNS = {"captured": ("graph", False), "delayed": ("graph", True), "eager": ("torchrec", False)}
# In bf16 partial products are rounded before they are summed, which changes losses.
_TOLERANCE = {"fp32": LOSS_TOLERANCE["sgd"], "bf16": 1e-3}


def _config(place: Place, pipeline: str, precision: str, parallel: str) -> Config:
    """Return a small DLRM with SGD, which shows a wrong scale of the gradients at once."""
    config = small_config(place, "pgas", "sgd", pipeline=pipeline)
    model = replace(config.model, top_mlp=[64, 48, 64, 16, 8, 1], top_parallel=parallel)  # type: ignore[arg-type]
    train = replace(config.train, optimizer="sgd", lr=0.3, precision=precision)  # type: ignore[arg-type]
    return replace(config, model=model, train=train, embedding=replace(config.embedding, lr=1.0))


def _check_losses(place: Place, precision: str, way: str) -> None:
    run: Callable[[str, str], Config] = partial(_config, place, precision=precision)
    expected = train_in_segments(place, run(pipeline="graph", parallel="data"), borders=_BORDERS)
    assert min(expected.losses) < 0.98 * expected.losses[0], "a run that learns nothing agrees with anything"
    pipeline, late = _RUNS[way]
    found = train_in_segments(place, run(pipeline=pipeline, parallel="tensor"), late, _BORDERS)
    found.assert_near(expected, _TOLERANCE[precision], way)


CHECKS = every("tensor_parallel", _check_losses, way=("captured", "eager"), precision=["fp32"]) | every(
    "tensor_parallel", _check_losses, way=["delayed"], precision=["bf16"]
)
