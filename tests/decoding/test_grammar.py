"""Constrained decoding: masks, states that follow the cache, forced tokens, the distribution, both engines."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from branches import every
from table_model import TableModel
from test_export import needs_llama
from test_tree_cache import Mirror
from toys import random_prompts

from distill.decoding.decode import Decoded, decode, decode_text, plain
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter, NoDrafter
from distill.decoding.grammar import Constraint, State, Tokens, constraint, lark
from distill.decoding.lengths import AcceptedRatio, Drafting, Fixed
from distill.decoding.proposals import ROOT
from distill.decoding.rules import Constrained, Forced, Rules
from distill.decoding.trees import Shape, TreeDrafter
from distill.decoding.verify import Random
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.tokenizer import FileTokenizer
from distill.errors import DataError
from distill.recipe import Sampler
from distill.sampler import probabilities_of
from distill.vocabulary.vocabulary import Vocabulary

pytest.importorskip("llguidance")
torch.set_num_threads(1)

DEMO = Path(__file__).resolve().parents[2] / "data" / "demo-target"

SAID = [b"a", b"b", b"c", b"ab", b"", b"x", b'"name": ', b'"na', b"{", b"}", b"0", b"1"]
END = 4
OBJECT = r'\{"name": (a|b|ab)+[01]{2,4}\}'


def tokens_of(said: Sequence[bytes], ends: Sequence[int]) -> Tokens:
    """A vocabulary without a tokenizer: a text is written with the longest tokens, from the left."""
    known = {data: number for number, data in reversed(list(enumerate(said))) if data}
    longest = max(map(len, known), default=0)

    def write(text: bytes) -> list[int]:
        found: list[int] = []
        while text:
            size = next((size for size in range(longest, 0, -1) if text[:size] in known), None)
            if size is None:
                return found
            found.append(known[text[:size]])
            text = text[size:]
        return found

    return Tokens(said, tuple(ends), write)


TOKENS = tokens_of(SAID, [END])


def text(tokens: Sequence[int], said: Sequence[bytes] = SAID) -> bytes:
    return b"".join(said[token] for token in tokens)


# Grammars.


def words(pattern: str, alphabet: str, longest: int) -> set[bytes]:
    """All texts of a regular expression up to a length, by trying."""
    found = ("".join(letters) for size in range(longest + 1) for letters in itertools.product(alphabet, repeat=size))
    return {word.encode() for word in found if re.fullmatch(pattern, word)}


def allowed(language: set[bytes], said: Sequence[bytes], before: bytes) -> set[int]:
    """What a mask is: tokens that some text of the language goes on with, and the end where it is one."""
    found = {
        token for token, data in enumerate(said) if data and any(word.startswith(before + data) for word in language)
    }
    return found | ({END} if before in language else set())


def allowed_by(state: State, size: int) -> set[int]:
    return {int(i) for i in state.mask(size).nonzero()[0]}


LANGUAGES = {
    "[ab]{1,3}c": ("regex", "[ab]{1,3}c"),
    "(a|ab)(c|bc)b?": ("gbnf", 'root ::= x-y ("c" | "bc") "b"?\nx-y ::= "a" | "ab"'),
    "[ab]{1,3}[ab]c{1,2}": ("gbnf", "root ::= [ab]{1,3} [^c] c{1,2} # sets that overlap\nc ::= [c-c]"),
    "(abc?)?": ("gbnf", 'root ::= ("a" tail | ) \ntail ::=\n  [\\x62]\n  ("\\u0063")?'),
}


def reachable(start: Constraint, said: Sequence[bytes], depth: int) -> Iterator[tuple[bytes, State]]:
    """Every text of up to `depth` allowed tokens, and the state after it."""
    level = [(b"", start.root)]
    for _ in range(depth):
        yield from level
        level = [
            (before + said[token], start.next(state, token))
            for before, state in level
            if not state.over
            for token in sorted(allowed_by(state, len(said)) - set(start.ends))
        ]


@pytest.mark.parametrize("pattern", LANGUAGES)
def test_masks_are_those_of_the_language(pattern: str) -> None:
    """By trying every text. Where the text is certain the mask may hold only one of the tokens that can say it."""
    said = [b"a", b"b", b"c", b"ab", b"", b"bc", b"cb"]
    language = words(pattern, "abc", 6)
    start = constraint(*LANGUAGES[pattern], tokens_of(said, [END]))
    seen = 0
    for before, state in reachable(start, said, 5):
        expected, found = allowed(language, said, before), allowed_by(state, len(said))
        certain = len({word[len(before) : len(before) + 1] for word in language if word.startswith(before)}) == 1
        assert found == expected or (certain and len(found) == 1 and found < expected), (before, found, expected)
        assert state.accepting == (before in language) and state.forced == (min(found) if len(found) == 1 else None)
        seen += 1
    assert seen >= 3


def test_ends_padding_and_what_is_ruled_out() -> None:
    start = constraint("regex", "a?", tokens_of([b"a", b"b", b"a", b""], [3, 1]))
    assert allowed_by(start.root, 6) == {0, 1, 2, 3}
    assert start.root.forced is None and start.root.accepting and not start.root.allows(5)
    over = start.next(start.root, 1)
    assert over.over and over.forced == 3 and start.next(over, 0) is over and start.next(start.root, 5) is over
    logits = torch.tensor([[1.0, 2, 3, 4, 5, 6], [-torch.inf, 0, -torch.inf, -torch.inf, 0, 0]])
    one = constraint("regex", "a|b", tokens_of([b"a", b"", b"b", b"", b"", b""], [3]))
    masked = one.masked(logits, [one.root, one.root])
    assert masked[0].tolist() == [1, -torch.inf, 3, *[-torch.inf] * 3]
    assert masked[1].tolist() == [0, -torch.inf, 0, *[-torch.inf] * 3]  # a draft that says none of them says all alike


@pytest.mark.parametrize("sampler", [Sampler(temperature=0), Sampler(temperature=1.0)])
@pytest.mark.parametrize("drafts", [False, True])
def test_tokens_without_a_row_are_never_written(sampler: Sampler, drafts: bool) -> None:
    """A tokenizer of 12 tokens over a model of 5 rows: other tokens write the text, or an error ends it."""
    target = TableModel(5, 3)

    def written(pattern: str) -> list[int]:
        grammar = constraint("regex", pattern, TOKENS)
        verifier = "token" if sampler.temperature else "greedy"
        rules = Rules(sampler, verifier, [END], random.Random(2).random, constraint=grammar)
        if not drafts:
            return plain(target, [0], 9, rules=rules).tokens
        model = ModelDrafter(Constrained(TableModel(5, 4), grammar), Fixed(2), sampler, rules.random)
        return decode_text(target, Forced(model, grammar), [0], 9, rules).tokens

    for pattern in ("x", "bx", "[ab]c[x01]"):
        with pytest.raises(DataError, match="the model has no row for"):
            written(pattern)
    found = written("[x01]?b[abc]")
    assert len(found) == 3 and found[-1] == END and max(found) < 5
    wide = constraint("regex", "x", TOKENS)
    assert plain(TableModel(12, 3), [0], 9, rules=Rules(ends=[END], constraint=wide)).tokens == [5, END]


@pytest.mark.parametrize(
    "kind, source, reason",
    [
        ("regex", "[a", "unclosed"),
        ("regex", "(?=a)b", "look-ahead"),
        ("json", "{", "not JSON"),
        ("json", "[]", "an object"),
        ("json", '{"type": "strin"}', "strin"),
        ("lark", "start: other", "other"),
        ("gbnf", 'rot ::= "a"', "no rule `root`"),
        ("gbnf", 'root ::= "a" other', "line 1, column 14: there is no rule `other`"),
        ("gbnf", 'root ::= "a"\n  ( "b"', "bracket open"),
        ("gbnf", 'root ::= "a")', "closes nothing"),
        ("gbnf", 'root ::= "a" | *', "nothing stands before"),
        ("gbnf", 'root ::= "a" § "b"', "column 14"),
        ("gbnf", 'root ::= "\\x1"', "not whole"),
        ("gbnf", 'root ::= "a"\nroot ::= "b"', "twice"),
        ("gbnf", '"a"\nroot ::= "b"', "must begin with"),
        ("regex", "z", "cannot go on"),
        ("xml", "", "no kind"),
    ],
)
def test_wrong_grammars_are_named(kind: str, source: str, reason: str) -> None:
    with pytest.raises(DataError, match=re.escape(reason)):
        constraint(kind, source, TOKENS)


def test_refusals() -> None:
    with pytest.raises(DataError, match="needs a token that ends"):
        tokens_of(SAID, [])


def test_warnings_are_kept() -> None:
    tokens = tokens_of([bytes([byte]) for byte in range(256)] + [b""], [256])
    schema = {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 20}
    found = constraint("json", json.dumps(schema), tokens)
    assert not found.warnings and allowed_by(found.root, 257) == {ord("0"), ord("1"), ord("7")}
    with pytest.raises(DataError, match="uniqueItems") as caught:
        constraint("json", '{"type": "array", "uniqueItems": true}', tokens)
    assert "lenient" in (caught.value.hint or "")
    lenient = '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}'
    assert "uniqueItems" in str(constraint("json", lenient, tokens).warnings)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(DataError, match="llguidance") as caught:
        constraint("regex", "a", tokens_of(SAID, [END]))
    assert "llguidance>=1" in (caught.value.hint or "")


# The distribution, by enumeration of everything that chance can do.


LETTERS = [b"a", b"b", b"c", b"ab", b""]
PATTERN = "(ab?|b)c[ab]b?"  # c is certain after ab
LIMIT = 4
ROOM = 12  # of texts with drafts: their first LIMIT tokens count, so that drafts and trees have all their levels


def expected_distribution(target: TableModel, sampler: Sampler) -> dict[tuple[int, ...], float]:
    """The probability of each text after 1 under masks of the language, token by token."""
    language = words(PATTERN, "abc", 5)
    found: dict[tuple[int, ...], float] = {}

    def go(tokens: tuple[int, ...], chance: float) -> None:
        if len(tokens) == LIMIT or tokens[-1:] == (END,):
            found[tokens] = chance
            return
        logits = target.table[target.place([1, *tokens])].clone()
        may = allowed(language, LETTERS, text(tokens, LETTERS))
        logits[[i for i in range(len(logits)) if i not in may]] = -torch.inf
        for token, own in enumerate(probabilities_of(sampler, logits[None], [[1, *tokens]])[0].tolist()):
            if own > 0:
                go((*tokens, token), chance * own)

    go((), 1.0)
    return found


SAMPLER = Sampler(temperature=0.8, top_p=0.95).penalised(1.2)
FREE = Sampler(temperature=0.9)
Make = Callable[[TableModel, Constraint, Random], Drafter]


def masked(length: int, sampler: Sampler, argmax: bool = False) -> Make:
    """A draft under the grammar, and forced tokens."""
    return lambda d, c, r: Forced(ModelDrafter(Constrained(d, c), Fixed(length), sampler, r, argmax), c)


def masked_tree(nodes: int, **settings: Any) -> Make:
    return lambda d, c, r: Forced(TreeDrafter(Constrained(d, c), FREE, r, nodes, **settings), c)


FORK = Shape((ROOT, ROOT, 0))
WAYS: dict[str, tuple[str, Sampler, Make]] = {
    "token": ("token", SAMPLER, masked(2, SAMPLER)),
    "block": ("block", SAMPLER, masked(2, SAMPLER)),
    "match": ("match", FREE, masked(3, FREE, argmax=True)),
    "token, draft without the grammar": (
        "token",
        FREE,
        lambda d, c, r: Forced(ModelDrafter(d, Fixed(2), FREE, r), c),
    ),
    "block, nothing for free": ("block", FREE, lambda d, c, r: ModelDrafter(Constrained(d, c), Fixed(2), FREE, r)),
    "sampled tree": ("token", FREE, masked_tree(3, shape=FORK)),
    "distinct tree": ("distinct", FREE, masked_tree(3, shape=FORK, distinct=True)),
    "best tree": ("match", FREE, masked_tree(4)),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * ("without" in way)) for way in WAYS])
def test_the_distribution_is_that_of_the_allowed_tokens(way: str) -> None:
    verifier, sampler, make = WAYS[way]
    target = TableModel(5, 3, memory=1, sharpness=1.0)
    draft, grammar = target.near(0.7, 4), constraint("regex", PATTERN, tokens_of(LETTERS, [END]))
    expected, drafted = expected_distribution(target, sampler), set[int]()
    assert len(expected) > 10 and sum(expected.values()) == pytest.approx(1)

    def run(random: Random, drafts: bool) -> list[int]:
        rules, result = Rules(sampler, verifier, [END], random, constraint=grammar), Decoded()
        if not drafts:
            return plain(target, [1], LIMIT, rules=rules).tokens
        for _ in decode(target, make(draft, grammar, random), [1], ROOM, rules, result):
            if len(result.tokens) >= LIMIT:
                break
        drafted.update(one.drafted for one in result.rounds)
        return result.tokens[:LIMIT]

    for drafts in (False, True):
        found: dict[tuple[int, ...], float] = {}
        for weight, tokens in every(functools.partial(run, drafts=drafts)):
            found[tuple(tokens)] = found.get(tuple(tokens), 0) + weight
        assert found == pytest.approx(expected, rel=0, abs=1e-12)
    assert max(drafted) >= (3 if "tree" in way else 2)


# Text.


def drafters(draft: Any, grammar: Constraint, sampler: Sampler, draws: random.Random) -> dict[str, Drafter]:
    """Every way to draft, by name."""
    masked = Constrained(draft, grammar)

    def model(argmax: bool = False, behind: Any = masked) -> ModelDrafter:
        return ModelDrafter(behind, Fixed(4), sampler, draws.random, argmax)

    found: dict[str, Drafter] = {
        "model": model(),
        "best": model(argmax=True),
        "without the grammar": model(behind=draft),
        "lookup": LookupDrafter(6),
        "both": FallbackDrafter(LookupDrafter(6), model(argmax=True)),
    }
    if draft.max_leaves:
        found["tree"] = TreeDrafter(masked, sampler, draws.random, 9)
    return {**found, **{f"{name}, forced": Forced(drafter, grammar) for name, drafter in found.items()}}


def check_ways(target: Any, draft: Any, grammar: Constraint, valid: Callable[[list[int]], bool], seeds: int) -> None:
    """Greedy text is plain constrained text, and every text is valid, for every drafter."""
    ends, greedy = grammar.ends, Rules(ends=grammar.ends, constraint=grammar)
    prompt = random_prompts(1, target.vocabulary_size, seed=seeds)[0]
    expected = plain(target, prompt, 60, rules=greedy).tokens
    ways = drafters(draft, grammar, Sampler(temperature=0), random.Random())
    for name, drafter in ways.items():
        assert decode_text(target, drafter, prompt, 60, greedy).tokens == expected, name
    whole, sampler = 0, Sampler(temperature=1.5)
    for seed, name in enumerate([*ways] * seeds):
        draws = random.Random(seed)
        verifier = "token" if name.startswith(("model", "without")) else "match"
        rules = Rules(sampler, verifier, ends, draws.random, constraint=grammar)
        result = decode_text(target, drafters(draft, grammar, sampler, draws)[name], prompt, 60, rules)
        if grammar.satisfied(result.tokens):
            assert result.tokens[-1] in ends and valid(result.tokens[:-1]), name
            whole += 1
        else:
            assert len(result.tokens) == 60 or target.lengths[0] >= target.capacity - 1
    assert whole > len(ways) * seeds / 2


class Noting(AcceptedRatio):
    """Remembers what it was told, and decides whether anything is drafted at all."""

    def __init__(self, drafts: bool) -> None:
        super().__init__(4)
        self.drafts, self.asked, self.last = drafts, 0, Drafting()
        self.told: list[tuple[int, int]] = []

    def steps(self, drafting: Drafting) -> int:
        self.asked += drafting is not self.last
        self.last = drafting
        return int(self.drafts)

    def observe(self, drafting: Drafting, nodes: int, accepted: int, seconds: float) -> None:
        self.told.append((nodes, accepted))


@pytest.mark.parametrize("drafts", [True, False])
def test_a_rule_learns_of_the_rounds_in_which_it_was_asked(drafts: bool) -> None:
    """A round of sure tokens alone says nothing of the draft."""
    grammar = constraint("regex", "((a|b)c{70}){4}", TOKENS)  # more sure tokens than a round takes
    target, rule = TableModel(len(SAID), 3), Noting(drafts)
    drafter = Forced(
        ModelDrafter(Constrained(target.near(0.5, 4), grammar), rule, Sampler(temperature=0), random.random), grammar
    )
    result = decode_text(target, drafter, [1], 300, Rules(ends=grammar.ends, constraint=grammar))
    assert len(rule.told) == rule.asked < len(result.rounds)
    assert all((drafted > 0) == drafts for drafted, _ in rule.told)
    assert sum(r.drafted for r in result.rounds) > sum(drafted for drafted, _ in rule.told)  # the sure ones


def test_text_of_a_table() -> None:
    target = TableModel(len(SAID), 1)
    grammar = constraint("regex", OBJECT, TOKENS)
    check_ways(target, target.near(1.0, 2), grammar, lambda t: bool(re.fullmatch(OBJECT.encode(), text(t))), 8)


def test_the_end_of_either_context() -> None:
    grammar = constraint("regex", "((a|b)x){40}", TOKENS)
    rules = Rules(ends=[END], constraint=grammar)
    for room, draft_room in itertools.product((9, 10, 30), (3, 8, 9, 14, 50)):
        target = TableModel(len(SAID), 1, capacity=room)
        draft = TableModel(len(SAID), 2, capacity=draft_room)
        told = plain(target, [0, 0, 0], 40, rules=rules).tokens
        assert len(told) == room - 2
        for name, drafter in drafters(draft, grammar, Sampler(temperature=0), random.Random()).items():
            assert decode_text(target, drafter, [0, 0, 0], 40, rules).tokens == told, name


# Forced tokens, and what the model reads when.


class Counting:
    """A model that notes how many tokens each call brought."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def extend(self, tokens: Sequence[int], *arguments: Any, **named: Any) -> Any:
        self.calls.append(len(tokens))
        return self.model.extend(tokens, *arguments, **named)


