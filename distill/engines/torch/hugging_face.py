"""Loading of models and tokenizers in the Hugging Face format; their files, sizes and devices.

A `reference` is a folder, a hub name, a base with an adapter, or a GGUF file. A GGUF file is read from the folder to
which distill/gguf/importing.py imports it.

Legend: V vocabulary, K kept tokens, H hidden.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.checkpoints import check_generation, check_keys, check_types, quantisation_refusal
from distill.devices import CPU, free_memory, has_fast_bfloat16, pick_device, process_count
from distill.engines.torch.adapters import merged_folder
from distill.errors import DataError, DistillError, RunError
from distill.files import (
    digest,
    finish_folder,
    has_form,
    hub_commit,
    hub_reference,
    is_gguf,
    parts_of,
    read_object,
    write_json,
)
from distill.folders import (
    COMPUTED,
    HINT,
    LARGEST_SIZES,
    ModelSizes,
    present_files,
    read_config,
    refuse_adapter,
    refuse_head,
    stored_tensors,
    torch_type,
    weight_files,
)
from distill.gguf.importing import check_import, folder_of
from distill.machine import has_instructions
from distill.progress import is_verbose, warn_once
from distill.recipe import Recipe, Target, is_path, parse_section
from distill.vocabulary.vocabulary import follow_file, opening_of, refuse_tables, with_opening, without_panic

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.md", "tokenizer.model"]  # all files of a hub model except weights
OTHER_WEIGHTS = ["original/*", "onnx/*", "consolidated*"]  # the same weights in formats that transformers cannot read
UNDECODABLE = "leave it on a server or in a GGUF file (answers.writer), or name another model"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def settled_type(dtype: str, device: torch.device, model: str | None = None) -> str:
    """Return the type that `dtype` stands for, as recipes name types.

    `auto` is the type of the model's checkpoint, or bfloat16 without a model and for a GGUF file. If this device has no
    instructions for that type, `auto` is float32, because bfloat16 products then take 10 to 50 times as long.
    """
    if dtype != "auto":
        return dtype
    own = "bfloat16" if model is None or is_gguf(model) else stored_type(model)
    if device.type == CPU:
        return own if has_instructions(own) is True else "float32"
    return own if own != "bfloat16" or has_fast_bfloat16(device) else "float32"


def stored_type(model: str) -> str:
    """Return the number type in a model's config.json; bfloat16 if it states none that recipes know."""
    try:
        config = read_config(text_folder(model))
    except DistillError:  # The caller opens the model later, and then reports this fault with all others.
        return "bfloat16"
    parts = [config, config.get("text_config")]
    stated = [part.get(name) for part in parts if isinstance(part, dict) for name in ("dtype", "torch_dtype")]
    return next((name for name in stated if name in DTYPES), "bfloat16")


def settled_target(model: str, dtype: str, device: str = "auto") -> Target:
    """Return the target of a command without a recipe, with the type that `dtype` stands for on this machine."""
    target = parse_section(Target, {"model": model, "dtype": dtype})
    return target.model_copy(update={"dtype": settled_type(target.dtype, pick_device(device), model)})


def settle_types(recipe: Recipe, begun: Recipe | None = None) -> Recipe:
    """Return the recipe with the types that `auto` stands for: those of its run (`begun`), or else this machine's."""
    device, sections = pick_device(recipe.device), {}
    for name in ("target", "train"):
        section, earlier = getattr(recipe, name), getattr(begun, name, None)
        if section.dtype == "auto":
            own = recipe.target.model if name == "target" else None
            dtype = settled_type("auto" if earlier is None else earlier.dtype, device, own)
            sections[name] = section.model_copy(update={"dtype": dtype})
    return recipe.model_copy(update=sections)


