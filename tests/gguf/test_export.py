"""GGUF export, the GGUF model and their parity with Hugging Face, on tiny models built here."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf_reference import script
from tiny import needs_llama
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

from distill.data.texts import first_difference
from distill.engines.llama_cpp.model import GgufModel
from distill.errors import DataError
from distill.export import Source, compare
from distill.gguf import tokenizer as export_tokenizer
from distill.gguf.fields import read_shape
from distill.gguf.writer import export_files, export_gguf, permute_for_llama, read_tensors
from distill.recipe.measuring import OUTTYPES

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("DISTILL_SHARED", ROOT.parent / "shared"))

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35_SPLIT = QWEN2_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
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
    return [p.read_text(encoding="utf-8") for s in splits for p in sorted((ROOT / "data" / s).rglob("*.py"))]


def train_tokenizer(split: str | None = QWEN2_SPLIT, size: int = 768, digits: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    if split is None:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    else:
        steps = [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
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
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
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
    "exaone4": (
        "exaone4",
        {"sliding_window": None, "layer_types": [*"ff"], "rope_parameters": LLAMA3_ROPE},
    ),
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


def reference(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def some_ids(size: int, count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(size), k=count)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: PreTrainedTokenizerFast) -> Path:
    """One qwen2 folder with a GGUF file of every type beside it."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    build("qwen2-tied", folder, small_tokenizer)
    for outtype in OUTTYPES:
        export_gguf(folder, folder.parent / f"{outtype}.gguf", outtype)
    return folder


@needs_llama
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast) -> None:
    model = build(name, tmp_path / "model", small_tokenizer)
    ids = some_ids(len(small_tokenizer), 200)
    expected = reference(model, ids)[:, : len(small_tokenizer)].log_softmax(-1)
    report = export_gguf(tmp_path / "model", tmp_path / "m.gguf", "f32")
    assert report.bytes == (tmp_path / "m.gguf").stat().st_size
    assert report.fallback_tensors == 0
    with GgufModel(tmp_path / "m.gguf", context=200, threads=1) as gguf:
        assert gguf.head_rows == len(small_tokenizer) + 5 and gguf.vocabulary_size == len(small_tokenizer)
        actual = gguf.extend(ids).full().log_softmax(-1)
    # The f16 cache is the only rounding, but for GELU, which llama.cpp computes from an f16 table; a wrong permutation,
    # bias or norm gives differences above 0.1.
    exact = name.startswith(("llama", "qwen"))
    assert expected.std() > (0.5 if exact else 0.2)
    assert (actual - expected).abs().max() < (0.02 if exact else 0.05)
    assert (actual - expected).abs().mean() < (0.002 if exact else 0.004)


@needs_llama
@pytest.mark.parametrize(("outtype", "largest"), [("f32", 0.02), ("f16", 0.03), ("bf16", 0.2), ("q8_0", 0.4)])
def test_parity_of_every_type(exported: Path, outtype: str, largest: float) -> None:
    texts = [text[:1500] for text in held_out_texts()[:2]]
    parity = compare(Source.open(exported), exported.parent / f"{outtype}.gguf", texts, positions=400)
    assert parity.positions == 400
    assert parity.tokenizer_texts == 2
    assert parity.tokenizer_mismatches == []
    assert parity.max_abs_dlogprob < largest
    assert parity.mean_abs_dlogprob < largest / 8
    assert parity.top1_agreement > 0.93
    assert json.loads(json.dumps(dataclasses.asdict(parity)))["positions"] == 400


@needs_llama
def test_parity_reports_a_wrong_file(exported: Path, tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast) -> None:
    other = tmp_path / "other"
    shutil.copytree(exported, other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][::-1]
    (other / "tokenizer.json").write_text(json.dumps(content))
    torch.manual_seed(8)
    noisy = Qwen2ForCausalLM.from_pretrained(other)
    with torch.no_grad():
        noisy.model.layers[0].mlp.down_proj.weight.mul_(-1)
    noisy.save_pretrained(other)
    texts = ["def function(self):\n    return 12\n" * 3]
    parity = compare(Source.open(other), exported.parent / "f32.gguf", texts, positions=10_000)
    assert [index for index, _ in parity.tokenizer_mismatches] == [0]
    assert parity.max_abs_dlogprob > 0.1
    assert parity.top1_agreement < 0.9


