"""The bar of bytes: drawn on standard error when it is wanted, else nothing."""

from __future__ import annotations

from mkpack.progress_bar import progress_bar


def test_a_bar_tells_what_is_done(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("checking", True) as progress:
        assert progress is not None
        progress(1_000_000, 4_000_000)
        progress(4_000_000, 4_000_000)
    said = capsys.readouterr()
    assert "checking" in said.err and "4.0/4.0 MB" in said.err and said.out == ""


def test_no_bar(capsys):
    with progress_bar("checking", False) as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")
