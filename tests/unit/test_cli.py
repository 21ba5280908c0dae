"""Every mistake ends in exit code 2 and one line that says what, and what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_overlap.cli import main, run
from dlrm_overlap.parsing import parse_config

QUICKSTART = ["train", "--config", "configs/quickstart.yaml"]


def _config(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "config.yaml").write_text(text)
    return ["train", "--config", str(tmp_path / "config.yaml")]


def _refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line that `argv` is refused with."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("dlrm-overlap: ")
    return line


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--train.step", "3"], ["--train.step is not an option", "did you mean --train.steps?"]),
        (["--train.batch_size", "-3"], ["train.batch_size", "-3", "v>0"]),
        (["--train.batch_size", "abc"], ["train.batch_size", "'abc'"]),
        (["--train.lr", "nan"], ["train.lr", "nan"]),
        (["--embedding.backend", "magic"], ["embedding.backend", "'torchrec'", "magic"]),
        (["--data.tables.rows", "1.5"], ["data.tables.rows: 1.5", "PositiveInt"]),
        (["--model.dim", "17"], ["model.dim: 17", "multiple of 4"]),
        (["--data.tables.multi_hot", "5..2"], ["data.tables.multi_hot", "5..2", "write 3"]),
        (["--nproc", "0"], ["nproc", "0"]),
        (["--train.global_batch_size", "9", "--nproc", "2"], ["9 samples do not divide by 2 ranks; take 10"]),
        (["--train.device", "cuda", "--nproc", "64"], ["train.device: cuda", "GPU"]),
        (["--config", "no/such.yaml"], ["no/such.yaml", "give an existing YAML file"]),
        (["--train.lr", "inf"], ["train.lr", "inf", "v<inf"]),
        (["--log.name", "../mine"], ["log.name: '../mine'", "set log.dir"]),
        (
            ["--train.target_auroc", "0.8", "--train.eval_every", "0"],
            ["train.target_auroc: 0.8", "set train.eval_every"],
        ),
        (["--embedding.backward", "push", "--train.device", "cpu"], ["embedding.backward: push", "torchrec", "auto"]),
    ],
)
def test_bad_option(options: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = _refusal(QUICKSTART + options, capsys)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--backends", "torchrec", "fusde"], ["--backends fusde: not a backend", "did you mean fused?"]),
        (["--backends", "torchrec", "magic"], ["--backends magic", "torchrec, nccl, pgas, fused"]),
        (["--backends", "pgas", "torchrec", "pgas"], ["pgas torchrec pgas", "name each once"]),
        (["--backends", "torchrec"], ["--backends torchrec", "two or more"]),
        (["--backends"], ["backends"]),
        (["--rtol", "-1"], ["rtol", "-1"]),
        (["--rtol", "nan"], ["rtol", "nan"]),
        (["--rtol", "inf"], ["--rtol inf", "below 1"]),
        (["--log.name", "mine"], ["log.name: mine", "set log.dir"]),
        (["--checkpoint.resume", "runs/x/step_5"], ["checkpoint.resume: runs/x/step_5", "leave it out"]),
        (["--train.precision", "tf32", "--train.device", "cpu"], ["train.precision: tf32 needs a GPU"]),
        (["--train.global_batch_size", "9", "--nproc", "2"], ["9 samples do not divide by 2 ranks"]),
    ],
)
def test_bad_comparison(options: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = _refusal(["compare", "--config", "configs/quickstart.yaml", *options], capsys)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("options", [["--backends", "torchrec", "fusde"], ["--log.name", "mine"]])
def test_a_bad_comparison_starts_no_process(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_start(*_: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("dlrm_overlap.ranks.spawn", refuse_to_start)
    assert main(["compare", "--config", "configs/quickstart.yaml", "--nproc", "2", *options]) == 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train:\n  steps: 3\n  stepz: 4\n", ["train.stepz is not a key", "did you mean train.steps?"]),
        ("trian:\n  steps: 3\n", ["trian is not a key", "did you mean train?"]),
        ("train:\n  steps: 3\n  lr: 1\n  steps: 4\n", ["line 4", "'steps' is written twice"]),
        ("train:\n  steps: 3\ndata: {}\ntrain: {}\n", ["line 4", "'train' is written twice"]),
        ("train: 3\n", ["train must be a section of keys, not 3"]),
        ("train: [\n", ["is not YAML"]),
        ("data:\n  tables: {rows: 5, count: 2}\n", ["train.steps: null", "set train.steps"]),
        ("train: {steps: 5}\n", ["data.tables.count: null"]),
        ("train: {steps: 5}\ndata: {kind: criteo_npy}\n", ["data.path: null"]),
        ("data: {kind: criteo_npy, path: no/such/folder}\n", ["no/such/folder"]),
        ("data: {kind: criteo_tsv, path: no/such.txt, tables: {rows: 9}}\n", ["no/such.txt"]),
    ],
)
def test_bad_file(text: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = _refusal(_config(tmp_path, text), capsys)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["trian"], "did you mean train?"),
        (["bench", "nothing"], "known: input"),
        (["prepare", "criteo", "no/such.txt", "out"], "no/such.txt"),
        (["prepare", "avazu", "in", "out"], "criteo"),
        (["prepare", "criteo", "in", "out", "--rows", "5", "--min_count", "2"], "exclude each other"),
    ],
)
def test_bad_command(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in _refusal(argv, capsys)


class Ended(BaseException):
    """Stands for the end of the process."""


def _end(monkeypatch: pytest.MonkeyPatch, ends: BaseException | int) -> int:
    """Return the code that `run` ends the process with where `main` ends by `ends`."""

    def main() -> int:
        if isinstance(ends, int):
            return ends
        raise ends

    def exit_at_once(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr("dlrm_overlap.cli.main", main)
    monkeypatch.setattr("os._exit", exit_at_once)
    with pytest.raises(Ended) as ended:
        run()
    return ended.value.args[0]


@pytest.mark.parametrize(
    ("ends", "code"),
    [(0, 0), (2, 2), (SystemExit(), 0), (SystemExit(3), 3), (SystemExit("no"), 1), (Ended(), 1)],
)
def test_exit_code(monkeypatch: pytest.MonkeyPatch, ends: BaseException | int, code: int) -> None:
    assert _end(monkeypatch, ends) == code


def test_an_error_is_told_and_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _end(monkeypatch, RuntimeError("CUDA error: an illegal memory access")) == 1
    assert "RuntimeError: CUDA error: an illegal memory access" in capsys.readouterr().err


def test_a_thread_that_never_ends_does_not_hold_up_a_failure() -> None:
    """As a dead CUDA context does, it would hold up the end of the interpreter."""
    script = """
