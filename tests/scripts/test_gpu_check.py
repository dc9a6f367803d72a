"""scripts/gpu_check.py at toy size on the CPU: the code that a GPU runs, and the table it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_scripts
import tiny
import torch
from test_scripts import run


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    return test_scripts.script("gpu_check", monkeypatch)


# What a machine with a GPU may lack: nothing of the check may need it, at import or later.
WITHOUT = ["datasets", "gguf", "llama_cpp", "matplotlib", "llguidance", "bitsandbytes"]
WITHOUT_THEM = """
import runpy, sys
sys.modules.update(dict.fromkeys({without}))
sys.argv = {arguments}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_every_decoder_writes_the_same_text(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--to", tmp_path, "--toy", "--part", "decode-toy", "--prompts", "1", "--tokens", "8")
    program = [str(tiny.ROOT / "scripts" / "gpu_check.py"), *map(str, asked)]
    code = WITHOUT_THEM.format(without=WITHOUT, arguments=program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "decode-toy.json").read_text())
    engines = {(row["engine"], row["configuration"]) for row in found["rows"]}
    assert {("growing cache", "plain"), ("static cache", "\u03b3 = 4"), ("static cache", "tree of 8")} < engines
    assert ("transformers", "assisted, \u03b3 = 4") in engines and len(found["rows"]) == 11
    assert all(row["same_text"] == 1 for row in found["rows"]) and not found["left_out"]
    assert "| static cache | tree of 8 |" in done.stdout
    steps = {"target_step": {"1": 0.003}, "draft_step": {"1": 0.001}}
    changed = found | steps | {"weight_bytes": {"target": 4e9, "draft": 1e9}}
    (tmp_path / "decode-toy.json").write_text(json.dumps(changed))
    (tmp_path / "bandwidth.json").write_text(json.dumps({"bytes_per_second": 4e12, "device": "a GPU"}))
    run(script, monkeypatch, *asked)  # what is there is not measured again
    # 4 GB at 2 TB/s of reading are 2 ms.
    assert "T(1) 3.00 ms = 1.50; D(1) 1.00 ms = 2.00" in capsys.readouterr().out


def test_what_cannot_be_asked(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no part nothing; there are bandwidth"):
        run(script, monkeypatch, "--to", tmp_path, "--toy", "--part", "nothing")
    with pytest.raises(SystemExit, match=r"holds no config\.json"):
        run(script, monkeypatch, "--to", tmp_path, "--toy", "--draft", tmp_path / "none")
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="torch sees no GPU"):
            run(script, monkeypatch, "--to", tmp_path)


def test_no_time_left_is_said(script: Any) -> None:
    clock = script.Clock(-1.0)
    assert not clock.allows("plain") and clock.left_out == ["plain"] and script.Clock(1.0).allows("plain")
