"""What NVML says of a GPU's NVLink domain, by a made-up library."""

import sys
from collections.abc import Sequence
from ctypes import Structure, c_ubyte, c_uint
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from dlrm_overlap.comm import fabric
from dlrm_overlap.comm.fabric import Domain, ExportedBlock, Fabric, fabric_of, map_fault, read_fabric

CLUSTER = bytes(range(16))


class Error(Exception):
    pass


class _Info(Structure):
    _fields_: Sequence[Any] = [
        ("clusterUuid", c_ubyte * 16), ("status", c_uint), ("cliqueId", c_uint), ("state", c_uint),
    ]  # fmt: skip


class _Info3(_Info):
    _fields_: Sequence[Any] = [("healthSummary", c_ubyte)]


class OldLibrary(ModuleType):
    """NVML, of a driver with one GPU, 12-ab, without functions for fabrics."""

    NVMLError, NVML_SUCCESS = Error, 0

    def __init__(self, **fields: Any) -> None:
        super().__init__("pynvml")
        self.fields: dict[str, Any] = {"cluster": CLUSTER, "status": 0, "cliqueId": 7, "state": 3, **fields}
        self.opened = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fields.get("missing"):
            raise Error("NVML Shared Library Not Found")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-12-ab":
            raise Error("Not Found")
        return uuid


class Library(OldLibrary):
    """The same, and the GPU's fabric has the given fields."""

    c_nvmlGpuFabricInfoV_t = _Info  # noqa: N815
    c_nvmlGpuFabricInfo_v3_t: Any = _Info3  # noqa: N815
    known: Sequence[Any] = (_Info, _Info3)
    """structures that the driver knows"""

    def nvmlDeviceGetGpuFabricInfoV(self, _: str, reference: Any) -> None:  # noqa: N802
        info = reference._obj
        if type(info) not in self.known:
            raise Error("Argument version mismatch")
        fields = dict(self.fields)
        info.clusterUuid = (c_ubyte * 16)(*fields.pop("cluster"))
        for name, value in fields.items():
            if hasattr(info, name):
                setattr(info, name, value)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(library: ModuleType | None) -> ModuleType | None:
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return library

    return put


@pytest.mark.parametrize(
    ("fields", "domain", "fault"),
    [
        ({}, Domain(CLUSTER.hex(), 7), ""),
        ({"healthSummary": 1}, Domain(CLUSTER.hex(), 7), ""),
        ({"healthSummary": 3}, Domain(CLUSTER.hex(), 7), ""),  # less bandwidth
        ({"healthSummary": 2}, None, "its NVLink fabric is unhealthy"),
        ({"cluster": bytes(16)}, None, ""),  # NVSwitches of one machine
        ({"state": 0, "cluster": bytes(16)}, None, ""),  # no fabric
        ({"state": 1, "cluster": bytes(16)}, None, "its NVLink fabric is not started"),
        ({"state": 2}, None, "its NVLink fabric is in progress"),
        ({"status": 15}, None, "its NVLink fabric has failed with status 15"),
        ({"missing": True}, None, "its NVLink domain is unknown: NVML Shared Library Not Found"),
    ],
)
def test_a_domain_is_one_whose_fabric_is_complete(install: Any, fields: Any, domain: Domain, fault: str) -> None:
    library = install(Library(**fields))
    assert read_fabric("12-ab", 10) == Fabric(domain, fault)
    assert library.opened == 0, "what is opened is closed"


def test_an_older_driver_or_library_has_an_older_structure(install: Any) -> None:
    library = install(Library(healthSummary=2))
    library.known = (_Info,)
    assert read_fabric("12-ab", 10).domain == Domain(CLUSTER.hex(), 7)
    library.known = ()
    assert read_fabric("12-ab", 10) == Fabric(None, "its NVLink domain is unknown: Argument version mismatch")
    library = install(OldLibrary())
    domain, fault = read_fabric("12-ab", 10)
    assert domain is None
    assert fault.startswith("its NVLink domain is unknown: ")
    assert "c_nvmlGpuFabricInfoV_t" in fault
    assert read_fabric("12-ab", 9) == Fabric(None)


