"""Drafts of another vocabulary: what they read and may draft, and that the target's distribution comes out all the
same."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from table_model import TableModel
from test_exact_decoding import EXACT, decoded
from test_vocabulary import loaded, save, sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toys import random_prompts, toy
from transformers import AutoModelForCausalLM

from distill.decoding.configured import make_drafter
from distill.decoding.decode import decode_text, plain
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter
from distill.decoding.other_vocabulary import DraftReader, StringMatchDrafter, Translator, incomplete
from distill.decoding.rules import Rules
from distill.decoding.verify import Random
from distill.engines.torch.model import TorchModel
from distill.errors import DataError, PairError
from distill.recipe import Configuration, Sampler
from distill.surgery.vocabulary import transplant
from distill.vocabulary.encoding import Encoder
from distill.vocabulary.vocabulary import BYTE_MAP, Vocabulary

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
PROSE = "def naïve(x):\n    return x + 1  # 日本語 🙂\n\n\nclass Über:\n\tdone = 'a  b'\n"


def byte_level(
    folder: Path,
    words: Iterable[str],
    merges: list[tuple[str, str]],
    named: Sequence[str] = (),
    regex: bool = True,
    **roles: str,
) -> Vocabulary:
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(named))
    return Vocabulary.read(save(tokenizer, folder, **roles))


def letters(folder: Path, words: Sequence[str]) -> Vocabulary:
    """A vocabulary of these words, those of two letters merged from their letters; nothing else can be written."""
    return byte_level(folder, words, [(word[0], word[1]) for word in words if len(word) == 2], regex=False)


def merged(folder: Path) -> Vocabulary:
    """Byte-level with a few merges, some across characters of several bytes, and turn markers."""
    merges = [("a", "b"), ("Ġ", "a"), ("Ġ", "ab"), ("r", "e"), ("Ã", "¯"), ("æ", "Ĺ"), ("æĹ", "¥"), ("Ċ", "Ċ")]
    words = [*BYTE_MAP, *dict.fromkeys(first + second for first, second in merges)]
    return byte_level(folder, words, merges, ["<|im_start|>", "<end>"], eos_token="<end>")


def single_bytes(folder: Path, order: Sequence[int] = range(256), stop: str | None = "<end>") -> Vocabulary:
    """The 256 bytes alone: every text has one encoding. With two special tokens, or an odd one."""
    words = [BYTE_MAP[byte] for byte in order]
    if stop is None:
        return byte_level(folder, words, [], ["<lone>"])
    return byte_level(folder, words, [], ["<|im_start|>", stop], eos_token=stop)


def shuffled(folder: Path) -> Vocabulary:
    """The bytes in another order, with another end."""
    return single_bytes(folder, random.Random(5).sample(range(256), 256), "<stop>")


def spaces(folder: Path, normalise: bool = True) -> Vocabulary:
    """SentencePiece-like, with a bos that its tokenizer does not add."""
    words = ["▁", "a", "b", "r", "e", "日", "▁a", "▁ab", "re"]
    tokenizer = sentencepiece(words, [("▁", "a"), ("▁a", "b"), ("r", "e")], normalise)
    return Vocabulary.read(save(tokenizer, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>"))


MAKERS: dict[str, Any] = {
    "merged": merged,
    "shuffled": shuffled,
    "spaces": spaces,
    "metaspace": lambda folder: spaces(folder, False),
}
PAIRS = [("merged", "spaces"), ("spaces", "merged"), ("shuffled", "metaspace")]


def model_for(vocabulary: Vocabulary, seed: int, **changes: Any) -> TorchModel:
    return TorchModel(toy(vocabulary=vocabulary.size, seed=seed, **changes))


def drafter_for(
    model: Any,
    pair: tuple[Vocabulary, Vocabulary],
    length: int,
    sampler: Sampler,
    draws: Random = random.random,
    argmax: bool = False,
    rows: int | None = None,
) -> Any:
    return StringMatchDrafter(DraftReader(model, *pair, rows), length, sampler, draws, argmax)


# What is shared, and what the draft reads.


@pytest.mark.parametrize("name", MAKERS)
def test_writers_say_the_bytes(name: str, tmp_path: Path) -> None:
    encoder = Encoder(MAKERS[name](tmp_path))
    whole = PROSE.encode()
    for data in (whole, whole.strip(), b"", b" ", b"  ab", "▁a b▁".encode(), b"\xff\xfe a\x80", b"<end></s><s>"):
        for cut in range(0, len(data) + 1, 3):  # in the middle of characters too
            assert encoder.vocabulary.text_bytes(encoder.text(data[cut:])) == data[cut:]
            assert encoder.vocabulary.text_bytes(encoder.text(data[:cut])) == data[:cut]
    assert not {encoder.vocabulary.kinds[i] for i in encoder.text(b"<end></s><s><stop>")} & {"special"}
    assert incomplete("né".encode()[:-1]) == b"\xc3" and incomplete(b"\xff") == incomplete(b"a") == b""
    assert incomplete("🙂".encode()[:3]) == "🙂".encode()[:3]


def test_what_a_vocabulary_cannot_say_is_left_out(tmp_path: Path) -> None:
    ours, theirs = merged(tmp_path / "ours"), letters(tmp_path / "theirs", ["a", "b", "ab"])
    translator = Translator(ours, theirs)
    assert translator.ids(Encoder(ours).text("aébab".encode())) == [2, 2]
    assert translator.ids(Encoder(ours).text(b"ab\xc3")) is None  # inside a character, and no token for its bytes


@pytest.mark.parametrize("normalise", [True, False])
def test_the_space_in_front_comes_once(normalise: bool, tmp_path: Path) -> None:
    """Texts are read as the draft's own tokenizer would write them, however they go on."""
    ours, theirs, third = (
        merged(tmp_path / "ours"),
        spaces(tmp_path / "theirs", normalise),
        spaces(tmp_path / "third", not normalise),
    )
    tokenizer = Tokenizer.from_file(str(theirs.folder / "tokenizer.json"))
    wanted = tokenizer.encode("ab ab re", add_special_tokens=False).ids
    assert theirs.text_bytes(wanted) == b" ab ab re"
    translator = Translator(ours, theirs)
    context = Encoder(ours).text(b"ab ab re")
    assert translator.ids(context) == wanted
    assert translator.ids([*context, *Encoder(ours).text(b"a")])[: len(wanted)] == wanted
    assert Translator(third, theirs).ids(Encoder(third).text(b" ab ab re")) == wanted  # not two of them
    assert Translator(third, theirs).ids([1, *Encoder(third).text(b" ab")]) == [1, *wanted[:1]]
    assert Translator(third, ours).ids(Encoder(third).text(b" ab ab")) == Encoder(ours).text(b"ab ab")
    # After a named token: a normaliser puts one there, Metaspace only before the first text.
    end = ours.index["<end>"]
    after = translator.ids([end, *Encoder(ours).text(b"ab")])
    assert theirs.text_bytes(after) == b"</s>" + (b" ab" if normalise else b"ab")