def test_q8_fallback_is_counted(tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast) -> None:
    import gguf

    build("qwen2-tied", tmp_path / "model", small_tokenizer, intermediate_size=100)
    report = export_gguf(tmp_path / "model", tmp_path / "m.gguf", "q8_0", source_model_name="Named")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert report.fallback_tensors == 2
    assert report.tensors == len(types)
    assert types["blk.0.ffn_down.weight"] == types["blk.1.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.attn_q.bias"] == types["output_norm.weight"] == "F32"


def test_bf16_sources_and_shards_are_read_exactly(tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast) -> None:
    import gguf

    model = build("llama", tmp_path / "model", small_tokenizer, dtype=torch.bfloat16)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="100KB")
    (tmp_path / "model" / "model.safetensors").unlink(missing_ok=True)
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    for outtype in ("f32", "bf16"):
        export_gguf(tmp_path / "model", tmp_path / f"{outtype}.gguf", outtype)
        tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / f"{outtype}.gguf").tensors}
        up = gguf.quants.dequantize(tensors["blk.1.ffn_up.weight"].data, tensors["blk.1.ffn_up.weight"].tensor_type)
        assert np.array_equal(up, model.model.layers[1].mlp.up_proj.weight.float().detach().numpy())
        key = gguf.quants.dequantize(tensors["blk.1.attn_k.weight"].data, tensors["blk.1.attn_k.weight"].tensor_type)
        source = model.model.layers[1].self_attn.k_proj.weight.float().detach().numpy()
        assert np.array_equal(key[1], source[8])  # head size 16: pair (0, 8) becomes neighbours
        assert np.array_equal(key, permute_for_llama(source, 2))


@needs_llama
def test_tokenizer_equals_on_held_out_files(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    texts = [*held_out_texts(), *HARD_TEXTS, "a<tool call>b <tool call>"]
    assert len(texts) > 40
    with GgufModel(exported.parent / "f16.gguf", context=8) as gguf:
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert gguf.tokenize(text, parse_special=True) == ids
            assert gguf.detokenize(ids) == text.encode()
        # Without parse_special a control token in a text is plain text; padding rows have names of their own.
        assert len(gguf.tokenize("<|im_end|>")) > 1
        name = f"[PAD{gguf.head_rows - 1}]"
        assert gguf.detokenize([gguf.head_rows - 1]) in (b"", name.encode())
        assert gguf.tokenize(name, parse_special=True) == tokenizer.encode(name)


@needs_llama
@pytest.mark.parametrize(
    ("split", "digits", "ignore", "pre"),
    [
        (None, False, False, "gpt-2"),
        (None, True, False, "smollm"),
        (LLAMA3_SPLIT, False, True, "llama-bpe"),
        (LLAMA3_SPLIT, False, False, "llama-bpe"),
        (QWEN35_SPLIT, False, False, "qwen35"),
    ],
)
def test_each_pre_tokenizer(split: str | None, digits: bool, ignore: bool, pre: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(split, size=600, digits=digits)
    if split == LLAMA3_SPLIT:
        bos = tokenizer.convert_tokens_to_ids("<|im_start|>")
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", bos)]
        )
    build("qwen2-tied", tmp_path / "m", tokenizer)
    content = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    content["model"]["ignore_merges"] = ignore
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]  # the older spelling
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(content))
    vocabulary = read_shape(tmp_path / "m").vocabulary
    read = export_tokenizer.read_tokenizer(tmp_path / "m", vocabulary)
    assert read.pre == pre
    assert read.add_bos == (split == LLAMA3_SPLIT)
    assert sum(kind == 5 for kind in read.types) == 5  # unused
    export_gguf(tmp_path / "m", tmp_path / "m.gguf", "q8_0")
    plain = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    with GgufModel(tmp_path / "m.gguf", context=8) as gguf:
        for text in [*held_out_texts()[::5], *HARD_TEXTS]:
            assert gguf.tokenize(text, parse_special=True) == plain.encode(text, add_special_tokens=False).ids


