"""What the pair rules compare of a model, read from a Hugging Face folder or the head of a GGUF file; no weights.

Legend: V rows of the model's vocabulary, padding included.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distill.errors import DataError
from distill.models.hugging_face import config_json, load_config, load_tokenizer
from distill.models.kept import read_kept
from distill.recipe import is_path


class Defaults(NamedTuple):
    """What llama.cpp takes for a kind of vocabulary where a file says nothing."""

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
PRE_ADDS_BOS = {
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
    "chameleon",
    "gemma4",
}
PRE_WITHOUT_BOS = {"chatglm-bpe", "glm4", "glm5"}
ALWAYS_ADDS_BOS = "gemma4"  # whatever the file says
# Architectures whose Unigram tokenizers keep that kind in GGUF; others are written as SentencePiece.
UNIGRAM_IS_UGM = {"t5", "umt5", "mt5", "xlm-roberta", "xlm-roberta-xl"}

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]


@dataclass(frozen=True)
class VocabularyMetadata:
    """A model's vocabulary and context as llama.cpp and vLLM see them.

    `tokens` [V] are the raw token strings, padding rows named [PAD<id>] as every converter does; `bos` and `eos` are
    added to a text where `add_bos` and `add_eos` say so; `beyond` counts ids of the tokenizer that have no row, and
    `kept` those of a trimmed head (None: the whole head); `context` is the training context in tokens.
    """

    reference: str
    kind: str
    tokens: list[str] = field(repr=False)
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool
    context: int | None
    architecture: str
    chat_template: bool
    beyond: int = 0
    kept: int | None = None

    @classmethod
    def read(cls, reference: str) -> VocabularyMetadata:
        """The metadata of a Hugging Face folder, a hub name or a .gguf file; DataError where they cannot be had."""
        return _from_gguf(Path(reference)) if reference.endswith(".gguf") else _from_folder(reference)

    @property
    def rows(self) -> int:
        """V: what Hugging Face calls vocab_size."""
        return len(self.tokens)

    def real(self, index: int) -> str | None:
        """The string of a token that is no padding, else None."""
        if index >= len(self.tokens) or self.tokens[index] == f"[PAD{index}]":
            return None
        return self.tokens[index]

    @property
    def real_tokens(self) -> int:
        """Rows that hold tokens."""
        return sum(self.real(index) is not None for index in range(self.rows))

    def as_json(self) -> dict[str, Any]:
        """All but the tokens themselves."""
        return {
            "reference": self.reference,
            "architecture": self.architecture,
            "kind": self.kind,
            "rows": self.rows,
            "real_tokens": self.real_tokens,
            "bos": self.bos,
            "eos": self.eos,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "context": self.context,
            "chat_template": self.chat_template,
            "tokens_without_row": self.beyond,
            "kept_tokens": self.kept,
        }


def _small_folder(reference: str) -> str:
    """A model's folder as given, or where the hub's small files of it lie: no weights."""
    if is_path(reference):
        return reference
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(reference, allow_patterns=SMALL_FILES))
    except Exception as error:  # the hub client raises many kinds; each means "not to be had"
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"cannot load {reference}: {first}", "check the name and the network, or give a local folder"
        ) from error


def _tokenizer(place: str) -> Any:
    """The tokenizers.Tokenizer of a folder."""
    from tokenizers import Tokenizer

    path = Path(place) / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises the bare class for every kind of damage
            raise DataError(f"{path} cannot be loaded: {error}", "copy the tokenizer again") from None
    backend = getattr(load_tokenizer(place), "backend_tokenizer", None)
    if backend is None:
        raise DataError(f"{place}: its tokenizer has no fast version to read", "save it with a tokenizer.json")
    return backend


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "copy the tokenizer again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object", "copy the tokenizer again")
    return found


def _gguf_model(place: str, tokenizer: Any, architecture: str) -> str:
    """The tokenizer.ggml.model that llama.cpp's converter would write."""
    model = type(tokenizer.model).__name__
    if architecture.startswith("gemma4"):
        return "gemma4"
    if model == "BPE":
        return "llama" if tokenizer.model.byte_fallback else "gpt2"
    if model == "Unigram":
        return "t5" if architecture in UNIGRAM_IS_UGM else "llama"
    if model == "WordPiece":
        return "bert"
    raise DataError(f"{place}: llama.cpp knows no vocabulary of the kind {model}", "use another tokenizer")


