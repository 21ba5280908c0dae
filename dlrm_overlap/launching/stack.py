"""torch, FBGEMM and TorchRec: whether they are installed and match."""

import importlib.metadata
import importlib.util
import logging
import re
import sys
from dataclasses import dataclass
from typing import Literal

from dlrm_overlap.config import InputError

_FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8"}  # TorchRec counts like FBGEMM
_FBGEMM_NAMES = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_OPERATOR = "fbgemm::permute_2D_sparse_data"  # TorchRec calls it in every input dist


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
    version = version_of("torch")
    supported = f"pip install 'torch=={max(_FBGEMM_OF_TORCH, key=_as_numbers)}.*'"
    if version is None:
        return Finding("missing", "torch", "not installed", supported)
    if _as_numbers(version) < min(map(_as_numbers, _FBGEMM_OF_TORCH)):
        return Finding("wrong", "torch", f"{version} is older than {min(_FBGEMM_OF_TORCH, key=_as_numbers)}", supported)
    import torch

    build = f"CUDA {torch.version.cuda}, NCCL {nccl_version()}" if torch.version.cuda else "CPU build"
    return Finding("ok", "torch", f"{torch.__version__}, {build}")


def check_fbgemm() -> Finding:
    """Return whether FBGEMM is there, matches torch, and has operators for this machine's devices."""
    import torch

    wanted = _FBGEMM_OF_TORCH.get(_minor(torch.__version__))
    name = _FBGEMM_NAMES[0 if torch.version.cuda else 1]
    cure = f"pip install '{name}=={wanted}.*'" if wanted else f"pip install {name} of the release for this torch"
    if not importlib.util.find_spec("fbgemm_gpu"):
        return Finding("missing", "FBGEMM", "not installed", cure)
    versions = fbgemm_versions()
    for found, version in versions.items():
        if wanted and _minor(version) != wanted:
            return Finding("wrong", "FBGEMM", f"{found} {version} does not match torch {torch.__version__}", cure)
    if error := _load_fbgemm():
        return Finding("wrong", "FBGEMM", error, f"pip uninstall -y {' '.join(_FBGEMM_NAMES)}; {cure}")
    return Finding("ok", "FBGEMM", f"{', '.join(map(' '.join, versions.items()))}, operators load")


def check_torchrec() -> Finding:
    """Return whether TorchRec is there, matches torch, and has its dependencies."""
    import torch

    wanted, version = _FBGEMM_OF_TORCH.get(_minor(torch.__version__)), version_of("torchrec")
    # Without its dependencies: among them is the CUDA fbgemm-gpu, which would overwrite fbgemm-gpu-cpu.
    cure = f"pip install --no-deps 'torchrec=={wanted}.*'" if wanted else "pip install --no-deps torchrec"
    if version is None:
        return Finding("missing", "TorchRec", "not installed", cure)
    if wanted and _minor(version) != wanted:
        return Finding("wrong", "TorchRec", f"{version} does not match torch {torch.__version__}", cure)
    needs = [line for line in importlib.metadata.requires("torchrec") or [] if "extra ==" not in line]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needs]
    absent = [name for name in names if not name.startswith("fbgemm") and version_of(name) is None]
    if absent:
        return Finding("wrong", "TorchRec", f"{version} needs {', '.join(absent)}", f"pip install {' '.join(absent)}")
    return Finding("ok", "TorchRec", version)


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
    """Return FBGEMM's distributions and their versions, or, where it is only on PYTHONPATH, its own version."""
    versions = {name: version for name in _FBGEMM_NAMES if (version := version_of(name))}
    if not versions and importlib.util.find_spec("fbgemm_gpu") and _load_fbgemm() is None:
        versions["fbgemm_gpu"] = sys.modules["fbgemm_gpu"].__version__
    return versions


def _load_fbgemm() -> str | None:
    """Import FBGEMM and return why it cannot be used on this machine's devices, or None."""
    import torch

    level = logging.root.manager.disable
    logging.disable(logging.ERROR)  # it logs a page, where the exception has a line
    try:
        importlib.import_module("fbgemm_gpu")
    except Exception as error:
        return f"does not load ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    finally:
        logging.disable(level)
    key = "CUDA" if torch.cuda.is_available() else "CPU"
    try:
        usable = torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, key)
    except RuntimeError:  # no such operator at all
        usable = False
    return None if usable else f"has no {key} operators (a build for other devices, or its libraries did not load)"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
