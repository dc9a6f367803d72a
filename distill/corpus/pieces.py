"""A large text as documents: pieces of it, so that one file has all three splits and many beginnings for prompts."""

from __future__ import annotations

from collections.abc import Iterator

PIECE = 16_384  # characters, some 4,000 tokens: several blocks, and hundreds of pieces in a book or a log


def cut_text(text: str, size: int = PIECE) -> Iterator[str]:
    """The text in pieces of `size` to 2 · `size` characters, each from a paragraph on where there are any, else a line.

    A text of at most 2 · `size` characters is one piece. Cuts depend on the text before them alone: a file that grows
    keeps its pieces but the last.
    """
    start = 0
    while len(text) - start > 2 * size:
        window = start + size, start + 2 * size
        blank, line = text.find("\n\n", *window), text.find("\n", *window)
        end = blank + 2 if blank >= 0 else line + 1 if line >= 0 else window[1]
        yield text[start:end]
        start = end
    yield text[start:]
