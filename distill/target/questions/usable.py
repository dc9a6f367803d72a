"""Which of the texts that the target wrote behind its user header are questions to ask, and how varied those are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from distill.documents.chat_template import ChatTemplate, Message
from distill.models.hugging_face import encode
from distill.texts import Answer, is_looping

FEWEST_TOKENS = 3  # of a question
SIMILAR = 0.7  # the Jaccard similarity of word 3-grams from which two questions are near-duplicates
SHORT, WORDLESS = f"shorter than {FEWEST_TOKENS} tokens", "without words"
SPECIAL = "with special tokens or control characters"
LOOPING = "that end in a loop"
EQUAL, ALIKE = "equal to another", f"like another (Jaccard similarity of word 3-grams of {SIMILAR} or more)"
NOT_ENDED = "not ended within the limit"
# Scripts without spaces between words count character by character.
_WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\ufffd\ufffe\uffff\ud800-\udfff]")


def fault(template: ChatTemplate, before: Sequence[Message], answer: Answer, text: str, thinking: bool | None) -> str:
    """The reason why a text is not usable as a question behind the messages `before`; empty where it is.

    `text` is the decoded `answer`, without its end and the white space around it.
    """
    if answer.dropped:
        return answer.dropped
    if not answer.ended:
        return NOT_ENDED
    if not words(text):
        return WORDLESS
    ids = encode(template.tokenizer, text)
    if _CONTROL.search(text) or template.special & {*ids, *answer.answer[:-1]}:
        return SPECIAL
    if len(ids) < FEWEST_TOKENS:
        return SHORT
    if is_looping(ids):
        return LOOPING
    try:
        template.text([*before, {"role": "user", "content": text}], thinking)
    except ValueError as error:
        return str(error)
    return ""


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return _WORD.findall(text.casefold())


def grams(text: str, length: int) -> Iterator[tuple[str, ...]]:
    """The n-grams of a text's words; of a text with fewer words, all of them as one."""
    found = words(text)
    for start in range(max(1, len(found) - length + 1)):
        yield tuple(found[start : start + length])


def repeats(texts: Sequence[str]) -> list[str]:
    """For each text EQUAL or ALIKE where one before it is, else nothing; such a text is not compared with later ones.

    Exact, and quick for many texts: two sets with a similarity of at least s share one of the rarest
    ⌊(1 − s) n⌋ + 1 of their n elements, so only texts that share one of those are compared (prefix filtering, Chaudhuri
    et al. 2006).
    """
    numbers: dict[tuple[str, ...], int] = {}
    sets = [frozenset(numbers.setdefault(gram, len(numbers)) for gram in grams(text, 3)) for text in texts]
    frequency = Counter(number for own in sets for number in own)
    seen: set[str] = set()
    index: dict[int, list[int]] = {}
    found = []
    for place, (text, own) in enumerate(zip(texts, sets, strict=True)):
        plain = " ".join(text.casefold().split())
        rarest = sorted(own, key=lambda number: (frequency[number], number))
        rarest = rarest[: len(own) - math.ceil(SIMILAR * len(own) - 1e-9) + 1]
        others = {other for number in rarest for other in index.get(number, ())}
        if plain in seen:
            found.append(EQUAL)
        elif any(_alike(own, sets[other]) for other in others):
            found.append(ALIKE)
        else:
            found.append("")
            seen.add(plain)
            for number in rarest:
                index.setdefault(number, []).append(place)
    return found


def _alike(own: frozenset[int], other: frozenset[int]) -> bool:
    if min(len(own), len(other)) < SIMILAR * max(len(own), len(other)) - 1e-9:
        return False
    common = len(own & other)
    return common >= SIMILAR * (len(own) + len(other) - common) - 1e-9


def distinct(texts: Sequence[str], length: int) -> float:
    """The share of different n-grams among all n-grams of words; 0 without any."""
    found = Counter(gram for text in texts for gram in grams(text, length))
    return len(found) / found.total() if found else 0.0


def lengths(counts: Sequence[int]) -> tuple[float, float]:
    """The median and the 90th percentile (the smallest count that nine tenths do not exceed); 0 without any."""
    if not counts:
        return 0.0, 0.0
    return float(median(counts)), float(sorted(counts)[math.ceil(0.9 * len(counts)) - 1])
