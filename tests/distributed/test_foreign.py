"""Programs as users of TorchRec write them give TorchRec's losses under the captured step's logic."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import count
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.capacity import CapacityTracker
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.train.graphs.input_prefetcher import InputPrefetcher
from tests.agreement import LOSS_TOLERANCE, assert_all_near, assert_same
from tests.conftest import refuses
from tests.distributed.captured import captures
from tests.distributed.foreign import (
    DIM,
    KEYS,
    PROGRAMS,
    Batch,
    Plain,
    Program,
    Sequences,
    _batches,
    _momentum,
    compare,
    then_torchrec,
    train,
    with_tensor_dict,
)
from tests.distributed.models import CPU, world
from tests.distributed.workers import cases_on_ranks

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
LATE, EAGER = ", counted late", ", uncaptured"


def _compare(case: str) -> None:
    """Compare a program: `EAGER` as on CPUs, or captured; `LATE` with ids that are counted after the step before."""
    name = case.removesuffix(LATE).removesuffix(EAGER)
    if case.endswith(EAGER):
        compare(name, world(), CPU)
        return
    late = patch.object(CapacityTracker, "is_within", lambda *_: False) if case.endswith(LATE) else nullcontext()
    with captures() as taken, late:
        compare(name, world(), CPU)
    assert tuple(taken.values()) == PROGRAMS[name].captured, taken


class Twice(Plain):
    """Calls one collection twice in a step."""

    def pooled(self, batch: Any) -> torch.Tensor:
        return super().pooled(batch) + super().pooled(batch)


@pytest.mark.usefixtures("world_of_one")
def test_a_second_call_is_refused_in_the_first_step() -> None:
    with refuses("calls an embedding collection twice in a step"):
        train(Program(Twice), True, world(), CPU)


class TrainedWeights(Plain):
    """Trains one weight for all ids."""

    weighted = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def pooled(self, batch: Any) -> torch.Tensor:
        ids = batch.ids
        made = KeyedJaggedTensor(ids.keys(), ids.values(), ids.weights() * self.scale, lengths=ids.lengths())
        return torch.cat(list(self.embedding(made).to_dict().values()), dim=1)


@pytest.mark.usefixtures("world_of_one")
def test_trained_weights_of_ids_are_refused() -> None:
    with refuses("their weights require a gradient"):
        train(Program(TrainedWeights), True, world(), CPU)


@pytest.mark.usefixtures("world_of_one")
def test_a_part_that_differs_in_every_batch_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Buffers are not made for batches again and again if each differs from the one before."""
    drop, dropped = InputPrefetcher.drop_buffers, list[int]()

    def count(prefetcher: InputPrefetcher) -> None:
        dropped.append(1)
        drop(prefetcher)

    with captures() as taken, patch.object(InputPrefetcher, "drop_buffers", count):
        train(PROGRAMS["step_numbers"]._replace(part=lambda step, _: step, steps=30), True, world(), CPU)
    assert tuple(taken.values()) == (0, 0)
    assert len(dropped) == 3, "after 3, 6 and 12 steps"
    told = "part part is 1, and was 0 in the first batch; give it as a tensor to have such steps captured"
    found = [message for message in caplog.messages if "part part is" in message]
    assert found == [f"train pipeline: the step of such a batch is eager: {told}"]


def _before_step(number: int, act: Callable[[Any, Any, Iterator[Any]], object]) -> Callable[..., Any]:
    """Return a function that lets a pipeline call `act(optimizer, model, batches)` before a step."""

    def wrap(pipeline: Any, optimizer: Any, model: Any) -> Any:
        progress, steps = pipeline.progress, count()

        def act_and_progress(batches: Iterator[Any]) -> Any:
            if next(steps) == number:
                act(optimizer, model, batches)
            return progress(batches)

        pipeline.progress = act_and_progress
        return pipeline

    return wrap


@torch.no_grad()
def _evaluate_by_torchrec(optimizer: Any, model: Any, batches: Iterator[Any]) -> None:
    EvalPipelineSparseDist(model, optimizer, CPU).progress(batches)


@pytest.mark.usefixtures("world_of_one")
def test_an_evaluation_by_torchrec_is_refused_while_ids_are_under_way() -> None:
    with captures(), refuses("ids of another batch are under way"):
        train(Program(wrap=_before_step(6, _evaluate_by_torchrec)), True, world(), CPU)


def _track(_: Any, model: Any, __: Iterator[Any]) -> None:
    (module,) = (each for each in model.modules() if isinstance(each, ExchangingModule))
    module._lookups[0].register_optim_state_tracker_fn(lambda *_: None)


@pytest.mark.usefixtures("world_of_one")
def test_a_tracker_that_no_step_would_call_is_refused() -> None:
    with captures(), refuses("a tracker was registered since the pipeline was made"):
        train(Program(wrap=_before_step(7, _track)), True, world(), CPU)


class OneDataParallel(Plain):
    kernels: ClassVar = {"h": "dense"}


@pytest.mark.usefixtures("world_of_one")
def test_torchrecs_pipeline_is_refused_for_data_parallel_tables_that_ours_has_looked_up() -> None:
    with refuses("data-parallel tables are looked up for the ids that GraphTrainPipeline sends"):
        train(Program(OneDataParallel, wrap=then_torchrec), True, world(), CPU)


