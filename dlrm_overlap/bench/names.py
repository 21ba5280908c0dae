"""Checks of options that take names. Loads no torch."""

from collections.abc import Collection, Sequence

from dlrm_overlap.config import InputError


def check_names(option: str, names: Sequence[str], known: Collection[str], what: str, once: bool = True) -> None:
    """Check the values of an option.

    Args:
        option: as a user writes it, such as --contenders.
        names: its values.
        known: those that it takes.
        what: each of these is, such as "a contender".
        once: whether none may be there twice.

    Raises:
        InputError: naming the value that is wrong.
    """
    for name in names:
        if name not in known:
            raise InputError(f"{option} {name}: not {what}; known: {', '.join(known)}")
    if once and len(set(names)) < len(names):
        raise InputError(f"{option} {' '.join(names)}: one is there twice; name each once")
