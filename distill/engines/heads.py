"""What a target ships to draft with: heads inside it (multi-token prediction), and heads for it in files beside it.

Names of keys and tensors: DeepSeek-V3, GLM-4.5, Qwen3.5, MiMo; of architectures: llama.cpp, SGLang, DFlash.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distill.engines.server_commands import N_MAX, SPEC_TYPE
from distill.errors import DistillError
from distill.files import read_object
from distill.folders import present_files, read_header
from distill.gguf.head import open_head
from distill.recipe import is_path

KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of config.json
TENSORS = re.compile(r"(^|\.)(mtp|mtp_layers|nextn|eh_proj)\.")
METHODS = {"eagle3": "EAGLE-3", "dflash": "DFlash"}  # as servers name them
MOST_BESIDE = 64  # files or folders that are looked at
MORE = "docs/choosing.md#drafts-of-other-kinds says when a plain draft still wins"


def shipped_heads(target: str) -> list[str]:
    """A line for each head of a model folder, hub name or GGUF file: how to use it, or that this copy has lost it.

    Nothing for a hub name whose files cannot be had; DataError for a damaged GGUF file or config.json.
    """
    found = list(_of_file(Path(target)) if target.endswith(".gguf") else _of_folder(target))
    return [*found, MORE] if found else []


def _of_file(path: Path) -> Iterator[str]:
    head = open_head(path)
    if layers := head.size("nextn_predict_layers", 0, 2**16):
        use = f"measure it first: llama-server {SPEC_TYPE} draft-mtp {N_MAX} 3"
        yield _inside(f"nextn_predict_layers {layers}", any(map(TENSORS.search, head.shapes)), use)
    others = sorted(one for one in path.parent.glob("*.gguf") if one != path)
    for other in itertools.islice(others, MOST_BESIDE):
        with contextlib.suppress(DistillError, OSError):
            kind = open_head(other).text("general.architecture")
            if kind in METHODS:
                use = f"llama-server -md {other.name} {SPEC_TYPE} draft-{kind}"
                yield f"target: {other.name} beside it is for {METHODS[kind]}; if it was made for this target: {use}"


def _of_folder(target: str) -> Iterator[str]:
    from distill.engines.torch.hugging_face import local_snapshot, text_folder

    try:
        folder = text_folder(target)
    except DistillError:  # `plan` needs no more than a configuration
        return
    config = _language(read_object(folder / "config.json"))
    stated = next(((key, config[key]) for key in KEYS if config.get(key)), None)
    if stated is not None:
        whole, held = local_snapshot(target), True
        if whole is not None:
            with contextlib.suppress(DistillError, OSError):  # without weights here, config.json is believed
                held = any(TENSORS.search(name) for file in present_files(whole) for name in read_header(file))
        used = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
        use = (
            f"measure it first: vLLM, --speculative-config '{used}'; its GGUF file, llama-server {SPEC_TYPE} draft-mtp"
        )
        yield _inside(f"{stated[0]} {stated[1]}", held, use)
    places = [*folder.glob("*/config.json"), *folder.parent.glob("*/config.json")] if is_path(target) else []
    for place in itertools.islice(sorted(places), MOST_BESIDE):
        with contextlib.suppress(DistillError, OSError):
            other = _language(read_object(place))
            names = " ".join(map(str, other.get("architectures") or [])).lower()
            kind = next((kind for kind in METHODS if kind in names), None)
            if kind is not None and other.get("hidden_size") == config.get("hidden_size"):
                used = json.dumps({"method": kind, "model": str(place.parent), "num_speculative_tokens": 3})
                use = f"vLLM, --speculative-config '{used}'"
                yield f"target: {place.parent} has its width and is for {METHODS[kind]}: {use}"


def _language(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with that of its language model in front, where it is one of several parts."""
    inner = config.get("text_config")
    return config | inner if isinstance(inner, dict) else config


def _inside(stated: str, held: bool, use: str) -> str:
    if held:
        return f"target: it has a head for multi-token prediction ({stated}); {use}"
    return (
        f"target: it states a head for multi-token prediction ({stated}) and holds no tensor of it: this copy lost it"
    )
