"""Measures `predict` and the web server of docs/serving.md; writes docs/results/serving/speed.csv.

    pip install fastapi uvicorn
    python -m tests.serving                                        # some three minutes on two cores

The model is that of examples/own_data.py, whose table has 40 columns. The clients run on the same machine.
"""

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyarrow import parquet

from dlrm_overlap.bench.rows import append_rows, print_table
from dlrm_overlap.launching.launcher import free_port
from examples.own_data import make_table, run
from tests.conftest import ROOT

PAGE, OUTPUT = ROOT / "docs" / "serving.md", ROOT / "docs" / "results" / "serving" / "speed.csv"
TABLE_ROWS, REQUEST_ROWS, REQUESTS = 400_000, (1, 32, 1024), 500


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=style).parse_args()
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        sys.exit(f"tests.serving: {' and '.join(missing)} must be installed; run pip install fastapi uvicorn")
    with tempfile.TemporaryDirectory() as folder:
        measured = [*measure(Path(folder))]
    OUTPUT.unlink(missing_ok=True)
    append_rows(OUTPUT, measured, "python -m tests.serving")
    print_table(measured, list(measured[0]))


def measure(folder: Path) -> Iterator[dict[str, Any]]:
    """Train a model, and yield the rows of the file."""
    if code := run(folder, 20_000, ["--log.name", "clicks"]):
        raise SystemExit(code)
    checkpoint, table = folder / "runs" / "clicks", folder / "many.parquet"
    parquet.write_table(make_table(TABLE_ROWS), table)
    for processes in (1, 2):
        options = ["--checkpoint", checkpoint, "--output", folder / "scores.parquet", "--nproc", str(processes)]
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "dlrm_overlap", "predict", table, *options], check=True)
        seconds = time.perf_counter() - started
        yield _row(f"predict --nproc {processes}", TABLE_ROWS, [seconds])
    (folder / "server.py").write_text(server_code())
    columns = parquet.read_table(table).drop_columns(["click", "purchase", "at"])
    with serving(folder, checkpoint) as connection:
        for rows in REQUEST_ROWS:
            body = json.dumps(columns.slice(0, rows).to_pydict())
            times = [_request(connection, body, rows) for _ in range(REQUESTS + 50)][50:]
            yield _row("server", rows, times)


def server_code() -> str:
    """Return the server of docs/serving.md."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "FastAPI" in block)
    return code


@contextmanager
def serving(folder: Path, checkpoint: Path) -> Iterator[http.client.HTTPConnection]:
    """Yield a connection to the server in `folder`/server.py."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "server:app", "--port", str(port), "--log-level", "warning"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"CHECKPOINT": str(checkpoint), "PYTHONPATH": paths}
    with subprocess.Popen(command, cwd=folder, env=environ) as server:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            while server.poll() is None:
                try:
                    connection.connect()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.1)
            yield connection
        finally:
            server.terminate()


def _request(connection: http.client.HTTPConnection, body: str, rows: int) -> float:
    """Return the seconds until the answer."""
    started = time.perf_counter()
    connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    seconds = time.perf_counter() - started
    if response.status != http.HTTPStatus.OK or len(json.loads(answer)["click"]) != rows:
        raise SystemExit(f"the server's answer: {response.status}, {answer[:300]!r}")
    return seconds


def _row(what: str, rows: int, times: list[float]) -> dict[str, Any]:
    p99 = statistics.quantiles(times, n=100)[98] if len(times) > 1 else times[0]
    median = statistics.median(times)
    return {"what": what, "rows": rows, "median_ms": 1e3 * median, "p99_ms": 1e3 * p99, "rows_per_s": rows / median}


if __name__ == "__main__":
    main()
