"""The head of a GGUF file: its metadata and list of tensors, read without llama.cpp and without weights.

The second part holds what llama.cpp knows about tokens without a file. Format: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
import shlex
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from distill.errors import DataError
from distill.files import split_parts
from distill.vocabulary.encoding import LLAMA3_NAMES
from distill.vocabulary.vocabulary import FILL

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

    TensorRow = tuple[str, tuple[int, ...], GGMLQuantizationType, int]  # name, shape, type, bytes

# struct's codes by gguf.GGUFValueType.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
COPY_AGAIN = "export or copy the file again"
PIECE = re.compile(r"(.+\.gguf)([.-](?:part|split))[\w-]*", re.IGNORECASE)
MAX_ROWS = 2**22  # tokens
EXPORT_AGAIN = "convert the model again, or give its Hugging Face folder"


class _Cursor:
    """Reads a mapped file in order. Raises ValueError past the end of the file and for unknown types of values."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def require(self, count: int) -> None:
        self.require_end(self.at + count)

    def require_end(self, end: int) -> None:
        if end > len(self.data):
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

    def strings(self, count: int) -> list[bytes]:
        """Read strings one after another, as `string` does. A vocabulary has some 100,000, so few calls are made."""
        data, at, size_at = self.data, self.at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            if start > len(data):
                self.require_end(start)
            at = start + size_at(data, at)[0]
            if at > len(data):
                self.require_end(at)
            found.append(data[start:at])
        self.at = at
        return found

    def name(self) -> str:
        return self.string().decode("utf-8", "replace")

    def value(self) -> Any:
        """Read the number of a type and a value of that type: a number, bytes, or a list of either."""
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
                return self.strings(count)
        raise ValueError(f"value type {kind} at byte {self.at} is unknown")


