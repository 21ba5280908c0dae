"""`prepare --bad_rows skip`: bad rows are left out, and counted."""

from pathlib import Path
from typing import Any

import pytest

from dlrm_overlap.cli import main
from dlrm_overlap.config import InputError
from tests.unit.data.criteo_lines import prepare_criteo, random_lines

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
def test_broken_lines_are_left_out(tmp_path: Path, block_bytes: int, end: bytes) -> None:
    good = random_lines(2 * len(BROKEN))
    mixed = [line for i, each in enumerate(BROKEN) for line in (good[2 * i], each, good[2 * i + 1])] + BROKEN[1:]
    (tmp_path / "good.tsv").write_bytes(b"\n".join(good))
    (tmp_path / "mixed.tsv").write_bytes(b"\n".join(mixed) + end)
    (tmp_path / "none.tsv").write_bytes(b"\n".join(BROKEN))
    with pytest.raises(InputError, match=r"mixed\.tsv, line 2"):
        prepare_criteo(tmp_path / "mixed.tsv", tmp_path / "bad", rows=50, block_bytes=block_bytes)
    with pytest.raises(InputError, match=r"none\.tsv: 8 of 8 rows are no samples; correct"):
        prepare_criteo(tmp_path / "none.tsv", tmp_path / "none", 50, skip_bad_rows=True, block_bytes=block_bytes)
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