import threading
from dlrm_overlap import cli
threading.Thread(target=threading.Event().wait).start()
cli.COMMANDS["train"] = lambda argv: [].pop()
cli.run()
"""
    command = [sys.executable, "-c", script, "train"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "IndexError: pop from empty list" in result.stderr


def test_options_override_the_file(tmp_path: Path) -> None:
    text = "train: {steps: 5, lr: 0.5}\ndata: {tables: {rows: [5, 6], multi_hot: [1, 0..3]}}\n"
    argv = [*_config(tmp_path, text)[1:], "--train.steps", "7", "--data.tables.max_rows=3"]
    config, _ = parse_config("test", "", argv, lambda parser: None)
    assert (config.train.steps, config.train.lr) == (7, 0.5)
    assert (config.data.tables.multi_hot, config.data.tables.max_rows) == ([1, "0..3"], 3)


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_configurations_are_valid(path: Path) -> None:
    config, _ = parse_config("test", "", ["--config", str(path)], lambda parser: None)
    assert config.model.bottom_mlp[-1] == config.model.dim


def test_mlperf_shape() -> None:
    config, _ = parse_config("test", "", ["--config", "configs/mlperf_dcnv2.yaml"], lambda parser: None)
    tables = config.data.tables
    assert isinstance(tables.rows, list)
    assert isinstance(tables.multi_hot, list)
    assert (len(tables.rows), sum(tables.rows), sum(map(int, tables.multi_hot))) == (26, 204_184_588, 214)
    assert (config.model.cross_layers, config.model.cross_rank, config.model.dim) == (3, 512, 128)
