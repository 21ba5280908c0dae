"""Files of tensors in the safetensors format: a header in JSON, then the bytes. Nothing in one can be executed.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of the header, little-endian; the
header, `{name: {"dtype", "shape", "data_offsets"}}`; the tensors' bytes in C order. The library would need all tensors
on the CPU at once, and another pass for the checksum.
"""

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from dlrm_overlap.checkpoint.storage.manifest import DamagedError, StoredFile

_CODES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
CHUNK_BYTES = 1 << 26  # copied from the device, hashed and written at a time

ToCpu = Callable[[str, torch.Tensor], torch.Tensor]
"""takes a tensor's name and some of its elements, [n], at most CHUNK_BYTES, and returns them on the CPU, where they
last until the next call"""


def dtype_code(dtype: torch.dtype) -> str:
    """Return the name that the format has for `dtype`, such as F32."""
    return _CODES[dtype]


def copy_to_cpu(name: str, elements: torch.Tensor) -> torch.Tensor:
    """Return `elements` on the CPU."""
    return elements.cpu()


def write_tensors(file: BinaryIO, tensors: Mapping[str, torch.Tensor], to_cpu: ToCpu = copy_to_cpu) -> StoredFile:
    """Write `tensors`, on any device, to `file`, and return its size and checksum.

    Raises:
        OSError: if the file cannot be written, as where the disk is full.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8
    checksum = hashlib.sha256()

    def put(data: memoryview) -> None:
        checksum.update(data)
        file.write(data)

    put(memoryview(len(text).to_bytes(8, "little") + text))
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        for elements in flat.split(max(1, CHUNK_BYTES // tensor.element_size())):
            put(to_cpu(name, elements).contiguous().view(torch.uint8).numpy().data)
    return StoredFile(len(text) + 8 + end, checksum.hexdigest())


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of `path` by name, views of the mapped file: it is read where they are used.

    Raises:
        DamagedError: if it is not such a file.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writing to it leaves the file alone
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise DamagedError(f"{path} cannot be read ({error})") from None
    try:
        length = int.from_bytes(data[:8], "little")
        if length > len(data) - 8:
            raise ValueError("its header is longer than the file")
        header = json.loads(data[8 : 8 + length])
        return {
            name: _view(data, 8 + length, about["dtype"], about["shape"], about["data_offsets"])
            for name, about in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        # RuntimeError: torch has no tensors of such a shape.
        raise DamagedError(f"{path} is not a file of tensors ({error})") from None


def _view(data: mmap.mmap, base: int, code: str, shape: list[int], offsets: list[int]) -> torch.Tensor:
    dtype, (begin, end), count = _DTYPES[code], offsets, math.prod(shape)
    if min([0, *shape]) < 0 or end - begin != count * dtype.itemsize or not 0 <= begin <= end <= len(data) - base:
        raise ValueError(f"a tensor of shape {shape} does not have the bytes {begin} to {end}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=base + begin).view(shape)