def check_folder(reference: str) -> None:
    """Raise DataError if a reference is a path without a model folder."""
    if parts_of(reference)[1] is not None:
        text_folder(reference)
        return
    if is_gguf(reference):
        folder_of(reference, weights=False)
        return
    if not is_path(reference):
        return
    with contextlib.suppress(OSError):
        finish_folder(Path(reference))
    if not (Path(reference) / "config.json").is_file():
        refuse_adapter(Path(reference))
        state = "has no config.json" if Path(reference).is_dir() else "does not exist"
        raise DataError(f"model folder {reference} {state}", "give a Hugging Face model folder or a hub name")


# Exceptions and messages of internal failures. The messages of all other exceptions are written for users.
_MUTE = (TypeError, AttributeError, AssertionError, RecursionError, ArithmeticError, UnicodeError, MemoryError)
_LACKING = re.compile(r"(?:has no attribute |for field |property |^)'(\w+)'")  # the name of a missing or wrong key
_INSIDE = re.compile(r"<class '|NoneType|object has no|index out of|^'\w*'$|codec can't|not supported between")


def _explained(reference: str, error: Exception) -> DataError:
    lines = str(error).strip().splitlines() or [""]
    first = lines[1].strip() if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    first = re.sub(r"^\w*Error: ", "", first)
    if not first or _INSIDE.search(first) or isinstance(error, _MUTE):
        named = _LACKING.search(str(error))
        lacking = f": {named[1]}" if named else f" ({type(error).__name__})"
        first = f"a value in its files is missing or of another kind than the libraries expect{lacking}"
    hint = "check the folder" if is_path(reference) else "check the name and the network, or give a local folder"
    return DataError(f"cannot load {reference}: {first}", hint)


def quantisation(kind: str, dtype: str) -> Any:
    """Return the bitsandbytes configuration for `int8` (LLM.int8) or `int4` (NF4, QLoRA) weights.

    Products are computed in `dtype`. The head and the embeddings keep their type.
    """
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[dtype],
    )


def check_placement(quantise: str | None, device: torch.device, shard: bool) -> str | dict[str, torch.device]:
    """Return transformers' device_map for the options `quantise` and `shard` of `load_model`.

    Raises RunError if this machine cannot hold a model with these options.
    """
    from transformers.utils import is_bitsandbytes_available

    if quantise is not None and not is_bitsandbytes_available():
        hint = "pip install -U bitsandbytes, or leave the weights as they are (quantise: null)"
        raise RunError(f"{quantise} weights need the package bitsandbytes, which is not installed, or too old", hint)
    if not shard:
        return {"": device}
    if device.type == "cpu":
        raise RunError("sharding needs accelerators, and this run is on the CPU", "set target.shard: false")
    if process_count() > 1:
        hint = "start one process, or set target.shard: false: each then holds the target"
        raise RunError(f"{process_count()} processes would each spread the target over all accelerators", hint)
    return "auto"


def load_weights(reference: str, dtype: torch.dtype, **options: Any) -> Any:
    """Load a causal language model by transformers with these options. Every load of weights calls this function.

    Raises DataError if the model's files disagree, or if a tensor did not come from them in its shape. Errors of
    transformers are not caught.
    """
    from transformers import AutoModelForCausalLM

    folder = local_folder(reference)
    place = str(folder)
    config = load_config(place)
    require_own_type(place, config)
    require_language_model(place, config)
    require_possible(place, config)
    _require_known_keys(folder)
    if is_quantised(config):
        present_files(folder)
    else:
        stored_tensors(folder, _is_tied(config))
    with quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    require_whole(place, model, info)
    with_usual_names(model.config)
    if not is_path(reference):
        model.config._name_or_path = reference  # for messages
    return model


def _require_known_keys(folder: Path) -> None:
    """Raise DataError for a config.json with a key that is not supported, or with weights that cannot be read here."""
    content = read_config(folder)
    check_keys(folder / "config.json", content)
    if refusal := quantisation_refusal(content):
        raise DataError(f"{folder}/config.json: {refusal[0]}", refusal[1])


