"""Times of samples: what cells mean, splits by time, and windows."""

import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dlrm_overlap.cli import main
from dlrm_overlap.config import Config, DataConfig, InputError, TablesConfig
from dlrm_overlap.data import prepare as data_prepare
from dlrm_overlap.data.columns import Column, Missing
from dlrm_overlap.data.days import Days
from dlrm_overlap.data.loader import open_datasets, warnings_of_time
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.times import Window, text_of, time_of, windows
from dlrm_overlap.launching.parsing import parse_config
from dlrm_overlap.train.evaluation import for_evaluation
from tests.conftest import configuration, refuses

FIRST = datetime(2026, 11, 18, 6, tzinfo=UTC)
SCHEMA = "time: at\nlabels: {click: {}}\ncategorical: {user: {type: int, rows: 50}}\n"
HOURS = [FIRST + timedelta(hours=i) for i in range(60)]  # 18 on the first day, 24 on the second, 18 on the third


def prepare(folder: Path, at: Any, schema: str = SCHEMA, name: str = "days") -> Path:
    table = pa.table({"click": [i % 2 for i in range(len(at))], "user": range(len(at)), "at": at})
    parquet.write_table(table, folder / f"{name}.parquet")
    (folder / "schema.yaml").write_text(schema)
    options = [str(folder / f"{name}.parquet"), str(folder / name), "--schema", str(folder / "schema.yaml")]
    assert main(["prepare", "table", *options]) == 0
    return folder / name


def opened(folder: Path, **options: Any) -> tuple[Days, Days]:
    found = open_datasets(DataConfig(kind="prepared", path=str(folder), **options))
    train, held_out = found
    assert isinstance(train, Days)
    assert isinstance(held_out, Days)
    return train, held_out


def seconds(time: datetime) -> int:
    return round(time.timestamp())


@pytest.mark.parametrize(
    ("cells", "unit"),
    [
        (pa.array(HOURS, pa.timestamp("us", "UTC")), "s"),
        (pa.array(HOURS, pa.timestamp("ns", "Europe/Berlin")), "s"),
        (pa.array([time.replace(tzinfo=None) for time in HOURS], pa.timestamp("ms")), "s"),
        ([time.isoformat() for time in HOURS], "s"),
        ([f"{time:%Y-%m-%d %H:%M:%S}" for time in HOURS], "s"),
        ([f"{time + timedelta(hours=2):%Y-%m-%dT%H:%M:%S}+02:00" for time in HOURS], "s"),
        ([seconds(time) for time in HOURS], "s"),
        ([float(seconds(time)) for time in HOURS], "s"),
        ([str(seconds(time)) for time in HOURS], "s"),
        ([1000 * seconds(time) for time in HOURS], "ms"),
        ([1000**3 * seconds(time) for time in HOURS], "ns"),
    ],
)
def test_times_are_read_from_every_kind_of_column(tmp_path: Path, cells: Any, unit: str) -> None:
    folder = prepare(tmp_path, cells, f"time_unit: {unit}\n{SCHEMA}")
    found = Prepared(folder, TablesConfig()).times(0, len(HOURS))
    assert found is not None
    assert found.tolist() == [10**6 * seconds(time) for time in HOURS]


def test_days_are_midnights_and_parts_of_seconds_are_kept(tmp_path: Path) -> None:
    folder = prepare(tmp_path, pa.array([date(2026, 11, 20), date(2026, 11, 21)]))
    found = Prepared(folder, TablesConfig()).times(0, 2)
    assert found is not None
    assert [text_of(each) for each in found] == ["2026-11-20", "2026-11-21"]
    folder = prepare(tmp_path, [0.25, 1.5], name="parts")
    found = Prepared(folder, TablesConfig()).times(0, 2)
    assert found is not None
    assert found.tolist() == [250_000, 1_500_000]


