"""What is on disk: damage is found and named, nothing is executed, and other cuts of a table get the right rows."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

from dlrm_overlap.checkpoint.storage import save
from dlrm_overlap.checkpoint.storage.extents import Checkpoint, Extent, fill, local_extents, whole
from dlrm_overlap.checkpoint.storage.load import find_faults
from dlrm_overlap.checkpoint.storage.manifest import MANIFEST, DamagedError, Manifest, read_manifest
from dlrm_overlap.checkpoint.storage.save import write_checkpoint
from dlrm_overlap.checkpoint.storage.tensor_file import read_tensors, write_tensors
from dlrm_overlap.config import InputError
from tests.agreement import assert_same

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]
ROWS, D = 5, 8
NAME, STATE = "model.t.weight", "optimizer.state.t.weight.momentum1"
State = tuple[dict[str, Any], dict[str, Any]]


def _sharded(shards: list[tuple[list[int], torch.Tensor]], size: list[int]) -> ShardedTensor:
    """A tensor of `size` in shards (offsets, elements), all on this rank."""
    local = [
        Shard(tensor.clone(), ShardMetadata(offsets, list(tensor.shape), "rank:0/cpu")) for offsets, tensor in shards
    ]
    about = ShardedTensorMetadata([s.metadata for s in local], torch.Size(size), TensorProperties(dtype=torch.float32))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, about, process_group=dist.group.WORLD)


def _state(cuts: list[int], weight: torch.Tensor, per_row: torch.Tensor) -> State:
    """The state of a table cut before the columns `cuts`, as TorchRec lays it out, and of a dense parameter.

    Args:
        cuts: columns, the first 0.
        weight: [rows, D].
        per_row: [shards, rows] row-wise Adagrad's state.
    """
    ends = [*cuts[1:], D]
    table = _sharded([([0, a], weight[:, a:b]) for a, b in zip(cuts, ends, strict=True)], [ROWS, D])
    state = _sharded([([i * ROWS], each) for i, each in enumerate(per_row)], [ROWS * len(cuts)])
    model = {"t.weight": table, "bias": torch.arange(3.0)}
    return model, {"state": {"t.weight": {"momentum1": state}, "dense.bias": {"step": torch.tensor(7.0)}}}


def make_table(cuts: list[int]) -> State:
    return _state(cuts, torch.arange(float(ROWS * D)).view(ROWS, D), torch.rand(len(cuts), ROWS))


def _empty(cuts: list[int]) -> State:
    return _state(cuts, torch.full((ROWS, D), torch.nan), torch.full((len(cuts), ROWS), torch.nan))


def write_new(folder: Path, state: State) -> Path:
    write_checkpoint(folder / "step_3", local_extents(*state), lambda: Manifest(3, {"rows": [ROWS]}))
    return folder / "step_3"


def _open(path: Path) -> Checkpoint:
    return Checkpoint(path, read_manifest(path))


def _load(path: Path, cuts: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the table's rows and its state a shard, in a state that is cut before the columns `cuts`."""
    state = _empty(cuts)
    for extent in local_extents(*state):
        fill(extent, _open(path))
    table, per_row = state[0]["t.weight"], state[1]["state"]["t.weight"]["momentum1"]
    assert state[0]["bias"].tolist() == [0, 1, 2]
    assert state[1]["state"]["dense.bias"]["step"] == 7
    return torch.cat([s.tensor for s in table.local_shards()], 1), [s.tensor for s in per_row.local_shards()]


def test_a_state_of_one_number_a_row_loads_into_other_columns(tmp_path: Path) -> None:
    state = make_table([0, 2, 6])
    a, b, c = (shard.tensor for shard in state[1]["state"]["t.weight"]["momentum1"].local_shards())
    path = write_new(tmp_path, state)
    expected = {
        (0, 2, 6): [a, b, c],  # as it was, bit for bit
        (0,): [(2 * a + 4 * b + 2 * c) / 8],
        (0, 4): [(2 * a + 2 * b) / 4, (2 * b + 2 * c) / 4],
        (0, 1, 2, 6): [a, a, b, c],
    }
    for cuts, states in expected.items():
        rows, loaded = _load(path, list(cuts))
        assert torch.equal(rows, torch.arange(float(ROWS * D)).view(ROWS, D))
        for actual, wanted in zip(loaded, states, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0 if len(cuts) > 2 else 1e-6, atol=0)
    assert torch.equal(whole(NAME, _open(path)), rows)
    assert whole(STATE, _open(path)).shape == (ROWS,)


def test_tables_cut_by_rows_load_whole(tmp_path: Path) -> None:
    weight, per_row = torch.rand(ROWS, D), torch.rand(ROWS)
    table = _sharded([([0, 0], weight[:2]), ([2, 0], weight[2:])], [ROWS, D])
    state = _sharded([([0], per_row[:2]), ([2], per_row[2:])], [ROWS])
    path = write_new(tmp_path, ({"t.weight": table}, {"state": {"t.weight": {"momentum1": state}}}))
    assert torch.equal(whole(NAME, _open(path)), weight)
    assert torch.equal(whole(STATE, _open(path)), per_row)


