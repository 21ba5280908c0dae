import torch
from torch import nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from dlrm_overlap.dense.flat import FlatParameters, unsupported_by_flat
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps
from dlrm_overlap.kernels.dense.arguments import BLOCK
from tests.agreement import assert_near, assert_same
from tests.conftest import refuses


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 1))


def _flat(model: nn.Module) -> FlatParameters:
    return FlatParameters(dict(model.named_parameters()))


def _backward(model: nn.Module, seed: int = 0) -> None:
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def _assert_consistent(flat: FlatParameters) -> None:
    """Check that parameters and gradients are aligned views that do not overlap, with zeros between them."""
    for tensor in (flat.weights, flat.gradients):
        assert tensor.tensor.numel() % BLOCK == 0
        taken = torch.zeros(tensor.tensor.numel(), dtype=torch.bool)
        for name, view in tensor.views.items():
            begin = view.storage_offset()
            assert view.untyped_storage().data_ptr() == tensor.tensor.data_ptr()
            assert begin % 64 == 0
            assert begin == flat.positions[name].begin
            assert not taken[begin : begin + view.numel()].any(), "views overlap"
            taken[begin : begin + view.numel()] = True
        assert not tensor.tensor[~taken].any(), "padding is zero"
    for name, parameter in flat.parameters.items():
        assert parameter.grad is flat.gradients.views[name]
        assert parameter.untyped_storage().data_ptr() == flat.weights.tensor.data_ptr()
        assert parameter.storage_offset() == flat.positions[name].begin
        assert parameter.shape == flat.weights.views[name].shape


def test_shards_are_last_and_begin_a_block() -> None:
    model = _model()
    flat = FlatParameters(dict(model.named_parameters()), ["0.weight", "2.bias"])
    _assert_consistent(flat)
    assert flat.shared_end == BLOCK
    assert list(flat.positions) == ["2.weight", "0.bias", "2.bias", "0.weight"], "the last comes first"
    assert {name for name, position in flat.positions.items() if position.begin >= BLOCK} == flat.shards


def test_values_and_gradients_are_kept_and_accumulate() -> None:
    model, twin = _model(), _model()
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        _backward(each)
    flat = _flat(model)
    _assert_consistent(flat)
    for seed in (1, 2):
        for each in (model, twin):
            _backward(each, seed)
    _assert_consistent(flat)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert_same(ours.data, theirs.data, name)
        assert_same(ours.grad, theirs.grad, name)
    flat.zero()
    assert not flat.gradients.tensor.any()
    _assert_consistent(flat)


def test_gradients_that_others_set_are_adopted() -> None:
    model = _model()
    flat = _flat(model)
    flat.gradients.tensor.fill_(7)
    given = torch.full((5, 3), 2.0)
    flat.parameters["0.weight"].grad, flat.parameters["0.bias"].grad = given, None
    flat.adopt_gradients(["0.weight"])
    assert flat.parameters["0.bias"].grad is None
    flat.adopt_gradients()
    assert_same(flat.gradients.views["0.weight"], given, "a gradient that was set")
    assert not flat.gradients.views["0.bias"].any(), "None is zero"
    assert (flat.gradients.views["2.weight"] == 7).all(), "the flat tensor's own is left alone"
    assert flat.parameters["0.weight"].grad is flat.gradients.views["0.weight"]
    flat.drop_gradients()
    flat.parameters["0.weight"].grad = given.to_sparse()  # as nn.Embedding's may be
    flat.adopt_gradients()
    assert_same(flat.gradients.views["0.weight"], given, "a sparse gradient")
    model.zero_grad(set_to_none=True)
    flat.zero()
    assert not flat.gradients.tensor.any()
    assert all(parameter.grad is flat.gradients.views[name] for name, parameter in model.named_parameters())


def test_the_gradient_of_an_idle_parameter_is_none() -> None:
    model = _model()
    flat = _flat(model)
    flat.idle = frozenset(["0.bias"])
    views = {name: None if name in flat.idle else view for name, view in flat.gradients.views.items()}
    for show in (flat.show_gradients, flat.zero, flat.adopt_gradients, lambda: flat.zero(["2.bias", "0.bias"])):
        show()
        assert all(parameter.grad is views[name] for name, parameter in model.named_parameters())


def test_gradients_can_be_kept_in_given_memory() -> None:
    flat = FlatParameters({"first": nn.Parameter(torch.ones(65, 1)), "second": nn.Parameter(torch.ones(3))})
    before, views = flat.gradients.tensor, dict(flat.gradients.views)
    for number, view in enumerate(views.values()):
        view.fill_(number + 1)
    content, memory = before.clone(), torch.full_like(before, torch.nan)
    flat.keep_gradients_in(memory)
    assert flat.gradients.tensor is before, "the tensor is the same object"
    assert_same(memory, content, "content")
    memory.add_(1)
    for name, view in flat.gradients.views.items():
        assert view is views[name] is flat.parameters[name].grad
        assert_same(view, flat.positions[name].of(memory), name)


