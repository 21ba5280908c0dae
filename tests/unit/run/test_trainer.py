"""A run in a world of one: how it ends, what it saves, and what it refuses to resume."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pyarrow as pa
import pytest
import torch
import yaml
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    WeightDecayMode,
)
from pyarrow import parquet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from dlrm_overlap.checkpoint.manifest import newest_checkpoint
from dlrm_overlap.checkpoint.saving import NotFiniteError
from dlrm_overlap.cli import main
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.embedding.configured_sharders import build_sharders
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.launching.text_table import duration
from dlrm_overlap.observe.metrics import evaluation_metrics
from dlrm_overlap.observe.run_log import RunLog
from dlrm_overlap.train import assembly
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.trainer import PreemptedError, Trainer
from tests.agreement import assert_all_near
from tests.conftest import configuration, file_limit, read_metrics, refuses
from tests.distributed.models import CPU, local_tensors
from tests.distributed.workers import make_trainer, quickstart, ranks_here, world_here

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]
SMALL = ["--train.batch_size", "64", "--train.steps", "4", "--train.eval_every", "0", "--data.eval_samples", "256"]
SAVES = ["--checkpoint.last", "true"]
BOARD = ["--log.tensorboard", "true"]


def _trainer(folder: Path, *options: str) -> Trainer:
    return make_trainer(quickstart(folder, "run", *SMALL, *options))


def _fit(folder: Path, *options: str) -> dict[str, Any]:
    return _trainer(folder, *options).fit()


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/checkpoints/*"))


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level("INFO", "dlrm_overlap"):
        yield


def test_steps_of_the_graphs_pipeline_learn_the_same_where_autocast_casts(tmp_path: Path) -> None:
    losses = []
    for is_flat in ("true", "false"):
        options = ["--embedding.backend", "pgas", "--train.pipeline", "graph", "--train.precision", "bf16"]
        trainer = _trainer(tmp_path, *options, "--train.flat_dense", is_flat)
        assert isinstance(trainer.pipeline, GraphTrainPipeline)
        assert (trainer.pipeline._casts is not None) == (is_flat == "true")
        with trainer.loader(trainer.train_data, 0, 4) as loader:
            batches = iter(loader)
            losses.append([trainer.step(batches).item() for _ in range(4)])
        trainer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_each_step_is_taken_at_the_learning_rate_of_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of 4 steps of warm-up at a quarter of the rate, also after a resume; the log says the same."""
    options, taken = ["--train.warmup_steps", "4", "--log.every", "1", *SAVES], list[list[float]]()
    for steps in ("2", "5"):
        trainer = _trainer(tmp_path, *options, "--train.steps", steps)

        def step(batches: Any, take: Any = trainer.step, trainer: Trainer = trainer) -> torch.Tensor:
            groups = zip(trainer.optimizer.param_groups, trainer.learning_rate.base, strict=True)
            taken.append([group["lr"] / lr for group, lr in groups])
            return take(batches)

        monkeypatch.setattr(trainer, "step", step)
        trainer.fit()
    of_tables, of_others = zip(*taken, strict=True)
    for rates in (of_tables, of_others):
        assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert [*read_metrics(tmp_path / "run", "train/lr_factor").values()] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_labels_are_trained_with_the_weights_of_the_schema(tmp_path: Path) -> None:
    parquet.write_table(
        pa.table({"click": [i % 2 for i in range(128)], "buy": [i % 3 == 0 for i in range(128)], "user": range(128)}),
        tmp_path / "table.parquet",
    )
    labels = "labels: {click: {weight: 3.0}, buy: {weight: 0.25}}"
    (tmp_path / "schema.yaml").write_text(f"{labels}\ncategorical: {{user: {{type: int, rows: 50}}}}\n")
    paths = [str(tmp_path / name) for name in ("table.parquet", "packed")]
    assert main(["prepare", "table", *paths, "--schema", str(tmp_path / "schema.yaml")]) == 0
    data = ["--data.kind", "prepared", "--data.path", paths[1], "--data.eval_fraction", "0.5", "--data.workers", "0"]
    trainer = _trainer(
        tmp_path, *data, "--data.tables.rows", "null", "--data.tables.multi_hot", "1", "--model.top_mlp", "[8, 2]"
    )
    with trainer.loader(trainer.train_data, 0, 1) as loader:
        loss = trainer.step(iter(loader)).item()
    logits, wanted = trainer.predictions
    assert loss == pytest.approx(evaluation_metrics(logits, wanted, ["click", "buy"], [3.0, 0.25])["loss"])


