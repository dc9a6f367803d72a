"""Trees that are chosen beforehand: sizes and shapes against brute force, and the tally they come from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import TableModel
from test_configurations import HOT, settings_with
from toys import random_prompts, toy

from distill.decoding.calibration import Recorder, predicted
from distill.decoding.configured import (
    Fitted,
    check_configurations,
    guesses,
    lossy_reason,
    make_drafter,
    names_of_fits,
    table_calibration,
    title_with_tree,
)
from distill.decoding.costs import NO_STEPS, PaidCosts, StepCosts
from distill.decoding.decode import Decoded, Round, decode_text, plain
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import ROOT, Proposal
from distill.decoding.ngrams import NGramTable, count_ngrams
from distill.decoding.rules import GREEDY, Rules
from distill.decoding.trees import RankTally, Shape, TreeDrafter, best_first, expected_accepted
from distill.engines.loaded import LoadedPair, with_rows
from distill.engines.torch.model import TorchModel
from distill.errors import DataError, RecipeError
from distill.files import read_json, read_result, write_json
from distill.measuring import calibrate, compare
from distill.measuring.identity import Identity, Rounding
from distill.measuring.measure import ROWS
from distill.measuring.speedup_results import ChosenTree, PairMeasured, SpeedupReport
from distill.measuring.timing import PairTexts, Predictions, with_prediction
from distill.recipe import Configuration, Speedup, dump_recipe, load_recipe
from distill.sampler import Sampler

CHOSEN = [
    Configuration(drafter="tree", length=4),
    Configuration(drafter="tree", calibration="none"),
    Configuration(drafter="tree", shape="static"),
    Configuration(drafter="tree", shape="static", nodes=6, length=3),
]
COSTS = StepCosts(tuple(1.0 + 0.05 * m for m in range(12)), 0.05, 0.07)


@pytest.fixture(scope="module")
def pair() -> tuple[TableModel, TableModel]:
    target = TableModel(12, 3, memory=2, sharpness=1.5)
    return target, target.near(0.8, 4)


def forests(nodes: int, depth: int, ranks: int = 9) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every ordered forest of `nodes` nodes in at most `depth` levels of up to `ranks`, as its nodes' rank paths."""

    def grow(left: int, levels: int, above: tuple[int, ...], rank: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if left == 0:
            yield ()
        elif levels and rank < ranks:
            here = (*above, rank)
            for own in range(left):
                for below in grow(own, levels - 1, here, 0):
                    for rest in grow(left - 1 - own, levels, above, rank + 1):
                        yield (here, *below, *rest)

    return grow(nodes, depth, (), 0)


def test_forests_are_counted_right() -> None:
    assert [len({*forests(n, 9)}) for n in range(8)] == [1, 1, 2, 5, 14, 42, 132, 429]  # Catalan
    assert len([*forests(4, 1)]) == 1 and len([*forests(4, 2)]) == 8


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.integers(1, 7), st.randoms(use_true_random=False))
def test_the_static_shape_is_the_best_of_all(rates: list[float], depth: int, draws: random.Random) -> None:
    """All shapes of up to seven nodes, each priced by itself on a jagged curve."""
    costs = StepCosts(tuple(draws.uniform(1, 3) for _ in range(8)), draws.uniform(0, 0.3), 0.4, draws.uniform(0, 0.2))

    def price(forest: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
        tokens = 1.0
        for path in forest:
            chance = 1.0
            for rank in path:
                chance *= rates[rank]
            tokens += chance
        levels = max((len(path) for path in forest), default=0)
        beyond = costs.overhead + levels * costs.draft if levels else 0.0
        return tokens, costs.target[len(forest)] + beyond

    speeds = {n: max((t / s for t, s in map(price, forests(n, depth, len(rates)))), default=0.0) for n in range(8)}
    shapes = calibrate.best_shapes(rates, range(1, 8), depth, costs)
    room = min(7, sum(len(rates) ** level for level in range(1, depth + 1)))
    assert sorted(shapes) == [*range(1, room + 1)]
    seconds, expected = {}, {0: 1.0} | {n: 1 + expected_accepted(shape, rates) for n, shape in shapes.items()}
    for n, shape in shapes.items():
        paths: list[tuple[int, ...]] = []
        for parent, rank in zip(shape.parents, shape.ranks, strict=True):
            paths.append((*(() if parent == ROOT else paths[parent]), rank))
        tokens, seconds[n] = price(tuple(paths))
        assert tokens / seconds[n] == pytest.approx(speeds[n], rel=1e-12) and max(shape.depths) <= depth
        assert expected[n] == pytest.approx(tokens, rel=1e-12)
    trees: dict[int, int | Shape] = {0: Shape(()), **shapes}
    found = calibrate.choose_tree("a title", trees, expected, seconds, costs)
    assert found.tokens / found.seconds == pytest.approx(max(speeds.values()), rel=1e-12)
    assert found.speedup == pytest.approx(costs.target[0] * max(speeds.values()), rel=1e-12)
    assert found.tree == trees[found.nodes] and found.parents == list(trees[found.nodes].parents)


def rounds_of(values: list[float]) -> dict[int, float]:
    """The expected tokens of a round of n nodes, of which the first n have these values."""
    return dict(enumerate(accumulate(values, initial=1.0)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=15), st.randoms(use_true_random=False))
def test_the_number_of_nodes_is_the_best_of_all(values: list[float], draws: random.Random) -> None:
    values = sorted(values, reverse=True)
    costs = StepCosts(tuple(draws.uniform(1, 3) for _ in range(draws.randint(2, 16))), 0.1, 0.1)
    seconds = {n: draws.uniform(1, 4) for n in calibrate.SIZES if n <= len(values) and draws.random() < 0.8}
    found = calibrate.choose_tree("a title", {n: n for n in (0, *calibrate.SIZES)}, rounds_of(values), seconds, costs)
    rates = {0: 1 / costs.target[0]}
    for n, taken in seconds.items():
        if n < len(costs.target):
            rates[n] = (1 + sum(values[:n])) / max(taken, costs.target[n])  # no faster than the target's step alone
    assert rates[found.nodes] == pytest.approx(max(rates.values()), rel=1e-12)
    assert found.speedup == pytest.approx(max(rates.values()) * costs.target[0], rel=1e-12)
    assert [row.nodes for row in found.compared] == sorted(rates)
    for row in found.compared:
        rate = row.tokens / (row.target_seconds + row.other_seconds)
        assert rate == pytest.approx(rates[int(row.nodes)], rel=1e-12)
    assert title_with_tree("a title", found.nodes).endswith(f": {found.nodes} node" + "s" * (found.nodes != 1))
    assert ("no tree is drafted" in calibrate.explain_tree(found, "validation text", None)) == (found.nodes == 0)


def test_the_values_are_those_of_the_trees_that_a_text_meets(
    pair: tuple[TableModel, TableModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of a greedy decoder with the same trees, each value from the draft's table itself."""
    target, draft = pair
    one = Configuration(drafter="tree", calibration="none", length=3)

    def make(size: int) -> TreeDrafter:
        drafter = make_drafter(one, draft, GREEDY, lambda: 0.0, tree=size)
        assert isinstance(drafter, TreeDrafter)
        return drafter

    texts, starts = [], []
    for prompt in random_prompts(3, 12, 5):
        result = decode_text(target, make(7), prompt, 50, Rules())
        texts.append((prompt, result.tokens[:40]))  # the rounds behind are of smaller trees
        text = [*prompt, *result.tokens]
        starts += [text[: r.depth + 1] for r in result.rounds if r.depth + 1 < len(prompt) + 40]
    values = [
        best_first(
            draft.table[draft.place(start)].softmax(-1), draft_distributions(draft, start), 7, branching=16, depth=3
        )[1]
        for start in starts
    ]
    assert len(values) > 20
    for most, told in ((1000, values), (5, values[:5])):
        monkeypatch.setattr(calibrate, "ROUNDS", most)
        found = calibrate.mean_values(make(7), texts, 7, ())
        assert found == pytest.approx([sum(value[n] for value in told) / len(told) for n in range(7)], abs=1e-9)
    assert calibrate.mean_values(make(7), [([1, 2], [3])], 7, ()) == []


def draft_distributions(draft: TableModel, start: list[int]) -> Any:
    """`expand` of best_first by looking the distributions up in the table."""
    paths: list[list[int]] = []

    def expand(tokens: list[int], parents: list[int]) -> torch.Tensor:
        above = [start if parent == ROOT else paths[parent] for parent in parents]
        new = [[*path, token] for path, token in zip(above, tokens, strict=True)]
        paths.extend(new)
        return torch.stack([draft.table[draft.place(path)].softmax(-1) for path in new])

    return expand


def test_rounds_are_timed_by_what_they_drafted(pair: tuple[TableModel, TableModel]) -> None:
    target = TableModel(12, 3, memory=2, sharpness=1.5, capacity=16)
    draft = target.near(0.8, 4)
    asked: list[int] = []

    def make(size: Any) -> TreeDrafter:
        asked.append(size)
        return TreeDrafter(draft, GREEDY, lambda: 0.0, size, branching=4)

    # After a prompt of 13 a context of 16 has room for one level, which has four nodes: there is no round of nine.
    prompts = [[i % 12 for i in range(13)], [i % 12 for i in range(13, 0, -1)]]
    seconds = calibrate.time_rounds(target, draft, prompts, 4, Rules(), make, {1: 1, 2: 2, 9: 9})
    assert set(seconds) == {1, 2} and min(seconds.values()) > 0 and asked == [1, 2, 9] * 2
    assert calibrate.choose_tree("a title", {0: 0, 9: 9}, rounds_of([1.0] * 9), seconds, COSTS).nodes == 0
    # What was asked for is timed and told, though plain decoding were faster.
    told = calibrate.choose_tree("a title", {2: 2}, rounds_of([0.1, 0.0]), {2: 9.0}, COSTS)
    assert told.speedup == pytest.approx(1.1 * 1.0 / 9.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(0, 10**6), st.booleans())
def test_trees_that_cannot_be_the_fastest_are_not_timed(values: list[float], seed: int, plainly: bool) -> None:
    """The choice is the one among all."""
    values, draws = sorted(values, reverse=True), random.Random(seed)
    trees: dict[int, Any] = {n: n for n in range(1, len(values) + 1)}
    whole = {n: COSTS.target[n] + COSTS.draft + draws.uniform(0, 0.5) for n in trees}
    timed: list[int] = []

    def timing(some: Any) -> dict[int, float]:
        timed.extend(some)
        return {n: whole[n] for n in some}

    tokens = rounds_of(values)
    seconds = calibrate.time_worthwhile(timing, trees, tokens, COSTS, 1 / COSTS.target[0] if plainly else 0.0)
    assert seconds == {n: whole[n] for n in timed} and (timed or plainly)
    named = {**trees, **({0: 0} if plainly else {})}
    found, expected = (calibrate.choose_tree("t", named, tokens, taken, COSTS) for taken in (seconds, whole))
    assert found.tokens / found.seconds == pytest.approx(expected.tokens / expected.seconds)
    assert not (plainly and timed and sum(values) == 0)


def test_a_chosen_tree_is_predicted_by_the_tokens_that_its_rounds_gave() -> None:
    """Not by those expected of the text on which it was chosen; a lookup before it drafts rounds that cost other."""
    alone, behind_lookup = Configuration(drafter="tree"), Configuration(drafter="lookup+tree", length=4)
    rounds = [Round(9, 2, 1, 9.0), Round(9, 2, 0, 9.0), Round(9, 2, 1, 9.0)]  # (accepted + 1): 5 tokens in 3 rounds
    texts = [compare.TimedText(0, "plain", 9.0, Decoded(tokens=[1] * 31))]
    texts += [
        compare.TimedText(0, one.title, 9.0, Decoded(tokens=[1] * 31, rounds=rounds)) for one in (alone, behind_lookup)
    ]
    paid = PaidCosts(1.0, {}, NO_STEPS, NO_STEPS, target_prompt=0.1, draft_prompt=0.05)
    given = PairTexts([[1] * 10], [])
    choices = {one.title: ChosenTree(one.title, 2, None, 2.5, 1.2, 2.5 / 1.2, []) for one in (alone, behind_lookup)}
    no_chains = Predictions(None, None, given.prompts, [], 31, [])  # type: ignore[arg-type]

    def predicted(one: Configuration, choice: dict[str, ChosenTree]) -> tuple[int | None, float | None]:
        ready = compare.TimedConfiguration(one, Rules(), lambda: None)  # type: ignore[arg-type, return-value]
        plain = compare.TimedConfiguration(Configuration(drafter="none"), Rules(), None)
        row = compare.measurements(texts, [plain, ready], {}, PairMeasured("p", "b"))[1]
        found = with_prediction(row, ready, given, texts, choice, paid, no_chains)
        return found.nodes, found.predicted

    assert predicted(alone, choices) == (2, pytest.approx((10 * 0.1 + 30) / (10 * 0.15 + 30 / (5 / 3) * 1.2)))
    assert predicted(behind_lookup, choices) == (2, None) and predicted(alone, {}) == (None, None)
    plainly = {alone.title: ChosenTree(alone.title, 0, None, 1.0, 1.0, 1.0, [])}
    assert predicted(alone, plainly) == (0, 1.0)
    sentence = calibrate.explain_tree(choices[alone.title], "8 texts", 5 / 3)
    assert "2.50 tokens in 1200.00 ms a round, 2.08× plain decoding after the prompt." in sentence
    assert sentence.endswith(" The measured rounds had 1.67 tokens.")


def test_a_tree_follows_a_text() -> None:
    tree = Proposal([5, 6, 7, 5, 8], [ROOT, ROOT, 0, 1, 2])
    assert [calibrate.follow(tree, text) for text in ([5, 7, 8, 1], [5, 7], [6, 5, 5], [7], [])] == [3, 2, 2, 0, 0]


def test_trees_that_are_chosen_decode_the_plain_text(pair: tuple[TableModel, TableModel]) -> None:
    target, draft = pair
    settings = settings_with(CHOSEN)
    assert check_configurations(settings.speedup, HOT, CHOSEN) == []
    assert len({one.title for one in CHOSEN}) == len(CHOSEN)
    texts = random_prompts(4, 12, 2)
    written = [*zip(texts, calibrate.write_texts(target, texts, 30, Rules()), strict=True)]
    rates = calibrate.record_rounds(draft, written, ())[1].rates()
    # Seconds of steps that are far above what these tables take: every tree then pays, as on a large target.
    choices = calibrate.choose_trees(settings, target, draft, written, (), Fitted(COSTS), rates, (4, 8))
    assert [choice.configuration for choice in choices] == [one.title for one in CHOSEN]
    assert all(choice.nodes > 1 and choice.speedup > 1 for choice in choices) and choices[3].nodes == 6
    trees: dict[str, Any] = {choice.configuration: choice.tree for choice in choices}
    prepared = compare.prepare_all(settings, draft, (), Fitted(COSTS, {}, trees))
    prompts = random_prompts(6, 12, 1)
    decoded = compare.time_texts(target, draft, prompts, 30, prepared, "prompts")
    identities = compare.judge_identity(target, prompts, decoded, prepared, Rounding(0))
    assert all(identity == Identity(identical=6) for identity in identities.values())
    for choice in choices:
        title = title_with_tree(choice.configuration, choice.tree)
        rounds = [r for text in decoded if text.title == title for r in text.decoded.rounds]
        drafted = [r.drafted for r in rounds]
        assert max(drafted) == choice.nodes and drafted.count(choice.nodes) > len(drafted) / 2
        assert sum(r.accepted for r in rounds) > 0.05 * len(rounds)
    # No nodes is plain decoding, and the draft is not asked.
    nothing = compare.prepare_all(settings_with(CHOSEN[:1], ()), draft, (), Fitted(COSTS, {}, {CHOSEN[0].title: 0}))[1:]
    plainly = compare.time_texts(target, draft, prompts[:1], 8, nothing, "prompts")
    assert plainly and all(r.drafted == 0 for text in plainly for r in text.decoded.rounds)


def test_the_tally_counts_ranks_of_what_the_target_wrote(tmp_path: Path, pair: tuple[TableModel, TableModel]) -> None:
    target, draft = pair
    prompts = random_prompts(3, 12, 7)
    written = [*zip(prompts, calibrate.write_texts(target, prompts, 12, Rules()), strict=True)]
    own, tally = calibrate.record_rounds(draft, written, ())
    taken = [0] * 12
    for prompt, new in written:
        assert len(new) == 12
        for count in range(1, 12):
            context = [*prompt, *new[:count]]
            order = draft.table[draft.place(context)].argsort(descending=True).tolist()
            taken[order.index(new[count])] += 1
    assert tally == RankTally([33] * calibrate.RANKS, taken[: calibrate.RANKS]) and sum(taken[1 : calibrate.RANKS]) > 0
    path = tmp_path / "calibration.json"
    write_json(path, calibrate.calibrate(own, "here", tally))
    assert calibrate.read_ranks(read_json(path), "here") == tally
    calibrate.save_texts(tmp_path / "validation.json", written)
    assert calibrate.load_texts(tmp_path / "validation.json") == written
    write_json(path, calibrate.calibrate(own, "here"))
    with pytest.raises(DataError, match="does not hold what this version writes"):
        calibrate.load_texts(path)
    with pytest.raises(DataError, match="no acceptance by rank"):
        calibrate.read_ranks(read_json(path), "here")
    # A text that ends with its first token has no place to look at.
    assert calibrate.record_rounds(draft, [([1], [2])], ()) == ([[]], RankTally())


@pytest.mark.parametrize("ends", [(), (3, 7)])
def test_recorded_rounds_are_those_of_decoding(ends: tuple[int, ...], pair: tuple[TableModel, TableModel]) -> None:
    """The draft's distributions along the target's texts show what every round judges, without a round."""
    target, draft = pair
    rules, prompts = Rules(ends=ends), random_prompts(6, 12, 5)
    written = [*zip(prompts, calibrate.write_texts(target, prompts, 40, rules), strict=True)]
    judged: list[list[list[Any]]] = []
    for prompt, new in written:
        recorder = Recorder(calibrate.LENGTH)
        drafter = ModelDrafter(draft, recorder, rules.sampler, rules.random)
        assert decode_text(target, drafter, prompt, 40, rules).tokens == new
        judged.append([shown for one in recorder.rounds if (shown := one.judged())])
    own, _ = calibrate.record_rounds(draft, written, ends)
    assert [[one.judged() for one in rounds] for rounds in own] == judged
    assert sum(map(len, judged)) > (10 if ends else 60)


def test_texts_are_written_together(pair: tuple[TableModel, TableModel]) -> None:
    """Those of plain decoding; some models take several at once."""
    model, prompts = TorchModel(toy(seed=3)), random_prompts(2 * ROWS + 3, 61, 5)
    assert with_rows(model, 2) is not None and with_rows(pair[0], 2) is None
    for target in (model, pair[0]):
        short = [[token % 12 for token in prompt] for prompt in prompts] if target is pair[0] else prompts
        written = calibrate.write_texts(target, short, 9, Rules(ends=(5,)))
        assert written == [plain(target, prompt, 9, (5,)).tokens for prompt in short]


def test_a_table_is_calibrated_for_each_sampler(pair: tuple[TableModel, TableModel]) -> None:
    """On texts new to the fits: drawn ones hold more surprises than greedy ones, and each fit tells its own."""
    target, samplers = pair[0], {"greedy": GREEDY, "recipe": Sampler.of(HOT)}

    def written(sampler: Sampler, seed: int) -> list[tuple[list[int], list[int]]]:
        rules, prompts = Rules(sampler, "token", (), random.Random(seed).random), random_prompts(60, 12, seed)
        return [*zip(prompts, calibrate.write_texts(target, prompts, 24, rules), strict=True)]

    ngrams = NGramTable(count_ngrams([[*prompt, *new] for prompt, new in written(GREEDY, 1)]), {})
    tables = [Configuration(drafter="table", rule="expected-value", sampler=name) for name in samplers]
    settings, prompts = settings_with(tables, new_tokens=24), random_prompts(60, 12, 2)
    loaded = LoadedPair("pytorch", "target", target, target, [])
    made = calibrate.calibrate_pair(loaded, prompts, settings, "here", "validation", ngrams)
    assert [len(new) for _, new in made.texts] == [24] * 60
    fits = calibrate.read_calibrations(made.table, "here")
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


def test_settings_of_trees_that_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"(?s)costs of 17 tokens a step.*speedup.max_tokens=17"):
        check_configurations(Speedup(), HOT, [Configuration(drafter="tree", shape="static", nodes=16)])
    for one in CHOSEN:
        hot = one.model_copy(update={"sampler": "recipe"})
        assert lossy_reason(one, GREEDY) is None and lossy_reason(hot, Sampler(0.8)) is None
        assert "best token" in str(lossy_reason(hot.model_copy(update={"verifier": "greedy"}), Sampler(0.8)))
        assert one.needs_tree_choice and one.needs_costs


@pytest.mark.slow
def test_the_stage_chooses_trees_on_its_own_curves(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In both backends: what is chosen is recorded, told, bounded by the curve, and lossless."""
    changes = """
    configurations=[{drafter: tree}, {drafter: tree, shape: static}, {drafter: tree, widths: [2, 1], sampler: recipe}]
    prompts=2
    lengths=[2]
    new_tokens=8
    calibration_prompts=4
    """
    config = copied / "config.yaml"
    recipe = load_recipe(config, [f"speedup.{change.strip()}" for change in changes.strip().splitlines()])
    config.write_text(dump_recipe(recipe))
    page = tiny.shown(capsys, "speedup", "tiny", "--runs", copied.parent)
    report = read_result(copied / "speedup.json", SpeedupReport)
    chosen = [one.title for one in recipe.speedup.configurations if one.needs_tree_choice]
    assert [part.backend for part in report.parts] == list(recipe.speedup.backends)
    for part in report.parts:
        assert [tree.configuration for tree in part.trees] == chosen
        for tree in part.trees:
            assert 0 <= tree.nodes < recipe.speedup.max_tokens and tree.speedup >= 1
            assert (tree.parents is None) == ("static" not in tree.configuration)
            title = f"{tree.configuration}: {tree.nodes} node"
            (row,) = [row for row in part.measurements if row.configuration.startswith(title)]
            assert row.configuration in page and row.nodes == tree.nodes and row.predicted and row.tokens_per_round
            # The prediction is of the tokens that these rounds gave, and of the prompt, where nothing is gained.
            of_rounds = tree.speedup * row.tokens_per_round / tree.tokens
            assert row.predicted == 1 if not tree.nodes else 0 < row.predicted <= max(1, of_rounds)
            assert row.different == 0 and row.lossy is None
        drawn = [row for row in part.measurements if row.configuration.startswith("drawn tree 2×1, verifier token")]
        assert [(row.verifier, row.lossy) for row in drawn] == [("token", None)] and drawn[0].acceptance is not None
    assert page.count("validation text") >= len(chosen) * len(report.parts)


def test_drawn_trees_are_verified_by_what_their_draws_ask_for() -> None:
    target = TableModel(12, 3)
    for verifier, kind in ((None, "sampled"), ("token", "sampled"), ("distinct", "distinct")):
        one = Configuration(drafter="tree", widths=(3, 2, 1), verifier=verifier, sampler="recipe")
        assert not (one.needs_tree_choice or one.needs_calibration or one.ranked or one.needs_costs)
        assert one.title == f"drawn tree 3×2×1, verifier {verifier or 'token'}, sampled"
        drafter = make_drafter(one, target, Sampler(0.8), random.Random(0).random)
        assert isinstance(drafter, TreeDrafter) and drafter.kind == kind and len(drafter.shape or ()) == 15
        assert lossy_reason(one, Sampler(0.8)) is None
        drafter.begin([1, 2])
        proposal = drafter.propose([1, 2, 3], 8, ())
        assert len(proposal.tokens) == one.drawn_nodes == 15 and proposal.children()[ROOT] == [0, 1, 2]
        assert (len({proposal.tokens[node] for node in proposal.children()[ROOT]}) == 3) or kind == "sampled"
    with pytest.raises(ValueError, match="draws nothing"):
        lossy_reason(Configuration(drafter="tree", widths=(2,), verifier="token"), GREEDY)
    for refused in ({"nodes": 4}, {"shape": "static"}, {"length": 3}, {"calibration": "none"}, {"drafter": "draft"}):
        with pytest.raises(ValueError, match="is not read by drafter"):
            Configuration(**({"drafter": "tree", "widths": (2, 1)} | refused))  # type: ignore[arg-type]
    for widths in ((0,), (2, -1), (8, 8)):
        with pytest.raises(ValueError, match="1 to 63 are possible"):
            Configuration(drafter="tree", widths=widths)