def test_dense_parameters_cut_over_ranks_load_whole_and_cut_otherwise(tmp_path: Path) -> None:
    """One rank stands in for all: the extents that the others would write are written here, too."""
    weight, bias, squares = torch.rand(6, 4), torch.rand(6), torch.rand(6, 4)

    def extents(dim: int, count: int, *tensors: torch.Tensor) -> list[Extent]:
        size, found = weight.shape[dim] // count, []
        for rank in range(count):
            offsets = tuple(rank * size if each == dim else 0 for each in range(2))
            cuts = {"w": ((6, 4), offsets)} | ({"b": ((6,), offsets[:1])} if dim == 0 else {})
            w, b, s = (each.narrow(dim, rank * size, size) if dim < each.dim() else each for each in tensors)
            state = {"dense.w": {"sum": s, "step": torch.tensor(3.0)}}
            found += local_extents({"w": w, "b": b}, {"state": state}, cuts)
        return list({extent.key: extent for extent in found}.values())

    write_checkpoint(tmp_path / "step_3", extents(0, 3, weight, bias, squares), lambda: Manifest(3, {"rows": [ROWS]}))
    stored = _open(tmp_path / "step_3")
    for name, expected in {"model.w": weight, "model.b": bias, "optimizer.state.dense.w.sum": squares}.items():
        assert_same(whole(name, stored), expected, name)
    assert whole("optimizer.state.dense.w.step", stored) == 3
    loaded = [torch.full_like(each, torch.nan) for each in (weight, bias, squares)]
    for extent in extents(1, 2, *loaded):
        fill(extent, stored)
    for actual, expected in zip(loaded, (weight, bias, squares), strict=True):
        assert_same(actual, expected, str(tuple(expected.shape)))


def test_another_shape_is_refused(tmp_path: Path) -> None:
    path = write_new(tmp_path, make_table([0]))
    (extent,) = local_extents({"bias": torch.zeros(4)}, {"state": {}})
    with pytest.raises(InputError, match=r"has model\.bias of shape \[3\], this run \[4\]"):
        fill(extent, _open(path))
    (extent,) = local_extents({"other": torch.zeros(4)}, {"state": {}})
    with pytest.raises(InputError, match=r"has no model\.other"):
        fill(extent, _open(path))


@pytest.mark.parametrize("fault", ["no room", "No space left on device"])
def test_a_save_that_fails_leaves_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    path = write_new(tmp_path, make_table([0, 4]))
    before = path.stat().st_mtime_ns

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fault == "no room":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 9, 9))  # type: ignore[attr-defined]
        fault = r"it takes \d+ bytes, and 9 are left on the disk"
    else:
        monkeypatch.setattr(save, "write_tensors", full)
    with pytest.raises(InputError, match=rf"step_3 cannot be written \({fault}\); the checkpoints before it"):
        write_new(tmp_path, make_table([0]))
    assert os.listdir(tmp_path) == ["step_3"]
    assert path.stat().st_mtime_ns == before
    assert find_faults(path, read_manifest(path)) == []


def test_every_byte_of_every_file_counts(tmp_path: Path) -> None:
    path = write_new(tmp_path, make_table([0, 4]))
    manifest = read_manifest(path)
    assert sorted(os.listdir(path)) == [MANIFEST, "rank_0.safetensors"]
    for file in path.iterdir():
        content = file.read_bytes()
        for place in range(0, len(content), 7):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            file.write_bytes(changed)
            if file.name == MANIFEST:
                with pytest.raises(DamagedError, match=str(file)):
                    read_manifest(path)
            else:
                assert find_faults(path, manifest) == [f"{file} is not what was written (its checksum is another)"]
        file.write_bytes(content)
    assert find_faults(path, read_manifest(path)) == []


def test_a_file_that_is_cut_or_gone_is_named(tmp_path: Path) -> None:
    path = write_new(tmp_path, make_table([0, 4]))
    manifest, file = read_manifest(path), path / "rank_0.safetensors"
    os.truncate(file, 100)
    assert find_faults(path, manifest) == [f"{file} has 100 bytes, not {manifest.files[file.name].bytes}"]
    with pytest.raises(DamagedError, match="is not a file of tensors"):
        Checkpoint(path, manifest).read(manifest.tensors[NAME].pieces[0])
    file.unlink()
    assert find_faults(path, manifest) == [f"{file} cannot be read (No such file or directory)"]
    os.truncate(path / MANIFEST, 100)
    with pytest.raises(DamagedError, match=str(path / MANIFEST)):
        read_manifest(path)


def test_files_of_tensors_are_safetensors(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "columns": torch.rand(4, 6)[:, 1:3]}
    with (tmp_path / "file").open("wb") as file:
        about = write_tensors(file, tensors)
    content = (tmp_path / "file").read_bytes()
    assert len(content) == about.bytes
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begin, end = header["torch.int64"]["data_offsets"]
    assert header["torch.int64"] == {"dtype": "I64", "shape": [2, 3], "data_offsets": [begin, end]}
    assert content[8 + length + begin : 8 + length + end] == torch.arange(6).numpy().tobytes()
    read = read_tensors(tmp_path / "file")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "null",
        "[" * 100_000,
        '{"t": [1]}',
        '{"t": {"dtype": "F32", "shape": "x"}}',
        json.dumps({"t": {"dtype": "F32", "shape": [0, 2**70], "data_offsets": [0, 0]}}),
    ],
)
def test_a_file_whose_header_is_of_another_form_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "rank_0.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(DamagedError, match="is not a file of tensors"):
        read_tensors(path)
    (tmp_path / MANIFEST).write_text(header)
    with pytest.raises(DamagedError, match="is not what was written"):
        read_manifest(tmp_path)
