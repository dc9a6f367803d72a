"""The head of a GGUF file, its metadata and list of tensors, without llama.cpp and without weights.

Format: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from distill.errors import DataError
from distill.vocabulary.encoding import LLAMA3_NAMES

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

    TensorRow = tuple[str, tuple[int, ...], GGMLQuantizationType, int]  # name, shape, type, bytes

# By gguf.GGUFValueType.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
NO_TOKEN = 2**32 - 1  # in a key that names a token
EXPORT_AGAIN = "convert the model again, or give its Hugging Face folder"


class _Cursor:
    """Reads a mapped file in order; raises ValueError past its end, and for a type of value that is not known."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def require(self, count: int) -> None:
        if self.at + count > len(self.data):
            raise ValueError(f"it ends inside its header, after {len(self.data)} bytes")

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self.require(size)
        self.at += size
        return struct.unpack_from(f"<{count}{code}", self.data, self.at - size)

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> bytes:
        size = self.number("Q")
        self.require(size)
        self.at += size
        return self.data[self.at - size : self.at]

    def name(self) -> str:
        return self.string().decode("utf-8", "replace")

    def value(self) -> Any:
        """A value behind the number of its type: a number, bytes, or a list of either."""
        kind = self.number("I")
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind in SCALARS:
                return list(self.numbers(SCALARS[kind], count))
            if kind == STRING:
                return [self.string() for _ in range(count)]
        raise ValueError(f"value type {kind} at byte {self.at} is unknown")


