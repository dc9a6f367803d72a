"""Calibrations: the rounds they are fitted on, and those of tables; and drawn trees."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from table_model import TableModel
from test_configurations import HOT, settings_with
from toys import random_prompts, toy

from distill.decoding.calibration import UNFITTED, Recorder, predicted
from distill.decoding.configured import DrafterInputs, configured_sampler, lossy_reason, make_drafter, name_of_fit
from distill.decoding.decode import decode_text, plain
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import ROOT
from distill.decoding.ngrams import NGramTable, count_ngrams
from distill.decoding.rules import GREEDY, Rules
from distill.decoding.table_drafter import guesses, names_of_fits, table_calibration
from distill.decoding.trees import TreeDrafter
from distill.engines.loaded import LoadedPair, with_rows
from distill.engines.torch.model import TorchModel
from distill.measuring import speedup
from distill.measuring.evaluation import ROWS, decode_rounds
from distill.recipe import Configuration
from distill.sampler import Sampler


@pytest.fixture(scope="module")
def pair() -> tuple[TableModel, TableModel]:
    target = TableModel(12, 3, memory=2, sharpness=1.5)
    return target, target.near(0.8, 4)


def test_rounds_of_a_text_without_drafted_places(pair: tuple[TableModel, TableModel]) -> None:
    assert speedup.record_rounds(pair[1], [([1], [2])], ()) == [[]]


@pytest.mark.parametrize("ends", [(), (3, 7)])
def test_recorded_rounds_are_those_of_decoding(ends: tuple[int, ...], pair: tuple[TableModel, TableModel]) -> None:
    """The draft's distributions along the target's texts show what every round judges, without a round."""
    target, draft = pair
    rules, prompts = Rules(ends=ends), random_prompts(6, 12, 5)
    written = [*zip(prompts, speedup.write_texts(target, prompts, 40, rules), strict=True)]
    judged: list[list[list[Any]]] = []
    for prompt, new in written:
        recorder = Recorder(speedup.LENGTH)
        drafter = ModelDrafter(draft, recorder, rules.sampler, rules.random)
        assert decode_text(target, drafter, prompt, 40, rules).tokens == new
        judged.append([one.judged() for one in recorder.rounds])
    own = speedup.record_rounds(draft, written, ends)
    assert [[one.judged() for one in rounds] for rounds in own] == judged
    assert sum(map(len, judged)) > (10 if ends else 60)


def test_texts_are_written_together(pair: tuple[TableModel, TableModel]) -> None:
    """Those of plain decoding; some models take several at once."""
    model, prompts = TorchModel(toy(seed=3)), random_prompts(2 * ROWS + 3, 61, 5)
    assert with_rows(model, 2) is not None and with_rows(pair[0], 2) is None
    for target in (model, pair[0]):
        short = [[token % 12 for token in prompt] for prompt in prompts] if target is pair[0] else prompts
        written = speedup.write_texts(target, short, 9, Rules(ends=(5,)))
        assert written == [plain(target, prompt, 9, (5,)).tokens for prompt in short]


def test_a_table_is_calibrated_for_each_sampler(pair: tuple[TableModel, TableModel]) -> None:
    """On texts new to the fits: drawn ones hold more surprises than greedy ones, and each fit tells its own."""
    target, samplers = pair[0], {"greedy": GREEDY, "recipe": Sampler.of(HOT)}

    def written(sampler: Sampler, seed: int) -> list[tuple[list[int], list[int]]]:
        rules, prompts = Rules(sampler, "token", (), random.Random(seed).random), random_prompts(60, 12, seed)
        return [*zip(prompts, speedup.write_texts(target, prompts, 24, rules), strict=True)]

    ngrams = NGramTable(count_ngrams([[*prompt, *new] for prompt, new in written(GREEDY, 1)]), {})
    tables = [Configuration(drafter="table", rule="expected-value", sampler=name) for name in samplers]
    settings, prompts = settings_with(tables, new_tokens=24), random_prompts(60, 12, 2)
    loaded = LoadedPair("pytorch", "target", target, target, [])
    made = speedup.calibrate_pair(loaded, prompts, settings, "validation", ngrams)
    fits = made.fits
    off = {}
    for text, sampler in samplers.items():
        rounds = [one for prompt, new in written(sampler, 3) for one in guesses(ngrams, prompt, new)[0]]
        for fit, other in samplers.items():
            calibration = table_calibration(fits, other)
            assert calibration is not None and calibration.others is not None
            chances, right = predicted(calibration.first, rounds)
            off[text, fit] = sum(chances) / len(chances) - sum(right) / len(right)
    assert abs(off["greedy", "greedy"]) < 0.04 and abs(off["recipe", "recipe"]) < 0.04
    assert off["recipe", "greedy"] > 0.1
    known = {name: fits[name] for name in names_of_fits(False)}
    assert table_calibration(known, samplers["recipe"]) == table_calibration(fits, GREEDY)
    assert table_calibration({}, GREEDY) is None


def test_a_draft_is_calibrated_for_each_sampler_and_verifier(pair: tuple[TableModel, TableModel]) -> None:
    """On rounds new to the fits, each tells its own; where no such one was fitted, the draft's probability counts."""
    hot, verifiers = Sampler.of(HOT), ("greedy", "token", "block", "match")
    made = [
        Configuration(rule="expected-value", verifier=one, sampler="greedy" if one == "greedy" else "recipe")
        for one in verifiers
    ]
    settings, loaded = settings_with(made, new_tokens=24), LoadedPair("pytorch", "target", *pair, [])
    found = speedup.calibrate_pair(loaded, random_prompts(30, 12, 2), settings, "validation", None)
    fits = DrafterInputs(calibrations=found.fits)
    off = {}
    for one in made:
        sampler = configured_sampler(one, HOT)
        rules = Rules(sampler, one.verified_by, random=random.Random(7).random)
        rounds = decode_rounds(*pair, random_prompts(30, 12, 3), 8, 24, rules, "rounds")
        for other in made:
            fit = fits.calibration(other, configured_sampler(other, HOT))
            chances, right = predicted(fit, [one for text in rounds for one in text])
            off[one.verified_by, other.verified_by] = sum(chances) / len(chances) - sum(right) / len(right)
    assert max(abs(off[one, one]) for one in verifiers) < 0.04, off
    assert min(abs(off[one, "greedy"]) for one in verifiers[1:]) > 0.06, off
    assert {name_of_fit(one, hot) for one in made[1:]} <= {*found.fits} and "uncalibrated, match" in found.words
    assert fits.calibration(made[1], replace(hot, top_k=3)) is UNFITTED
    assert name_of_fit(made[3], replace(hot, top_k=3)).startswith("features, match, ")


