from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrm_overlap.config import (
    Config,
    DataConfig,
    EmbeddingConfig,
    ModelConfig,
    SequenceConfig,
    TablesConfig,
    TrainConfig,
    parse_multi_hot,
)
from dlrm_overlap.launching.launcher import LAUNCHER_PID
from dlrm_overlap.train.model import build_model
from tests.conftest import configuration, refuses


def _quickstart(*options: str) -> Config:
    return configuration("--config", "configs/quickstart.yaml", *options)


def test_a_name_is_a_file_of_the_package_unless_such_a_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = _quickstart()
    monkeypatch.chdir(tmp_path)
    assert configuration("--config", "quickstart") == configuration("--config=configs/quickstart.yaml") == named
    (tmp_path / "quickstart").mkdir()
    assert configuration("--config", "quickstart") == named, "a folder of that name is not meant"
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text("{data: {tables: {rows: [10, 20, 30]}}, train: {steps: 1}}\n")
    assert configuration("--config", "quickstart").data.tables.rows == [10, 20, 30]


@pytest.mark.parametrize(("spec", "bounds"), [(3, (3, 3)), ("3", (3, 3)), ("0..8", (0, 8)), ("2..2", (2, 2))])
def test_multi_hot_is_a_number_or_a_range(spec: int | str, bounds: tuple[int, int]) -> None:
    assert parse_multi_hot(spec) == bounds


@pytest.mark.parametrize("spec", ["", "-1", "3..1", "0..0", 0, "a", "1.5", "1..", "..2"])
def test_multi_hot_refuses_anything_else(spec: int | str) -> None:
    with refuses(r"write 3 or '0\.\.8'"):
        parse_multi_hot(spec)


def test_the_number_of_tables_is_given_or_that_of_a_list() -> None:
    assert TablesConfig(count=4, rows=10).number() == 4
    assert TablesConfig(rows=[1, 2, 3]).number() == 3
    assert TablesConfig(multi_hot=[1, "0..2"], rows=5).number() == 2
    assert TablesConfig().number(26) == 26


