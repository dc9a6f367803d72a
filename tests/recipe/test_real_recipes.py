"""The recipes of real models: the figures that they open with, and their cuts, a training step and the export at small
width."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shlex
import struct
from dataclasses import replace
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
from distill.errors import DataError, PairError, RecipeError
from distill.folders import copy_tokenizer
from distill.gguf.head import open_head
from distill.gguf.writer import export_gguf
from distill.pipeline.preflight import check_pair, check_stages
from distill.planning.cases import PlanRequest, estimated_case
from distill.planning.hardware import read_hardware
from distill.planning.plan import forecast
from distill.recipe import Recipe, load_recipe
from distill.surgery.cutter import TargetDistributions, check_cut, cut_model
from distill.surgery.layers import require_supported
from distill.surgery.stage import load_donor
from distill.teacher.store import OnlineTarget
from distill.training.step import Columns, Learner, check_training, heal, loss_settings
from distill.vocabulary.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
RECIPES = tiny.ROOT / "recipes"
# Of models that are here, and whose figures are measured.
OTHERS = {"demo", "demo-transplant", "gemma-3-270m", "smollm2", "smollm2-demo"}
REAL = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem not in OTHERS)
COMMAND = re.compile(r"distill plan recipes/(\S+) (--hardware .*)")
GAINS = re.compile(
    r"([\d.]+) times plain decoding at a conditional acceptance of 0\.60 \((\d) drafted\), ([\d.]+) at 0\.75 \((\d)\), "
    r"([\d.]+) at 0\.90 \((\d)\)\. A draft step costs (\d\.\d\d) T\(1\), and pays from (\d\.\d\d) on"
)


def sizes(
    kind: str, hidden: int, layers: int, heads: int, keys: int, mlp: int, rows: int, **more: Any
) -> dict[str, Any]:
    """The keys of config.json that a step's cost depends on."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    found = dict(zip(names, (hidden, layers, heads, keys, mlp), strict=True))
    found |= {"model_type": kind, "vocab_size": rows, "max_position_embeddings": 32768}
    return found | {"tie_word_embeddings": False} | more


GEMMA = sizes(
    "gemma3_text", 5376, 62, 32, 16, 21504, 262208, head_dim=128, sliding_window=1024, tie_word_embeddings=True
)
EXPERTS = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048}
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
EXPERTS |= {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
VISION = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 896}
VISION |= {"num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14}
TIED = {"tie_word_embeddings": True}
LINEAR = {"linear_num_key_heads": 16, "linear_num_value_heads": 48}
QWEN35 = sizes("qwen3_5_text", 5120, 64, 24, 4, 17408, 248320, head_dim=256, mtp_num_hidden_layers=1, **LINEAR)
MIXTURE = {"num_experts_per_tok": 8, "n_routed_experts": 128, "moe_intermediate_size": 1408, "attention_bias": True}
GRANITE = {"shared_intermediate_size": 1536, "num_local_experts": 72, "num_experts_per_tok": 10}
GRANITE |= {"mamba_n_heads": 128, "mamba_d_state": 128}
MAMBA = ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)]
MISTRAL = sizes("mistral", 5120, 40, 32, 8, 32768, 131072, head_dim=128)
# As published.
CONFIGURATIONS = {
    "Qwen/Qwen2.5-Coder-14B-Instruct": sizes("qwen2", 5120, 48, 40, 8, 13824, 152064),
    "Qwen/Qwen2.5-Coder-32B-Instruct": sizes("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": sizes("qwen2", 896, 24, 14, 2, 4864, 151936, **TIED),
    "Qwen/Qwen2.5-0.5B-Instruct": sizes("qwen2", 896, 24, 14, 2, 4864, 151936, **TIED),
    "Qwen/Qwen3-32B": sizes("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "Qwen/Qwen3-0.6B": sizes("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, **TIED),
    "meta-llama/Llama-3.3-70B-Instruct": sizes("llama", 8192, 80, 64, 8, 28672, 128256),
    "meta-llama/Llama-3.1-8B-Instruct": sizes("llama", 4096, 32, 32, 8, 14336, 128256),
    "meta-llama/Llama-3.2-1B-Instruct": sizes("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, **TIED),
    "mistralai/Mistral-Large-Instruct-2407": sizes("mistral", 12288, 88, 96, 8, 28672, 32768, head_dim=128),
    "google/gemma-3-270m-it": sizes(
        "gemma3_text", 640, 18, 4, 1, 2048, 262144, head_dim=256, sliding_window=512, **TIED
    ),
    "google/gemma-3-27b-it": {"model_type": "gemma3", "text_config": GEMMA, "vision_config": VISION}
    | {"eos_token_id": [1, 106]},
    "deepseek-ai/DeepSeek-V3-0324": sizes("deepseek_v3", 7168, 61, 128, 128, 18432, 129280, **EXPERTS, **LATENT)
    | {"quantization_config": {"quant_method": "fp8"}},
    "Qwen/Qwen3.5-27B": {"model_type": "qwen3_5", "text_config": QWEN35},
    "unsloth/Mistral-Small-3.2-24B-Instruct-2506": {"model_type": "mistral3", "text_config": MISTRAL},
    "openai/gpt-oss-120b": sizes("gpt_oss", 2880, 36, 64, 8, 2880, 201088, num_local_experts=128, head_dim=64)
    | {"num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"}},
    "zai-org/GLM-4.5-Air": sizes("glm4_moe", 4096, 46, 96, 8, 10944, 151552, head_dim=128, **MIXTURE),
    "ibm-granite/granite-4.0-h-small": sizes("granitemoehybrid", 4096, 40, 32, 8, 768, 100352, **GRANITE, **TIED)
    | {"layer_types": MAMBA},
}
EXPERT_COUNTS = {"n_routed_experts", "num_local_experts"}
RECURRENT = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "mamba_n_heads": 8, "mamba_d_state": 8}
SENTENCEPIECE = ("mistralai", "google")
MARKERS = {  # tokens that overrides name, or whose roles meet
    "Qwen": ["<|im_start|>", "<|im_end|>"],
    "meta-llama": ["<|eot_id|>"],
    "mistralai": ["[INST]", "[/INST]"],
    "google": ["<start_of_turn>", "<end_of_turn>", "<image_soft_token>"],
    "deepseek-ai": ["<｜User｜>", "<｜Assistant｜>"],
    "unsloth": ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"],
    "openai": ["<|start|>", "<|message|>", "<|end|>"],
    "zai-org": ["<|user|>", "<|assistant|>", "<|system|>"],
    "ibm-granite": ["<|start_of_role|>", "<|end_of_role|>"],
}


