"""Drafts of another vocabulary: what they read and may draft, and that the target's distribution comes out all the
same."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from table_model import TableModel
from test_batch import summary
from test_exact_decoding import EXACT, decoded
from test_vocabulary import loaded, save, sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toys import blurred, random_prompts, toy
from transformers import AutoModelForCausalLM

from distill.decoding.configured import make_drafter
from distill.decoding.decode import decode_text, plain
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter
from distill.decoding.lengths import Fixed, ProbabilityFloor
from distill.decoding.other_vocabulary import (
    DraftReader,
    IntersectionDrafter,
    StringMatchDrafter,
    Translator,
    incomplete,
    shared_tokens,
    transplant_gain,
)
from distill.decoding.rules import Rules
from distill.decoding.verify import Random
from distill.engines.torch.model import TorchModel
from distill.errors import DataError, PairError
from distill.recipe import Configuration
from distill.sampler import Sampler
from distill.surgery.vocabulary import transplant
from distill.vocabulary.encoding import Encoder
from distill.vocabulary.vocabulary import BYTE_MAP, Vocabulary

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
KINDS = ("intersection", "string")
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
    kind: str,
    model: Any,
    pair: tuple[Vocabulary, Vocabulary],
    length: int,
    sampler: Sampler,
    draws: Random = random.random,
    argmax: bool = False,
    rows: int | None = None,
) -> Any:
    reader = DraftReader(model, *pair, rows)
    if kind == "string":
        return StringMatchDrafter(reader, length, sampler, draws, argmax)
    return IntersectionDrafter(reader, Fixed(length), sampler, draws, argmax)


# What is shared, and what the draft reads.


def test_shared_tokens_by_hand(tmp_path: Path) -> None:
    ours, theirs = merged(tmp_path / "ours"), spaces(tmp_path / "theirs")
    found = {ours.tokens[t]: theirs.tokens[d] for t, d in shared_tokens(ours, theirs).items()}
    assert found["a"] == "a" and found["Ġab"] == "▁ab" and found["re"] == "re" and found["Ġ"] == "▁"
    assert found["Ċ"] == "<0x0A>" and found["Ã"] == "<0xC3>" and found["æĹ¥"] == "日"  # the byte, whatever its kind
    assert found["<end>"] == "</s>" and not {"ab", "<|im_start|>", "ĊĊ", "æĹ"} & found.keys()
    assert len(set(found.values())) == len(found) == 256 + 4 + 1
    assert found.keys() == {ours.tokens[t] for t in shared_tokens(theirs, ours).values()}
    assert shared_tokens(ours, ours) == {number: number for number in range(ours.size)}


def test_ids_of_the_same_bytes_go_one_to_one(tmp_path: Path) -> None:
    """A normal token meets the normal one, <0xNN> the byte token where there is one."""
    ours, theirs = spaces(tmp_path / "ours"), spaces(tmp_path / "theirs", False)
    assert shared_tokens(ours, theirs) == {number: number for number in range(ours.size)}
    other = letters(tmp_path / "other", ["b", "a"])
    assert shared_tokens(ours, other) == {ours.index["a"]: 1, ours.index["b"]: 0}
    twins = replace(other, bytes_of=(b"a", b"a"))
    assert shared_tokens(twins, other) == {1: 1}  # the same string first
    assert shared_tokens(replace(twins, tokens=("x", "y")), other) == {0: 1}


def test_the_gain_of_a_transplant(tmp_path: Path) -> None:
    ours, theirs = letters(tmp_path / "ours", ["a", "b", "c", "ab"]), letters(tmp_path / "theirs", ["b", "d", "a"])
    found = transplant_gain({0: 5, 1: 1, 2: 1, 3: 3}, ours, theirs, worst=1)
    assert found["shared"] == 2 and found["missing"] == [("ab", 0.3)]
    assert found["mass"] == pytest.approx(0.6) and found["gain"] == pytest.approx(0.4)
    assert transplant_gain({}, ours, theirs)["mass"] == 0


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


def test_a_long_text_is_cut_where_no_token_is(tmp_path: Path) -> None:
    """Even for a draft with tokens across the starts of lines and words."""
    merges = [("Ċ", "a"), ("b", "Ġ")]
    ours, theirs = single_bytes(tmp_path / "ours"), byte_level(tmp_path, [*BYTE_MAP, "Ċa", "bĠ"], merges, regex=False)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    source = "".join(random.Random(1).choices("\nab x", k=600))
    context, translator = Encoder(ours).text(source.encode()), Translator(ours, theirs, window=24)
    for end in range(1, len(context), 3):
        assert translator.ids(context[:end]) == tokenizer.encode(source[:end]).ids
    assert {256, 257} <= set(tokenizer.encode(source).ids)
    assert len(translator._done) > len(context) - 24


# What comes out.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_text_is_the_targets(kind: str, pair: tuple[str, str], tmp_path: Path) -> None:
    both = MAKERS[pair[0]](tmp_path / "ours"), MAKERS[pair[1]](tmp_path / "theirs")
    target, draft = model_for(both[0], 1), model_for(both[1], 2)
    texts = [Encoder(both[0]).text(given) for given in (PROSE.encode()[:31], b"ab re", "日é".encode()[:-1])]
    drafters: list[Any] = [drafter_for(kind, draft, both, length, Sampler(0)) for length in (3, 5, 2)]
    if kind == "intersection":
        drafters[1].rule = ProbabilityFloor(5, 0.1)
    drafters[2] = FallbackDrafter(LookupDrafter(), drafters[2])
    drafted = 0
    for prompt, drafter in zip([*texts, *random_prompts(1, both[0].size, 3)], [*drafters, drafters[0]], strict=True):
        wanted = plain(target, prompt, 24).tokens
        result = decode_text(target, drafter, prompt, 24, Rules())
        assert result.tokens == wanted
        drafted += sum(round.drafted for round in result.rounds)
    assert drafted > 20


def test_every_byte_its_own_token_accepts_all(tmp_path: Path) -> None:
    """Where every text has one encoding, a copy with shuffled ids is the target itself, under every verifier."""
    ours, theirs = single_bytes(tmp_path / "ours"), shuffled(tmp_path / "theirs")
    toy(vocabulary=ours.size, seed=1, initializer_range=0.05).save_pretrained(ours.folder)
    transplant(ours.folder, theirs.folder, tmp_path / "draft")
    target, other = (TorchModel(AutoModelForCausalLM.from_pretrained(f)) for f in (ours.folder, tmp_path / "draft"))
    both = ours, theirs
    for verifier, sampler in (("greedy", Sampler(0)), ("token", Sampler(1.0)), ("block", Sampler(0.8, top_k=20))):
        rules = Rules(sampler, verifier, random=random.Random(1).random)
        result = decode_text(target, drafter_for("intersection", other, both, 4, sampler), [5, 65], 60, rules)
        drafted, accepted = (sum(getattr(r, name) for r in result.rounds) for name in ("drafted", "accepted"))
        assert accepted >= drafted - (0 if verifier == "greedy" else 1) and drafted >= 40  # rounding may refuse one
    result = decode_text(target, drafter_for("string", other, both, 4, Sampler(0)), [5, 65], 60, Rules())
    # Characters that a draft leaves unfinished are not proposed; what is, is right.
    assert sum(r.accepted for r in result.rounds) == sum(r.drafted for r in result.rounds) > 0


@pytest.mark.parametrize(
    ("sampler", "verifier", "argmax"),
    [
        (Sampler(0), "greedy", True),
        (Sampler(0.9), "token", False),
        (Sampler(1.1, top_k=30, top_p=0.9), "block", False),
        (Sampler(1.0, repetition_penalty=1.3), "token", False),
        (Sampler(1.0), "match", True),
    ],
)
def test_the_same_vocabulary_drafts_as_ever(sampler: Sampler, verifier: str, argmax: bool, tmp_path: Path) -> None:
    vocabulary, rule = merged(tmp_path), ProbabilityFloor(6, 0.05)
    hugging_face, accepted = toy(vocabulary=vocabulary.size, seed=3), False
    target, draft = TorchModel(hugging_face), TorchModel(blurred(hugging_face, 1, 0.1))
    for prompt in random_prompts(2, vocabulary.size, seed=4):
        found = []
        for mine in (True, False):
            draws = random.Random(7).random
            drafter: Any = (
                IntersectionDrafter(DraftReader(draft, vocabulary, vocabulary), rule, sampler, draws, argmax)
                if mine
                else ModelDrafter(draft, rule, sampler, draws, argmax)
            )
            result = decode_text(target, drafter, prompt, 24, Rules(sampler, verifier, random=draws))
            found.append(summary(result))
        assert found[0] == found[1]
        accepted |= any(result.from_draft)
    assert accepted


# The distribution.

TARGET, DRAFT = ["a", "b", "c", "ab"], ["b", "d", "a", "ba"]  # two shared; ab and ba are text of both
EXACTLY = [
    ("intersection", "token", Sampler(0.9), False),
    ("intersection", "block", Sampler(1.2, top_k=3, top_p=0.9), False),
    ("intersection", "match", Sampler(1.0, repetition_penalty=1.5), True),
    ("string", "match", Sampler(0.9, top_k=2), False),
    ("string", "token", Sampler(1.2, top_k=3, top_p=0.9), True),
    ("string", "block", Sampler(1.0, top_k=2), False),
]


@pytest.mark.parametrize(("kind", "verifier", "sampler", "argmax"), EXACTLY)
def test_two_rounds_follow_the_distribution(
    kind: str, verifier: str, sampler: Sampler, argmax: bool, tmp_path: Path
) -> None:
    both = letters(tmp_path / "ours", TARGET), letters(tmp_path / "theirs", DRAFT)

    def make(draft: TableModel, sampler: Sampler, draws: Random) -> Drafter:
        return drafter_for(kind, draft, both, 2, sampler, draws, argmax)

    found, drafted, accepted = decoded(4, make, verifier, sampler)
    assert found < EXACT and drafted and accepted


def test_a_new_text_forgets_the_one_before(tmp_path: Path) -> None:
    both = letters(tmp_path / "ours", TARGET), letters(tmp_path / "theirs", DRAFT)
    used, fresh = (
        IntersectionDrafter(DraftReader(TableModel(4, 22), *both), ProbabilityFloor(2, 0.0), Sampler(0), random.random)
        for _ in range(2)
    )
    used.begin([0, 1])
    assert used.propose([0, 1] * 5, 2, []).features
    for drafter in (used, fresh):
        drafter.begin([0, 1])
    assert used.propose([0, 1, 1], 2, []) == fresh.propose([0, 1, 1], 2, [])


@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.7, top_k=9), Sampler(1.3, 0, 0.8, 0.05, 1.4)])
def test_distributions_are_those_of_shared_tokens(sampler: Sampler, tmp_path: Path) -> None:
    both = merged(tmp_path / "ours"), spaces(tmp_path / "theirs")
    model = model_for(both[1], 2)
    drafter = drafter_for("intersection", model, both, 4, sampler)
    common = shared_tokens(*both)
    outside = torch.tensor([number not in common for number in range(both[0].size)])
    context = Encoder(both[0]).text(b"ab re a")
    drafter.begin(context)
    for _ in range(5):
        proposal = drafter.propose(context, 4, ())
        distributions = proposal.distributions
        assert distributions.shape == (4, both[0].size) and len(proposal.features) == 4
        torch.testing.assert_close(distributions.sum(-1), torch.ones(4))
        assert not distributions[:, outside].any() and bool((distributions[range(4), proposal.tokens] > 0).all())
        # By hand: the draft's logits after its own ids, those of shared tokens alone, through the sampler.
        own = [*drafter.reader.translator.ids(context), *(common[token] for token in proposal.tokens)]
        logits = model_for(both[1], 2).extend(own).full()[-5:-1]
        wanted = torch.full((4, both[0].size), -torch.inf)
        for target, draft in common.items():
            wanted[:, target] = logits[:, draft]
        histories = [[*context, *proposal.tokens[:i]] for i in range(4)]
        torch.testing.assert_close(distributions, sampler.probabilities(wanted, histories), rtol=0, atol=1e-4)
        context = [*context, *proposal.tokens[:2], 7]
        drafter.accepted(proposal, 2, len(context), 0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_cache_holds_the_text(kind: str, pair: tuple[str, str], tmp_path: Path) -> None:
    """All logits of a draft equal those of a fresh prefill of the context's text and what was drafted.

    Whatever of a proposal stands, and however the text goes on: by tokens that are not shared, by the second half of a
    word or of a character, which change what the draft reads before them.
    """
    both = MAKERS[pair[0]](tmp_path / "ours"), MAKERS[pair[1]](tmp_path / "theirs")
    draft, fresh = model_for(both[1], 2), model_for(both[1], 2)
    drafter = drafter_for(kind, draft, both, 3, Sampler(0))
    append, rewritten = drafter.reader.append, 0

    def spied(own: list[int]) -> Any:
        logits = append(own)
        fresh.rollback([0])
        wanted = fresh.extend(drafter.reader._ids, want=[len(drafter.reader._ids) - 1]).full()
        torch.testing.assert_close(logits.full(), wanted, rtol=0, atol=1e-4)
        assert draft.lengths == [len(drafter.reader._ids)]
        return logits

    drafter.reader.append = spied
    draws, unshared = random.Random(3), [i for i in range(both[0].size) if i not in shared_tokens(*both)]
    pieces = [*(Encoder(both[0]).text(c.encode()) for c in PROSE + "re ab" * 20), *([i] for i in unshared)]
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
        drafter = drafter_for("string", Speaker(said, 258, start), (ours, theirs), length, Sampler(0))
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
    drafter = drafter_for("string", Speaker([256, 0], 257, 1), (ours, lone), 3, Sampler(0))
    assert drafter.propose(write(b"x"), 9, ()).tokens == []


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_that_do_not_fit(kind: str, tmp_path: Path) -> None:
    """A draft whose context is full, or that cannot write half a character, proposes nothing and breaks nothing."""
    both = merged(tmp_path / "ours"), shuffled(tmp_path / "theirs")
    target = model_for(both[0], 1)
    small = model_for(both[1], 2, max_position_embeddings=24)
    prompt = Encoder(both[0]).text(b"ab ab re re")
    result = decode_text(target, drafter_for(kind, small, both, 4, Sampler(0)), prompt, 40, Rules())
    assert result.tokens == plain(target, prompt, 40).tokens
    assert result.rounds[0].drafted > 0 == result.rounds[-1].drafted
    assert decode_text(target, drafter_for(kind, small, both, 4, Sampler(0)), prompt * 5, 9, Rules()).tokens == (
        plain(target, prompt * 5, 9).tokens
    )
    poor = letters(tmp_path / "poor", ["a", "b", "ab"])
    drafter = drafter_for(kind, TableModel(3, 1), (both[0], poor), 3, Sampler(0))
    drafter.begin(Encoder(both[0]).text(b"a\xc3"))
    assert drafter.propose(Encoder(both[0]).text(b"a\xc3"), 4, ()).tokens == []
    assert drafter.propose(Encoder(both[0]).text("aéb".encode()), 4, ()).tokens != []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("theirs", "more"), [("merged", -9), ("shuffled", -1), ("spaces", 7)])
@pytest.mark.parametrize("sampler", [Sampler(0), Sampler(1.5)])
def test_rows_are_not_those_of_the_tokenizer(
    kind: str, theirs: str, more: int, sampler: Sampler, tmp_path: Path
) -> None:
    """Ids of the target's tokenizer without rows are never proposed; padding ids that the target writes are no text."""
    both = merged(tmp_path / "ours"), MAKERS[theirs](tmp_path / "theirs")
    rows = both[0].size + more
    target = TorchModel(toy(vocabulary=rows, seed=1))
    draws = random.Random(3).random
    drafter = drafter_for(kind, model_for(both[1], 2), both, 4, sampler, draws, rows=rows)
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
    kinds = {"lookup": LookupDrafter, "intersection": IntersectionDrafter, "string": StringMatchDrafter}
    for name, kind in kinds.items():
        configuration = Configuration(drafter=name, length=2)  # type: ignore[arg-type]
        assert type(make_drafter(configuration, reader, Sampler(0), random.random)) is kind


def test_pairs_that_cannot_be(tmp_path: Path) -> None:
    ours, theirs = letters(tmp_path / "ours", ["a", "b"]), letters(tmp_path / "theirs", ["c", "d"])
    with pytest.raises(PairError, match="share no token"):
        drafter_for("intersection", TableModel(2), (ours, theirs), 2, Sampler(0))
    with pytest.raises(PairError, match="2 tokens, the draft 1 rows"):
        drafter_for("string", TableModel(1), (ours, theirs), 2, Sampler(0))
    drafter = drafter_for("intersection", TableModel(2), (ours, ours), 2, Sampler(0))
    for arguments in ({"parents": [-1]}, {"want": [5]}, {}):
        with pytest.raises(AssertionError, match="chains"):
            drafter.model.extend([0], **arguments)
    (ours.folder / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be loaded"):
        Encoder(ours)