@pytest.mark.parametrize("cell", ["yesterday", "", None, "1e30", str(10**15), "20261120T"])
def test_a_cell_that_is_no_time_is_named(tmp_path: Path, cell: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table({"click": [0, 1], "user": [1, 2], "at": ["2026-11-20", cell]})
    parquet.write_table(table, tmp_path / "bad.parquet")
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    options = [str(tmp_path / "bad.parquet"), str(tmp_path / "days"), "--schema", str(tmp_path / "schema.yaml")]
    assert main(["prepare", "table", *options]) == 2
    rule = r"row 2, column at: .* is not a time in the years 1 to 9999; numbers are Unix times in time_unit, which is s"
    assert re.search(rule, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("unit", "cell"),
    [
        *[("s", cell) for cell in (20261120, 20261120.0, "20261120", "20991231", np.uint64(2**64 - 1))],
        ("ns", np.uint64(2**64 - 1)),
        ("ns", str(2**64 - 1)),
        ("us", np.uint64(2**63)),
    ],
)
def test_dates_and_sentinels_are_no_unix_times(unit: Any, cell: Any) -> None:
    block = pa.record_batch({"at": pa.array([cell])})
    rule = ", and not dates such as 20261120: write 2026-11-20" * (unit == "s")
    with refuses(f"row 1, column at: .* is not a time in the years 1 to 9999; .* which is {unit}{rule}$"):
        Column(block, "at", 1, Missing([])).times(unit)


@pytest.mark.parametrize(
    ("unit", "cells"),
    [
        ("s", [20261320, 20261232, 20260020, 20261100, 18991231, 21000101, 202611200, 1763618400]),
        ("s", [20261120.5, 0.5]),
        ("ms", [20261120]),
    ],
)
def test_other_numbers_are_unix_times(unit: Any, cells: Any) -> None:
    expected = [round(cell * {"s": 10**6, "ms": 10**3}[unit]) for cell in cells]
    for each in (cells, [str(cell) for cell in cells]):
        block = pa.record_batch({"at": pa.array(each)})
        assert Column(block, "at", 1, Missing([])).times(unit).tolist() == expected


def test_a_split_by_time(tmp_path: Path) -> None:
    folder = prepare(tmp_path, HOURS)
    train, held_out = opened(folder, eval_from="2026-11-20")
    assert (train.num_samples, held_out.num_samples) == (42, 18)
    assert text_of(held_out.times(0, 1)[0]) == "2026-11-20"  # type: ignore[index]
    train, held_out = opened(folder, eval_from="2026-11-20T03:00+02:00", train_from="2026-11-19")
    assert (train.num_samples, held_out.num_samples) == (43 - 18, 17)
    assert train.times(0, 1).tolist() == [time_of("2026-11-19")]  # type: ignore[union-attr]
    train, held_out = opened(folder, eval_fraction=0.1, train_from=50)
    assert (train.num_samples, held_out.num_samples) == (4, 6)
    assert warnings_of_time(train, held_out) == []
    assert (
        train.read(0, 1).sparse.values().tolist()
        == Prepared(folder, TablesConfig()).read(50, 1).sparse.values().tolist()
    )


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            {"eval_from": "2026-11-22"},
            "eval_from: 2026-11-22 holds out none of 60 samples, which end at 2026-11-20 17:",
        ),
        (
            {"eval_from": "2026-11-17"},
            "eval_from: 2026-11-17 holds out all of 60 samples, so none is left to train on; take a later time, or, to "
            "evaluate all of them, give them as data.eval_path",
        ),
        ({"train_from": 45}, "train_from: 45 leaves none of 45 samples to train on; take an earlier one"),
        ({"train_from": "2027-01-01"}, "train_from: 2027-01-01 leaves none of 45 samples"),
    ],
)
def test_a_split_that_leaves_nothing_is_refused(tmp_path: Path, options: dict[str, Any], rule: str) -> None:
    with refuses(re.escape(f"data.{rule}")):
        opened(prepare(tmp_path, HOURS), **options)


@pytest.mark.parametrize(("option", "samples"), [("eval_from=2026-11-19", 42), ("eval_fraction=0.9", 54)])
def test_evaluation_may_begin_before_training_did(tmp_path: Path, option: str, samples: int) -> None:
    options = ["--data.kind", "prepared", "--data.path", str(prepare(tmp_path, HOURS)), f"--data.{option}"]
    config = for_evaluation(configuration(*options, "--data.train_from", "2026-11-20"))
    assert open_datasets(config.data)[1].num_samples == samples