def test_forced_tokens_cost_no_calls() -> None:
    """`{"name": ` is sure, then one of a and b, then `01}` and the end."""
    grammar = constraint("regex", r'\{"name": (a|b)01\}', TOKENS)
    target, draft = Counting(TableModel(len(SAID), 1)), Counting(TableModel(len(SAID), 2))
    rules = Rules(ends=[END], constraint=grammar)
    told = decode_text(target, Forced(NoDrafter(), grammar), [5, 5], 30, rules).tokens
    assert len(told) == 7 and text(told) in (b'{"name": a01}', b'{"name": b01}')
    assert target.calls == [2, 2, 5]  # the prompt, what was sure before the one choice, and behind it
    assert told == plain(target, [5, 5], 30, rules=rules).tokens
    drafter = Forced(ModelDrafter(Constrained(draft, grammar), Fixed(1), rules.sampler, random.random), grammar)
    result = decode_text(target, drafter, [5, 5], 30, rules)
    # Drafted are the one sure token, the choice (which happens to be right), and the sure ones behind it.
    assert result.tokens == told and [(r.drafted, r.accepted) for r in result.rounds] == [(6, 6)]
    assert draft.calls == [1, 3]  # the prompt but for its last token; the rest up to the choice
    sure = constraint("regex", "abx" * 20, TOKENS)
    target.calls, draft.calls = [], []
    rules = Rules(ends=[END], constraint=sure)
    drafter = Forced(ModelDrafter(Constrained(draft, sure), Fixed(1), rules.sampler, random.random), sure)
    result = decode_text(target, drafter, [5, 5], 100, rules)
    assert text(result.tokens) == b"abx" * 20 and result.tokens[-1] == END and len(result.rounds) == 1
    assert target.calls == [2, 41] and draft.calls == [1]


