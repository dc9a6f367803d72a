"""distill/measuring/slices.py: labels of tokens, by hand and against slow definitions."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy
import pytest
import tiny
import torch

from distill.data.packing import pack, scored_documents
from distill.measuring import slices


def labels(text: str, slice_name: str) -> list[tuple[str, str]]:
    """Tokens of a text, parted at "|", with their labels."""
    pieces = text.split("|")
    ids = [sorted({*pieces}).index(piece) for piece in pieces]
    known = dict(zip(ids, pieces, strict=True))
    found = slices.slice_labels(ids, lambda token: known[token].encode(), [])
    return [*zip(pieces, found[slice_name], strict=True)]


def test_kinds_of_tokens() -> None:
    expected = {
        "Hel": "first", "lo": "inner", ",": "punct", " wor": "first", "ld": "inner", "\n\n": "white",
        "42": "number", "%": "punct", " snake": "first", "_case": "first", " 3": "number", ".5": "number",
        "x": "inner", " Ünï": "first",
        "<end>": "end",
    }  # fmt: skip
    found = slices.token_kinds([*expected], [token == "<end>" for token in expected])
    assert [kind.split()[0].removesuffix("uation").removesuffix("space") for kind in found] == [*expected.values()]


def test_code_is_known_by_its_fence() -> None:
    text = "Use this:\n|```|python|\n|x = 1|\n|```|\nor|\n```\n|ls|\n```|\nDone.|\n```js\n|let"
    found = [label for _, label in labels(text, "language")]
    python, none = "code, python", "code, unnamed"
    assert found == [*["text"] * 3, *[python] * 3, *["text"] * 3, *[none] * 2, *["text"] * 2, "code, js"]


def test_parts_of_a_reply() -> None:
    found = labels("<think>|Well|, 2+2|</think>|It is 4.|<tool_call>|{}|</tool_call>|Bye|<think>|cut", "part")
    names = {piece: label for piece, label in found}
    assert names["Well"] == names[", 2+2"] == names["cut"] == "thinking"
    assert names["{}"] == "tool call" and names["It is 4."] == names["Bye"] == "answer"


@pytest.mark.parametrize(
    ("place", "label"),
    [(0, "0 to 63"), (63, "0 to 63"), (64, "64 to 127"), (127, "64 to 127"), (4096, "4096 to 8191")],
)
def test_depths(place: int, label: str) -> None:
    assert slices.depth_label(place) == label


def loops(text: list[int]) -> bool:
    """Whether the last 2 p tokens, and 6 at least, are those of p tokens before."""
    for period in range(1, 33):
        count = max(2 * period, 6)
        if len(text) >= count + period and text[-count:] == text[-count - period : -period]:
            return True
    return False


@pytest.mark.parametrize("seed", range(20))
def test_repetition_follows_its_definition(seed: int) -> None:
    draws = random.Random(seed)
    ids = [draws.randrange(3) for _ in range(draws.randrange(1, 40))]
    ids += [draws.randrange(9) for _ in range(draws.randrange(1, 5))] * draws.randrange(1, 9)
    for place, label in enumerate(slices.repetition(ids)):
        before = [ids[at : at + 3] for at in range(place - 2)]
        kind = "LOOP" if loops(ids[: place + 1]) else "SEEN" if ids[max(0, place - 2) : place + 1] in before else "NEW"
        assert label == getattr(slices, kind), place


def test_sums_are_those_of_every_position() -> None:
    """Three texts in two blocks, one of them in two parts, values in chunks: means by label, counted one by one."""
    draws = numpy.random.default_rng(0)
    pieces = ["a", " b", "1", "\n", ".", "c"]
    texts = [draws.integers(0, 6, size).tolist() for size in (30, 50, 90)]
    blocks = pack([(text, first) for text, first in zip(texts, (5, 1, 40), strict=True)], 90, True)
    sliced = slices.SlicedValues.of(blocks, lambda token: pieces[token].encode(), [5])
    values, expected = [], dict[tuple[str, str], list[tuple[int, float]]]()
    for block, document, here in scored_documents(blocks):
        own = (blocks.documents[block] == document).nonzero()[:, 0].tolist()
        number = blocks.number(block, document)
        ids = blocks.ids[block][own].tolist()
        names = slices.slice_labels(ids, lambda token: pieces[token].encode(), [5])
        places = here.nonzero()[:, 0].tolist()
        least, most = torch.from_numpy(draws.random((2, len(places), len(slices.METRICS))))
        for cut in (slice(0, 7), slice(7, None)):
            values.append(("draft", number, least[cut], most[cut], 0))
        for row, place in enumerate(places):
            middle = float(least[row, 4] + most[row, 4]) / 2
            for name, labels in names.items():
                expected.setdefault((name, labels[own.index(place) + 1]), []).append((number, middle))
    assert [*sliced.watch(values)] == values and len(blocks) == 2
    results = sliced.results("acceptance_sampling")
    assert {one.slice for one in results} == {"token", "depth", "repetition"}  # one label of the others alone
    for one in results:
        own = expected[one.slice, one.label]
        assert one.tokens == len(own) and one.acceptance["draft"].mean == pytest.approx(
            sum(v for _, v in own) / len(own)
        )
        assert one.acceptance["draft"].low <= one.acceptance["draft"].mean <= one.acceptance["draft"].high
    for name in ("token", "depth", "repetition"):
        assert sum(one.share for one in results if one.slice == name) == pytest.approx(1)


def test_rare_labels_are_joined() -> None:
    blocks = pack([([0] * 300 + [1, 2], 1)], 400, False)
    sliced = slices.SlicedValues.of(blocks, lambda token: [b"a", b"1", b"."][token], [])
    values = torch.arange(301, dtype=torch.float64)[:, None].expand(-1, len(slices.METRICS))
    [*sliced.watch([("draft", 0, values, values, 0)])]
    found = {one.label: one for one in sliced.results("acceptance_greedy") if one.slice == "token"}
    assert found["other"].tokens == 2 and found["other"].acceptance["draft"].mean == pytest.approx(299.5)
    assert [*found] == ["inner piece of a word", "other"]


def test_a_run_by_slices(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weighted by their shares, the means of a slice are the mean of all."""
    whole = json.loads(tiny.shown(capsys, "eval", finished, "-o", "json"))
    report = json.loads(tiny.shown(capsys, "eval", finished, "--by", "repetition", "--by", "token", "-o", "json"))
    assert not report["domains"] and not report["positions"]
    assert {one["slice"] for one in report["slices"]} <= {"repetition", "token"}
    measure = "acceptance_sampling" if whole["sampler"]["temperature"] else "acceptance_greedy"
    for draft, every in whole["domains"]["answers"].items():
        for name in {one["slice"] for one in report["slices"]}:
            rows = [one for one in report["slices"] if one["slice"] == name]
            assert sum(one["tokens"] for one in rows) == every["tokens"]
            mean = sum(one["share"] * one["acceptance"][draft]["mean"] for one in rows)
            assert mean == pytest.approx(every[measure]["mean"], abs=1e-6)
    assert "kind of token: " in tiny.shown(capsys, "eval", finished, "--by", "token")
    assert "--by colour is unknown" in tiny.refused(capsys, "eval", finished, "--by", "colour")
