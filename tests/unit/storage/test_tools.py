"""The command `checkpoint`: it shows, verifies and exports."""

from pathlib import Path

import pytest
import torch

from dlrm_overlap.checkpoint.storage.tensor_file import read_tensors
from dlrm_overlap.cli import main
from tests.unit.storage.test_format import ROWS, D, make_table, write_new

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_shows_what_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_new(tmp_path, make_table([0, 4]))
    assert main(["checkpoint", "show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step: 3" in lines
    assert "rows: [5]" in lines
    assert "tensor model.t.weight: F32 5x8, 2 pieces" in lines
    assert "tensor optimizer.state.t.weight.momentum1: F32 5x8, a number a row, 2 pieces" in lines


def test_says_whether_it_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_new(tmp_path, make_table([0, 4]))
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: whole\n"
    (file,) = path.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-900])
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"dlrm-overlap: {file} ")
    (path / "checkpoint.json").write_text("{}")
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2


def test_exports_unsharded_tensors(tmp_path: Path) -> None:
    path, wanted = write_new(tmp_path, make_table([0, 2, 6])), torch.arange(float(ROWS * D)).view(ROWS, D)
    assert main(["checkpoint", "export", str(path), str(tmp_path / "a.safetensors")]) == 0
    tensors = read_tensors(tmp_path / "a.safetensors")
    assert tensors.keys() == {"t.weight", "bias"}
    assert torch.equal(tensors["t.weight"], wanted)
    assert main(["checkpoint", "export", str(path), str(tmp_path / "a.pt"), "--optimizer", "true"]) == 0
    tensors = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(tensors["t.weight"], wanted)
    assert tensors["optimizer.state.t.weight.momentum1"].shape == (ROWS,)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("export {path}", "OUT is for export"),
        ("show {path} x.pt", "OUT is for export"),
        ("export {path} {path}/x.npz", "must end in .safetensors or .pt"),
        ("export {path} {path}/nowhere/x.pt", "cannot be written"),
        ("export {path} {path}/rank_0.safetensors", "is there already"),
        ("show {path}/..", "has no checkpoint.json; give a folder"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, reason: str) -> None:
    path = write_new(tmp_path, make_table([0]))
    assert main(["checkpoint", *options.format(path=path).split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