@pytest.mark.parametrize("seed", range(6))
def test_logits_are_those_of_a_fresh_prefill_under_the_mask(seed: int) -> None:
    """After any extend, keep and rollback."""
    draws = random.Random(seed)
    inner, bare = TableModel(len(SAID), 1, memory=3), TableModel(len(SAID), 1, memory=3)
    grammar = constraint("regex", r'((a|b)\{"name": ab01\}){1,9}', TOKENS)
    prompt = [5, 0, 3]
    grammar.begin(len(prompt))

    def fresh(path: Sequence[int]) -> torch.Tensor:
        bare.rollback([0])
        return grammar.masked(bare.extend(path, want=[len(path) - 1]).full(), [grammar.state(path)])[0]

    def compare(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got.softmax(-1), expected.softmax(-1), rtol=1e-12, atol=1e-12)

    def choose(path: list[int]) -> int:
        return draws.choice(sorted(allowed_by(grammar.state(path), len(SAID)))) if draws.random() < 0.9 else 9

    mirror = Mirror(Constrained(inner, grammar), fresh, compare)
    mirror.chain(prompt, [2])
    for _ in range(60):
        action, size = draws.random(), len(mirror.context)
        if action < 0.3 and size > len(prompt):
            mirror.rollback(draws.randrange(len(prompt), size))
        elif action < 0.6:
            text = list(mirror.context)
            for _ in range(draws.randrange(1, 5)):
                text.append(choose(text))
            mirror.chain(text[size:], draws.choice([None, [len(text) - size - 1]]))
        else:
            for _ in range(draws.randrange(1, 4)):
                parents = [draws.randrange(ROOT, len(mirror.nodes)) for _ in range(draws.randrange(1, 4))]
                mirror.tree([choose(mirror.text(parent)) for parent in parents], parents)
            mirror.keep(mirror.path(draws.randrange(ROOT, len(mirror.nodes))))


