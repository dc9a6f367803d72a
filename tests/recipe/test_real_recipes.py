"""The recipes of real models: what `distill check` asks of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_vocabulary import byte_level, save, sentencepiece
from transformers import AutoConfig, AutoModelForCausalLM

from distill.engines.torch.hugging_face import load_config, load_tokenizer
from distill.errors import DataError
from distill.pipeline.preflight import check_pair, check_stages
from distill.recipe import load_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPES = tiny.ROOT / "recipes"
# Of models that are here, and whose figures are measured.
OTHERS = {"adapt", "demo", "demo-transplant", "gemma-3-270m", "qwen-coder-1.5b", "smollm2", "smollm2-demo"}
REAL = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem not in OTHERS)


def sizes(
    kind: str, hidden: int, layers: int, heads: int, keys: int, mlp: int, rows: int, **more: Any
) -> dict[str, Any]:
    """The keys of config.json that a step's cost depends on."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    found = dict(zip(names, (hidden, layers, heads, keys, mlp), strict=True))
    found |= {"model_type": kind, "vocab_size": rows, "max_position_embeddings": 32768}
    return found | {"tie_word_embeddings": False} | more


TIED = {"tie_word_embeddings": True}
# As published.
CONFIGURATIONS = {
    "Qwen/Qwen2.5-Coder-14B-Instruct": sizes("qwen2", 5120, 48, 40, 8, 13824, 152064),
    "Qwen/Qwen2.5-Coder-32B-Instruct": sizes("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": sizes("qwen2", 896, 24, 14, 2, 4864, 151936, **TIED),
    "Qwen/Qwen2.5-0.5B-Instruct": sizes("qwen2", 896, 24, 14, 2, 4864, 151936, **TIED),
    "Qwen/Qwen3-32B": sizes("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "Qwen/Qwen3-0.6B": sizes("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, **TIED),
    "meta-llama/Llama-3.3-70B-Instruct": sizes("llama", 8192, 80, 64, 8, 28672, 128256),
    "meta-llama/Llama-3.2-1B-Instruct": sizes("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, **TIED),
    "mistralai/Mistral-Large-Instruct-2407": sizes("mistral", 12288, 88, 96, 8, 28672, 32768, head_dim=128),
}
MARKERS = {  # tokens that overrides name, or whose roles meet
    "Qwen": ["<|im_start|>", "<|im_end|>"],
    "meta-llama": ["<|eot_id|>"],
    "mistralai": ["[INST]", "[/INST]"],
}


def tokenizer(folder: Path, hub: str) -> None:
    """A small tokenizer of the model's kind, with its markers."""
    maker = hub.split("/")[0]
    of_pieces = maker == "mistralai"
    made = sentencepiece(["▁", "a", "b", "▁a", "ab"], [("▁", "a"), ("a", "b")]) if of_pieces else byte_level()
    made.add_special_tokens(["<end>", *MARKERS[maker]])
    save(made, folder, eos_token="<end>")


def folders(recipe: Path, place: Path, configurations: dict[str, dict[str, Any]]) -> tuple[dict[str, Path], list[str]]:
    """Folders of the recipe's target and donor, with config.json and tokenizer alone; the overrides that name them."""
    written = load_recipe(recipe)
    found = {"target": place / "target", "donor": place / "donor"}
    for role, hub in (("target", written.target.model), ("donor", written.donor_model)):
        tokenizer(found[role], hub)
        (found[role] / "config.json").write_text(json.dumps(configurations[hub]))
    return found, [f"target.model={found['target']}", f"cut.donor={found['donor']}"]


def pretended_weights(folder: Path) -> None:
    """A safetensors file with the names and shapes of the model's tensors, whose data are a hole in the file."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    header, end = {}, 0
    for name, tensor in model.named_parameters():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + 2 * tensor.numel()]}
        end += 2 * tensor.numel()
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("name", REAL)
def test_what_distill_check_asks_of_the_published_models(name: str, tmp_path: Path) -> None:
    """With their configurations, small tokenizers and a donor whose weights are a hole in a file."""
    places, overrides = folders(RECIPES / f"{name}.yaml", tmp_path, CONFIGURATIONS)
    pretended_weights(places["donor"])
    recipe = load_recipe(RECIPES / f"{name}.yaml", overrides)
    assert check_stages(recipe) and check_pair(recipe)


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_a_folder_that_needs_code_of_its_own(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kimi K2's, with a type of model that only its code knows: refused, where transformers would ask whether to run
    that code."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    code = {"AutoConfig": "configuration_kimi.KimiConfig", "AutoTokenizer": ["tokenization_kimi.Kimi", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "auto_map": code}))
    settings = {"tokenizer_class": "Kimi", "auto_map": {"AutoTokenizer": code["AutoTokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="contains custom code"):
        load(str(tmp_path))
    assert asked == []
