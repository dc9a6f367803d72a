"""What a target ships to draft with: said where it is there, and where a copy states it and has lost it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
from safetensors.torch import load_file, save_file
from tiny import edit
from toys import write_gguf

from distill.engines.server_commands import shipped_heads

HEADS = (  # a key of config.json and a tensor, of DeepSeek-V3, Qwen3.5 and MiMo
    ("num_nextn_predict_layers", "model.layers.3.eh_proj.weight"),
    ("mtp_num_hidden_layers", "mtp.layers.0.input_layernorm.weight"),
    ("num_nextn_predict_layers", "model.mtp_layers.0.norm.weight"),
)


@pytest.fixture
def target(world: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world / "target", tmp_path / "models" / "target"))


@pytest.mark.parametrize(("key", "tensor"), HEADS)
@pytest.mark.parametrize("nested", [False, True])
def test_a_head_inside_or_lost(target: Path, key: str, tensor: str, nested: bool) -> None:
    assert shipped_heads(str(target)) == []
    edit(target / "config.json", **({"text_config": {key: 1}} if nested else {key: 1}))
    (lost, more) = shipped_heads(str(target))
    assert f"({key} 1), but has no tensor of it: this copy lost it" in lost and "choosing.md" in more
    weights = load_file(target / "model.safetensors")
    save_file(weights | {tensor: weights["model.norm.weight"].clone()}, target / "model.safetensors")
    held, _ = shipped_heads(str(target))
    assert f'({key} 1); measure it first: vLLM, --speculative-config \'{{"method": "mtp"' in held
    assert "llama-server --spec-type draft-mtp" in held


def test_heads_in_folders_beside_it(target: Path) -> None:
    width = json.loads((target / "config.json").read_text())["hidden_size"]
    for name, architecture, hidden in (
        ("one", "LlamaForCausalLMEagle3", width),
        ("two", "DFlashDraftModel", width),
        ("other", "LlamaForCausalLMEagle3", 2 * width),
        ("plain", "LlamaForCausalLM", width),
    ):
        (target.parent / name).mkdir()
        edit(target.parent / name / "config.json", architectures=[architecture], hidden_size=hidden)
    (target.parent / "damaged").mkdir()
    (target.parent / "damaged" / "config.json").write_text("{")
    found = shipped_heads(str(target))
    assert len(found) == 3
    assert "one has its width and is for EAGLE-3" in found[0] and '"method": "eagle3"' in found[0]
    assert "two has its width and is for DFlash" in found[1] and '"method": "dflash"' in found[1]


def gguf_file(path: Path, architecture: str, layers: int | None = None, tensor: str = "output_norm.weight") -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    if layers is not None:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", layers)
    writer.add_tensor(tensor, np.zeros(32, np.float32))
    write_gguf(writer)
    return path


def test_heads_of_files(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "a.gguf", "qwen35", 1, "blk.3.nextn.eh_proj.weight")
    (held, _) = shipped_heads(str(path))
    assert "(nextn_predict_layers 1); measure it first: llama-server --spec-type draft-mtp --spec-draft-n-max 3" in held
    assert "this copy lost it" in shipped_heads(str(gguf_file(path, "qwen35", 1)))[0]
    assert shipped_heads(str(gguf_file(path, "qwen35", 0))) == []
    gguf_file(tmp_path / "b.gguf", "eagle3")
    (tmp_path / "c.gguf").write_bytes(b"damaged")
    (beside, _) = shipped_heads(str(gguf_file(path, "qwen35")))
    assert "b.gguf in its folder is for EAGLE-3" in beside
    assert beside.endswith(f"llama-server -md {tmp_path / 'b.gguf'} --spec-type draft-eagle3")
    gguf_file(tmp_path / "b of mine.gguf", "eagle3")
    assert f"-md '{tmp_path / 'b of mine.gguf'}'" in "".join(shipped_heads(str(path)))


def test_check_and_plan_say_it(world: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(target / "config.json", mtp_num_hidden_layers=1)
    assert "this copy lost it" in tiny.shown(capsys, "check", world / "recipe.yaml", f"target.model={target}")
    assert "this copy lost it" in tiny.shown(capsys, "check", target, world / "target")
    planned = ("plan", target, "0.1", "--lengths", "1", "--depth", "8")
    assert "this copy lost it" in tiny.shown(capsys, *planned)
    assert json.loads(tiny.shown(capsys, *planned, "-o", "json"))["decision"]
