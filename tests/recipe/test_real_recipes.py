"""The recipes of real models: their checks, cuts, a training step and the export at small width."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from test_vocabulary import byte_level, save, sentencepiece
from transformers import AutoConfig, AutoModelForCausalLM

from distill.data.packing import Packed
from distill.engines.torch.hugging_face import load_config, load_tokenizer, real_tokens, text_folder
from distill.errors import DataError
from distill.folders import copy_tokenizer
from distill.gguf.head import open_head
from distill.gguf.writer import export_gguf
from distill.pipeline.preflight import check_pair, check_stages
from distill.recipe import Recipe, load_recipe
from distill.surgery.cutter import TargetDistributions, check_cut, cut_model
from distill.surgery.stage import load_donor
from distill.teacher.store import OnlineTarget
from distill.training.step import CHUNK, Columns, Learner, check_training, loss_settings, make_optimizer
from distill.vocabulary.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
RECIPES = tiny.ROOT / "recipes"
# Of models that are here, and whose figures are measured.
OTHERS = {"demo", "demo-transplant", "gemma-3-270m", "smollm2", "smollm2-demo"}
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


def small(hub: str) -> dict[str, Any]:
    """The configuration 32 wide, with the published layers; of a target that no stage cuts, four."""
    config = copy.deepcopy(CONFIGURATIONS[hub])
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    # Padding rows differ as published.
    config |= {"head_dim": 8, "vocab_size": {151936: 288, 152064: 320}.get(config["vocab_size"], 300)}
    if config["num_hidden_layers"] > 28:
        config |= {"num_hidden_layers": 4}
    return config


def random_model(config: dict[str, Any], seed: int) -> Any:
    """A language model of this configuration, far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model.float().eval()


def packed(vocabulary: int) -> Packed:
    """Four blocks of 32 made-up tokens, a document each."""
    ids = torch.randint(0, vocabulary, (4, 32), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(32).expand(4, 32)
    return Packed(ids, torch.zeros_like(ids), positions, positions < 31)


def loss_of(model: Any, source: OnlineTarget, recipe: Recipe) -> torch.Tensor:
    """The mean over all blocks of the loss that the recipe trains with."""
    learner = Learner(model, Columns(source.vocabulary, None, CPU), CHUNK)
    teacher, settings = source.teacher(torch.arange(4), CPU), loss_settings(recipe.train, recipe.sampler.temperature)
    total, sums = learner(source.packed, teacher, settings)
    return total / sums["positions"]


@pytest.mark.parametrize("name", REAL)
def test_cut_step_and_export_at_small_width(name: str, tmp_path: Path) -> None:
    """The recipe's checks; its cut of a donor of the published family and depth, which then has the target's rows; a
    step by its section train, which lowers its loss; a GGUF file of the donor's architecture, the target's tokens."""
    path = RECIPES / f"{name}.yaml"
    written = load_recipe(path)
    configurations = {hub: small(hub) for hub in (written.target.model, written.donor_model)}
    found, overrides = folders(path, tmp_path, configurations)
    rule = ["cut.layer_rule=influence"] if written.cut.layers is not None else []
    recipe = load_recipe(path, [*overrides, *rule, "train.batch=4", "train.rate=1e-3"])
    donor = configurations[written.donor_model]
    random_model(donor, 1).save_pretrained(found["donor"])
    target_config = load_config(recipe.target.model)
    assert check_cut(recipe) and check_training(recipe)

    target = random_model(configurations[written.target.model], 2)
    vocabulary = real_tokens(target_config, load_tokenizer(recipe.target.model))
    blocks = packed(vocabulary)
    distributions = TargetDistributions.measure(target, blocks, vocabulary)
    run: Any = SimpleNamespace(path=lambda *parts: tmp_path.joinpath(*parts))
    model, before, changes = load_donor(recipe, run, CPU, distributions)
    changes += cut_model(model, recipe.cut, blocks.take(slice(0, 2)), distributions, own=False)
    layers = written.cut.layers or before.layers
    assert model.config.num_hidden_layers == len(model.model.layers) == layers < 28
    assert model.get_output_embeddings().weight.shape[0] == target_config.vocab_size
    assert before.layers == donor["num_hidden_layers"] and bool(changes) == (
        recipe.cut.transplant is not None or before.layers > layers or before.vocabulary != model.config.vocab_size
    )

    source = OnlineTarget(target, blocks, {"vocabulary": vocabulary}, batch=4)
    loss = loss_of(model, source, recipe)
    optimizer = make_optimizer(model, recipe.train)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert loss_of(model, source, recipe) < loss

    draft, outtype = tmp_path / "draft", (*recipe.export.outtypes, "q8_0")[0]
    model.save_pretrained(draft)
    copy_tokenizer(text_folder(recipe.target.model), draft)
    export_gguf(draft, tmp_path / "draft.gguf", outtype)
    head = open_head(tmp_path / "draft.gguf")
    assert head.architecture == donor["model_type"].removesuffix("_text") and head.count("block_count") == layers
    assert Vocabulary.read(draft).tokens == Vocabulary.read(found["target"]).tokens


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
