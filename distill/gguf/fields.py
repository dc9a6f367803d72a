"""The keys of a GGUF file: general.*, the architecture's (sizes, rotary embedding, scales) and tokenizer.ggml.*."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import distill
from distill.errors import DataError
from distill.folders import Floats
from distill.gguf.families import LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS, YARN_KEYS
from distill.gguf.head import ARRAY, STRING, write_head
from distill.gguf.shape import CORRECT, Shape
from distill.gguf.tokens import token_key
from distill.vocabulary.vocabulary import SPACE

DEFAULT_THETA = 10000.0  # llama.cpp's, where a file names none
INTEGERS = (4, 5)  # of gguf.GGUFValueType, 32 bits


@dataclass(frozen=True)
class Advice:
    """How to draft: tokens a round at most, and llama.cpp's p_min, None where no floor was tried."""

    n_max: int
    p_min: float | None = None


@dataclass(frozen=True)
class Origin:
    """What the files of a model's folder do not say. What they do say wins, except for the name.

    `base_model` and `datasets` are hub names; `licence` is that of the base model.
    """

    name: str | None = None
    recipe: str | None = None
    base_model: str | None = None
    licence: str | None = None
    datasets: tuple[str, ...] = ()
    advice: Advice | None = None


PLAIN = Origin()  # nothing but what the folder's files say


def add_general_fields(writer: Any, folder: Path, origin: Origin, outtype: str, parameters: int) -> None:
    """Write the keys to a gguf.GGUFWriter: those that the gguf package reads from the folder's model card, config.json,
    generation_config.json and name, as llama.cpp's converter does, what `origin` adds to them, and keys of our own.

    Raises DataError for a model card whose head is no YAML, or holds values that GGUF has no place for.
    """
    import gguf
    import yaml

    folder = folder.resolve()
    try:
        metadata = gguf.Metadata.load(None, folder, origin.name, parameters)
        if metadata.name is None:
            metadata.name = folder.name
        _complete(metadata, origin)
        if metadata.size_label is None and parameters > 0:
            metadata.size_label = gguf.size_label(parameters, parameters, 0, 0)
        writer.add_type(gguf.GGUFType.MODEL)
        metadata.set_gguf_meta_model(writer)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, UnicodeDecodeError) as error:
        first = str(error).split("\n", 1)[0]
        raise DataError(
            f"{folder}: README.md or generation_config.json cannot be read as a model card: {first}",
            "correct the block between the --- lines of README.md, or remove it",
        ) from None
    _require_forms(folder, writer)
    writer.add_file_type(file_type_number(outtype))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("distill.version", distill.__version__)
    if origin.recipe is not None:
        writer.add_string("distill.recipe", origin.recipe)
    if origin.advice is not None:
        writer.add_uint32("distill.draft.n_max", origin.advice.n_max)
        if origin.advice.p_min is not None:
            writer.add_float32("distill.draft.p_min", origin.advice.p_min)


def file_type_number(outtype: str) -> int:
    """llama.cpp's number of a type of files (gguf.LlamaFileType)."""
    import gguf

    return int(gguf.LlamaFileType["ALL_F32" if outtype == "f32" else f"MOSTLY_{outtype.upper()}"])


def _complete(metadata: Any, origin: Origin) -> None:
    """Fill what the model card leaves out, in the words that the gguf package makes of such a card."""
    import gguf

    card: dict[str, Any] = {
        "license": origin.licence,
        "datasets": list(origin.datasets),
        "base_model": origin.base_model,
    }
    made = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), {key: value for key, value in card.items() if value})
    for key in ("license", "datasets", "base_models"):
        if not getattr(metadata, key):
            setattr(metadata, key, getattr(made, key))


def _require_forms(folder: Path, writer: Any) -> None:
    """The gguf package takes values as they stand in the files and would fail while it writes them."""
    for key, entry in writer.kv_data[0].items():
        values = entry.value if entry.type == ARRAY else [entry.value]
        kind = str if entry.type in (STRING, ARRAY) else int if entry.type in INTEGERS else (int, float)
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
        ):
            raise DataError(
                f"{folder}: README.md or generation_config.json gives {entry.value!r:.60} for {key}",
                "correct that entry, or remove it",
            )
        if entry.type in INTEGERS and not -(2**31) <= entry.value < 2**31:
            raise DataError(f"{folder}: {key} is {entry.value}, too large for GGUF", "correct that entry, or remove it")


