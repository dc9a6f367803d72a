"""What llama.cpp knows of a file's tokens by itself: defaults by kinds of vocabulary, and types and ends by names.

From llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distill.gguf.head import FileHead
from distill.vocabulary.encoding import LLAMA3_NAMES

NO_TOKEN = 2**32 - 1  # in a key that names a token
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType, and SentencePiece's own numbers
# Roles whose word in tokenizer.ggml.WORD_token_id is another.
WORDS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
TURN_ENDS = ("eot", "eom")  # further ids that end a turn or a message, under their own words


def token_key(role: str) -> str:
    """The key of a GGUF file that names the token of a role."""
    return f"tokenizer.ggml.{WORDS.get(role, role)}_token_id"


class Defaults(NamedTuple):
    """The bos and eos of a kind of vocabulary, and whether llama.cpp adds them to a text."""

    kind: str
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool


# By tokenizer.ggml.model; llama.cpp's llama_vocab_type has one value per kind.
DEFAULTS = {
    "gpt2": Defaults("BPE", 11, 11, False, False),
    "gemma4": Defaults("BPE", None, None, True, False),
    "whitespace": Defaults("BPE", 11, 11, False, False),
    "llama": Defaults("SPM", 1, 2, True, False),
    "bert": Defaults("WPM", 101, None, True, False),
    "t5": Defaults("UGM", None, 1, False, True),
    "rwkv": Defaults("RWKV", None, None, False, False),
    "plamo2": Defaults("PLAMO2", 1, 2, False, False),
}
# Pre-tokenizers of BPE, by tokenizer.ggml.pre, that change those defaults.
PRE_ADDS_BOS = {*LLAMA3_NAMES, "tekken", "chameleon", "gemma4"}
PRE_WITHOUT_BOS = {"chatglm-bpe", "glm4", "glm5"}
ALWAYS_ADDS_BOS = "gemma4"  # whatever the file says


def stated_ends(head: FileHead) -> Defaults:
    """llama.cpp's defaults for a file's vocabulary, with what the file says of added tokens in their place.

    Some pre-tokenizers of BPE change the defaults. The file's own bos and eos are not read here.
    """
    model, pre = head.text("tokenizer.ggml.model") or "", head.text("tokenizer.ggml.pre")
    defaults = DEFAULTS[model]
    if defaults.kind == "BPE" and pre in PRE_ADDS_BOS:
        defaults = defaults._replace(add_bos=True)
    if defaults.kind == "BPE" and pre in PRE_WITHOUT_BOS:
        defaults = defaults._replace(bos=None)
    add_bos = head.flag("tokenizer.ggml.add_bos_token", defaults.add_bos) or ALWAYS_ADDS_BOS in (model, pre)
    return defaults._replace(add_bos=add_bos, add_eos=head.flag("tokenizer.ggml.add_eos_token", defaults.add_eos))


# Tokens that end a text, and are control tokens, whatever types a file gives them.
END_NAMES = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "[e~["),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>"),
    )
)
# Unless all of these end a text too, one of each group: then the type that the token has instead.
NO_END = {
    "<|end|>": (({"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}), USER_DEFINED),
    "</s>": (({"<|tool_response>"},), NORMAL),
}
SHOWN_NAMES = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))  # user-defined tokens
# Roles that fill in the middle, an older word for each, and names that are control tokens where no key gives another.
FILL_NAMES = {
    ("fim_pre", "prefix"): (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
        "<|prefix|>",
    ),
    ("fim_suf", "suffix"): (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
        "<|suffix|>",
    ),
    ("fim_mid", "middle"): (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
        "<|middle|>",
    ),
    ("fim_pad",): ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("fim_rep",): ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("fim_sep",): ("<|file_sep|>",),
}
ENDING_FILL = ("fim_pad", "fim_rep", "fim_sep")  # whose tokens end a text
FILL_ROLES = tuple(role for roles in FILL_NAMES for role in roles)


def types_and_ends(tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """llama.cpp's own types of the tokens, and the ids that end an answer, eos first.

    `types` are those of the file, `ids` those that it names, by role; several names of one role: llama.cpp takes any.
    """
    numbers, found_types = {token: index for index, token in enumerate(tokens)}, list(types)
    ends = {ids[role] for role in ("eos", *TURN_ENDS) if role in ids}
    for roles, names in FILL_NAMES.items():
        number = next((ids[role] for role in roles if role in ids), None)
        if number is None and (found := [numbers[name] for name in names if name in numbers]):
            number = found[0]
            found_types[number] = CONTROL
        if number is not None and roles[0] in ENDING_FILL:
            ends.add(number)
    for name in END_NAMES & numbers.keys():
        ends.add(numbers[name])
        found_types[numbers[name]] = CONTROL
    for name in SHOWN_NAMES & numbers.keys():
        found_types[numbers[name]] = USER_DEFINED
    named = {tokens[number] for number in ends}
    for name, (groups, kind) in NO_END.items():
        if name in named and all(named & group for group in groups):
            ends.discard(numbers[name])
            found_types[numbers[name]] = kind
    return found_types, sorted(ends, key=lambda number: (number != ids["eos"], number))