def _is_tied(config: Any) -> bool:
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def load_model(
    reference: str,
    dtype: str,
    device: torch.device,
    trimmed: bool = True,
    quantise: str | None = None,
    shard: bool = False,
) -> Any:
    """Load a causal language model in evaluation mode. Raises DataError if it cannot be loaded.

    If the model's folder has a kept_tokens.json, the head is trimmed to those tokens, unless `trimmed` is false. For
    `quantise` see `quantisation`. With `shard`, the layers are spread over all accelerators, and inputs go to the first
    one. Raises RunError if either is impossible on this machine.
    """

    check_folder(reference)
    options: dict[str, Any] = {}
    if quantise is not None or shard:
        options["device_map"] = check_placement(quantise, device, shard)
        options["max_memory"] = free_memory() if shard else None  # The libraries measure few kinds of accelerators.
    if quantise is not None:
        options["quantization_config"] = quantisation(quantise, settled_type(dtype, device, reference))
    try:
        model = load_weights(reference, DTYPES[settled_type(dtype, device, reference)], **options)
    except DistillError:
        raise
    except Exception as error:  # transformers raises many kinds for faulty files.
        raise _explained(reference, error) from error
    if not options and device.type != CPU:
        model.to(device).tie_weights()  # Some devices get new parameters instead of moved ones.
    model.eval()
    kept = read_kept(text_folder(reference)) if trimmed and not is_gguf(reference) else None
    return model if kept is None else trim_head(model, kept["kept"])


def logits_of(model: Any, keep: Tensor | int, **inputs: Any) -> Tensor:
    """Return the logits of a step: of all columns (`keep` 0), of the last `keep` columns, or of the listed ones.

    If the layers of a model lie on several devices, the logits of all columns are computed for a list. accelerate moves
    the list to the first device, and the last layers need it on theirs.
    """
    listed = isinstance(keep, Tensor) and len({*(getattr(model, "hf_device_map", None) or {}).values()}) > 1
    logits: Tensor = model(use_cache=True, logits_to_keep=0 if listed else keep, **inputs).logits
    return logits[:, keep] if listed else logits


def load_target(target: Target, device: torch.device) -> Any:
    """Load the target of a recipe in its type, quantised or sharded. Every load of a recipe's target calls this."""
    return load_model(target.model, target.dtype, device, quantise=target.quantise, shard=target.shard)


def load_tokenizer(reference: str) -> Any:
    """Load the tokenizer of a model. Its tokenizer.json decides on the ids, whatever class its settings name.

    Raises DataError if it cannot be loaded, or if the model has no row for one of its tokens.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = text_folder(reference)
    whole = (folder / "tokenizer.json").is_file()
    try:
        with without_panic(f"the tokenizer of {reference}"):
            # The classes of architectures rebuild the normalizer and the pre-tokenizer and do not read them.
            kind = PreTrainedTokenizerFast if whole else AutoTokenizer
            refuse_tables(folder / "tokenizer.json")
            tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
            follow_file(tokenizer, folder)
            encode(tokenizer, "a")  # Some settings of a wrong type raise only in use.
        if tokenizer.eos_token_id is None and (stated := stated_ends(reference)):
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stated[0])
    except DistillError:
        raise
    except Exception as error:  # transformers and tokenizers raise many kinds for faulty files.
        raise _explained(reference, error) from error
    return tokenizer


def tokenizer_digest(reference: str) -> str:
    """The digest of a model's vocabulary, which its texts are written in."""
    return digest(load_tokenizer(reference).get_vocab())


def load_config(reference: str) -> Any:
    """Load the configuration of a model. Reads no weights."""
    from transformers import AutoConfig, PretrainedConfig

    folder = text_folder(reference)
    content = read_config(folder)
    refuse_head(folder, content)
    check_types(folder / "config.json", content)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        inner = config.get_text_config()
    except Exception as error:  # transformers and huggingface_hub raise many kinds. Each means a faulty config.json.
        raise _explained(reference, error) from error
    if not isinstance(inner, PretrainedConfig):
        raise DataError(f"{reference}/config.json: text_config does not belong to a {config.model_type}", HINT)
    return with_usual_names(config)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return token ids of a part of a text, without the special tokens that a tokenizer may add around a text."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return token ids of a whole text or a rendered chat, with one bos if the tokenizer's files ask for it."""
    return with_opening(encode(tokenizer, text), opening_of(tokenizer))


