"""scripts/grow_target.py: a larger model says the same."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from toys import disturb, save_toy, toy, toy_tokenizer
from transformers import AutoModelForCausalLM

from distill.engines.torch.hugging_face import load_model
from distill.errors import DataError
from distill.gguf.importing import folder_of
from distill.gguf.writer import export_gguf

sys.path.insert(0, str(tiny.ROOT / "scripts"))

from grow_file import grow_file
from grow_target import grow

torch.set_num_threads(1)

V = 61
IDS = torch.randint(0, V, (3, 40), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize(("tile", "layers"), [(1, 3), (2, 2), (3, 5), (4, 8)])
def test_grown_models_say_the_same(tile: int, layers: int, tmp_path: Path) -> None:
    model = toy("qwen2", layers=2, seed=tile)
    disturb(model, 99, 0.3)
    before = copy.deepcopy(model.state_dict())
    larger = grow(model, tile, layers)
    assert larger.config.hidden_size == 32 * tile and larger.config.intermediate_size == 48 * tile
    assert larger.config.num_hidden_layers == layers == len(larger.model.layers)
    expected, found = logits(model), logits(larger)
    # relative to the logits' size: sums are over more terms
    assert float((expected - found).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert not larger.training and larger.lm_head.weight is larger.model.embed_tokens.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    larger.save_pretrained(tmp_path)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), found, rtol=1e-6, atol=1e-6
    )


def test_grown_sliding_windows() -> None:
    """Windows shorter than the text stay where they were."""
    model = toy("qwen2", layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    for layers in (3, 5):
        larger = grow(model, 2, layers)
        torch.testing.assert_close(logits(larger), logits(model), rtol=1e-4, atol=1e-4)


def test_growth_that_is_refused() -> None:
    with pytest.raises(DataError, match="already has 2"):
        grow(toy("qwen2"), 2, 1)
    for other in (toy("llama"), toy("qwen3"), toy("qwen2", tie_word_embeddings=False)):
        with pytest.raises(DataError, match="only qwen2"):
            grow(other, 2, 2)


def test_files_that_are_refused(tmp_path: Path) -> None:
    tokenizer, small, large = toy_tokenizer(), tmp_path / "small.gguf", tmp_path / "large.gguf"
    for family, tile, layers, words in (("llama", 2, 2, "only qwen2"), ("qwen2", 2, 1, "already has 2")):
        export_gguf(save_toy(toy(family, len(tokenizer), layers=2), tokenizer, tmp_path / family), small, "f32")
        with pytest.raises(DataError, match=words):
            grow_file(small, large, tile, layers)
    export_gguf(tmp_path / "qwen2", small, "bf16")  # The factors of bf16 are not known.
    with pytest.raises(DataError, match="the embedding has the type BF16"):
        grow_file(small, large, 2, 2)
    assert not large.exists()


@pytest.mark.parametrize(
    ("outtype", "tied", "tile", "layers"),
    [("f32", True, 2, 2), ("f16", False, 4, 5), ("q8_0", True, 4, 5), ("q8_0", False, 2, 2)],
)
def test_a_grown_file_says_the_same(outtype: str, tied: bool, tile: int, layers: int, tmp_path: Path) -> None:
    """Its weights, read back to a folder, compute the logits of the small file's; q8_0 has blocks of 32 values."""
    tokenizer = toy_tokenizer()
    model = toy("qwen2", len(tokenizer), layers=2, seed=7, tie_word_embeddings=tied, intermediate_size=64)
    disturb(model, 99, 0.3)
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    export_gguf(save_toy(model, tokenizer, tmp_path / "small"), small, outtype)
    grow_file(small, large, tile, layers)
    ids = torch.randint(0, len(tokenizer), (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = (
            load_model(str(folder_of(str(path))), "float32", torch.device("cpu"))(ids).logits for path in (small, large)
        )
    assert float((expected - found).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))