def opening(name: str) -> str:
    """The comment that a recipe begins with, as one line."""
    text = (RECIPES / f"{name}.yaml").read_text()
    return re.sub(r"\s+", " ", re.sub(r"\n#", "\n", "\n" + text[: text.index(f"\nname: {name}")]))


def tokenizer(folder: Path, hub: str) -> None:
    """A small tokenizer of the model's kind, with its markers."""
    maker = hub.split("/")[0]
    of_pieces = maker in SENTENCEPIECE
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
def test_the_figures_are_those_of_distill_plan(name: str, tmp_path: Path) -> None:
    """The command in the opening, with published configurations in place of hub names, gives the gains beside it; what
    `distill check` asks of the models passes."""
    said = opening(name)
    for word in (f"distill check recipes/{name}.yaml", "Commands", "predicted", "hardware", "hours"):
        assert word in said, word
    assert "has NOT been run" in said and " disk " in said and " gain " in said
    places, overrides = folders(RECIPES / f"{name}.yaml", tmp_path, CONFIGURATIONS)
    pretended_weights(places["donor"])
    command = COMMAND.search((RECIPES / f"{name}.yaml").read_text().replace("\\\n#", ""))
    assert command is not None and command[1] == f"{name}.yaml"
    words = shlex.split(command[2].split("   #")[0])
    options = dict(itertools.pairwise(words))
    planned_recipe = load_recipe(RECIPES / f"{name}.yaml", [*overrides, *(word for word in words if "=" in word)])
    assert check_stages(planned_recipe) and check_pair(planned_recipe)
    if "text_config" in json.loads((places["target"] / "config.json").read_text()):  # it reads images, too
        whole = ("target.load=true", "export.outtypes=[]", "speedup.backends=[pytorch]")
        with pytest.raises(RecipeError, match="whose language model is only one of its parts"):
            check_stages(load_recipe(RECIPES / f"{name}.yaml", [*overrides, *whole]))
    lengths = [int(length) for length in options["--lengths"].split(",")]
    request = replace(PlanRequest.of(planned_recipe), lengths=lengths)
    case = estimated_case(read_hardware(tiny.ROOT / options["--hardware"]), request)
    found = forecast(case, {rate: [float(rate)] for rate in (".60", ".75", ".90")})
    speedups = []
    for asked in found.scenarios[-3:]:
        gain = asked.speedups[lengths.index(asked.best)].mean
        speedups += [f"{gain:.2f}", str(asked.best)]
    pays = min(one.break_even for one in found.lengths if one.break_even is not None)
    costs = [f"{value:.2f}" for value in (found.draft_cost, pays)]
    written = GAINS.search(said)
    assert written is not None and [*written.groups()] == [*speedups, *costs]


