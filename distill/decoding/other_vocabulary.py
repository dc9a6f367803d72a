"""Lossless drafting with a model of another vocabulary, without a transplant: string-level exact match of Timor et al.
2025 (arXiv 2502.05202).

The draft reads the context's text in its own tokens, written anew every round, and its text is proposed in the target's
tokens. The tokens it reads affect speed, never the output's distribution.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from itertools import chain, groupby

from distill.decoding.drafters import distribution_sampler
from distill.decoding.proposals import Proposal
from distill.decoding.verify import Random, draw_token
from distill.devices import pick_device
from distill.engines.loaded import LoadedPair, torch_decoder
from distill.engines.model import Model
from distill.engines.torch.hugging_face import load_model, text_folder
from distill.errors import PairError
from distill.recipe import Sampler, Target
from distill.sampler import Logits, distributions_of
from distill.vocabulary.encoding import Encoder
from distill.vocabulary.vocabulary import Vocabulary, role_counterparts, stand_ins

# ── Token ids of one vocabulary as ids of another ──
# Bytes decide, never decoded text.

WINDOW = 512  # target tokens at the context's end that are written anew every round, at most


def named_tokens(source: Vocabulary, destination: Vocabulary) -> dict[int, int]:
    """Special and added tokens of the source, each with its counterpart: of the same role, else of the same name."""
    by_name = (
        (number, destination.index[token]) for token, number in source.index.items() if token in destination.index
    )
    by_role = role_counterparts(source.roles, destination.roles)
    return {
        number: twin for number, twin in [*by_name, *by_role] if source.is_named(number) and destination.is_named(twin)
    }


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
    more than half a window back is fixed once the text outgrows the window: up to where a line starts, else a word,
    before which nearly every tokenizer splits; in others the draft reads one word in an unusual split.
    """

    def __init__(self, source: Vocabulary, destination: Vocabulary, window: int = WINDOW) -> None:
        self.same = source.same_as(destination)
        self.source, self.destination, self.window = Encoder(source), Encoder(destination), window
        self.named = stand_ins(source.roles, destination.roles) | named_tokens(source, destination)
        self._done: list[int] = []  # target ids whose translation is fixed
        self._written: list[int] = []  # their translation
        self._last: tuple[list[int], list[int] | None] = ([], None)

    def ids(self, context: Sequence[int]) -> list[int] | None:
        """The draft's ids; None if the context ends inside a character that the draft has no byte tokens for."""
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
        """Fix the translation of all but half a window or more."""
        done, last = len(self._done), len(context) - self.window // 2
        texts = [self.source.vocabulary.text_bytes([number]) for number in context]
        places = range(last, done, -1)
        lines = (i for i in places if texts[i - 1].endswith(b"\n") and not texts[i][:1].isspace())
        words = (i for i in places if texts[i].startswith(b" ") and not texts[i - 1][-1:].isspace())
        place = next(chain(lines, words), last)
        whole, rest = self._write(context, done), self._write(context, place)
        count = len(whole) - len(rest)
        kept = whole[:count] if whole[count:] == rest else self._write(context[:place], done)
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


# ── The drafters ──

TAIL = 64  # target tokens before a drafted text that are encoded with it


