"""The errors a user can cause, and how several of them become one message."""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator, Sequence


class UserError(Exception):
    """A mistake in what the user gave: printed as one clear text, exit code 2, no traceback.

    The text says what is wrong, where, what was expected, what was found and what to do about it.
    """


class InternalError(Exception):
    """A fault of mkpack or of the machine (compiler killed, barrier timed out): exit code 1."""


def combine(title: str, problems: Iterable[str]) -> UserError:
    """One UserError for several problems; a single problem stays on the title's line."""
    found = list(problems)
    if len(found) == 1:
        return UserError(f"{title}: {found[0]}")
    return UserError("\n".join([f"{title}: {len(found)} problems", *(f"  - {p}" for p in found)]))


def some(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def size(nbytes: float) -> str:
    """A number of bytes for a reader: "12.3 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.1f} {unit}"
    return f"{nbytes:.0f} B"


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file cannot be read, for a message that names the file already."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"not UTF-8 text (byte {error.object[error.start]:#04x} at offset {error.start})"


@contextlib.contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """OSErrors inside become one UserError: "cannot {doing}: ...", with what to do when the disk is full."""
    try:
        yield
    except OSError as e:
        where = f" ({e.filename})" if e.filename and str(e.filename) not in doing else ""
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "; free some disk space or choose another folder" if full else ""
        raise UserError(f"cannot {doing}: {e.strerror or e}{where}{hint}") from e


# Control characters but newline and tab: what terminals take commands from.
_COMMANDS = {c: "\ufffd" for c in [*range(32), *range(127, 160)] if c not in (9, 10)}


def visible(text: str) -> str:
    """A stranger's text, such as a model's, so that it cannot steer the terminal it is shown on."""
    return text.translate(_COMMANDS)


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean "x"?)' for the nearest known word, or '' when nothing is near."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' (did you mean "{match[0]}"?)' if match else ""