MAX_BORDER_DISTANCE = 64  # characters after a prompt in which the next border of tokens is searched
BORDERS = "\n", "a", "."  # texts before a piece. Many tokenizers add a space before the first piece of a text.


def encode_behind(tokenizer: Any, prompt: str, text: str) -> tuple[list[int], list[int]]:
    """Return token ids of a prompt, and of a text that follows it: the rest of the ids of both together.

    The prompt keeps the ids that a server gives it. If a token of both together crosses the end of the prompt, the text
    is encoded alone up to the next border of tokens.
    """
    before, whole = encode_text(tokenizer, prompt), encode_text(tokenizer, prompt + text)
    if whole[: len(before)] == before:
        return before, whole[len(before) :]
    for at in range(1, min(len(text), MAX_BORDER_DISTANCE)):
        begun = encode_text(tokenizer, prompt + text[:at])
        if whole[: len(begun)] == begun:
            return before, [*_within(tokenizer, text[:at]), *whole[len(begun) :]]
    return before, _within(tokenizer, text)


def _within(tokenizer: Any, piece: str) -> list[int]:
    """Return token ids of a piece of a text, without the prefix that a tokenizer adds to a whole text."""
    for border in BORDERS:
        alone, both = encode(tokenizer, border), encode(tokenizer, border + piece)
        if both[: len(alone)] == alone:
            return both[len(alone) :]
    return encode(tokenizer, piece)


def stated_ends(reference: str) -> list[int]:
    """Return the end tokens of config.json, then those of generation_config.json."""
    path = text_folder(reference) / "generation_config.json"
    content = read_object(path) if path.is_file() else {}
    check_generation(path, content)
    stated = content.get("eos_token_id")
    config = load_config(reference)
    named = (config.eos_token_id, config.get_text_config().eos_token_id, stated)
    return [number for eos in named for number in (eos if isinstance(eos, list) else [eos]) if number is not None]


def real_tokens(config: Any, tokenizer: Any) -> int:
    """Return the number of ids with a token. Further rows of the embeddings are padding and in no distribution."""
    return min(int(config.get_text_config().vocab_size), max(tokenizer.get_vocab().values()) + 1)


def describe_model(reference: str, model: Any) -> ModelSizes:
    """Return the sizes of a loaded model for tables."""
    config = model.config.get_text_config()
    return ModelSizes(
        path=reference,
        architecture=model.config.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )


def local_folder(reference: str, weights: bool = True) -> Path:
    """Return the folder of a model: a path itself, or a hub name's snapshot in the hub's cache, which may be fetched.

    A GGUF file has the folder to which it is imported. A base with an adapter has the folder into which both are
    merged. Without `weights`, the folder may hold only the other files.
    """
    base, adapter = parts_of(reference)
    if adapter is not None:
        own = not is_gguf(base) and Path(base).is_dir()
        load = _merging if weights else None
        return merged_folder(local_folder(base, weights), own, Path(adapter), _without_weights, load)
    check_folder(reference)
    if is_gguf(reference):
        return folder_of(reference, weights)
    if Path(reference).is_dir():
        return Path(reference)
    if not weights:
        return _snapshot(reference, allow_patterns=SMALL_FILES)
    return _snapshot(reference, allow_patterns=[*SMALL_FILES, "*.safetensors"], ignore_patterns=OTHER_WEIGHTS)


def _without_weights(folder: Path) -> Any:
    return empty_model(load_config(str(folder)))


