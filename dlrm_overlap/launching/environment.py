"""What a result depends on apart from the configuration: versions, GPUs, CPU and commit."""

import hashlib
import itertools
import os
import platform
import re
import subprocess
import time
from functools import cache
from pathlib import Path

from dlrm_overlap.launching import supported_versions
from dlrm_overlap.launching.resources import read_text


def environment() -> dict[str, str]:
    import torch

    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # may be any text if this launch does not use it
    count = torch.cuda.device_count()
    count = min(int(ranks), count) if re.fullmatch(r"[0-9]{1,9}", ranks) else count
    gpus = [torch.cuda.get_device_name(index) for index in range(count)]
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": supported_versions.nccl_version(),
        "fbgemm": next(iter(supported_versions.fbgemm_versions().values()), None),
        "torchrec": supported_versions.version_of("torchrec"),
        "triton": supported_versions.version_of("triton"),
        "numpy": supported_versions.version_of("numpy"),
        "gpu": ", ".join(f"{len(list(same))} x {name}" for name, same in itertools.groupby(gpus)),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "clock_source": read_text(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
    }
    return {name: value for name, value in found.items() if value}


def one_queue() -> bool:
    """Return whether CUDA puts all streams into one queue, so that nothing overlaps."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


@cache  # a checkout may be edited while this process runs
def code_digest() -> str:
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    files = [
        Path(at, name) for at, _, names in os.walk(root, followlinks=True) for name in names if name.endswith(".py")
    ]
    for path in sorted(files):  # not by rglob, which does not follow a checkout's links to folders
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _cpu() -> str:
    model = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return model[1] if model else platform.machine()


def commit() -> str | None:
    """Return the checkout's commit, with the suffix `-dirty` if files differ.

    Without a repository, return the environment variable DLRM_OVERLAP_COMMIT.
    """
    named = os.environ.get("DLRM_OVERLAP_COMMIT")
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed or copied: a repository further up is another one
        return named
    describe = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return output_of("git", "--no-optional-locks", "-C", str(root), *describe).strip() or named


def output_of(*command: str) -> str:
    """Return a command's output, empty if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