def test_drawn_trees_are_verified_by_what_their_draws_ask_for() -> None:
    target = TableModel(12, 3)
    for verifier, kind in ((None, "sampled"), ("token", "sampled"), ("distinct", "distinct")):
        one = Configuration(drafter="tree", widths=(3, 2, 1), verifier=verifier, sampler="recipe")
        assert not (one.needs_calibration or one.needs_costs)
        assert one.described == f"drafter tree, widths 3×2×1, verifier {verifier or 'token'}, sampler recipe"
        drafter = make_drafter(one, target, Sampler(0.8), random.Random(0).random)
        assert (
            isinstance(drafter, TreeDrafter)
            and drafter.distinct == (kind == "distinct")
            and len(drafter.shape or ()) == 15
        )
        assert lossy_reason(one, Sampler(0.8)) is None
        drafter.begin([1, 2])
        proposal = drafter.propose([1, 2, 3], 8, ())
        assert len(proposal.tokens) == one.most_nodes == 15 and proposal.children()[ROOT] == [0, 1, 2]
        assert (len({proposal.tokens[node] for node in proposal.children()[ROOT]}) == 3) or kind == "sampled"
    with pytest.raises(ValueError, match="draws nothing"):
        lossy_reason(Configuration(drafter="tree", widths=(2,), verifier="token"), GREEDY)
    for refused in ({"nodes": 4}, {"length": 3}, {"calibration": "none"}, {"drafter": "draft"}):
        with pytest.raises(ValueError, match="is not read by drafter"):
            Configuration(**({"drafter": "tree", "widths": (2, 1)} | refused))  # type: ignore[arg-type]
    for widths in ((0,), (2, -1), (8, 8)):
        with pytest.raises(ValueError, match="1 to 63 are possible"):
            Configuration(drafter="tree", widths=widths)