def _steps(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log's lines of training steps, without their losses."""
    lines = [re.sub("loss [0-9.]+, ", "", line) for line in caplog.messages if " ms of it input wait" in line]
    caplog.clear()
    return lines


def test_a_line_of_steps_says_how_long_the_run_still_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    many = ["--train.steps", "100000", "--log.every", "1", "--checkpoint.every", "2"]
    trainer = _trainer(tmp_path, *many)
    trainer._end.asked = True
    with pytest.raises(PreemptedError):
        trainer.fit()
    trainer.close()
    first, *others = _steps(caplog)
    found = re.fullmatch(r"step 1 of 100000: ([0-9.]+) ms a step, [0-9.]+ ms of it input wait, (.*) left", first)
    assert found is not None, first
    # The line rounds the time of a step, from which it computes the time left.
    least, most = (int((float(found[1]) + error) * 99.999) for error in (-0.05, 0.05))
    assert found[2] in [duration(seconds) for seconds in range(least, most + 2)], first
    # The run goes on: a target ends it earlier, and nothing is left after its last step.
    end = 1 + len(others) + 2
    fewer = ["--train.steps", str(end), "--log.every", "1", "--train.eval_every", "1", "--train.target_auroc", "0.99"]
    _fit(tmp_path, *fewer, "--checkpoint.allow_config_mismatch", "true")
    times = "[0-9.]+ ms a step, [0-9.]+ ms of it input wait"
    before, last = _steps(caplog)
    assert re.fullmatch(rf"step {end - 1} of {end}: {times}, at most \d+ s left", before)
    assert re.fullmatch(rf"step {end} of {end}: {times}", last)


@pytest.mark.parametrize(
    ("options", "steps"), [("--checkpoint.last false", []), ("--checkpoint.every 2 --checkpoint.last true", [2, 4])]
)
def test_a_step_is_saved_once_and_only_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: str, steps: list[int]
) -> None:
    _fit(tmp_path, *options.split())
    assert checkpoints(tmp_path) == [f"step_{step}" for step in steps]
    assert sum(line.startswith("checkpoint: ") for line in caplog.messages) == len(steps)


@pytest.mark.parametrize(
    ("options", "same"),
    [("", ""), ("--log.overwrite true --checkpoint.resume never", " without log.overwrite and checkpoint.resume")],
)
def test_a_run_that_was_asked_to_end_says_how_it_goes_on(tmp_path: Path, options: str, same: str) -> None:
    trainer = _trainer(tmp_path, *SAVES, "--log.every", "1", *options.split())
    trainer._end.asked = True
    with pytest.raises(PreemptedError, match=rf"step 3 is saved, and the same command{same} resumes"):
        trainer.fit()
    assert checkpoints(tmp_path) == ["step_3"]