class FileHead:
    """Metadata and the list of tensors. The methods read single values, check their form and raise DataError.

    gguf.GGUFReader makes an array of every string, which takes seconds for a real vocabulary, and it can read past the
    end of a damaged file. `values`: numbers, bytes, or lists of either, by key. By tensor name: `shapes`, lengths with
    the fastest dimension first; `kinds`, ggml's numbers of types; `places`, files and the first bytes of data; `sizes`,
    bytes of data. `bytes` is the size of all files.
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
        offsets: dict[str, int] = {}
        for _ in range(tensors):
            name = cursor.name()
            if name in offsets:
                raise ValueError(f"it holds two tensors {name}")
            self.shapes[name] = list(cursor.numbers("Q", cursor.number("I")))
            self.kinds[name] = cursor.number("I")
            offsets[name] = cursor.number("Q")
        align = self.values.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"general.alignment is {align!r}")
        start, self.bytes = cursor.at + -cursor.at % align, len(data)
        self.places = {name: (path, start + offset) for name, offset in offsets.items()}
        self.sizes: dict[str, int] = {}
        following = dict(itertools.pairwise([*sorted({*offsets.values()}), len(data) - start]))
        for name, offset in offsets.items():
            kind = known_type(self.kinds[name])
            # If the block size of a type is unknown, the size includes all bytes up to the next tensor.
            size = following[offset] - offset if kind is None else tensor_bytes(self.shapes[name], kind)
            if size < 0 or start + offset + size > len(data):
                raise ValueError(f"it ends after {len(data)} bytes, but needs {start + offset + max(size, 0)}")
            self.sizes[name] = size

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture. The model's own keys start with it."""
        return self.text("general.architecture") or self.refuse("it names no architecture")

    def refuse(self, what: str, hint: str = EXPORT_AGAIN) -> NoReturn:
        """Raise DataError for this file."""
        raise DataError(f"{self.path}: {what}", hint)

    def text(self, key: str) -> str | None:
        """Return a text, or None if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        try:
            return bytes(value).decode() if isinstance(value, bytes) else self.refuse(f"{key} is not a text")
        except UnicodeDecodeError:
            self.refuse(f"{key} is not UTF-8")

    def texts(self, key: str, errors: str = "strict") -> list[str]:
        """Return a list of texts, empty if the key is absent. `errors` is that of bytes.decode."""
        items = self.values.get(key, [])
        if not isinstance(items, list) or not all(isinstance(item, bytes) for item in items):
            self.refuse(f"{key} is not a list of texts")
        try:
            return [item.decode(errors=errors) for item in items]
        except UnicodeDecodeError:
            self.refuse(f"{key} holds a text that is not UTF-8")

    def numbers(self, key: str) -> list[Any]:
        """Return a list of numbers, empty if the key is absent."""
        items = self.values.get(key, [])
        if not isinstance(items, list) or any(isinstance(item, bytes | bool | list) for item in items):
            self.refuse(f"{key} is not a list of numbers")
        return items

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool."""
        value = self.values.get(key, default)
        return bool(value) if isinstance(value, bool | int) else self.refuse(f"{key} is neither true nor false")

    def architecture_value(self, key: str) -> Any:
        """Return the value of `key` below the architecture's name. A list of equal numbers gives the number."""
        value = self.values.get(f"{self.architecture}.{key}")
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                self.refuse(f"{self.architecture}.{key} differs between layers, which transformers cannot express")
            return value[0]
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer below the architecture's name."""
        value = default if (stated := self.architecture_value(key)) is None else stated
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.refuse(f"{self.architecture}.{key} is {value!r:.40}, not a positive integer")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number below the architecture's name, in the fewest digits that give the file's 32 bits."""
        value = default if (stated := self.architecture_value(key)) is None else stated
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self.refuse(f"{self.architecture}.{key} is {value!r:.40}, not a positive number")
        return shortest(value)

    def size(self, key: str, smallest: int, largest: int) -> int | None:
        """Return an integer within bounds below the architecture's name. None if it is absent or a list by layer."""
        value = self.values.get(f"{self.architecture}.{key}")
        if value is None or isinstance(value, list):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
            self.refuse_value(key, f"lie between {smallest} and {largest}")
        return int(value)

    @property
    def context(self) -> int | None:
        """Tokens that a text may have, or None if the file does not say.

        This is the length that the model was made for. For longrope it is the length before stretching, because
        llama.cpp chooses longrope's factors by the size of a context.
        """
        context = self.size("context_length", 1, 2**31 - 1)
        stretched = "rope_factors_long.weight" in self.shapes
        original = self.size("rope.scaling.original_context_length", 1, 2**31 - 1) if stretched else None
        return original if context is None or (original or context) < context else context

    @property
    def head_sizes(self) -> tuple[int | None, int | None]:
        """Sizes of an attention head's keys and values. None if the file gives one number per layer, or none."""
        hidden, heads = self.size("embedding_length", 1, 2**20), self.size("attention.head_count", 1, 2**16)
        default = hidden // heads if hidden and heads else None
        keys, values = (self.size(f"attention.{part}_length", 1, 2**20) for part in ("key", "value"))
        return keys or default, values or default

    def refuse_value(self, key: str, rule: str) -> NoReturn:
        """Raise DataError for a value below the architecture's name. `rule` completes "it must …"."""
        name = f"{self.architecture}.{key}"
        self.refuse(f"{name} is {self.values.get(name)!r:.60}, but must {rule}", "export the file again")


def shortest(value: float) -> float:
    """Return a 32-bit number in the fewest digits: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def tensor_bytes(shape: Sequence[int], kind: GGMLQuantizationType) -> int:
    """Bytes of a tensor's data."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(math.prod(shape) // block * size)


def known_type(number: int) -> GGMLQuantizationType | None:
    """Return ggml's type with this number, or None if the gguf package does not know it."""
    import gguf

    try:
        return gguf.GGMLQuantizationType(number)
    except ValueError:
        return None


def ggml_type(name: str) -> GGMLQuantizationType:
    """Return ggml's type with this name. Raises DataError if there is none."""
    import gguf

    try:
        return gguf.GGMLQuantizationType[name.upper()]
    except KeyError:
        raise DataError(f"tensor type {name!r} is unknown", "use a type of ggml, such as q8_0, q6_k or f16") from None


def type_name(number: int) -> str:
    """Return a type's name, such as q4_k. For an unknown type (ik_llama.cpp's own), return its number."""
    kind = known_type(number)
    return f"type {number}" if kind is None else kind.name.lower()


