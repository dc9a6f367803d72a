"""Pre-tokenizers of byte-level BPE: llama.cpp's names for them, and what they do, as steps.

A GGUF file holds the name alone (`tokenizer.ggml.pre`), tokenizer.json the rules. Source: llama-vocab.cpp. Patterns
that it rewrote for its own regular expressions are in the words of the tokenizers that they come from.
"""

from __future__ import annotations

from typing import Any

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str) -> str:
    """A split into words whose capitals come first, as tekken and gpt-4o have it."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{UPPER}*{LOWER}+{ending}|{lead}{UPPER}+{LOWER}*{ending}"
    return words + rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


TEKKEN, GPT4O = _cased("", r"\p{N}"), _cased(CONTRACTIONS + "?", r"\p{N}{1,3}")
DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-"
    r"ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ"
    r"-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
DEEPSEEK_MARKS = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
CJK = "[一-龥ࠀ-一가-퟿]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"

# Llama 3's own names, and those of models with its rules.
LLAMA3_NAMES = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
)
Steps = tuple[str, ...]
# A step is `split PATTERN`, `digits` (each on its own), `gpt-2` (GPT-2's split, then bytes) or `bytes`.
STEPS: dict[Steps, tuple[str, ...]] = {
    ("gpt-2",): (
        *("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2", "gigachat", "exaone4", "a.x-4.0"),
        *("mellum", "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
    ),
    (f"split {QWEN2}", "bytes"): (
        *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open"),
        "grok-2",
    ),
    (f"split {LLAMA3}", "bytes"): (*(*LLAMA3_NAMES, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"),),
    (f"split {QWEN35}", "bytes"): ("qwen35",),
    ("digits", "gpt-2"): (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (
        *("split [\r\n]", f"split {DEEPSEEK_LETTERS}", f"split {DEEPSEEK_MARKS}", r"split \s+$", f"split {CJK}"),
        *(r"split \p{N}+", "bytes"),
    ): ("deepseek-llm",),
    (*("split [\r\n]", r"split \s?\p{L}+", r"split \s?\p{P}+", f"split {CJK}", r"split \p{N}", "bytes"),): (
        "deepseek-coder",
    ),
    (r"split \p{N}{1,3}", "split [一-龥぀-ゟ゠-ヿ]+", f"split {DEEPSEEK3}", "bytes"): (
        *("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    ),
    (r"split [\p{P}\$\+<=>\^~\|`]+", f"split {GPT2}", "split [0-9][0-9][0-9]", "bytes"): ("falcon",),
    (f"split {BLOOM}", "bytes"): ("bloom", "poro-chat", "gpt3-finnish"),
    (f"split {BLOOM}", r"split \p{N}", "bytes"): ("viking",),
    (f"split {TEKKEN}", "bytes"): ("tekken",),
    (f"split {GPT4O}", "bytes"): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    (r"split [\p{P}\$\+<=>\^~\|]+", f"split {GPT2}", r"split \p{N}+", "split [0-9][0-9][0-9]", "bytes"): ("default",),
}
PRE_STEPS: dict[str, Steps] = {name: steps for steps, names in STEPS.items() for name in names}
# With these, a word that is itself a token is taken without merging.
IGNORE_MERGES = frozenset((*LLAMA3_NAMES, "glm4", "glm5", "tekken"))


def pre_tokenizer_of(steps: Steps) -> dict[str, Any]:
    """The `pre_tokenizer` of tokenizer.json that does these steps."""
    parts = [_part(step) for step in steps]
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}


def _part(step: str) -> dict[str, Any]:
    if step.startswith("split "):
        pattern = {"Regex": step.removeprefix("split ")}
        return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    if step == "digits":
        return {"type": "Digits", "individual_digits": True}
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": step == "gpt-2"}