@pytest.mark.parametrize(("target", "last"), [("0", 6), ("0.01", 3)])
def test_an_evaluation_that_was_due_when_the_run_was_asked_to_end_comes_first_when_it_resumes(
    tmp_path: Path, target: str, last: int
) -> None:
    found, options = [], [*SAVES, "--train.steps", "6", "--train.eval_every", "3", "--train.target_auroc", target]
    for name in ("whole", "ended"):
        named = [*options, "--log.name", name, "--log.every", "1"]
        if name == "ended":
            trainer = _trainer(tmp_path, *named)
            trainer._end.asked = True
            with pytest.raises(PreemptedError, match="step 3 is saved"):
                trainer.fit()
            assert read_metrics(tmp_path / name, "eval/loss") == {}
        assert _fit(tmp_path, *named)["steps"] == last
        found.append([read_metrics(tmp_path / name, key) for key in ("train/loss", "eval/loss")])
    assert list(found[0][1]) == [3, 6][: last // 3]
    assert found[0] == found[1]


@pytest.mark.parametrize(("eval_every", "step"), [(3, 3), (0, 6)])
def test_a_run_that_is_asked_to_end_while_it_evaluates_saves_and_evaluates_anew_when_it_resumes(
    tmp_path: Path, eval_every: int, step: int
) -> None:
    found, options = [], [*SAVES, "--train.steps", "6", "--train.eval_every", str(eval_every), "--log.every", "1"]
    for name in ("whole", "ended"):
        named = [*options, "--log.name", name]
        if name == "ended":
            trainer = _trainer(tmp_path, *named)
            taken, evaluate = [], trainer._is_any_rank_asked_to_end

            def ask(trainer: Any = trainer, evaluate: Any = evaluate, taken: list[int] = taken) -> bool:
                taken.append(len(taken) + 1)
                trainer._end.asked = len(taken) == 2
                return evaluate()

            trainer._is_any_rank_asked_to_end = ask
            with pytest.raises(PreemptedError, match=f"step {step} is saved"):
                trainer.fit()
            trainer.close()
            assert taken == [1, 2], "it evaluated two batches"
            assert trainer.model.training
            assert read_metrics(tmp_path / name, "eval/loss") == {}
        assert _fit(tmp_path, *named)["steps"] == 6
        found.append([read_metrics(tmp_path / name, key) for key in ("train/loss", "eval/loss")])
    assert list(found[0][1]) == [3, 6][step // 6 :]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["run", "other"])
def test_a_run_that_went_back_and_is_asked_to_end_before_its_first_step_saves_what_it_resumed_from(
    tmp_path: Path, name: str
) -> None:
    """In its own folder a later checkpoint is the newest, and another folder has none yet."""
    options = ["--checkpoint.every", "3", "--checkpoint.keep", "9", "--train.steps", "9"]
    _fit(tmp_path, *options)  # no evaluation after step 3
    back = ["--checkpoint.resume", str(tmp_path / "run/checkpoints/step_3"), "--log.name", name]
    trainer = _trainer(tmp_path, *options, *back, "--train.eval_every", "3", "--log.every", "1")
    trainer._end.asked = True
    with pytest.raises(PreemptedError, match=r"step 3 is saved, and the same command without checkpoint\.resume"):
        trainer.fit()
    newest = newest_checkpoint(tmp_path / name / "checkpoints")
    assert newest is not None
    assert newest.name == "step_3"


def test_a_folder_that_not_all_ranks_see_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_blind_rank(seen: Any, _: Any) -> list[Any]:
        return [seen, False] if seen is True else [seen]

    trainer = _trainer(tmp_path, *SAVES)
    monkeypatch.setattr("dlrm_overlap.checkpoint.checkpoint.gathered", with_a_blind_rank)
    with refuses(r"log\.dir: rank 1 does not see what rank 0 writes to \S+run/checkpoints, "):
        trainer.fit()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def _fit_meanwhile(trainer: Any, meanwhile: Callable[[], None]) -> None:
    """Train, and call `meanwhile` once the trainer has locked its folders."""
    trainer._train = Mock(side_effect=lambda *_: meanwhile() or DEFAULT, wraps=trainer._train)
    trainer.fit()
    trainer._train.assert_called_once()


def test_a_run_keeps_a_second_one_out_of_its_folder(tmp_path: Path) -> None:
    first, second = (_trainer(tmp_path, "--log.overwrite", "true") for _ in range(2))

    def refused() -> None:
        in_use = rf"log\.dir: .*run is in use by process {os.getpid()} on \S+, since .*; wait"
        with refuses(in_use):
            second.fit()

    _fit_meanwhile(first, refused)
    assert not (tmp_path / "run" / ".lock").exists()
    second.fit()


def test_a_lock_that_may_not_be_taken_is_named(tmp_path: Path) -> None:
    """Such as one that another user's run left when it was killed, in a folder that both may write to."""
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with refuses(rf"log\.dir: {tmp_path}/run/\.lock cannot be written to \(Is a directory\); .* remove this file"):
        _fit(tmp_path)


def test_a_run_keeps_another_one_out_of_the_folder_of_its_checkpoints(tmp_path: Path) -> None:
    """The `checkpoints` of two runs are links to one folder. A run that saves nothing needs no lock."""
    (tmp_path / "shared").mkdir()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoints").symlink_to(tmp_path / "shared")
    first, second, reader = (
        make_trainer(quickstart(tmp_path, name, *SMALL, "--checkpoint.last", last))
        for name, last in (("a", "true"), ("b", "true"), ("b", "false"))
    )

    def refused() -> None:
        with refuses(rf"log\.dir: {tmp_path}/shared is in use by process {os.getpid()} on "):
            second.fit()
        reader.fit()

    _fit_meanwhile(first, refused)
    assert os.listdir(tmp_path / "shared") == ["step_4"]


def test_folders_with_the_names_of_a_runs_files_do_not_end_it(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "events.out.tfevents.1"
    folder.mkdir(parents=True)
    (folder / "notes").touch()
    (tmp_path / "run" / "events.out.tfevents.2").touch()
    _fit(tmp_path)
    assert os.listdir(folder) == ["notes"]
    assert not (tmp_path / "run" / "events.out.tfevents.2").exists()


def test_a_run_resumes_after_the_disk_was_full_while_it_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _fit(tmp_path, *SAVES, "--train.steps", "2")
    log = tmp_path / "run" / "metrics.jsonl"
    with file_limit(log.stat().st_size + 300), refuses(r"config\.yaml cannot be written"):
        _fit(tmp_path, "--train.steps", "6")
    with log.open("a") as file:
        file.write('{"step": 3, "train/lo')  # as a write that ended at the end of the disk leaves it
    _fit(tmp_path, *SAVES, "--train.steps", "6")
    assert list(read_metrics(tmp_path / "run", "train/loss")) == [1, 2, 3, 4, 5, 6]
    size = (tmp_path / "run" / "config.yaml").stat().st_size
    with file_limit(size + 50):  # room for the configuration and the summary, and for a few lines
        assert _fit(tmp_path / "full", "--train.steps", "6", "--checkpoint.last", "false")["steps"] == 6
    assert "cannot be logged (" in caplog.text


def test_what_is_logged_after_the_disk_was_full_is_in_both_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = _trainer(tmp_path, "--train.steps", "6", "--log.tensorboard", "true")
    take = trainer.step

    def and_fill(batches: Any) -> torch.Tensor:
        if trainer.progress.step == 2:
            full.enter_context(file_limit((tmp_path / "run" / "metrics.jsonl").stat().st_size + 600))
        elif trainer.progress.step == 4:
            full.close()
        return take(batches)

    trainer.step = and_fill
    with ExitStack() as full:
        trainer.fit()
    found = EventAccumulator(str(tmp_path / "run"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 4, 5, 6]
    assert set(read_metrics(tmp_path / "run", "train/loss")) >= {1, 4, 5, 6}
    assert [text.partition(" (")[0] for text in caplog.messages if "cannot be logged" in text] == [
        f"step {step} cannot be logged" for step in (2, 3)
    ]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "how", ["removed", "moved", "replaced", "removed before a save", "removed after the last step"]
)
def test_a_run_whose_folder_is_removed_ends_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run, is_late = tmp_path / "run", how.endswith("last step")
    owner, name = (RunLog, "summary") if is_late else (Trainer, "step")
    act = getattr(owner, name)

    def and_remove(self: Any, *arguments: Any) -> Any:
        result = None if is_late else act(self, *arguments)
        if is_late or self.progress.step == 2:
            shutil.move(run, tmp_path / "elsewhere") if how == "moved" else shutil.rmtree(run)
        if how == "replaced":
            run.mkdir(exist_ok=True)
            (run / "metrics.jsonl").touch()
        return act(self, *arguments) if is_late else result

    monkeypatch.setattr(owner, name, and_remove)
    saves = ["--checkpoint.every", "2"] if how.endswith("save") else []
    rule = (
        r"run/summary\.json cannot be written" if is_late else r"step \d: .*run, or metrics\.jsonl in it, was removed"
    )
    with refuses(rf"^log\.dir: .*{rule}"):
        _fit(tmp_path, *saves)


def test_a_finished_run_is_left_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = _fit(tmp_path, *SAVES)
    before = contents(tmp_path)
    for steps in ("4", "3"):
        again = _fit(tmp_path, *SAVES, "--train.steps", steps)
        assert {key: again[key] for key in first} == first
        (line,) = [line for line in caplog.messages if line.startswith("finished already, nothing is trained: step 4 ")]
        assert line.endswith(f"log.overwrite; results in {tmp_path}/run/summary.json")
        assert f"since train.steps is {steps}; to train again, change log.name" in line
        caplog.clear()
    assert contents(tmp_path) == before
    more = ["--train.steps", "6", "--log.trace_first", "4", "--log.trace_steps", "1"]
    assert _fit(tmp_path, *SAVES, *more)["steps"] == 6, "more steps were asked for"
    assert "log.trace_first: 4, but the run resumes later: no step is traced" in caplog.messages
    assert list(read_metrics(tmp_path / "run", "train/loss")) == list(range(1, 7))


@pytest.mark.parametrize("starts_over", ["--log.overwrite true", "--checkpoint.resume never"])
def test_a_run_of_its_own_config_file_resumes(tmp_path: Path, starts_over: str) -> None:
    _fit(tmp_path, *SAVES, *starts_over.split())
    more = ["--config", str(tmp_path / "run" / "config.yaml"), "--train.steps", "6"]
    assert make_trainer(configuration(*more)).fit()["steps"] == 6
    assert list(read_metrics(tmp_path / "run", "train/loss")) == list(range(1, 7))


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ("--log.trace_first 5", "ends after step 4"),
        ("--log.trace_first 4 --train.eval_every 2 --train.target_auroc 0.01", "has ended after step 2"),
        ("--log.trace_first 4", ""),
    ],
)
def test_a_run_that_ends_before_the_steps_to_trace_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: str, ends: str
) -> None:
    _fit(tmp_path, "--log.trace_steps", "3", *options.split())
    first = options.split()[1]
    told = [line for line in caplog.messages if line.startswith("log.trace_first")]
    assert told == [f"log.trace_first: {first}, but the run {ends}: no step is traced"] * bool(ends)
    if not ends:
        assert [path.name for path in tmp_path.glob("run/traces/*")] == ["steps_4_4_rank_0.json.gz"]