def _merging(folder: Path, dtype: str) -> Any:
    """Load a model into which an adapter is merged. Its head stays whole."""
    return load_model(str(folder), dtype, torch.device(CPU), trimmed=False)


def text_folder(reference: str) -> Path:
    """Return the folder of a model's tokenizer and configuration. See `local_folder`."""
    return local_folder(reference, weights=False)


def local_snapshot(reference: str) -> Path | None:
    """Return the folder of a model with its weights, if they are on this machine or in the hub's cache; otherwise None.

    A GGUF file or an adapter has the folder of its small files, whether its weights are imported or not.
    """
    base, adapter = parts_of(reference)
    if adapter is not None and local_snapshot(base) is None:
        return None
    if adapter is not None or is_gguf(reference):
        return local_folder(reference, weights=False)
    if Path(reference).is_dir():
        return Path(reference)
    check_folder(reference)
    try:
        folder = _snapshot(reference, local_files_only=True)
    except DataError:
        return None
    return folder if all(path.is_file() for path in weight_files(folder)) else None


def _snapshot(reference: str, **options: Any) -> Path:
    """Return the folder of a model in the hub's cache, of the commit in the stages' keys (`hub_commit`).

    DataError if the files are not available, or the hub's newest commit changed before they were fetched.
    """
    from huggingface_hub import snapshot_download

    known = hub_reference(reference).is_file()
    pinned: dict[str, Any] = {"revision": hub_commit(reference, "model")} if known else {}
    try:
        folder = Path(snapshot_download(reference, **pinned, **options))
    except Exception as error:  # The hub client raises many kinds.
        raise _explained(reference, error) from error
    fetched = not known and hub_reference(reference).is_file()
    if fetched and (commit := hub_commit(reference, "model")) not in (None, folder.name):
        what = f"{reference} changed on the hub during this command, from commit {commit} to {folder.name}"
        raise DataError(what, "run the same command again")
    return folder


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Within a `with` block, the hub's libraries use only their cache, as with HF_HUB_OFFLINE=1."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# ── A folder's tensors compared with its config.json, from safetensors headers alone ──


def check_weights(reference: str) -> str:
    """Return a line about the tensors of a model, from the headers of its safetensors files. Reads no weights.

    The names and shapes pass transformers' loader on the meta device, which understands renamed and fused layouts.
    Raises DataError as `require_whole` does. If headers prove nothing, the line says so.
    """
    if is_gguf(reference):
        return check_import(reference)
    base, adapter = parts_of(reference)
    if adapter is not None:
        text_folder(reference)  # compares the adapter with its base
        return f"{check_weights(base)}; the adapter {adapter} fits it"
    folder = local_snapshot(reference)
    unproven = f"tensors of {reference}: not checked before they are loaded,"
    if folder is None:
        return f"{unproven} because they are not on this machine yet"
    config = load_config(str(folder))
    require_own_type(reference, config)
    _require_known_keys(folder)
    if is_quantised(config):
        present_files(folder)
        return f"{unproven} because headers prove nothing about quantised weights"
    return _check_headers(reference, folder, config) or (
        f"{unproven} because headers prove nothing about this {config.model_type} layout"
    )


