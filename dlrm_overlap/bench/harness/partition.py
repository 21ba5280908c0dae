"""Two disjoint sets of a GPU's multiprocessors, each with a stream whose kernels run there alone (green contexts)."""

from typing import Any, NamedTuple

import torch

from dlrm_overlap.config import InputError


class Partition(NamedTuple):
    """A GPU cut in two. Its contexts live as long as the process."""

    computation: torch.cuda.Stream
    communication: torch.cuda.Stream
    sms: int
    """multiprocessors of the communication"""


def make_partition(device: torch.device, sms: int) -> Partition:
    """Leave about `sms` multiprocessors of `device` to a communication, and the others to a computation.

    Multiprocessors come in groups, of 8 on an H100: of its 132, one who asks for 12 leaves 120, for 10 alike.

    Source: CUDA driver API, section "Green Contexts".

    Raises:
        InputError: if the machine cannot do that.
    """
    try:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("green contexts: cuda.bindings is missing; pip install cuda-python") from None

    def call(name: str, *arguments: Any) -> Any:
        function = getattr(driver, name, None)
        if function is None:
            raise InputError(f"green contexts: cuda.bindings has no {name}; take a newer cuda-python")
        status, *found = function(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise InputError(f"green contexts: {name} gives {status.name}; take a newer driver")
        return found[0] if len(found) == 1 else found

    index = torch.device(device).index
    handle = call("cuDeviceGet", index)
    whole = call("cuDeviceGetDevResource", handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    groups, count, rest = call("cuDevSmResourceSplitByCount", 1, whole, 0, whole.sm.smCount - sms)
    if count != 1 or not rest.sm.smCount:
        raise InputError(
            f"green contexts: {whole.sm.smCount} multiprocessors cannot be cut into {whole.sm.smCount - sms} and "
            f"{sms}; leave more to the communication"
        )
    streams = []
    for resource in (groups[0], rest):
        description = call("cuDevResourceGenerateDesc", [resource], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call("cuGreenCtxCreate", description, handle, flags)
        stream = call("cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
        streams.append(torch.cuda.ExternalStream(int(stream), device=device))
    return Partition(streams[0], streams[1], rest.sm.smCount)