def small(hub: str) -> dict[str, Any]:
    """The configuration 32 wide, with the published layers; of a target that no stage cuts, four. Not quantised."""
    config = copy.deepcopy(CONFIGURATIONS[hub])
    config.pop("quantization_config", None)
    inner = config.get("text_config", config)
    inner |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    # Padding rows differ as published.
    inner |= {"head_dim": 8, "vocab_size": {151936: 288, 152064: 320}.get(inner["vocab_size"], 300)}
    inner |= {"query_pre_attn_scalar": 8} if inner["model_type"] == "gemma3_text" else {}
    if inner["num_hidden_layers"] > 28:
        inner |= {"num_hidden_layers": 4}
    for name in EXPERT_COUNTS & inner.keys():
        inner |= {name: 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if "layer_types" in inner:
        inner["layer_types"] = inner["layer_types"][4:8]
    inner |= {name: value for name, value in RECURRENT.items() if name in inner}
    if inner["model_type"] == "deepseek_v3":
        inner |= {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
        inner |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    return config


def random_model(config: dict[str, Any], seed: int) -> Any:
    """A language model of this configuration, far from uniform; of one that reads images too, its language model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.get("text_config", config)))
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


def loss_of(model: Any, source: OnlineTarget, recipe: Recipe) -> float:
    """The mean over all blocks of the loss that the recipe trains with."""
    learner = Learner(model, Columns(source.vocabulary, None, CPU), recipe.train.chunk)
    with torch.no_grad():
        total, sums = learner(
            source.packed,
            source.teacher(torch.arange(source.blocks), CPU),
            loss_settings(recipe.train, recipe.sampler.temperature),
        )
    return float(total / sums["positions"])


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
    assert model.get_output_embeddings().weight.shape[0] == target_config.get_text_config().vocab_size
    assert before.layers == donor["num_hidden_layers"] and bool(changes) == (
        recipe.cut.transplant is not None or before.layers > layers or before.vocabulary != model.config.vocab_size
    )

    source = OnlineTarget(target, blocks, {"vocabulary": vocabulary}, batch=4)
    loss = loss_of(model, source, recipe)
    heal(model, source, recipe.train, loss_settings(recipe.train, recipe.sampler.temperature), 1, 0)
    assert loss_of(model, source, recipe) < loss

    draft, outtype = tmp_path / "draft", (*recipe.export.outtypes, "q8_0")[0]
    model.save_pretrained(draft)
    copy_tokenizer(text_folder(recipe.target.model), draft)
    export_gguf(draft, tmp_path / "draft.gguf", outtype)
    head = open_head(tmp_path / "draft.gguf")
    assert head.architecture == donor["model_type"].removesuffix("_text") and head.count("block_count") == layers
    assert Vocabulary.read(draft).tokens == Vocabulary.read(found["target"]).tokens


def test_a_gemma_as_donor(tmp_path: Path) -> None:
    """As the recipe says: with a transplant, because its tokenizer names a token of images that it has no row for;
    layers of the target itself are refused."""
    places, overrides = folders(RECIPES / "gemma-3-27b.yaml", tmp_path, CONFIGURATIONS)
    rows = Vocabulary.read(places["donor"]).size - 1
    donor = CONFIGURATIONS["google/gemma-3-270m-it"] | {"vocab_size": rows}
    (places["donor"] / "config.json").write_text(json.dumps(donor))
    pretended_weights(places["donor"])
    assert any(
        "cut: 18 layers -> 18" in line for line in check_cut(load_recipe(RECIPES / "gemma-3-27b.yaml", overrides))
    )
    recipe = load_recipe(RECIPES / "gemma-3-27b.yaml", [*overrides, "cut.transplant=null"])
    with pytest.raises(
        PairError, match=f"token {rows} is '<image_soft_token>' in the target and no token in the draft"
    ):
        check_cut(recipe)
    with pytest.raises(DataError, match="`gemma3` is not supported") as refused:
        require_supported(load_config(str(places["target"])))
    assert "save its language model, a gemma3_text" in str(refused.value.hint)


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
