"""How the two families of tokenizers write bytes as characters.

Byte-level BPE writes every byte as a printable character (GPT-2's byte map); SentencePiece writes a space as ▁ and
bytes without a token of their own as <0xNN>.
"""

from __future__ import annotations

SPACE = "▁"
# Bytes that no valid UTF-8 holds; real vocabularies leave them out without losing a text.
NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
# Bytes that texts hardly hold, and real vocabularies lack (SmolLM2's eight of them): control characters but tab, line
# feed and carriage return, and what begins characters of planes that Unicode has not assigned.
RARE = frozenset({*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F, 0xF1, 0xF2})


def _byte_map() -> tuple[str, ...]:
    """The character that stands for each byte in byte-level BPE (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


BYTE_MAP = _byte_map()
_TO_MAPPED = str.maketrans({chr(byte): character for byte, character in enumerate(BYTE_MAP)})
# Back to Latin-1; characters below 256 that stand for no byte become one that Latin-1 cannot encode.
_FROM_MAPPED = str.maketrans(
    {chr(code): "\uffff" for code in range(256)} | {character: chr(byte) for byte, character in enumerate(BYTE_MAP)}
)


def to_mapped(data: bytes) -> str:
    """Bytes as byte-level BPE writes them."""
    return data.decode("latin-1").translate(_TO_MAPPED)


def from_mapped(token: str) -> bytes:
    """The bytes of a byte-level token; a token with characters outside the byte map is plain text."""
    try:
        return token.translate(_FROM_MAPPED).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
