"""`distill profile --describe`: descriptions of machines that are known, and of this one."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from distill.benchmark import describe
from distill.benchmark.describe import COUNTS, DEPTH, Roofline, description, fitted
from distill.benchmark.hardware import Hardware, StepWork, read_hardware

Capture = pytest.CaptureFixture[str]
KNOWN = {"memory_gb_per_s": 16.0, "compute_tflop_per_s": 0.065, "overhead_ms": 1.1, "layer_overhead_ms": 1.8}


def machine(**figures: float) -> Hardware:
    values = {key: {"value": value, "source": "made up"} for key, value in (KNOWN | figures).items()}
    return Hardware.model_validate({"name": "known", **values})


def work(layers: int, parameters: float, position_bytes: float = 1e4) -> StepWork:
    return StepWork(layers, 4 * parameters / layers, 4 * parameters, 0.0, 1.0, position_bytes, parameters)


def test_a_step_by_hand() -> None:
    """Half of the shorter of reading and computing is hidden by the longer."""
    one, box = work(6, 1e9), machine(overlap=0.5)
    read, computed = (4e9 + 100 * 1e4) / 16e9, 2 * 1e9 / 0.065e12
    overheads = (1.1 + 6 * 1.8) / 1e3
    assert one.seconds(1, 100, box) == pytest.approx(read + computed / 2 + overheads)
    assert one.seconds(16, 100, box) == pytest.approx(16 * computed + read / 2 + overheads)
    assert one.seconds(1, 100, machine()) == pytest.approx(max(read, computed) + overheads)


@pytest.mark.parametrize("overlap", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("compute", [0.065, 0.4])
def test_a_known_machine_is_described(overlap: float, compute: float) -> None:
    """From the steps that it takes; other models take the same steps on the description as on the machine."""
    box = machine(overlap=overlap, compute_tflop_per_s=compute)
    models = [work(2, 5e6), work(20, 45e6), work(4, 220e6)]
    found = description("x", models, [{m: one.seconds(m, DEPTH, box) for m in COUNTS} for one in models])
    assert found.memory_gb_per_s.value == pytest.approx(16, rel=0.1)
    for other in (work(30, 135e6), work(24, 500e6, 5e4)):
        for m in (1, 3, 5, 9, 16):
            assert other.seconds(m, 500, found) == pytest.approx(other.seconds(m, 500, box), rel=0.1), m


def test_a_roofline_is_found_on_its_own_steps() -> None:
    known = Roofline(0.7, 0.2, 0.0)
    found = fitted({m: known.seconds(m) for m in COUNTS})
    assert found.overlap == 0 and found.read == pytest.approx(0.7, rel=0.03)
    assert found.computed == pytest.approx(0.2, rel=0.03)


def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    """The file is one that a plan reads, and names where its figures come from."""
    monkeypatch.setattr(describe, "MODELS", ((64, 128, 2, 2, 1, 64), (64, 128, 6, 2, 1, 64), (256, 512, 3, 4, 2, 512)))
    monkeypatch.setattr(describe, "REPEATS", 2)
    path = tmp_path / "box.yaml"
    assert tiny.call("profile", "--describe", path, "--threads", 1) == 0
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")
    found = read_hardware(path)
    assert "1 thread(s) of" in found.name and "float32" in found.name
    assert found.layer_overhead_ms is not None and found.overlap is not None and 0 <= found.overlap.value <= 1
    assert all("measured" in one.source for one in (found.memory_gb_per_s, found.overhead_ms, found.layer_overhead_ms))


def test_mistakes(world: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "give either a MODEL or --describe" in tiny.refused(capsys, "profile")
    both = tiny.refused(capsys, "profile", world / "target", "--describe", tmp_path / "x.yaml")
    assert "give either a MODEL or --describe" in both
    for option in (
        ("--depths", "64"),
        ("--out", tmp_path / "y.json"),
        ("--threads-draft", 1),
        ("--cache-type-k", "q8_0"),
    ):
        said = tiny.call("profile", "--describe", tmp_path / "x.yaml", *option), capsys.readouterr().err
        assert said[0] == 2 and "Traceback" not in said[1], option
    assert "--depths is for a MODEL" in tiny.refused(
        capsys, "profile", "--describe", tmp_path / "x.yaml", "--depths", 64
    )
    said = tiny.refused(capsys, "profile", "--describe", tmp_path / "x.yaml", "--dtype", "int3")
    assert "--dtype int3 is unknown" in said and not (tmp_path / "x.yaml").exists()