def _check_headers(reference: str, folder: Path, config: Any) -> str | None:
    """Return the line about a folder whose headers prove that its tensors are whole; None if they prove nothing."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    stored = stored_tensors(folder, _is_tied(config))
    empty = {
        name: torch.empty(tensor.shape, dtype=torch_type(tensor.dtype), device="meta")
        for name, tensor in stored.items()
    }
    try:
        with quiet():
            model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None,
                config=config,
                state_dict=empty,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception:  # Without values, some layouts raise in transformers. That says nothing about the values.
        return None
    require_whole(reference, model, info)
    return f"tensors of {reference}: all {len(stored)} have the names and shapes that config.json asks for"


# ── Each tensor comes from the weight files, in the shape of config.json ──
# transformers fills a tensor that is missing, or has another shape, with random numbers, and only logs it.

# Tensors that a language model does not need: buffers, draft heads, reward heads, and encoders of other inputs.
WITHOUT_PLACE = re.compile(
    r"(inv_freq|masked_bias|attn\.bias)$"
    r"|(^|\.)(mtp|mtp_layers|nextn|eh_proj|medusa_head|v_head|value_head|score|classifier)\."
    r"|(^|\.)(visual|vision|vision_tower|vision_model|vision_embed_tokens|audio_tower|audio_model|image_newline)\b"
    r"|(^|\.)(multi_modal_projector|embed_vision|embed_audio|mm_projector|img_processor)\b"
)
VALUES_PER_BYTE = 16  # No quantised type stores more.
NAMES_SHOWN = 3  # of tensors in a message
AGAIN = "copy or download the folder again; config.json and weights must be of one model"


def empty_model(config: Any) -> Any:
    """Return the model of a configuration without weights: its layers, names and shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def require_own_type(reference: str, config: Any) -> None:
    """Raise DataError for a config.json whose model_type and `architectures` name different models."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    named = (getattr(config, "architectures", None) or [None])[0]
    types = [kind for kind, name in CLASSES.items() if named in (name if isinstance(name, tuple) else (name,))]
    if named is not None and not types and not hasattr(transformers, named):
        own = CLASSES.get(config.model_type)
        known = {str(name).lower() for name in (own if isinstance(own, tuple) else (own,))}
        if own is not None and named.lower() not in known:
            what = f"{reference}/config.json: its weights are of a {named:.60}, which transformers does not have"
            raise DataError(what, f'if they are of a {own}, write "architectures": ["{own}"]')
    if types and config.model_type not in types:
        raise DataError(
            f"{reference}/config.json: model_type is {config.model_type}, but its weights are of a {named} "
            f"({', '.join(types)})",
            AGAIN,
        )


# Other names of sizes in some families, for which transformers has no alias.
OTHER_NAMES = {
    "max_position_embeddings": ("max_seq_len", "seq_length", "n_positions", "n_ctx", "context_length"),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner"),
}


def with_usual_names(config: Any) -> Any:
    """Add the usual names of sizes to a configuration, and return it. An unstated MLP width is 4 hidden widths."""
    inner = config.get_text_config()
    for name, others in OTHER_NAMES.items():
        if getattr(inner, name, None) is None:
            stated = [size for other in others if isinstance(size := getattr(inner, other, None), int)]
            if not stated and name == "intermediate_size" and hasattr(inner, "hidden_size"):
                stated = [4 * inner.hidden_size]
            if stated:
                setattr(inner, name, stated[0])
    return config


# transformers chooses the frequencies of these rotary embeddings by the largest position of a call, for all its tokens.
# After the border, cached keys have other frequencies than the queries, and a document in a packed block gets the
# frequencies of its longest neighbour. Therefore texts end at the border.
BORDERS_OF_ROTARY = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}


def context_length(config: Any) -> int | None:
    """Return the largest number of tokens of a text; None if the configuration states none.

    The number is smaller than the stated one if the rotary embedding changes with the length of a text. A line on
    stderr then says so.
    """
    inner = config.get_text_config()
    context = getattr(inner, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        return None
    parameters = getattr(inner, "rope_parameters", None) or {}
    for rotary in [part for part in parameters.values() if isinstance(part, dict)] or [parameters]:
        kind = next((kind for kind in BORDERS_OF_ROTARY if kind in str(rotary.get("rope_type"))), "")
        stated = getattr(inner, BORDERS_OF_ROTARY.get(kind, ""), None)  # Phi-3 states it next to the parameters.
        border = stated if stated is not None else rotary.get(BORDERS_OF_ROTARY.get(kind, ""))
        if isinstance(border, int | float) and 0 < border < context:
            context = int(border)
            if name := getattr(config, "_name_or_path", ""):  # A small model for a comparison has no name.
                warn_once(
                    f"{name}: texts of at most {border} tokens: beyond, its rotary embedding ({kind}) gives all tokens "
                    "of a text other frequencies, and no cache holds"
                )
    return context


def require_language_model(reference: str, config: Any) -> None:
    """Raise DataError for a config.json that is not of a language model alone, or states no length of texts."""
    if not hasattr(config, "vocab_size"):
        hint = "name a folder or GGUF file of the language model alone"
        raise DataError(f"{reference} is a {config.model_type}, whose language model is only one of its parts", hint)
    if (getattr(config, "max_position_embeddings", None) or 0) < 1:
        hint = "add it: the number of tokens that the model was made for"
        raise DataError(f"{reference}/config.json names no max_position_embeddings", hint)


def require_possible(reference: str, config: Any) -> None:
    """Raise DataError for a config.json whose largest tensors cannot be in the folder's weight files.

    transformers allocates tensors of these sizes before it compares any shape.
    """
    folder, inner = Path(reference), config.get_text_config()
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    hidden, heads, size, mlp, rows = (
        value if isinstance(value := getattr(inner, name, None), int) else 1
        for name in ("hidden_size", "num_attention_heads", "head_dim", "intermediate_size", "vocab_size")
    )
    largest = hidden * max(rows, mlp, heads * size, hidden)
    if stored and largest > VALUES_PER_BYTE * stored:
        what = f"{reference}/config.json: a tensor of {largest} values cannot be in weight files of {stored} bytes"
        raise DataError(what, AGAIN)


def require_whole(reference: str, model: Any, info: dict[str, Any]) -> None:
    """Raise DataError unless every tensor of a model came from its files. `info` is transformers' loading info.

    Missing tensors, tensors of another shape, and tensors for which the model has no place are refused. Tensors of
    WITHOUT_PLACE outside the layers are not used, and are named on stderr.
    """
    missing, shapes, extra = (sorted(info[f"{what}_keys"]) for what in ("missing", "mismatched", "unexpected"))
    misplaced = [name for name in extra if not WITHOUT_PLACE.search(name) or _inside_a_layer(model, name)]
    kind, fault = model.config.model_type, None
    if missing:
        fault = f"missing in the weights: {_count(missing)} of the {kind} that config.json describes"
    elif shapes:
        name, stored, expected = shapes[0]
        more = f" (and {len(shapes) - 1} more tensors)" if len(shapes) > 1 else ""
        fault = f"{name} is {list(stored)} in the weights and {list(expected)} by config.json{more}"
        config, own = read_config(Path(reference)), getattr(model.config, "attribute_map", {})
        if lacking := [key for key in LARGEST_SIZES if key != "head_dim" and config.get(own.get(key, key)) is None]:
            fault += f"; config.json names no {', '.join(lacking)}"
    elif info.get("error_msgs"):
        fault = f"its tensors do not make a {kind}: {str(info['error_msgs'][0]).strip().splitlines()[0]}"
    elif misplaced:
        inside = " in its layers" if _inside_a_layer(model, misplaced[0]) else ""
        fault = f"the weights hold {_count(misplaced)} for which a {kind} has no place{inside}: "
        quantised = "its quantisation is not applied, or " if is_quantised(model.config) else ""
        fault += f"{quantised}config.json is of another model type than the weights"
    if fault is not None:
        raise DataError(f"{reference}: {fault}", AGAIN)
    if extra:
        warn_once(f"warning: {reference} holds {_count(extra)} for which a {kind} has no place; not used")


def _count(names: list[str]) -> str:
    """Return `3 tensors (a, b, c)`, with the first names only if there are many."""
    shown = ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown})"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within a `with` block, transformers reports only errors and shows no bar. `require_whole` reports the rest."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if not is_verbose():
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def is_quantised(config: Any) -> bool:
    """Whether a configuration belongs to weights that are stored quantised."""
    return getattr(config, "quantization_config", None) is not None


def _inside_a_layer(model: Any, name: str) -> bool:
    """Whether a tensor's name begins with that of a numbered layer of the model."""
    parts = name.split(".")
    if parts[-1] in COMPUTED:
        return False
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    for depth in range(len(parts) - 1, 0, -1):
        place = ".".join(parts[:depth])
        if any(part.isdigit() for part in parts[:depth]) and (place in modules or prefix + place in modules):
            return True
    return False


