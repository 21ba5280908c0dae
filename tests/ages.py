"""How many commits have touched what a row of `docs/results` measures, since the commit that it names."""

import subprocess
from functools import cache

from tests.simulated_pages import FOLDER, Lines, read

_STAGE = ("kernels/forward", "dlrm_overlap/embedding", "dlrm_overlap/comm")
_STEP = ("kernels", "dlrm_overlap/comm", "dlrm_overlap/dense", "dlrm_overlap/embedding", "dlrm_overlap/train")
MEASURED: dict[str, tuple[str, ...]] = {
    "backward": ("kernels/backward", *_STAGE[1:]),
    "collectives": ("kernels/peer_copy.py", "dlrm_overlap/bench/harness/peer_memory.py", "dlrm_overlap/comm"),
    "gemm": ("kernels/gemm", "dlrm_overlap/dense/gemm", "dlrm_overlap/comm"),
    "input": ("data/",),
    "row_bytes": ("tests/distributed/test_partial_sums.py",),  # which holds them
    "simulated": ("dlrm_overlap/simulate",),
    **dict.fromkeys(("cached", "clock", "cut", "parts", "skewed"), _STEP),  # calibration
    **dict.fromkeys(
        ("grid", "occupancy", "puts", "schedule", "slice", "stage", "strong", "sweep", "weak"),
        _STAGE,
    ),
    **dict.fromkeys(
        ("ablation", "job", "quickstart", "step", "timeline", "wide"),
        _STEP,
    ),
}
"""Begin of a file's name -> what its rows measure; renames count as touches."""


EARLIER = ", earlier code"
"""marks rows, below a table, whose measured files have changed since"""


def _git(*words: str) -> str:
    done = subprocess.run(["git", "--no-optional-locks", *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def missing_history() -> str:
    """Return why ages cannot be computed here; empty if they can."""
    if not _git("rev-parse", "HEAD"):
        return "no repository"
    return "a shallow clone" if _git("rev-parse", "--is-shallow-repository").strip() == "true" else ""


@cache
def _touched() -> dict[str, list[str]]:
    """Return commit -> the paths that it touches."""
    entries = _git("log", "--format=%x00%H", "--name-only").split("\0")[1:]
    return {lines[0]: lines[1:] for lines in (entry.split() for entry in entries)}


@cache
def _since(commit: str) -> list[str] | None:
    """Return the commits after `commit`; None if history does not have it."""
    return _git("rev-list", f"{commit}..HEAD").split() if _git("cat-file", "-t", commit) else None


def commits_of(name: str) -> list[str]:
    """Return the commits that the rows of a file name, without their marks."""
    return sorted({row.get("commit", "").removesuffix("-dirty") for row in read(name)} - {""})


def _measured(name: str) -> tuple[str, ...]:
    found = [paths for begin, paths in MEASURED.items() if name.rpartition("/")[2].startswith(begin)]
    assert found, f"{name}: tests.ages has no line that says which files it measures"
    return found[0]


def age(name: str) -> int | None:
    """Return how many commits have touched what the rows of a file measure; None if they name no commit."""
    measured = _measured(name)
    counts = []
    for commit in commits_of(name):
        since = _since(commit)
        if since is None:
            return None
        counts.append(sum(any(path.startswith(measured) for path in _touched().get(each, [])) for each in since))
    return max(counts, default=None)


def table_of_ages() -> Lines:
    """Return a line for the files of rows of the same commit and GPUs that measure the same."""
    yield ["rows", "GPUs", "commit", "date", "age in commits"]
    lines: dict[tuple[str, ...], list[str]] = {}
    for path in sorted([*FOLDER.glob("*.csv"), *FOLDER.glob("*_h?00/*.csv")]):
        name = path.relative_to(FOLDER).as_posix()
        rows, commits, found = read(name), commits_of(name), age(name)
        dates = {row.get("date") or "" for row in rows}
        dates |= {_git("show", "-s", "--format=%cs", each).strip() for each in commits}
        gpus = rows[0].get("gpu") or ("simulated" if path.stem.startswith("simulated") else "-")
        about = gpus, ", ".join(commits) or "-", max(dates) or "-", "unknown" if found is None else str(found)
        lines.setdefault((*_measured(name), *about), []).append(f"[{name.removesuffix('.csv')}](results/{name})")
    yield from ([", ".join(links), *key[-4:]] for key, links in lines.items())