@needs_llama
def test_unreachable_tokens_decide_between_llama3_names(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(LLAMA3_SPLIT, size=600)
    build("qwen2-tied", tmp_path / "m", tokenizer, extra_rows=6)
    path = tmp_path / "m" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["zyxwv"] = len(tokenizer)  # a token that no merge makes
    for ignore, pre in ((True, "llama-bpe"), (False, "dbrx")):
        content["model"]["ignore_merges"] = ignore
        path.write_text(json.dumps(content))
        assert export_tokenizer.read_tokenizer(tmp_path / "m", len(tokenizer) + 6).pre == pre
        export_gguf(tmp_path / "m", tmp_path / "m.gguf", "f16")
        with GgufModel(tmp_path / "m.gguf", context=8) as gguf:
            ids = gguf.tokenize("zyxwv")
        assert ids == Tokenizer.from_file(str(path)).encode("zyxwv").ids
        assert (ids == [len(tokenizer)]) == ignore


@needs_llama
@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5",
        "gpt-2",
        pytest.param("llama-3", marks=pytest.mark.slow),
        pytest.param("deepseek-llm", marks=pytest.mark.slow),
    ],
)
def test_real_tokenizers(name: str, tmp_path: Path) -> None:
    source = SHARED / "tokenizers" / name
    if not source.is_dir():
        pytest.skip(f"{source} is not here; set DISTILL_SHARED")
    tokenizer = AutoTokenizer.from_pretrained(source)
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 1}
    build("qwen2-tied", tmp_path / "m", tokenizer, extra_rows=3, **small)
    for file in source.iterdir():
        shutil.copy(file, tmp_path / "m")
    export_gguf(tmp_path / "m", tmp_path / "m.gguf", "f16")
    with GgufModel(tmp_path / "m.gguf", context=8) as gguf:
        for text in [*held_out_texts(("test",)), *HARD_TEXTS]:
            text = unicodedata.normalize("NFC", text)
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            actual = gguf.tokenize(text, parse_special=True)
            assert first_difference(ids, actual) is None
            assert gguf.detokenize(actual) == text.encode()


@needs_llama
@pytest.mark.parametrize("outtype", OUTTYPES)
def test_rollback_equals_a_fresh_prefill(exported: Path, outtype: str) -> None:
    chooser = random.Random(3)
    with GgufModel(exported.parent / f"{outtype}.gguf", context=160, batch=64, threads=1) as gguf:
        for _ in range(4):
            gguf.rollback([0])
            text: list[int] = []
            pieces: list[int] = []  # lengths of the calls whose tokens are still there
            for _ in range(12):
                count = chooser.randrange(2, 9)
                new = some_ids(gguf.vocabulary_size, count, chooser.randrange(1000))
                last = gguf.extend(new).full()
                text, pieces = text + new, [*pieces, count]
                assert gguf.lengths == [len(text)]
                if chooser.random() < 0.5:
                    dropped = chooser.randrange(1, len(pieces) + 1)
                    pieces = pieces[:-dropped]
                    text = text[: sum(pieces)]
                    gguf.rollback([len(text)])
            new = some_ids(gguf.vocabulary_size, 5, 1)
            last = gguf.extend(new).full()
            gguf.rollback([0])
            position = 0
            for count in pieces:
                gguf.extend(text[position : position + count], want=[])
                position += count
            assert torch.equal(gguf.extend(new).full(), last)


@needs_llama
@pytest.mark.parametrize("outtype", ["f32", "f16", "q8_0"])
def test_pad_single_is_bitwise_lossless(exported: Path, outtype: str) -> None:
    path = exported.parent / f"{outtype}.gguf"
    chooser = random.Random(5)
    with GgufModel(path, context=97, batch=16, threads=1, pad_single=True) as gguf:
        ids = some_ids(gguf.vocabulary_size, 97, 2)  # to the last cell, where the dummy needs one more
        whole = gguf.extend(ids).full()
        gguf.rollback([0])
        alone = torch.cat([gguf.extend([token]).full() for token in ids])
        assert gguf.lengths == [97]
        assert torch.equal(alone, whole)
        position = 0
        gguf.rollback([0])
        while position < len(ids):  # chunks with rejected tokens after them, single wants, and rollbacks
            count = min(chooser.randrange(1, 7), len(ids) - position)
            wrong = some_ids(gguf.vocabulary_size, min(chooser.randrange(0, 4), 97 - position - count), position)
            want = chooser.randrange(count)
            row = gguf.extend([*ids[position : position + count], *wrong], want=[want]).full()
            assert torch.equal(row[0], whole[position + want])
            position += count
            gguf.rollback([position])


@needs_llama
def test_logits_object(exported: Path) -> None:
    with GgufModel(exported.parent / "f32.gguf", context=300, batch=32, threads=1) as gguf:
        ids = some_ids(gguf.vocabulary_size, 97)  # three chunks, and one token over
        whole = gguf.extend(ids).full()
        assert whole.shape == (97, gguf.vocabulary_size)
        assert whole.dtype is torch.float32
        gguf.rollback([0])
        want = [96, 3, 50, 3, 31, 32]
        logits = gguf.extend(ids, [97], want=want)
        assert len(logits) == len(want)
        expected = whole[want]
        assert (logits.full() - expected).abs().max() < 1e-4
        expected = logits.full()
        assert logits.argmax() == expected.argmax(-1).tolist()
        assert len(gguf.extend([1, 2], want=[])) == 0
        with pytest.raises(ValueError, match="overwritten"):
            logits.argmax()