@pytest.mark.parametrize("held", range(4))
def test_tokens_that_the_model_holds_already(held: int) -> None:
    """A prefix that is not read again shifts no mask, in a model that held it and in one that was used before."""
    model, grammar = TableModel(len(SAID), 1, memory=3), constraint("regex", "ab01|ba", TOKENS)
    prompt = [5, 0, 3, 7]
    grammar.begin(len(prompt))
    whole = Constrained(TableModel(len(SAID), 1, memory=3), grammar)
    expected = whole.extend(prompt, want=[3]).full()
    used = Constrained(TableModel(len(SAID), 1, memory=3), grammar)
    used.extend([*prompt, 0, 1])  # of an earlier text, whose answer is now in the prompt
    if held:
        model.extend(prompt[:held])
    used.rollback([held])
    for one in (Constrained(model, grammar), used):
        assert torch.equal(one.extend(prompt[held:], want=[len(prompt) - held - 1]).full(), expected)
        assert torch.equal(one.extend([0]).full(), whole.extend([0]).full())
        whole.rollback([len(prompt)])


# GGUF.


GBNF = r"""
root ::= "def " name "(" ("self" (", " name)*)? "):\n" # a head
name ::= [a-z_]{1,5} | "\u00e9"
"""
HEAD = r"def ([a-z_]{1,5}|é)\((self(, ([a-z_]{1,5}|é)){0,}){0,1}\):\n"