# ── Trimmed heads: a draft proposes only the kept tokens, and its folder still holds the full head ──
# `kept_tokens.json` next to the weights lists the kept ids. Our loader computes only their logits, and the others are
# −inf. transformers and llama.cpp ignore the file and use the full head.

FILE = "kept_tokens.json"
CAP = "final_logit_softcapping"


def write_kept(folder: Path, kept: list[int], vocabulary: int, metadata: dict[str, Any]) -> None:
    """Write kept_tokens.json: ascending `kept` ids of `vocabulary` rows. `metadata` records how they were chosen."""
    write_json(folder / FILE, {"format": 1, "vocabulary": vocabulary, "kept": kept, **metadata})


def read_kept(folder: Path) -> dict[str, Any] | None:
    """Read kept_tokens.json of a model folder; None if there is none. Raises DataError if it is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    hint = f"delete it to use the full head, or trim {folder} again"
    content = read_object(path, hint)
    if not has_form(content, {"kept": [int], "vocabulary": int}):
        raise DataError(f"{path} is damaged: `kept` must be a list of ids, `vocabulary` a number", hint)
    kept, size = content["kept"], content["vocabulary"]
    if not kept or not all(a < b for a, b in itertools.pairwise(kept)) or kept[0] < 0 or kept[-1] >= size:
        raise DataError(f"{path} is damaged: the kept ids are not ascending ids of the vocabulary", hint)
    return content


class KeptHead(torch.nn.Module):
    """A head that computes the logits of the kept rows [K, H] only. The other of V columns are −inf."""

    kept: Tensor
    weight: Any  # a tensor, or a `PackedWeight`

    def __init__(self, head: torch.nn.Linear, kept: Tensor, cap: float | None = None) -> None:
        super().__init__()
        self.cap = cap  # of the logits. If it were applied after this head, −inf would become a number.
        self.rows = head.weight.shape[0]
        self.product: torch.nn.Module | None = None  # multiplies instead of torch's own product
        self.register_buffer("kept", kept.to(head.weight.device), persistent=False)
        self.register_buffer("weight", head.weight.detach()[kept.to(head.weight.device)].clone(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] for hidden states [..., H]."""
        if self.product is not None:
            kept_logits = self.product(hidden)
        else:
            kept_logits = torch.nn.functional.linear(hidden, self.weight)
        if self.cap is not None:
            kept_logits = self.cap * torch.tanh(kept_logits / self.cap)
        logits = kept_logits.new_full((*kept_logits.shape[:-1], self.rows), -torch.inf)
        return logits.index_copy_(-1, self.kept, kept_logits)


def trim_head(model: Any, kept: Sequence[int]) -> Any:
    """Let a loaded model compute the kept tokens' logits only, and return it. Such a model cannot be saved."""
    rows = model.lm_head.weight.shape[0]
    if kept[-1] >= rows:
        raise DataError(f"{FILE} keeps token {kept[-1]}, the head has {rows} rows", "trim this folder again")
    cap = getattr(model.config, CAP, None)
    model.lm_head = KeptHead(model.lm_head, torch.tensor(kept), cap)
    if cap is not None:
        setattr(model.config, CAP, None)
    return model


@contextlib.contextmanager
def trimmed_head(model: Any, kept: Sequence[int]) -> Iterator[Any]:
    """Within a `with` block, the head of the model is trimmed as by `trim_head`."""
    head, cap = model.lm_head, getattr(model.config, CAP, None)
    try:
        yield trim_head(model, kept)
    finally:
        model.lm_head = head
        if cap is not None:
            setattr(model.config, CAP, cap)