def open_head(path: Path) -> FileHead:
    """Read the head of a GGUF file. For a split file, `path` is the first part and the head has the tensors of all.

    Raises DataError if the file is missing, damaged or truncated, or if its parts do not make up a model.
    """
    if (piece := PIECE.fullmatch(path.name)) and path.is_file():
        whole = shlex.quote(str(path.with_name(piece[1])))
        what = f"{path} is a piece of {piece[1]}, which was cut up for an upload"
        raise DataError(what, f"join the pieces in their order: cat {whole}{piece[2]}* > {whole}")
    head = _open_one(path)
    count = head.values.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return head
    parts = split_parts(path)
    if len(parts) != count:
        head.refuse(f"it is one of {count} parts of a model, but its name does not say so", _names(count))
    _require_number(head, parts.index(path), count)
    if path != parts[0]:
        head.refuse(f"it is part {parts.index(path) + 1} of {count} of a model", f"give the first part, {parts[0]}")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        what = f"{len(missing)} of its {count} parts are missing, first {missing[0]}"
        head.refuse(what, "put all parts into one folder")
    for index, part in enumerate(parts[1:], 1):
        more = _open_one(part)
        _require_number(more, index, count)
        doubled = more.shapes.keys() & head.shapes.keys()
        if doubled:
            more.refuse(f"an earlier part also holds {min(doubled)}", "copy the parts again, all from one model")
        for table in ("shapes", "kinds", "places", "sizes"):
            getattr(head, table).update(getattr(more, table))
        head.bytes += more.bytes
    total = head.values.get("split.tensors.count", len(head.shapes))
    if total != len(head.shapes):
        head.refuse(f"its parts hold {len(head.shapes)} tensors, but its head counts {total}", "copy the parts again")
    return head


def _names(count: int) -> str:
    return f"the name of each part ends with its number, as NAME-00001-of-{count:05}.gguf"


def _require_number(head: FileHead, index: int, count: int) -> None:
    number, parts = head.values.get("split.no"), head.values.get("split.count")
    if (number, parts) != (index, count):
        by_head = f"its head says {number!r:.20} (split.no, from 0) of {parts!r:.20}"
        head.refuse(f"its name says part {index + 1} of {count}, {by_head}", _names(count))


def _open_one(path: Path) -> FileHead:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return FileHead(path, data)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a GGUF file") from None
    except (ValueError, OverflowError, MemoryError, struct.error) as error:
        raise DataError(f"{path} cannot be read as GGUF: {error}", "copy or export the file again") from None


def write_head(path: Path, writer: Any, rows: Sequence[TensorRow]) -> None:
    """Write the fields of a gguf.GGUFWriter and the tensors' infos, up to the first byte of data.

    Raises DataError for a value that does not fit its type.
    """
    for name, shape, kind, size in rows:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.write_padding(writer.fout[0], writer.fout[0].tell())
    except (struct.error, TypeError, AttributeError, ValueError, OverflowError, IndexError) as error:
        what = f"config.json or the tokenizer's files hold a value that GGUF cannot store: {error}"
        raise DataError(what) from None
    finally:
        writer.close()


# ── What llama.cpp knows about tokens without a file (llama-vocab.cpp): defaults by vocabulary, types by names ──

NO_TOKEN = 2**32 - 1  # the value of a key that names no token
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType, and SentencePiece's own numbers
# GGUF's words for roles in tokenizer.ggml.WORD_token_id, if they differ ("seperator" is GGUF's spelling).
ROLE_WORDS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
TURN_ENDS = ("eot", "eom")  # further ids that end a turn or a message


def token_key(role: str) -> str:
    """Return the key of a GGUF file that names the token of a role."""
    return f"tokenizer.ggml.{ROLE_WORDS.get(role, role)}_token_id"


class Defaults(NamedTuple):
    """bos and eos of a kind of vocabulary, and whether llama.cpp adds them to a text."""

    kind: str
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool


# By tokenizer.ggml.model. Each kind is a value of llama.cpp's llama_vocab_type.
DEFAULTS = {
    "gpt2": Defaults("BPE", 11, 11, False, False),
    "gemma4": Defaults("BPE", None, None, True, False),
    "llama": Defaults("SPM", 1, 2, True, False),
}
# Pre-tokenizers of BPE (tokenizer.ggml.pre) that change those defaults.
PRE_ADDS_BOS = {*LLAMA3_NAMES, "tekken", "chameleon", "gemma4"}
PRE_WITHOUT_BOS = {"chatglm-bpe", "glm4", "glm5"}
ALWAYS_ADDS_BOS = "gemma4"  # even if the file says otherwise


