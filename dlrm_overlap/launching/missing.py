"""What is said where this Python lacks a package. Imports nothing but Python's own modules."""

import sys


def tell_missing(error: ModuleNotFoundError) -> bool:
    """Say in one line on standard error which module was not found, and how to get it.

    Returns:
        Whether it was said: not of a module of this package, whose absence is no mistake of the user's.
    """
    if not error.name or error.name.partition(".")[0] == "dlrm_overlap":
        return False
    print(
        f"dlrm-overlap: {error.name}: no such module for {sys.executable}; activate the environment that `make` sets "
        f"up (. .venv/bin/activate), or install what pyproject.toml names",
        file=sys.stderr,
        flush=True,
    )
    return True
