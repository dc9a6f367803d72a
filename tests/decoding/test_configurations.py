"""Configurations: which may be written, which are lossy, and that each of them decodes the target's own text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from pydantic import ValidationError
from table_model import TableModel
from toys import random_prompts

from distill.decoding.configured import DrafterInputs, check_configurations, lossy_reason
from distill.decoding.costs import Costs
from distill.decoding.rules import GREEDY
from distill.errors import RecipeError
from distill.measuring.compare import PairSettings, PairTexts, judge_identity, measurement, prepare_all, time_texts
from distill.measuring.identity import Identity, Rounding
from distill.measuring.speedup_results import PairMeasured, StepFigures
from distill.measuring.speedup_tables import measurement_table
from distill.recipe import Configuration, Sampler, Speedup, Target, dump_recipe, load_recipe
from distill.recipe.configuration import PLAIN, PLAIN_SAMPLED, RULES, names
from distill.tables import records

COSTS = Costs(tuple(1.0 + 0.05 * m for m in range(17)), 0.05, 0.07)
CONFIGURATIONS = [
    *(Configuration(rule=rule, length=6) for rule in RULES),
    Configuration(rule="p_min", p_min=0.3, n_min=2, length=6),
    Configuration(rule="ratio", n_min=5, length=6),
    Configuration(rule="beta", start=0.5, floor=0.2, length=6),
    Configuration(drafter="lookup"),
    Configuration(drafter="lookup", rule="expected-value"),
    Configuration(drafter="lookup+draft", rule="expected-value"),
    Configuration(drafter="lookup+tree", rule="expected-value", nodes=5, length=6),
    Configuration(drafter="lookup+draft", rule="beta", floor=0.2),
    Configuration(drafter="tree", nodes=6, length=4),
    Configuration(drafter="tree", nodes=5),
    Configuration(drafter="lookup+tree", nodes=4, length=6),
    Configuration(drafter="lookup+tree", nodes=6, rule="fixed", length=3),
    Configuration(verifier="match"),
    Configuration(verifier="block"),
]
HOT = Sampler(temperature=0.8, top_k=4)
LABEL, NOT_TIMED = PairMeasured("a pair", "pytorch"), StepFigures(1, {}, {})


def settings_with(others: Sequence[Configuration], lengths: Sequence[int] = (2,), **speedup: Any) -> PairSettings:
    counts = Speedup(lengths=tuple(lengths), configurations=tuple(others), **speedup)
    return PairSettings(Target(model="target"), None, speedup=counts, sampler=HOT)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"rule": "fixed", "p_min": 0.3}, "p_min is not read by drafter draft with rule fixed"),
        ({"drafter": "lookup", "rule": "beta"}, "drafter lookup has none"),
        ({"drafter": "draft", "nodes": 3}, "nodes is not read"),
        ({"drafter": "lookup+tree", "widths": [2]}, "widths is not read"),
        ({"drafter": "tree", "rule": "p_min"}, "drafter tree has none"),
        ({"n_min": 9}, "n_min 9 drops every draft of at most 8"),
        ({"drafter": "lookup", "n_min": 2}, "n_min is not read"),
        ({"rule": "nonsense"}, "Input should be"),
    ],
)
def test_configurations_that_are_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Configuration(**raw)


def test_names_are_short_and_differ_and_doubles_are_refused() -> None:
    asked = [
        *({"length": length} for length in (2, 4)),
        {"rule": "expected-value"},
        {"drafter": "lookup+draft", "rule": "expected-value"},
        *({"drafter": "lookup", "rule": rule} for rule in ("fixed", "expected-value")),
        *({"drafter": "tree", "length": length} for length in (1, 2)),
        {"drafter": "tree", "length": 1, "sampler": "recipe"},
        *({"drafter": "lookup+tree", "length": length, "nodes": nodes} for length in (2, 3) for nodes in (4, 5)),
        {"drafter": "tree", "widths": (3, 2)},
        {"drafter": "table", "rule": "expected-value"},
    ]
    assert names([PLAIN, *(Configuration(**one) for one in asked), PLAIN_SAMPLED]) == [
        *("plain", "draft 2", "draft 4", "draft adaptive", "lookup + draft"),
        *("lookup fixed", "lookup adaptive", "tree 1", "tree 2", "tree sampled"),
        *(f"lookup + tree ({number})" for number in (1, 2, 3, 4)),
        *("drawn tree", "table", "plain sampled"),
    ]
    assert names([Configuration(drafter="lookup", rule="expected-value")]) == ["lookup"]
    assert len({*names(CONFIGURATIONS)}) == len({one.described for one in CONFIGURATIONS}) == len(CONFIGURATIONS)
    with pytest.raises(ValidationError, match="listed twice"):  # a default and the same spelled out
        Speedup(configurations=(Configuration(drafter="lookup"), Configuration(drafter="lookup", length=8)))
    with pytest.raises(ValidationError, match="listed twice"):
        Speedup(configurations=(Configuration(length=4), Configuration(length=4)))


def test_lossy_pairs_have_reasons_and_are_refused_unless_asked_for() -> None:
    hot = Sampler(temperature=0.8)
    after = Configuration(rule="p_min", n_min=2, sampler="recipe")
    assert "no longer follows its distribution" in str(lossy_reason(after, hot))
    assert "best token" in str(lossy_reason(Configuration(sampler="recipe", verifier="greedy"), hot))
    # The same rule is lossless where tokens are chosen without chance, or where the verifier asks for no distribution
    # of theirs.
    for lossless in (after.model_copy(update={"verifier": "match"}), Configuration(rule="p_min", sampler="recipe")):
        assert lossy_reason(lossless, hot) is None
    assert all(lossy_reason(one, GREEDY) is None for one in CONFIGURATIONS)
    # The adaptive rule decides before the draw.
    assert lossy_reason(Configuration(rule="expected-value", sampler="recipe"), hot) is None
    with pytest.raises(RecipeError, match=r"(?s)would change the target's distribution.*allow_lossy"):
        check_configurations(Speedup(configurations=(after,)), HOT)
    (line,) = check_configurations(Speedup(configurations=(after,), allow_lossy=True), HOT)
    assert line.startswith("LOSSY configuration `drafter draft, rule p_min, length 8, p_min 0.5, n_min 2, ")
    with pytest.raises(RecipeError, match="no verifier `block` for trees"):
        wrong = Configuration(drafter="tree", verifier="block", sampler="recipe")
        check_configurations(Speedup(configurations=(wrong,)), HOT)


@pytest.fixture(scope="module")
def pair() -> tuple[TableModel, TableModel]:
    target = TableModel(12, 3, memory=2, sharpness=1.5)
    return target, target.near(0.8, 4)


def test_every_greedy_configuration_decodes_the_plain_text(pair: tuple[TableModel, TableModel]) -> None:
    target, draft = pair
    prompts = random_prompts(6, 12, 1)
    prepared = prepare_all(settings_with(CONFIGURATIONS), [(target, draft)], (), DrafterInputs(COSTS))
    time_texts(target, draft, prompts, 30, prepared, "prompts")
    every = [PLAIN, Configuration(length=2), *CONFIGURATIONS]
    assert [one.configuration for one in prepared] == every and [one.name for one in prepared] == names(every)
    assert judge_identity(target, prompts, prepared, Rounding(0)) == [Identity(identical=6)] * len(prepared)
    rows = {one.name: measurement(one, None, NOT_TIMED, LABEL, PairTexts(prompts)) for one in prepared}
    drafted = {title for title, row in rows.items() if (row.tokens_per_round or 0) > 1.05}
    assert drafted == set(rows) - {"plain"}  # each of them does draft, and is right now and then
    assert not any(row.lossy for row in rows.values())
    assert [row.length for row in rows.values()] == [0, 2, *[None] * len(CONFIGURATIONS)]
    # A decoder that is wrong is seen: another text in the place of one.
    prepared[1].texts[0].decoded.tokens[5] ^= 1
    _, identity = judge_identity(target, prompts, prepared[:2], Rounding(0))
    assert identity is not None and identity.different == 1


def test_sampled_configurations_stand_beside_sampled_plain_decoding(pair: tuple[TableModel, TableModel]) -> None:
    target, draft = pair
    asked = [
        Configuration(length=3, sampler="recipe"),
        Configuration(rule="p_min", length=3, p_min=0.4, n_min=2, sampler="recipe"),
    ]
    prepared = prepare_all(settings_with(asked, allow_lossy=True), [(target, draft)], (), DrafterInputs(COSTS))
    others = prepared[2:]
    assert [one.name for one in others] == ["plain sampled", "draft 3 sampled", "draft p_min sampled"]
    assert [one.lossy is not None for one in others] == [False, False, True]
    prompts = random_prompts(4, 12, 3)
    time_texts(target, draft, prompts, 16, prepared, "prompts")
    rows = [measurement(one, None, NOT_TIMED, LABEL, PairTexts(prompts)) for one in prepared]
    *_, plain_row, lossless, lossy = rows
    assert plain_row.speedup == 1 and plain_row.tokens_per_round is None
    assert lossless.plain_tokens_per_second == plain_row.tokens_per_second and lossless.identical is None
    assert lossless.lossy is None and lossy.lossy is not None
    shown = [row["distribution"] for row in records([measurement_table(rows, "")])]
    assert shown[:4] == ["the target's"] * 4 and shown[4].startswith("LOSSY: ")


def test_lossy_configurations_are_refused_or_labelled(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, config = ("--runs", copied.parent), copied / "config.yaml"
    lossy = ("speedup.configurations=[{rule: p_min, n_min: 2, sampler: recipe}]", "speedup.prompts=2")
    said = tiny.refused(capsys, "train", config, *lossy, *runs, "--until", "speedup")
    assert "would change the target's distribution" in said
    config.write_text(dump_recipe(load_recipe(config, lossy)))
    assert "allow_lossy" in tiny.refused(capsys, "speedup", "tiny", *runs)
    assert "without effect with a run alone, whose recipe says what is measured" in tiny.refused(
        capsys, "speedup", "tiny", *runs, "--allow-lossy"
    )
    config.write_text(dump_recipe(load_recipe(config, ["speedup.allow_lossy=true"])))
    assert tiny.call("speedup", "tiny", *runs) == 0
    out, err = capsys.readouterr()
    assert "| LOSSY: " in out and "LOSSY configuration" in err
    assert tiny.call("report", "tiny", *runs) == 0
    assert all("LOSSY" in (copied / name).read_text() for name in ("report.html", "draft/README.md"))
    generate = ("generate", "def alpha(", "tiny", *runs, "--tokens", 8)
    hot = ("--temperature", 0.9, "-C", "verifier=greedy", "--allow-lossy")
    assert "LOSSY: this text does not follow" in tiny.told(capsys, *generate, *hot)
    # Greedy, nothing is.
    assert "LOSSY" not in tiny.told(capsys, *generate, "-C", "rule=expected-value", "--allow-lossy")
