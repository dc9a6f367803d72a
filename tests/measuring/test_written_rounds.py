"""Rounds of texts that the target wrote, and drawn trees."""

from __future__ import annotations

import random

import pytest
from table_model import TableModel
from toys import random_prompts, toy

from distill.decoding.configured import lossy_reason, make_drafter
from distill.decoding.decode import decode_text, plain
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed
from distill.decoding.proposals import ROOT
from distill.decoding.rules import GREEDY, Rules
from distill.decoding.trees import TreeDrafter
from distill.engines.loaded import with_rows
from distill.engines.torch.model import TorchModel
from distill.measuring.evaluation import LENGTH, ROWS, record_rounds, write_texts
from distill.recipe import Configuration, Sampler


@pytest.fixture(scope="module")
def pair() -> tuple[TableModel, TableModel]:
    target = TableModel(12, 3, memory=2, sharpness=1.5)
    return target, target.near(0.8, 4)


def test_rounds_of_a_text_without_drafted_places(pair: tuple[TableModel, TableModel]) -> None:
    assert record_rounds(pair[1], [([1], [2])], ()) == [[]]


@pytest.mark.parametrize("ends", [(), (3, 7)])
def test_recorded_rounds_are_those_of_decoding(ends: tuple[int, ...], pair: tuple[TableModel, TableModel]) -> None:
    """The draft's distributions along the target's texts show what every round judges, without a round."""
    target, draft = pair
    rules, prompts = Rules(ends=ends), random_prompts(6, 12, 5)
    written = [*zip(prompts, write_texts(target, prompts, 40, rules), strict=True)]
    decoded: list[list[tuple[int, int]]] = []
    for prompt, new in written:
        drafter = ModelDrafter(draft, Fixed(LENGTH), rules.sampler, rules.random)
        result = decode_text(target, drafter, prompt, 40, rules)
        assert result.tokens == new
        decoded.append([(min(one.drafted, one.accepted + 1), one.accepted) for one in result.rounds])
    own = [[(one.drafted, one.accepted) for one in rounds] for rounds in record_rounds(draft, written, ends)]
    assert own == decoded and sum(map(len, own)) > (10 if ends else 60)


def test_texts_are_written_together(pair: tuple[TableModel, TableModel]) -> None:
    """Those of plain decoding; some models take several at once."""
    model, prompts = TorchModel(toy(seed=3)), random_prompts(2 * ROWS + 3, 61, 5)
    assert with_rows(model, 2) is not None and with_rows(pair[0], 2) is None
    for target in (model, pair[0]):
        short = [[token % 12 for token in prompt] for prompt in prompts] if target is pair[0] else prompts
        written = write_texts(target, short, 9, Rules(ends=(5,)))
        assert written == [plain(target, prompt, 9, (5,)).tokens for prompt in short]


def test_drawn_trees_are_verified_by_what_their_draws_ask_for() -> None:
    target = TableModel(12, 3)
    for verifier, kind in ((None, "sampled"), ("token", "sampled"), ("distinct", "distinct")):
        one = Configuration(drafter="tree", widths=(3, 2, 1), verifier=verifier, sampler="recipe")
        assert not one.needs_costs
        assert one.described == f"drafter tree, widths 3×2×1, verifier {verifier or 'token'}, sampler recipe"
        drafter = make_drafter(one, target, Sampler(temperature=0.8), random.Random(0).random)
        assert isinstance(drafter, TreeDrafter) and len(drafter.shape or ()) == 15
        assert drafter.distinct == (kind == "distinct")
        assert lossy_reason(one, Sampler(temperature=0.8)) is None
        drafter.begin([1, 2])
        proposal = drafter.propose([1, 2, 3], 8, ())
        assert len(proposal.tokens) == one.most_nodes == 15 and proposal.children()[ROOT] == [0, 1, 2]
        assert (len({proposal.tokens[node] for node in proposal.children()[ROOT]}) == 3) or kind == "sampled"
    with pytest.raises(ValueError, match="draws nothing"):
        lossy_reason(Configuration(drafter="tree", widths=(2,), verifier="token"), GREEDY)
    for refused in ({"nodes": 4}, {"length": 3}, {"drafter": "draft"}):
        with pytest.raises(ValueError, match="is not read by drafter"):
            Configuration(**({"drafter": "tree", "widths": (2, 1)} | refused))  # type: ignore[arg-type]
    for widths in ((0,), (2, -1), (8, 8)):
        with pytest.raises(ValueError, match="1 to 63 are possible"):
            Configuration(drafter="tree", widths=widths)
