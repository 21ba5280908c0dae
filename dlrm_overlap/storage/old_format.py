"""Checkpoints of format 0, which torch.distributed.checkpoint wrote: how to read them without executing anything.

Their metadata is a pickle, here read by an unpickler that knows the few names it is made of and refuses any other.
Their tensors are what `torch.save` writes, zip archives, read with `weights_only`. The only checksums there are, are
those that a zip archive keeps of its members.
"""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.config import in_one_line
from dlrm_overlap.files import open_file
from dlrm_overlap.storage.manifest import DamagedError, Piece, StoredTensor, check_coverage
from dlrm_overlap.storage.parts import Box, in_order_of_states, state_of

_RECORDS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")}
_PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}
_NUMBERS = {("jsonargparse.typing", name) for name in ("PositiveInt", "NonNegativeInt")}  # rows, as keys gave them


class _Unpickler(pickle.Unpickler):
    """Makes of a pickle nothing but numbers, text, sizes, and records in the place of what metadata is made of.

    The records' class is made for one pickle alone, so that nothing lasts of what a pickle does to it.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)

        class Record:
            def __init__(self, *_: Any) -> None:
                """Ignore the arguments, which are of no use here."""

            def __setstate__(self, state: Any) -> None:
                """Take the attributes, if they have names."""
                if isinstance(state, dict):
                    self.__dict__.update(state)

        self._record = Record

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for the class or function that the pickle names.

        Raises:
            pickle.UnpicklingError: for any that the metadata of a checkpoint is not made of.
        """
        if (module, name) in _RECORDS | _PATHS:
            return self._record
        if (module, name) in _NUMBERS:
            return int
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which the metadata of a checkpoint is not made of")


class OldCheckpoint:
    """The tensors of a checkpoint of format 0."""

    def __init__(self, path: Path) -> None:
        """Read what is in the folder `path`.

        Raises:
            DamagedError: if the metadata cannot be read, or names what a checkpoint does not hold.
        """
        self.path = path
        try:
            with open_file(path / ".metadata") as file:
                about = _Unpickler(file).load()
            self._places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {
                (index.fqn, tuple(index.offset or [])): (info.relative_path, info.offset, info.length)
                for index, info in about.storage_data.items()
            }
            found = {
                name: (tuple(tensor.size), [(tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks])
                for name, tensor in about.state_dict_metadata.items()
                if hasattr(tensor, "chunks")  # others stand for states that are empty
            }
            self._names: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]] = {}
            self.tensors = {name: self._tensor(name, *tensor, found) for name, tensor in found.items()}
            check_coverage(self.tensors)
        except Exception as error:  # a damaged pickle may raise anything, and has executed nothing
            reason = error.strerror if isinstance(error, OSError) else in_one_line(error)
            raise DamagedError(f"{path / '.metadata'} cannot be read ({reason:.120})") from None

    def _tensor(
        self, name: str, shape: tuple[int, ...], boxes: list[Box], others: dict[str, tuple[tuple[int, ...], list[Box]]]
    ) -> StoredTensor:
        """Return what is stored of tensor `name`, whose pieces lie at `boxes` of it; among all, `others`."""
        table = others.get(state_of(name, others) or "")
        places = [offsets for offsets, _ in boxes]
        per_row = table is not None and len(shape) == 1 and len(table[0]) == 2
        if per_row:
            assert table is not None
            shape, places, boxes = table[0], sorted(places), in_order_of_states(table[1])
        pieces = []
        for place, (offsets, sizes) in zip(places, boxes, strict=True):
            file = self._places[name, place][0]
            self._names[name, offsets] = (name, place)
            pieces.append(Piece(file, name, offsets, sizes))
        return StoredTensor("", shape, tuple(pieces), per_row)

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the elements of `piece`, on the CPU.

        Raises:
            DamagedError: if its file is not what was written, as far as that shows.
        """
        file, offset, length = self._places[self._names[piece.name, piece.offsets]]
        place = self.path / Path(file).name
        try:
            with open_file(place) as stream:
                stream.seek(offset)
                data = io.BytesIO(stream.read(length))
            with zipfile.ZipFile(data) as archive:
                if wrong := archive.testzip():
                    raise ValueError(f"the checksum of {wrong} is another")
            data.seek(0)
            tensor = torch.load(data, map_location="cpu", weights_only=True)
            sizes = piece.sizes[:1] if self.tensors[piece.name].per_row else piece.sizes
            if tuple(tensor.shape) != sizes:
                raise ValueError("it has another size")
            return tensor
        except Exception as error:  # whatever zip and torch.load make of damaged bytes
            raise DamagedError(f"{place} is not what was written ({in_one_line(error):.120})") from None
