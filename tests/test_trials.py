"""Trials of a recipe: what may be written, what is lossy, and that every one of them decodes the target's own text."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from table_model import TableModel
from toys import random_prompts

from distill.benchmark.arms import PLAIN_SAMPLED, make_arms, trial_rows
from distill.benchmark.calibrate import (
    FITS,
    Recorder,
    calibrate,
    load_calibrations,
    record_rounds,
    save_calibration,
    with_overhead,
)
from distill.benchmark.compare import PLAIN, judge_identity, run_trials
from distill.benchmark.distribution_test import homogeneity
from distill.benchmark.table import as_markdown, flat_rows
from distill.errors import DataError, RecipeError
from distill.recipe import Recipe, Trial, dump_recipe, load_recipe, parse_recipe
from distill.recipe.configuration import RULES
from distill.sampler import Sampler
from distill.speculative.calibration import Recorded
from distill.speculative.configured import check_trials, lossy_reason, make_drafter
from distill.speculative.cost import StepCosts
from distill.speculative.decode import GREEDY, Decoded, Rules, decode, plain
from distill.speculative.n_grams import NGramIndex
from distill.speculative.proposal import Features

COSTS = StepCosts(tuple(1.0 + 0.05 * m for m in range(17)), 0.05, 0.07)
WAYS = [
    *(Trial(rule=rule, length=6) for rule in RULES),
    Trial(rule="expected-value", calibration="power", online=True),
    Trial(drafter="lookup"),
    Trial(drafter="lookup+draft", rule="entropy", floor=0.2),
    Trial(drafter="tree", nodes=6, length=4),
    Trial(drafter="tree", nodes=5, calibration="none"),
    Trial(verifier="match"),
    Trial(verifier="block"),
]
FEATURES = Features(0.5, 0.25, 1.0)


def recipe_with(**speedup: Any) -> Recipe:
    return parse_recipe(
        {
            "name": "trials",
            "target": {"model": "./target"},
            "corpus": {"sources": [{"kind": "text", "path": "./text", "split": "test"}]},
            "sampler": {"temperature": 0.8, "top_k": 4},
            "eval": {"resamples": 100},
            "speedup": speedup,
        },
        "here",
    )


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"rule": "fixed", "p_min": 0.3}, "p_min is not read by drafter draft with rule fixed"),
        ({"drafter": "lookup", "rule": "beta"}, "drafter lookup has none"),
        ({"drafter": "draft", "nodes": 3}, "nodes is not read"),
        ({"rule": "expected-value", "calibration": "sequential", "online": True}, "learns nothing online"),
        ({"rule": "nonsense"}, "Input should be"),
    ],
)
def test_trials_that_are_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Trial(**raw)


def test_titles_differ_and_doubles_are_refused() -> None:
    assert len({way.title for way in WAYS}) == len(WAYS)
    with pytest.raises(RecipeError, match="listed twice"):
        recipe_with(trials=[{"length": 4}, {"length": 4}])


def test_a_recipe_survives_its_own_dump(tmp_path: Path) -> None:
    recipe = recipe_with(trials=[{"rule": "beta", "floor": 0.2}, {"drafter": "tree"}], grown_trials=[{"length": 3}])
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "config.yaml").speedup == recipe.speedup


def test_lossy_pairs_have_reasons_and_are_refused_unless_asked_for() -> None:
    hot = Sampler(0.8)
    after = Trial(rule="p_min-after", sampler="recipe")
    assert "no longer follows its distribution" in str(lossy_reason(after, hot))
    assert "best token" in str(lossy_reason(Trial(sampler="recipe", verifier="greedy"), hot))
    # The same rule is lossless where tokens are chosen without chance, or where the verifier asks for no distribution
    # of theirs.
    for lossless in (after.model_copy(update={"verifier": "match"}), Trial(rule="p_min", sampler="recipe")):
        assert lossy_reason(lossless, hot) is None
    assert all(lossy_reason(way, GREEDY) is None for way in WAYS)
    # Expected value drops what it drafted only where the draft is deterministic.
    assert lossy_reason(Trial(rule="expected-value", sampler="recipe"), hot) is None
    raw = {"trials": [after.model_dump(exclude_defaults=True)]}
    with pytest.raises(RecipeError, match=r"(?s)would change the target's distribution.*allow_lossy"):
        check_trials(recipe_with(**raw))
    (line,) = check_trials(recipe_with(**raw, allow_lossy=True))
    assert line.startswith("LOSSY trial `draft, p_min after 0.5, ≤ 8, verifier token, sampled`")
    with pytest.raises(RecipeError, match="no verifier `block` for trees"):
        check_trials(recipe_with(trials=[{"drafter": "tree", "verifier": "block", "sampler": "recipe"}]))


@pytest.fixture(scope="module")
def pair() -> tuple[TableModel, TableModel]:
    target = TableModel(12, 3, memory=2, sharpness=1.5)
    return target, target.near(0.8, 4)


def test_every_greedy_trial_decodes_the_plain_text(pair: tuple[TableModel, TableModel]) -> None:
    target, draft = pair
    prompts = random_prompts(6, 12, 1)
    own = record_rounds(target, draft, random_prompts(6, 12, 2), 40, Rules())
    fitted = {name: fit([one for r in own for one in r.rounds]) for name, fit in FITS.items()}
    arms = make_arms(recipe_with(), WAYS, draft, (), COSTS, fitted)
    trials = run_trials(target, draft, prompts, [2], 30, (), "prompts", arms)
    verdicts = judge_identity(target, prompts, trials, 0)
    assert set(verdicts) == {2, *(way.title for way in WAYS)}
    assert all(verdict == {"identical": 6, "excused": 0, "different": 0} for verdict in verdicts.values())
    rows = {row["way"]: row for row in trial_rows(recipe_with(), WAYS, arms, trials, verdicts)}
    drafted = {title for title, row in rows.items() if (row["tokens_per_round"] or 0) > 1.05}
    assert drafted == set(rows)  # each of them does draft, and is right now and then
    assert not any(row["lossy"] for row in rows.values())
    # A decoder that is wrong is seen: another text in the place of one.
    wrong = [t for t in trials if t.way in (PLAIN, 2)]
    wrong[1].decoded.tokens[5] ^= 1
    assert judge_identity(target, prompts, wrong, 0)[2]["different"] >= 1


def test_sampled_trials_stand_beside_sampled_plain_decoding(pair: tuple[TableModel, TableModel]) -> None:
    target, draft = pair
    ways = [Trial(length=3, sampler="recipe"), Trial(rule="p_min-after", length=3, p_min=0.4, sampler="recipe")]
    recipe = recipe_with(trials=[way.model_dump(exclude_defaults=True) for way in ways], allow_lossy=True)
    arms = make_arms(recipe, ways, draft, (), COSTS, {})
    assert [arm.title for arm in arms] == [PLAIN_SAMPLED, *(way.title for way in ways)]
    assert [arm.lossy for arm in arms] == [False, False, True]
    trials = run_trials(target, draft, random_prompts(4, 12, 3), [2], 16, (), "prompts", arms)
    rows = trial_rows(recipe, ways, arms, trials, {})
    plain_row, lossless, lossy = rows
    assert plain_row["speedup"] == 1 and plain_row["tokens_per_round"] is None
    assert lossless["plain_tokens_per_second"] == plain_row["tokens_per_second"] and lossless["identical"] is None
    assert lossless["distribution"] == "the target's" and lossy["lossy"] and lossy["distribution"].startswith("LOSSY: ")
    label = {"pair": "a pair", "grown": False, "backend": "table"}
    report = {
        "new_tokens": 16,
        "rows": [],
        "trials": [label | row for row in rows],
        "plain_reference": [],
        "explanations": [],
        "command": "distill speedup",
    }
    page = as_markdown(report)
    assert page.count("| LOSSY |") == 1 and f"`{ways[1].title}` is LOSSY: " in page
    assert [row["lossy"] for row in flat_rows(report)] == [False, False, True]
    # A lossy arm that is not marked as one is refused by the decoder itself.
    arm = arms[2]
    assert arm.make is not None
    with pytest.raises(DataError, match="would change the target's distribution"):
        next(decode(target, arm.make(), [1, 2], 4, arm.rules, Decoded()))


def test_lossy_is_lossy_and_lossless_is_lossless() -> None:
    """The second token's counts: p_min-after leaves the target's distribution, the rule that looks before the draw does
    not."""
    target = TableModel(6, 5, memory=1, sharpness=1.0)
    draft = target.near(1.0, 6)
    hot = Sampler(1.0)

    def counts(trial: Trial | None, seed: int) -> Counter[int]:
        draws = random.Random(seed).random
        rules = Rules(hot, "token", random=draws)
        found: Counter[int] = Counter()
        for _ in range(3000):
            if trial is None:
                found[plain(target, [1], 2, rules=rules).tokens[1]] += 1
                continue
            result = Decoded()
            for _ in decode(target, make_drafter(trial, draft, hot, draws), [1], 2 + trial.length, rules, result, True):
                if len(result.tokens) > 1:
                    break
            found[result.tokens[1]] += 1
        return found

    base = counts(None, 1)
    floor = 0.25
    lossless = homogeneity(base, counts(Trial(rule="p_min", p_min=floor, length=1, sampler="recipe"), 2))[2]
    lossy = homogeneity(base, counts(Trial(rule="p_min-after", p_min=floor, length=1, sampler="recipe"), 3))[2]
    assert lossless > 1e-3 / 2 and lossy < 1e-6


def recorder(*rounds: tuple[float, int, int]) -> Recorder:
    return Recorder(4, [Recorded((Features(top, (1 - top) / 2, 1.0),) * n, accepted) for top, n, accepted in rounds])


def test_calibrations_are_saved_and_read_again(tmp_path: Path) -> None:
    own = [recorder((0.9, 4, 4), (0.5, 4, 0), (0.8, 3, 1), (0.4, 2, 1)) for _ in range(40)]
    table = calibrate(own, "distill speedup")
    assert (table["rounds"], table["judged"], table["prompts"]) == (160, 40 * (4 + 1 + 2 + 2), 40)
    assert table["unfitted"] == {}
    save_calibration(tmp_path / "calibration.json", table)
    found = load_calibrations(tmp_path / "calibration.json")
    everything = [one for prompt in own for one in prompt.rounds]
    for name, fit in FITS.items():
        assert found[name] == fit(everything)
    # Scores are of text the fit has not seen: outcomes that turn round between even and odd prompts must score badly.
    good, bad = recorder((0.9, 1, 1), (0.2, 1, 0)), recorder((0.9, 1, 0), (0.2, 1, 1))
    turned = calibrate([good, bad, good, bad], "here")["fits"]["margin"]["log_loss"]
    assert turned > 1.0 > calibrate([good, good, good, good], "here")["fits"]["margin"]["log_loss"]


def test_no_calibration_without_both_outcomes(tmp_path: Path) -> None:
    table = calibrate([recorder((0.9, 4, 4)), recorder((0.9, 4, 4))], "here")
    assert table["fits"] == {} and all("only accepted positions" in why for why in table["unfitted"].values())
    save_calibration(tmp_path / "calibration.json", table)
    assert load_calibrations(tmp_path / "calibration.json") == {}
    (tmp_path / "calibration.json").write_text('{"format": 0, "fits": {}}')
    with pytest.raises(DataError, match="holds no calibrations"):
        load_calibrations(tmp_path / "calibration.json")


def test_earlier_text_by_hand() -> None:
    index = NGramIndex()
    index.read([1, 2, 3, 1, 2])
    assert index.match([1, 2], 3) == 2 and index.match([1, 2], 4) == -2  # 1 2 was followed by 3
    assert index.match([9, 2], 3) == 1 and index.match([9], 3) == 0
    assert index.match([2, 3, 1], 2) == 3
    index.read([1, 2, 3, 1, 2, 5])
    assert index.match([1, 2], 5) == 2  # the later place counts
    index.begin()
    assert index.match([1, 2], 3) == 0


@given(st.floats(0.0, 3e-3), st.floats(1e-3, 3e-3))
def test_overhead_is_what_rounds_take_beyond_their_steps(overhead: float, step: float) -> None:
    """Recorded seconds of known parts: T(n + 1) + D₀ + n·D comes apart again."""
    costs = StepCosts(tuple(0.01 + 0.001 * m for m in range(9)), 1e-3, 1.5e-3)

    def record(target: Any, draft: Any, prompts: Any, tokens: int, rules: Rules, length: int) -> list[Recorder]:
        seconds = costs.target[length] + overhead + length * step
        rounds = [Recorded((FEATURES,) * n, 0) for n in (length, length, max(length - 1, 0), length)]
        return [Recorder(length, rounds, [seconds, seconds, 99.0, 2 * seconds])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distill.benchmark.calibrate.record_rounds", record)
        nobody: Any = None
        found = with_overhead(nobody, nobody, [[1]], 8, (), costs)
    assert found.draft == pytest.approx(step) and found.overhead == pytest.approx(overhead, abs=1e-9)
    assert found.draft_two - found.draft == pytest.approx(costs.draft_two - costs.draft)
    assert found.target == costs.target


def test_the_stage_measures_trials_and_refuses_lossy_ones(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ("--runs", copied.parent)
    assert tiny.call("speedup", "tiny", *runs, "-o", "csv") == 0
    assert "draft, expected value context, ≤ 8" in capsys.readouterr().out
    assert (copied / "speedup" / "calibration.json").exists()
    again = ("speedup.trials=[{rule: p_min-after, sampler: recipe}]", "speedup.prompts=2", *runs, "--until", "speedup")
    config = copied / "config.yaml"
    assert config.exists()
    assert tiny.call("train", config, *again) == 2
    assert "would change the target's distribution" in capsys.readouterr().err
    text = config.read_text()
    config.write_text(dump_recipe(load_recipe(config, again[:2])))
    assert tiny.call("speedup", "tiny", *runs) == 2
    assert "--allow-lossy" in capsys.readouterr().err
    assert tiny.call("speedup", "tiny", *runs, "--allow-lossy") == 0
    said = capsys.readouterr()
    assert "| LOSSY |" in said.out and "LOSSY trial" in said.err
    assert "LOSSY" in (copied / "report.html").read_text() or tiny.call("report", "tiny", *runs) == 0
    assert "LOSSY" in (copied / "report.html").read_text() and "LOSSY" in (copied / "draft" / "README.md").read_text()
    config.write_text(text)
    generate = ("generate", "def alpha(", "--run", "tiny", *runs, "--tokens", 8)
    hot = ("--temperature", 0.9, "--rule", "p_min-after", "--p-min", 0.2)
    assert tiny.call(*generate, *hot) == 2
    assert "would change the target's distribution" in capsys.readouterr().err
    assert tiny.call(*generate, *hot, "--allow-lossy") == 0
    assert "LOSSY: this text does not follow" in capsys.readouterr().err
    texts = set()
    for rule in RULES:
        assert tiny.call(*generate, "--rule", rule, "--length", 3, "--allow-lossy") == 0
        said = capsys.readouterr()
        assert "LOSSY" not in said.err  # greedy: nothing is
        texts.add(said.out)
    assert len(texts) == 1
    for options, words in (
        (("--rule", "x"), "no length rule"),
        (("--p-min", 0.1), "not read by --rule fixed"),
        (("--rule", "beta", "--drafter", "tree"), "drafter tree has none"),
    ):
        assert tiny.call(*generate, *options) == 2
        assert words in capsys.readouterr().err
