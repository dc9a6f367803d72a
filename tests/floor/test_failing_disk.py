"""Reads and writes that fail, at the level of the operating system; see failing_disk.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny
from failing_disk import Disk, Failure, choose, compile_disk


def check(world: Path, folder: Path, stages: tuple[str, ...], share: int, seed: int) -> list[Failure]:
    library = compile_disk(folder)
    if library is None:
        pytest.skip("the failing disk is a C library, and there is no gcc")
    disk = Disk(world, folder, library, stages)
    found = disk.fail(choose(disk.calls, share, random.Random(seed)))
    faults = [(failure.call, fault) for failure in found if (fault := failure.fault((str(world), str(folder))))]
    assert not faults, faults
    return found


@pytest.mark.slow
def test_a_failed_read_or_write_is_one_message_and_loses_nothing(world: Path, tmp_path: Path) -> None:
    found = check(world, tmp_path, ("cut",), share=36, seed=3)
    assert {failure.call.kind for failure in found} == {"r", "w"}
    assert sum(failure.code == 2 for failure in found) >= len(found) - 2, "the calls did fail"


@pytest.mark.slow
@pytest.mark.parametrize("stage", tiny.STAGES)
def test_every_stage_on_a_failing_disk(world: Path, tmp_path: Path, stage: str) -> None:
    check(world, tmp_path, (stage,), share=8, seed=0)