class FileHead:
    """Metadata and the list of tensors. The methods read single values, check their form and raise DataError.

    gguf.GGUFReader makes arrays of every string, seconds for a real vocabulary, and can read on past the end of a
    damaged file. `values` are numbers, bytes, or lists of either, by key. `shapes`, `kinds` and `offsets` are of the
    tensors by name: lengths with the fastest first, the number of a gguf.GGMLQuantizationType, and the first byte
    behind `start`, where the tensors' data begins.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, cursor = path, _Cursor(data)
        if data[:4] != b"GGUF":
            raise ValueError("it is not a GGUF file")
        cursor.at = 4
        version = cursor.number("I")
        if version not in (2, 3):
            raise ValueError("it is big-endian" if version & 0xFFFF == 0 else f"its version {version} is not 2 or 3")
        tensors, keys = cursor.numbers("Q", 2)
        self.values: dict[str, Any] = {cursor.name(): cursor.value() for _ in range(keys)}
        self.shapes: dict[str, list[int]] = {}
        self.kinds: dict[str, int] = {}
        self.offsets: dict[str, int] = {}
        end = 0
        for _ in range(tensors):
            name = cursor.name()
            shape = self.shapes[name] = list(cursor.numbers("Q", cursor.number("I")))
            kind = self.kinds[name] = cursor.number("I")
            offset = self.offsets[name] = cursor.number("Q")
            end = max(end, offset + tensor_bytes(shape, kind))
        align = self.values.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"general.alignment is {align!r}")
        self.start = cursor.at + -cursor.at % align
        if tensors and self.start + end > len(data):
            raise ValueError(f"it ends after {len(data)} bytes where it needs {self.start + end}")

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, below which the model's own keys stand."""
        return self.text("general.architecture") or self.refuse("it names no architecture")

    def refuse(self, what: str, hint: str = EXPORT_AGAIN) -> NoReturn:
        """Raise DataError for this file."""
        raise DataError(f"{self.path}: {what}", hint)

    def text(self, key: str) -> str | None:
        """A text; None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        try:
            return bytes(value).decode() if isinstance(value, bytes) else self.refuse(f"{key} is no text")
        except UnicodeDecodeError:
            self.refuse(f"{key} is not UTF-8")

    def texts(self, key: str, errors: str = "strict") -> list[str]:
        """A list of texts, empty where there is none; `errors` as of bytes.decode."""
        items = self.values.get(key, [])
        if not isinstance(items, list) or not all(isinstance(item, bytes) for item in items):
            self.refuse(f"{key} is no list of texts")
        try:
            return [item.decode(errors=errors) for item in items]
        except UnicodeDecodeError:
            self.refuse(f"{key} holds a text that is not UTF-8")

    def numbers(self, key: str) -> list[Any]:
        """A list of numbers, empty where there is none."""
        items = self.values.get(key, [])
        if not isinstance(items, list) or any(isinstance(item, bytes | bool | list) for item in items):
            self.refuse(f"{key} is no list of numbers")
        return items

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        return bool(value) if isinstance(value, bool | int) else self.refuse(f"{key} is neither true nor false")

    def own(self, key: str) -> Any:
        """A value below the architecture's name; of a list with one number a layer, the number where all are equal."""
        value = self.values.get(f"{self.architecture}.{key}")
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                self.refuse(f"{self.architecture}.{key} differs between layers, which transformers cannot hold")
            return value[0]
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer below the architecture's name."""
        value = default if (stated := self.own(key)) is None else stated
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.refuse(f"{self.architecture}.{key} is {value!r:.40}, not a positive integer")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number below the architecture's name, in the fewest digits that give the file's 32 bits."""
        value = self.own(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self.refuse(f"{self.architecture}.{key} is {value!r:.40}, not a positive number")
        return shortest(value)

    def size(self, key: str, smallest: int, largest: int) -> int | None:
        """An integer within bounds below the architecture's name; None where there is none, or one for each layer."""
        value = self.values.get(f"{self.architecture}.{key}")
        if value is None or isinstance(value, list):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
            self.refuse_value(key, f"lie between {smallest} and {largest}")
        return int(value)

    @property
    def head_sizes(self) -> tuple[int | None, int | None]:
        """Sizes of an attention head's keys and values; None where the file gives one number a layer, or none."""
        hidden, heads = self.size("embedding_length", 1, 2**20), self.size("attention.head_count", 1, 2**16)
        default = hidden // heads if hidden and heads else None
        keys, values = (self.size(f"attention.{part}_length", 1, 2**20) for part in ("key", "value"))
        return keys or default, values or default

    def refuse_value(self, key: str, rule: str) -> NoReturn:
        """Raise DataError for a value below the architecture's name that breaks a rule."""
        name = f"{self.architecture}.{key}"
        self.refuse(f"{name} is {self.values.get(name)!r:.60}, must {rule}", "export the file again")


def shortest(value: float) -> float:
    """A number of 32 bits in the fewest digits: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def tensor_bytes(shape: Sequence[int], kind: int) -> int:
    """Bytes of a tensor's data; 0 for types that the gguf package does not know yet."""
    import gguf

    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        return 0
    return int(math.prod(shape) // block * size)


def open_head(path: Path) -> FileHead:
    """The head of a GGUF file; raises DataError where the file is missing, damaged or cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return FileHead(path, data)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a GGUF file") from None
    except (ValueError, OverflowError, MemoryError, struct.error) as error:
        raise DataError(f"{path} cannot be read as GGUF: {error}", "copy or export the file again") from None


def write_head(path: Path, writer: Any, rows: Sequence[TensorRow]) -> None:
    """Write the fields that a gguf.GGUFWriter holds, and the tensors' infos, up to where their data begins.

    Raises DataError for a value that its type cannot hold.
    """
    for name, shape, kind, size in rows:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.write_padding(writer.fout[0], writer.fout[0].tell())
    except (struct.error, TypeError, AttributeError, ValueError, OverflowError, IndexError) as error:
        raise DataError(f"config.json or the tokenizer's files hold a value that GGUF cannot hold: {error}") from None
    finally:
        writer.close()


# ── Kinds and roles of tokens, and llama.cpp's defaults where a file names none (llama-vocab.cpp) ──

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
