"""How the dense part trains: divided over ranks, compiled, captured in CUDA graphs, or with cast weights."""

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge, set_warn_on_accumulate_grad_stream_mismatch
from torch.func import functional_call
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.mlp import MLP, Perceptron

from dlrm_overlap.dense.cast import CastWeights
from dlrm_overlap.dense.cross import ComputeLayer, CrossLayer, compute_layer, cross
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.functions import Write
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.dense.layers import Layer, fits, interact, relu_layers
from dlrm_overlap.dense.mlp import small_mlp, suits
from dlrm_overlap.dense.tensor_parallel import divide_pairs, divided_layers
from dlrm_overlap.embedding.sharded_module import output_dtype
from dlrm_overlap.torchrec_private.attributes import activation_of, layers_of, linear_of
from dlrm_overlap.train.interaction import DotInteraction
from dlrm_overlap.train.model import Head, Part, TrainTask, concatenated

log = logging.getLogger("dlrm_overlap")


def divide_head(head: Head, products: ParallelProducts) -> None:
    """Divide pairs of layers of the top MLP over ranks; call this before it is compiled or gets an optimizer."""
    pairs = divide_pairs(head.top, products) if products.world_size > 1 else []
    if products.rank == 0:
        layers = " and ".join(f"{first + 1}, {second + 1}" for first, second in pairs) or "none"
        log.info("layers of the top MLP that are divided over %d ranks: %s", products.world_size, layers)


def compile_dense(task: TrainTask, samples: int, device: torch.device, small: bool = False) -> None:
    """Compile the bottom MLP and the head for batches of `samples`, by calling each once.

    Call this before DDP wraps the model: inside DDP, torch.compile would split its graphs at DDP's buckets. A divided
    head is not compiled, since torch.compile cannot trace its communication.

    With `small`, an MLP in float32 that is small enough is one kernel each way instead (`dense.mlp`).
    """
    parts = _without_divided(task)
    for part in parts:
        computed = small_form(task, part) if small and suits(samples) else None
        part.in_training = computed or _compiled(part.compute)
    with task.autocast():
        for part, inputs in zip(parts, _example_inputs(task, samples, device), strict=False):
            output = part(*inputs)
            wanted = [tensor for tensor in (*inputs, *part.parameters()) if tensor.requires_grad]
            torch.autograd.grad(output, wanted, torch.ones_like(output))  # does not set the parameters' gradients