class TwoBottoms(Plain):
    """Has a second layer of dense features, which is frozen at first or later."""

    is_frozen = True
    made: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        TwoBottoms.made = self
        self.second = nn.Linear(3, 4 * DIM).requires_grad_(not self.is_frozen)

    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) + self.second(batch.dense)


class FrozenLater(TwoBottoms):
    is_frozen = False


def _all_momentum(parameters: Mapping[str, Any]) -> Any:
    """Return an optimizer that also has the parameters that are frozen at first."""
    return _momentum({**parameters, **dict(TwoBottoms.made.second.named_parameters(prefix="second"))})


def _changed_at(step: int, weights: list[torch.Tensor]) -> Callable[..., Any]:
    """Return a function that lets a pipeline freeze `TwoBottoms.second`, or train it again, before a step.

    The weights of the layer are appended to `weights` before each step.
    """

    def wrap(pipeline: Any, _: Any, model: Any) -> Any:
        progress, second = pipeline.progress, model.module.second

        def change_and_progress(batches: Iterator[Any]) -> Any:
            if len(weights) == step:
                second.requires_grad_(not second.weight.requires_grad)
            weights.append(second.weight.detach().clone())
            return progress(batches)

        pipeline.progress = change_and_progress
        return pipeline

    return wrap


@pytest.mark.usefixtures("world_of_one")
def test_a_layer_that_is_trained_later_gives_the_losses_of_torchrec() -> None:
    found = list[dict[str, torch.Tensor]]()
    with captures() as taken:
        for captured in (False, True):
            weights = list[torch.Tensor]()
            program = Program(TwoBottoms, optimizer=_all_momentum, steps=14, wrap=_changed_at(6, weights))
            found.append(train(program, captured, world(), CPU))
            assert torch.equal(weights[0], weights[6])
            assert not torch.equal(weights[6], weights[7])
    assert_all_near(found[1], found[0], LOSS_TOLERANCE["sgd"], "a layer that is trained later:")
    assert tuple(taken.values()) == (4, 4)


@pytest.mark.usefixtures("world_of_one")
def test_a_layer_that_is_frozen_later_keeps_its_weights() -> None:
    """TorchRec's pipeline fails then."""
    weights = list[torch.Tensor]()
    with captures() as taken:
        train(Program(FrozenLater, optimizer=_momentum, steps=14, wrap=_changed_at(6, weights)), True, world(), CPU)
    assert tuple(taken.values()) == (4, 4)
    assert not torch.equal(weights[5], weights[6])
    for later in weights[7:]:
        assert_same(later, weights[6], "frozen weights")


@pytest.mark.usefixtures("world_of_one")
def test_a_model_that_was_trained_by_ids_takes_a_tensor_dict() -> None:
    models = list[Any]()
    for kind in (Plain, Sequences):
        train(Program(kind, wrap=lambda pipeline, _, model: models.append(model) or pipeline), True, world(), CPU)
        ids = KeyedJaggedTensor(KEYS, torch.arange(8), lengths=torch.ones(8, dtype=torch.int64))
        batches = [make(torch.ones(2, 3), ids, ids) for make in (Batch, with_tensor_dict)]
        with torch.no_grad():
            expected, found = (models[-1](batch)[1] for batch in batches)
        assert_same(found, expected, kind.__name__)


@pytest.mark.usefixtures("world_of_one")
def test_a_backward_after_two_later_forwards_is_refused() -> None:
    """It would update the rows of other ids: a model that was trained by captured steps has memory for those of two."""
    models = list[Any]()
    with captures():
        train(Program(wrap=lambda pipeline, _, model: models.append(model) or pipeline), True, world(), CPU)
        batches = list(_batches(Program(), 0))[:3]
        losses = [models[0](batch)[0] for batch in batches[:2]]
        losses[0].backward()
        losses = [models[0](batch)[0] for batch in batches]
        with refuses("a backward after 2 later forwards"):
            losses[0].backward()


@pytest.mark.usefixtures("world_of_one")
def test_an_own_forward_beyond_the_capacity_is_refused() -> None:
    models = list[Any]()
    train(Program(wrap=lambda pipeline, _, model: models.append(model) or pipeline), True, world(), CPU)
    ids = KeyedJaggedTensor(KEYS, torch.zeros(400, dtype=torch.int64), lengths=torch.full((8,), 50))
    with torch.no_grad(), pytest.raises(ValueError, match="has 100 ids of feature f, beyond its capacity"):
        models[0](Batch(torch.ones(2, 3), ids, ids))


# What every `make test` runs; the rest differs little from it.
QUICK = ["split", "two_sets_fixed", "one_feature", "clipped_adamw", "in_host_memory", "collection_in_host_memory"]
QUICK += ["data_parallel_collection", "longer_sequences", "longer_bags", "longer_bags" + LATE, "short_last_batch_fixed"]
QUICK += ["own_forward", "rows", "rows" + EAGER, "ids_as_numbers", "ids_from_parts", "own_forwards", "rebound_weights"]
QUICK += ["then_torchrec", "no_samples", "jagged_batch", "fewer_samples_once"]
MORE = [name for name in PROGRAMS if name not in QUICK]
ended, more_ended = cases_on_ranks(2, _compare, QUICK), cases_on_ranks(2, _compare, MORE)


@pytest.mark.parametrize("name", QUICK)
def test_losses_are_those_of_torchrec(ended: Callable[[str], None], name: str) -> None:
    ended(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_losses_of_more_programs_are_those_of_torchrec(more_ended: Callable[[str], None], name: str) -> None:
    more_ended(name)