def test_weights_and_shadow_move_to_other_memory() -> None:
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in (("a", (2, 3)), ("b", (70,)))}
    flat = FlatParameters(parameters, shadow_dtype=torch.bfloat16)
    assert flat.shadow is not None
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    memory = [
        torch.empty(8 + flat.weights.tensor.numel(), dtype=dtype)[8:] for dtype in (torch.float32, torch.bfloat16)
    ]
    tensors = flat.weights.tensor, flat.shadow.tensor
    flat.keep_weights_in(*memory)
    assert flat.weights.tensor is tensors[0]
    assert flat.shadow.tensor is tensors[1]
    for name, parameter in parameters.items():
        moved = flat.positions[name].of(memory[0])
        assert parameter.data_ptr() == flat.weights.views[name].data_ptr() == moved.data_ptr()
        assert flat.shadow.views[name].data_ptr() == flat.positions[name].of(memory[1]).data_ptr()
        assert_same(parameter.data, before[name], name)
        assert_same(flat.shadow.views[name], before[name].bfloat16(), f"bfloat16 {name}")


def test_weights_that_are_given_other_memory_return_to_the_flat_tensor() -> None:
    parameters = {name: nn.Parameter(torch.randn(2, 3)) for name in ("a", "b", "c")}
    flat = FlatParameters(parameters, shadow_dtype=torch.bfloat16)
    assert flat.shadow is not None
    assert not flat.adopt_weights()
    a, b, c = (parameter.detach().clone() for parameter in parameters.values())
    parameters["a"].data, parameters["b"].data = parameters["b"].data, parameters["a"].data
    assert flat.adopt_weights()
    torch.nn.utils.vector_to_parameters(2 * torch.nn.utils.parameters_to_vector([parameters["c"]]), [parameters["c"]])
    assert flat.adopt_weights()
    for name, expected in zip(parameters, (b, a, 2 * c), strict=True):
        assert parameters[name].data_ptr() == flat.weights.views[name].data_ptr()
        assert_same(flat.weights.views[name], expected, name)
        assert_same(flat.shadow.views[name], expected.bfloat16(), f"bfloat16 {name}")
    assert not flat.adopt_weights()
    parameters["a"].data = torch.ones(6)
    with refuses(r"dense parameter a: its data is now \[6\] torch.float32 on cpu, and was \[2, 3\] "):
        flat.adopt_weights()


class _Owned(nn.Parameter):
    """A parameter in the memory of another one, as FBGEMM's slices of tables are."""


def test_parameters_that_cannot_be_moved_have_a_reason() -> None:
    plain, half = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1).half())
    assert unsupported_by_flat({"a": plain}) is None
    assert unsupported_by_flat({"a": half}) == "a is torch.float16 and must be torch.float32"
    owned = "a is a _Owned and must be a plain nn.Parameter with memory of its own"
    assert unsupported_by_flat({"a": _Owned(torch.ones(1))}) == owned


def _slices(whole: nn.Parameter) -> dict[str, nn.Parameter]:
    """Return the parameter's two parts, [3, 4] and [2, 5], as TorchRec shows the tables of a lookup."""
    slices = {"one": (0, 12, 3, 4), "two": (12, 22, 2, 5)}
    return {name: TableBatchedEmbeddingSlice(whole, *each) for name, each in slices.items()}


def test_slices_stay_slices_of_what_is_moved() -> None:
    whole, other = nn.Parameter(torch.arange(22.0)), nn.Parameter(torch.ones(3))
    given = {"other": other, **_slices(whole)}
    flat = FlatParameters(given)
    assert flat.parameters == {"other": other, "lookup of one/two": whole}
    position = flat.positions["lookup of one/two"]
    for name, parameter, values in (("one", given["one"], range(12)), ("two", given["two"], range(12, 22))):
        assert parameter.flatten().tolist() == list(values)
        assert parameter.data_ptr() == flat.weights.views[name].data_ptr()
        assert parameter.data_ptr() == flat.weights.tensor[position.begin + values[0] :].data_ptr()
    assert whole.data_ptr() == flat.weights.tensor[position.begin :].data_ptr()
    (whole * torch.arange(22.0)).sum().backward()
    assert flat.gradients.views["two"].flatten().tolist() == list(range(12, 22))
    assert given["one"].grad is not None
    assert given["one"].grad.data_ptr() == flat.gradients.views["one"].data_ptr()
    optimizer = torch.optim.Adagrad(given.values(), lr=1.0)
    flat.adopt_gradients()
    take_steps([FlatSteps(flat, optimizer)], [(0, flat.weights.tensor.numel())])
    assert_same(optimizer.state[given["two"]]["sum"], torch.arange(12.0, 22.0).square().view(2, 5), "state")
    assert_near(given["two"].data, torch.arange(11.0, 21.0).view(2, 5), 1e-6, "updated")
