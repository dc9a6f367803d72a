"""Write tests/gguf_reference.json: what llama.cpp's converter writes for tiny models.

tests/gguf/test_gguf_reference.py compares our export with it. The converter comes with the source package of
llama-cpp-python. It runs in a process of its own, in any environment with torch, transformers, sentencepiece, protobuf:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python==0.3.36 && tar xzf llama_cpp_python-*.tar.gz
    python scripts/gguf_reference.py --tokenizers FOLDER \
        --converter llama_cpp_python-0.3.36/vendor/llama.cpp/convert_hf_to_gguf.py --python PYTHON

FOLDER has the tokenizers qwen2.5, llama-3, gpt-2 and llama-2, each in a folder with tokenizer.json. The models have
random weights made from integers, so that every machine builds the same bytes. llama-2's `tokenizer.model` is rebuilt
from its vocabulary, where a piece's score is minus its place. The Gemma vocabulary is synthetic.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "tests" / "gguf_reference.json"
OUTTYPES = ("f16", "bf16", "q8_0")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of a SentencePiece piece


class Case(NamedTuple):
    """A tiny model: its kind in transformers, its tokenizer, additions to config.json, and the type of its weights."""

    model_type: str
    tokenizer: str
    config: dict[str, Any]
    dtype: str = "bfloat16"


# Parts of configurations that tests/gguf/test_export.py uses too.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
GRANITE = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "tie_word_embeddings": True,
}


def longrope(rotated: int, **more: Any) -> dict[str, Any]:
    """Return a Phi-3 with long context: one list of frequency divisors up to 512 positions, and another beyond."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0 + 0.01 * index for index in range(rotated // 2)],
        "long_factor": [1.0 + 0.5 * index for index in range(rotated // 2)],
    }
    sizes = {"max_position_embeddings": 4096, "original_max_position_embeddings": 512}
    return {**sizes, "rope_parameters": rope | more}


GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
CASES = {
    "qwen2": Case("qwen2", "qwen2.5", {"tie_word_embeddings": True, "max_position_embeddings": 32768}),
    "qwen3": Case("qwen3", "qwen2.5", {"head_dim": 32, "tie_word_embeddings": False, "hidden_size": 32}, "float16"),
    "llama-2": Case("llama", "llama-2", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}, "float32"),
    "llama-3": Case("llama", "llama-3", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 131072}),
    "mistral": Case("mistral", "llama-2", {"sliding_window": None, "head_dim": 32, "rms_norm_eps": 1e-5}),
    "gemma": Case("gemma", "gemma", GEMMA | {"num_key_value_heads": 1}),
    "gemma2": Case("gemma2", "gemma", GEMMA | {"sliding_window": 32, "query_pre_attn_scalar": 16}),
    "gemma3": Case(
        "gemma3_text", "gemma", GEMMA | {"sliding_window": 32, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
    ),
    "phi-3": Case("phi3", "phi-3", {"pad_token_id": 32000, "original_max_position_embeddings": 512}, "float32"),
    "phi-3-long": Case("phi3", "phi-3", {"pad_token_id": 32000, **longrope(16)}),
    "phi-3-partial": Case("phi3", "phi-3", {"pad_token_id": 32000, **longrope(12, partial_rotary_factor=0.75)}),
    "smollm3": Case("smollm3", "llama-3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "granite": Case("granite", "gpt-2", GRANITE),
    # SmolLM 2: a tied llama with three heads per group. Its own pre-tokenizer is tested in test_export.py.
    "smollm2": Case(
        "llama",
        "gpt-2",
        {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen2-yarn": Case("qwen2", "qwen2.5", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3-yarn": Case(
        "qwen3",
        "qwen2.5",
        {"head_dim": 32, "rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0}},
    ),
}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
CARD = """---
license: apache-2.0
language:
- en
base_model: example/Base-1B
datasets:
- example/text
---
# A tiny model
"""


def build(name: str, tokenizers: Path, folder: Path) -> None:
    """Write the model folder of a case: config.json, model.safetensors, the tokenizer and a model card."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    case = CASES[name]
    folder.mkdir(parents=True)
    tokens = build_tokenizer(case.tokenizer, tokenizers, folder)
    rows = tokens + 5  # padding rows
    ids = json.loads((folder / "ids.json").read_text())
    (folder / "ids.json").unlink()
    config = AutoConfig.for_model(case.model_type, **{**COMMON, "vocab_size": rows, **ids, **case.config})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    draw = np.random.Generator(np.random.PCG64(7))
    kept = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        # Sums of two integers give the same floats on every machine, and are not flat.
        parts = draw.integers(-(2**15), 2**15, (2, *tensor.shape), dtype=np.int32)
        values = torch.from_numpy(parts.sum(0).astype(np.float32) / 2**18)
        kept[key] = (values + (1 if key.endswith("norm.weight") and "gemma" not in name else 0)).to(
            getattr(torch, case.dtype)
        )
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.dtype = case.dtype
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_p": 0.8, "top_k": 20}))
    (folder / "README.md").write_text(CARD)


def build_tokenizer(name: str, tokenizers: Path, folder: Path) -> int:
    """Write a tokenizer into a model folder, and its special ids into ids.json. Return the number of its tokens."""
    if name in ("llama-2", "phi-3", "gemma"):
        return _build_pieces(name, tokenizers / "llama-2", folder)
    for file in (tokenizers / name).iterdir():
        shutil.copy(file, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    if name == "llama-3":  # Meta's own file says so. Without it, llama.cpp gives the same rules another name.
        content["model"]["ignore_merges"] = True
        (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    ids = {**content["model"]["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "ids.json").write_text(
        json.dumps({f"{role}_token_id": ids[settings[f"{role}_token"]] for role in ("bos", "eos")})
    )
    return max(ids.values()) + 1


def _build_pieces(name: str, source: Path, folder: Path) -> int:
    content = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    if name == "gemma":
        content, settings = _gemma(content, settings)
    elif name == "phi-3":
        extra = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
        for number, token in enumerate(extra, 32000):
            content["added_tokens"].append(
                {**content["added_tokens"][0], "id": number, "content": token, "rstrip": number > 32000}
            )
        settings |= {"eos_token": extra[0], "pad_token": extra[0], "chat_template": "{{ bos_token }}{{ messages }}"}
    elif name == "llama-2":
        settings |= {"add_prefix_space": True, "chat_template": "{{ messages }}"}
    vocabulary = content["model"]["vocab"]
    added = {token["id"]: token["content"] for token in content["added_tokens"]}
    settings["tokenizer_class"] = "LlamaTokenizer" if name != "gemma" else "GemmaTokenizer"
    settings["added_tokens_decoder"] = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"}
        for token in content["added_tokens"]
    }
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(pieces_of(vocabulary, content["added_tokens"])))
    ids = {token: number for number, token in added.items()} | vocabulary
    (folder / "ids.json").write_text(
        json.dumps({f"{role}_token_id": ids[settings[f"{role}_token"]] for role in ("bos", "eos")})
    )
    return max(ids.values()) + 1


def _gemma(content: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a small synthetic vocabulary with Gemma's special tokens at Gemma's ids, without its space prefix."""
    names = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 106: "<start_of_turn>", 107: "<end_of_turn>"}
    old = [token for token, number in sorted(content["model"]["vocab"].items(), key=lambda item: item[1])]
    first = old.index("▁")  # llama-2's single characters begin here.
    pieces = [*old[3:2259], *old[first : first + 600]]
    order: list[str] = []
    for piece in dict.fromkeys(pieces):
        while len(order) in names:
            order.append(names[len(order)])
        order.append(piece)
    known = set(order)
    merges = []
    for merge in content["model"]["merges"]:
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        if {left, right, left + right} <= known:
            merges.append([left, right])
    content["model"] |= {"vocab": {token: number for number, token in enumerate(order)}, "merges": merges}
    template = content["added_tokens"][0]
    content["added_tokens"] = [{**template, "id": number, "content": token} for number, token in names.items()]
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    content["pre_tokenizer"] = None
    content["decoder"]["decoders"] = content["decoder"]["decoders"][:-1]  # There is no space to strip.
    post = json.dumps(content["post_processor"]).replace("<s>", "<bos>").replace('"ids": [1]', '"ids": [2]')
    content["post_processor"] = json.loads(post)
    settings |= {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return content, settings


def pieces_of(vocabulary: dict[str, int], added: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    """Return the pieces of a SentencePiece model with a tokenizer.json's vocabulary: text, score, kind."""
    special = {token["content"] for token in added}
    pieces: list[tuple[str, float, int]] = []
    first = min(number for token, number in vocabulary.items() if token == "▁▁")
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        if token == "<unk>":
            pieces.append((token, 0.0, UNKNOWN))
        elif token in special:
            pieces.append((token, 0.0, CONTROL))
        elif len(token) == 6 and token.startswith("<0x"):
            pieces.append((token, 0.0, BYTE))
        else:  # llama-2 merges spaces with each other last.
            pieces.append((token, -1e9 if not token.strip("▁") else float(first - number), NORMAL))
    return pieces


def sentencepiece_model(pieces: list[tuple[str, float, int]]) -> bytes:
    """Return a `tokenizer.model` (sentencepiece's protobuf ModelProto): BPE with byte fallback, text unchanged."""

    def field(number: int, kind: int) -> bytes:
        return bytes([number << 3 | kind])

    def varint(value: int) -> bytes:
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    def part(number: int, body: bytes) -> bytes:
        return field(number, 2) + varint(len(body)) + body

    body = b"".join(
        part(1, part(1, text.encode()) + field(2, 5) + struct.pack("<f", score) + field(3, 0) + varint(kind))
        for text, score, kind in pieces
    )
    ids = {text: number for number, (text, _, _) in enumerate(pieces)}
    # Fields of TrainerSpec: model_type 3 = BPE (2), byte_fallback 35, unk/bos/eos/pad ids 40-43
    trainer = field(3, 0) + varint(2) + varint(35 << 3) + varint(1) + varint(40 << 3) + varint(ids["<unk>"])
    normalizer = part(1, b"identity") + field(3, 0) + varint(1) + field(4, 0) + varint(0) + field(5, 0) + varint(1)
    return body + part(2, trainer) + part(3, normalizer)


KINDS = (
    *("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "FLOAT32", "BOOL", "STRING", "ARRAY"),
    *("UINT64", "INT64", "FLOAT64"),
)
CODES = dict(zip(KINDS, "BbHhIif?  Qqd", strict=True))


class Reader:
    """An independent reader. gguf.GGUFReader takes seconds for a real vocabulary, and ours would check itself."""

    def __init__(self, path: Path) -> None:
        self.data, self.at = path.read_bytes(), 4

    def numbers(self, codes: str) -> tuple[Any, ...]:
        numbers = struct.unpack_from(f"<{codes}", self.data, self.at)
        self.at += struct.calcsize(f"<{codes}")
        return numbers

    def text(self) -> str:
        (size,) = self.numbers("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def field(self) -> list[Any]:
        """Return the names of a value's types, and the value."""
        kind = KINDS[self.numbers("I")[0]]
        if kind != "ARRAY":
            return [kind, self.text() if kind == "STRING" else self.numbers(CODES[kind])[0]]
        number, count = self.numbers("IQ")
        inner = KINDS[number]
        if inner == "STRING":
            return [kind, inner, [self.text() for _ in range(count)]]
        return [kind, inner, list(self.numbers(f"{count}{CODES[inner]}"))]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, lengths, type and offset of the next tensor in the list."""
        name, (dimensions,) = self.text(), self.numbers("I")
        return name, self.numbers(f"{dimensions}Q"), *self.numbers("IQ")


def describe(path: Path) -> dict[str, Any]:
    """Return every field and tensor of a GGUF file: type, and value or digest."""
    import gguf

    file = Reader(path)
    _, count, keys = file.numbers("IQQ")
    fields = {file.text(): file.field() for _ in range(keys)}
    for field in fields.values():
        value = field[-1]
        if isinstance(value, list) and len(value) > 16:
            text = json.dumps(value, ensure_ascii=False)
            field[-1] = f"{len(value)} values, sha256 {hashlib.sha256(text.encode()).hexdigest()[:32]}"
    listed = [file.tensor() for _ in range(count)]
    start, tensors = file.at + -file.at % 32, {}
    for name, shape, number, offset in listed:
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = file.data[start + offset : start + offset + int(np.prod(shape)) // block * size]
        tensors[name] = [kind.name, list(shape), hashlib.sha256(data).hexdigest()[:32]]
    return {"fields": fields, "tensors": tensors}


def main() -> None:
    """Build every case, convert it, and write the reference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--converter", type=Path, required=True, help="convert_hf_to_gguf.py")
    parser.add_argument("--tokenizers", type=Path, required=True, help="folder of the tokenizers' folders")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs the converter")
    options = parser.parse_args()
    reference: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in CASES:
            folder = Path(place) / name
            build(name, options.tokenizers, folder)
            reference[name] = {}
            for outtype in OUTTYPES:
                output = Path(place) / f"{name}-{outtype}.gguf"
                command = [options.python, options.converter, folder, "--outtype", outtype, "--outfile", output]
                done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
                if done.returncode:
                    sys.exit(f"{name}: the converter failed\n{done.stderr[-3000:]}")
                described = describe(output)
                output.unlink()
                if outtype != "f16":  # Fields that equal those of f16 are not repeated.
                    first, fields = reference[name]["f16"]["fields"], described["fields"]
                    described["fields"] = {key: value for key, value in fields.items() if first.get(key) != value}
                reference[name][outtype] = described
            print(f"{name}: {len(reference[name]['f16']['tensors'])} tensors", file=sys.stderr)
            shutil.rmtree(folder)
    REFERENCE.write_text(json.dumps(reference, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
