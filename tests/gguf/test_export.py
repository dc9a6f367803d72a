"""GGUF export: parity with Hugging Face, what is refused, K-types, importance matrices, and the command."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import statistics
import struct
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_gguf_reference import script
from test_hostile_files import with_number
from tiny import Capture, Patch, edit, needs_llama
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from toys import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from distill.engines.llama_cpp.model import GgufModel
from distill.engines.torch.hugging_face import encode_text, load_config
from distill.errors import DataError
from distill.export import Original, compare, faults_of, importance_of
from distill.gguf.fields import read_shape
from distill.gguf.head import open_head
from distill.gguf.library import GgufFile
from distill.gguf.writer import export_files, export_gguf
from distill.recipe.measuring import OUTTYPES

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HARD_TEXTS = [
    "",
    " ",
    "  leading, trailing  \n\n\t x\r\n",
    "I'LL we'Re don't 'S 12345678 3.14 1e-9 ١٢٣ ½",
    "naïve Ünïcödé 你好，世界。 こんにちは 한국어 नमस्ते ไทย עברית עִבְרִית",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \u200b\u00a0\u3000\u2028 zero\u0000byte",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "if x:\n        return {'a': [1, 2, 3]}  # !!! ??? --- ===\n\n\n\n",
]


def held_out_texts(splits: tuple[str, ...] = ("test", "validation")) -> list[str]:
    return [p.read_text(encoding="utf-8") for s in splits for p in sorted((tiny.ROOT / "data" / s).rglob("*.py"))]


def train_tokenizer(split: str | None = QWEN2_SPLIT, size: int = 768) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits text by this expression, or as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        apart = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # Few and small texts are enough for merges of every kind: words, digits, marks, white space, wide scripts.
    tokenizer.train_from_iterator([*held_out_texts()[::6], *HARD_TEXTS * 5, "12 123 1234 4321 " * 50], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIALS[0], pad_token=SPECIALS[0], clean_up_tokenization_spaces=False
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIALS[1:]})
    fast.add_tokens(["<tool call>"])  # an added token that is not special, with a space
    return fast


@pytest.fixture(scope="session")
def small_tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.15,  # far from uniform, so that a wrong weight shows
}
LLAMA3_ROPE = script.LLAMA3_ROPE | {"rope_theta": 1e4}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}
MINISTRAL_ROPE = script.YARN | {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
MINISTRAL_ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
CAPS = {"sliding_window": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
LAYERS = {"s": "sliding_attention", "f": "full_attention"}
GEMMA = {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", {"intermediate_size": 160, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama": ("llama", {"rms_norm_eps": 1e-5}),
    "llama-3-rope": ("llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3_ROPE}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2-linear-rope": ("qwen2", {"rope_parameters": LINEAR_ROPE}),
    "qwen3-untied": ("qwen3", {"head_dim": 32}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR_ROPE | {"rope_theta": 2e4, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("gemma2", GEMMA | CAPS),
    "gemma3": ("gemma3_text", GEMMA | {"sliding_window": 16, "num_hidden_layers": 7}),
    "phi3": ("phi3", {"original_max_position_embeddings": 512}),
    "phi3-long": ("phi3", script.longrope(16)),
    "phi3-partial": ("phi3", script.longrope(12, partial_rotary_factor=0.75)),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "granite": ("granite", script.GRANITE | {"logits_scaling": 2.0}),  # less flat
    "gemma2-ordered": ("gemma2", GEMMA | CAPS | {"num_hidden_layers": 3, "layer_types": [*"ssf"]}),
    "gemma3-ordered": ("gemma3_text", GEMMA | {"sliding_window": 16, "num_hidden_layers": 4, "layer_types": [*"sfsf"]}),
    "gemma3-windows": ("gemma3_text", GEMMA | {"sliding_window": 16, "num_hidden_layers": 2, "layer_types": [*"ss"]}),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-5}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": [*"ff"], "rope_parameters": LLAMA3_ROPE}),
    "exaone4-windows": (
        "exaone4",
        {"sliding_window": 16, "num_hidden_layers": 64, "hidden_size": 32, "intermediate_size": 32},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 32}),
    "ministral3": ("ministral3", {"head_dim": 32, "rope_parameters": MINISTRAL_ROPE}),
    "glm4": ("glm4", {"head_dim": 32, "pad_token_id": None}),
    "glm4-tied": ("glm4", {"head_dim": 32, "pad_token_id": None, "tie_word_embeddings": True, "attention_bias": False}),
    "cohere2": ("cohere2", {"sliding_window": 16, "num_hidden_layers": 5, "logit_scale": 2.0}),
    "cohere2-ordered": (
        "cohere2",
        {"sliding_window": 16, "num_hidden_layers": 3, "layer_types": [*"sfs"], "logit_scale": 2.0},
    ),
    "qwen3-yarn": ("qwen3", {"head_dim": 32, "rope_parameters": script.YARN}),
}


def build(
    name: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    extra_rows: int = 5,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> torch.nn.Module:
    """A model of a family in a folder, in this type; returned in fp32."""
    torch.manual_seed(7)
    kind, values = FAMILIES[name]
    sizes = {"vocab_size": len(tokenizer) + extra_rows, "eos_token_id": tokenizer.eos_token_id, **values, **more}
    if "layer_types" in sizes:
        sizes["layer_types"] = [LAYERS[one] for one in sizes["layer_types"]]
    config = AutoConfig.for_model(kind, **(SIZES | sizes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of one and biases of zero would hide mistakes
                parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.float()


def some_ids(size: int, count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(size), k=count)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: PreTrainedTokenizerFast) -> Path:
    """One qwen2 folder with GGUF files beside it."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    build("qwen2-tied", folder, small_tokenizer)
    export_files(folder, {folder.parent / f"{outtype}.gguf": outtype for outtype in ("f32", "f16", "q8_0")})
    return folder


