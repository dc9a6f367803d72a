"""The head of a GGUF file: magic, metadata, and the list of tensors. Format: ggml's docs/gguf.md, version 3."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from distill.errors import DataError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

    TensorRow = tuple[str, tuple[int, ...], GGMLQuantizationType, int]  # name, shape, type, bytes

# By gguf.GGUFValueType; STRING is 8 and ARRAY 9.
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def write_head(file: BinaryIO, writer: Any, rows: Sequence[TensorRow]) -> None:
    """Write the fields that a gguf.GGUFWriter holds, and the tensors' infos, up to where their data begins.

    The writer's own way packs a vocabulary item by item, through several calls each: seconds. Raises DataError, with
    the key, for a value that its type cannot hold.
    """
    import gguf

    fields = writer.kv_data[0]
    parts = [struct.pack("<4sIQQ", b"GGUF", gguf.GGUF_VERSION, len(rows), len(fields))]
    for key, field in fields.items():
        try:
            parts += [_text(key), *_field(field)]
        except (struct.error, TypeError, AttributeError, ValueError, OverflowError, IndexError):
            raise DataError(
                f"{key} is {field.value!r:.60}, which GGUF cannot hold",
                "correct the value in config.json or the tokenizer's files",
            ) from None
    offset = 0
    for name, shape, kind, size in rows:
        parts.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset))
        offset += size + -size % gguf.GGUF_DEFAULT_ALIGNMENT
    head = b"".join(parts)
    file.write(head + b"\0" * (-len(head) % gguf.GGUF_DEFAULT_ALIGNMENT))


def _field(field: Any) -> list[bytes]:
    """A value behind the number of its type; of a list, the type of its items and their count come next."""
    import gguf

    if field.type != ARRAY:
        value = _text(field.value) if field.type == STRING else struct.pack(f"<{CODES[field.type]}", field.value)
        return [struct.pack("<I", field.type), value]
    if isinstance(field.value, bytes):
        return [struct.pack("<IIQ", ARRAY, gguf.GGUFValueType.UINT8, len(field.value)), field.value]
    kind = field.sub_type if field.sub_type is not None else gguf.GGUFValueType.get_type(field.value[0])
    head = struct.pack("<IIQ", ARRAY, kind, len(field.value))
    if kind == STRING:
        return [head, *(_text(item) for item in field.value)]
    return [head, struct.pack(f"<{len(field.value)}{CODES[kind]}", *field.value)]


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data
