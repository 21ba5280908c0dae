"""Makes a table of MovieLens-100k: a row per rating in order of time, with what was known before the rating.

    python -m examples.movielens.table ml-100k movielens

The first folder has GroupLens' files (u.data, u.user, u.item) or RecBole's (ml-100k.inter, .user, .item). The second
gets ratings.parquet with all rows, training.parquet with those before `SPLIT`, and last_weeks.parquet with the others,
without labels. docs/movielens.md describes the columns.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

SPLIT = datetime(1998, 3, 23, tzinfo=UTC)  # a Monday; 17% of the ratings are later
LIKED = 4  # stars
NEWEST = 50  # movies of a history
PRIOR_MEAN, PRIOR_COUNT = 3.5, 5  # a mean rating begins as if there were five ratings of 3.5 stars

GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)  # the order of the last 19 fields of u.item
COLUMNS: dict[str, pa.DataType] = {
    **{"time": pa.timestamp("s", tz="UTC"), "liked": pa.bool_(), "user": pa.int32(), "movie": pa.int32()},
    **{"age": pa.int32(), "gender": pa.string(), "occupation": pa.string()},
    **{"genres": pa.list_(pa.string()), "year": pa.int32(), "history": pa.list_(pa.string())},
    **{"user_count": pa.int32(), "user_mean": pa.float32(), "movie_count": pa.int32(), "movie_mean": pa.float32()},
}


class Rating(NamedTuple):
    time: int
    """Unix seconds"""
    user: int
    movie: int
    stars: int
    """1 to 5"""


class Files(NamedTuple):
    """The content of a data set's files."""

    ratings: list[Rating]
    users: dict[int, dict[str, Any]]
    """age, gender and occupation of each user"""
    movies: dict[int, dict[str, Any]]
    """genres and year of release, None if unknown, of each movie"""


@dataclass
class Past:
    """The ratings so far of a user or of a movie."""

    count: int = 0
    stars: int = 0
    history: list[str] = field(default_factory=list)
    """of a user: movies, oldest first, each after a + if the user liked it, else after a -"""

    def add(self, rating: Rating) -> None:
        self.count += 1
        self.stars += rating.stars
        self.history.append(f"{'+' if rating.stars >= LIKED else '-'}{rating.movie}")

    def mean(self) -> float:
        """Return the mean rating minus `PRIOR_MEAN`."""
        return (self.stars - PRIOR_MEAN * self.count) / (self.count + PRIOR_COUNT)


def read_files(folder: Path) -> Files:
    """Read GroupLens' or RecBole's files; raises a FileNotFoundError if neither are there."""
    if (folder / "u.data").exists():
        return _read_grouplens(folder)
    if (folder / "ml-100k.inter").exists():
        return _read_recbole(folder)
    raise FileNotFoundError(f"{folder} has neither u.data nor ml-100k.inter; give the folder of the unpacked data set")


def _read_grouplens(folder: Path) -> Files:
    ratings = [
        Rating(int(time), int(user), int(movie), int(stars))
        for user, movie, stars, time in _lines(folder / "u.data", "\t")
    ]
    users = {int(user): _user(*fields[:3]) for user, *fields in _lines(folder / "u.user", "|")}
    movies = {
        int(movie): _movie(date[-4:], (name for name, flag in zip(GENRES, flags, strict=True) if flag == "1"))
        for movie, _, date, _, _, *flags in _lines(folder / "u.item", "|")
    }
    return Files(ratings, users, movies)


def _read_recbole(folder: Path) -> Files:
    inter, user_lines, item = (list(_lines(folder / f"ml-100k.{name}", "\t"))[1:] for name in ("inter", "user", "item"))
    ratings = [Rating(int(time), int(user), int(movie), int(stars)) for user, movie, stars, time in inter]
    users = {int(user): _user(*fields[:3]) for user, *fields in user_lines}
    movies = {int(movie): _movie(year, genres.split()) for movie, _, year, genres in item}
    return Files(ratings, users, movies)


def _lines(path: Path, separator: str) -> Iterator[list[str]]:
    for line in path.read_bytes().decode("latin-1").splitlines():
        if line:
            yield line.split(separator)


def _user(age: str, gender: str, occupation: str) -> dict[str, Any]:
    return {"age": int(age), "gender": gender, "occupation": occupation}


def _movie(year: str, genres: Iterable[str]) -> dict[str, Any]:
    return {"genres": list(genres), "year": int(year) if year.isdigit() else None}


def make_table(files: Files) -> pa.Table:
    """Return a row per rating in order of time, with `COLUMNS`; what a row tells of the past is strictly earlier."""
    users: defaultdict[int, Past] = defaultdict(Past)
    movies: defaultdict[int, Past] = defaultdict(Past)
    rows = []
    # Many ratings have the same second. None of them is in the past of another.
    for _, same_time in groupby(sorted(files.ratings), itemgetter(0)):
        batch = list(same_time)
        rows += [_row(rating, files, users[rating.user], movies[rating.movie]) for rating in batch]
        for rating in batch:
            users[rating.user].add(rating)
            movies[rating.movie].add(rating)
    return pa.Table.from_pylist(rows, schema=pa.schema(list(COLUMNS.items())))


def _row(rating: Rating, files: Files, user: Past, movie: Past) -> dict[str, Any]:
    return {
        **{"time": rating.time, "liked": rating.stars >= LIKED, "user": rating.user, "movie": rating.movie},
        **files.users[rating.user],
        **files.movies[rating.movie],
        "history": user.history[: -NEWEST - 1 : -1],
        **{"user_count": user.count, "user_mean": user.mean()},
        **{"movie_count": movie.count, "movie_mean": movie.mean()},
    }


def run(source: Path, folder: Path) -> None:
    table = make_table(read_files(source))
    early = int(np.searchsorted(table["time"].cast(pa.int64()).to_numpy(), SPLIT.timestamp()))
    tables = {
        "ratings": table,
        "training": table.slice(0, early),
        "last_weeks": table.slice(early).drop_columns(["liked"]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        parquet.write_table(rows, folder / f"{name}.parquet")
        print(f"{folder / name}.parquet: {len(rows)} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a table of MovieLens-100k.")
    parser.add_argument("source", type=Path, help="folder of GroupLens' or RecBole's files")
    parser.add_argument("folder", type=Path, help="folder to write the table to")
    values = parser.parse_args()
    try:
        run(values.source, values.folder)
    except OSError as error:
        parser.error(str(error))
