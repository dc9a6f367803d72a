"""Where stop strings end a text, for plain decoding and every speculative way; and what is printed of tokens."""

from __future__ import annotations

import io
import itertools
import os
import random
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import tokenizer_kinds
import torch
from table_model import TableModel
from tables import TableRows
from tokenizers import Tokenizer
from toys import Scripted, decode_at_once

from distill.decoding.decode import Decoded, decode, decode_text, plain
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter
from distill.decoding.lengths import AcceptedRatio, Fixed, ProbabilityFloor
from distill.decoding.rules import Rules, Stopped, characters, stop_before, token_bytes
from distill.decoding.trees import TreeDrafter
from distill.errors import DataError
from distill.recipe import Sampler
from distill.serving.answering import pieces
from distill.serving.terminal import GREEN, RESET, show
from distill.vocabulary.vocabulary import Vocabulary

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("DISTILL_SHARED", ROOT.parent / "shared")) / "tokenizers"
GREEDY = Sampler(temperature=0)
LIMIT = 26
# Letters alone, letters with empty and long tokens, and bytes of characters that several tokens share.
PIECES = (
    (b"a", b"b", b"c", b"d", b"e", b"f"),
    (b"ab", b"", b"bca", b"c", b"a", b"abab"),
    (b"\xc3", b"\xa9", b"\xc3\xa9a", b"a", b"\xe2\x82", b"\xac"),
)


def zero() -> float:
    return 0.0


def text_of(tokens: Sequence[int], pieces: Sequence[bytes]) -> bytes:
    return b"".join(pieces[token] for token in tokens)


