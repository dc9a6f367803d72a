"""Token ids of one vocabulary as ids of another: the tokens both share, and text written anew.

Bytes decide, never decoded text. Texts that outgrow the window are cut only where what follows is written the same
whether or not what stands before is seen.
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
    """Target ids to the draft ids that say the same, one to one, by ascending target id.

    Named tokens go by `named_tokens`. Others need the same bytes and kind; of several the same string comes first, then
    the lowest ids. What is left of <0xNN> tokens meets ordinary tokens of that one byte.
    """
    found: dict[int, int] = {}
    taken: set[int] = set()
    for number, twin in named_tokens(target, draft).items():
        if twin not in taken:
            found[number] = twin
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
            if number not in found and target.is_text(number) and (twins := free.get(key(target, number))):
                found[number] = twins.pop()
                taken.add(found[number])
    return dict(sorted(found.items()))


def transplant_gain(
    counts: Mapping[int, int], target: Vocabulary, draft: Vocabulary, worst: int = 10
) -> dict[str, Any]:
    """What a transplant would open, from how often the target wrote each of its ids.

    `mass` is the share of written tokens that intersection can draft, a bound of its acceptance rate; `gain` the rest,
    which it never can and a transplanted draft may; `missing` are the most frequent of those with their shares.
    """
    shared, total = shared_tokens(target, draft), sum(counts.values())
    left = sorted(((count, -i) for i, count in counts.items() if i not in shared and count), reverse=True)
    gain = sum(count for count, _ in left) / total if total else 0.0
    missing = [(target.tokens[-i], count / total) for count, i in left[:worst]]
    return {"shared": len(shared), "mass": 1 - gain if total else 0.0, "gain": gain, "missing": missing}


def incomplete(data: bytes) -> bytes:
    """The bytes at the end that begin a character and do not finish it."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    decoder.decode(data)
    return decoder.getstate()[0]


def refit(data: bytes, source: Encoder, destination: Encoder, first: bool) -> bytes:
    """A text that starts after a named token, or `first` of all: with the space that the destination's tokenizer puts
    there, without the one that the source's does."""
    if source.leads(first):
        data = data.removeprefix(b" ")
    return b" " + data if destination.leads(first) and data else data


class Translator:
    """What the draft reads: the text of the target's ids in the draft's tokens, named tokens by their counterparts.

    A text is written anew whenever it grew, because its last words may be split otherwise then. To bound that, what
    lies half a window back is kept once the text outgrows the window. It is cut between two of the target's tokens
    where a line starts, else a word, else anywhere, if writing the rest alone gives what writing it all gave: later
    text does not reach so far back. Where no try does, the draft reads one word a little unusually.
    """

    def __init__(self, source: Vocabulary, destination: Vocabulary, window: int = WINDOW) -> None:
        self.same = source.same_as(destination)
        self.source, self.destination, self.window = Encoder(source), Encoder(destination), window
        self.named = stand_ins(source.roles, destination.roles) | named_tokens(source, destination)
        self._done: list[int] = []  # target ids that are written once and for all
        self._written: list[int] = []  # what they became
        self._last: tuple[list[int], list[int] | None] = ([], None)

    def ids(self, context: Sequence[int]) -> list[int] | None:
        """The draft's ids; None where the context ends inside a character that the draft has no byte tokens for."""
        if self.same:
            return list(context)
        if self._last[0] != context:
            self._last = list(context), self._translated(list(context))
        return None if self._last[1] is None else list(self._last[1])

    def _translated(self, context: list[int]) -> list[int] | None:
        if context[: len(self._done)] != self._done:
            self._done, self._written = [], []
        if len(context) - len(self._done) > self.window:
            self._keep(context)
        known = self.destination.vocabulary.byte_ids
        if any(byte not in known for byte in incomplete(self.source.decode(context[-3:]))):
            return None
        found, opening = self._written + self._write(context, len(self._done)), self.destination.opening
        return found if found[: len(opening)] == opening else opening + found

    def _keep(self, context: list[int]) -> None:
        """Write all but about half a window once and for all."""
        done, last = len(self._done), len(context) - self.window // 2
        said = [self.source.decode([number]) for number in context]
        places = range(last, done, -1)
        lines = (i for i in places if said[i - 1].endswith(b"\n") and not said[i][:1].isspace())
        words = (i for i in places if said[i].startswith(b" ") and not said[i - 1][-1:].isspace())
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
        """The draft's ids for those of a context from `start` on."""
        found: list[int] = []
        before = context[start - 1] if start else None
        for is_named, group in groupby(context[start:], key=self.named.__contains__):
            numbers = list(group)
            if is_named:
                found += [self.named[number] for number in numbers]
            else:
                data = self.source.decode(numbers)
                if before is None or before in self.named:
                    data = refit(data, self.source, self.destination, self.is_first(before))
                found += self.destination.text(data)
            before = numbers[-1]
        return found

    def is_first(self, before: int | None) -> bool:
        """Whether a text after this token is the first one: nothing but a bos stands before it."""
        return before is None or before == self.source.vocabulary.roles.get("bos")
