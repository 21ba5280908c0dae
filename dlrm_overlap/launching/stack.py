"""torch, FBGEMM, TorchRec and Triton: the versions that work together, and whether those installed match."""

import importlib.metadata
import importlib.util
import logging
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dlrm_overlap.config import InputError

_DRIVER_LIBRARIES = ("libcuda.so", "libnvidia-ml.so")  # FBGEMM's CUDA build loads with them alone
_OPERATOR = "fbgemm::permute_2D_sparse_data"  # TorchRec calls it in every input dist


class Stack(NamedTuple):
    """Versions that were tried together. The code reaches into private parts of these libraries."""

    torch: str
    fbgemm: str
    torchrec: str
    triton: str


STACKS = {"cuda": Stack("2.11.0", "1.6.0", "1.6.1", "3.6.0"), "cpu": Stack("2.13.0", "1.8.0", "1.8.0", "3.7.1")}
_FBGEMM_NAMES = {"cuda": "fbgemm-gpu", "cpu": "fbgemm-gpu-cpu"}


@dataclass(frozen=True)
class Finding:
    """The state of one thing that training needs or can use; `cure` mends it."""

    status: Literal["ok", "missing", "wrong"]
    name: str
    detail: str
    cure: str = ""
    needed: bool = True
    """training cannot run without it"""


def check_stack() -> None:
    """Check that FBGEMM and TorchRec match torch, and that FBGEMM's operators load. Takes about a second.

    Raises:
        InputError: naming the first package that does not, and its cure.
    """
    for check in (check_torch, check_fbgemm, check_torchrec):
        finding = check()
        if finding.status != "ok":
            raise InputError(f"{finding.name}: {finding.detail}; {finding.cure}")


def check_torch() -> Finding:
    """Return whether torch is there, and not too old."""
    version, oldest = version_of("torch"), min((stack.torch for stack in STACKS.values()), key=_as_numbers)
    cure = f"pip install torch=={STACKS['cuda'].torch} for GPUs, torch=={STACKS['cpu'].torch} for a CPU"
    if version is None:
        return Finding("missing", "torch", "not installed", cure)
    if _as_numbers(version) < _as_numbers(oldest):
        return Finding("wrong", "torch", f"{version} is older than {oldest}", cure)
    import torch

    build = f"CUDA {torch.version.cuda}, NCCL {nccl_version()}" if torch.version.cuda else "CPU build"
    return Finding("ok", "torch", f"{torch.__version__}, {build}")


def check_fbgemm() -> Finding:
    """Return whether FBGEMM is there, is of torch's release, and has operators for this machine's devices."""
    wanted, name = _stack_of_torch(), _FBGEMM_NAMES[_build()]
    cure = f"pip install {name}=={wanted.fbgemm}" if wanted else f"pip install {name} of the release for this torch"
    if not importlib.util.find_spec("fbgemm_gpu"):
        return Finding("missing", "FBGEMM", "not installed", cure)
    versions = fbgemm_versions()
    for found, version in versions.items():
        if wanted and _as_numbers(version) != _as_numbers(wanted.fbgemm):
            return _mismatch("FBGEMM", f"{found} {version}", cure)
    if error := _load_fbgemm():
        cure = f"pip uninstall -y {' '.join(_FBGEMM_NAMES.values())}; {cure}"
        if any(library in error for library in _DRIVER_LIBRARIES):
            cure = f"it is NVIDIA's driver's: docker run --gpus all in a container; without GPUs: {_command('cpu')}"
        return Finding("wrong", "FBGEMM", error, cure)
    return Finding("ok", "FBGEMM", f"{', '.join(map(' '.join, versions.items()))}, operators load")


def check_torchrec() -> Finding:
    """Return whether TorchRec is there, is of torch's release, and has its dependencies."""
    wanted, version = _stack_of_torch(), version_of("torchrec")
    # Without its dependencies: among them is the CUDA fbgemm-gpu, which would overwrite fbgemm-gpu-cpu.
    cure = f"pip install --no-deps torchrec{f'=={wanted.torchrec}' if wanted else ''}"
    if version is None:
        return Finding("missing", "TorchRec", "not installed", cure)
    if wanted and _as_numbers(version) != _as_numbers(wanted.torchrec):
        return _mismatch("TorchRec", version, cure)
    needs = [line for line in importlib.metadata.requires("torchrec") or [] if "extra ==" not in line]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needs]
    if absent := [name for name in names if not name.startswith("fbgemm") and version_of(name) is None]:
        return Finding("wrong", "TorchRec", f"{version} needs {', '.join(absent)}", f"pip install {' '.join(absent)}")
    return Finding("ok", "TorchRec", version)


def check_tried() -> Finding:
    """Return whether torch, FBGEMM, TorchRec and Triton have versions that were tried together."""
    build = _build()
    fbgemm = next(iter(fbgemm_versions().values()), None)
    found = [version_of("torch"), fbgemm, version_of("torchrec"), version_of("triton")]
    public = [version and version.partition("+")[0] for version in found]
    rows = list(zip(Stack._fields, public, STACKS[build], strict=True))
    if others := [f"{name} {there or 'missing'} (tried: {tried})" for name, there, tried in rows if there != tried]:
        detail = f"not tried together: {', '.join(others)}"
        return Finding("wrong", "versions", detail, _command(build), needed=False)
    return Finding("ok", "versions", f"these and triton {STACKS[build].triton} were tried together")


def version_of(name: str) -> str | None:
    """Return the installed version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def nccl_version() -> str | None:
    """Return the version of torch's NCCL, or None if it has none."""
    import torch
    import torch.distributed
    from torch.cuda import nccl

    if not (torch.version.cuda and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, nccl.version()))


def fbgemm_versions() -> dict[str, str]:
    """Return FBGEMM's distributions and their versions."""
    return {name: version for name in _FBGEMM_NAMES.values() if (version := version_of(name))}


def _load_fbgemm() -> str | None:
    """Import FBGEMM and return why it cannot be used on this machine's devices, or None."""
    import torch

    level = logging.root.manager.disable
    logging.disable(logging.ERROR)  # it logs a page, where the exception has a line
    try:
        importlib.import_module("fbgemm_gpu")
    except Exception as failure:
        error: BaseException = failure
        while error.__cause__:  # torch names the library that was asked for, its cause the one that is not there
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
    return None if usable else f"has no {key} operators (a build for other devices, or its libraries did not load)"


def _mismatch(name: str, found: str, cure: str) -> Finding:
    import torch

    return Finding("wrong", name, f"{found} does not match torch {torch.__version__}", cure)


def _command(build: str) -> str:
    """Return the command that installs the versions for `build`, "cuda" or "cpu"."""
    stack = STACKS[build]
    libraries = f"torch=={stack.torch} {_FBGEMM_NAMES[build]}=={stack.fbgemm} triton=={stack.triton}"
    return f"pip install {libraries} && pip install --no-deps torchrec=={stack.torchrec}"


def _build() -> str:
    """Return the kind of this torch's build, "cuda" or "cpu"."""
    import torch

    return "cuda" if torch.version.cuda else "cpu"


def _stack_of_torch() -> Stack | None:
    """Return the versions of this torch's release, such as 2.11, or None if none of that release was tried."""
    import torch

    release = _as_numbers(torch.__version__)
    return next((stack for stack in STACKS.values() if _as_numbers(stack.torch) == release), None)


def _as_numbers(version: str) -> tuple[int, ...]:
    """Return the release of `version`: (2, 11) of 2.11.0+cu130."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
