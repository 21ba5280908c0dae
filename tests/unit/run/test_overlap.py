"""What `train.overlap` stands for in a run."""

from dataclasses import replace
from typing import Any

import pytest

from dlrm_overlap.config import Config
from dlrm_overlap.model import build_model
from dlrm_overlap.overlap import Overlap, beside, resolve_overlap