@needs_llama
def test_misuse_is_refused_before_c(exported: Path) -> None:
    gguf = GgufModel(exported.parent / "f16.gguf", context=16, batch=8, threads=1)
    gguf.extend([1, 2, 3])
    for arguments, message in (
        ({"tokens": []}, "at least one"),
        ({"tokens": [gguf.vocabulary_size]}, "token ids"),
        ({"tokens": [-1]}, "token ids"),
        ({"tokens": [1] * 14}, "do not fit a context"),
        ({"tokens": [1, 2], "counts": [1, 1]}, "counts"),
        ({"tokens": [1, 2], "want": [2]}, "want"),
        ({"tokens": [1, 2], "want": [-1]}, "want"),
        ({"tokens": [1, 2], "parents": [-1, 0]}, "trees"),
    ):
        with pytest.raises(ValueError, match=message):
            gguf.extend(**arguments)
        assert gguf.lengths == [3]
    for lengths in ([4], [-1], [1, 1], []):
        with pytest.raises(ValueError, match="lengths"):
            gguf.rollback(lengths)
    with pytest.raises(ValueError, match="ids"):
        gguf.detokenize([gguf.head_rows])
    gguf.extend([1] * 13)
    assert gguf.lengths == [16]
    gguf.close()
    gguf.close()
    with pytest.raises(ValueError, match="closed"):
        gguf.extend([1])
    with pytest.raises(ValueError, match="closed"):
        gguf.tokenize("a")


@needs_llama
def test_bad_gguf_files_are_data_errors(exported: Path, tmp_path: Path) -> None:
    whole = (exported.parent / "q8_0.gguf").read_bytes()
    for name, content in {
        "empty": b"",
        "text": b"not a model at all",
        "magic": b"GGUF",
        "truncated": whole[: len(whole) * 2 // 3],
        "no-tensors": whole[:3000],
        "damaged": whole[:40] + b"\xff" * 400 + whole[440:],
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=name):
            GgufModel(path)
    for path in (tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            GgufModel(path)


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "copy")
    return tmp_path / "copy"


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": 128}, "shape"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"num_hidden_layers": 1}, "no place"),
        ({"vocab_size": 100}, "no row in the model"),
        ({"tie_word_embeddings": False}, "lm_head"),
        ({"model_type": "llama"}, "copy"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "mscale": 1.0}}, "mscale"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_parameters": None}, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"use_sliding_window": True}, "sliding"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "key-value heads"),
    ],
)
def test_models_that_cannot_be_exported(folder: Path, changes: dict[str, object], message: str) -> None:
    edit(folder / "config.json", **changes)
    if changes == {"model_type": "llama"}:
        # Llama takes q, k and v biases, so a renamed qwen2 is a valid llama: only a stray tensor is refused.
        shape = read_shape(folder)
        assert "blk.0.attn_q.bias" in {tensor.name for tensor in read_tensors(folder, shape)}
        edit(folder / "config.json", model_type="qwen3")
        message = "missing"
    with pytest.raises(DataError, match=message):
        export_gguf(folder, folder / "out.gguf", "f16")
    assert not list(folder.glob("*out.gguf*"))


def test_older_rope_spelling(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config["rope_theta"] = 123456.0
    (folder / "config.json").write_text(json.dumps(config))
    shape = read_shape(folder)
    assert (shape.rope_theta, shape.rope["rope_type"]) == (123456.0, "default")


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


def without_end_token(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "config.json", eos_token_id=None)


def truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("damage", "outtype", "message"),
    [
        (without_end_token, "f16", "end-of-text"),
        (lambda folder: truncated(folder / "model.safetensors"), "f16", "damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "f16", r"model\.safetensors"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "f16", "JSON"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "f16", "does not exist"),
        (lambda folder: shutil.rmtree(folder), "f16", "does not exist"),
        (lambda folder: None, "q9_9", "q9_9"),
    ],
)
def test_damaged_folders(
    damage: Callable[[Path], object], outtype: str, message: str, folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    with pytest.raises(DataError, match=message):
        export_gguf(folder, tmp_path / "out.gguf", outtype)


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
