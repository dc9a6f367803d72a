"""Write bytes and text in the tokens of a vocabulary. Pre-tokenizers by llama.cpp's names.

All checks compare bytes, never decoded text. Nothing is added before a text: no space and no special token.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from distill.vocabulary.vocabulary import SPACE, Vocabulary, added_around, open_tokenizer, to_mapped

REPLACEMENT = "\ufffd"  # replaces a byte that a vocabulary cannot write


class Encoder:
    """Writes bytes and text in a vocabulary's tokens. Raises DataError if its tokenizer.json cannot be loaded."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer: Any = open_tokenizer(vocabulary.folder / "tokenizer.json")
        self._model: Any = self._tokenizer.model
        # Parts that the tokenizer cannot encode as text: bytes that are not UTF-8, and ▁, which would become a space.
        separate = "\udc80-\udcff" + (SPACE if vocabulary.family == "sentencepiece" else "")
        self._separate = re.compile(f"([{separate}])")

    @cached_property
    def opening(self) -> list[int]:
        """Return the special ids that the tokenizer puts before a text."""
        around = added_around(self._tokenizer)
        return around[0] if around else []

    def leads(self, first: bool) -> bool:
        """Whether the tokenizer puts a space before the `first` text, or (False) after a special token."""
        return self._leads[0 if first else 1]

    @cached_property
    def _leads(self) -> tuple[bool, bool]:
        specials = (i for i, kind in enumerate(self.vocabulary.kinds) if kind == "special")
        written = ((i, self._encode(f"{self.vocabulary.tokens[i]}a", specials=True)) for i in specials)
        after = next((ids[1:] for i, ids in written if ids[:1] == [i]), [])
        alone = self._encode("a", specials=True)
        return self.vocabulary.text_bytes(alone).startswith(b" "), self.vocabulary.text_bytes(after).startswith(b" ")

    def text(self, data: bytes) -> list[int]:
        """Return the ids of `data`, split as the tokenizer splits a text. Special tokens in it count as text.

        Bytes that the vocabulary lacks become the ids of U+FFFD, the unknown token, or nothing.
        """
        ids: list[int] = []
        for part in self._separate.split(data.decode(errors="surrogateescape")):
            if self._separate.fullmatch(part):
                ids += self._bytewise(part.encode(errors="surrogateescape"), self._replacement)
            elif part:
                ids += self._plain_text(part)
        return ids

    def word(self, data: bytes) -> tuple[list[int], bool]:
        """Return the ids of one token's bytes, which are not split as a text is, and whether the ids are exact.

        The vocabulary must have all bytes of valid UTF-8. U+FFFD replaces other bytes.
        """
        if self.vocabulary.family == "byte-level":
            return self._model_tokens(to_mapped(data), data)
        ids, exact = list[int](), True
        for part in filter(None, self._separate.split(data.decode(errors="surrogateescape"))):
            raw = part.encode(errors="surrogateescape")
            if self._separate.fullmatch(part):
                part_ids, part_exact = self._word_bytewise(raw)
            else:
                part_ids, part_exact = self._model_tokens(part.replace(" ", SPACE), raw)
            ids += part_ids
            exact = exact and part_exact
        return ids, exact

    def marked_text(self, text: str) -> list[int]:
        """Return the ids of `text` as the tokenizer writes it, including the special tokens in it."""
        ids = self._encode(text, specials=True)
        if self.vocabulary.text_bytes(ids) == text.encode():
            return ids
        # The tokenizer changed the text or put a space before it. Write the text unchanged.
        ids = []
        for part in filter(None, self._named.split(text)):
            if self._named.fullmatch(part):
                ids.append(self.vocabulary.index[part])
            else:
                ids += self.word(part.encode())[0]
        return ids

    @cached_property
    def _named(self) -> re.Pattern[str]:
        """Return a pattern of the special and added tokens, the longest first."""
        tokens = enumerate(self.vocabulary.tokens)
        named = sorted((token for i, token in tokens if token and self.vocabulary.is_named(i)), key=len, reverse=True)
        return re.compile("(" + ("|".join(map(re.escape, named)) or "(?!)") + ")")

    def _encode(self, text: str, *, specials: bool = False) -> list[int]:
        self._tokenizer.encode_special_tokens = not specials
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _plain_text(self, text: str) -> list[int]:
        """Return the tokenizer's ids, or those of its model if the tokenizer normalises the text."""
        data = text.encode()
        if not self.leads(True) or text.startswith(" "):
            ids = self._encode(text.removeprefix(" ") if self.leads(True) else text)
            if self.vocabulary.text_bytes(ids) == data:
                return ids
        ids = [token.id for word in self._words(text, data) if word for token in self._model.tokenize(word)]
        if self.vocabulary.text_bytes(ids) == data or not all(byte in self.vocabulary.byte_ids for byte in data):
            return ids
        return self._bytewise(data, [])

    def _words(self, text: str, data: bytes) -> list[str]:
        """Return the words of a text as the model takes them, without a space before them."""
        if self.vocabulary.family == "sentencepiece":
            return [text.replace(" ", SPACE)]
        if self._tokenizer.pre_tokenizer is None:
            return [to_mapped(data)]
        words = [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        if "".join(words) == to_mapped(b" " + data):
            words[0] = words[0][1:]
        return words

    def _model_tokens(self, word: str, data: bytes) -> tuple[list[int], bool]:
        """Return the model's tokens of `word` if they give `data`, or `data` byte by byte."""
        ids = [token.id for token in self._model.tokenize(word)]
        plain = all(self.vocabulary.kinds[number] in ("normal", "byte") for number in ids)
        return (ids, True) if plain and self.vocabulary.text_bytes(ids) == data else self._word_bytewise(data)

    def _word_bytewise(self, data: bytes) -> tuple[list[int], bool]:
        if all(byte in self.vocabulary.byte_ids for byte in data):
            return self._bytewise(data, []), True
        return self._bytewise(data, self.word(REPLACEMENT.encode())[0]), False

    def _bytewise(self, data: bytes, replacement: list[int]) -> list[int]:
        """Return the ids of single bytes, with `replacement` for a byte without a token."""
        singles = self.vocabulary.byte_ids
        return [number for byte in data for number in ([singles[byte]] if byte in singles else replacement)]

    @cached_property
    def _replacement(self) -> list[int]:
        return self._plain_text(REPLACEMENT)


# ── Pre-tokenizers of byte-level BPE: llama.cpp's names for them, and their rules as steps ──
# A GGUF file holds only the name (`tokenizer.ggml.pre`), tokenizer.json the rules. Source: llama-vocab.cpp. llama.cpp
# rewrites some patterns for its own regular expressions. They are given here as in the original tokenizers.

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
    """Return a split into words that start with their capitals, as in tekken and gpt-4o."""
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

# llama.cpp's names for Llama 3, and for models with its rules.
LLAMA3_NAMES = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
)
Steps = tuple[str, ...]
# A step is `split PATTERN`, `digits` (each digit is a word), `gpt-2` (GPT-2's split, then bytes) or `bytes`.
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
# With these, a word that is itself a token is used without merging.
IGNORE_MERGES = frozenset((*LLAMA3_NAMES, "glm4", "glm5", "tekken"))


def pre_tokenizer_of(steps: Steps) -> dict[str, Any]:
    """Return the `pre_tokenizer` of tokenizer.json for these steps."""
    parts = [_part(step) for step in steps]
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}


def _part(step: str) -> dict[str, Any]:
    if step.startswith("split "):
        pattern = {"Regex": step.removeprefix("split ")}
        return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    if step == "digits":
        return {"type": "Digits", "individual_digits": True}
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": step == "gpt-2"}
