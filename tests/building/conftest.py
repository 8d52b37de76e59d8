"""A tiny checkpoint, its recipe, a compiler that compiles nothing, and a folder for what is built."""

from __future__ import annotations

import shutil
from pathlib import Path

import builds
import families
import pytest


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Path:
    return builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return families.make_case(tmp_path_factory.mktemp("source") / "checkpoint", "mixtral-plain")


@pytest.fixture
def checkpoint(source, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(source, tmp_path / "checkpoint"))


@pytest.fixture
def recipe(checkpoint, tmp_path) -> Path:
    return builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quantise=builds.BF16)


@pytest.fixture
def out(tmp_path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder
