"""What tokens say, byte by byte: the text of a continuation, and where stop strings end it.

Bytes and not decoded pieces: a tokenizer that decodes tokens without those before them drops the space in front of a
word (SentencePiece) and breaks characters that several tokens share. Legend: L bytes of the longest stop string.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from distill.errors import DataError
from distill.vocabulary import Vocabulary

BytesOf = Callable[[int], bytes]


def token_bytes(vocabulary: Vocabulary, silent: Collection[int] = ()) -> BytesOf:
    """The bytes of each token; none for the `silent` ones and for ids that stand for nothing."""

    def bytes_of(token: int) -> bytes:
        if token in silent or token >= vocabulary.size:
            return b""
        return vocabulary.bytes_of[token] or b""

    return bytes_of


class Characters:
    """Bytes to text as they come: those of an unfinished character wait; what is no UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> str:
        """The characters that these bytes finish."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left of a character that will not be finished."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True)
class Stopped:
    """What a stop function tells of a text: its first `kept` tokens are certain to be said.

    Where it `ended` they are all, followed by `rest`: what the next token says before the place where the text ends.
    Else those behind them may belong to what ends it, and wait.
    """

    kept: int
    ended: bool = False
    rest: bytes = b""


# Of all new tokens, and how many of them it saw before, when the text did not end. `kept` never falls between calls.
Stop = Callable[[Sequence[int], int], Stopped]


def stop_before(bytes_of: BytesOf, texts: Sequence[str]) -> Stop | None:
    """Ends a text before the stop string that is complete first; of several complete at once, before the longest.

    None without `texts`. A call looks at the new tokens and at L − 1 bytes before them. Raises DataError for an empty
    stop string.
    """
    if not texts:
        return None
    if not all(texts):
        raise DataError("an empty stop string would end every text before it begins", "give some text to stop before")
    wanted = [text.encode() for text in texts]
    longest = max(map(len, wanted))

    def stop(tokens: Sequence[int], seen: int) -> Stopped:
        start, before = seen, 0
        while start and before < longest - 1:
            start -= 1
            before += len(bytes_of(tokens[start]))
        pieces = [bytes_of(token) for token in tokens[start:]]
        said, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
        found = [(place + len(text), place) for text in wanted if (place := said.find(text)) >= 0]
        place = min(found)[1] if found else len(said) - _begun(said, wanted, longest)
        whole = bisect_right(ends, place)
        rest = said[ends[whole - 1] if whole else 0 : place] if found else b""
        return Stopped(start + whole, bool(found), rest)

    return stop


def _begun(said: bytes, wanted: Sequence[bytes], longest: int) -> int:
    """How many bytes at the end may be the beginning of a stop string."""
    for size in range(min(longest - 1, len(said)), 0, -1):
        if any(len(text) > size and text.startswith(said[-size:]) for text in wanted):
            return size
    return 0
