"""Versions of torch, FBGEMM, TorchRec and Triton that work together, and those installed."""

import importlib.metadata
import logging
import re
from typing import NamedTuple

from dlrm_overlap.config import InputError

_OPERATOR = "fbgemm::permute_2D_sparse_data"  # TorchRec calls it in every input dist


class Stack(NamedTuple):
    """Versions that were tested together; the code uses private parts of these libraries."""

    torch: str
    fbgemm: str
    torchrec: str
    triton: str


STACKS = {"cuda": Stack("2.11.0", "1.6.0", "1.6.1", "3.6.0"), "cpu": Stack("2.13.0", "1.8.0", "1.8.0", "3.7.1")}
FBGEMM_NAMES = {"cuda": "fbgemm-gpu", "cpu": "fbgemm-gpu-cpu"}


def check_stack() -> None:
    """Check that FBGEMM and TorchRec match torch, and that FBGEMM's operators load; takes about a second.

    Raises an `InputError` that names the first package of another version, and the command that installs all packages.
    """
    torch_version = version_of("torch")
    if torch_version is None:
        raise InputError(
            f"torch: not installed; for GPUs {install_command('cuda')}, for a CPU {install_command('cpu')}"
        )
    # Other releases of torch are not in the table, so FBGEMM and TorchRec are not compared.
    wanted = next((each for each in STACKS.values() if _release(each.torch) == _release(torch_version)), None)
    cure = install_command(build())
    if _release(torch_version) < min(_release(each.torch) for each in STACKS.values()):
        raise InputError(f"torch: {torch_version} is too old; {cure}")
    fbgemm = fbgemm_versions() or dict.fromkeys(["FBGEMM"])
    wants = [(name, version, wanted and wanted.fbgemm) for name, version in fbgemm.items()]
    for name, version, want in [*wants, ("torchrec", version_of("torchrec"), wanted and wanted.torchrec)]:
        if version is None:
            raise InputError(f"{name}: not installed; {cure}")
        if want and _release(version) != _release(want):
            raise InputError(f"{name}: {version} does not match torch {torch_version}; {cure}")
    if error := _load_fbgemm():
        raise InputError(f"FBGEMM {error}; pip uninstall -y {' '.join(FBGEMM_NAMES.values())}; {cure}")


def versions() -> dict[str, str | None]:
    found = [version_of("torch"), next(iter(fbgemm_versions().values()), None), version_of("torchrec")]
    return dict(zip(Stack._fields, [*found, version_of("triton")], strict=True))


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def nccl_version() -> str | None:
    import torch
    import torch.distributed
    from torch.cuda import nccl

    if not (torch.version.cuda and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, nccl.version()))


def fbgemm_versions() -> dict[str, str]:
    return {name: version for name in FBGEMM_NAMES.values() if (version := version_of(name))}


def build() -> str:
    """Return torch's build, "cuda" or "cpu"."""
    import torch

    return "cuda" if torch.version.cuda else "cpu"


def install_command(build: str) -> str:
    stack = STACKS[build]
    libraries = f"torch=={stack.torch} {FBGEMM_NAMES[build]}=={stack.fbgemm} triton=={stack.triton}"
    # --no-deps: TorchRec depends on the CUDA fbgemm-gpu, which would overwrite fbgemm-gpu-cpu.
    return f"pip install {libraries} && pip install --no-deps torchrec=={stack.torchrec}"


def _load_fbgemm() -> str:
    """Return why FBGEMM cannot be used here, or an empty string."""
    import torch

    level = logging.root.manager.disable
    logging.disable(logging.ERROR)  # it logs a page in addition to the exception
    try:
        importlib.import_module("fbgemm_gpu")
    except Exception as failure:
        error: BaseException = failure
        while error.__cause__:  # the innermost exception names the library that is missing
            error = error.__cause__
        reason = str(error).strip().partition("\n")[0]
        return f"does not load ({type(error).__name__}: {reason})"
    finally:
        logging.disable(level)
    key = "CUDA" if torch.cuda.is_available() else "CPU"
    try:
        usable = torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, key)
    except RuntimeError:  # no such operator at all
        usable = False
    return "" if usable else f"has no {key} operators (a build for other devices, or its libraries did not load)"


def _release(version: str) -> tuple[int, ...]:
    """Return (2, 11) of 2.11.0+cu130."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