REAL = [("gpt-2", "llama-2"), ("llama-2", "gpt-2"), ("demo-target", "demo-donor")]


@pytest.mark.parametrize(("ours", "theirs"), REAL)
def test_real_vocabularies_read_what_their_tokenizers_write(ours: str, theirs: str) -> None:
    """Growing token by token, with a window much shorter than the text, as the draft's tokenizer writes it whole."""
    if ours == "demo-target":
        folders = ROOT / "data" / ours, ROOT / "data" / theirs
        target, draft = (Vocabulary.read(folder) for folder in folders)
        its, own = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in folders)
    else:
        (target, its), (draft, own) = loaded(ours), loaded(theirs)
    source = PROSE * 2 + (ROOT / "data" / "test" / "chunk.py").read_text(encoding="utf-8")[:2500]
    context = its.encode(source, add_special_tokens=False).ids
    translator = Translator(target, draft, window=64)
    opening = translator.destination.opening
    assert opening == ([] if theirs != "llama-2" else [1])
    for end in range(1, len(context), 9):
        translator.ids(context[:end])
    assert translator.ids(context) == opening + own.encode(source, add_special_tokens=False).ids
    assert len(context) > 10 * 64 and len(translator._done) > len(context) - 64
    # Another, shorter context.
    again = its.encode(PROSE, add_special_tokens=False).ids
    assert translator.ids(again) == opening + own.encode(PROSE, add_special_tokens=False).ids