def small_form(task: TrainTask, part: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Return a form of the bottom MLP or the head of few kernels; None if it is not small, or not in float32."""
    head = task.dlrm.head
    if task.computes_in_bf16:
        return None
    if part is not head:
        return _small_mlp(part)
    top, interaction = _small_mlp(head.top, head.logit), head.interaction
    if top is None or not isinstance(interaction, DotInteraction) or not fits(interaction.features, interaction.dim):
        return None
    pairs = partial(interact, features=interaction.features, width=interaction.out_features)
    join = _compiled(concatenated)
    return lambda *inputs: top(pairs(inputs[0] if len(inputs) == 1 else join(*inputs))).squeeze(1)


def _small_mlp(mlp: nn.Module, last: nn.Linear | None = None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return `small_mlp` of an MLP's layers and of `last`, which has no activation."""
    activation, layers = _layers_alike(mlp)
    if activation is None:
        return None
    return small_mlp([*layers, *([] if last is None else [last])], activation, ends_linear=last is not None)


def compile_loss(task: TrainTask) -> None:
    """Compile the loss, some fifteen kernels, into one kernel each for forward and backward."""
    task.loss.in_training = _compiled(task.loss.compute)


def _compiled(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(compute, fullgraph=True, dynamic=False)


def _without_divided(task: TrainTask) -> tuple[Part, ...]:
    dlrm = task.dlrm
    return (dlrm.bottom,) if divided_layers(dlrm.head) else (dlrm.bottom, dlrm.head)


def _example_inputs(
    task: TrainTask, samples: int, device: torch.device
) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return inputs of bottom MLP and head, shaped as in training; call it under autocast."""
    dlrm = task.dlrm
    dense = torch.randn(samples, dlrm.dense_features, device=device)
    front = torch.randn(samples, dlrm.front_columns, device=device).to(dlrm.bottom(dense).dtype).requires_grad_()
    pooled = torch.randn(samples, len(dlrm.pooled_keys) * dlrm.dim, device=device)
    if dlrm.joins_in_place:
        return (dense,), (concatenated(front, pooled).detach().requires_grad_(),)
    return (dense,), (front, pooled.to(output_dtype(dlrm.embedding)).requires_grad_())


def join_dense(
    model: DistributedModelParallel, task: TrainTask, device: torch.device, graph_samples: int | None = None
) -> None:
    """Wrap the dense part with DDP; a collective.

    If `graph_samples` is given, first capture the dense part in CUDA graphs for batches of this size.
    """
    nodes = _graph_dense(task, graph_samples, device) if graph_samples is not None else []
    model.init_data_parallel()
    del nodes  # DDP keeps them alive from here on


def _graph_dense(task: TrainTask, samples: int, device: torch.device) -> list[Node]:
    """Capture bottom MLP and head, forward and backward, in CUDA graphs for batches of `samples`.

    A divided head stays eager: its communication would have no fixed order among TorchRec's collectives.

    Returns the nodes that accumulate gradients. They are created on the current stream, before warm-up or capture
    create them on other streams: DDP waits for only one of the streams that fill a bucket.
    """
    capture = torch.cuda.graph
    parts = _without_divided(task)
    nodes = [get_gradient_edge(parameter).node for part in parts for parameter in part.parameters()]
    # Capture on the nodes' stream: a capture cannot wait for another stream, and kernels keep the stream's priority.
    before, capture.default_capture_stream = capture.default_capture_stream, torch.cuda.current_stream(device)
    with task.autocast():
        inputs = _example_inputs(task, samples, device)[: len(parts)]
        set_warn_on_accumulate_grad_stream_mismatch(False)  # the warm-up has a stream of its own
        torch.cuda.make_graphed_callables(parts, inputs)
        set_warn_on_accumulate_grad_stream_mismatch(True)
    capture.default_capture_stream = before
    return nodes


def in_flat_order(task: TrainTask, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return `parameters` in the order in which `FlatParameters` takes them for `cast_once`.

    The gradients are written in the order cross network, top MLP from its first layer, others, bottom MLP. A bucket is
    reduced in about the time of its products, so a small last bucket leaves the least to send after them.
    """
    head = task.dlrm.head
    first = [*reversed(list(head.interaction.parameters())), *head.top.parameters(), *head.logit.parameters()]
    names = {parameter: name for name, parameter in parameters.items()}
    order = dict.fromkeys([*first, *reversed(names)])
    return {names[parameter]: parameter for parameter in reversed(order) if parameter in names}


def cast_once(task: TrainTask, flat: FlatParameters, compiled: bool, cross_kernel: str = "auto") -> CastWeights:
    """Let the dense part train with bfloat16 copies of its parameters, which are cast once per step.

    Biases of the cross network are not cast, because autocast also computes its sums in float32.

    Args:
        flat: made of the parameters of `in_flat_order`.
        cross_kernel: as `train.cross_kernel`.

    Raises:
        InputError: if the cross network's layers cannot be computed by `cross_kernel`.
    """
    bottom, head = task.dlrm.bottom, task.dlrm.head
    crossed = head.interaction if compiled and isinstance(head.interaction, LowRankCrossNet) else None
    dotted = head.interaction if compiled and isinstance(head.interaction, DotInteraction) else None
    if dotted is not None and not fits(dotted.features, dotted.dim):
        dotted = None
    biases = {p for key, p in head.named_parameters() if key.startswith("interaction.bias")}
    shadowed = [p for part in (bottom, head) for p in part.parameters()]
    cast = [p for p in shadowed if crossed or p not in biases]
    casts = CastWeights(flat, cast, biases if crossed else ())
    computed = _mlp_with_casts(bottom, casts, compiled, inline=True)
    # Backward: the pooled embeddings' gradient is sent first; the head's are written during the bottom MLP's backward.
    bottom.in_training = lambda input: casts.ahead_of(computed(input))
    if crossed is None and dotted is None:
        head.in_training = _with_casts(head, casts, compiled and not divided_layers(head))
        return casts
    if crossed is not None:
        interaction = _cross_with_casts(crossed, casts, compute_layer(cross_kernel, flat.device))
    else:
        assert dotted is not None
        interaction = partial(interact, features=dotted.features, width=_aligned(dotted.out_features))
    score = _top_with_casts(head, casts, compiled)
    join = _compiled(concatenated)
    head.in_training = lambda *inputs: score(interaction(inputs[0] if len(inputs) == 1 else join(*inputs)))
    return casts


def _with_casts(part: nn.Module, casts: CastWeights, compiled: bool) -> Callable[..., torch.Tensor]:
    buffers, own = dict(part.named_buffers()), dict(part.named_parameters())
    stateless = copy.deepcopy(part).to("meta")  # has no weights

    def compute(weights: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        return functional_call(stateless, (weights, buffers), inputs)

    compute = _compiled(compute) if compiled else compute
    return lambda *inputs: compute(casts.of(own), *inputs)


def _layers_alike(mlp: nn.Module) -> tuple[Callable[..., torch.Tensor] | None, list[nn.Linear]]:
    """Return the activation of an MLP's layers, and the layers; None if they do not all have the same one."""
    layers = layers_of(mlp) if isinstance(mlp, MLP) else []
    activations = {activation_of(layer) if isinstance(layer, Perceptron) else None for layer in layers}
    if len(activations) != 1 or None in activations:
        return None, []
    return activations.pop(), [linear_of(layer) for layer in layers]


def _relu_layers(mlp: nn.Module) -> list[nn.Linear] | None:
    activation, layers = _layers_alike(mlp)
    return layers if activation is torch.relu else None


def _aligned(columns: int) -> int:
    """Round up `columns` so that a bfloat16 row is a multiple of 16 bytes; products read others three times slower."""
    return -(-columns // 8) * 8


def _mlp_with_casts(
    mlp: nn.Module, casts: CastWeights, compiled: bool, inline: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of x that computes an MLP, by `relu_layers` if possible; x may have extra columns of zeros.

    `inline` computes the weight gradients of `relu_layers` in its backward.
    """
    layers = _relu_layers(mlp) if compiled else None
    if layers is not None and layers[-1].out_features > 1:  # one output would be taken for logits, without ReLU
        return _layers_with_casts(layers, casts, inline)
    compute, columns = _with_casts(mlp, casts, compiled), next(mlp.parameters()).shape[1]
    return lambda x: compute(x if x.shape[1] == columns else x[:, :columns])


def _top_with_casts(head: Head, casts: CastWeights, compiled: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    compiles_top = compiled and not divided_layers(head)  # torch.compile cannot look into products that communicate
    squeezes = head.logit.out_features == 1
    if compiles_top and squeezes and (layers := _relu_layers(head.top)) is not None:
        return _layers_with_casts([*layers, head.logit], casts, inline=False)
    top = _mlp_with_casts(head.top, casts, compiles_top, inline=False)
    squeeze = nn.Flatten(0) if squeezes else nn.Identity()
    logit = _with_casts(nn.Sequential(OrderedDict(logit=head.logit, squeeze=squeeze)), casts, compiled)
    return lambda x: logit(top(x))


def _layers_with_casts(
    layers: Sequence[nn.Linear], casts: CastWeights, inline: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    each = [dict(layer.named_parameters()) for layer in layers]
    first = casts.shadow(each[0]["weight"])
    known, width = first.shape[1], _aligned(first.shape[1])
    wide = first.new_zeros(len(first), width if width > known else 0)

    def later(which: Sequence[tuple[int, str]], write: Write) -> None:
        parameters = [each[index][name] for index, name in which]
        (casts.now if inline else casts.later)(parameters, write)

    def compute(x: torch.Tensor) -> torch.Tensor:
        weights = [Layer(**{name: casts.shadow(p) for name, p in layer.items()}) for layer in each]
        if width > known:
            wide[:, :known] = weights[0].weight
            weights[0] = weights[0]._replace(weight=wide)
        if x.shape[1] < width or x.dtype != first.dtype:
            given, x = x, first.new_zeros(len(x), width)
            x[:, :known] = given
        return relu_layers(x, weights, later, casts.anchor)

    return compute


def _cross_with_casts(
    network: LowRankCrossNet, casts: CastWeights, compute_layer: ComputeLayer
) -> Callable[..., torch.Tensor]:
    own = {"w": list(network.W_kernels), "v": list(network.V_kernels), "bias": list(network.bias)}
    each = list(zip(*own.values(), strict=True))

    def later(name: str, write: Write) -> None:
        casts.later(own[name], write)

    def compute(x0: torch.Tensor) -> torch.Tensor:
        return cross(x0, [CrossLayer(casts.shadow(w), casts.shadow(v), b) for w, v, b in each], later, compute_layer)

    return compute
