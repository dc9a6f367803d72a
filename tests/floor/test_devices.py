"""What distill asks of a device, on the pretend one; and that device itself, on which other tests rely."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distill import devices
from distill.engines.torch.hugging_face import settled_type
from distill.engines.torch.model import fetch, send
from distill.errors import RunError
from distill.machine import machine


@pytest.fixture
def here(pretend: Any) -> torch.device:
    """Its first device, which has no name before it is loaded."""
    return torch.device("pretend:0")


def test_auto_is_the_accelerator_of_torch(pretend: Any, here: torch.device) -> None:
    assert devices.pick_device("auto") == torch.device("pretend")
    assert devices.accelerators() == [here] and machine()["gpu"] == "Pretend Accelerator"
    with pretend.available(2):
        assert [device.index for device in devices.accelerators()] == [0, 1]
    with pretend.available(0):
        assert devices.pick_device("auto") == torch.device("cpu") and machine()["gpu"] is None
        assert devices.pick_device("pretend:1") == torch.device("pretend:1")
    with pytest.raises(RunError, match="device `pretnd` cannot be used: Expected one of cpu, cuda"):
        devices.pick_device("pretnd")


def test_types_of_a_device(pretend: Any, here: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {}
    for name, config, own, slow in (
        ("full", {"dtype": "float32"}, "float32", "float32"),
        ("old", {"torch_dtype": "float16"}, "float16", "float16"),
        ("inner", {"text_config": {"dtype": "bfloat16"}}, "bfloat16", "float32"),
        ("silent", {}, "bfloat16", "float32"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
        stored[str(tmp_path / name)] = own, slow
    assert settled_type("auto", here) == "float32" and settled_type("bfloat16", here) == "bfloat16"
    monkeypatch.setattr(torch.pretend, "is_bf16_supported", lambda: True)  # type: ignore[attr-defined]
    assert settled_type("auto", here) == "bfloat16"
    for model, (own, slow) in stored.items():  # the checkpoint's own type, if the device has it
        assert settled_type("auto", here, model) == own
        with monkeypatch.context() as patch:
            patch.setattr(torch.pretend, "is_bf16_supported", lambda: False)  # type: ignore[attr-defined]
            assert settled_type("auto", here, model) == slow
    values = torch.tensor([0.1], device=here)
    assert devices.has_float64(here) and devices.as_float64(values).device == here
    with pretend.without("float64"):
        assert not devices.has_float64(here) and devices.as_float64(values).device == torch.device("cpu")
        with pytest.raises(TypeError, match="Cannot convert a pretend tensor to float64"):
            values.double()
    assert devices.has_float64(torch.device("cpu")) and devices.has_float64(torch.device("meta"))


def test_memory_of_a_device(pretend: Any, here: torch.device) -> None:
    devices.take_peaks()
    held = torch.zeros(1000, device=here)
    peak = devices.peak_memory_bytes(here)
    assert peak >= 4000 and devices.take_peaks() == peak
    del held
    devices.take_peaks()
    assert devices.take_peaks() <= peak - 4000
    with pretend.memory(1000), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4000 bytes") as caught:
        torch.zeros(1000, device=here)
    assert devices.memory_ran_out(caught.value) and not devices.memory_ran_out(ValueError("no"))
    assert devices.peak_memory_bytes(torch.device("cpu")) > 2**20


def test_numbers_cross_once_and_without_a_wait(pretend: Any, here: torch.device) -> None:
    with pretend.counting() as counts:
        sent = send([1, 2, 3], here)
    assert (counts.to_device, counts.unpinned_to_device, counts.bytes_to_device, counts.waits) == (1, 0, 24, 0)
    with pretend.counting() as counts:
        assert [one.tolist() for one in fetch(sent, sent.float() / 2)] == [[1, 2, 3], [0.5, 1, 1.5]]
    assert (counts.to_host, counts.bytes_to_host, counts.waits) == (1, 36, 1)
    with pretend.counting() as counts:
        devices.synchronise(here)
        devices.synchronise(torch.device("cpu"))
    assert counts.synchronisations == 1 and counts.launches == 0


def test_what_the_pretend_device_counts(pretend: Any, here: torch.device) -> None:
    values = torch.arange(6.0, device=here).reshape(2, 3)
    with pretend.counting() as counts:
        (values.T[1:] * 2).sum()
    assert counts.launches == 2 and counts.operations == {"aten::mul.out": 1, "aten::sum.IntList_out": 1}
    waiting = {
        "item": lambda: values[0, 0].item(),
        "copy to host": lambda: values.cpu(),
        "aten::nonzero": lambda: values[values > 2],
        "aten::_index_put_impl_": lambda: values.index_put_((values > 9,), values[:0, 0]),
    }
    for name, work in waiting.items():
        with pretend.counting() as counts:
            work()
        assert counts.waits == counts.operations[f"wait: {name}"] == 1, name
    with pretend.counting() as counts:
        values[values > 2] = 0  # filled in by a mask
        torch.nn.functional.scaled_dot_product_attention(*[values[None, None]] * 3)
    assert counts.waits == 0 and counts.operations["aten::scaled_dot_product_attention"] == 1


def test_devices_do_not_mix(pretend: Any, here: torch.device) -> None:
    first, there = torch.ones(3, device=here), torch.ones(3, device="pretend:1")
    for other in (there, torch.ones(3)):
        for work in (
            lambda x: first + x,
            lambda x: first @ x,
            lambda x: torch.cat([first, x]),
            lambda x: torch.where(first > 0, first, x),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                work(other)
    index = torch.tensor([0])
    with pytest.raises(RuntimeError, match="same device"):
        first.index_select(0, index)
    assert first[index].device == here  # torch takes these indices to the device
    assert (first + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert there.to(here).device == here and torch.zeros(2, device="pretend:1").device.index == 1


def test_operations_that_a_device_lacks(pretend: Any, here: torch.device) -> None:
    lacking = pretend.lacking("MPS")
    assert "aten::mode" in lacking and not {"aten::mm", "aten::sort.values_stable", "aten::add.out"} & set(lacking)
    with pretend.without(pretend.SORTS, *lacking):
        assert torch.tensor([2.0, 1.0], device=here).sort()[1].tolist() == [1, 0]
        with pytest.raises(NotImplementedError, match="does not sort int64"):
            torch.tensor([2, 1], device=here).sort()
        with pytest.raises(NotImplementedError, match="'aten::mode' is not implemented"):
            torch.tensor([2, 1], device=here).mode()


FAULTS = """
import resource, torch
from distill.machine import keep_freed_memory
torch.set_num_threads(1)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    return len([torch.ones(786432) for _ in range(24)])  # more than glibc keeps by itself, 64 MiB
def of_a_step():
    counts = [faults()]
    for _ in range(31):
        step()
        counts.append(faults())
    return sorted(after - before for before, after in zip(counts, counts[1:]))[15]
before = of_a_step()
keep_freed_memory()
print(before, of_a_step())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_taken_again() -> None:
    """Tensors that come and go cost a page fault for each page without it, unless something small happens to lie above
    them."""

    def faults() -> int:
        """The page faults of a step before the call, after which it has none."""
        said = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
        before, after = map(int, said.split())
        assert after == 0
        return before

    assert any(faults() > 1000 for _ in range(8))
