"""Damaged and forged checkpoints: every changed bit is found, nothing is executed, and nothing hangs."""

import errno
import functools
import io
import json
import operator
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from xxhash import xxh3_128

from dlrm_overlap.checkpoint import manifest as manifest_module
from dlrm_overlap.checkpoint import pieces
from dlrm_overlap.checkpoint.checkpoint import Checkpointer
from dlrm_overlap.checkpoint.dcp_files import METADATA, read_metadata
from dlrm_overlap.checkpoint.extents import local_extents
from dlrm_overlap.checkpoint.manifest import MANIFEST, Manifest, _sealed, encoded_of, read_manifest, write_manifest
from dlrm_overlap.checkpoint.pieces import CheckedFile, ChecksummedFile, DamagedError, Piece
from dlrm_overlap.checkpoint.storage import load_extents
from dlrm_overlap.checkpoint.tools import export, show, verify
from dlrm_overlap.cli import main
from dlrm_overlap.config import InputError
from dlrm_overlap.data.encoding import SCHEMA, VOCABULARY, Encoded, write_encoding
from dlrm_overlap.data.schema import criteo_schema
from dlrm_overlap.train.evaluation import stored_config
from tests.conftest import NO_FILES, refuses
from tests.unit.storage.test_storage import make_table, write_table

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]
DATA = "__0_0.distcp"
FILES = [DATA, METADATA, MANIFEST]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small tensors into several pieces and chunks, as large ones are."""
    for name, size in {"_LARGE": 100, "_END": 30, "_CHUNK": 17}.items():
        monkeypatch.setattr(pieces, name, size)


def _flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def _resume(folder: Path, resume: str = "auto") -> Path | None:
    """Load the checkpoint that a run in `folder` resumes from, and return its path."""
    return Checkpointer(folder, 9, {"rows": [5]}).resume(resume, False, _load)


def _load(path: Path, _: Manifest) -> Path:
    load_extents(path, local_extents(*make_table([0, 4])))
    return path


def _save(folder: Path, *steps: int) -> list[Path]:
    return [Checkpointer(folder, 9, {"rows": [5]}).write(step, local_extents(*make_table([0, 4]))) for step in steps]


@pytest.mark.parametrize("file", FILES)
def test_every_changed_bit_is_found(tmp_path: Path, small_pieces: None, file: str) -> None:
    """Some bits of each file, and the first and last bytes of each piece of the tensors."""
    path = write_table(tmp_path, [0, 4])
    assert verify(path) == []
    assert len(read_manifest(path).files[DATA]) > 8
    size = (path / file).stat().st_size
    positions = random.Random(0).sample(range(size), 60) + list(range(size - 60, size))
    if file == DATA:
        ends = [*accumulate(piece.size for piece in read_manifest(path).files[DATA])]
        positions += [0, *ends[:-1], *(end - 1 for end in ends)]
    for position in positions:
        _flip(path / file, bit := 8 * position + position % 8)
        (fault,) = verify(path)
        assert fault.startswith(str(path / file)), bit
        _flip(path / file, bit)
    assert verify(path) == []


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped": lambda file: _flip(file, 8 * (file.stat().st_size // 2)),
    "cut": lambda file: os.truncate(file, file.stat().st_size - 1),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_run_goes_on_from_the_checkpoint_before_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], file: str, damage: str
) -> None:
    before, newest = _save(tmp_path, 2, 4)
    assert _resume(tmp_path) == newest
    DAMAGE[damage](newest / file)
    assert _resume(tmp_path) == before
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith(f"checkpoint.resume: {newest / file} ")
    assert warning.endswith(f"resuming from {before}, the newest complete one")
    assert "Traceback" not in "".join(capfd.readouterr())
    with refuses(rf"resume: {newest / file} .*; name another checkpoint"):
        _resume(tmp_path, str(newest))
    DAMAGE[damage](before / file)
    with refuses("and no earlier checkpoint is complete"):
        _resume(tmp_path)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(("number", "cure"), [(errno.EMFILE, "raise the limit of `ulimit -n`"), (errno.EACCES, "corr")])
def test_a_run_does_not_go_on_from_an_earlier_checkpoint_if_it_cannot_read_the_newest_one_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, number: int, cure: str
) -> None:
    """Later saves would remove the newest one, which may be intact; of an earlier one the run needs nothing."""
    before, newest = _save(tmp_path, 2, 4)
    opened, refused = os.open, newest / file

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if str(path) == str(refused):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    text = rf"{newest / file} cannot be read \({os.strerror(number)}\); {cure}"
    for resume in ("auto", str(newest)):
        with refuses(text):
            _resume(tmp_path, resume)
    refused = before / file
    assert _resume(tmp_path) == newest


def test_a_checkpoint_of_a_later_version_is_refused_and_stays(tmp_path: Path) -> None:
    """As damaged, it would be the first that the next save removes."""
    _, newest = _save(tmp_path, 2, 4)
    write_manifest(newest, replace(read_manifest(newest), format=manifest_module.FORMAT + 1))
    with refuses(rf"{newest / MANIFEST} has format 6, but this version reads 5; use the version that wrote it"):
        _resume(tmp_path)


def test_a_damaged_format_is_no_later_version(tmp_path: Path) -> None:
    before, newest = _save(tmp_path, 2, 4)
    text = (newest / MANIFEST).read_text()
    for digit in "17":  # a bit of "5" has changed
        (newest / MANIFEST).write_text(text.replace('"format": 5', f'"format": {digit}'))
        assert _resume(tmp_path) == before


def test_a_damaged_checkpoint_is_removed_before_one_that_is_whole(tmp_path: Path) -> None:
    _, _, damaged = _save(tmp_path, 1, 2, 3)
    _flip(damaged / DATA, 9)
    checkpointer = Checkpointer(tmp_path, 2, {"rows": [5]})
    checkpointer.resume("auto", False, _load)
    for step, kept in ((4, ["step_2", "step_4"]), (3, ["step_3", "step_4"]), (5, ["step_3", "step_5"])):
        checkpointer.write(step, local_extents(*make_table([0, 4])))
        assert sorted(os.listdir(tmp_path)) == kept


@pytest.mark.parametrize("files", [[DATA], [METADATA], [DATA, METADATA]], ids="+".join)
def test_files_of_another_step_are_refused(tmp_path: Path, files: list[str]) -> None:
    old, new = _save(tmp_path, 10, 20)
    for file in files:
        shutil.copy(old / file, new / file)
    assert (old / DATA).stat().st_size == (new / DATA).stat().st_size
    assert len(verify(new)) == 1
    assert _resume(tmp_path) == old
    if METADATA in files:
        _without_checksums(new)
        assert verify(new) == [f"{new / METADATA} is of step 10, and {MANIFEST} of step 20"]


def _without_checksums(path: Path) -> None:
    """Make the manifest one of the format before this one."""
    content = json.loads((path / MANIFEST).read_bytes())
    del content["checksum"]
    sizes = {name: (path / name).stat().st_size for name in content["files"]}
    (path / MANIFEST).write_text(json.dumps(content | {"format": 3, "files": sizes}))


def test_a_checkpoint_of_the_format_before_loads_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    state = make_table([0, 4])
    path = Checkpointer(tmp_path, 9, {"rows": [5]}).write(3, local_extents(*state))
    _without_checksums(path)
    found = make_table([0, 4])
    load_extents(path, local_extents(*found))
    for expected, loaded in zip(local_extents(*state), local_extents(*found), strict=True):
        assert torch.equal(expected.tensor, loaded.tensor)
    text = f"{path} was saved by an earlier version without checksums, so damage to its tensors is not detected"
    assert _resume(tmp_path) == path
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [f"checkpoint: {text}"]
    assert main(["checkpoint", "verify", str(path)]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{path}: whole\n", f"dlrm-overlap: {text}\n")
    os.truncate(path / DATA, 100)
    assert len(verify(path)) == 1


def test_a_checkpoint_that_another_python_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metadata names the class of its path, which Python 3.13 has in `pathlib._local` and others in `pathlib`."""
    path = write_table(tmp_path / "run", [0, 4])
    for name in ("pathlib", "pathlib._local"):
        metadata = read_metadata(path, read_manifest(path))
        kind: Any = type("PosixPath", (_Path,), {"__module__": name})
        metadata.storage_meta = StorageMeta(checkpoint_id=kind())
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, SimpleNamespace(PosixPath=kind))
            content = pickle.dumps(metadata)
        assert name.encode() in content
        _replace(path, METADATA, content)
        read = read_metadata(path, read_manifest(path)).storage_meta
        assert read is not None
        assert read.checkpoint_id == "run/step_3"