@needs_llama
def test_parity_of_a_file_and_of_a_wrong_one(exported: Path, tmp_path: Path) -> None:
    texts = [text[:1500] for text in held_out_texts()[:2]]
    parity = compare(Original.open(exported), exported.parent / "f32.gguf", texts, positions=400)
    assert (parity.positions, parity.tokenizer_texts, parity.tokenizer_mismatches) == (400, 2, [])
    assert parity.max_abs_dlogprob < 0.02 and parity.mean_abs_dlogprob < 0.0025 and parity.top1_agreement > 0.93
    assert json.loads(json.dumps(dataclasses.asdict(parity)))["positions"] == 400
    assert "over 400 positions after at least two tokens" in parity.words
    other = Path(shutil.copytree(exported, tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][::-1]
    (other / "tokenizer.json").write_text(json.dumps(content))
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"].mul_(-1)
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    texts = ["def function(self):\n    return 12\n" * 3]
    parity = compare(Original.open(other), exported.parent / "f32.gguf", texts, positions=10_000)
    assert [index for index, _ in parity.tokenizer_mismatches] == [0]
    assert parity.max_abs_dlogprob > 0.1
    assert parity.top1_agreement < 0.9


@needs_llama
def test_parity_leaves_out_first_positions(exported: Path, monkeypatch: Patch) -> None:
    """Of each window, against a plain mean over the others; a model that is wrong only there has the same figures."""
    text, window = held_out_texts()[0][:1500], 64
    monkeypatch.setattr("distill.export.WINDOW", window)
    source = Original.open(exported)
    found = compare(source, exported.parent / "q8_0.gguf", [text], 200)
    ids = encode_text(source.tokenizer, text)
    expected, ends = list[float](), list[int]()
    with GgufModel(exported.parent / "q8_0.gguf", context=window) as quantised:
        for start in range(0, len(ids), window - 2):
            part = ids[start : start + window]
            quantised.rollback([0])
            q = quantised.extend(part).full()[:, : quantised.vocabulary_size].double().log_softmax(-1)
            with torch.inference_mode():
                p = source.model(torch.tensor([part])).logits[0, :, : q.shape[1]].double().log_softmax(-1)
            expected += (p.exp() * (p - q)).sum(-1)[1:-1].tolist()
            ends += range(start + 2, start + len(part))
    assert ends[:200] == [*range(2, 202)]  # each token but the first two, once
    assert found.positions == 200 and found.kl == pytest.approx(statistics.fmean(expected[:200]), rel=1e-4)

    def wrong_at_first(ids: Tensor, use_cache: bool) -> Any:
        output = source.model.base_model(ids, use_cache=use_cache)
        output.last_hidden_state[:, 0] *= -9
        return output

    head = source.model.get_output_embeddings
    elsewhere = SimpleNamespace(config=source.model.config, base_model=wrong_at_first, get_output_embeddings=head)
    again = dataclasses.replace(source, model=elsewhere, references={})
    assert compare(again, exported.parent / "q8_0.gguf", [text], 200) == found
    with pytest.raises(DataError, match="no three consecutive tokens"):
        compare(source, exported.parent / "q8_0.gguf", ["ab"[:1]], 200)


def test_a_check_holds_one_module_at_a_time(exported: Path, monkeypatch: Patch) -> None:
    """In fp32, and reads each of them once for all texts."""
    source, whole, held = Original.open(exported), load_config(str(exported)), list[int]()
    weights = {name: parameter.numel() for name, parameter in source.model.named_parameters()}
    multiply = torch.nn.functional.linear

    def recorded(*given: Any) -> Tensor:
        held.append(sum(p.numel() for p in source.model.parameters() if p.device.type != "meta"))
        assert all(p.dtype == torch.float32 for p in source.model.parameters())
        return multiply(*given)

    monkeypatch.setattr(torch.nn.functional, "linear", recorded)
    found = source.log_probabilities([[3, 9, 4, 8, 2], [7, 5, 11]], whole.vocab_size)
    assert [len(own) for own in found] == [3, 1] and len(held) == 7 * whole.num_hidden_layers + 1
    assert max(held) < max(weights.values()) + whole.hidden_size + whole.intermediate_size
    assert {p.device.type for p in source.model.parameters()} == {"meta"}
    assert source.log_probabilities([[3, 9, 4, 8, 2], [7, 5, 11]], whole.vocab_size) is found  # for the next file


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy"))


@needs_llama
def test_tokenizers_that_cannot_be_exported(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    strange = {"type": "Split", "pattern": {"Regex": r"\w+|\s"}, "behavior": "Isolated", "invert": False}
    for changes, message in (
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [strange, byte_level]}}, "has no pre-tokenizer"),
        ({"pre_tokenizer": None}, "has no pre-tokenizer"),
        ({"pre_tokenizer": byte_level | {"use_regex": True, "add_prefix_space": True}}, "has no pre-tokenizer"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"model": content["model"] | {"byte_fallback": True}}, "cannot be exported"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece"),
        ({"added_tokens": [content["added_tokens"][0] | {"lstrip": True}]}, "lstrip"),
        ({"model": content["model"] | {"vocab": {"a": "b"}}}, "has no vocabulary"),
    ):
        path.write_text(json.dumps(content | changes))
        with pytest.raises(DataError, match=message):
            export_gguf(folder, folder / "out.gguf", "f16")
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="q9_9"):
        export_gguf(folder, folder / "out.gguf", "q9_9")
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "config.json", eos_token_id=None)
    with pytest.raises(DataError, match="end-of-text"):
        export_gguf(folder, folder / "out.gguf", "f16")
    for missing in (path.unlink, partial(shutil.rmtree, folder)):
        missing()
        with pytest.raises(DataError, match="does not exist"):
            export_gguf(folder, folder.parent / "out.gguf", "f16")
    assert not list(folder.parent.rglob("*out.gguf*"))


