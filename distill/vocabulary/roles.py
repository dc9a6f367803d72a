"""Roles of special tokens: their names, the tokens that take them, and the counterparts of two vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# In the order in which transformers adds those that tokenizer.json lacks.
NAMED_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Names under which families of models know a token; the first one that a vocabulary has takes the role.
MARKERS: dict[str, tuple[str, ...]] = {
    "turn_end": (
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|eot|>",
        "<|EOT|>",
        "<|endofturn|>",
        "<|end_of_turn|>",
        "<end_of_utterance>",
        "<turn|>",
    ),
    "turn_start": (
        "<|im_start|>",
        "<|start_header_id|>",
        "<start_of_turn>",
        "<|START_OF_TURN_TOKEN|>",
        "<|header_start|>",
        "<|start_of_role|>",
        "<|start|>",
        "<|turn>",
    ),
    "header_end": ("<|end_header_id|>", "<|header_end|>", "<|end_of_role|>", "<|message|>", "<|im_sep|>"),
    "system": ("<|system|>", "<|SYSTEM_TOKEN|>", "[SYSTEM_PROMPT]"),
    "user": ("<|user|>", "<|USER_TOKEN|>", "<｜User｜>", "<|User|>", "[INST]"),
    "assistant": ("<|assistant|>", "<|CHATBOT_TOKEN|>", "<｜Assistant｜>", "<|Assistant|>", "[/INST]"),
    # Fill in the middle: Qwen, StarCoder and Granite, SantaCoder, DeepSeek, CodeLlama, Falcon, Codestral, GLM.
    "fim_prefix": (
        *("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "▁<PRE>", "<PRE>"),
        *(">>PREFIX<<", "[PREFIX]", "<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suffix": (
        *("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "▁<SUF>", "<SUF>"),
        *(">>SUFFIX<<", "[SUFFIX]", "<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_middle": (
        *("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "▁<MID>", "<MID>"),
        *(">>MIDDLE<<", "[MIDDLE]", "<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim_pad>", "<fim-pad>"),
    "repository": ("<|repo_name|>", "<repo_name>", "<reponame>", "<|fim_repo|>", "<fim-repo>", "<REPO>"),
    "file": ("<|file_sep|>", "<file_sep>"),
}
# Of several roles of one token the first counts. Markers come before the roles that a tokenizer's settings name: eos is
# often the end of a turn.
ROLE_ORDER = (*MARKERS, "eos", "bos", "unk", "pad", "sep", "cls", "mask")


def content_of(token: Any) -> str | None:
    """The string of a token in a tokenizer's settings, where it may stand alone or as an object with `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def roles_in(ids: Mapping[str, int], settings: Mapping[str, Any], unknown: str | None) -> dict[str, int]:
    """Role to id: those that the tokenizer's settings name, the model's unknown token, then the markers."""
    named = {role: content_of(settings.get(f"{role}_token")) or "" for role in NAMED_ROLES}
    roles = {role: ids[name] for role, name in named.items() if name in ids}
    if unknown and unknown in ids:
        roles.setdefault("unk", ids[unknown])
    for role, names in MARKERS.items():
        marker = next((name for name in names if name in ids), None)
        if marker is not None:
            roles[role] = ids[marker]
    return roles


def named_id(
    role: str, settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int], rows: int
) -> int | None:
    """The id of bos, eos or pad in a model of `rows` rows; None where the files name none.

    The token in tokenizer_config.json (`settings`) comes before the number in config.json (of several the first).
    """
    key = f"{role}_token_id"
    number = config.get(key, (config.get("text_config") or {}).get(key))
    number = number[0] if isinstance(number, list) and number else number
    token = content_of(settings.get(f"{role}_token"))
    number = number if token is None else ids.get(token, number)
    return number if isinstance(number, int) and 0 <= number < rows else None


def role_counterparts(source: Mapping[str, int], destination: Mapping[str, int]) -> list[tuple[int, int]]:
    """Pairs of ids with the same role in two vocabularies' `roles`; of several for one source id the last counts."""
    both = [role for role in reversed(ROLE_ORDER) if role in source and role in destination]
    return [(source[role], destination[role]) for role in both]


def stand_ins(source: Mapping[str, int], destination: Mapping[str, int]) -> dict[int, int]:
    """Eos for the source's bos and pad where the destination has no such token.

    The token that ends a text also stands before the next one, and pads, in models without tokens of their own for it.
    """
    if "eos" not in destination:
        return {}
    return {source[role]: destination["eos"] for role in ("bos", "pad") if role in source and role not in destination}
