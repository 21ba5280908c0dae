"""Every mistake ends in exit code 2 and one line, before any process is started."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from dlrm_overlap.cli import main

TRAIN = "train --config configs/quickstart.yaml --train.device cpu --log.dir {tmp}/runs"
TRAIN_2 = TRAIN + " --nproc 2"
COMPARE = "compare --config configs/quickstart.yaml --log.dir {tmp}/runs"
BENCH = "bench stage --config configs/bench/tiny.yaml"


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Mock(side_effect=AssertionError("ranks were started, or connected"))
    monkeypatch.setattr("dlrm_overlap.train.ranks.spawn", starts)
    monkeypatch.setattr("dlrm_overlap.launching.process_group.init_process_group", starts)


Refusal = Callable[[list[str]], str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Return a function that gives the line that `argv` is refused with."""

    def line_of(argv: list[str]) -> str:
        assert main(argv) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("dlrm-overlap: ")
        return line

    return line_of


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        # names
        ("trian", ["did you mean train?"]),
        (f"{TRAIN} --nprocs 2", ["--nprocs is not an option", "did you mean --nproc?"]),
        (f"{TRAIN} --lr 3", ["--lr is not", "did you mean --embedding.lr or --train.lr?"]),
        (f"{TRAIN} --batch-size 3", ["--batch-size is not", "did you mean --train.batch_size?"]),
        (f"{TRAIN} --train.learning_rate 3", ["--train.learning_rate is not", "did you mean --train.lr?"]),
        (f"{TRAIN} --tran.steps 3", ["--tran.steps is not", "did you mean --train.steps?"]),
        (f"{TRAIN} --train.stepz 3", ["--train.stepz is not", "did you mean --train.steps?"]),
        (f"{TRAIN} --log.interval 3", ["--log.interval is not an option; --help tells"]),
        (f"{TRAIN} --xyzzy 3", ["--xyzzy is not an option", "--help tells"]),
        (f"{TRAIN} 3", ["3: not an option, since it does not begin with --; see --help"]),
        ("bench sweep --dims 2 abc", ["--dims: abc is not a whole number from 1 to 2^31 - 1"]),
        ("bench step --iterations 3", ["--iterations is not an option"]),
        ("prepare criteo in out --mincount 3", ["--mincount is not an option", "did you mean --min_count?"]),
        ("bench nothing", ["known: step"]),
        ("bench", ["bench: no benchmark is named; known: step", ", job, all"]),
        ("train", ["data.tables.count: null", "--config quickstart"]),
        ("prepare", ["missing on the command line: table|criteo|samples, IN, OUT; see --help"]),
        ("prepare tabel in out", ["invalid choice: 'tabel' (choose from 'table', 'criteo', 'samples')"]),
        ("prepare --rows 3 samples in out", ["prepare --rows: other options than those of samples; write `prepare s"]),
        ("prepare criteo in", ["missing on the command line: OUT; see --help"]),
        ("checkpoint", ["missing on the command line: show|verify|export, PATH; see --help"]),
        ("trace", ["missing on the command line: TRACE; see --help"]),
        ("doctor --fast", ["--fast is not an option"]),
        # values
        (f"{TRAIN} --train.batch_size -3", ["train.batch_size: -3 is not a whole number from 1 to 2^31 - 1"]),
        (f"{TRAIN} --train.batch_size abc", ["train.batch_size: abc is not a whole number from 1 to 2^31 - 1"]),
        (f"{TRAIN} --train.lr nan", ["train.lr: nan is not a number from 1e-37 to 1e37"]),
        (f"{TRAIN} --train.lr inf", ["train.lr: inf is not a number from 1e-37 to 1e37"]),
        (f"{TRAIN} --train.steps", ["train.steps: expected one argument"]),
        (f"{TRAIN} --train.graph_dense maybe", ["train.graph_dense: maybe is not true or false"]),
        (f"{TRAIN} --embedding.backend magic", ["embedding.backend: magic is not one of 'auto', 'torchrec', 'nccl'"]),
        (f"{TRAIN} --model.bottom_mlp 5", ["model.bottom_mlp: 5 is not a list"]),
        (f"{TRAIN_2} --model.top_mlp [8,2]", ["[8, 2] ends in 2, but a sample has 1 label; end it in 1, a logit for"]),
        (f"{TRAIN_2} --model.sequence.history 8", ["model.sequence.history: 8 is no table; the 8 count from 0"]),
        (f"{TRAIN} --data.tables.rows 1.5", ["data.tables.rows: 1.5 is not a whole number from 1 to 2^31 - 1, a list"]),
        (f"{TRAIN} --data.tables.rows 0", ["data.tables.rows: 0 is not a whole number from 1 to 2^31 - 1, a list"]),
        (f"{TRAIN} --data.tables.rows [5,0]", ["data.tables.rows: [5, 0] is not a whole number from 1 to 2^31 - 1"]),
        (f"{TRAIN} --data.tables.multi_hot {10**9}", ["multi_hot: '1000000000' is not", "1 to 100000"]),
        (f"{TRAIN} --data.tables.rows []", ["data.tables.rows: [] is not a whole number"]),
        (f"{TRAIN} --data.tables.multi_hot []", ["data.tables.multi_hot: '[]' is not a number of ids a bag"]),
        (f"{TRAIN} --train.steps {10**20}", ["train.steps: 100000000000000000000 is not a whole number"]),
        (f"{TRAIN_2} --data.prefetch 1e9", ["data.prefetch: 1e9 is not a whole number from 1 to 128"]),
        (f"{TRAIN_2} --embedding.wait_timeout_s 1e-9", ["embedding.wait_timeout_s: 1e-9 is not a number of seconds"]),
        # what this machine can take
        (f"{TRAIN} --nproc 0", ["--nproc: 0 is not a whole number from 1 to 2^31 - 1 or 'auto'"]),
        (f"{TRAIN} --nproc 2 --train.global_batch_size 9", ["9 samples do not divide by 2 ranks; take 10"]),
        (f"{TRAIN} --nproc 2 --train.device cuda", ["train.device: cuda", "GPU"]),
        # files
        ("train --config no/such.yaml", ["no/such.yaml", "give an existing YAML file", "mlperf_dcnv2, quickstart"]),
        ("train --config configs/quikstart.yaml", ["quikstart.yaml: No such file", "did you mean quickstart?"]),
        ("train --config {tmp}/quoted.yaml", ["quoted.yaml: train.steps: '5' is not a whole number from 1 to"]),
        ("train --config {tmp}", ["Is a directory", "give an existing YAML file"]),
        (f"{TRAIN_2} --log.dir {{tmp}}/empty.yaml", ["log.dir: nothing can be written to", "Not a directory"]),
        (f"{TRAIN_2} --log.dir=~/runs", ["log.dir: ~/runs is not a path written in full"]),
        (f"{COMPARE} --nproc 2 --log.dir {{tmp}}/empty.yaml", ["log.dir: nothing can be written to"]),
        (f"{TRAIN} --checkpoint.resume always", ["checkpoint.resume: 'always' is not auto, never or a"]),
        (f"{BENCH} --nproc 2 --output {{tmp}}", ["--output", "is a folder; name a file"]),
        (f"{BENCH} --output {{tmp}}/empty.yaml/x.csv", ["--output: nothing can be written to", "Not a directory"]),
        (f"{BENCH} --output {{tmp}}/step.csv", ["step.csv has rows of bench step, which have other columns; give"]),
        (f"{BENCH} --output {{tmp}}/latin.yaml", ["--output: ", "latin.yaml cannot be read (not a CSV file); give"]),
        ("bench step --config configs/quickstart.yaml --output {tmp}", ["--output", "is a folder"]),
        ("bench step --config configs/quickstart.yaml --timeline {tmp}", ["--timeline", "is a folder"]),
        ("trace {tmp}/cut.json.gz", ["cut.json.gz: not a complete Chrome trace"]),
        ("trace {tmp}/empty.gz", ["empty.gz: not a complete Chrome trace"]),
        ("trace {tmp}/empty.yaml", ["not a complete Chrome trace; give a file that log.trace_steps wrote"]),
        ("trace {tmp}/no_such.json", ["No such file"]),
        ("trace {tmp}", ["it is a folder, not a file"]),
        ("prepare criteo no/such.txt out", ["no/such.txt"]),
        ("prepare criteo {tmp}/text.tsv out --rows 99999999999", ["--rows: 99999999999 is not a whole number from 1"]),
        ("prepare criteo {tmp}/text.tsv {tmp}/empty.yaml", ["empty.yaml: cannot be written (File exists)"]),
        ("prepare avazu in out", ["criteo"]),
        ("prepare criteo in out --rows 5 --min_count 2", ["exclude each other"]),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    command: str, parts: list[str], tmp_path: Path, refusal: Refusal
) -> None:
    trace = gzip.compress(json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel"}] * 99}).encode())
    contents = {
        "empty.yaml": b"",
        "quoted.yaml": b"train: {steps: '5'}\n",
        "step.csv": b"kind,torch\nstep,2.14.1\n",
        "latin.yaml": "train: {steps: 5} # für\n".encode("latin-1"),
        "cut.json.gz": trace[:-20],
        "empty.gz": b"",
        "text.tsv": b"\t".join([b"1"] * 40) + b"\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    line = refusal([word.format(tmp=tmp_path) for word in command.split()])
    assert all(part in line for part in parts), line
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(contents), "a refused command left something"


PATHS = [
    f"{TRAIN} --log.dir={{path}}",
    f"{TRAIN} --log.name={{path}}",
    f"{TRAIN} --data.kind criteo_npy --data.path={{path}}",
    f"{TRAIN} --data.kind criteo_npy --data.path {{tmp}} --data.eval_path={{path}}",
    f"{TRAIN} --checkpoint.resume={{path}}",
    f"{TRAIN_2} --log.dir={{path}}",
    "train --config={path}",
    "compare --config quickstart --log.dir={path}",
    "bench stage --config bench/tiny --output={path}",
    "bench all --output={path}",
    "eval --checkpoint={path}",
    "eval --checkpoint {tmp} --output={path}",
    "prepare criteo {path} {tmp}/out",
    "prepare criteo {tmp} {path}",
    "prepare table {tmp} {tmp}/out --schema={path}",
    "prepare samples {path} --config quickstart",
    "trace {path}",
    "checkpoint show {path}",
    "checkpoint verify {path}",
    "checkpoint export {path} {tmp}/out.pt",
    "checkpoint export {tmp} {path}",
    "simulate --config quickstart --output={path}",
]


@pytest.mark.parametrize("command", PATHS)
@pytest.mark.parametrize("path", ["x" * 256, "x" * 5000, "x/" * 2500, "a\0b", "a\udcff"], ids=range(5))
def test_a_path_that_no_file_can_have_is_refused(command: str, path: str, tmp_path: Path, refusal: Refusal) -> None:
    line = refusal([word.format(tmp=tmp_path, path=path) for word in command.split()])
    assert "give a" in line or "is not a path" in line or "is not the name of one folder" in line, line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--backends torchrec,pgas", ["--backends: invalid choice: 'torchrec,pgas' (choose from 'torchrec', 'nccl'"]),
        ("--backends pgas torchrec pgas", ["pgas torchrec pgas", "each once"]),
        ("--backends torchrec", ["--backends torchrec", "two or more"]),
        ("--backends", ["backends"]),
        ("--rtol -1", ["rtol", "-1"]),
        ("--rtol nan", ["rtol", "nan"]),
        ("--rtol inf", ["--rtol: inf is not a number from 0 to below 1"]),
        ("--noise_runs -1", ["noise_runs", "-1"]),
        ("--noise_runs some", ["noise_runs", "some"]),
        ("--log.name mine", ["log.name: mine", "set log.dir"]),
        ("--checkpoint.resume runs/x/step_5", ["checkpoint.resume: runs/x/step_5", "leave it out"]),
        ("--embedding.id_tables.grow_at 0.8", ["grow_at: 0.8, but compare saves no", "leave out grow_at and max_rows"]),
        ("--train.global_batch_size 9", ["9 samples do not divide by 2 ranks"]),
    ],
)
def test_a_wrong_comparison_is_refused_in_one_line(
    options: str, parts: list[str], tmp_path: Path, refusal: Refusal
) -> None:
    line = refusal([*COMPARE.format(tmp=tmp_path).split(), "--nproc", "2", *options.split()])
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train:\n  steps: 3\n  stepz: 4\n", ["train.stepz is not a key", "did you mean train.steps?"]),
        ("train:\n  learning_rate: 3\n", ["train.learning_rate is not a key; did you mean train.lr?"]),
        ("log:\n  interval: 3\n", ["log.interval is not a key; known: log.dir, log.name, "]),
        ("trian:\n  steps: 3\n", ["trian is not a key", "did you mean train?"]),
        ("train:\n  steps: 3\n  lr: 1\n  steps: 4\n", ["line 4", "'steps' is written twice"]),
        ("train:\n  steps: 3\ndata: {}\ntrain: {}\n", ["line 4", "'train' is written twice"]),
        ("train: 3\n", ["train must be a section of keys, not 3"]),
        ("train:\n", ["train must be a section of keys, not None; indent them below it"]),
        ("data.tables.rows: 3\n", ["data.tables.rows is not a key"]),
        ("data: {kind: criteo_npy, path: ~/criteo}\n", ["data.path: ~/criteo is not a path written in full"]),
        ("log: {dir: $HOME/runs}\n", ["log.dir: $HOME/runs is not a path written in full, without ~ and $NAME"]),
        ('log: {dir: "${oc.env:HOME}/runs"}\n', ["log.dir: ${oc.env:HOME}/runs is not a path written in full"]),
        ('data: {kind: criteo_npy, path: "a\\0b"}\n', [r"data.path: a\x00b is not a path written in full"]),
        ('log: {dir: "a\\0b"}\n', [r"log.dir: a\x00b is not a path written in full"]),
        ('log: {name: "a\\0b"}\n', [r"log.name: a\x00b is not the name of one folder"]),
        ('checkpoint: {resume: "a\\0b"}\n', [r"checkpoint.resume: a\x00b is not a path written in full"]),
        ("# nothing yet\n", ["the file must be a section of keys, not None"]),
        ("- 3\n", ["the file must be a section of keys, not [3]"]),
        ("train: [\n", ["is not YAML"]),
        ("train: {steps: 5, lr: x}\n", ["train.lr: x is not a number from 1e-37 to 1e37"]),
        ("train:\n  eval_every:\n", ["train.eval_every: null is not a whole number from 0"]),
        ("data:\n  tables: {rows: 5, count: 2}\n", ["train.steps: null", "set train.steps"]),
        ("train: {steps: 5}\n", ["data.tables.count: null"]),
        ("train: {steps: 5}\ndata: {kind: criteo_npy}\n", ["data.path: null"]),
        ("data: {kind: criteo_npy, path: no/such/folder}\n", ["no/such/folder"]),
    ],
)
def test_a_wrong_configuration_file_is_refused_in_one_line(
    text: str, parts: list[str], tmp_path: Path, refusal: Refusal
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    line = refusal(["train", "--config", str(tmp_path / "config.yaml")])
    assert all(part in line for part in parts), line


def test_a_pipe_that_several_ranks_would_read_is_refused(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"train: {lr: x}\n")
    os.close(writer)
    pipe = ["train", "--config", f"/dev/fd/{reader}"]  # as bash's <(..)
    message = "is a pipe or a device, and each rank reads it; write it to a file first"
    assert message in refusal([*pipe, "--nproc", "2"])
    monkeypatch.setenv("RANK", "0")
    assert message in refusal(pipe)
    monkeypatch.delenv("RANK")
    assert "train.lr: x is not a number" in refusal(pipe)  # one process may read it
    os.close(reader)
    monkeypatch.setenv("RANK", "0")
    assert message in refusal(pipe)  # which torchrun has closed
    (tmp_path / "config.yaml").write_text("train: {lr: x}\n")
    assert "train.lr: x is not a number" in refusal(["train", "--config", str(tmp_path / "config.yaml")])


def test_a_data_set_below_one_batch_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    np.save(tmp_path / "day_0_dense.npy", np.zeros((40, 13), np.float32))
    np.save(tmp_path / "day_0_sparse.npy", np.zeros((40, 26), np.int32))
    np.save(tmp_path / "day_0_labels.npy", np.zeros((40, 1), np.int32))
    argv = ["train", "--data.kind", "criteo_npy", "--data.path", str(tmp_path), "--data.tables.rows", "50"]
    rule = "a global batch of 32 samples is more than the 30 there are to train on; take a smaller one"
    for steps in ([], ["--train.steps", "5"]):
        line = refusal([*argv, *steps, "--train.batch_size", "32", "--log.dir", str(tmp_path)])
        assert line == f"dlrm-overlap: train.batch_size: {rule}"


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("path", ["s3://bucket/days", "no/such/days"])
def test_data_that_is_not_there_is_refused_before_a_rank_starts(
    command: str, path: str, tmp_path: Path, refusal: Refusal
) -> None:
    argv = [command, "--data.kind", "criteo_npy", "--log.dir", str(tmp_path), "--nproc", "2"]
    message = "no such file or folder on this machine; give one"
    for options in (["--data.path", path], ["--data.path", str(tmp_path), "--data.eval_path", path]):
        line = refusal([*argv, *options])
        assert line.startswith(f"dlrm-overlap: {options[-2].removeprefix('--')}: {path}")
        assert message in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["train", "--data.kind", "criteo_npy", "--data.path", "x", "--data.dense_features", "10"],
            "data.dense_features: 10, but a sample of data.kind criteo_npy has 13; leave the key out, or set",
        ),
        ([*TRAIN.split(), "--data.path", "a\nb"], "data.path: 'a\\nb', but data.kind is synthetic"),
        (f"{COMPARE} --train.precision tf32 --train.device cpu".split(), "train.precision: tf32 needs a GPU"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_in_one_line(
    argv: list[str], message: str, refusal: Refusal
) -> None:
    assert message in refusal(argv)