@pytest.mark.parametrize("first", ["2", "4"])  # written after a step, and at the end of the run
def test_a_run_goes_on_if_the_disk_has_no_room_for_its_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    def fill(profiler: object, path: str) -> None:
        Path(path).write_bytes(b"\x1f\x8b")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fill)
    _fit(tmp_path, "--log.trace_steps", "1", "--log.trace_first", first)
    told = [line for line in caplog.messages if line.startswith("log.trace")]
    assert told == ["log.trace_steps: no trace can be written (No space left on device); the run continues"]
    assert list(tmp_path.glob("run/traces/*")) == []
    assert (tmp_path / "run" / "summary.json").exists()


def test_epochs_are_passes_over_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, size = str(tmp_path / "packed"), ["--data.eval_samples", "64", "--data.workers", "0"]
    assert main(["prepare", "samples", packed, "--config", "quickstart", "--samples", "224", *size]) == 0
    options = [*SAVES, *size, "--data.kind", "prepared", "--data.path", packed, "--train.steps", "null"]
    for epochs, steps in (("1", 3), ("2", 7), ("2", 7)):  # of 64 samples, also across the end of a pass
        assert _fit(tmp_path / "runs", *options, "--train.epochs", epochs)["steps"] == steps
    (line,) = [line for line in caplog.messages if line.startswith("finished already, nothing is trained: step 7 ")]
    assert "since train.epochs is 2; " in line