def add_model_fields(writer: Any, shape: Shape) -> None:
    """Write the architecture's keys to a gguf.GGUFWriter, those of llama.cpp's converter."""
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    add_epsilon = writer.add_layer_norm_rms_eps if shape.family.epsilon == "rms_norm_eps" else writer.add_layer_norm_eps
    add_epsilon(shape.epsilon)
    if shape.family.states_head_size or shape.head_size * shape.heads != shape.hidden:
        writer.add_key_length(shape.head_size)
        writer.add_value_length(shape.head_size)
    if shape.family.llama_keys:
        writer.add_vocab_size(shape.vocabulary)
    if shape.family.llama_keys or shape.family.rotates_part:
        writer.add_rope_dimension_count(shape.rotated)
    if shape.architecture not in ("gemma", "gemma2") or shape.rope_theta != DEFAULT_THETA:
        writer.add_rope_freq_base(shape.rope_theta)
    if shape.local_theta is not None and shape.architecture == "gemma3":
        writer.add_rope_freq_base_swa(shape.local_theta)
    if shape.window is not None:
        writer.add_sliding_window(shape.window)
        if shape.period != shape.family.full_every:
            writer.add_sliding_window_pattern(shape.period)
    elif shape.architecture == "phi3":
        writer.add_sliding_window(shape.config.get("sliding_window") or 0)
    _add_rope_scaling(writer, shape)
    _add_scales(writer, shape)


def _add_rope_scaling(writer: Any, shape: Shape) -> None:
    import gguf

    rope, kind = shape.rope, shape.rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        for name, key in YARN_KEYS.items():
            if rope.get(name) is not None:
                writer.add_float32(f"{shape.architecture}.rope.scaling.yarn_{key}", float(rope[name]))
        if rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(float(rope["mscale_all_dim"]))
    if kind == "yarn" or rope.get("llama_4_scaling_beta"):
        writer.add_rope_scaling_orig_ctx_len(_original_context(shape))
    if rope.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(float(rope["llama_4_scaling_beta"]))
    if shape.architecture == "phi3":
        original = _original_context(shape)
        writer.add_rope_scaling_orig_ctx_len(original)
        if kind == "longrope":
            writer.add_rope_scaling_attn_factors(longrope_attention(shape.context, original))


def longrope_attention(context: int, original: int) -> float:
    """What transformers multiplies attention by, where config.json does not say, in a longrope of `context` positions
    over `original` ones."""
    return math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0


def _original_context(shape: Shape) -> int:
    key = "original_max_position_embeddings"
    original = shape.rope.get(key, shape.config.get(key, shape.context))
    if not isinstance(original, int) or isinstance(original, bool) or original < 2:
        raise DataError(f"config.json: {key} is {original!r}, not a number of positions", CORRECT)
    return original


def _add_scales(writer: Any, shape: Shape) -> None:
    config = shape.config
    if shape.architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if shape.architecture in ("gemma2", "gemma3") and config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    for name, key in shape.family.scales.items():
        writer.add_float32(f"{shape.architecture}.{key}", float(config[name]))


def rope_tensors(shape: Shape) -> dict[str, Floats]:
    """The frequency factors [D/2] of llama3 and of longrope (for long texts and for short ones) by GGUF's names."""
    rope = shape.rope
    if rope["rope_type"] == "llama3":
        try:
            factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            original = float(rope["original_max_position_embeddings"])
        except (KeyError, TypeError, ValueError):
            raise DataError(f"incomplete llama3 rope scaling in config.json: {dict(rope)}", hint=CORRECT) from None
        return {LLAMA3_FACTORS: llama3_divisors(shape.rope_theta, shape.head_size, factor, low, high, original)}
    if rope["rope_type"] != "longrope":
        return {}
    tensors = {}
    for key, name in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        factors = rope.get(key)
        numbers = isinstance(factors, list) and all(
            isinstance(value, int | float) and abs(value) < 1e30 for value in factors
        )
        if not numbers or len(factors or ()) != shape.rotated // 2:
            raise DataError(f"config.json: {key} of longrope must hold {shape.rotated // 2} numbers", CORRECT)
        tensors[name] = np.array(factors, dtype=np.float32)
    return tensors


