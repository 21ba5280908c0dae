"""What is stored: other cuts of a table get the right rows, TorchRec's users can read it, and damage is named."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load

from dlrm_overlap.checkpoint import dcp_files, extents, storage
from dlrm_overlap.checkpoint.checkpoint import Checkpointer
from dlrm_overlap.checkpoint.extents import Extent, is_finite, local_extents
from dlrm_overlap.checkpoint.pieces import UnreadableError
from dlrm_overlap.checkpoint.storage import load_extents
from dlrm_overlap.checkpoint.tools import verify
from tests.agreement import assert_same
from tests.conftest import file_limit, refuses

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]
ROWS, D = 5, 8
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


def write_new(folder: Path, extents: Sequence[Extent]) -> Path:
    return Checkpointer(folder, 9, {"rows": [ROWS]}).write(3, list(extents))


def write_table(folder: Path, cuts: list[int]) -> Path:
    return write_new(folder, local_extents(*make_table(cuts)))


def _load(path: Path, cuts: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the table's rows and its state a shard, in a state that is cut before the columns `cuts`."""
    state = _empty(cuts)
    load_extents(path, local_extents(*state))
    table, per_row = state[0]["t.weight"], state[1]["state"]["t.weight"]["momentum1"]
    assert state[0]["bias"].tolist() == [0, 1, 2]
    assert state[1]["state"]["dense.bias"]["step"] == 7
    return torch.cat([s.tensor for s in table.local_shards()], 1), [s.tensor for s in per_row.local_shards()]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_lack_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A run that resumes would go back to an earlier checkpoint, and remove the newest one at its next save."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    path = write_table(tmp_path, [0])
    with pytest.raises(UnreadableError, match="step_3: rank 0 has no memory left to load it"):
        load_extents(path, local_extents(*_empty([0])), fail)
    monkeypatch.setattr(storage, "is_finite", fail)
    with pytest.raises(UnreadableError):
        verify(path)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(UnreadableError, match=r"distcp: no memory is left to load it; free some"):
        load_extents(path, local_extents(*_empty([0])))


@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered", "can't start new thread"])
def test_an_error_of_the_device_or_process_is_no_damage(tmp_path: Path, text: str) -> None:
    def fail() -> None:
        raise RuntimeError(text)

    with pytest.raises(UnreadableError, match=rf"step_3 cannot be read by rank 0 \(RuntimeError: {text}\)"):
        load_extents(write_table(tmp_path, [0]), local_extents(*_empty([0])), fail)


@pytest.mark.parametrize("piece_bytes", [1 << 26, 20], ids=["whole", "in pieces"])
def test_a_state_of_one_number_a_row_loads_into_other_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(storage, "_PIECE_BYTES", piece_bytes)
    state = make_table([0, 2, 6])
    a, b, c = (shard.tensor for shard in state[1]["state"]["t.weight"]["momentum1"].local_shards())
    path = write_new(tmp_path, local_extents(*state))
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


def test_the_states_of_shards_cut_both_ways_belong_to_their_rows_and_columns() -> None:
    """TorchRec concatenates the states of shards by columns, then by rows. Rows are cut before 3, columns before 4."""
    boxes = [(row, column, rows) for column in (0, 4) for row, rows in ((0, 3), (3, 2))]
    weights = [([row, column], torch.zeros(rows, 4)) for row, column, rows in boxes]
    states = [([at], torch.full((rows,), float(at))) for at, (*_, rows) in zip((0, 3, 5, 8), boxes, strict=True)]
    table, state = _sharded(sorted(weights, key=lambda each: each[0]), [ROWS, D]), _sharded(states, [2 * ROWS])
    found = local_extents({"t": table}, {"state": {"t": {"momentum1": state}}})[4:]
    assert [(each.offsets, each.columns, each.tensor[0].item()) for each in found] == [
        ((0,), (0, 4), 0.0),
        ((3,), (0, 4), 3.0),
        ((0,), (4, 8), 5.0),
        ((3,), (4, 8), 8.0),
    ]
    assert all(each.shape == (ROWS,) for each in found)


