"""Files of `torch.distributed.checkpoint` (DCP), with checksums, loaded without executing anything in them.

Each rank writes one file of `pieces`; the pickle `.metadata` says where each tensor is.
"""

import io
import os
import pickle
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from dlrm_overlap.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from dlrm_overlap.checkpoint.pieces import CheckedFile, ChecksummedFile, DamagedError, Piece, UnreadableError
from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.launching.resources import exhausted_memory

METADATA = ".metadata"
_STEP = re.compile(r"step_([0-9]+)$")  # end of the name of the folder that was written
_READERS = 2  # threads that read and check the next pieces while one is copied
_ByteRange = tuple[str, int, int]  # file, first byte, number of bytes


class Writer(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self._files = _ChecksummedFiles()

    @property
    def pieces(self) -> dict[str, list[Piece]]:
        return {name.removesuffix(".tmp"): pieces for name, pieces in self._files.pieces.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write the tensors of `plan`, copying one at a time to the CPU.

        DCP's writer would copy ahead on the GPU: a background save would wait for training steps, and fail with them.
        """
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as file:
            for item in plan.items:
                found: Any = planner.resolve_data(item)
                tensor = found.detach().cpu()
                if tensor.untyped_storage().size() != tensor.nbytes:
                    tensor = tensor.clone()  # torch.save writes the whole storage
                begin = file.tell()
                save_tensors(tensor, file)
                file.end_piece()
                size = file.tell() - begin
                results.append(WriteResult(item.index, size, _StorageInfo(name, begin, size)))
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done


class _ChecksummedFiles(FileSystem):
    def __init__(self) -> None:
        self.pieces: dict[str, list[Piece]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", "it is read by `Reader`"
        with ChecksummedFile(Path(path)) as file:
            yield file
        self.pieces[Path(path).name] = file.pieces


def save_tensors(content: Any, file: Any) -> None:
    """Call `torch.save`, but raise the file's own error instead of torch's: an OSError, or an interruption."""
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch.save's own, in place of the file's
        hidden = error.__context__
        if isinstance(hidden, OSError) or not isinstance(hidden, (Exception, type(None))):
            raise hidden from None
        raise


class Reader(FileSystemReader):
    """Reads a checkpoint, and checks each piece before it is used.

    `set_up_storage_reader` raises errors of the metadata: if `read_metadata` raised them, DCP would log a traceback.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        """Read the folder's manifest if `manifest` is None."""
        super().__init__(path)
        self._folder = path
        self._begins: dict[str, list[int]] = {}  # file -> first byte of each piece, and its end
        self._fault: InputError | None = None
        try:
            self._manifest = manifest or read_manifest(path)
            self._metadata = read_metadata(path, self._manifest)
            for name, pieces in self._manifest.files.items():
                self._begins[name] = list(accumulate((piece.size for piece in pieces), initial=0))
        except InputError as error:
            self._fault, self._metadata = error, dcp.Metadata({})

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._fault is not None:
            raise self._fault
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        wanted: dict[_ByteRange, list[ReadItem]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            wanted.setdefault((info.relative_path, info.offset, info.length), []).append(item)
        for span, tensor in self._load_ahead(sorted(wanted)):
            for item in wanted[span]:
                part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
                target = planner.resolve_tensor(item).detach()
                if target.size() != part.size():
                    raise DamagedError(
                        f"{self._folder} is damaged: a piece of {item.dest_index.fqn} has another shape than "
                        f"{METADATA} says"
                    )
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    def _load_ahead(self, ranges: Iterable[_ByteRange]) -> Iterator[tuple[_ByteRange, torch.Tensor]]:
        loading: deque[tuple[_ByteRange, Future[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(_READERS, "read") as threads:
            for span in ranges:
                loading.append((span, threads.submit(self._load, span)))
                if len(loading) > _READERS:
                    first, tensor = loading.popleft()
                    yield first, tensor.result()
            for first, tensor in loading:
                yield first, tensor.result()

    def _load(self, span: _ByteRange) -> torch.Tensor:
        name, begin, _ = span
        with CheckedFile(self._folder / name, begin, self._pieces_of(span)) as file:
            try:
                return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
            except Exception as error:
                raise file.fault or _cannot_load(self._folder / name, error) from None

    def _pieces_of(self, span: _ByteRange) -> list[Piece]:
        (name, begin, size), manifest = span, self._manifest
        if name in manifest.files:
            begins = self._begins[name]
            if not manifest.has_checksums and 0 <= begin <= begin + size <= begins[-1]:
                return [Piece(size, "")]
            first, end = (bisect_left(begins, at) for at in (begin, begin + size))
            if end < len(begins) and (begins[first], begins[end]) == (begin, begin + size):
                return manifest.files[name][first:end]
        raise DamagedError(
            f"{self._folder / METADATA} is damaged: {MANIFEST} lists no {size} bytes at byte {begin} of {name!r:.80}"
        )


def read_metadata(checkpoint: Path, manifest: Manifest) -> dcp.Metadata:
    """Return what `.metadata` says about tensors; a DamagedError if it is unreadable or belongs to other files."""
    file = checkpoint / METADATA
    try:
        with CheckedFile(file, 0, manifest.files[METADATA]) as pieces:
            data = pieces.readall()  # checks it before it is unpickled
        metadata = _Unpickler(io.BytesIO(data)).load()
        step = _STEP.search(str(metadata.storage_meta.checkpoint_id))
    except (DamagedError, UnreadableError):
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise _cannot_load(file, error) from None
    if step and int(step[1]) != manifest.step:
        raise DamagedError(f"{file} is of step {step[1]}, and {MANIFEST} of step {manifest.step}")
    return metadata


def _cannot_load(file: Path, error: Exception) -> InputError:
    if exhausted_memory(error):
        return UnreadableError(f"{file}: no memory is left to load it; free some on this machine, and try again")
    return DamagedError(f"{file} is damaged ({type(error).__name__}: {in_one_line(error):.120})")


class _Unpickler(pickle.Unpickler):
    """Unpickles DCP's metadata, and nothing else.

    A pickle can modify classes, so it gets new subclasses of DCP's classes. Their instances become instances of DCP's
    classes once all fields are set.
    """

    _CLASSES: ClassVar = {
        ("torch.distributed.checkpoint.metadata", each.__name__): each
        for each in (
            dcp.Metadata,
            dcp.MetadataIndex,
            dcp.TensorStorageMetadata,
            dcp.ChunkStorageMetadata,
            dcp.TensorProperties,
            dcp.StorageMeta,
        )
    } | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo}
    _FUNCTIONS: ClassVar = {
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,
        ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
        ("pathlib", "PosixPath"): os.path.join,
        ("pathlib._local", "PosixPath"): os.path.join,  # its module in Python 3.13
    }

    def find_class(self, module: str, name: str) -> Any:
        if (true := self._CLASSES.get((module, name))) is not None:
            return _fresh(true)
        if (function := self._FUNCTIONS.get((module, name))) is not None:
            return lambda *args: function(*args)
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which checkpoints do not contain")


def _fresh(true: type) -> type:
    def set_state(self: Any, state: Any) -> None:
        object.__setattr__(self, "__class__", true)
        if hasattr(true, "__setstate__"):
            self.__setstate__(state)
        else:
            vars(self).update(state)

    return type(true.__name__, (true,), {"__setstate__": set_state})