@pytest.mark.parametrize("options", ["--train.steps 4", "--train.steps 8 --train.eval_every 4"])
def test_an_evaluation_that_is_repeated_when_a_run_resumes_is_logged_once(tmp_path: Path, options: str) -> None:
    _fit(tmp_path, *SAVES, *BOARD)
    (tmp_path / "run" / "summary.json").unlink()  # as if killed after the last evaluation
    last = _fit(tmp_path, *SAVES, *BOARD, *options.split())["steps"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    evaluated = [record["step"] for line in lines if "eval/loss" in (record := json.loads(line))]
    assert evaluated == list(range(4, last + 1, 4))
    assert 4 in read_metrics(tmp_path / "run", "train/loss"), "the step itself is not taken again"
    shown = EventAccumulator(str(tmp_path / "run"))
    shown.Reload()
    for key in ("train/loss", "speed/step_ms", "eval/loss"):
        logged = read_metrics(tmp_path / "run", key)
        assert [event.step for event in shown.Scalars(key)] == [*logged]
        assert [event.value for event in shown.Scalars(key)] == pytest.approx([*logged.values()])
    assert "step" not in shown.Tags()["scalars"]


def test_tensorboard_shows_a_run_that_resumes_while_the_clock_is_behind(tmp_path: Path) -> None:
    _fit(tmp_path, *SAVES, *BOARD)
    (earlier,) = (tmp_path / "run").glob("events.out.tfevents.*")
    earlier.rename(earlier.with_name("events.out.tfevents.9000000000.machine.1.0"))
    _fit(tmp_path, *SAVES, *BOARD, "--train.steps", "6")
    shown = EventAccumulator(str(tmp_path / "run"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_reached_its_target_is_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    early = ["--train.eval_every", "2", "--train.target_auroc"]
    assert _fit(tmp_path, *SAVES, *early, "0.01")["steps"] == 2
    assert checkpoints(tmp_path) == ["step_2"]
    before = contents(tmp_path)
    assert _fit(tmp_path, *SAVES, *early, "0.02")["steps"] == 2
    assert contents(tmp_path) == before
    assert "nothing is trained: step 2 was the last, since train.target_auroc 0.02 is reached" in caplog.text
    assert _fit(tmp_path, *SAVES, *early, "0.99")["steps"] == 4, "more was asked for"


def test_an_auroc_that_is_undefined_reaches_no_target(tmp_path: Path) -> None:
    one_label = ["--data.eval_samples", "1", "--train.eval_every", "2", "--train.target_auroc", "0.01"]
    summary = _fit(tmp_path, *one_label)
    assert math.isnan(summary["eval_auroc"])
    assert summary["steps"] == 4


def test_a_target_that_no_evaluation_can_reach_early_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = ["--train.target_auroc", "0.01", "--log.every", "2", "--train.eval_every", "0"]
    assert _fit(tmp_path, *target)["steps"] == 4
    assert "train.target_auroc: 0.01 stops nothing, as train.eval_every 0 evaluates after" in caplog.text
    assert "at most" not in caplog.text


def test_a_run_that_ended_before_its_results_evaluates(tmp_path: Path) -> None:
    first = _fit(tmp_path, *SAVES)
    (tmp_path / "run" / "summary.json").unlink()
    again = _fit(tmp_path, *SAVES)
    for key in ("steps", "train_loss", "train_ne", "eval_loss"):
        assert again[key] == first[key]
    assert math.isnan(again["input_wait_ms"]), "as no step was timed"


@pytest.mark.parametrize("content", ["", "{", "[]", "Infinity", '{"steps": Infinity}', '{"steps": 4}'])
def test_damaged_results_of_a_finished_run_are_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    run = tmp_path / "run"
    (run / "events.out.tfevents.1").mkdir(parents=True)
    first = _fit(tmp_path, *SAVES)
    (run / "summary.json").write_text(content)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], '{"step": Infinity}', "[1]", *lines[1:], lines[-1][:50]]))
    caplog.clear()
    again = _fit(tmp_path, *SAVES)
    assert (again["steps"], again["eval_loss"]) == (4, first["eval_loss"])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(" (")[0] for line in warnings if str(run) in line] == [
        f"{run}/summary.json is damaged",
        f"{run}/metrics.jsonl: 3 of {len(lines) + 3} lines are damaged and skipped",
    ]
    assert _fit(tmp_path, *SAVES) == again, "finished, and read from the file"
    assert list(read_metrics(run, "train/loss")) == [1, 2, 3, 4]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for attempt in (1, 2):
        trainer: Any = _trainer(tmp_path)
        trainer.step = Mock(wraps=trainer.step, side_effect=[DEFAULT, ZeroDivisionError])
        with pytest.raises(ZeroDivisionError):
            trainer.fit()
        assert list(read_metrics(run, "train/loss")) == [1]
        assert len(list(run.glob("earlier_*"))) == attempt - 1
    _fit(tmp_path)
    assert (run / "summary.json").exists()
    assert next(iter(read_metrics(run, "train/loss"))) == 1
    assert list(read_metrics(run / "earlier_1", "train/loss")) == list(read_metrics(run / "earlier_2", "train/loss"))
    assert (run / "earlier_2" / "config.yaml").exists()