class _Path:
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ("run", "step_3")


def _encoded(folder: Path) -> Encoded:
    schema = criteo_schema(None, min_count=1)
    keys = {f"{name}.keys": np.arange(1000) for name in schema.categorical}
    return write_encoding(folder, schema, keys)


def test_a_damaged_vocabulary_in_a_checkpoint_is_found(tmp_path: Path) -> None:
    encoded = _encoded(tmp_path / "encoding")
    state = local_extents(*make_table([0, 4]))
    path = Checkpointer(tmp_path, 9, {"rows": [5]}, encoded=encoded).write(3, state)
    assert verify(path) == []
    inside = encoded_of(path)
    assert inside is not None
    assert inside.read().digest == encoded.digest
    file = path / "encoding" / VOCABULARY
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert verify(path) == [f"{file} is damaged: the checksum of bytes 0 to {len(content)} differs"]
    os.truncate(file, 100)
    assert verify(path) == [f"{file} has 100 bytes, not {len(content)}"]
    file.unlink()
    assert len(verify(path)) == 1


def test_a_damaged_vocabulary_is_not_saved(tmp_path: Path) -> None:
    encoded = _encoded(tmp_path / "encoding")
    _encoded(tmp_path / "other")
    (encoded.folder / SCHEMA).write_text((encoded.folder / SCHEMA).read_text().replace("log1p", "none"))
    with refuses(r"encoding/schema\.yaml: has changed since it was written"):
        Checkpointer(tmp_path, 9, {"rows": [5]}, encoded=encoded).write(3, local_extents(*make_table([0, 4])))
    assert list(tmp_path.glob("*step_3")) == []


