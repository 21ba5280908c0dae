from collections.abc import Callable

import pytest
import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.launching import stack


@pytest.mark.parametrize(
    ("cuda", "versions", "message"),
    [
        (None, {"torch": None}, "torch: not installed; pip install 'torch==2.13.*'"),
        (None, {"torch": "2.9.1"}, "torch: 2.9.1 is older than 2.11; pip install 'torch==2.13.*'"),
        (
            None,
            {"torch": "2.13.0+cpu", "fbgemm_gpu_cpu": "1.6.0"},
            "FBGEMM: fbgemm-gpu-cpu 1.6.0 does not match torch 2.13.0+cpu; pip install 'fbgemm-gpu-cpu==1.8.*'",
        ),
        (
            "13.0",
            {"torch": "2.11.0+cu130", "fbgemm_gpu": "1.8.0", "fbgemm_gpu_cpu": None},
            "FBGEMM: fbgemm-gpu 1.8.0 does not match torch 2.11.0+cu130; pip install 'fbgemm-gpu==1.6.*'",
        ),
        (
            None,  # one lies over the other: both must match
            {"torch": "2.13.0+cpu", "fbgemm_gpu": "1.7.0", "fbgemm_gpu_cpu": "1.8.0"},
            "FBGEMM: fbgemm-gpu 1.7.0 does not match torch 2.13.0+cpu; pip install 'fbgemm-gpu-cpu==1.8.*'",
        ),
        (
            None,
            {"torch": "2.12.1", "fbgemm_gpu_cpu": "1.7.0", "torchrec": "1.8.0"},
            "TorchRec: 1.8.0 does not match torch 2.12.1; pip install --no-deps 'torchrec==1.7.*'",
        ),
        (
            None,
            {"torch": "2.13.0", "fbgemm_gpu_cpu": "1.8.0", "torchrec": "1.8.0", "tqdm": None, "iopath": None},
            "TorchRec: 1.8.0 needs tqdm; pip install tqdm",
        ),
    ],
)
def test_check_stack_names_what_does_not_match(
    installed: Callable[..., None], cuda: str | None, versions: dict[str, str | None], message: str
) -> None:
    installed(cuda, **versions)
    with pytest.raises(InputError) as error:
        stack.check_stack()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("torch_version", "release"),
    [("2.11.0+cu130", "1.6.1"), ("2.12.1+cpu", "1.7.0"), ("2.13.0", "1.8.0"), ("2.14.0", "1.9.0")],
)
def test_check_stack_takes_what_matches(installed: Callable[..., None], torch_version: str, release: str) -> None:
    installed(torch=torch_version, fbgemm_gpu=None, fbgemm_gpu_cpu=release, torchrec=release)
    stack.check_stack()


def test_a_cpu_build_of_fbgemm_does_not_serve_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: (name, key) == (stack._OPERATOR, "CPU")
    )
    with pytest.raises(InputError, match="FBGEMM: has no CUDA operators"):
        stack.check_stack()
