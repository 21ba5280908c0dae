"""Whether a run can go on from a checkpoint, by its manifest; errors name all that differs."""

import logging
from pathlib import Path
from typing import Any

from dlrm_overlap.checkpoint.storage.manifest import Manifest
from dlrm_overlap.config import InputError

log = logging.getLogger("dlrm_overlap")


def differences(manifest: Manifest, shape: dict[str, Any]) -> str:
    """Return each field of `shape` that differs in a checkpoint, in words; empty if none does."""
    had = manifest.shape
    return "; ".join(
        f"{key} {_short(had.get(key))}, this run has {_short(has)}" for key, has in shape.items() if had.get(key) != has
    )


def check_fits(
    path: Path, manifest: Manifest, shape: dict[str, Any], settings: dict[str, Any], changed: bool = False
) -> None:
    """Check that a run of `shape` (`checkpoint_shape`) and `settings` (`trained_with`) can go on from `path`.

    Raises:
        InputError: with every difference, if the checkpoint is of another model, or, unless `changed` is set, was
            trained with other settings.
    """
    if parted := differences(manifest, shape):
        raise InputError(
            f"checkpoint.resume: {path} has {parted}; use the same, or start anew with --checkpoint.resume never "
            f"and another --log.name"
        )
    before = manifest.settings
    changes = ", ".join(
        f"{key} {_short(before[key])}, now {_short(value)}"
        for key, value in settings.items()
        if key in before and before[key] != value
    )
    if changes and not changed:
        raise InputError(
            f"checkpoint.resume: {path} was trained with {changes}; set what it had, take the change by "
            f"--checkpoint.resume_changed true, or start anew with another --log.name"
        )
    if changes:
        log.info("resume: %s was trained with %s", path, changes)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