def llama3_divisors(theta: float, size: int, factor: float, low: float, high: float, original: float) -> Floats:
    """Llama 3's frequency divisors [D/2] for heads of `size` D, as in transformers' `_compute_llama3_parameters`."""
    import torch

    # Single precision and torch's own power, like the converter's, so that the factors are its bits.
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    divisors = []
    for frequency in 1.0 / (theta**exponents):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return np.array(divisors, dtype=np.float32)


PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶 (multiple emojis) ✅ 🦙🦙 3 33 333 3333 33333",
    "33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български ```````",
    "\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, We'Ve a'lL",
    "camelCase HTTPServer snake_case __init__  x = y+1;\r\n\r\n\tif (a&&b) {return -1e9;} // ñandú नमस्ते עִבְרִית é",
    " leading  and trailing  ١٢٣ ½ x²  Straße ǅ don't DON'T 12ab34 a1b2 /path/to/file.txt\n",
)


@dataclass(frozen=True)
class GgufTokenizer:
    """The values of the tokenizer.ggml.* keys; `types` are gguf.TokenType values, one per token.

    `model` is llama.cpp's name: gpt2 (byte-level BPE) or llama (SentencePiece BPE). `ids`: role (bos, eos, unk, sep,
    pad, cls, mask) to id. `scores` are of SentencePiece, `merges` of byte-level BPE.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool | None = None
    chat_template: str | list[dict[str, str]] | None = None


def add_tokenizer(writer: Any, tokenizer: GgufTokenizer) -> None:
    """Write the tokenizer's keys to a gguf.GGUFWriter."""
    writer.add_tokenizer_model(tokenizer.model)
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    if tokenizer.scores is not None:
        writer.add_token_scores(tokenizer.scores)
    writer.add_token_types(tokenizer.types)
    if tokenizer.merges:
        writer.add_token_merges(tokenizer.merges)
    for role, number in tokenizer.ids.items():
        writer.add_uint32(token_key(role), number)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    if tokenizer.add_space_prefix is not None:
        writer.add_add_space_prefix(tokenizer.add_space_prefix)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def write_vocabulary(path: Path, add: Callable[[Any], None]) -> None:
    """Write a GGUF file that holds a vocabulary alone: the keys that `add` gives to a gguf.GGUFWriter."""
    import gguf

    writer = gguf.GGUFWriter(path=None, arch="llama")
    add(writer)
    write_head(path, writer, [])


def same_ids(tokenizer: Tokenizer, exported: GgufTokenizer) -> bool:
    """Whether llama.cpp gives the tokenizer's ids for all of PROBE, with the keys in `exported`.

    False for a vocabulary that this build of llama.cpp does not load. Raises DataError without llama-cpp-python.
    """
    from distill.gguf.library import GgufFile, library

    library()  # fails here without llama-cpp-python, not as a vocabulary that does not load
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "vocabulary.gguf"
        write_vocabulary(path, lambda writer: add_tokenizer(writer, exported))
        try:
            file = GgufFile(path, vocabulary_only=True)
        except DataError:
            return False
        with contextlib.closing(file):
            return all(
                file.tokenize(as_llama_reads(tokenizer, text), True)
                == tokenizer.encode(text, add_special_tokens=False).ids
                for text in PROBE
            )


def as_llama_reads(tokenizer: Any, text: str) -> str:
    """The text that llama.cpp has to be given for the ids of Hugging Face: it never normalises by Unicode's forms.

    Where Metaspace puts a space before a text that begins with none, llama.cpp puts one before every text.
    """
    name = type(tokenizer.normalizer).__name__
    if name in ("NFC", "NFD", "NFKC", "NFKD"):
        return str(tokenizer.normalizer.normalize_str(text))
    spaced = type(tokenizer.pre_tokenizer).__name__ == "Metaspace" and tokenizer.pre_tokenizer.prepend_scheme != "never"
    return text[1:] if spaced and text[:1] in (" ", SPACE) else text
