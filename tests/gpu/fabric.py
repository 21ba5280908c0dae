"""Print what NVML says of the NVLink fabric of this machine's GPUs, whether their memory can be shared, and the nodes.

    torchrun --nproc-per-node 4 -m tests.gpu.fabric

Blocks are shared by file descriptors, for machines without fabric handles, and by fabric handles. Descriptors are of
this process, so each rank maps its own block; fabric handles are also tried between ranks if the GPUs have a domain.
"""

import os
from contextlib import closing

import torch
import torch.distributed as dist

from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.comm.fabric import ExportedBlock, _fabric_info, fabric_of, map_fault, read_fabric
from dlrm_overlap.comm.reach import find_reach, location_of


def _nvml_fields(uuid: str) -> str:
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return "nvidia-ml-py is not installed"
    pynvml.nvmlInit()
    try:
        info = _fabric_info(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        fields = {name: getattr(info, name) for name, *_ in info._fields_}
        return str(fields | {"clusterUuid": bytes(info.clusterUuid).hex()})
    finally:
        pynvml.nvmlShutdown()


def _shared_by(kind: str, device: torch.device) -> str:
    with closing(ExportedBlock(device, kind)) as block:
        fault = block.fault or map_fault(block.handle, device, kind)
        if kind != "FABRIC" and not block.fault:
            os.close(block.handle)
    return fault or "mapped"


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    assert dist.group.WORLD is not None
    report(device, dist.group.WORLD)
    dist.destroy_process_group()


def report(device: torch.device, group: dist.ProcessGroup) -> None:
    about = torch.cuda.get_device_properties(device)
    lines = [
        f"rank {group.rank()}: {about.name}, {about.uuid}, compute capability {about.major}.{about.minor}",
        f"  NVML: {_nvml_fields(str(about.uuid))}",
        f"  read: {read_fabric(str(about.uuid), about.major)}; usable: {fabric_of(device)}",
        f"  blocks: POSIX_FILE_DESCRIPTOR {_shared_by('POSIX_FILE_DESCRIPTOR', device)}; "
        f"FABRIC {_shared_by('FABRIC', device)}",
        f"  location: {location_of(device)}",
    ]
    every = gathered("\n".join(lines), group)
    reach = find_reach(group, device)
    if group.rank() == 0:
        print(*every, f"reach: {reach.summary()}", sep="\n")
    assert reach.is_one_node, "these GPUs were one node before domains were read"


if __name__ == "__main__":
    main()