# What comes out.


@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_text_is_the_targets(pair: tuple[str, str], tmp_path: Path) -> None:
    both = MAKERS[pair[0]](tmp_path / "ours"), MAKERS[pair[1]](tmp_path / "theirs")
    target, draft = model_for(both[0], 1), model_for(both[1], 2)
    texts = [Encoder(both[0]).text(given) for given in (PROSE.encode()[:31], b"ab re", "日é".encode()[:-1])]
    drafters: list[Any] = [drafter_for(draft, both, length, Sampler(temperature=0)) for length in (3, 5, 2)]
    drafters[2] = FallbackDrafter(LookupDrafter(), drafters[2])
    drafted = 0
    for prompt, drafter in zip([*texts, *random_prompts(1, both[0].size, 3)], [*drafters, drafters[0]], strict=True):
        wanted = plain(target, prompt, 24).tokens
        result = decode_text(target, drafter, prompt, 24, Rules())
        assert result.tokens == wanted
        drafted += sum(round.drafted for round in result.rounds)
    assert drafted > 20


def test_every_byte_its_own_token_accepts_all(tmp_path: Path) -> None:
    """Where every text has one encoding, a copy with shuffled ids is the target itself."""
    ours, theirs = single_bytes(tmp_path / "ours"), shuffled(tmp_path / "theirs")
    toy(vocabulary=ours.size, seed=1, initializer_range=0.05).save_pretrained(ours.folder)
    transplant(ours.folder, theirs.folder, tmp_path / "draft")
    target, other = (TorchModel(AutoModelForCausalLM.from_pretrained(f)) for f in (ours.folder, tmp_path / "draft"))
    both = ours, theirs
    result = decode_text(target, drafter_for(other, both, 4, Sampler(temperature=0)), [5, 65], 60, Rules())
    # Characters that a draft leaves unfinished are not proposed; what is, is right.
    assert sum(r.accepted for r in result.rounds) == sum(r.drafted for r in result.rounds) > 0


# The distribution.

TARGET, DRAFT = ["a", "b", "c", "ab"], ["b", "d", "a", "ba"]  # two shared; ab and ba are text of both
EXACTLY = [
    ("match", Sampler(temperature=0.9, top_k=2), False),
    ("token", Sampler(temperature=1.2, top_k=3, top_p=0.9), True),
    ("block", Sampler(temperature=1.0, top_k=2), False),
]


@pytest.mark.parametrize(("verifier", "sampler", "argmax"), EXACTLY)
def test_two_rounds_follow_the_distribution(verifier: str, sampler: Sampler, argmax: bool, tmp_path: Path) -> None:
    both = letters(tmp_path / "ours", TARGET), letters(tmp_path / "theirs", DRAFT)

    def make(draft: TableModel, sampler: Sampler, draws: Random) -> Drafter:
        return drafter_for(draft, both, 2, sampler, draws, argmax)

    found, drafted, accepted = decoded(4, make, verifier, sampler)
    assert found < EXACT and drafted and accepted


