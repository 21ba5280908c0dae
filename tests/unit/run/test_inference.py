"""What is exported for inference predicts what the trainer's evaluation does, of every model, and loads without us."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlrm_overlap.checkpoint.storage.extents import Checkpoint
from dlrm_overlap.checkpoint.storage.manifest import read_manifest
from dlrm_overlap.cli import main
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.train.inference.export import export_for_inference
from dlrm_overlap.train.inference.model import Scratch, build_for_inference, stored_table
from dlrm_overlap.train.trainer import Trainer
from tests.conftest import ROOT
from tests.distributed.workers import make_trainer, quickstart
from tests.unit.storage.test_format import NAME, ROWS, D, make_table, write_new

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]
SHORT = ["--train.batch_size", "16", "--train.steps", "2", "--data.eval_samples", "32", "--train.lr", "0.02"]
TINY = ["--data.tables.rows", "[50, 20, 3]", "--data.tables.multi_hot", "[3, 0..2, 1]"]
DCN = ["--model.arch", "dcn", "--model.cross_layers", "2", "--model.cross_rank", "4", "--model.activation", "relu"]
MODELS = {
    "dot": [],
    "dcn, fp16": [*DCN, "--embedding.weight_dtype", "fp16"],
    "history": ["--model.sequence.history", "1", "--model.sequence.candidate", "2", "--model.sequence.positions", "1"],
}
TOLERANCE = 1e-5  # of logits: sums in another order


def _train(folder: Path, *options: str) -> tuple[Trainer, Path]:
    """Return the trainer of a finished run, and its checkpoint."""
    config = quickstart(folder, "run", *SHORT, *options, "--checkpoint.last", "true")
    trainer = make_trainer(config)
    trainer.fit()
    return trainer, trainer.folder / "checkpoints" / "step_2"


def _logits(trainer: Trainer, batch: Batch) -> torch.Tensor:
    """Return what the trainer's evaluation predicts."""
    trainer.model.eval()
    trainer.pipeline.reset()
    with torch.no_grad():
        return trainer.pipeline.progress(iter([batch]))[1]


def _inputs(batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return what the exported program takes."""
    lengths = batch.sparse.lengths().view(3, -1).long()
    return batch.dense, list(batch.sparse.values().long().split(lengths.sum(1).tolist())), lengths


def _batches(config: Config) -> list[Batch]:
    """Return batches of 1 to 200 samples, one of empty bags alone where they may be empty."""
    held_out = open_datasets(replace(config.data, eval_samples=300))[1]
    batches = [held_out.read(0, size) for size in (1, 2, 16, 200)]
    lengths = torch.zeros(3, 4, dtype=torch.int32)
    return [*batches, Batch.from_tensors(torch.randn(4, 13), lengths.view(-1), torch.zeros(0).int(), torch.zeros(4))]


@pytest.mark.parametrize(
    "options",
    [MODELS["dot"], pytest.param(MODELS["dcn, fp16"], marks=pytest.mark.slow), MODELS["history"]],
    ids=MODELS,
)
def test_predicts_what_the_trainer_does(tmp_path: Path, options: list[str]) -> None:
    trainer, path = _train(tmp_path, *TINY, *options)
    model = build_for_inference(path, read_manifest(path), Scratch(tmp_path))
    for batch in _batches(trainer.config):
        torch.testing.assert_close(model.logits(*_inputs(batch)), _logits(trainer, batch), rtol=0, atol=TOLERANCE)


def test_tables_are_put_together_from_pieces(tmp_path: Path) -> None:
    path, wanted = write_new(tmp_path, make_table([0, 2, 6])), torch.arange(float(ROWS * D)).view(ROWS, D)
    stored = Checkpoint(path, read_manifest(path))
    assert torch.equal(stored_table(NAME, (ROWS, D), stored, Scratch(tmp_path)), wanted)
    with pytest.raises(InputError, match=r"has model\.t\.weight of shape \[5, 8\]"):
        stored_table(NAME, (ROWS + 1, D), stored, Scratch(tmp_path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("export {path} {path}/x.pt --format inference", "must end in .pt2"),
        ("export {path} --format inference {path}/there.pt2", "there.json is there already"),
        ("export {path} --format inference {path}/nowhere/x.pt2", "cannot be written (No such file or directory)"),
        ("export {path} {path}/x.pt2 --format inference --optimizer true", "--optimizer: true has no effect on"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, reason: str) -> None:
    path = write_new(tmp_path, make_table([0]))
    (path / "there.json").touch()
    before = sorted(path.iterdir())
    assert main(["checkpoint", *options.format(path=path).split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert sorted(path.iterdir()) == before


CONSUMER = """
import json, sys
sys.path += sys.argv[1:2]  # of installed packages, but not of their .pth files, one of which may lead to us
import torch
for name in sys.argv[2:]:
    program = torch.export.load(name + ".pt2").module()
    signature = json.load(open(name + ".json"))
    for inputs, wanted in torch.load(name + ".cases"):
        found = program(*inputs)
        assert found.shape == inputs[0].shape[:1] and inputs[0].shape[1:] == (signature["inputs"]["dense"]["shape"][1],)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    try:
        rows = [table["rows"] for table in signature["tables"].values()]
        program(inputs[0], [ids + count for ids, count in zip(inputs[1], rows)], inputs[2])
    except (IndexError, RuntimeError):
        pass
    else:
        raise AssertionError("an id outside its table is taken")
    print(name)
found = [name for name in sys.modules if name.split(".")[0] in ("dlrm_overlap", "torchrec", "fbgemm_gpu")]
assert not found, found
exec(open("serving.py").read())
try:
    import dlrm_overlap
except ImportError:
    print("alone")
"""


@pytest.mark.slow
def test_a_program_runs_in_a_process_with_torch_alone(tmp_path: Path) -> None:
    names = []
    for number, options in enumerate(MODELS.values()):
        trainer, path = _train(tmp_path / str(number), *TINY, *options)
        batches = _batches(trainer.config)[:-1]  # the last has no ids that could lie outside their tables
        cases = [(_inputs(batch), _logits(trainer, batch).sigmoid()) for batch in batches]
        names.append(str(tmp_path / f"model_{number}"))
        signature = export_for_inference(path, Path(names[-1] + ".pt2"))
        assert json.loads(Path(names[-1] + ".json").read_text()) == signature
        torch.save(cases, names[-1] + ".cases")
    export_for_inference(_train(tmp_path / "quickstart")[1], tmp_path / "dlrm.pt2")
    program = (ROOT / "docs/serving.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "serving.py").write_text(program)
    assert not list(tmp_path.glob(".*")), "what was made on the way is gone"
    packages = str(Path(torch.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CONSUMER, packages, *names],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *lines, shown, last = result.stdout.splitlines() or [""] * 2
    assert (lines, last) == (names, "alone"), result.stderr
    assert re.fullmatch(r"tensor\(\[0\.\d+, 0\.\d+\]\)", shown), "the program of the page gives two probabilities"
