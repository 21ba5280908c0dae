"""`data.bad_rows: skip`: bad rows are left out, and counted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_overlap.cli import main
from dlrm_overlap.config import InputError, TablesConfig
from dlrm_overlap.data.batch import Batch
from tests.unit.data.criteo_lines import criteo_text, prepare_criteo, random_lines

ROWS = 50


def _same(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in (
            (one.labels, other.labels),
            (one.dense, other.dense),
            (one.sparse.values(), other.sparse.values()),
            (one.sparse.lengths(), other.sparse.lengths()),
        )
    )


BROKEN = [
    b"",
    b"0\t1",
    b"2" + b"\t" * 39,
    b"x" + b"\t" * 39,
    b"1" + b"\t" * 40,
    b"1\tx" + b"\t" * 38,
    b"1" + b"\t" * 39 + b"123456789",
    b"\0\xff\r",
]


@pytest.mark.parametrize("block_bytes", [300, 1 << 20])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_broken_lines_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, block_bytes: int, end: bytes
) -> None:
    good = random_lines(2 * len(BROKEN))
    mixed = [line for i, each in enumerate(BROKEN) for line in (good[2 * i], each, good[2 * i + 1])] + BROKEN[1:]
    (tmp_path / "good.tsv").write_bytes(b"\n".join(good))
    (tmp_path / "mixed.tsv").write_bytes(b"\n".join(mixed) + end)
    (tmp_path / "none.tsv").write_bytes(b"\n".join(BROKEN))
    tables = TablesConfig(rows=ROWS)
    data = criteo_text(tmp_path / "mixed.tsv", tables, "skip", block_bytes)
    assert data.num_samples == len(good)
    assert f"{len(mixed) - len(good)} of {len(mixed)} rows are no samples, and left out" in caplog.text
    assert _same(data.read(0, len(good)), criteo_text(tmp_path / "good.tsv", tables).read(0, len(good)))
    with pytest.raises(InputError, match=r"mixed\.tsv, line 2"):
        criteo_text(tmp_path / "mixed.tsv", tables, block_bytes=block_bytes)
    with pytest.raises(InputError, match=r"none\.tsv: 8 of 8 rows are no samples; correct"):
        criteo_text(tmp_path / "none.tsv", tables, "skip", block_bytes)
    modes: list[dict[str, Any]] = [{"rows": 13}, {"min_count": 2}]
    for mode in modes:
        made = [tmp_path / f"{name}_{'_'.join(mode)}" for name in ("good", "mixed")]
        prepare_criteo(tmp_path / "good.tsv", made[0], **mode)
        meta = prepare_criteo(tmp_path / "mixed.tsv", made[1], **mode, skip_bad_rows=True, block_bytes=block_bytes)
        assert (meta.days[0].samples, meta.days[0].skipped) == (len(good), len(mixed) - len(good))
        for file in made[0].glob("*.npy"):
            assert file.read_bytes() == (made[1] / file.name).read_bytes()


def test_prepare_tells_how_many_there_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "days.tsv").write_bytes(b"\n".join([*random_lines(3), BROKEN[1]]))
    command = ["prepare", "criteo", str(tmp_path / "days.tsv"), str(tmp_path / "out"), "--rows", "13"]
    assert main([*command, "--bad_rows", "skip"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 3 samples, 1 row left out, 13 to 13 rows a table\n"
