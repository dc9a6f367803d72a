"""How a text is decoded, whatever drafts it: the sampler, the verifier, what ends it, and where chance comes from.

Stop strings end a text by its bytes, not by decoded tokens: a tokenizer that decodes single tokens drops the space
before a word (SentencePiece) and breaks characters that several tokens share. Legend: L bytes of the longest stop
string.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from distill.decoding.drafters import Drafter
from distill.decoding.grammar import Constraint
from distill.decoding.verify import Random, refusal
from distill.errors import DataError
from distill.sampler import Sampler
from distill.vocabulary.vocabulary import Vocabulary

BytesOf = Callable[[int], bytes]


def token_bytes(vocabulary: Vocabulary, silent: Collection[int] = ()) -> BytesOf:
    """The bytes of each token; none for the `silent` ones and for ids without a token."""
    return lambda token: b"" if token in silent else vocabulary.text_bytes([token])


def characters() -> codecs.IncrementalDecoder:
    """Bytes to text as they come: the bytes of an unfinished character wait. What is no UTF-8, or stays unfinished at
    the end, becomes U+FFFD."""
    return codecs.getincrementaldecoder("utf-8")("replace")


@dataclass(frozen=True)
class Stopped:
    """A stop function's verdict on a text: its first `kept` tokens are certain to be part of it.

    Where the text `ended`, they are the whole of it, followed by `rest`: the bytes of the next token before the place
    where the text ends. Else the tokens after them may be the beginning of a stop string, and wait.
    """

    kept: int
    ended: bool = False
    rest: bytes = b""


# From all new tokens, and how many of them an earlier call has read without an end. `kept` never falls between calls.
Stop = Callable[[Sequence[int], int], Stopped]


def stop_before(bytes_of: BytesOf, texts: Sequence[str]) -> Stop | None:
    """A function that ends a text before the stop string that is complete first; of several, before the longest.

    None without `texts`. A call reads the new tokens and L − 1 bytes before them. Raises DataError for an empty stop
    string.
    """
    if not texts:
        return None
    if not all(texts):
        raise DataError("an empty stop string would end every text before it begins", "give some text to stop before")
    stops = [text.encode() for text in texts]
    longest = max(map(len, stops))

    def stop(tokens: Sequence[int], seen: int) -> Stopped:
        start, before = seen, 0
        while start and before < longest - 1:
            start -= 1
            before += len(bytes_of(tokens[start]))
        parts = [bytes_of(token) for token in tokens[start:]]
        read, ends = b"".join(parts), list(accumulate(map(len, parts)))
        matches = [(place + len(text), place) for text in stops if (place := read.find(text)) >= 0]
        place = min(matches)[1] if matches else len(read) - _begun(read, stops, longest)
        whole = bisect_right(ends, place)
        rest = read[ends[whole - 1] if whole else 0 : place] if matches else b""
        return Stopped(start + whole, bool(matches), rest)

    return stop


def _begun(read: bytes, stops: Sequence[bytes], longest: int) -> int:
    """How many bytes at the end may be the beginning of a stop string."""
    for size in range(min(longest - 1, len(read)), 0, -1):
        if any(len(text) > size and text.startswith(read[-size:]) for text in stops):
            return size
    return 0


GREEDY = Sampler(temperature=0)


@dataclass(frozen=True)
class Rules:
    """How a text is decoded: the served sampler, the verifier, what ends it, and where chance comes from.

    `stop` is called after every round, for stop strings and the like (`stop_before`). A round may add several
    tokens, so it must find the first place to stop instead of reading the end alone. A `constraint` masks the target's
    logits before the sampler; a draft under the same constraint (see constrained.py) is accepted more often.
    Raises DataError where the constraint ends texts with other tokens.
    """

    sampler: Sampler = GREEDY
    verifier: str = "greedy"
    ends: Collection[int] = ()
    random: Random = lambda: 0.0
    stop: Stop | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.constraint is not None and set(self.constraint.ends) != set(self.ends):
            raise DataError(
                f"the grammar ends texts with tokens {sorted(self.constraint.ends)}, the decoder with "
                f"{sorted(self.ends)}",
            )

    @property
    def by_argmax(self) -> bool:
        """Whether the target's largest logit alone decides, so that no distribution is computed."""
        return self.sampler.temperature == 0 and self.sampler.repetition_penalty == 1 and self.verifier == "greedy"


def require_lossless(drafter: Drafter, rules: Rules) -> None:
    """Raise DataError, with the reason, for a drafter and verifier that would change the target's distribution."""
    reason = refusal(rules.verifier, drafter.kind, rules.sampler.temperature, tree=drafter.tree)
    if reason is not None:
        raise DataError(
            f"verifier {rules.verifier} would change the target's distribution: {reason}", "or allow it as lossy"
        )
