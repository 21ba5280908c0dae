"""Versions of torch, FBGEMM, TorchRec and Triton that work together, and those installed."""

import functools
import importlib.metadata
import importlib.util
import logging
import re
import sys
from typing import NamedTuple

from dlrm_overlap.config import InputError
from dlrm_overlap.launching import launcher

log = logging.getLogger("dlrm_overlap")

_OPERATOR = "fbgemm::permute_2D_sparse_data"  # TorchRec calls it in every input dist


class Stack(NamedTuple):
    """Versions that were tested together; the code uses private parts of these libraries."""

    torch: str
    fbgemm: str
    torchrec: str
    triton: str
    ran_on_gpus: bool = False
    """False: tested on CPUs only"""


# Oldest first. `make test-versions` tests every row on CPUs.
STACKS = (
    Stack("2.11.0", "1.6.0", "1.6.1", "3.6.0", ran_on_gpus=True),
    Stack("2.12.1", "1.7.0", "1.7.0", "3.7.1"),
    Stack("2.13.0", "1.8.0", "1.8.0", "3.7.1"),
    Stack("2.14.1", "1.9.0", "1.9.2", "3.8.0"),
)
PYTHONS = ((3, 11), (3, 12), (3, 13))
_DRIVER = ("libnvidia-ml.so", "libcuda.so")  # libraries of NVIDIA's driver, which FBGEMM's CUDA build loads
FBGEMM_NAMES = {"cuda": "fbgemm-gpu", "cpu": "fbgemm-gpu-cpu"}
TORCHREC_IMPORTS = {"pyre-extensions": "pyre_extensions", "tensordict": "tensordict"}
"""packages, by their modules, that TorchRec imports and that this package does not depend on itself"""


def check_stack() -> None:
    """Check that torch, FBGEMM, TorchRec and what it imports are installed and match, and that they load.

    Takes about a second.

    Raises:
        InputError: for a package that is missing, of another release or does not load, with the command that installs
            all packages.
    """
    check_torch()
    for name, version in [*(fbgemm_versions() or {"FBGEMM": None}).items(), ("torchrec", version_of("torchrec"))]:
        if version is None:
            raise InputError(f"{name}: not installed; {_cure_of_missing()}")
    check_releases()
    for name, module in TORCHREC_IMPORTS.items():
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{name}: not installed, but TorchRec imports it; {install_command(build(), row())}")
    if error := _load_fbgemm():
        raise InputError(f"FBGEMM {error}; {_cure_of_unloaded(error)}")


def check_torch() -> None:
    """Raise an `InputError` if torch is not installed or does not load."""
    if version_of("torch") is None:
        raise InputError(f"torch: not installed; {_commands_of_both_builds()}")
    try:
        import torch  # noqa: F401 - whether it loads
    except ModuleNotFoundError:  # the command line names the module
        raise
    except (ImportError, OSError) as error:  # such as a library of CUDA that is missing
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise InputError(f"torch: does not load ({reason}); {_commands_of_both_builds()}") from None


def check_pyarrow() -> None:
    """Raise an `InputError` if pyarrow is not installed or does not load."""
    try:
        import pyarrow  # noqa: F401 - whether it loads
    except ModuleNotFoundError:
        raise InputError('pyarrow: not installed; pip install "dlrm-overlap[data]"') from None
    except ImportError as error:  # such as for an older numpy, which pip does not know
        raise InputError(f"pyarrow: does not load ({error}); pip install --upgrade pyarrow numpy") from None


def check_releases() -> None:
    """Check that the releases of FBGEMM and TorchRec are the ones tested with the installed torch, without loading it.

    If torch is newer than all rows of `STACKS`, nothing is compared, and rank 0 logs a warning, once. A package whose
    version is unknown is not compared.

    Raises:
        InputError: for a torch older than all rows, or another release of FBGEMM or TorchRec.
    """
    if (torch_version := version_of("torch")) is None:
        return
    if _release(torch_version) < _release(STACKS[0].torch):
        raise InputError(f"torch: {torch_version} is too old; {install_command(build())}")
    if (stack := row()) is None:
        newest = STACKS[-1].torch
        _warn_once(f"torch: {torch_version} is newer than {newest}, the newest tested one; {install_command(build())}")
        return
    wants = [(name, version, stack.fbgemm) for name, version in fbgemm_versions().items()]
    for name, version, want in [*wants, ("torchrec", version_of("torchrec"), stack.torchrec)]:
        if version and _release(version) != _release(want):
            cure = install_command(build(), stack)
            raise InputError(f"{name}: {version} does not match torch {torch_version}; {cure}")


def row() -> Stack | None:
    """Return the row of the installed torch's release (2.11 of 2.11.1), or None."""
    release = _release(version_of("torch") or "")
    return next((stack for stack in STACKS if _release(stack.torch) == release), None)


def versions() -> dict[str, str | None]:
    """Return the installed versions by the fields of `Stack`."""
    fbgemm = next(iter(fbgemm_versions().values()), None)
    found = [version_of("torch"), fbgemm, version_of("torchrec"), version_of("triton")]
    return dict(zip(("torch", "fbgemm", "torchrec", "triton"), found, strict=True))


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
    """Return "cpu" if torch or the only FBGEMM that is installed has no CUDA, else "cuda"."""
    import torch

    cpu_fbgemm = set(fbgemm_versions()) == {FBGEMM_NAMES["cpu"]} and not torch.cuda.is_available()
    return "cuda" if torch.version.cuda and not cpu_fbgemm else "cpu"


def _cure_of_missing() -> str:
    """Return the command for this machine; both if torch has CUDA, but no GPU or FBGEMM tells which one is wanted."""
    import torch

    if sys.platform != "linux":
        return f"PyPI has no FBGEMM for {sys.platform}; use Linux"
    is_open = torch.version.cuda and not torch.cuda.is_available() and not fbgemm_versions()
    return _commands_of_both_builds() if is_open else install_command(build(), row())


def _cure_of_unloaded(error: str) -> str:
    if not any(library in error for library in _DRIVER):
        return install_command(build(), row(), replaces_fbgemm=True)
    command = install_command("cpu", row(), replaces_fbgemm=True)
    return f"for GPUs install NVIDIA's driver (in a container: docker run --gpus all), for a CPU {command}"


def _commands_of_both_builds() -> str:
    return f"for GPUs {install_command('cuda', row())}, for a CPU {install_command('cpu', row())}"


def install_command(build: str, stack: Stack | None = None, replaces_fbgemm: bool = False) -> str:
    """Return the command that installs a row of `STACKS`, by default the newest.

    It first removes FBGEMM if `replaces_fbgemm` or if another build of it is installed: both have the same files, which
    pip does not write again if the wanted build has the right version.
    """
    stack = stack or STACKS[-1]
    replaces_fbgemm |= bool(fbgemm_versions().keys() - {FBGEMM_NAMES[build]})
    remove = f"pip uninstall -y {' '.join(FBGEMM_NAMES.values())} && " if replaces_fbgemm else ""
    libraries = f"torch=={stack.torch} {FBGEMM_NAMES[build]}=={stack.fbgemm} triton=={stack.triton}"
    # --no-deps: TorchRec depends on the CUDA fbgemm-gpu, which would overwrite fbgemm-gpu-cpu.
    needs = " ".join(TORCHREC_IMPORTS)
    return f"{remove}pip install {libraries} {needs} && pip install --no-deps torchrec=={stack.torchrec}"


@functools.cache
def _warn_once(text: str) -> None:
    if launcher.announced_rank() in (None, 0):
        log.warning("%s", text)


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
