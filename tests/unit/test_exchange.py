"""An exchange in a world of one: who holds a window, and ids outside their table."""

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.forward import BACKENDS, BatchSizes, ExchangeOptions, Step
from dlrm_overlap.embedding.windows import WindowHeldError
from dlrm_overlap.kernels import reference
from tests.agreement import assert_same
from tests.distributed.interpreted import interpreted_forward
from tests.distributed.stage import ROWS, Stage
from tests.kernels.emulation import interpreted

ALONE = [([8, 4], [4])]
every_window = pytest.mark.parametrize("backend", ["pgas", "fused"])


@every_window
def test_a_second_forward_is_refused_while_the_output_is_held(world_of_one: dist.ProcessGroup, backend: str) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, backend)
    inputs, expected = stage.inputs(0, (5,))
    pooled = exchange.start(inputs, (5,)).wait().detach()
    for _ in range(2):
        with pytest.raises(WindowHeldError):
            exchange.start(inputs, (5,))
    assert_same(pooled, expected, "what is held")
    kept = pooled.clone()
    del pooled
    inputs, following = stage.inputs(1, (5,))
    assert_same(exchange.start(inputs, (5,)).wait().detach(), following, "the step after")
    assert_same(kept, expected, "a clone")
    exchange.close()


@every_window
def test_backward_and_evaluation_let_go(world_of_one: dist.ProcessGroup, backend: str) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, backend)
    factor = torch.ones(stage.layout.total_dim, requires_grad=True)
    for number in range(6):
        inputs, expected = stage.inputs(number, (5,))
        with torch.set_grad_enabled(number % 3 != 2):
            product = exchange.start(inputs, (5,)).wait() * factor  # whose backward needs the pooled embeddings
        if number % 3 == 0:
            with pytest.raises(WindowHeldError):
                exchange.start(inputs, (5,))
        if product.requires_grad:
            product.backward(torch.zeros_like(product))  # changes no row
        assert_same(product.detach(), expected, f"step {number}")
    exchange.close()


def test_a_cast_from_the_wires_type_lets_go(world_of_one: dist.ProcessGroup) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, "pgas", wire_dtype=torch.bfloat16)
    outputs = []
    for number in range(3):
        inputs, expected = stage.inputs(number, (5,))
        outputs.append((exchange.start(inputs, (5,)).wait(), expected))
    for pooled, expected in outputs:
        assert_same(pooled.detach(), expected.bfloat16().float(), "pooled embeddings")
    exchange.close()


def _with_a_bad_id(mode: BoundsCheckMode) -> tuple[Stage, list[KeyedJaggedTensor], torch.Tensor]:
    """Return a stage whose second feature has an id outside its table, and what taking row 0 for it gives."""
    stage = Stage(ALONE, 0, mode)
    inputs, expected = stage.inputs(0, (5,))
    ids = inputs[0]
    bag = 5 + int(ids.lengths()[5:10].nonzero()[0])
    ids.values()[int(ids.offsets()[bag])] = 0
    piece = stage.pieces[1]
    begin, end = int(ids.offsets()[5]), int(ids.offsets()[10])
    column = stage.layout.column(piece)
    pooled = reference.pool(stage.weights[piece.name], ids.lengths()[5:10], ids.values()[begin:end])
    expected[:, column : column + piece.dim] = pooled
    ids.values()[int(ids.offsets()[bag])] = ROWS
    return stage, inputs, expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_outside_its_table(world_of_one: dist.ProcessGroup, backend: str) -> None:
    stage, inputs, _ = _with_a_bad_id(BoundsCheckMode.FATAL)
    with pytest.raises(ValueError, match="rank0_1: id 20 is outside its table of 20 rows"):
        stage.exchange(world_of_one, backend).start(inputs, (5,))
    for mode in (BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE):
        stage, inputs, expected = _with_a_bad_id(mode)
        pooled = stage.exchange(world_of_one, backend).start(inputs, (5,)).wait()
        assert_same(pooled.detach(), expected, mode.name)
        assert inputs[0].values().max() < ROWS, "the backward reads the ids once more"


@interpreted
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_outside_its_table_on_the_gpus_way(
    world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    def run(mode: BoundsCheckMode) -> None:
        stage, inputs, expected = _with_a_bad_id(mode)
        options = ExchangeOptions(backend=backend, slice_bags=4, wait_timeout_s=1e-4)
        forward = interpreted_forward(stage, world_of_one, options, samples=5)
        step = Step(inputs, BatchSizes.of((5,)))
        forward.launch(step)
        assert_same(forward.collect(step), expected, mode.name)
        assert inputs[0].values().max() < ROWS
        for _ in range(2):
            forward.check()

    with pytest.raises(
        ValueError, match=r"sample \d of the global batch: rank0_1: an id is outside its table of 20 rows"
    ):
        run(BoundsCheckMode.FATAL)
    run(BoundsCheckMode.IGNORE)
    assert not caplog.messages
    run(BoundsCheckMode.WARNING)
    assert len(caplog.messages) == 1, "once"
    assert "row 0 was taken" in caplog.messages[0]