def test_a_configuration_is_a_plain_dictionary() -> None:
    data = DataConfig(tables=TablesConfig(count=2, rows=3))
    assert Config(data=data, train=TrainConfig(steps=1)).as_dict()["data"]["tables"]["rows"] == 3


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: TablesConfig(rows=[1, 2], multi_hot=[1, 1, 1]), "must agree on the number of tables"),
    (lambda: TablesConfig(count=3, rows=[1, 2]), r"count 3, lists of \[2\] values; .* must agree on the number of"),
    (lambda: TablesConfig(rows=[1, 2], half_life=[1]), "must agree on the number of tables"),
    (lambda: TablesConfig(rows=10).number(), r"set data\.tables\.count"),
    (lambda: DataConfig(tables=TablesConfig(count=2)).require_source(), "need their rows"),
    (lambda: DataConfig("criteo_npy").require_source(), "set data.path"),
    (lambda: DataConfig("prepared", "x", "y", 0.1), "eval_path y and eval_fraction 0.1 each select .* set all but one"),
    (lambda: DataConfig("prepared", "x", "y", eval_from="2026-11-20"), "eval_path y and eval_from 2026-11-20 each"),
    (
        lambda: DataConfig("prepared", "x", eval_fraction=0.0, eval_from="2026-11-20"),
        "eval_from 2026-11-20 and eval_fraction 0.0 each select",
    ),
    (lambda: DataConfig("criteo_npy", "x", tables=TablesConfig(rows=[1, 2])).require_source(), "criteo_npy has 26"),
    (lambda: Config(data=DataConfig(tables=TablesConfig(count=2, rows=3))), r"set train\.steps"),
    (lambda: ModelConfig(dim=16, bottom_mlp=[32, 8]), r"must end in model\.dim, 16"),
    (lambda: ModelConfig(top_mlp=[1]), "must have a hidden layer"),
    (lambda: TrainConfig(global_batch_size=12).samples_per_rank(5), "12 samples do not divide by 5 ranks; take 15"),
    (lambda: TrainConfig(decay_start_step=5), "decay_start_step: 5, but train.decay_steps 0 is no decay; set decay_"),
    (lambda: TrainConfig(warmup_steps=10, decay_start_step=5, decay_steps=10), "must not be before the end"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_sections_that_contradict_themselves_are_refused(make: Callable[[], Any], message: str) -> None:
    with refuses(message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--embedding.slice_bags=6", "slice_bags: 6 is not a power of two from 4 on"),
        ("--model.dim=18", "dim: 18 is not a multiple of 4 above 0"),
        ("--embedding.cache_fraction=1.5", "cache_fraction: 1.5 is not a number above 0, up to 1"),
        ("--data.eval_fraction=1", "eval_fraction: 1 is not a number from 0 to below 1"),
        ("--data.workers=2147483647", "workers: 2147483647 is not a whole number from 0 to 256"),
        ("--embedding.memory=[]", r"memory: \[\] is not one of 'gpu', 'cached', 'auto'"),
        ("--data.path=days", "data.path: 'days', but data.kind is synthetic; set data.kind"),
        (
            "--data.eval_path=later",
            "eval_path: later, but data.kind is synthetic, and this key is for .* set it to null",
        ),
        ("--data.eval_from=2026-11-20", "eval_from: 2026-11-20, but data.kind is synthetic"),
        ("--data.eval_fraction=0.1", "eval_fraction: 0.1, but data.kind is synthetic, .* set it to null"),
        ("--data.eval_window=day", "eval_window: day, but data.kind is synthetic"),
        ("--data.train_from=9", "train_from: 9, but data.kind is synthetic, .* set it to 0"),
        ("--embedding.memory cached --embedding.backend nccl", "memory: cached, but backend nccl .* take backend pgas"),
        ("--embedding.memory [gpu,auto] --embedding.backend nccl", "memory: .*'auto'"),
    ],
)
def test_options_that_break_a_rule_are_refused(options: str, message: str) -> None:
    with refuses(message):
        _quickstart(*options.split())


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ({"history": 1, "candidate": 1}, r"model\.sequence\.candidate: 1 is the history itself"),
        ({"history": 3}, r"model\.sequence\.history: 3 is no table; the 3 count from 0"),
        ({"history": 1, "candidate": 3}, r"model\.sequence\.candidate: 3 is no table; the 3 count from 0"),
    ],
)
def test_a_history_is_another_table_than_the_candidates(sequence: dict, message: str) -> None:
    data, train = DataConfig(tables=TablesConfig(count=3, rows=3)), TrainConfig(steps=1)
    with refuses(message):
        Config(model=ModelConfig(sequence=SequenceConfig(**sequence)), data=data, train=train)
    Config(model=ModelConfig(sequence=SequenceConfig(history=2)), data=data, train=train)
    files = DataConfig(kind="prepared", path="days")  # of any number of tables, which are known when they are opened
    config = Config(model=ModelConfig(sequence=SequenceConfig(history=40)), data=files, train=train)
    build_model(config.model, config.embedding, [3] * 41, 13, 0)
    with refuses(r"model\.sequence\.history: 40 is no table; the 40 count from 0"):
        build_model(config.model, config.embedding, [3] * 40, 13, 0)
    unused = ModelConfig(sequence=SequenceConfig(candidate=2**31 - 1))  # without a history
    build_model(unused, config.embedding, [3], 13, 0)


def test_ranks_share_the_global_batch() -> None:
    config = TrainConfig(global_batch_size=12, batch_size=7)
    assert [config.samples_per_rank(w) for w in (1, 2, 3, 4)] == [12, 6, 4, 3]
    assert TrainConfig(batch_size=7).samples_per_rank(5) == 7


EXTREMES = ["1e308", "1e39", "1e-39", "5e-324"]  # which 32 bits make infinite, inexact or 0


@pytest.mark.parametrize("key", ["train.lr", "train.eps", "embedding.lr", "embedding.eps", "embedding.wait_timeout_s"])
@pytest.mark.parametrize("value", ["inf", ".inf", "nan", "-inf", "0", "1" + 400 * "0", *EXTREMES])
def test_rates_are_finite_in_32_bits(key: str, value: str) -> None:
    with refuses(key):
        _quickstart(f"--{key}={value}")