@pytest.mark.parametrize("pair", PAIRS)
def test_the_cache_holds_the_text(pair: tuple[str, str], tmp_path: Path) -> None:
    """All logits of a draft equal those of a fresh prefill of the context's text and what was drafted.

    Whatever of a proposal stands, and however the text goes on: by the second half of a
    word or of a character, which change what the draft reads before them.
    """
    both = MAKERS[pair[0]](tmp_path / "ours"), MAKERS[pair[1]](tmp_path / "theirs")
    draft, fresh = model_for(both[1], 2), model_for(both[1], 2)
    drafter = drafter_for(draft, both, 3, Sampler(temperature=0))
    append, rewritten = drafter.reader.append, 0

    def spied(own: list[int]) -> Any:
        logits = append(own)
        fresh.rollback([0])
        wanted = fresh.extend(drafter.reader._ids, want=[len(drafter.reader._ids) - 1]).full()
        torch.testing.assert_close(logits.full(), wanted, rtol=0, atol=1e-4)
        assert draft.lengths == [len(drafter.reader._ids)]
        return logits

    drafter.reader.append = spied
    draws, parts = random.Random(3), [i for i, own in enumerate(both[0].bytes_of) if len(own) > 1]
    pieces = [*(Encoder(both[0]).text(c.encode()) for c in PROSE + "re ab" * 20), *([i] for i in parts)]
    for _ in range(3):
        context = draws.choice(pieces) + draws.choice(pieces)
        drafter.begin(context)
        before: list[int] = []
        for _ in range(16):
            proposal = drafter.propose(context, 3, ())
            own = Translator(*both).ids(context)
            assert own is not None and drafter.reader._ids[: len(own)] == own
            rewritten += own[: len(before)] != before
            before = own
            count = draws.randint(0, len(proposal.tokens))
            context = [*context, *proposal.tokens[:count], draws.choice(draws.choice(pieces))]
            drafter.accepted(proposal, count, len(context), 0.1)
    assert rewritten


# Rules, limits and ends.


class Speaker(TableModel):
    """A draft that says one text over and over."""

    def __init__(self, ids: Sequence[int], vocabulary: int, start: int, capacity: int = 200) -> None:
        super().__init__(vocabulary, memory=1, capacity=capacity)
        self.ids, self.start = list(ids), start

    def extend(self, tokens: Sequence[int], *arguments: Any, **named: Any) -> Any:
        found = super().extend(tokens, *arguments, **named)
        found.values[:] = 0
        found.values[-1, self.ids[(self.lengths[0] - self.start) % len(self.ids)]] = 9
        return found


def test_a_text_is_proposed_in_the_targets_tokens(tmp_path: Path) -> None:
    ours, theirs = merged(tmp_path / "ours"), shuffled(tmp_path / "theirs")
    write, words = Encoder(ours).text, [ours.index[name] for name in ("Ġab", "re", "<end>")]

    def proposed(context: list[int], said: list[int], length: int, ends: Sequence[int] = (), limit: int = 9) -> Any:
        start = len(Translator(ours, theirs).ids(context) or [])
        drafter = drafter_for(Speaker(said, 258, start), (ours, theirs), length, Sampler(temperature=0))
        drafter.begin(context)
        return drafter.propose(context, limit, ends).tokens

    spell, stop = Encoder(theirs).text, theirs.index["<stop>"]
    assert proposed(write(b"x"), spell(b" abre"), 5) == words[:2]
    assert proposed(write(b"x"), spell(b" abre"), 4) == [words[0], ours.index["r"]]
    # The context ends inside a token that both together would be: its rest is written alone.
    assert proposed(write(b"x a"), spell(b"bre"), 3) == [ours.index["b"], words[1]]
    assert proposed([ours.index["Ġ"]], spell(b"ab ab"), 5) == [ours.index["ab"], words[0]]
    # Characters are proposed whole; what they lack may come from before.
    assert proposed(write(b"x"), spell("a日".encode()), 3) == [ours.index["a"]]
    assert proposed(write(b"x\xe6\x97"), spell(b"\xa5re"), 3) == [ours.index["¥"], words[1]]
    # Ends by role, and no further; named tokens that the target lacks end a draft before them.
    assert proposed(write(b"x"), [*spell(b" ab"), stop, *spell(b"re")], 6, (words[2],)) == [words[0], words[2]]
    assert proposed(write(b"x"), spell(b" ab ab ab"), 9, (words[0],)) == [words[0]]
    # No more own steps than the limit.
    assert proposed(write(b"x"), spell(b" ab ab ab"), 9, (), 2) == [ours.index["Ġa"]]
    lone = single_bytes(tmp_path / "lone", stop=None)
    drafter = drafter_for(Speaker([256, 0], 257, 1), (ours, lone), 3, Sampler(temperature=0))
    assert drafter.propose(write(b"x"), 9, ()).tokens == []