def stated_ends(head: FileHead) -> Defaults:
    """Return llama.cpp's defaults for a file's vocabulary, with the file's own flags for added tokens.

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


def check_vocabulary(head: FileHead) -> None:
    """Raise DataError for a list of tokens, an id or a tensor shape that no model can have."""
    tokens = head.values.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else None
    wrong = None
    if count is not None and (not 0 < count <= MAX_ROWS or not all(isinstance(token, bytes) for token in tokens or ())):
        wrong = "tokenizer.ggml.tokens"
    first: dict[bytes, int] = {}
    for index, token in enumerate(tokens or () if wrong is None and count is not None else ()):
        # Two equal tokens trigger an assertion of llama.cpp, which ends the process. Empty tokens get distinct names.
        if (other := first.setdefault(token or b"[EMPTY_%d]" % index, index)) != index:
            shown = token.decode("utf-8", "replace")
            head.refuse(f"its tokens {other} and {index} have the same text, {shown!r:.60}", EXPORT_AGAIN)
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        listed = head.values.get(key)
        if count is not None and listed is not None and (not isinstance(listed, list) or len(listed) != count):
            wrong = key
    for key, value in head.values.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("token_id"):
            absent = not isinstance(value, int) or isinstance(value, bool)
            if absent or (count is not None and not 0 <= value < count and value != NO_TOKEN):
                wrong = key
    for name, shape in head.shapes.items():
        if not 1 <= len(shape) <= 4 or not all(0 < length < 2**40 for length in shape):
            wrong = f"the shape of {name}"
    if wrong is not None:
        head.refuse(f"{wrong} is not possible for a model", COPY_AGAIN)


# Tokens that end a text and count as control tokens, even if the file gives them another type.
END_NAMES = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "[e~["),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>"),
    )
)
# Exceptions: if the ends of a text include one token of each group, the token gets this type and ends no text.
NO_END = {
    "<|end|>": (({"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}), USER_DEFINED),
    "</s>": (({"<|tool_response>"},), NORMAL),
}
SHOWN_NAMES = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))  # user-defined tokens
# Fill-in-the-middle roles (with an older word for each) -> names of their tokens, for files without a key for the role.
FILL_NAMES: dict[tuple[str, ...], tuple[str, ...]] = {
    **{(f"fim_{word[:3]}", word): names for word, names in FILL.items()},
    ("fim_pad",): ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("fim_rep",): ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("fim_sep",): ("<|file_sep|>",),
}
ENDING_FILL = ("fim_pad", "fim_rep", "fim_sep")  # Tokens of these roles end a text.
FILL_ROLES = tuple(role for roles in FILL_NAMES for role in roles)


def types_and_ends(tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """Return llama.cpp's own types of the tokens, and the ids that end an answer, eos first.

    `types` and `ids` (by role) are the file's. If several tokens have a name of one role, llama.cpp may take any of
    them. Here the first name wins.
    """
    numbers, changed_types = {token: index for index, token in enumerate(tokens)}, list(types)
    ends = {ids[role] for role in ("eos", *TURN_ENDS) if role in ids}
    for roles, names in FILL_NAMES.items():
        number = next((ids[role] for role in roles if role in ids), None)
        if number is None and (candidates := [numbers[name] for name in names if name in numbers]):
            number = candidates[0]
            changed_types[number] = CONTROL
        if number is not None and roles[0] in ENDING_FILL:
            ends.add(number)
    for name in END_NAMES & numbers.keys():
        ends.add(numbers[name])
        changed_types[numbers[name]] = CONTROL
    for name in SHOWN_NAMES & numbers.keys():
        changed_types[numbers[name]] = USER_DEFINED
    named = {tokens[number] for number in ends}
    for name, (groups, kind) in NO_END.items():
        if name in named and all(named & group for group in groups):
            ends.discard(numbers[name])
            changed_types[numbers[name]] = kind
    return changed_types, sorted(ends, key=lambda number: (number != ids["eos"], number))
