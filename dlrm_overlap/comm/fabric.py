"""The NVLink domain of a GPU, which may span machines (GB200 NVL72), and whether memory can be shared in it.

NVML names a GPU's domain. Machines share GPU memory by CUDA's fabric handles, for which NVIDIA's IMEX service must run
on each of them. PyTorch's symmetric memory uses fabric handles on a GPU that can export them, and otherwise handles of
one machine. It cannot mix the two, and may wait forever for a peer on another machine without fabric handles, so these
are tried first.
"""

import ctypes
from contextlib import ExitStack, closing, suppress
from typing import Any, NamedTuple

import torch

_FIRST_MAJOR = 10  # compute capability from which a domain commonly spans machines
_SUPPORTED, _COMPLETED, _UNHEALTHY = 1, 3, 2  # NVML_GPU_FABRIC_STATE_*, NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY
_IMEX_CURE = "nvidia-imex must run, with a channel in /dev/nvidia-caps-imex-channels that this process may open"
_STATES = {1: "not started", 2: "in progress"}


class Domain(NamedTuple):
    """An NVLink domain, whose GPUs access each other's memory, also across machines."""

    cluster: str
    """UUID, 32 hexadecimal digits"""
    clique: int
    """number of the part of the cluster"""


class Fabric(NamedTuple):
    domain: Domain | None
    """None if the GPU is in no domain, or cannot share memory there"""
    fault: str = ""
    """why the GPU is in no domain, if it may be expected to be in one"""


def fabric_of(device: torch.device) -> Fabric:
    """Return the domain in which a GPU can share memory. GPUs that are connected within one machine only have none."""
    about = torch.cuda.get_device_properties(device)
    found = read_fabric(str(about.uuid), about.major)
    if found.domain is None:
        return found
    with closing(ExportedBlock(device)) as block:
        fault = block.fault or map_fault(block.handle, device)
    return Fabric(None, f"its memory cannot be shared over NVLink, {fault}; {_IMEX_CURE}") if fault else found


def read_fabric(uuid: str, major: int) -> Fabric:
    """Return what NVML reports of a GPU with this UUID, without `GPU-`, and this major compute capability."""
    unknown = "its NVLink domain is unknown: "
    try:
        import pynvml  # pyright: ignore[reportMissingImports] # of nvidia-ml-py
    except ImportError:
        return Fabric(None, (unknown + "nvidia-ml-py is not installed") * (major >= _FIRST_MAJOR))
    try:
        pynvml.nvmlInit()
        try:
            # By UUID, since NVML also numbers GPUs that are not visible to CUDA.
            info = _fabric_info(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        finally:
            pynvml.nvmlShutdown()
    except (AttributeError, pynvml.NVMLError) as error:  # an old library or driver, none, or a MIG slice
        return Fabric(None, f"{unknown}{error}" * (major >= _FIRST_MAJOR))
    cluster = bytes(info.clusterUuid)
    if info.state < _SUPPORTED or (info.state == _COMPLETED and not any(cluster)):
        return Fabric(None)  # connected to GPUs of its machine at most
    if info.state != _COMPLETED:
        return Fabric(None, f"its NVLink fabric is {_STATES.get(info.state, f'in state {info.state}')}")
    if info.status != pynvml.NVML_SUCCESS:
        return Fabric(None, f"its NVLink fabric has failed with status {info.status}")
    if getattr(info, "healthSummary", None) == _UNHEALTHY:
        return Fabric(None, "its NVLink fabric is unhealthy")
    return Fabric(Domain(cluster.hex(), int(info.cliqueId)))


def _fabric_info(pynvml: Any, device: Any) -> Any:
    def read(structure: str) -> Any:
        info = getattr(pynvml, structure)()
        pynvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
        return info

    with suppress(AttributeError, pynvml.NVMLError):  # the library or the driver is older
        return read("c_nvmlGpuFabricInfo_v3_t")
    return read("c_nvmlGpuFabricInfoV_t")


class ExportedBlock:
    """A block of a GPU's memory that GPUs of its domain may map until it is closed.

    Example:
        with closing(ExportedBlock(device)) as block:
            faults = gathered(map_fault(block.handle, device), group)
    """

    def __init__(self, device: torch.device, kind: str = "FABRIC") -> None:
        """Allocate the smallest block that can be shared, 2 MB; `kind` names a CUmemAllocationHandleType."""
        self.handle: Any = b""
        """64 bytes that name the block on any machine; empty if there is a `fault`"""
        self.fault, self._block = "", None
        try:
            driver, handle_type = _driver(), _handle_type(kind)
            properties, size = _block_properties(device, kind)
            self._block = _call(driver.cuMemCreate, size, properties, 0)
            exported = _call(driver.cuMemExportToShareableHandle, self._block, handle_type, 0)
            self.handle = getattr(exported, "data", exported)
        except (ImportError, _DriverError) as error:
            self.fault = str(error)

    def close(self) -> None:
        if self._block is not None:
            _call(_driver().cuMemRelease, self._block)
            self._block = None


def map_fault(handle: Any, device: torch.device, kind: str = "FABRIC") -> str:
    """Map the block with this handle on a GPU, and unmap it again; return why that fails, empty if it does not."""
    driver = _driver()
    _, size = _block_properties(device, kind)
    access = driver.CUmemAccessDesc()
    access.location = _location(device)
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    with ExitStack() as undo:
        try:
            block = _call(driver.cuMemImportFromShareableHandle, handle, _handle_type(kind))
            undo.callback(driver.cuMemRelease, block)
            address = _call(driver.cuMemAddressReserve, size, 0, 0, 0)
            undo.callback(driver.cuMemAddressFree, address, size)
            _call(driver.cuMemMap, address, size, 0, block, 0)
            undo.callback(driver.cuMemUnmap, address, size)
            _call(driver.cuMemSetAccess, address, size, [access], 1)
        except _DriverError as error:
            return str(error)
    return ""


def _driver() -> Any:
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue] # not on a CPU

    return driver


def _handle_type(kind: str) -> Any:
    return getattr(_driver().CUmemAllocationHandleType, f"CU_MEM_HANDLE_TYPE_{kind}")


def _location(device: torch.device) -> Any:
    location = _driver().CUmemLocation()
    location.type = _driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device.index if device.index is not None else torch.cuda.current_device()
    return location


def _block_properties(device: torch.device, kind: str) -> tuple[Any, int]:
    """Return the properties of a block of a GPU, and its size in bytes."""
    driver, properties = _driver(), _driver().CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(device)
    properties.requestedHandleTypes = _handle_type(kind)
    torch.cuda.synchronize(device)  # creates the CUDA context
    unit = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return properties, _call(driver.cuMemGetAllocationGranularity, properties, unit)


class _DriverError(RuntimeError):
    pass


def _call(function: Any, *arguments: Any) -> Any:
    error, *results = function(*arguments)
    if error.value != 0:
        raise _DriverError(f"{function.__name__} returned {error.name}")
    return results[0] if results else None
