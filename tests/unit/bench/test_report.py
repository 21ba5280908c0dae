from pathlib import Path

import pytest

from dlrm_overlap.bench.report.measured import read_measured, shape
from dlrm_overlap.bench.report.plots import PLOTS
from dlrm_overlap.bench.report.rows import append_rows
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.environment import environment
from tests.conftest import read_rows


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "other.csv"
    output.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"--output: .*other\.csv has other columns"):
        append_rows(output, [{"steps": 4}])
    assert output.read_text() == "a,b\n1,2\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_told_in_one_line() -> None:
    with pytest.raises(InputError, match=r"--output: /dev/full cannot be written \(No space left on device\)"):
        append_rows(Path("/dev/full"), [{"steps": 4}])


def test_rows_are_appended_and_an_empty_file_is_as_good_as_none(tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    output.touch()
    for steps in (4, 5):
        append_rows(output, [{"steps": steps, "median_ms": 0.123456}])
    rows = read_rows(output)
    assert [(row["steps"], row["median_ms"]) for row in rows] == [("4", "0.1235"), ("5", "0.1235")]
    assert all(row["python"] for row in rows)


def test_a_row_begins_with_what_was_measured_and_ends_with_command_and_environment(tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    append_rows(output, [{"kind": "stage", "contender": "pgas", "median_ms": 1.0, "limit_ms": None}])
    header, line = output.read_text().splitlines()
    names = header.split(",")
    assert names[:4] == ["kind", "contender", "median_ms", "limit_ms"]
    assert names[4:] == ["command", *environment()]
    assert {"python", "torch", "fbgemm", "torchrec", "triton", "cpu"} <= {*names}
    assert line.startswith("stage,pgas,1,,"), "what a figure has no number for is empty"


@pytest.mark.parametrize("path", sorted(Path("docs/results").glob("*.csv")), ids=lambda path: path.stem)
def test_published_rows_name_their_hardware_and_versions(path: Path) -> None:
    measured = read_measured(path)
    if measured.kind not in PLOTS:
        assert path.stem.startswith("simulated"), "a figure without a plot"
        return
    assert all(row[name] for row in measured.rows for name in ("gpu", "torch", "nccl", "triton"))
    ranks = {f"{row['world_size']} x" for row in measured.rows if "world_size" in row}
    assert measured.kind in ("weak", "strong") or all(row["gpu"].startswith(tuple(ranks)) for row in measured.rows)


def test_a_shape_names_its_wire_where_it_is_narrow() -> None:
    row = {"world_size": "2", "tables": "52", "rows": "500000", "dim": "128", "multi_hot": "0..16"}
    row |= {"zipf_alpha": "0.0", "global_batch": "65536"}
    assert shape(row | {"wire_dtype": "fp32"}) == shape(row) == "26 x 0.5M x 128\n65536, 0..16"
    assert shape(row | {"wire_dtype": "bf16"}) == "26 x 0.5M x 128\n65536, 0..16, bf16"
