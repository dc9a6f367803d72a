"""Slices of positions in distill/measuring/evaluation.py: labels of tokens, by hand and against slow definitions."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy
import pytest
import tiny
import torch

from distill.data.packing import pack, repeated_next, scored_documents
from distill.data.samples import NEW, SEEN, repetition
from distill.measuring import evaluation


@pytest.mark.parametrize("longest", [0, 7, 8, 100, 127, 128, 20_000, 32_767])
def test_five_classes_of_depths(longest: int) -> None:
    """The first, and four that double up to the longest, each of its own places."""
    labels = dict.fromkeys(evaluation.depth_label(place, longest) for place in range(max(longest, 15) + 1))
    bounds = [tuple(map(int, label.split(" to "))) for label in labels]
    assert len(bounds) == 5 and bounds[0][0] == 0 and bounds[-1][0] <= max(longest, 15) <= bounds[-1][1]
    assert [low for low, _ in bounds[1:]] == [high + 1 for _, high in bounds[:-1]]
    assert [high + 1 for _, high in bounds[1:]] == [2 * low for low, _ in bounds[1:]]
    assert evaluation.depth_label(bounds[2][1], longest) == [*labels][2]


@pytest.mark.parametrize("seed", range(20))
def test_repetition_follows_its_definition(seed: int) -> None:
    draws = random.Random(seed)
    ids = [draws.randrange(3) for _ in range(draws.randrange(1, 40))]
    ids += [draws.randrange(9) for _ in range(draws.randrange(1, 5))] * draws.randrange(1, 9)
    for place, label in enumerate(repetition(ids)):
        before = [ids[at : at + 3] for at in range(place - 2)]
        assert label == (SEEN if ids[max(0, place - 2) : place + 1] in before else NEW), place


def test_sums_are_those_of_every_position() -> None:
    """Three texts in two blocks, one of them in two parts, values in chunks: means by label, counted one by one."""
    draws = numpy.random.default_rng(0)
    texts = [draws.integers(0, 6, size).tolist() for size in (30, 50, 90)]
    blocks = pack([(text, first) for text, first in zip(texts, (5, 1, 40), strict=True)], 90, True)
    sliced = evaluation.SlicedValues.of(blocks)
    repeated: list[bool] = []
    values, expected = [], dict[tuple[str, str], list[tuple[int, float]]]()
    for block, document, here in scored_documents(blocks):
        own = (blocks.documents[block] == document).nonzero()[:, 0].tolist()
        number = blocks.number(block, document)
        ids = blocks.ids[block][own].tolist()
        depths = [evaluation.depth_label(place, 89) for place in range(len(ids))]
        names = {"depth": depths, "repetition": repetition(ids)}
        places = here.nonzero()[:, 0].tolist()
        repeated += [names["repetition"][own.index(place) + 1] == SEEN for place in places]
        least, most = torch.from_numpy(draws.random((2, len(places), len(evaluation.METRICS))))
        for cut in (slice(0, 7), slice(7, None)):
            values.append(("draft", number, least[cut], most[cut], 0))
        for row, place in enumerate(places):
            middle = float(least[row, 2] + most[row, 2]) / 2
            for name, labels in names.items():
                expected.setdefault((name, labels[own.index(place) + 1]), []).append((number, middle))
    assert [*sliced.watch(values)] == values and len(blocks) == 2
    assert repeated_next(blocks).tolist() == repeated and len({*repeated}) == 2
    results = sliced.results("acceptance_sampling")
    assert {one.of for one in results} == {"depth", "repetition"}
    for one in results:
        own = expected[one.of, one.label]
        assert one.tokens == len(own) and one.acceptance["draft"].mean == pytest.approx(
            sum(v for _, v in own) / len(own)
        )
        assert one.acceptance["draft"].low <= one.acceptance["draft"].mean <= one.acceptance["draft"].high
        assert one.prompts == len({number for number, _ in own})


def test_a_pair_by_slices(
    finished: Path, world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weighted by their shares, the means of a slice are the mean of all. Long texts are read one after another, with
    the same figures."""
    pair = [world / "target", finished / "draft", "--prompts", world / "corpus", "--count", 4]
    report = json.loads(tiny.shown(capsys, "eval", *pair, "--kl", "-o", "json"))
    rows = report["groups"]
    assert {one["of"] for one in rows} == {"depth"}  # random models repeat nothing
    for draft, every in report["domains"]["answers"].items():
        assert sum(one["tokens"] for one in rows) == every["tokens"]
        mean = sum(one["tokens"] * one["acceptance"][draft]["mean"] for one in rows) / every["tokens"]
        assert mean == pytest.approx(every["acceptance_sampling"]["mean"], abs=1e-6)
    monkeypatch.setattr(evaluation, "LONGEST_BLOCK", 0)
    text = tiny.shown(capsys, "eval", *pair, "--kl")
    assert "tokens before it: " in text and "Nothing beyond 192 tokens was measured, and the models take 512" in text
    shown = f"{100 * report['domains']['answers']['draft']['acceptance_sampling']['mean']:.1f} % ["
    assert f"| acceptance probability, rejection sampling | {shown}" in text
