"""Shared by the tests of trainings."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainings import Trainer, trained


@pytest.fixture
def train(world: Path, ready: Path, tmp_path: Path) -> Trainer:
    """`trained` from the run that is ready, in the test's own folder."""

    def call(*overrides: str, folder: Path = tmp_path, status: int = 0) -> Path:
        return trained(world, ready, folder, *overrides, status=status)

    return call