@pytest.mark.parametrize("options", [{"eval_from": "2026-11-20"}, {"train_from": "2026-11-20"}, {"eval_window": "day"}])
def test_samples_without_times_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    folder = prepare(tmp_path, HOURS, SCHEMA.replace("time: at\n", ""))
    assert Prepared(folder, TablesConfig()).times(0, 1) is None
    (key,) = options
    with refuses(f"data.{key}: .*, but the samples have no times; name their column as `time`"):
        opened(folder, **options)


def test_samples_that_are_not_in_order_are_said(tmp_path: Path) -> None:
    swapped = [*HOURS[:10], HOURS[50], *HOURS[10:50], *HOURS[51:]]
    train, held_out = opened(prepare(tmp_path, swapped))
    first, second = warnings_of_time(train, held_out)
    assert first.startswith(f"40 samples of {tmp_path}/days are older than one before them")
    assert second.startswith("evaluation begins at 2026-11-20 02:00:00, before training ends at 2026-11-20 08:00:00")
    train, _ = opened(tmp_path / "days", eval_from="2026-11-20 08:00")
    assert train.num_samples == 10, "up to the first sample of that time"


def test_samples_are_compared_with_all_earlier_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest sample is in the first of four blocks that are written."""
    prepare(tmp_path, [*HOURS[:10], HOURS[50], *HOURS[10:50], *HOURS[51:]])
    monkeypatch.setattr(data_prepare, "_BATCH", 16)
    config = DataConfig(kind="prepared", path=str(tmp_path / "days"), workers=0)
    assert data_prepare.prepare_samples(config, tmp_path / "packed", None).unordered == 40


def test_an_earlier_table_to_evaluate_on_is_said(tmp_path: Path) -> None:
    first, last = prepare(tmp_path, HOURS[:20], name="first"), prepare(tmp_path, HOURS[20:], name="last")
    assert warnings_of_time(*opened(first, eval_path=str(last))) == []
    (found,) = warnings_of_time(*opened(last, eval_path=str(first)))
    assert found.startswith("evaluation begins at 2026-11-18 06:00:00, before training ends at 2026-11-20 17:00:00")


def test_packed_samples_keep_their_times(tmp_path: Path) -> None:
    folder = prepare(tmp_path, HOURS)
    options = ["--data.kind", "prepared", "--data.path", str(folder), "--data.eval_from", "2026-11-20"]
    assert main(["prepare", "samples", str(tmp_path / "packed"), *options, "--data.workers", "0"]) == 0
    packed = Prepared(tmp_path / "packed", TablesConfig())
    assert packed.times(0, 60).tolist() == Prepared(folder, TablesConfig()).times(0, 60).tolist()  # type: ignore[union-attr]
    assert packed.held_out == 18


def test_windows_begin_at_whole_hours_days_and_mondays() -> None:
    times = np.array(
        [time_of(text) for text in ("2026-11-23 23:59", "2026-11-22 00:10", "2026-11-23", "1969-12-31 23:00")]
    )
    found = {
        kind: {text_of(begin, kind): part.tolist() for begin, part in windows(times, kind)} for kind in get_args(Window)
    }
    assert found["day"] == {"1969-12-31": [3], "2026-11-22": [1], "2026-11-23": [0, 2]}
    assert found["week"] == {"1969-12-29": [3], "2026-11-16": [1], "2026-11-23": [0, 2]}
    assert list(found["hour"])[-2:] == ["2026-11-23 00:00:00", "2026-11-23 23:00:00"]


def test_times_in_a_configuration_file_and_in_options(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data: {kind: prepared, path: x, eval_from: 2026-11-20, train_from: 2026-11-19 06:00:00}\n"
    )
    kind = ["--data.kind", "prepared", "--data.path", "x"]
    config, _ = parse_config(Config, "x", "", ["--config", str(tmp_path / "run.yaml")])
    assert (config.data.eval_from, config.data.train_from) == ("2026-11-20", "2026-11-19T06:00:00")
    config, _ = parse_config(Config, "x", "", [*kind, "--data.eval_from", "2026-11-20", "--data.train_from", "7"])
    assert (config.data.eval_from, config.data.train_from) == ("2026-11-20", 7)
    with pytest.raises(InputError, match=r"data\.eval_from: 20 Nov is not a time such as 2026-11-20"):
        parse_config(Config, "x", "", ["--data.eval_from", "20 Nov"])