def by_hand(tokens: Sequence[int], pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[list[int], bytes]:
    """A text without stop strings, read byte by byte until one is complete: the whole tokens before it, the text."""
    text = text_of(tokens, pieces)
    for end in range(len(text) + 1):
        complete = [len(stop.encode()) for stop in stops if text[:end].endswith(stop.encode())]
        if complete:
            text = text[: end - max(complete)]
            break
    else:
        return list(tokens), text
    fits = [n for n in range(len(tokens) + 1) if len(text_of(tokens[:n], pieces)) <= len(text)]
    return list(tokens[: max(fits)]), text


Make = Callable[[Any], Drafter]
WAYS: dict[str, Make] = {
    **{f"fixed {n}": lambda d, n=n: ModelDrafter(d, Fixed(n), GREEDY, zero) for n in (1, 2, 3, 5, 8)},
    "floor": lambda d: ModelDrafter(d, ProbabilityFloor(8, 0.2), GREEDY, zero),
    "n_min": lambda d: ModelDrafter(d, ProbabilityFloor(8, 0.2, n_min=3), GREEDY, zero),
    "ratio": lambda d: ModelDrafter(d, AcceptedRatio(3), GREEDY, zero),
    "lookup": lambda d: LookupDrafter(6),
    "lookup, model": lambda d: FallbackDrafter(LookupDrafter(4), ModelDrafter(d, Fixed(4), GREEDY, zero)),
    "tree": lambda d: TreeDrafter(d, GREEDY, zero, 9, branching=3),
}


def stops_of(draws: random.Random, text: str) -> list[str]:
    """One to three stop strings of one to four characters, most of them from the text."""
    found = []
    for _ in range(draws.randint(1, 3)):
        size, place = draws.randint(1, 4), draws.randrange(max(len(text) - 4, 1))
        found.append(text[place : place + size] or "x")
    return [*found, draws.choice(["bé", "zz", "ad", "€a"])]


@pytest.mark.parametrize("pieces", PIECES, ids=["letters", "long", "bytes"])
@pytest.mark.parametrize("seed", range(5))
def test_every_way_ends_before_the_stop_string(pieces: Sequence[bytes], seed: int) -> None:
    draws = random.Random(seed)
    prompts = [[draws.randrange(6) for _ in range(draws.randint(1, 4))] for _ in range(3)]
    table = TableModel(6, 10 * seed, sharpness=2.0)
    draft = table.near(0.7, seed)
    whole = [plain(table, prompt, LIMIT).tokens for prompt in prompts]
    for prompt, free in zip(prompts, whole, strict=True):
        stops = stops_of(draws, text_of(free, pieces)[: draws.randint(4, 60)].decode("utf-8", "ignore"))
        rules = Rules(stop=stop_before(pieces.__getitem__, stops))
        expected = by_hand(free, pieces, stops)
        result = plain(table, prompt, LIMIT, rules=rules)
        assert (result.tokens, text_of(result.tokens, pieces) + result.rest) == expected
        for make in WAYS.values():
            result, seen = Decoded(), list[int]()
            for new in decode(table, make(draft), prompt, LIMIT, rules, result):
                seen += new
                assert seen == expected[0][: len(seen)]  # nothing is taken back, nothing of a stop string was said
            assert seen == result.tokens and len(result.from_draft) == len(seen)
            assert (seen, text_of(seen, pieces) + result.rest) == expected
    # Batched: one rule for all rows, so the last one's stop strings.
    for length in (0, 1, 3, 8):
        results = decode_at_once(TableRows(table, 3), TableRows(draft, 3), prompts, LIMIT, rules, length)
        for result, free in zip(results, whole, strict=True):
            assert (result.tokens, text_of(result.tokens, pieces) + result.rest) == by_hand(free, pieces, stops)


def test_a_stop_string_across_the_border_of_two_rounds() -> None:
    """Drafts of some lengths end between the two letters."""
    target, draft = TableModel(6, 3), TableModel(6, 3)
    rules = Rules(stop=stop_before(lambda token: b"abcdef"[token : token + 1], ["be"]))
    free = "".join("abcdef"[token] for token in plain(target, [0, 1], 20).tokens)
    assert "be" in free
    for length in range(1, 9):
        result = decode_text(target, ModelDrafter(draft, Fixed(length), GREEDY, zero), [0, 1], 20, rules)
        assert "".join("abcdef"[token] for token in result.tokens) == free[: free.index("be")]


def test_what_begins_a_stop_string_waits() -> None:
    parts = [b"I am do", b"ne.\nB", b"\n", b"B", b"x"]
    stop = stop_before(parts.__getitem__, ["\n\nC", "\nBx"])
    assert stop is not None
    assert stop([0], 0) == Stopped(1)
    assert stop([0, 1], 1) == Stopped(1)
    assert stop([0, 1, 4], 2) == Stopped(1, True, b"ne.")
    assert stop([0, 1, 3], 2) == Stopped(3)
    assert stop([0, 2, 2], 1) == Stopped(1) == stop([0, 2], 1)
    assert stop([0, 2, 2, 2], 3) == Stopped(2)  # the first line end is clear now
    assert stop([0, 2, 2, 3, 4], 3) == Stopped(2, True)
    first = stop_before(parts.__getitem__, ["\n"])
    assert first is not None and first([0, 1], 0) == Stopped(1, True, b"ne.")
    # Complete first counts; of those complete at once the longest.
    both = stop_before(lambda token: b"abc"[token : token + 1], ["abc", "b", "ab"])
    assert both is not None and both([2, 0, 1, 2], 0) == Stopped(1, True) == both([2, 0, 1], 2)
    assert stop_before(lambda token: b"", []) is None
    with pytest.raises(DataError, match="empty stop string"):
        stop_before(lambda token: b"", ["a", ""])


def test_a_call_looks_at_the_end_alone() -> None:
    asked: list[int] = []

    def bytes_of(token: int) -> bytes:
        asked.append(token)
        return b"ab"

    stop = stop_before(bytes_of, ["xabcdefg", "z"])
    assert stop is not None and stop([1] * 5000, 4997) == Stopped(5000)
    assert len(asked) <= 8 + 3


def test_an_end_token_ends_before_a_stop_string_behind_it() -> None:
    parts = [b"a", b"b", b"<end>"]
    rules = Rules(ends=(2,), stop=stop_before(parts.__getitem__, ["bb"]))

    for new, wanted in (([0, 1, 2, 1, 1], [0, 1, 2]), ([0, 1, 1, 2], [0]), ([1, 0, 1, 2, 0], [1, 0, 1, 2])):
        script = [*new, 0, 0, 0, 0]
        target, draft = (Scripted(lambda context, script=script: script[len(context) - 1], 90, 3) for _ in range(2))
        assert plain(target, [0], 5, rules=rules).tokens == wanted
        for length in (1, 2, 5):
            result = Decoded()
            drafter = ModelDrafter(draft, Fixed(length), GREEDY, zero)
            said = [token for part in decode(target, drafter, [0], 5, rules, result) for token in part]
            assert said == result.tokens == wanted


TEXT = "The old man went home.\n  “Naïve”, he said: 日本語 😀! def f(x):\n\treturn x  # don't , really ."


@pytest.mark.parametrize(
    "name", ["deepseek-llm", "gpt-2", "llama-2", "llama-3", "qwen2.5", "byte-level llama-bpe", "metaspace", "gemma"]
)
def test_what_is_printed_is_the_rest_of_the_whole_text(name: str, tmp_path: Path) -> None:
    folder = SHARED / name
    if name in tokenizer_kinds.KINDS:
        folder = tokenizer_kinds.save(tokenizer_kinds.KINDS[name](), tmp_path)
    elif not folder.is_dir():
        pytest.skip(f"no tokenizer {name} in {SHARED}; set DISTILL_SHARED")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = Vocabulary.read(folder)
    bytes_of = token_bytes(vocabulary)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    draws = random.Random(name)
    for place in range(1, len(ids)):
        before = tokenizer.decode(ids[:place], skip_special_tokens=False)
        if before.endswith("\ufffd"):
            continue  # no prompt ends inside a character
        new = ids[place:]
        result = Decoded(new, [draws.random() < 0.5 for _ in new])
        bounds = sorted({0, len(new), *(draws.randrange(len(new) + 1) for _ in range(4))})
        rounds = [new[a:b] for a, b in itertools.pairwise(bounds)]
        for colour in (False, True):
            out = io.StringIO()
            with redirect_stdout(out):
                show(pieces(bytes_of, result, rounds), (GREEN, RESET) if colour else ("", ""))
            printed = out.getvalue()
            assert re.sub("\x1b\\[[0-9]*m", "", printed) == TEXT[len(before) :] + "\n"
            green = "".join(re.findall(f"{re.escape(GREEN)}(.*?){re.escape(RESET)}", printed, re.DOTALL))
            decoder, marked = characters(), ""
            for token, drafted in zip(new, result.from_draft, strict=True):
                piece = decoder.decode(bytes_of(token))
                marked += piece if drafted and colour else ""
            assert green == marked
    assert bytes_of(10**7) == b"" and token_bytes(vocabulary, [ids[0]])(ids[0]) == b""


def test_the_rest_of_a_cut_token_is_printed_and_bytes_that_are_no_text_are_marked() -> None:
    parts = [b"I am do", b"ne.\nB", b"\xe6\x97", b"\xff", b" end"]
    for tokens, rest, wanted in (
        ([0], b"ne.", "I am done.\n"),
        ([2, 3, 4], b"", "\ufffd\ufffd end\n"),
        ([4, 2], b"", " end\ufffd\n"),
    ):
        out = io.StringIO()
        with redirect_stdout(out):
            show(pieces(parts.__getitem__, Decoded(tokens, [False] * 3, rest=rest), [tokens]), (GREEN, RESET))
        assert out.getvalue() == wanted
