"""The head of a GGUF file: magic, metadata, and the list of tensors. Format: ggml's docs/gguf.md, version 3."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

    TensorRow = tuple[str, tuple[int, ...], GGMLQuantizationType, int]  # name, shape, type, bytes

# By gguf.GGUFValueType; STRING is 8 and ARRAY 9.
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def write_head(file: BinaryIO, writer: Any, rows: Sequence[TensorRow]) -> None:
    """Write the fields that a gguf.GGUFWriter holds, and the tensors' infos, up to where their data begins.

    The writer's own way packs a vocabulary item by item, through several calls each: seconds.
    """
    import gguf

    fields = writer.kv_data[0]
    parts = [struct.pack("<4sIQQ", b"GGUF", gguf.GGUF_VERSION, len(rows), len(fields))]
    for key, field in fields.items():
        parts.append(_text(key) + struct.pack("<I", field.type))
        if field.type == ARRAY:
            kind = field.sub_type if field.sub_type is not None else gguf.GGUFValueType.get_type(field.value[0])
            parts.append(struct.pack("<IQ", kind, len(field.value)))
            if kind == STRING:
                parts += [_text(item) for item in field.value]
            else:
                parts.append(struct.pack(f"<{len(field.value)}{CODES[kind]}", *field.value))
        else:
            parts.append(
                _text(field.value) if field.type == STRING else struct.pack(f"<{CODES[field.type]}", field.value)
            )
    offset = 0
    for name, shape, kind, size in rows:
        parts.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset))
        offset += size + -size % gguf.GGUF_DEFAULT_ALIGNMENT
    head = b"".join(parts)
    file.write(head + b"\0" * (-len(head) % gguf.GGUF_DEFAULT_ALIGNMENT))


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data