@pytest.mark.parametrize(
    ("value", "outtypes", "message"), [(1e6, ("f32", "f16"), "too large"), (float("nan"), ("f32",), "NaN")]
)
def test_weights_that_a_type_cannot_hold_leave_no_file_of_any(
    folder: Path, value: float, outtypes: tuple[str, ...], message: str
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    out = folder / "out"
    out.mkdir()
    (out / f"{outtypes[-1]}.gguf").write_bytes(b"before")
    with pytest.raises(DataError, match=message):
        export_files(folder, {out / f"{kind}.gguf": kind for kind in outtypes})
    assert [path.read_bytes() for path in out.iterdir()] == [b"before"]


def test_missing_llama_cpp_names_the_package(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from distill.gguf import library as room

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(room, "library", room.library.__wrapped__)
    with pytest.raises(DataError, match='pip install "llama-cpp-python>='):
        GgufModel(exported.parent / "f16.gguf")


# ── families, types, importance matrices, the command ──


WINDOWS = "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1.0}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("qwen2", {"num_experts": 8}, "mixture of experts"),
    "mixtral": ("qwen2", {"model_type": "mixtral"}, "mixture of experts"),
    "unknown": ("qwen2", {"model_type": "mamba"}, "supported: llama"),
    "images": ("qwen2", {"model_type": "gemma3", "text_config": {}}, "images"),
    "gemma scale": ("gemma2", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar"),
    "gemma order": ("gemma3_text", {"layer_types": ["full_attention"] * 2}, "every n-th layer"),
    "gemma2 order": ("gemma2", {"layer_types": ["full_attention", WINDOWS]}, "every n-th layer"),
    "exaone4 windows": ("exaone4", {"sliding_window": 16, "layer_types": [WINDOWS] * 2}, "models with 64 layers"),
    "olmo2 head": ("olmo2", {"tie_word_embeddings": True}, "a tied head"),
    "cohere2 scale": ("cohere2", {"logit_scale": 0, "sliding_window": 8}, "logit_scale"),
    "ministral3 scale": ("ministral3", {"rope_parameters": YARN | {"mscale": 2.0}}, "yarn with mscale"),
    "dynamic rope": ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    "no factor": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
    "windows": ("qwen2", {"use_sliding_window": True}, "sliding"),
    "heads": ("qwen2", {"num_key_value_heads": 3}, "key-value heads"),
    "smollm3 order": ("smollm3", {"no_rope_layers": [1, 0]}, "layer without rotary embedding"),
    "longrope": ("qwen2", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    "partial rotation": ("qwen2", {"partial_rotary_factor": 0.5}, "8 of 16 dimensions"),
    "odd rotation": ("phi3", {"partial_rotary_factor": 0.95}, "15 of 16 dimensions"),
    "activation": ("gemma", {"hidden_activation": "relu"}, "relu"),
    "granite scale": ("granite", {"logits_scaling": 0}, "logits_scaling"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_llama_cpp_computes_otherwise(name: str, tmp_path: Path) -> None:
    kind, changes, message = REFUSED[name]
    config = SIZES | {"model_type": kind, "vocab_size": 100, "head_dim": 16, "query_pre_attn_scalar": 16} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError) as caught:
        read_shape(tmp_path)
    assert message in f"{caught.value} {caught.value.hint}"


def test_a_window_that_llama_cpp_leaves_out_is_told(tmp_path: Path) -> None:
    config = SIZES | {"model_type": "mistral", "vocab_size": 100, "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "beyond 64 tokens" in read_shape(tmp_path).notes[0]
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    assert read_shape(tmp_path).notes == ()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A qwen2 with rows of 256, which K-types divide."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    wide = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.06}
    build("qwen2-untied", folder, small_tokenizer, **wide)
    return folder


@needs_llama
def test_kl_falls_as_bits_rise(wide: Path, tmp_path: Path) -> None:
    """Every type, loaded in llama.cpp, of those of one construction; all are written in one pass."""
    source, texts, found = Original.open(wide), [text[:800] for text in held_out_texts()[:2]], dict[str, float]()
    for report in export_files(wide, {tmp_path / f"{outtype}.gguf": outtype for outtype in OUTTYPES}):
        assert report.bytes == report.path.stat().st_size and report.fallback_tensors == 0
        parity = compare(source, report.path, texts, 200)
        assert faults_of(parity, report.outtype) == [], report.outtype
        assert parity.kl is not None
        found[report.outtype] = parity.kl
    assert {path.stem for path in tmp_path.iterdir()} == set(OUTTYPES)
    for family in (
        ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k"),
        ("q4_0", "q5_0", "q8_0", "f16"),
        ("q4_1", "q5_1", "q8_0", "bf16", "f32"),
    ):
        values = [found[outtype] for outtype in family]
        assert values == sorted(values, reverse=True), (family, found)


PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
MATRIX = {f"blk.{layer}.{part}.weight": np.linspace(1, 500, 256) for layer in range(2) for part in PARTS}


def write_imatrix(path: Path, sums: dict[str, Any]) -> None:
    """A matrix of the sums over ten calls, as llama-imatrix writes it."""
    writer = gguf.GGUFWriter(path, "imatrix")
    for name, values in sums.items():
        writer.add_tensor(f"{name}.in_sum2", np.float32(values)[None])
        writer.add_tensor(f"{name}.counts", np.full((1, 1), 10, dtype=np.float32))
    write_gguf(writer)


def test_an_importance_matrix_is_the_models_own(wide: Path, tmp_path: Path, capsys: Capture) -> None:
    """Read by value; refused in llama-imatrix's older form, and where llama.cpp would ignore it, or a part of it."""
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, MATRIX | {"output.weight": np.full(256, 20.0)})
    found = importance_of(path, wide)
    assert found.keys() == {*MATRIX, "output.weight"} and set(found["output.weight"]) == {2}
    assert all((found[name] == np.float32(MATRIX[name]) / np.float32(10)).all() for name in MATRIX)
    one = "blk.1.ffn_down.weight"
    for matrix, message in (
        ({name: MATRIX[name] for name in MATRIX if name != one}, f"nothing for 1 of its tensors, first {one}"),
        (MATRIX | {"blk.2.attn_q.weight": MATRIX[one]}, "for 1 tensors that it lacks, first blk.2.attn_q.weight"),
        ({"blk.0.ssm_in.weight": MATRIX[one]}, "nothing for 14 .* and is for 1 tensors"),
        (MATRIX | {one: MATRIX[one][:192]}, f"{one} has 192 columns, not 256"),
        (MATRIX | {one: -MATRIX[one]}, f"{one} holds values that are not mean squares"),
        (MATRIX | {one: MATRIX[one] * np.nan}, f"{one} holds values that are not mean squares"),
        ({}, "importance matrix"),
    ):
        write_imatrix(path, matrix)
        with pytest.raises(DataError, match=message):
            importance_of(path, wide)
    write_imatrix(path, MATRIX)
    assert tiny.call("export-gguf", wide, "--to", tmp_path / "same", "--no-check", "--imatrix", path) == 0
    assert "--imatrix changes nothing in f16 and q8_0" in capsys.readouterr().err
    arguments = ("export-gguf", wide, "--to", tmp_path / "out", "--outtype", "q2_k", "--imatrix", path)
    for content, message in ((path.read_bytes()[:-3000], "imatrix"), (struct.pack("<i", 1), "older .dat matrix")):
        path.write_bytes(content)
        assert message in tiny.refused(capsys, *arguments) and not (tmp_path / "out").exists()


@needs_llama
def test_type_of_single_tensors_and_importance(wide: Path, tmp_path: Path) -> None:
    write_imatrix(tmp_path / "imatrix.gguf", MATRIX)
    importance = importance_of(tmp_path / "imatrix.gguf", wide)
    assert importance["blk.0.attn_q.weight"][-1] == 50
    files = {}
    for name, options in {
        "plain": {},
        "head": {"tensor_types": (("token_embd", "q8_0"),)},
        "weighed": {"importance": importance},
    }.items():
        export_files(wide, {tmp_path / f"{name}.gguf": "q4_k_m"}, **options)
        files[name] = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors}
    assert files["plain"]["blk.0.attn_q.weight"].tensor_type.name == "Q4_K"
    assert files["head"]["token_embd.weight"].tensor_type.name == "Q8_0"
    assert files["plain"]["token_embd.weight"].tensor_type.name != "Q8_0"
    assert (files["plain"]["blk.0.attn_q.weight"].data != files["weighed"]["blk.0.attn_q.weight"].data).any()
    with pytest.raises(DataError, match="q9"):
        export_files(wide, {tmp_path / "bad.gguf": "q4_k_m"}, tensor_types=(("token_embd", "q9"),))
    assert not [path for path in tmp_path.iterdir() if "bad" in path.name]
    with pytest.raises(DataError, match="importance"):
        importance_of(tmp_path / "plain.gguf", wide)


@pytest.mark.slow
@needs_llama
def test_importance_measured_on_a_text(tmp_path: Path) -> None:
    demo, kl = tiny.ROOT / "data" / "demo-target", []
    calibration = tmp_path / "calibration.txt"
    calibration.write_text("\n".join(held_out_texts(("validation",)))[:30_000], encoding="utf-8")
    for importance in (None, importance_of(calibration, demo)):
        export_files(demo, {tmp_path / "m.gguf": "q2_k"}, importance=importance)
        kl.append(compare(Original.open(demo), tmp_path / "m.gguf", held_out_texts(("test",))[:1], 400).kl)
    assert kl[1] < 0.9 * kl[0]
    for content, message in ((b"a", "too short"), (b"\xff", "not UTF-8")):
        calibration.write_bytes(content)
        with pytest.raises(DataError, match=message):
            importance_of(calibration, demo)
    with pytest.raises(DataError, match="cannot be read"):
        importance_of(tmp_path / "nowhere", demo)


@needs_llama
def test_command_checks_and_says_so(
    tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast, capsys: Capture, monkeypatch: Patch
) -> None:
    build("qwen2-untied", tmp_path / "model", small_tokenizer)
    arguments = ("export-gguf", tmp_path / "model", "--to", tmp_path / "out", "--outtype", "q4_k_m")
    line = tiny.shown(capsys, *arguments)
    assert "rows do not fit" in line and "0 of" in line and "KL" in line
    assert "exists already" in tiny.refused(capsys, *arguments)
    assert "not checked" in tiny.shown(capsys, *arguments, "--overwrite", "--no-check")
    # A file that is not its source's: the weights are changed between the writing and the check.

    def other(*given: Any, **options: Any) -> Any:
        report = export_files(*given, **options)
        build("qwen2-untied", tmp_path / "model", small_tokenizer, initializer_range=0.3)
        return report

    monkeypatch.setattr("distill.gguf.writer.export_files", other)
    assert "KL" in tiny.refused(capsys, *arguments, "--overwrite")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "does not name the model" in tiny.refused(capsys, "export-gguf", tmp_path / "adapter")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("README.md", "---\nlicense: [\n---\n", "model card"),
        ("README.md", "---\nlicense: {a: b}\n---\n", "general.license"),
        ("README.md", "---\ntags: [1, 2]\n---\n", "general.tags"),
        ("README.md", "---\nbase_model: [{name: 5}]\n---\n", "general.base_model.0.name"),
        ("generation_config.json", '{"temperature": "hot"}', "general.sampling.temp"),
        ("generation_config.json", '{"top_k": 1e30}', "general.sampling.top_k"),
        ("generation_config.json", "[1]", "model card"),
        ("README.md", b"\xff\xfe", "model card"),
    ],
)
def test_model_cards_that_cannot_be_read(
    file: str, content: str | bytes, message: str, tmp_path: Path, wide: Path
) -> None:
    shutil.copytree(wide, tmp_path / "model")
    (tmp_path / "model" / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        export_gguf(tmp_path / "model", tmp_path / "m.gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@needs_llama
def test_a_draft_is_held_against_its_target(
    tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast, capsys: Capture
) -> None:
    build("qwen2-untied", tmp_path / "model", small_tokenizer)
    build("qwen2-untied", tmp_path / "other", train_tokenizer(size=560))
    for name in ("model", "other"):
        export_gguf(tmp_path / name, tmp_path / f"{name}.gguf", "f16")
    arguments = ("export-gguf", tmp_path / "model", "--outtype", "bf16", "--no-check", "--to", tmp_path / "out")
    assert tiny.call(*arguments, "--target", tmp_path / "model.gguf") == 0
    draft = tmp_path / "out" / "model-bf16.gguf"
    assert f"llama-server -m {tmp_path / 'model.gguf'} -md {draft} --spec-type" in capsys.readouterr().out
    assert "does not fit" in tiny.refused(capsys, *arguments, "--overwrite", "--target", tmp_path / "other.gguf")


@needs_llama
@pytest.mark.parametrize(
    ("name", "key", "number"),
    [
        *((name, "rope.dimension_count", 8) for name in ("olmo2", "seed_oss", "ministral3")),
        *((name, "attention.key_length", 8) for name in ("olmo2", "cohere2")),
        *((name, "attention.sliding_window_pattern", 1) for name in ("gemma2", "gemma3", "cohere2")),
        ("glm4", "rope.dimension_count", 7),
    ],
)
def test_numbers_of_families_on_which_llama_cpp_aborts(
    name: str, key: str, number: int, tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    build(name, tmp_path / "model", small_tokenizer)
    path = export_gguf(tmp_path / "model", tmp_path / "m.gguf", "f16").path
    with_number(path, f"{open_head(path).architecture}.{key}", number)
    with pytest.raises(DataError, match=r"dimension_count|sliding_window_pattern|but its heads"):
        GgufFile(path)