def test_a_checkpoint_of_the_format_before_encodings_loads(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path, 9, {"rows": [5]}).write(3, local_extents(*make_table([0, 4])))
    content = json.loads((path / MANIFEST).read_bytes())
    del content["checksum"], content["encoding"]
    (path / MANIFEST).write_bytes(_sealed(json.dumps(content | {"format": 4}, indent=1).rstrip("}\n").encode()))
    assert _resume(tmp_path) == path
    assert encoded_of(path) is None
    assert verify(path) == []


class _Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def _replace(path: Path, file: str, content: bytes, has_checksums: bool = True) -> None:
    """Forge `file`, or what it has after its first bytes, with the sizes and checksums that fit in the manifest."""
    manifest, before = read_manifest(path), (path / file).read_bytes()
    same, end = (manifest.files[file], len(before)) if content.startswith(before) else ([], 0)
    forged = [*same, Piece(len(content) - end, xxh3_128(content[end:]).hexdigest())]
    (path / file).write_bytes(content)
    write_manifest(path, replace(manifest, files=manifest.files | {file: forged}))
    if not has_checksums:
        _without_checksums(path)


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("where", ["metadata", "within metadata", "tensor", "bytes"])
def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path, where: str, has_checksums: bool) -> None:
    made, path = tmp_path / "made", write_table(tmp_path / "run", [0, 4])
    metadata = read_metadata(path, read_manifest(path))
    if where == "within metadata":
        metadata.planner_data = _Code(made)
    elif where != "metadata":
        stream = io.BytesIO()
        torch.save(_Code(made), stream)
        before = (path / DATA).read_bytes()
        _replace(path, DATA, before + stream.getvalue())
        index, info = next(iter(metadata.storage_data.items()))
        info.offset, info.length = len(before), stream.tell()
        if where == "bytes":  # DCP's tools unpickle these completely
            metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    _replace(path, METADATA, pickle.dumps(_Code(made) if where == "metadata" else metadata), has_checksums)
    (fault,) = verify(path)
    assert "UnpicklingError" in fault
    with refuses(r"export: .*; export another"):
        export(path, tmp_path / "x.pt")
    show(path)
    for resume in ("auto", str(path)):
        with refuses(r"checkpoint\.resume: "):
            _resume(path.parent, resume)
    assert not made.exists()
    pickle.loads(pickle.dumps(_Code(made)))
    assert made.exists(), "the code does something"