def test_a_piece_of_another_shape_is_not_copied_to_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of one row would fill all rows of the piece."""
    path = write_table(tmp_path, [0])
    monkeypatch.setattr(dcp_files, "narrow_tensor_by_index", lambda tensor, *_: tensor[:1])
    with refuses("a piece of .* has another shape than .metadata says"):
        _load(path, [0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_every_element_must_be_finite(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "_CHUNK", 4)
    assert is_finite(torch.zeros(2, 5))
    for element in range(10):
        tensor = torch.zeros(2, 5)
        tensor.view(-1)[element] = value
        assert not is_finite(tensor), element


def test_the_state_of_a_whole_table_loads_into_columns(tmp_path: Path) -> None:
    state = make_table([0])
    (whole,) = (shard.tensor for shard in state[1]["state"]["t.weight"]["momentum1"].local_shards())
    _, loaded = _load(write_new(tmp_path, local_extents(*state)), [0, 2, 6])
    assert all(torch.equal(each, whole) for each in loaded)


def test_a_program_of_pytorch_reads_it(tmp_path: Path) -> None:
    """Tables that are cut by rows, under other cuts: as DCP reads a state dict, and by its tool into one file."""
    weight, per_row = torch.rand(ROWS, D), torch.rand(ROWS)

    def cut_at(row: int, weight: torch.Tensor, per_row: torch.Tensor) -> State:
        table = _sharded([([0, 0], weight[:row]), ([row, 0], weight[row:])], [ROWS, D])
        state = _sharded([([0], per_row[:row]), ([row], per_row[row:])], [ROWS])
        return {"t.weight": table}, {"state": {"t.weight": {"momentum1": state}}}

    path = write_new(tmp_path, local_extents(*cut_at(2, weight, per_row)))
    model, optimizer = cut_at(4, torch.zeros(ROWS, D), torch.zeros(ROWS))
    load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    for found, wanted in ((model["t.weight"], weight), (optimizer["state"]["t.weight"]["momentum1"], per_row)):
        assert_same(torch.cat([shard.tensor for shard in found.local_shards()]), wanted, "another cut")
    dcp_to_torch_save(path, tmp_path / "a.pt")  # `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`
    whole = torch.load(tmp_path / "a.pt", weights_only=True)
    assert_same(whole["model"]["t.weight"], weight, "in one file")
    assert_same(whole["optimizer"]["state"]["t.weight"]["momentum1"], per_row, "in one file")


def test_dense_parameters_cut_over_ranks_load_whole_and_cut_otherwise(tmp_path: Path) -> None:
    """One rank writes the extents of all ranks."""
    weight, bias, squares = torch.rand(6, 4), torch.rand(6), torch.rand(6, 4)

    def extents(dim: int, count: int, *tensors: torch.Tensor) -> list[Extent]:
        size, found = weight.shape[dim] // count, []
        for rank in range(count):
            offsets = tuple(rank * size if each == dim else 0 for each in range(2))
            cuts = {"w": ((6, 4), offsets)} | ({"b": ((6,), offsets[:1])} if dim == 0 else {})
            w, b, s = (each.narrow(dim, rank * size, size) if dim < each.dim() else each for each in tensors)
            state = {"dense.w": {"sum": s, "step": torch.tensor(3.0)}}
            found += local_extents({"w": w, "b": b}, {"state": state}, cuts)
        return list({(extent.name, extent.offsets): extent for extent in found}.values())

    path = write_new(tmp_path, extents(0, 3, weight, bias, squares))
    for dim, count in ((0, 1), (1, 2)):
        loaded = [torch.full_like(each, torch.nan) for each in (weight, bias, squares)]
        load_extents(path, extents(dim, count, *loaded))
        for actual, expected in zip(loaded, (weight, bias, squares), strict=True):
            assert_same(actual, expected, f"{tuple(expected.shape)}, cut in {count}")


def test_a_copy_on_the_host_is_written_without_a_call_of_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail here, where there is none."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert write_table(tmp_path, [0, 4]).exists()


def test_another_shape_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path, [0])
    with refuses(r"step_3: the checkpoint has model\.bias of shape \[3\], this run \[4\]"):
        load_extents(path, local_extents({"bias": torch.zeros(4)}, {"state": {}}))
    with refuses(r"has no model\.other"):
        load_extents(path, local_extents({"other": torch.zeros(4)}, {"state": {}}))


@pytest.mark.parametrize("size", [100_000, 25_500])
def test_a_save_that_finds_no_room_leaves_what_there_is(tmp_path: Path, size: int) -> None:
    """The disk is full before all of a tensor is written, or at the end of the file."""
    path = write_table(tmp_path, [0, 4])
    before = path.stat().st_mtime_ns
    with file_limit(100_000), refuses(r"step_3 cannot be written \(File too large\); earlier checkpoints are"):
        write_new(tmp_path, local_extents({"bias": torch.rand(size)}, {"state": {}}))
    assert os.listdir(tmp_path) == ["step_3"]
    assert path.stat().st_mtime_ns == before
    assert verify(path) == []


def test_what_verify_finds(tmp_path: Path) -> None:
    path = write_table(tmp_path, [0, 4])
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    os.truncate(file, 100)
    assert verify(path) == [f"{file} has 100 bytes, not {len(content)}"]
    file.write_bytes(bytes(len(content)))
    (fault,) = verify(path)
    assert fault.startswith(f"{file} is damaged: the checksum of bytes 0 to ")
    file.unlink()
    assert verify(path) == [f"{file} cannot be read (No such file or directory)"]
    broken = write_new(tmp_path, local_extents({"bias": torch.tensor([1.0, torch.inf])}, {"state": {}}))
    assert verify(broken) == [f"{broken}: model.bias is nan or infinite"]
