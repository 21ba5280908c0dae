import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.observe.metrics import RunningMetrics, StepTimer, evaluation_metrics, gather_predictions
from dlrm_overlap.observe.result_files import MetricsFile, read_records, read_summary, remove, set_aside
from dlrm_overlap.train.model import Loss
from tests.conftest import file_limit, refuses


def test_auroc_and_ne_against_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, generator=generator).mul(4).round().div(4)  # rounded, so that ties occur
    labels = (torch.rand(300, generator=generator) < logits.sigmoid()).float()
    result = evaluation_metrics(logits, labels)
    positive, negative = logits[labels == 1], logits[labels == 0]
    wins = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    assert result["auroc"] == pytest.approx(wins.mean().item(), abs=1e-6)
    p, rate = logits.double().sigmoid(), labels.double().mean().item()
    loss = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean().item()
    assert result["loss"] == pytest.approx(loss, abs=1e-9)
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert result["ne"] == pytest.approx(loss / entropy, abs=1e-9)
    right = [(chance > 0.5) == (label == 1) for chance, label in zip(p.tolist(), labels.tolist(), strict=True)]
    assert result["accuracy"] == sum(right) / 300


def test_equal_labels_have_no_auroc_and_ne_and_a_logit_that_is_nan_leaves_nothing_defined() -> None:
    result = evaluation_metrics(torch.randn(5), torch.ones(5))
    assert all(math.isnan(result[name]) for name in ("auroc", "ne"))
    result = evaluation_metrics(torch.tensor([math.nan, 1.0, -1.0]), torch.tensor([0.0, 1, 0]))
    assert all(math.isnan(value) for value in result.values())
    assert evaluation_metrics(torch.tensor([math.inf, 1.0, -1.0]), torch.tensor([1.0, 1, 0]))["auroc"] == 1


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("labels", [1, 2])
def test_sums_over_steps_give_the_metrics_of_all_their_predictions(labels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    names, shape = ["click", "purchase"][:labels], (500, labels) if labels > 1 else (500,)
    running, seen = RunningMetrics(names, 500, 3, torch.device("cpu")), []
    for steps in (3, 1, 4):  # the number that is held at once, fewer, and more
        window = []
        for _ in range(steps):
            logits = torch.randn(shape, generator=generator) * 3 - 1
            window.append((logits, (torch.rand(shape, generator=generator) < logits.sigmoid()).float()))
            running.add(*window[-1])
        seen += window
        taken = running.take()
        for prefix, some in (("", window), ("lifetime_", seen)):
            exact = evaluation_metrics(*map(torch.cat, zip(*some, strict=True)), names, [1.0] * labels)  # pyright: ignore[reportCallIssue]
            wanted = {key: value for key, value in exact.items() if not key.startswith(("loss", "accuracy"))}
            assert {f"{prefix}{key}" for key in wanted} < taken.keys()
            for key, value in wanted.items():
                assert taken[f"{prefix}{key}"] == pytest.approx(value, abs=2e-4 if "auroc" in key else 1e-6), key
    resumed = RunningMetrics(names, 500, 3, torch.device("cpu"))
    running.add(*window[-1])  # a save between two log lines has this step, too
    resumed.load(json.loads(json.dumps(running.state())))
    running.take()
    assert resumed.lifetime() == running.lifetime()
    diverged = window[-1][0].clone()
    diverged[0] = math.nan
    running.add(diverged, window[-1][1])
    assert all(math.isnan(value) for value in running.take().values()), "a NaN leaves nothing defined"
    assert all(math.isnan(value) for key, value in running.take().items() if not key.startswith("lifetime")), "no step"


def test_metrics_of_several_labels_are_means_and_the_weighted_sum_of_losses() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(90, 2, generator=generator), (torch.rand(90, 2, generator=generator) < 0.4).float()
    found = evaluation_metrics(logits, labels, ["a", "b"], [1.0, 0.25])
    each = [evaluation_metrics(logits[:, i], labels[:, i]) for i in range(2)]
    assert found["loss"] == pytest.approx(each[0]["loss"] + each[1]["loss"] / 4)
    assert found["loss"] == pytest.approx(Loss([1.0, 0.25])(logits, labels).item())
    calibration = (logits[:, 1].sigmoid().sum() / labels[:, 1].sum()).item()
    assert found["calibration/b"] == each[1]["calibration"] == pytest.approx(calibration)
    for key in ("auroc", "ne", "calibration", "accuracy"):
        assert found[key] == pytest.approx((each[0][key] + each[1][key]) / 2)
        assert [found[f"{key}/a"], found[f"{key}/b"]] == [metrics[key] for metrics in each]


@pytest.mark.parametrize("labels", [1, 2])
def test_predictions_are_gathered_in_the_order_of_the_samples(labels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 samples in 3 global batches, rank 0 of 2 has 0 1, 4 5 and 8 9."""
    samples = torch.arange(12.0 * labels).view(12, labels) if labels > 1 else torch.arange(12.0)
    ranks = [samples[[0, 1, 4, 5, 8, 9]], samples[[2, 3, 6, 7, 10, 11]]]

    def all_gather(into: list[torch.Tensor], local: torch.Tensor) -> None:
        assert torch.equal(local, torch.stack([ranks[1], -ranks[1]]))
        for one, of_rank in zip(into, ranks, strict=True):
            one.copy_(torch.stack([of_rank, -of_rank]))

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    found = gather_predictions(ranks[1], -ranks[1], batch_size=2)
    assert torch.equal(torch.stack(found), torch.stack([samples, -samples]))


def test_step_timer_gives_each_step_once() -> None:
    timer = StepTimer(torch.device("cpu"))
    for _ in range(3):
        timer.mark()
    assert len(timer.take_ms()) == 2
    timer.mark()
    assert len(timer.take_ms()) == 1
    assert timer.take_ms() == []


def test_metrics_file_of_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        file = MetricsFile(path, start)
        for step in steps:
            file.write({"step": step, "loss": math.nan if step == 4 else float(start)})
        file.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [{"step": s, "loss": x} for s, x in ((1, 0.0), (2, 0.0), (3, 2.0), (4, None))]


def test_lines_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    with file_limit(60):
        for step in (1, 2):
            file.write({"step": step, "loss": 0.5})
        for step in (3, 4):
            with pytest.raises(OSError, match=r"No space left|File too large"):
                file.write({"step": step, "loss": 0.5})
    file.write({"step": 5, "loss": 0.5})
    file.close()
    with path.open("a") as torn:
        torn.write('{"a": 1}\n[1]\n{"step": "x"}\n{"step": 6, "lo')
    MetricsFile(path, 9).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 5]


SUMMARY = {"steps": 3, "train_loss": 0.5, "eval_loss": 0.4, "eval_auroc": 0.8, "eval_ne": None}
SUMMARY |= {"samples_per_s": 1e6, "step_ms_p50": 4.0, "step_ms_p95": 5.0, "backend": "pgas"}
WRONG = ["Infinity", "-Infinity", "NaN", "1e999", "[]", "[1, 2]", "{}", '{"a": [{}]}', '"3"', "true"]
WRONG += ["9" * 5000, "[" * 100000]


def test_a_summary_is_read_as_it_was_returned(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    summary = read_summary(tmp_path)
    assert summary is not None
    assert math.isnan(summary.pop("eval_ne"))
    assert summary == {key: value for key, value in SUMMARY.items() if key != "eval_ne"}


def test_a_damaged_summary_is_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, whole = tmp_path / "summary.json", json.dumps(SUMMARY)
    texts = [*WRONG, "", "null", "3", whole[: len(whole) // 2], "\\ud800", whole.replace("eval_auroc", "auroc")]
    checked = {key: f'"{key}": {json.dumps(value)}' for key, value in SUMMARY.items() if key != "backend"}
    texts += [whole.replace(text, f'"{key}": {wrong}') for key, text in checked.items() for wrong in WRONG]
    contents = [text.encode() for text in texts] + [b"\xff\xfe\x00", bytes(100), b"\x80\x04."]
    for content in contents:
        path.write_bytes(content)
        caplog.clear()
        assert read_summary(tmp_path) is None, content[:200]
        (line,) = caplog.messages
        assert line.startswith(f"{path} is damaged (")
        assert "\n" not in line
    path.unlink()
    for make in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("nowhere")):
        make()
        assert read_summary(tmp_path) is None
        if path.is_dir():
            with refuses(r"summary\.json cannot be removed \(Is a directory\); move it"):
                remove(path)
            path.rmdir()
        remove(path)
    caplog.clear()
    assert read_summary(tmp_path) is None
    assert not caplog.messages


def test_what_cannot_be_moved_aside_leaves_all_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a folder of checkpoints that another user owns."""
    names = {"checkpoints", "config.yaml", "metrics.jsonl", "summary.json"}
    for name in names:
        (tmp_path / name).touch()
    rename = Path.rename

    def refuse_checkpoints(path: Path, target: Path) -> Path:
        if path.name == "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_checkpoints)
    monkeypatch.setattr(Path, "iterdir", lambda folder: (folder / name for name in sorted(os.listdir(folder))[::-1]))
    with refuses(rf"{tmp_path} cannot be moved to .*/earlier_1 \(Permission denied: .*/checkpoints\); give another"):
        set_aside(tmp_path)
    assert set(os.listdir(tmp_path)) == names


def test_damaged_lines_are_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [*(f'{{"step": {wrong}, "train/loss": 0.5}}' for wrong in WRONG), *WRONG]
    lines += [
        '{"step": 2, "train/lo',
        "\x85",
        "\u2028",
        '{"step": 0}',
        '{"step": -1}',
        '{"step": 1.0}',
        '{"step": 1, "train/loss": NaN}',
    ]
    whole = ['{"step": 1, "train/loss": 0.25}', '{"step": 2, "a": "\\u2028"}', '{"step": 3}']
    path.write_bytes("\n".join([whole[0], *lines, "", *whole[1:]]).encode() + b"\n\xff\xfe\n")
    assert [record["step"] for record in read_records(path)] == [1, 2, 3]
    (line,) = caplog.messages
    assert line.startswith(f"{path}: {len(lines) + 1} of {len(lines) + 4} lines are damaged and skipped (line 2: ")
    MetricsFile(path, 2).close()
    assert path.read_text() == f"{whole[0]}\n{whole[1]}\n"
    path.unlink()
    os.mkfifo(path)
    MetricsFile(path, 2).close()
    assert path.read_bytes() == b""
    path.unlink()
    path.mkdir()
    with refuses(r"log\.dir: .*metrics\.jsonl cannot be written"):
        MetricsFile(path, 2)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    "state",
    [3, None, [3], [[3]], [[3, 4, 5]], [["a", 1.0]], [[10**30, 1.0]], [[-1, 1.0]], [[1.5, 1.0]], [[9**9, 1]]]
    + [[[3, value]] for value in (None, "x", [], math.inf, math.nan, 10**400)],
)
def test_sums_that_are_none_are_refused(state: Any) -> None:
    running = RunningMetrics(["label"], 4, 1, torch.device("cpu"))
    for start in ([], [[5, 2.0]]):
        with pytest.raises(ValueError, match="no sums of metrics") as error:
            running.load([*start, *state] if isinstance(state, list) else state)
        assert "\n" not in str(error.value)
        assert running.state() == []