def test_an_earlier_run_is_moved_aside_when_asked_and_can_be_resumed_there(tmp_path: Path) -> None:
    _fit(tmp_path, *SAVES)
    before = contents(tmp_path / "run")
    with refuses(r"resume: .*step_4 is in .*run, which log.overwrite moves aside; leave "):
        _fit(tmp_path, "--log.overwrite", "true", "--checkpoint.resume", str(tmp_path / "run/checkpoints/step_4"))
    for seed in ("1", "2"):
        _fit(tmp_path, *SAVES, "--train.seed", seed, "--log.overwrite", "true")
    moved = tmp_path / "run" / "earlier_1"
    assert contents(moved) == {moved / path.relative_to(tmp_path / "run"): each for path, each in before.items()}
    configs = [yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in ("run/earlier_2", "run")]
    assert [config["train"]["seed"] for config in configs] == [1, 2]
    _fit(tmp_path, *SAVES, "--log.dir", str(moved.parent), "--log.name", moved.name, "--train.steps", "5")
    assert max(read_metrics(moved, "train/loss")) == 5


@pytest.mark.parametrize("rate", ["train.lr", "embedding.lr"])
@pytest.mark.parametrize("every", ["1", "100"])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, rate: str, every: str) -> None:
    options = [*SAVES, f"--{rate}", "1e37", "--embedding.optimizer", "sgd", "--train.optimizer", "sgd"]
    with pytest.raises(NotFiniteError, match=r"step \d: the training loss is (nan|inf) .*; lower train\.lr") as error:
        _fit(tmp_path, *options, "--log.every", every)
    assert "1e+37" in str(error.value)
    assert "\n" not in str(error.value)
    assert checkpoints(tmp_path) == []
    assert not (tmp_path / "run" / "summary.json").exists()
    losses = read_metrics(tmp_path / "run", "train/loss")
    assert losses[max(losses)] is None, "the log shows where it ended"


@pytest.mark.parametrize("optimizers", [("sgd", "sgd"), ("adagrad", "adagrad"), ("adam", "rowwise_adagrad")])
@pytest.mark.parametrize("value", ["1e-37", "1e37"])
def test_the_greatest_and_the_least_numbers_train_or_end_the_run_by_name(
    tmp_path: Path, optimizers: tuple[str, str], value: str
) -> None:
    names = ["--train.optimizer", optimizers[0], "--embedding.optimizer", optimizers[1], "--log.overwrite", "true"]
    for key in ("train.lr", "embedding.lr", "train.eps", "embedding.eps", "data.tables.zipf_alpha"):
        try:
            assert _fit(tmp_path, *names, f"--{key}", value)["steps"] == 4
            assert (key, value) not in (("train.lr", "1e37"), ("embedding.lr", "1e37"))
        except NotFiniteError as error:
            assert value == "1e37"
            message = str(error)
            assert f"{key} 1e+37" in message or key.endswith("eps"), message


