"""Token ids of one vocabulary as ids of another: the tokens that both share, and text written anew.

Bytes decide, never decoded text. A text longer than the window is cut only where its rest is written the same with and
without the text before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

from distill.vocabulary import Vocabulary
from distill.vocabulary.encoding import Encoder
from distill.vocabulary.roles import role_counterparts, stand_ins

WINDOW = 512  # target tokens at the context's end that are written anew every round, at most
TRIES = 4  # places of each sort at which a text that outgrew the window may be cut


def named_tokens(source: Vocabulary, destination: Vocabulary) -> dict[int, int]:
    """Special and added tokens of the source, each with its counterpart: of the same role, else of the same name."""
    by_name = (
        (number, destination.index[token]) for token, number in source.index.items() if token in destination.index
    )
    by_role = role_counterparts(source.roles, destination.roles)
    return {
        number: twin for number, twin in [*by_name, *by_role] if source.is_named(number) and destination.is_named(twin)
    }


def shared_tokens(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Target ids to the draft ids that mean the same, one to one, by ascending target id.

    `named_tokens` decides for special and added tokens. Others need the same bytes and kind; of several the same string
    comes first, then the lowest ids. A <0xNN> token without a counterpart takes an ordinary token of that byte.
    """
    shared: dict[int, int] = {}
    taken: set[int] = set()
    for number, twin in named_tokens(target, draft).items():
        if twin not in taken:
            shared[number] = twin
            taken.add(twin)
    keys: tuple[Callable[[Vocabulary, int], Hashable], ...] = (
        lambda vocabulary, i: (vocabulary.bytes_of[i], vocabulary.kinds[i], vocabulary.tokens[i]),
        lambda vocabulary, i: (vocabulary.bytes_of[i], vocabulary.kinds[i]),
        lambda vocabulary, i: (vocabulary.bytes_of[i], vocabulary.kinds[i] == "added"),
    )
    for key in keys:
        free: dict[Hashable, list[int]] = {}
        for number in range(draft.size - 1, -1, -1):
            if number not in taken and draft.is_text(number):
                free.setdefault(key(draft, number), []).append(number)
        for number in range(target.size):
            if number not in shared and target.is_text(number) and (twins := free.get(key(target, number))):
                shared[number] = twins.pop()
                taken.add(shared[number])
    return dict(sorted(shared.items()))


def transplant_gain(
    counts: Mapping[int, int], target: Vocabulary, draft: Vocabulary, worst: int = 10
) -> dict[str, Any]:
    """The gain of a transplant, from the `counts` of the ids that the target wrote.

    `mass` is the share of written tokens that intersection can draft, an upper bound of its acceptance rate; `gain` the
    rest, which only a transplanted draft can propose; `missing` the `worst` most frequent of these with their shares.
    """
    shared, total = shared_tokens(target, draft), sum(counts.values())
    left = sorted(((count, -i) for i, count in counts.items() if i not in shared and count), reverse=True)
    gain = sum(count for count, _ in left) / total if total else 0.0
    missing = [(target.shown(-i), count / total) for count, i in left[:worst]]
    return {"shared": len(shared), "mass": 1 - gain if total else 0.0, "gain": gain, "missing": missing}


def incomplete(data: bytes) -> bytes:
    """The bytes at the end that begin a character and do not finish it."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    decoder.decode(data)
    return decoder.getstate()[0]


def refit(data: bytes, source: Encoder, destination: Encoder, first: bool) -> bytes:
    """A text after a named token, or the `first` text: without the space that the source's tokenizer puts before it,
    with the one that the destination's tokenizer puts there."""
    if source.leads(first):
        data = data.removeprefix(b" ")
    return b" " + data if destination.leads(first) and data else data


class Translator:
    """The text of the target's ids in the draft's tokens, named tokens by their counterparts.

    A text that grew is written anew, because its last words may now be split differently. To bound this work, the part
    more than half a window back is fixed once the text outgrows the window. The cut lies between two of the target's
    tokens: where a line starts, else a word, else anywhere. It is taken where the rest alone gets the same ids as in
    the whole text; later text does not reach so far back. Where no tried cut does, the draft reads one word in an
    unusual split.
    """

    def __init__(self, source: Vocabulary, destination: Vocabulary, window: int = WINDOW) -> None:
        self.same = source.same_as(destination)
        self.source, self.destination, self.window = Encoder(source), Encoder(destination), window
        self.named = stand_ins(source.roles, destination.roles) | named_tokens(source, destination)
        self._done: list[int] = []  # target ids whose translation is fixed
        self._written: list[int] = []  # their translation
        self._last: tuple[list[int], list[int] | None] = ([], None)

    def ids(self, context: Sequence[int]) -> list[int] | None:
        """The draft's ids; None where the context ends inside a character that the draft has no byte tokens for."""
        if self.same:  # padding ids of the target stand for no text
            return [token for token in context if token < self.destination.vocabulary.size]
        if self._last[0] != context:
            self._last = list(context), self._translated(list(context))
        return None if self._last[1] is None else list(self._last[1])

    def _translated(self, context: list[int]) -> list[int] | None:
        if context[: len(self._done)] != self._done:
            self._done, self._written = [], []
        if len(context) - len(self._done) > self.window:
            self._keep(context)
        known = self.destination.vocabulary.byte_ids
        if any(byte not in known for byte in incomplete(self.source.vocabulary.text_bytes(context[-3:]))):
            return None
        ids, opening = self._written + self._write(context, len(self._done)), self.destination.opening
        return ids if ids[: len(opening)] == opening else opening + ids

    def _keep(self, context: list[int]) -> None:
        """Fix the translation of all but about half a window."""
        done, last = len(self._done), len(context) - self.window // 2
        texts = [self.source.vocabulary.text_bytes([number]) for number in context]
        places = range(last, done, -1)
        lines = (i for i in places if texts[i - 1].endswith(b"\n") and not texts[i][:1].isspace())
        words = (i for i in places if texts[i].startswith(b" ") and not texts[i - 1][-1:].isspace())
        whole = self._write(context, done)
        for place in [*islice(lines, TRIES), *islice(words, TRIES), *islice(places, TRIES)]:
            rest = self._write(context, place)
            if whole[len(whole) - len(rest) :] == rest:
                kept = whole[: len(whole) - len(rest)]
                break
        else:
            place, kept = last, self._write(context[:last], done)
        self._done, self._written = context[:place], self._written + kept

    def _write(self, context: Sequence[int], start: int) -> list[int]:
        """The draft's ids for the ids of a context from `start` on."""
        ids: list[int] = []
        before = context[start - 1] if start else None
        for is_named, group in groupby(context[start:], key=self.named.__contains__):
            numbers = list(group)
            if is_named:
                ids += [self.named[number] for number in numbers]
            else:
                data = self.source.vocabulary.text_bytes(numbers)
                if before is None or before in self.named:
                    data = refit(data, self.source, self.destination, self.is_first(before))
                ids += self.destination.text(data)
            before = numbers[-1]
        return ids

    def is_first(self, before: int | None) -> bool:
        """Whether a text after this token is the first one: only a bos may stand before it."""
        return before is None or before == self.source.vocabulary.roles.get("bos")