NOT_NUMBERS = [".inf", ".nan", "1e999", "[1, 2]", "{a: [{}]}", "'x'", "9" * 5000, "[" * 700]
NOT_NUMBERS += ["!!int ''", "!!bool x", "!!float x", "!!timestamp x", "!!binary x", "!!null x", "!!pairs [a]"]
NOT_NUMBERS += ["&a [*a]", "<<: 3", "{[1]: 2}", '"\\0"', "? a", "2020-01-01"]


@pytest.mark.parametrize("wrong", NOT_NUMBERS)
def test_a_wrong_value_in_a_file_is_one_line(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "config.yaml"
    argv = ["--config", "configs/quickstart.yaml", "--config", str(file)]
    for text in ("train:\n  lr: {}\n", "train: {}\n", "data: {{tables: {{rows: {}}}}}\n", "{}\n"):
        file.write_text(text.format(wrong))
        with refuses():
            configuration(*argv)
    with refuses(r"train\.lr: .* is not a number from"):
        _quickstart("--train.lr", wrong)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "/tmp/run", "run/", "a\x1b[2J", "a\nb"])
def test_a_runs_name_is_one_folder(name: str) -> None:
    with refuses(r"log\.name: .* is not the name of one folder"):
        _quickstart("--log.name", name)


def test_the_wire_has_the_dense_parts_type_unless_it_is_told_another() -> None:
    def resolved(backend: Any, wire_dtype: Any) -> list[str]:
        config = EmbeddingConfig(backend=backend, wire_dtype=wire_dtype)
        return [config.resolved_wire_dtype(precision) for precision in ("fp32", "tf32", "bf16")]

    for backend in ("nccl", "pgas", "fused"):
        assert resolved(backend, "auto") == ["fp32", "fp32", "bf16"]
    assert resolved("torchrec", "auto") == ["fp32"] * 3, "as users run it"
    assert resolved("pgas", "fp32") == ["fp32"] * 3
    assert resolved("torchrec", "fp16") == ["fp16"] * 3


@pytest.mark.parametrize(("text", "name"), [("null", None), ("~", None), ("#1", "#1"), ("7", "7"), ("a #1", "a #1")])
def test_a_name_on_the_command_line_is_not_a_comment_of_yaml(text: str, name: str | None) -> None:
    assert configuration("--config", "quickstart", "--log.name", text).log.name == name


def test_names_of_earlier_versions_are_accepted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("embedding: {put: stores, hosts: 2}\nlog: {replace: true}\n")
    options = ["--config", "quickstart", "--config", str(file), "--checkpoint.resume_changed", "true"]
    config = configuration(*options, "--embedding.between_hosts=puts")
    assert (config.embedding.put, config.embedding.nodes, config.embedding.internode) == ("staged", 2, "puts")
    assert config.log.overwrite
    assert config.checkpoint.allow_config_mismatch
    assert sorted(caplog.messages) == [
        "checkpoint.resume_changed is deprecated; use checkpoint.allow_config_mismatch",
        "embedding.between_hosts is deprecated; use embedding.internode",
        "embedding.hosts is deprecated; use embedding.nodes",
        "embedding.put: stores is deprecated; use staged",
        "log.replace is deprecated; use log.overwrite",
    ]
    configuration("--config", "quickstart", "--embedding.put", "in_place")
    assert caplog.messages[-1] == "embedding.put: in_place is deprecated; use direct"


@pytest.mark.parametrize(("variable", "value", "lines"), [("RANK", "0", 1), ("RANK", "1", 0), (LAUNCHER_PID, "1", 0)])
def test_one_process_warns_of_a_name_of_an_earlier_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, value: str, lines: int
) -> None:
    monkeypatch.setenv(variable, value)
    assert configuration("--config", "quickstart", "--embedding.hosts", "2").embedding.nodes == 2
    assert len(caplog.messages) == lines