def test_contexts_that_do_not_fit(tmp_path: Path) -> None:
    """A draft whose context is full, or that cannot write half a character, proposes nothing and breaks nothing."""
    both = merged(tmp_path / "ours"), shuffled(tmp_path / "theirs")
    target = model_for(both[0], 1)
    small = model_for(both[1], 2, max_position_embeddings=24)
    prompt = Encoder(both[0]).text(b"ab ab re re")
    result = decode_text(target, drafter_for(small, both, 4, Sampler(temperature=0)), prompt, 40, Rules())
    assert result.tokens == plain(target, prompt, 40).tokens
    assert result.rounds[0].drafted > 0 == result.rounds[-1].drafted
    assert decode_text(target, drafter_for(small, both, 4, Sampler(temperature=0)), prompt * 5, 9, Rules()).tokens == (
        plain(target, prompt * 5, 9).tokens
    )
    poor = letters(tmp_path / "poor", ["a", "b", "ab"])
    drafter = drafter_for(TableModel(3, 1), (both[0], poor), 3, Sampler(temperature=0))
    drafter.begin(Encoder(both[0]).text(b"a\xc3"))
    assert drafter.propose(Encoder(both[0]).text(b"a\xc3"), 4, ()).tokens == []
    assert drafter.propose(Encoder(both[0]).text("aéb".encode()), 4, ()).tokens != []


@pytest.mark.parametrize(("theirs", "more"), [("merged", -9), ("shuffled", -1), ("spaces", 7)])
@pytest.mark.parametrize("sampler", [Sampler(temperature=0), Sampler(temperature=1.5)])
def test_rows_are_not_those_of_the_tokenizer(theirs: str, more: int, sampler: Sampler, tmp_path: Path) -> None:
    """Ids of the target's tokenizer without rows are never proposed; padding ids that the target writes are no text."""
    both = merged(tmp_path / "ours"), MAKERS[theirs](tmp_path / "theirs")
    rows = both[0].size + more
    target = TorchModel(toy(vocabulary=rows, seed=1))
    draws = random.Random(3).random
    drafter = drafter_for(model_for(both[1], 2), both, 4, sampler, draws, rows=rows)
    prompt = [*Encoder(both[0]).text(b"ab ab re re"), *[rows - 1] * (more > 0)]
    prompt = [token for token in prompt if token < rows]
    verifier = "token" if sampler.temperature else "greedy"
    result = decode_text(target, drafter, prompt, 40, Rules(sampler, verifier, random=draws))
    assert len(result.tokens) == 40 and max(result.tokens) < rows
    assert sum(r.drafted for r in result.rounds) > 0
    if not sampler.temperature:
        assert result.tokens == plain(target, prompt, 40).tokens


def test_a_lookup_is_measured_beside_a_draft_of_another_vocabulary(tmp_path: Path) -> None:
    reader = DraftReader(TableModel(2), *[letters(tmp_path / "ours", ["a", "b"])] * 2)
    kinds = {"lookup": LookupDrafter, "string": StringMatchDrafter}
    for name, kind in kinds.items():
        configuration = Configuration(drafter=name, length=2)  # type: ignore[arg-type]
        assert type(make_drafter(configuration, reader, Sampler(temperature=0), random.random)) is kind


def test_pairs_that_cannot_be(tmp_path: Path) -> None:
    ours, theirs = letters(tmp_path / "ours", ["a", "b"]), letters(tmp_path / "theirs", ["c", "d"])
    with pytest.raises(PairError, match="2 tokens, the draft 1 rows"):
        drafter_for(TableModel(1), (ours, theirs), 2, Sampler(temperature=0))
    (ours.folder / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be loaded"):
        Encoder(ours)
