"""One bar on standard error for bytes that are read or written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mkpack.digest import Progress


@contextmanager
def progress_bar(doing: str, shown: bool) -> Iterator[Progress | None]:
    """A Progress that draws a bar while the block runs, or None when it is not to be shown."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