def test_weights_that_the_last_step_broke_are_not_saved(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    trainer.save(1)
    tables = [tensor for tensor in trainer.model.state_dict().values() if isinstance(tensor, ShardedTensor)]
    table = tables[0].local_shards()[0].tensor.detach()
    for broken in (math.nan, math.inf):
        table[3, 2] = broken
        with pytest.raises(NotFiniteError, match="step 2: a weight is nan or infinite"):
            trainer.save(2)
    assert checkpoints(tmp_path) == ["step_1"]


@pytest.mark.parametrize(
    ("key", "optimizer"),
    [("train", "adagrad"), *(pytest.param(key, "sgd", marks=pytest.mark.slow) for key in ("train", "embedding"))],
)
def test_a_good_checkpoint_is_not_replaced_by_one_whose_next_loss_is_not_finite(
    tmp_path: Path, key: str, optimizer: str
) -> None:
    options = [*SAVES, "--checkpoint.keep", "1", "--checkpoint.every", "1", f"--{key}.optimizer", optimizer]
    _fit(tmp_path, *options, "--train.steps", "2")
    with pytest.raises(NotFiniteError, match=r"step 3: .* and must be finite"):
        _fit(tmp_path, *options, f"--{key}.lr", "1e30")
    assert checkpoints(tmp_path) == ["step_2"], "step 3's weights are finite, and give a loss that is not"
    assert _fit(tmp_path, *options)["steps"] == 4


def test_stochastic_rounding_continues_from_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    """Its random numbers depend on the step, and would repeat if a resumed run counted from 0."""
    options = [*SAVES, "--embedding.backend", "pgas"]
    _fit(tmp_path, *options, "--train.steps", "2")
    trainer = _trainer(tmp_path, *options)
    trainer.fit()
    assert [exchange.counters.steps.value for exchange in exchanges(trainer.model)] == [4]


@pytest.mark.parametrize(
    ("backend", "form"), [("torchrec", ""), ("pgas", "--train.pipeline graph --train.precision bf16")]
)
def test_evaluations_and_a_resume_change_no_step(tmp_path: Path, backend: str, form: str) -> None:
    """FBGEMM counts every forward, and a checkpoint stores no count."""
    counter = CounterBasedRegularizationDefinition(CounterWeightDecayMode.L2, counter_halflife=3, adjustment_iter=1)
    params = {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.COUNTER}
    params |= {"counter_based_regularization": counter}

    def trained(name: str, *options: str) -> dict[str, torch.Tensor]:
        config = quickstart(tmp_path, name, *SMALL, *SAVES, "--embedding.backend", backend, *form.split(), *options)
        sharders = partial(build_sharders, fused_params=params)
        trainer = Trainer(config, world_here(), CPU, *open_datasets(config.data), sharders)
        trainer.fit()
        return {key: each.clone() for key, each in local_tensors(trainer.model.state_dict())}

    trained("cut", "--train.steps", "2", "--train.eval_every", "1")
    found = trained("cut", "--train.eval_every", "1")
    assert_all_near(found, trained("whole"), 0.0, "rows")


def test_a_checkpoint_does_not_depend_on_the_order_of_the_flat_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(name: str, steps: str) -> tuple[list[str], dict[str, torch.Tensor]]:
        options = ["--embedding.backend", "pgas", "--train.pipeline", "graph", "--train.precision", "bf16"]
        config = quickstart(tmp_path, name, *SMALL, *SAVES, *options, "--train.steps", steps)
        trainer = Trainer(config, world_here(), CPU, *open_datasets(config.data))
        trainer.fit()
        assert isinstance(trainer.pipeline, GraphTrainPipeline)
        assert trainer.pipeline._casts is not None
        saved = {key: each.clone() for key, each in local_tensors(trainer.model.state_dict())}
        return list(trainer.pipeline._casts.flat.positions), saved

    with monkeypatch.context() as patch:
        patch.setattr(assembly, "in_flat_order", lambda _, parameters: parameters)
        before, _ = trained("cut", "2")
    now, found = trained("cut", "4")
    assert before != now
    assert sorted(before) == sorted(now)
    assert_all_near(found, trained("whole", "4")[1], 0.0, "rows")


def test_a_run_resumes_with_other_samples_only_if_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _fit(tmp_path, *SAVES, "--train.steps", "2")
    before = contents(tmp_path)
    changed = ["--train.batch_size", "32", "--data.seed", "1"]
    with refuses(r"train\.global_batch_size 64, now 32, data\.seed 0, now 1;"):
        _fit(tmp_path, *changed)
    assert contents(tmp_path) == before
    assert _fit(tmp_path, *changed, "--checkpoint.allow_config_mismatch", "true")["steps"] == 4
    assert "step_2 was trained with train.global_batch_size 64, now 32, data.seed 0, now 1" in caplog.text


class _Exchange:
    """An exchange; `recorded` says whether a kernel recorded an id outside its table."""

    recorded = False

    def check(self) -> None:
        if self.recorded:
            raise ValueError("id 20 is outside its table")


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> _Exchange:
    exchange = _Exchange()
    monkeypatch.setattr(Trainer, "_peer_memory_owners", lambda self: [exchange])
    return exchange


def test_rules_of_tables_of_any_id_are_refused_where_no_table_takes_any(tmp_path: Path) -> None:
    rules = ["--embedding.id_tables.rows", "4096", "--embedding.id_tables.eviction", "lfu"]
    with refuses(r"^embedding\.id_tables: rows 4096, eviction lfu, but no table takes any id; leave the section out"):
        ranks_here(quickstart(tmp_path, "run", *rules)).trainer()


@pytest.mark.parametrize("plan", ["auto", "column_wise", "torchrec"])
def test_torchrec_is_refused_tables_of_any_id_on_cpus_whatever_the_plan(tmp_path: Path, plan: str) -> None:
    options = ["--data.tables.ids", "any", "--embedding.id_tables.rows", "4096", "--embedding.plan", plan]
    with refuses(r"^embedding\.backend: torchrec trains tables of any id on GPUs only, since FBGEMM's"):
        ranks_here(quickstart(tmp_path, "run", *options, "--embedding.backend", "torchrec")).trainer()


def test_a_run_resumes_on_replaced_files_only_if_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def pack(samples: int, seed: int) -> None:
        shutil.rmtree(packed, ignore_errors=True)
        made = ["--data.seed", str(seed), "--data.eval_samples", "100", "--data.workers", "0"]
        assert main(["prepare", "samples", packed, "--config", "quickstart", "--samples", str(samples), *made]) == 0

    def resumed(*options: str) -> Trainer:
        small = ["--train.batch_size", "64", "--train.steps", "1", *SAVES, *options]
        config = quickstart(tmp_path, "run", "--data.kind", "prepared", "--data.path", packed, *small)
        return ranks_here(config).trainer(resumes=True)

    packed = str(tmp_path / "packed")
    pack(300, seed=0)
    resumed().fit()
    resumed()
    for samples, seed, border in ((300, 1, "300 of 400"), (500, 0, "500 of 600")):
        pack(samples, seed)
        one = r"300 of 400 samples, [0-9a-f]{12}"
        with refuses(rf"training samples {one}, now {border} samples, .*held-out samples 100{one[3:]}, now 100 of "):
            resumed()
    resumed("--checkpoint.allow_config_mismatch", "true")
    assert "was trained with training samples 300 of 400 samples" in caplog.text


def test_an_id_outside_its_table_ends_the_run_at_the_next_log_line(
    tmp_path: Path, exchange: _Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of the fault succeeds, as on a GPU."""
    take_step, taken = Trainer.step, []

    def and_record(self: Trainer, batches: Any) -> torch.Tensor:
        taken.append(take_step(self, batches))
        exchange.recorded = len(taken) >= 3
        return taken[-1]

    monkeypatch.setattr(Trainer, "step", and_record)
    with pytest.raises(ValueError, match="id 20 is outside its table"):
        _fit(tmp_path, *SAVES, "--log.every", "2")
    assert list(read_metrics(tmp_path / "run", "train/loss")) == [2, 4]
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        ("pipeline", "progress", torch.AcceleratorError("CUDA error")),
        (RunLog, "training", torch.AcceleratorError("CUDA error")),
        (RunLog, "summary", RuntimeError("NCCL error")),
        (Trainer, "evaluate", RuntimeError("CUDA error")),
        (Trainer, "evaluate", None),  # of a kernel of the last evaluation
        ("checkpointer", "write", torch.AcceleratorError("CUDA error")),
    ],
)
def test_what_a_kernel_recorded_is_raised_instead_of_what_follows(
    tmp_path: Path, exchange: _Exchange, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Any
) -> None:
    trainer = _trainer(tmp_path, *SAVES)

    owner = getattr(trainer, owner) if isinstance(owner, str) else owner
    call = getattr(owner, name)

    def record(*arguments: Any, **options: Any) -> Any:
        exchange.recorded = True
        if error is not None:
            raise error
        return call(*arguments, **options)

    monkeypatch.setattr(owner, name, record)
    with pytest.raises(ValueError, match="id 20 is outside its table"):
        trainer.fit()
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    "backend", ["pgas", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nccl", "fused"))]
)
def test_an_id_outside_its_table_is_the_same_error_under_every_backend_of_ours(tmp_path: Path, backend: str) -> None:
    options = ["--embedding.backend", backend, "--embedding.plan", "table_wise"]
    for bad in (10**6, -7, -1):
        trainer = _trainer(tmp_path, *options)
        batch = trainer.train_data.read(0, 64)
        batch.sparse.values()[5] = bad
        with pytest.raises(ValueError, match=r"id.* is outside its table.*; map ids into .* where they are read") as e:
            trainer.step(iter([batch]))
        assert type(e.value) is ValueError
        trainer.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], ["8 of 8 tables exchanged, update by push"]),
        (
            ["--model.sequence.history", "1"],
            [
                "7 of 7 tables exchanged, update by push",
                "1 of 1 unpooled tables exchanged, update by push",
                "8 of 8 tables exchanged, in 2 collections",
            ],
        ),
    ],
)
def test_the_log_counts_the_exchanged_tables_of_all_collections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: list[str], told: list[str]
) -> None:
    with caplog.at_level("INFO", "dlrm_overlap"):
        make_trainer(quickstart(tmp_path, "pgas", "--embedding.backend", "pgas", *options)).close()
    lines = [message for message in caplog.messages if "exchanged" in message]
    assert lines == [f"backend pgas: {each}" for each in told]