@needs_llama
def test_gguf_text(gguf_toys: tuple[Path, Path]) -> None:
    with (
        GgufModel(gguf_toys[0], context=128, threads=1, max_leaves=12) as target,
        GgufModel(gguf_toys[1], context=128, threads=1, max_leaves=12) as draft,
    ):
        tokens = Tokens.of_gguf(target, FileTokenizer(target.file).ends)
        folder = Vocabulary.read(gguf_toys[0].parent / "target")
        assert tokens.bytes_of == Tokens.of(folder, tokens.ends).bytes_of
        grammar = constraint("gbnf", GBNF, tokens)

        def valid(found: list[int]) -> bool:
            return bool(re.fullmatch(HEAD, target.file.detokenize(found).decode()))

        check_ways(target, draft, grammar, valid, 1)


# The command.


def test_the_command_names_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schema.json").write_text("{}")
    both = "--regex", "a", "--grammar", tmp_path / "schema.json"
    assert "given together" in tiny.refused(capsys, "generate", "x", *both)
    assert "cannot be read" in tiny.refused(capsys, "generate", "x", "--grammar", tmp_path / "none.gbnf")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3}
    schema = {"type": "object", "properties": {"sizes": sizes}, "required": ["sizes"], "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "list.gbnf").write_text('root ::= "- " [a-z]{3} "\\n"')
    said, pair = "# An object: ", (DEMO, DEMO)
    printed = tiny.shown(
        capsys, "generate", said, *pair, "-C", "drafter=lookup+draft", "--grammar", tmp_path / "schema.json"
    )
    found = json.loads(printed.removeprefix(said))
    assert list(found) == ["sizes"] and len(found["sizes"]) <= 3 and set(found["sizes"]) <= set(range(100))
    printed = tiny.shown(capsys, "generate", "# A list\n", *pair, "-C", "length=0", "--grammar", tmp_path / "list.gbnf")
    assert re.fullmatch("# A list\n- [a-z]{3}\n\n", printed)
    warned = tiny.told(capsys, "generate", "# ", *pair, "--regex", "[0-9]{30}", "--tokens", 3)
    assert "before the grammar is satisfied" in warned


def test_gbnf_is_written_character_by_character() -> None:
    assert lark('root ::= "ab"+ [^"\\]-] . ') == r"start: (/\u{61}/ /\u{62}/) + /[^\u{22}\u{5d}\u{2d}]/ /(?s:.)/"