class DraftReader:
    """A draft that reads target ids: its cache holds the translation of a context, and the tokens drafted after it.

    `rows` is how many ids the target's logits cover, which may be fewer or more than its tokenizer has (None: as many).
    Raises PairError for a draft whose tokenizer has more tokens than the model has rows.
    """

    def __init__(self, model: Model, target: Vocabulary, draft: Vocabulary, rows: int | None = None) -> None:
        if draft.size > model.vocabulary_size:
            raise PairError(
                f"the tokenizer in {draft.folder} has {draft.size} tokens, the draft {model.vocabulary_size} rows"
            )
        self.model, self.translator = model, Translator(target, draft)
        self.rows = target.size if rows is None else rows
        self._ids: list[int] = []  # in the cache

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget everything and read a prompt, if it fits."""
        self.model.rollback([0])
        self._ids = []
        if self.room(prompt) >= 0 and (draft_ids := self.translator.ids(prompt)):
            self.read(draft_ids)

    def room(self, context: Sequence[int]) -> int:
        """Number of draft tokens that fit after a context; below 0 if it does not fit or cannot be written."""
        draft_ids = self.translator.ids(context)
        return self.model.capacity - len(draft_ids) if draft_ids else -1

    def read(self, draft_ids: Sequence[int]) -> Logits:
        """The logits after these own ids: the cache goes back to their common beginning and reads the rest."""
        keep = 0
        while keep < min(len(self._ids), len(draft_ids) - 1) and self._ids[keep] == draft_ids[keep]:
            keep += 1
        self.model.rollback([keep])
        del self._ids[keep:]
        return self.append(draft_ids[keep:])

    def append(self, draft_ids: Sequence[int]) -> Logits:
        """The logits after these ids, read after those in the cache."""
        logits = self.model.extend(draft_ids, want=[len(draft_ids) - 1])
        self._ids += draft_ids
        return logits


class StringMatchDrafter:
    """String-level exact match: the draft continues the text; the target's tokens of this text are proposed.

    With `sampler` temperature 0, or with `argmax`, the draft's best tokens are taken, else they are drawn. In either
    case a proposal has no distributions: given the drafted text it is fixed, so verifiers take q as 1 at each token.
    The drafted text is independent of the verifier's randomness. So the output follows the target's distribution given
    any drafted text, hence on average too; dropping drafted tokens, however chosen, changes nothing about that. Its
    tokens therefore count as `deterministic` for every verifier. The verifiers token and block then accept no more than
    match does: with p of the proposed token. The draft takes at most `length` tokens of its own in a round.
    """

    tree = False

    def __init__(
        self, reader: DraftReader, length: int, sampler: Sampler, random: Random, argmax: bool = False
    ) -> None:
        self.reader, self.length, self.sampler, self.random = reader, length, sampler, random
        self.argmax = argmax or sampler.temperature == 0
        self._counterparts = named_tokens(reader.translator.destination.vocabulary, reader.translator.source.vocabulary)

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt's text, if it fits."""
        self.reader.begin(prompt)

    def room(self, length: int) -> int:
        """An upper bound, the draft's context; `propose` counts the text in the draft's tokens."""
        return self.reader.model.capacity

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """At most `limit` target tokens of the text that the draft continues with; an end token is the last."""
        drafted = self._drafted(context, limit)
        translator = self.reader.translator
        text = [token for token in drafted if self._is_text(token)]
        data = translator.destination.vocabulary.text_bytes(text)
        if context[-1] in translator.named:
            data = refit(data, translator.destination, translator.source, translator.is_first(context[-1]))
        tokens = self._continued(context, data)
        if len(text) < len(drafted) and translator.source.vocabulary.text_bytes(tokens) == data:
            tokens += [end for end in [self._counterparts[drafted[-1]]] if end < self.reader.rows]
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), limit)
        return Proposal.chain(tokens[: min(stop, limit)])

    def _drafted(self, context: Sequence[int], limit: int) -> list[int]:
        """Own tokens, up to a named one."""
        tokens: list[int] = []
        history = self.reader.translator.ids(context) or []
        sampler = distribution_sampler(self.sampler)
        for _ in range(min(self.length, self.reader.room(context), limit)):
            logits = self.reader.append(tokens[-1:]) if tokens else self.reader.read(history)
            distribution = distributions_of(sampler, logits, [[*history, *tokens]], empty=True)[0]
            if not distribution.any():
                break
            token = int(distribution.argmax()) if self.argmax else draw_token(distribution, self.random)
            if not self._is_text(token) and token not in self._counterparts:
                break
            tokens.append(token)
            if not self._is_text(token):
                break
        return tokens

    def _is_text(self, token: int) -> bool:
        draft = self.reader.translator.destination.vocabulary
        return token < draft.size and draft.is_text(token) and token not in self._counterparts

    def _continued(self, context: Sequence[int], data: bytes) -> list[int]:
        """Target ids of `data` after the context: context and data are written together and split at the context's end.

        Where a token would reach over that end, its rest is written alone. The ids stop where their bytes would differ
        from `data`, and before a character that `data` does not finish.
        """
        encoder, named = self.reader.translator.source, self.reader.translator.named
        first = next((i + 1 for i in range(len(context) - 1, -1, -1) if context[i] in named), 0)
        before = encoder.vocabulary.text_bytes(context[max(first, len(context) - TAIL) :])
        whole = before + data
        whole = whole[: len(whole) - len(incomplete(whole))]
        ids = encoder.text(whole) if len(whole) > len(before) else []
        place = reached = 0
        while place < len(ids) and reached < len(before):
            reached += len(encoder.vocabulary.text_bytes(ids[place : place + 1]))
            place += 1
        rest = (encoder.text(whole[len(before) : reached]) if reached > len(before) else []) + ids[place:]
        left, count = whole[len(before) :], 0
        for number in rest:
            written = encoder.vocabulary.text_bytes([number])
            special = number >= self.reader.rows or encoder.vocabulary.kinds[number] == "special"
            if not written or not left.startswith(written) or special:
                break
            left, count = left[len(written) :], count + 1
        return rest[:count]

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Nothing: the cache goes back when the next text is read."""


def read_with(pair: LoadedPair, target: Target, draft: str, device: str) -> DraftReader:
    """Load a draft, in the target's type, to read the ids of the pair's target; on a device of its own if the pair's
    settings of PyTorch, by which it decodes, name one."""
    place, vocabulary = pick_device(pair.pytorch.draft_device or device), Vocabulary.read(text_folder(draft))
    model = torch_decoder(load_model(draft, target.dtype, place), vocabulary.size, pair.pytorch, is_draft=True)
    return DraftReader(model, pair.vocabulary, vocabulary, pair.target.vocabulary_size)