def _added_around(tokenizer: Any) -> tuple[int | None, int | None]:
    """The ids that the post-processor puts before and after a text."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    full: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            after = full[start + len(bare) :]
            return (full[0] if start else None), (after[-1] if after else None)
    return None, None


def _from_folder(reference: str) -> VocabularyMetadata:
    place = _small_folder(reference)
    folder, config = Path(place), load_config(place).get_text_config()
    rows = getattr(config, "vocab_size", None)
    if not isinstance(rows, int) or rows < 1:
        raise DataError(f"{folder}/config.json: vocab_size is {rows!r}", "mend config.json")
    tokenizer, settings, raw = _tokenizer(place), _settings(folder), config_json(folder)
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [f"[PAD{index}]" for index in range(rows)]
    for token, index in ids.items():
        if index < rows:
            tokens[index] = token
    model = _gguf_model(place, tokenizer, config.model_type)
    defaults = DEFAULTS[model]

    def named(name: str) -> int | None:
        """The id of bos or eos that the files name, tokenizer_config.json first."""
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = raw.get(f"{name}_token_id", (raw.get("text_config") or {}).get(f"{name}_token_id"))
        number = number[0] if isinstance(number, list) and number else number
        found = ids.get(token, number) if isinstance(token, str) else number
        return found if isinstance(found, int) and 0 <= found < rows else None

    def chosen(name: str, added: int | None, otherwise: int | None, default: bool) -> tuple[int | None, bool]:
        """The id and whether it is added: by the settings, else by the post-processor, else by llama.cpp's default."""
        flag = settings.get(f"add_{name}_token")
        first = added if added is not None else named(name)
        adds = flag if isinstance(flag, bool) else added is not None or default
        return (otherwise if first is None else first), adds

    before, after = _added_around(tokenizer)
    bos, add_bos = chosen("bos", before, defaults.bos, defaults.add_bos)
    eos, add_eos = chosen("eos", after, defaults.eos, defaults.add_eos)
    context = getattr(config, "max_position_embeddings", None)
    kept = read_kept(folder)
    return VocabularyMetadata(
        reference=reference,
        kind=defaults.kind,
        tokens=tokens,
        bos=bos,
        eos=eos,
        add_bos=add_bos or model == ALWAYS_ADDS_BOS,
        add_eos=add_eos,
        context=context if isinstance(context, int) and context > 0 else None,
        architecture=config.model_type,
        chat_template=bool(settings.get("chat_template"))
        or any((folder / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")),
        beyond=sum(index >= rows for index in ids.values()),
        kept=None if kept is None else len(kept["kept"]),
    )


class _Head:
    """The head of a GGUF file, read in order: metadata and the list of tensors.

    gguf.GGUFReader makes arrays of every string, seconds for a real vocabulary, and can read on past the end of a
    damaged file. Format: ggml's docs/gguf.md, versions 2 and 3.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0
        if data[:4] != b"GGUF":
            raise ValueError("it is not a GGUF file")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            raise ValueError("it is big-endian" if version & 0xFFFF == 0 else f"its version {version} is not 2 or 3")
        tensors, keys = self.number("Q"), self.number("Q")
        self.values = {self.text().decode("utf-8", "replace"): self.value(self.number("I")) for _ in range(keys)}
        self.shapes: dict[str, list[int]] = {}
        end = 0
        for _ in range(tensors):
            name = self.text().decode("utf-8", "replace")
            shape = list(self.numbers("Q", self.number("I")))
            kind, offset = self.number("I"), self.number("Q")
            self.shapes[name] = shape
            end = max(end, offset + _tensor_bytes(shape, kind))
        align = self.values.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"general.alignment is {align!r}")
        self.require(-self.at % align + end if tensors else 0)

    def require(self, count: int) -> None:
        """Raise ValueError when fewer than `count` bytes are left."""
        if self.at + count > len(self.data):
            raise ValueError(f"it ends after {len(self.data)} bytes where it needs {self.at + count}")

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self.require(size)
        found = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return found

    def text(self) -> bytes:
        size = self.number("Q")
        self.require(size)
        self.at += size
        return self.data[self.at - size : self.at]

    def value(self, kind: int) -> Any:
        """A value of GGUF's type `kind`: a number, bytes, or a list of either."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in SCALARS:
                return list(self.numbers(SCALARS[inner], count))
            if inner == STRING:
                return [self.text() for _ in range(count)]
            kind = inner
        raise ValueError(f"value type {kind} at byte {self.at} is unknown")


def _tensor_bytes(shape: list[int], kind: int) -> int:
    """Bytes of a tensor's data; 0 for types that the gguf package does not know yet."""
    import gguf

    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        return 0
    count = 1
    for length in shape:
        count *= length
    return int(count // block * size)


def _open_head(path: Path) -> _Head:
    again = "copy or export the file again"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Head(data)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a GGUF file") from None
    except (ValueError, OverflowError, MemoryError, struct.error) as error:
        raise DataError(f"{path} cannot be read as GGUF: {error}", again) from None


def _from_gguf(path: Path) -> VocabularyMetadata:
    head = _open_head(path)
    values = head.values

    def text(key: str) -> str | None:
        found = values.get(key)
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else None

    def number(key: str, default: int | None, limit: int | None = None) -> int | None:
        found = values.get(key)
        fits = isinstance(found, int) and not isinstance(found, bool) and (limit is None or 0 <= found < limit)
        return found if fits else default

    def flag(key: str, default: bool) -> bool:
        return bool(values.get(key, default))

    model, pre = text("tokenizer.ggml.model"), text("tokenizer.ggml.pre")
    words = values.get("tokenizer.ggml.tokens")
    if model is None or not isinstance(words, list) or not all(isinstance(word, bytes) for word in words):
        raise DataError(f"{path} holds no tokenizer", "give a whole model file, of a split model the first part")
    if model not in DEFAULTS:
        raise DataError(
            f"{path}: tokenizer.ggml.model is {model!r}, which is unknown here", f"known: {', '.join(DEFAULTS)}"
        )
    # One row per token, or llama.cpp does not load the file.
    embedding = head.shapes.get("token_embd.weight", [0, len(words)])
    if embedding[-1] != len(words):
        raise DataError(f"{path} names {len(words)} tokens but embeds {embedding[-1]}", "export the model again")
    defaults = DEFAULTS[model]
    if defaults.kind == "BPE" and pre in PRE_ADDS_BOS:
        defaults = defaults._replace(add_bos=True)
    if defaults.kind == "BPE" and pre in PRE_WITHOUT_BOS:
        defaults = defaults._replace(bos=None)
    architecture = text("general.architecture") or "unknown"
    always = ALWAYS_ADDS_BOS in (model, pre)
    return VocabularyMetadata(
        reference=str(path),
        kind=defaults.kind,
        tokens=[word.decode("utf-8", "surrogateescape") for word in words],
        bos=number("tokenizer.ggml.bos_token_id", defaults.bos, len(words)),
        eos=number("tokenizer.ggml.eos_token_id", defaults.eos, len(words)),
        add_bos=always or flag("tokenizer.ggml.add_bos_token", defaults.add_bos),
        add_eos=flag("tokenizer.ggml.add_eos_token", defaults.add_eos),
        context=number(f"{architecture}.context_length", None),
        architecture=architecture,
        chat_template="tokenizer.chat_template" in values,
    )