def test_a_pickle_does_not_change_the_classes_of_dcp(tmp_path: Path) -> None:
    """A pickle can set attributes of a class that it names, by the state of an instance with slots."""
    path, content = write_table(tmp_path, [0, 4]), io.BytesIO()
    pickle.dump(Metadata, content, protocol=2)
    name = content.getvalue().removesuffix(b".")
    content = io.BytesIO()
    pickle.dump((None, {"changed": 1}), content, protocol=2)
    state = content.getvalue().removeprefix(b"\x80\x02").removesuffix(b".")
    changes = name + state + pickle.BUILD + pickle.STOP
    _replace(path, METADATA, changes)
    assert len(verify(path)) == 1
    assert not hasattr(Metadata, "changed")
    pickle.loads(changes)
    assert Metadata.changed == 1  # type: ignore[attr-defined]
    del Metadata.changed  # type: ignore[attr-defined]


def test_damaged_metadata_is_named_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of equal size, and with a checksum that fits or none: pickles that raise whatever they like."""
    path = write_table(tmp_path, [0, 4])
    content, generator = (path / METADATA).read_bytes(), random.Random(0)
    for _ in range(50):
        damaged = bytearray(content)
        for _ in range(generator.choice([1, 5, 200])):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        _replace(path, METADATA, bytes(damaged))
        for action in (lambda: verify(path), lambda: _resume(tmp_path, str(path)), lambda: export(path, path / "x")):
            with suppress(InputError):  # some damage changes a name that nobody reads
                action()
        (path / "x").unlink(missing_ok=True)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_named_at_once(tmp_path: Path, file: str, kind: str) -> None:
    before, path = _save(tmp_path, 2, 4)
    (path / file).unlink()
    NO_FILES[kind](path / file)
    (fault,) = verify(path)
    assert fault == f"{path / file} cannot be read (it is {kind}, not a file)"
    with refuses(f"it is {kind}, not a file"):
        export(path, tmp_path / "x.pt")
    with refuses(f"it is {kind}, not a file"):
        _resume(tmp_path, str(path))
    assert _resume(tmp_path) == before
    if file == MANIFEST:
        with refuses(f"it is {kind}, not a file"):
            show(path)
    for _ in range(2):
        assert _save(tmp_path, 4) == [path], "the next save takes its place"
    assert verify(path) == []


WORDS: list[Any] = ["a word", "\ud800", 7, -1, 1.5, 2**70, None, True, [], {}, [[]], [[1, 2]], {"a": {"b": None}}]


def _keys_in(content: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys to every value in a manifest, and to some elements of lists."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in islice(items, 20):
        yield (*keys, key)
        yield from _keys_in(value, (*keys, key))


def _forge(path: Path, content: dict[str, Any], has_checksums: bool) -> None:
    text = json.dumps(content, indent=1).encode()
    (path / MANIFEST).write_bytes(manifest_module._sealed(text.rstrip(b"}\n")) if has_checksums else text)


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_forged_manifest_ends_in_one_line(tmp_path: Path, has_checksums: bool) -> None:
    """Each value in it is replaced by values of other types, or left out, and the checksum fits."""
    path = write_table(tmp_path, [0, 4])
    about = {
        "config": {"embedding": {"backend": "pgas"}, "train": {"steps": 5}},
        "plan": {"t_0": {"sharding": "row_wise"}},
        "world_size": 2,
        "versions": {"torch": "2.13.0"},
        "trained_metrics": [(0, 1.5), (7, 2)],
    }
    write_manifest(path, replace(read_manifest(path), about=about, metrics={"auroc": 0.5}, settings={"seed": 1}))
    if not has_checksums:
        _without_checksums(path)
    genuine = json.loads((path / MANIFEST).read_bytes())
    genuine.pop("checksum", None)
    _forge(path, genuine, has_checksums)
    assert verify(path) == []
    refused = []
    for keys in list(_keys_in(genuine)):
        for word in (*WORDS, ...):
            content = json.loads(json.dumps(genuine))
            section = functools.reduce(operator.getitem, keys[:-1], content)
            section[keys[-1]] = word
            if word is ...:
                del section[keys[-1]]
            _forge(path, content, has_checksums)
            refused.append(_is_refused(path, keys))
    assert min(refused.count(True), refused.count(False)) > 100


def _is_refused(path: Path, keys: tuple[Any, ...]) -> bool:
    """Return whether the manifest is refused by name; where it is not, try what reads it."""
    try:
        read_manifest(path)
    except InputError as error:
        return str(error).startswith(str(path / MANIFEST)) and "\n" not in str(error)
    show(path).encode()
    with suppress(InputError):
        stored_config(path)
    if keys[0] != "about":
        verify(path)
        with suppress(InputError):
            _resume(path.parent)
    return False


def test_a_manifest_names_files_of_its_folder_alone_and_no_piece_without_its_checksum(tmp_path: Path) -> None:
    path = write_table(tmp_path, [0, 4])
    manifest = read_manifest(path)
    names = ("../step_4/__0_0.distcp", "/dev/zero", "..", "", "a\0b", MANIFEST)
    wrong = [("files", name, manifest.files[DATA]) for name in names]
    for key, name, listed in [*wrong, ("pieces", DATA, [Piece(manifest.size_of(DATA), "")])]:
        write_manifest(path, replace(manifest, files=manifest.files | {name: listed}))
        with pytest.raises(DamagedError, match=f"{key} has the wrong type"):
            read_manifest(path)


def test_checked_pieces_read_as_a_file_does(tmp_path: Path, small_pieces: None) -> None:
    generator, content = random.Random(0), os.urandom(5000)
    with ChecksummedFile(tmp_path / "file") as written:
        for begin, end in zip([0, 10, 20, 1500, 1510], [10, 20, 1500, 1510, 5000], strict=True):
            assert written.write(memoryview(content)[begin:end]) == end - begin
    assert (tmp_path / "file").read_bytes() == content
    assert [piece.size for piece in written.pieces] == [20, 1450, 40, 3460, 30]
    for first in (0, 1):
        begin = sum(piece.size for piece in written.pieces[:first])
        plain = io.BytesIO(content[begin:])
        with CheckedFile(tmp_path / "file", begin, written.pieces[first:]) as checked:
            for _ in range(300):
                position, count = generator.randrange(5100), generator.choice([0, 1, 30, 200, 4000])
                assert checked.seek(position) == plain.seek(position)
                assert checked.read(count) == plain.read(count)
                assert checked.tell() == max(position, plain.tell())


def test_a_large_file_is_synced_while_it_is_written(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single sync of all could take longer than embedding.wait_timeout_s, in which a rank must move."""
    sizes, sync = list[int](), os.fsync

    def record(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(pieces, "_SYNCED", 250)
    with ChecksummedFile(tmp_path / "file") as written:
        for _ in range(5):
            written.write(b"1" * 200)  # pieces of 170 and 30
    assert sizes == [370, 770, 1000]


def test_pieces_that_were_not_read_are_checked_at_the_end(tmp_path: Path, small_pieces: None) -> None:
    with ChecksummedFile(tmp_path / "file") as written:
        written.write(bytes(500))
    _flip(tmp_path / "file", 8 * 490)
    with (
        pytest.raises(DamagedError, match=r"bytes 470 to 500 differs"),
        CheckedFile(tmp_path / "file", 0, written.pieces) as checked,
    ):
        assert checked.read(400) == bytes(400)