@pytest.mark.parametrize("major", [9, 10])
def test_a_missing_library_is_a_fault_where_domains_span_machines(install: Any, major: int) -> None:
    install(None)
    assert read_fabric("12-ab", major) == Fabric(
        None, "its NVLink domain is unknown: nvidia-ml-py is not installed" if major == 10 else ""
    )
    install(Library())
    slice_of_a_gpu = read_fabric("34-cd", major)
    assert slice_of_a_gpu == Fabric(None, "its NVLink domain is unknown: Not Found" if major == 10 else "")


class _Block:
    fault, closed = "", False

    def __init__(self, device: torch.device) -> None:
        self.handle = b"" if self.fault else b"h"

    def close(self) -> None:
        type(self).closed = True


@pytest.mark.parametrize(("export", "mapped"), [("", ""), ("cuMemCreate returned X", ""), ("", "cuMemMap returned X")])
def test_a_gpu_that_cannot_share_memory_is_in_no_domain(
    install: Any, monkeypatch: pytest.MonkeyPatch, export: str, mapped: str
) -> None:
    install(Library())
    block: Any = type("Block", (_Block,), {"fault": export})
    about: Any = type("About", (), {"uuid": "12-ab", "major": 10})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(fabric, "ExportedBlock", block)
    monkeypatch.setattr(fabric, "map_fault", lambda handle, _: mapped if handle == b"h" else "no handle")
    domain, fault = fabric_of(torch.device("cuda", 0))
    assert (domain is None) == bool(export or mapped)
    assert fault.startswith(
        f"its memory cannot be shared over NVLink, {export or mapped}; nvidia-imex must" * bool(fault)
    )
    assert block.closed


class _Driver:
    """CUDA's driver functions, of which one fails; notes what is held."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.held, self.calls = failing, list[str](), list[str]()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuMem"):
            return MagicMock()  # types and constants
        pairs = {"Create": "Release", "ImportFromShareableHandle": "Release", "AddressReserve": "AddressFree"}
        pairs |= {"Map": "Unmap"}

        def call(*_: Any) -> tuple[Any, ...]:
            action = name.removeprefix("cuMem")
            self.calls.append(action)
            if action == self.failing:
                return SimpleNamespace(value=800, name="CUDA_ERROR_NOT_PERMITTED"), None
            if action in pairs:
                self.held.append(pairs[action])
            elif action in pairs.values():
                assert self.held.pop() == action, "freed in the reverse order"
            return SimpleNamespace(value=0, name="CUDA_SUCCESS"), SimpleNamespace(data=b"handle")

        call.__name__ = name
        return call


@pytest.mark.parametrize("failing", ["", "Create", "ExportToShareableHandle"])
def test_a_block_is_exported_or_its_fault_told_and_freed(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    driver = _Driver(failing)
    monkeypatch.setattr(fabric, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    block = ExportedBlock(torch.device("cuda", 1))
    assert block.handle == (b"" if failing else b"handle")
    assert block.fault == (f"cuMem{failing} returned CUDA_ERROR_NOT_PERMITTED" if failing else "")
    assert driver.held == ([] if failing == "Create" else ["Release"])
    block.close()
    block.close()
    assert not driver.held


@pytest.mark.parametrize("failing", ["", "ImportFromShareableHandle", "AddressReserve", "Map", "SetAccess"])
def test_a_block_is_mapped_for_a_moment(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    driver = _Driver(failing)
    monkeypatch.setattr(fabric, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    fault = map_fault(b"handle", torch.device("cuda", 1))
    assert fault == (f"cuMem{failing} returned CUDA_ERROR_NOT_PERMITTED" if failing else "")
    assert not driver.held
    assert ("SetAccess" in driver.calls) == (failing in ("", "SetAccess"))
