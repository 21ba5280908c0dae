"""The command: `python -m tests.gpu.dense`, on one GPU.

Checks the steps of the dense parameters against torch.optim, eager and in CUDA graphs, then prints the time of an
update. Needs no pytest.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps
from dlrm_overlap.kernels.dense.arguments import STATES
from dlrm_overlap.train.graphs.dense_step import step_alone
from tests.agreement import WEIGHT_TOLERANCE, assert_near, assert_same
from tests.gpu.one_gpu import capture, run_parts, times_us

SHAPES = {"wide": (1000, 130), "narrow": (3, 7), "bias": (1000,), "scale": ()}
LR, STEPS = 0.05, 50
TIMED_ELEMENTS = 16 << 20
_FORMS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "momentum": partial(torch.optim.SGD, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adagrad, decaying": partial(torch.optim.Adagrad, lr_decay=0.01, weight_decay=0.01),
    "adamw, fused": partial(torch.optim.AdamW, fused=True),
}


def _parameters(device: torch.device) -> dict[str, nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=generator, device=device)) for n, s in SHAPES.items()}


def _rate(step: int) -> float:
    """Return the learning rate of a step, which most steps change."""
    return LR * (1 + step % 5) / (1 + step % 3)


def _randomise(gradients: dict[str, torch.Tensor], step: int) -> None:
    for index, gradient in enumerate(gradients.values()):
        generator = torch.Generator(gradient.device).manual_seed(100 * step + index)
        gradient.normal_(generator=generator)


def check_taken_over(form: str, device: torch.device) -> None:
    """Compare captured, clipped steps with two groups, and shadows, with those of torch.optim's optimizers."""
    sides = [_parameters(device) for _ in range(2)]
    wrappers = [_clipped(form, parameters) for parameters in sides]
    flat = FlatParameters(sides[0], shadow_dtype=torch.bfloat16)
    assert flat.shadow is not None
    each = [FlatSteps(flat, wrappers[0]._optimizer._optimizer)]  # type: ignore[attr-defined]
    replay: Callable[[], object] | None = None

    def update() -> None:
        flat.show_gradients()
        step_alone(wrappers[0])
        take_steps(each, [(0, flat.weights.tensor.numel())])

    for step in range(STEPS):
        for parameters, wrapper in zip(sides, wrappers, strict=True):
            for parameter in parameters.values():
                parameter.grad = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
            _randomise({name: p.grad for name, p in parameters.items() if p.grad is not None}, step)
            for index, group in enumerate(wrapper.param_groups):
                group["lr"] = _rate(step + index)  # pyright: ignore[reportIndexIssue]
        wrappers[1].step()
        each[0].refresh()
        if step == 2:
            replay = capture(update, warmup=0).replay
        (replay or update)()
    for name, parameter in sides[0].items():
        assert_near(parameter.data, sides[1][name].data, WEIGHT_TOLERANCE["fp32"], name)
        assert_same(flat.shadow.views[name], parameter.data.bfloat16(), f"shadow of {name}")
        for key, value in wrappers[1].state[sides[1][name]].items():
            ours = wrappers[0].state[parameter][key]
            # Squares of gradients have twice the relative error of the norm by which they are clipped.
            assert_near(ours, value.to(device), 2 * WEIGHT_TOLERANCE["fp32"], f"{key} of {name}")
    used = sum(parameter.numel() for parameter in flat.parameters.values())
    for tensor in (flat.weights.tensor, *each[0].update.states):
        assert int(tensor.count_nonzero()) <= used, "padding is zero"


def _clipped(form: str, parameters: dict[str, nn.Parameter]) -> GradientClippingOptimizer:
    first, *others = parameters.values()
    groups = [{"params": [first]}, {"params": others, "weight_decay": 0.1}]
    keyed = KeyedOptimizerWrapper(parameters, lambda _: _FORMS[form](groups, lr=LR))
    return GradientClippingOptimizer(keyed, GradientClipping.NORM, max_gradient=10.0)


def time_update(kind: str, shadow: torch.dtype | None, device: torch.device) -> str:
    """Return a line with the time of a captured update of `TIMED_ELEMENTS` parameters."""
    weight = nn.Parameter(torch.randn(TIMED_ELEMENTS, device=device))
    flat = FlatParameters({"weight": weight}, shadow_dtype=shadow)
    steps = FlatSteps(flat, _FORMS[kind]([weight], lr=LR))
    flat.gradients.tensor.normal_()
    updates = 10

    def update() -> None:
        for _ in range(updates):
            take_steps([steps], [(0, TIMED_ELEMENTS)])

    (us,) = times_us([capture(update)])
    moved = TIMED_ELEMENTS * (12 + 8 * len(STATES[kind]) + (shadow.itemsize if shadow else 0))
    ms = us / 1e3 / updates
    rate = f"{moved / 1e6:6.1f} MB, {moved / ms / 1e6:6.0f} GB/s"
    return f"{kind:8} {'bfloat16 shadow' if shadow else 'no shadow':16} {ms:7.4f} ms  {rate}"


def main() -> int:
    """Run the checks, then the timings; return 1 if a check failed, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("tests.gpu.dense: no GPU is there, and one must be; run it where nvidia-smi shows one", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    failed = run_parts({form: partial(check_taken_over, form, device) for form in _FORMS})
    if not failed:
        print(f"{TIMED_ELEMENTS} parameters on {torch.cuda.get_device_name(device)}:")
        for kind in ("sgd", "adagrad", "adam"):
            for shadow in (None, torch.bfloat16):
                print(time_update(kind, shadow, device), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
