import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.checkpoint.manifest import HELD_OUT, MANIFEST, Manifest, locate_checkpoint, write_manifest
from dlrm_overlap.cli import main
from dlrm_overlap.config import Config
from dlrm_overlap.launching.parsing import parse_config
from dlrm_overlap.train.evaluation import evaluate, stored_config
from tests.conftest import ROOT, read_metrics, refuses
from tests.distributed.workers import make_trainer, quickstart, ran_on_ranks, ranks_here, train
from tests.unit.run.test_trainer import contents

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]
KEYS = ("loss", "auroc", "ne", "accuracy")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that evaluated and saved every two, with optimizers that have states."""
    options = ["--train.batch_size", "64", "--train.steps", "4", "--train.eval_every", "2", "--checkpoint.every", "2"]
    config = quickstart(tmp_path_factory.mktemp("eval"), "run", *options, "--data.eval_samples", "250")
    trainer = make_trainer(config)
    trainer.fit()
    return trainer.folder


@pytest.fixture(scope="module")
def stored(run: Path) -> Config:
    return parse_config(Config, "eval", "", [], defaults=stored_config(run / "checkpoints" / "step_4"))[0]


@pytest.mark.parametrize(("step", "backend"), [(2, "torchrec"), (4, "pgas")])
def test_evaluating_a_checkpoint_gives_what_its_run_logged(run: Path, stored: Config, step: int, backend: str) -> None:
    before = contents(run)
    train = replace(stored.train, graph_dense=True)  # which training needs a GPU for
    config = replace(stored, embedding=replace(stored.embedding, backend=backend), train=train)
    found = evaluate(ranks_here(config), run / "checkpoints" / f"step_{step}")
    assert {key: found[key] for key in KEYS} == {key: read_metrics(run, f"eval/{key}")[step] for key in KEYS}
    assert (found["step"], found["samples"]) == (step, 250)
    assert contents(run) == before


def test_fewer_samples_than_a_global_batch_are_evaluated_as_in_the_run(tmp_path: Path) -> None:
    options = ["--train.batch_size", "128", "--train.steps", "1", "--data.eval_samples", "50"]
    run = train(config := quickstart(tmp_path, "small", *options, "--checkpoint.last", "true"))
    found = evaluate(ranks_here(config), run / "checkpoints" / "step_1")
    assert {key: found[key] for key in KEYS} == {key: read_metrics(run, f"eval/{key}")[1] for key in KEYS}
    assert found["samples"] == 50


CUTS = {  # plan of two ranks -> its keys
    "whole tables": ["--embedding.plan", "table_wise"],
    "columns": ["--embedding.plan", "column_wise"],
    "a table by rows": ["--data.tables.multi_hot", "[40, 0..6, 1, 1, 2, 1, 1, 1]"],
}


def test_each_piece_that_is_loaded_is_a_sign_of_progress(run: Path, stored: Config) -> None:
    trainer = make_trainer(stored)
    trainer.evaluate = Mock(side_effect=lambda: {"batch": trainer.progress.batch})
    assert trainer.evaluate_checkpoint(run / "checkpoints" / "step_4")["batch"] >= len(trainer.model.state_dict())


SAVES = ["--train.steps", "2", "--checkpoint.every", "1"]


def _train_two_ranks(folder: Path) -> None:
    for name, keys in CUTS.items():
        options = ["--train.batch_size", "64", "--train.steps", "4", "--data.eval_samples", "64", *keys]
        train(quickstart(folder, name, *options, "--checkpoint.last", "true"))

    # A checkpoint is saved after rank 0 has looked for the newest one, and before rank 1 looks.
    kept = quickstart(folder, "evaluated", "--train.batch_size", "64", "--data.eval_samples", "64", *SAVES)
    saved = train(kept) / "checkpoints"
    assert evaluate(ranks_here(kept), saved / ("step_2" if dist.get_rank() else "step_1"))["step"] == 1


two_ranks = ran_on_ranks(2, _train_two_ranks)


@pytest.mark.parametrize("ranks", ["one rank", *CUTS])
def test_exported_weights_predict_in_the_unsharded_model(
    ranks: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = request.getfixturevalue("two_ranks") / ranks if ranks in CUTS else request.getfixturevalue("run")
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "export", str(run), "dlrm.pt"]) == 0
    page = (ROOT / "docs/serving.md").read_text().partition("## Export\n")[2].partition("```python\n")[2]
    page = page.partition("```")[0]
    names: dict[str, Any] = {}
    exec(page, names)
    assert re.search(r"^tensor\(\[0\.\d+, 0\.\d+\]\)$", capsys.readouterr().out, re.MULTILINE)
    trainer = make_trainer(quickstart(tmp_path, "loads", "--train.batch_size", "64", "--data.eval_samples", "64"))
    trainer.evaluate_checkpoint(run / "checkpoints" / "step_4")
    batch = trainer.held_out_data.read(0, 64)
    trainer.model.eval()
    trainer.pipeline.reset()
    with torch.no_grad():
        (_, logits, _), found = trainer.pipeline.progress(iter([batch])), names["dlrm"](batch.dense, batch.sparse)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
    exported = list(torch.load("dlrm.pt", weights_only=True)["model"])
    assert exported == sorted(exported), "whatever rank wrote each of them"


@pytest.mark.parametrize(("settings", "fraction"), [({}, None), ({HELD_OUT: "25 of 100 samples, 0"}, 0.25)])
def test_the_default_fraction_of_earlier_versions_is_no_choice(
    tmp_path: Path, settings: dict[str, str], fraction: float | None
) -> None:
    about = {"config": {"data": {"kind": "prepared", "eval_fraction": 0.25}}}
    write_manifest(tmp_path, Manifest(1, {}, settings, about=about))
    assert stored_config(tmp_path)["data"] == {"kind": "prepared", "eval_fraction": fraction}


def test_another_model_is_refused_with_all_that_differs(run: Path, stored: Config) -> None:
    data = replace(stored.data, tables=replace(stored.data.tables, max_rows=500))
    config = replace(stored, model=replace(stored.model, dim=8, bottom_mlp=[8]), data=data)
    with refuses() as error:
        evaluate(ranks_here(config), run / "checkpoints" / "step_4")
    for text in ("model.dim 16, this run has 8", "model.bottom_mlp [64, 16], this run has [8]", "rows [2000, "):
        assert text in str(error.value)


def test_a_damaged_checkpoint_is_refused(run: Path, stored: Config, tmp_path: Path) -> None:
    path = tmp_path / "step_4"
    path.mkdir()
    for each in (run / "checkpoints" / "step_4").iterdir():
        shutil.copyfile(each, path / each.name)
    file = path / "__0_0.distcp"
    file.write_bytes(bytes(size := file.stat().st_size))
    with refuses(r"__0_0\.distcp is damaged: the checksum of .*; evaluate another"):
        evaluate(ranks_here(stored), path)
    os.truncate(file, size - 1)
    with refuses(rf"__0_0\.distcp has {size - 1} bytes, not {size}"):
        evaluate(ranks_here(stored), path)


def test_a_damaged_older_checkpoint_does_not_keep_a_run_from_being_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    for step, saved in ((4, 1), (8, 3), (6, 2)):
        (folder / f"step_{step}").mkdir(parents=True)
        write_manifest(folder / f"step_{step}", Manifest(step, {}, saved=saved))
    (folder / "step_4" / MANIFEST).write_text("{}")
    with caplog.at_level("WARNING", "dlrm_overlap"):
        assert locate_checkpoint(tmp_path, "--checkpoint") == folder / "step_8"
    (text,) = caplog.messages
    assert text.startswith(f"--checkpoint: {folder / 'step_4'} cannot be read")
    (folder / "step_8" / MANIFEST).write_text("{}")
    assert locate_checkpoint(tmp_path, "--checkpoint") == folder / "step_8", "a damaged newest one is refused by name"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("", "missing on the command line: --checkpoint; see --help"),
        ("--checkpoint", "--checkpoint: expected one argument; see --help"),
        ("--checkpoint {run}/nowhere", "neither a checkpoint nor the folder of a run"),
        ("--checkpoint {run}/..", "with one; give one of the runs in it, such as "),
        ("--checkpoint {newer}", "embedding.colour is not a key"),
        ("--checkpoint {wrong}", "train.steps: abc is not a whole number from 1"),
        ("--checkpoint {tmp_path}", "step_12/checkpoint.json is damaged"),
    ],
)
def test_mistakes_of_eval_are_refused_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, reason: str
) -> None:
    manifests = {"newer": {"embedding": {"colour": "red"}}, "wrong": {"train": {"steps": "abc"}}}
    for name, config in manifests.items():
        (tmp_path / name).mkdir()
        write_manifest(tmp_path / name, Manifest(1, {}, about={"config": config}))
    for step in (4, 12):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
        write_manifest(tmp_path / "checkpoints" / f"step_{step}", Manifest(step, {}))
    (tmp_path / "checkpoints" / "step_12" / MANIFEST).write_text("{}")  # the newest is damaged
    argv = options.format(run=run, tmp_path=tmp_path, **{name: tmp_path / name for name in manifests}).split()
    assert main(["eval", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_a_given_configuration_replaces_the_stored_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("train: {steps: 5}\n")
    assert main(["eval", "--checkpoint", str(run), "--config", str(tmp_path / "config.yaml")]) == 2
    assert "no list gives the number of tables" in capsys.readouterr().err, "which the stored one would give"
