"""Token ids of one vocabulary as ids of another: the tokens both share, and text written anew.

Bytes decide, never decoded text. Texts that outgrow the window are cut only where what follows is written the same
whether or not what stands before is seen.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

from distill.errors import DataError
from distill.vocabulary import ROLE_ORDER, SPACE, Vocabulary, to_mapped

WINDOW = 512  # target tokens at the context's end that are written anew every round, at most
TRIES = 4  # places of each sort at which a text that outgrew the window may be cut
REPLACEMENT = "\ufffd"  # stands for a byte that a vocabulary cannot say


def named_tokens(source: Vocabulary, destination: Vocabulary) -> dict[int, int]:
    """Special and added tokens of the source, each with its counterpart: of the same role, else of the same name."""

    def named(vocabulary: Vocabulary, number: int) -> bool:
        return vocabulary.kinds[number] in ("special", "added")

    found = {
        number: destination.index[token]
        for token, number in source.index.items()
        if named(source, number) and token in destination.index and named(destination, destination.index[token])
    }
    for role in reversed(ROLE_ORDER):  # the first of several roles is written last
        if role in source.roles and role in destination.roles:
            number, twin = source.roles[role], destination.roles[role]
            if named(source, number) and named(destination, twin):
                found[number] = twin
    return found


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
            if number not in taken and says_text(draft, number):
                free.setdefault(key(draft, number), []).append(number)
        for number in range(target.size):
            if number not in found and says_text(target, number) and (twins := free.get(key(target, number))):
                found[number] = twins.pop()
                taken.add(found[number])
    return dict(sorted(found.items()))


def says_text(vocabulary: Vocabulary, number: int) -> bool:
    """Whether a token stands for bytes of a text."""
    return bool(vocabulary.bytes_of[number]) and vocabulary.kinds[number] in ("normal", "byte", "added")


def shared_share(target: Vocabulary, draft: Vocabulary) -> float:
    """The share of the target's tokens that the draft has too."""
    return len(shared_tokens(target, draft)) / max(sum(token is not None for token in target.tokens), 1)


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


class Writer:
    """Writes bytes in a vocabulary's tokens as its tokenizer splits them: no space put in front, no special tokens.

    `opening` are the special ids that the tokenizer puts before a text. Raises DataError where tokenizer.json cannot be
    loaded.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import Tokenizer

        path = vocabulary.folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises the bare class for every kind of damage
            raise DataError(f"{path} cannot be loaded: {error}", "copy it again") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._model: Any = self._tokenizer.model
        if getattr(self._model, "dropout", None):
            self._model.dropout = None  # the same tokens every time
        self.vocabulary = vocabulary
        bare, whole = self._encode("a"), self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        self.opening: list[int] = whole[: next(starts, 0)] if bare else []
        specials = (i for i, kind in enumerate(vocabulary.kinds) if kind == "special")
        after = next((ids for i in specials if (ids := self._encode(f"{vocabulary.tokens[i]}a"))[:1] == [i]), [])
        self._leads = {True: self.said(bare).startswith(b" "), False: self.said(after[1:]).startswith(b" ")}
        self._tokenizer.encode_special_tokens = True  # from here on text is text
        # What the encoding of text cannot say: bytes that are no text, and the one character that ▁ hides.
        apart = "\udc80-\udcff" + (SPACE if vocabulary.family == "sentencepiece" else "")
        self._apart = re.compile(f"([{apart}])")
        self._replacement = self._text(REPLACEMENT)

    def leads(self, first: bool) -> bool:
        """Whether the tokenizer puts a space before a text: the first one, or one after a special token."""
        return self._leads[first]

    def said(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`; ids that stand for nothing say nothing."""
        known = self.vocabulary.bytes_of
        return b"".join(known[number] or b"" for number in ids if number < len(known))

    def write(self, data: bytes) -> list[int]:
        """Ids that say `data`; where the vocabulary cannot, those for U+FFFD or the unknown token, or none."""
        found: list[int] = []
        for part in self._apart.split(data.decode(errors="surrogateescape")):
            if self._apart.fullmatch(part):
                found += self._singly(part.encode(errors="surrogateescape"))
            elif part:
                found += self._text(part)
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _text(self, text: str) -> list[int]:
        """The tokenizer's own ids, unless it normalises the text; then its model's."""
        data = text.encode()
        if not self.leads(True) or text.startswith(" "):
            ids = self._encode(text.removeprefix(" ") if self.leads(True) else text)
            if self.said(ids) == data:
                return ids
        if self.vocabulary.family == "sentencepiece":
            words = [text.replace(" ", SPACE)]
        elif self._tokenizer.pre_tokenizer is None:
            words = [to_mapped(data)]
        else:
            words = [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
            if "".join(words) == to_mapped(b" " + data):
                words[0] = words[0][1:]  # the space that it put there
        ids = [token.id for word in words if word for token in self._model.tokenize(word)]
        if self.said(ids) == data or not all(byte in self.vocabulary.byte_ids for byte in data):
            return ids
        return self._singly(data)

    def _singly(self, data: bytes) -> list[int]:
        singles = self.vocabulary.byte_ids
        return [number for byte in data for number in ([singles[byte]] if byte in singles else self._replacement)]


def incomplete(data: bytes) -> bytes:
    """The bytes at the end that begin a character and do not finish it."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    decoder.decode(data)
    return decoder.getstate()[0]


def refit(data: bytes, source: Writer, destination: Writer, first: bool) -> bytes:
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
        self.source, self.destination, self.window = Writer(source), Writer(destination), window
        self.named = named_tokens(source, destination)
        # What ends a text also stands before the next one, and pads, in models that have no token of their own for it.
        for role in ("bos", "pad"):
            if role in source.roles and role not in destination.roles and "eos" in destination.roles:
                self.named.setdefault(source.roles[role], destination.roles["eos"])
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
        if any(byte not in known for byte in incomplete(self.source.said(context[-3:]))):
            return None
        found, opening = self._written + self._write(context, len(self._done)), self.destination.opening
        return found if found[: len(opening)] == opening else opening + found

    def _keep(self, context: list[int]) -> None:
        """Write all but about half a window once and for all."""
        done, last = len(self._done), len(context) - self.window // 2
        said = [self.source.said([number]) for number in context]
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
                data = self.source.said(numbers)
                if before is None or before in self.named:
                    data = refit(data, self.source, self.destination, self.is_first(before))
                found += self.destination.write(data)
            before = numbers[-1]
        return found

    def is_first(self, before: int | None) -> bool:
        """Whether a text after this token is the first one: nothing but a bos stands before it."""
        return before is None or before == self.source.vocabulary.roles.get("bos")
