import tests.distributed.test_foreign as t, tempfile
from pathlib import Path
from tests.distributed.workers import run_ranks, _run_each
def test_one(tmp_path):
    run_ranks(_run_each, 2, tmp_path, t._compare, *"accumulated scaled".split())
