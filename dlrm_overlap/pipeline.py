"""Turns a model and a plan into what takes steps: the sharded model, optimizers, learning rates, train pipeline."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge, set_warn_on_accumulate_grad_stream_mismatch
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_overlap.config import TrainConfig
from dlrm_overlap.model import TrainTask


def shard_model(
    task: TrainTask,
    plan: ShardingPlan,
    sharder: ModuleSharder,
    group: dist.ProcessGroup,
    device: torch.device,
    samples: int,
    config: TrainConfig,
) -> DistributedModelParallel:
    """Shard the tables over the ranks as `plan` says, and put the dense part on every rank under data parallelism.

    The dense part is compiled and captured in CUDA graphs, for batches of `samples`, if `config` asks for either. Both
    happen before DDP wraps it: DDP requires this order of a capture, and within DDP's forward torch.compile would cut
    what it compiles at the borders of DDP's buckets.
    """
    model = DistributedModelParallel(
        module=task,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=plan,
        sharders=[sharder],
        init_data_parallel=False,
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=True),
    )
    task.to(device)
    if config.compile_dense:
        _compile_dense(task, samples, device)
    nodes = _graph_dense(task, samples, device) if config.graph_dense else []
    model.init_data_parallel()
    del nodes  # DDP holds them from here on
    return model


def _example_inputs(
    task: TrainTask, samples: int, device: torch.device
) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs of the bottom MLP and of the head as a training batch of `samples` has them; under autocast."""
    dlrm = task.dlrm
    dense = torch.randn(samples, dlrm.dense_features, device=device)
    dense_bD = torch.randn_like(dlrm.bottom(dense)).requires_grad_()
    pooled = torch.randn(samples, len(dlrm.keys) * dlrm.dim, device=device, requires_grad=True)
    return (dense,), (dense_bD, pooled)


def _compile_dense(task: TrainTask, samples: int, device: torch.device) -> None:
    """Compile forward and backward of the bottom MLP and of the head for batches of `samples`. Evaluation runs eagerly.

    torch.compile compiles at the first call, so each part is called once here.
    """
    for part in (task.dlrm.bottom, task.dlrm.head):
        part.forward = _compiled_in_training(part)
    with task.autocast():
        for part, inputs in zip(
            (task.dlrm.bottom, task.dlrm.head), _example_inputs(task, samples, device), strict=True
        ):
            output = part(*inputs)
            wanted = [tensor for tensor in (*inputs, *part.parameters()) if tensor.requires_grad]
            torch.autograd.grad(output, wanted, torch.ones_like(output))  # leaves the parameters' own gradients unset


def _compiled_in_training(part: nn.Module) -> Callable[..., torch.Tensor]:
    """Return the part's forward, compiled while it trains and eager while it evaluates, as where it is captured."""
    eager = part.forward
    # The forward alone, since the module that torch.compile makes of a module gives its parameters other names.
    compiled = torch.compile(eager, fullgraph=True, dynamic=False)
    return lambda *inputs: (compiled if part.training else eager)(*inputs)


def _graph_dense(task: TrainTask, samples: int, device: torch.device) -> list[Node]:
    """Capture forward and backward of the bottom MLP and of the head, each in CUDA graphs for batches of `samples`.

    Eager PyTorch needs longer to launch the dense part's kernels than the GPU to run them. Evaluation runs eagerly.

    Returns:
        The nodes that accumulate the parameters' gradients. Such a node runs on the stream where it was made, and DDP,
        before it reduces a bucket, waits for only one of the streams that fill it. So all nodes are made here, on the
        current stream, before the warm-up or the capture would make them on streams of their own.
    """
    dlrm, capture = task.dlrm, torch.cuda.graph
    nodes = [get_gradient_edge(parameter).node for part in (dlrm.bottom, dlrm.head) for parameter in part.parameters()]
    # Captured on the nodes' stream, since a capture cannot wait for another, and its kernels keep its priority.
    before, capture.default_capture_stream = capture.default_capture_stream, torch.cuda.current_stream(device)
    with task.autocast():
        inputs = _example_inputs(task, samples, device)
        set_warn_on_accumulate_grad_stream_mismatch(False)  # the warm-up has a stream of its own
        torch.cuda.make_graphed_callables((dlrm.bottom, dlrm.head), inputs)
        set_warn_on_accumulate_grad_stream_mismatch(True)
    capture.default_capture_stream = before
    return nodes


def build_dense_optimizer(model: DistributedModelParallel, config: TrainConfig) -> KeyedOptimizer:
    """Return the optimizer of the dense part. That of the tables is fused into their backward."""
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": partial(torch.optim.Adagrad, eps=config.eps),
        "adam": partial(torch.optim.Adam, eps=config.eps),
    }
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(parameters, lambda params: makers[config.optimizer](params, lr=config.lr))


def build_optimizer(model: DistributedModelParallel, config: TrainConfig) -> CombinedOptimizer:
    """Return one optimizer over the tables and the dense part."""
    return CombinedOptimizer([model.fused_optimizer, ("dense", build_dense_optimizer(model, config))])


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


def build_pipeline(
    kind: str, model: DistributedModelParallel, optimizer: CombinedOptimizer, device: torch.device
) -> TrainPipeline:
    """Return TorchRec's train pipeline.

    `sparse_dist` works ahead: during a step it sends the ids of the next batch to their owners and copies the one after
    that to the device. `none` sends the ids of a batch in its own step.
    """
    if kind == "sparse_dist":
        return TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    return TrainPipelineBase(model, optimizer, device)
