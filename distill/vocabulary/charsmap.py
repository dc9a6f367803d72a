"""The table of replacements of a SentencePiece normaliser (`precompiled_charsmap`), checked before it is used.

It is a length, that many bytes of a double array (Darts), and replacements that end with NUL. Both tokenizers and
llama.cpp follow its steps unchecked, and end the process on one that leads outside.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distill.errors import DataError
from distill.faults import reading
from distill.files import read_object

AGAIN = "copy the tokenizer again"


def require_tables(path: Path, content: Any = None) -> None:
    """Raise DataError for a tokenizer.json with a damaged table; `content` is what it holds, if that was read."""
    if content is None:
        with reading(path):
            if not path.is_file() or b"Precompiled" not in path.read_bytes():
                return
        content = read_object(path, AGAIN)
    waiting = [content.get("normalizer")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if part.get("type") == "Precompiled":
                table_of(path, part)
            waiting += [inner for inner in part.values() if isinstance(inner, Mapping | list)]
        elif isinstance(part, list):
            waiting += part


def table_of(path: Path, part: Mapping[str, Any]) -> bytes:
    """The table of a normaliser `Precompiled`, b"" for an empty one; raises DataError for a damaged one."""
    try:
        table = base64.b64decode(part.get("precompiled_charsmap") or "", validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise DataError(f"{path} is damaged: its table of replacements is no base64", AGAIN) from None
    size = int.from_bytes(table[:4], "little")
    if table and (size % 4 or not 4 <= size < len(table) - 4 or table[-1:] != b"\0" or not _is_closed(table, size)):
        raise DataError(f"{path} is damaged: its table of replacements is cut short or leads outside of itself", AGAIN)
    return table


def _is_closed(table: bytes, size: int) -> bool:
    """Whether every step through the double array stays in it, and every leaf leads to a replacement.

    A unit's low byte is the byte that leads to it, bit 8 says that it has a leaf, bits 9 to 30 are the block of its
    children, which lie at that block ^ byte.
    """
    units = np.frombuffer(table, "<u4", size // 4, 4)
    replacements, following = len(table) - 4 - size, np.arange(1, 256, dtype=np.uint32)
    waiting, seen = [0], {0}
    while waiting:
        place = waiting.pop()
        unit = int(units[place])
        block = place ^ ((unit >> 10) << ((unit & 512) >> 6))
        if block | 255 >= len(units):
            return False
        if place and unit & 256 and int(units[block]) & 0x7FFFFFFF >= replacements:
            return False
        children = block ^ following
        for child in children[units[children] & 0x800000FF == following].tolist():
            if child not in seen:
                seen.add(child)
                waiting.append(child)
    return True
