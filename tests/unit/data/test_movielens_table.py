"""The example's table of MovieLens-100k, of ten made-up ratings in both formats."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from examples.movielens import table
from tests.conftest import ROOT

RATINGS = """\
1 10 5 100
2 10 3 100
1 11 2 100
1 12 4 200
2 11 4 200
3 10 1 300
1 13 5 300
2 12 3 400
3 11 5 400
2 13 1 500
""".replace(" ", "\t")
USERS = [("1", "24", "M", "technician", "85711"), ("2", "53", "F", "other", "94043"), ("3", "23", "M", "writer", "0")]
MOVIES = [
    ("10", "Café", "1995", ["Animation", "Children's"]),
    ("11", "Gold", "1996", ["Action"]),
    ("12", "none", "", ["unknown"]),
    ("13", "Night", "1940", ["Film-Noir", "Sci-Fi"]),
]


def _write_grouplens(folder: Path) -> None:
    (folder / "u.data").write_text(RATINGS)
    (folder / "u.user").write_text("".join(f"{'|'.join(user)}\n" for user in USERS))
    lines = []
    for movie, title, year, genres in MOVIES:
        flags = [str(int(name in genres)) for name in table.GENRES]
        date = f"01-Jan-{year}" if year else ""
        lines.append("|".join([movie, f"{title} ({year})", date, "", f"http://a.org/{title}", *flags]))
    (folder / "u.item").write_bytes("\n".join([*lines, ""]).encode("latin-1"))


def _write_recbole(folder: Path) -> None:
    (folder / "ml-100k.inter").write_text(f"user_id:token\titem_id:token\trating:float\ttimestamp:float\n{RATINGS}")
    head = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    (folder / "ml-100k.user").write_text(head + "".join("\t".join(user) + "\n" for user in USERS))
    head = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    lines = ["\t".join([movie, title, year or "unknown", " ".join(genres)]) for movie, title, year, genres in MOVIES]
    (folder / "ml-100k.item").write_text(head + "\n".join(lines))


@pytest.mark.parametrize("write", [_write_grouplens, _write_recbole])
def test_a_row_knows_what_was_rated_earlier(write, tmp_path: Path) -> None:
    write(tmp_path)
    found = table.make_table(table.read_files(tmp_path))
    assert found.schema.names == list(table.COLUMNS)
    rows = {(row["user"], row["movie"]): row for row in found.to_pylist()}
    assert [row["time"].timestamp() for row in rows.values()] == [100, 100, 100, 200, 200, 300, 300, 400, 400, 500]
    assert rows[1, 13] | {"time": 300} == {
        **{"time": 300, "liked": True, "user": 1, "movie": 13, "age": 24, "gender": "M", "occupation": "technician"},
        **{"genres": ["Film-Noir", "Sci-Fi"], "year": 1940, "history": ["+12", "-11", "+10"]},
        **{"user_count": 3, "user_mean": pytest.approx(0.5 / 8), "movie_count": 0, "movie_mean": 0.0},
    }
    assert rows[2, 13]["history"] == ["-12", "+11", "-10"]
    assert rows[3, 10]["history"] == []
    # Two earlier ratings of 5 and 3 stars; none of those of the same second.
    assert (rows[3, 10]["movie_count"], rows[3, 10]["movie_mean"]) == (2, pytest.approx(1 / 7))
    assert [rows[key]["movie_count"] for key in ((1, 10), (2, 10), (1, 11))] == [0, 0, 0]
    assert rows[2, 12]["year"] is None
    assert [row["liked"] for row in rows.values()] == [True, False, False, True, True, True, False, False, True, False]


def test_a_history_has_the_newest_movies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "NEWEST", 2)
    _write_grouplens(tmp_path)
    rows = table.make_table(table.read_files(tmp_path)).to_pylist()
    assert [row["history"] for row in rows if row["user"] == 1] == [[], [], ["-11", "+10"], ["+12", "-11"]]


def test_the_files_are_split_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SPLIT", datetime.fromtimestamp(400, UTC))
    _write_recbole(tmp_path)
    table.run(tmp_path, tmp_path / "out")
    whole, training, late = (
        table.parquet.read_table(tmp_path / "out" / f"{name}.parquet") for name in ("ratings", "training", "last_weeks")
    )
    assert training.equals(whole.slice(0, 7))
    assert late.equals(whole.slice(7).drop_columns(["liked"]))


def test_a_folder_without_the_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither u\.data nor ml-100k\.inter"):
        table.read_files(tmp_path)


def test_the_configuration_and_the_schema_fit_the_table() -> None:
    config = yaml.safe_load((Path("examples/movielens") / "dlrm.yaml").read_text())
    assert str(config["data"]["eval_from"]) == f"{table.SPLIT:%Y-%m-%d}"
    assert config["model"]["sequence"]["positions"] == table.NEWEST
    schema = yaml.safe_load((Path("examples/movielens") / "schema.yaml").read_text())
    assert list(schema["categorical"]).index("history") == 6
    assert list(schema["categorical"]).index("movie") == 1
    read = [schema["time"], *schema["labels"], *schema["dense"], *schema["categorical"]]
    assert sorted(read) == sorted(table.COLUMNS)


def test_a_folder_without_the_data_set_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.movielens.table", str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        f"error: {tmp_path} has neither u.data nor ml-100k.inter; give the folder of the unpacked data set"
    )
    assert "Traceback" not in done.stderr


def test_a_comparison_without_the_table_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: the extra `examples`")
    from examples.movielens import compare

    with pytest.raises(SystemExit, match="2"):
        compare.main([str(tmp_path)])
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path}/ratings.parquet: cannot be read; make the table and samples in {tmp_path}" in line
