"""The report page and the model card: pure functions of results, checked as text."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from collections import Counter
from dataclasses import asdict, fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from distill.cli.runs import say_outcome
from distill.errors import DataError
from distill.files import from_json, write_result
from distill.measuring.speedup_results import InTurns
from distill.measuring.verdict import verdict
from distill.recipe import Recipe, load_recipe
from distill.report import beside, plots
from distill.report import card as cards
from distill.report import page as pages
from distill.report.tables import RunResults
from distill.run import Run
from distill.tables import Interval, counted, placeless
from distill.tables import shown as in_words
from distill.training.saved import EvaluatedWeights, TrainingSummary, training_steps

SURROGATE = "[lone surrogate]"  # which JSON cannot hold: put in after reading
EVIL = (
    "</pre><script>alert('x')</script><img src=https://evil.example/x.png onerror=\"y\">&amp;\x00\x1b[31m" + SURROGATE
)
LARGE = "big target ×4 & <draft>"
VOID = {"meta", "link", "br", "img", "input", "hr"}
OPTIONAL = {"steps": "train", "evaluation": "eval", "export": "export", "speedup": "speedup"}


def as_results(values: dict[str, Any]) -> RunResults:
    """The results as read from JSON."""

    def with_surrogates(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{one.name: with_surrogates(getattr(value, one.name)) for one in fields(value)})
        if isinstance(value, list):
            return [with_surrogates(one) for one in value]
        return value.replace(SURROGATE, "\ud800") if isinstance(value, str) else value

    found: RunResults = with_surrogates(from_json(values, RunResults, "the test"))
    told = found.speedup and replace(found.speedup, verdict=verdict(found.speedup))
    return replace(found, speedup=told)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the words: drawing the pictures takes most of a page's time."""
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda _, file, **named: file.write('<svg viewBox="0 0 1 1"><g id="x"/></svg>'),
    )


def build_page(values: dict[str, Any]) -> str:
    return pages.build_page(as_results(values))


def build_card(values: dict[str, Any]) -> str:
    return cards.build_card(as_results(values))


@pytest.fixture(scope="module")
def of_run(finished: Path, world: Path) -> dict[str, Any]:
    """All results of a run."""
    recipe = load_recipe(world / "recipe.yaml")
    return asdict(cards.gather(recipe, Run(finished, recipe)))


@pytest.fixture
def results(of_run: dict[str, Any]) -> dict[str, Any]:
    """Those of a run with a second pair, and speeds that are the same on every machine:
    the largest of each part is that of three drafted tokens."""
    found = copy.deepcopy(of_run)
    found["machine"]["gpu"] = None
    small, gguf = found["speedup"]["parts"]
    found["speedup"] |= {"parts": [small, copy.deepcopy(small), gguf], "in_turns": []}
    for part, pair, peak in zip(
        found["speedup"]["parts"], ("small", LARGE, "small"), (1.374, 1.912, 0.843), strict=True
    ):
        part["pair"] = pair
        part["measurements"] = [row | {"pair": pair} for row in part["measurements"] if row["length"] is not None]
        for row in part["measurements"]:
            speed = {0: 1.0, 1: peak - 0.2, 3: peak}[row["length"]]
            row |= {"speedup": speed, "speedup_low": speed - 0.07, "speedup_high": speed + 0.06}
            row |= {"tokens_per_second": 40 * speed, "plain_tokens_per_second": 40.0}
    return found


def other(row: dict[str, Any], configuration: str, drafter: str | None, **values: Any) -> dict[str, Any]:
    """A measurement of another configuration than a fixed greedy length."""
    return row | {"configuration": configuration, "length": None, "drafter": drafter, "rule": drafter, **values}


class Checker(HTMLParser):
    """Holds a stack of open elements and gathers what a browser would fetch, the ids and the visible text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: Counter[str] = Counter()
        self.references, self.ids, self.links, self.words = (list[str]() for _ in range(4))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for key, value in attrs:
            if key in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                self.references.append(value or "")
            if key == "href":
                self.links.append(value or "")
            if key == "id":
                self.ids.append(value or "")
            assert not key.startswith("on"), (tag, key)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, (tag, self.stack[-5:])
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.stack:
            self.words.append(data)


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.stack
    assert [name for name, count in Counter(checker.ids).items() if count > 1] == []
    assert all(reference.startswith("#") for reference in checker.references), checker.references
    assert {link[1:] for link in checker.links} <= set(checker.ids)
    assert all(found.startswith("#") for found in re.findall(r"url\(\s*['\"]?([^)]*)", page))
    assert "@import" not in page and checker.tags["script"] == checker.tags["img"] == checker.tags["link"] == 0
    page.encode()
    return checker


def test_page_is_whole_fetches_nothing_and_changes_no_result(results: dict[str, Any]) -> None:
    whole = as_results(results)
    before = copy.deepcopy(whole)
    checker = checked(pages.build_page(whole))
    assert cards.build_card(whole) and whole == before
    # Speeds, acceptance by position, where time goes; folded: two of training.
    assert whole.speedup is not None and checker.tags["svg"] == 5
    drawn = plots.speeds(whole.speedup)
    assert drawn == plots.speeds(whole.speedup) and 'aria-label="Tokens per second: draft 1 in PyTorch ' in drawn
    assert "currentColor" in drawn and plots.INK not in drawn and drawn.startswith("<svg ") and drawn.endswith("</svg>")
    assert checker.tags["h1"] == 1 and checker.tags["h2"] == 10 and checker.tags["summary"] >= 9
    # Positions by kind of text where it was noted: of eval or, where it counted no rounds, of the longest chain.
    assert whole.evaluation is not None and {*whole.evaluation.by_position["after"]} == {"new", "repeated"}
    assert plots.acceptance_by_position(whole.evaluation.by_position).count("after, repeated text") == 1
    older = replace(whole.evaluation, positions_by_text={})
    assert "after, repeated" not in plots.acceptance_by_position(older.by_position)
    counted_none = replace(whole, evaluation=replace(older, positions={}))
    assert "draft 3, new text" in pages.build_page(counted_none)
    for part in results["speedup"]["parts"]:
        part["measurements"] = [one | {"positions": {}} for one in part["measurements"]]
    assert checked(pages.build_page(replace(counted_none, speedup=as_results(results).speedup))).tags["svg"] == 4


@pytest.mark.usefixtures("without_pictures")
def test_page_and_card_hold_the_numbers(results: dict[str, Any]) -> None:
    """And every section its command."""
    results["donor"]["path"] = "example/donor-30m"
    page, card = build_page(results), build_card(results)
    words = " ".join("".join(checked(page).words).split())
    answers, (file, *_), machine = (
        results["evaluation"]["domains"]["answers"],
        results["export"]["files"],
        results["machine"],
    )
    for figure in (
        *(f"{results[role][name]:,}" for role in ("target", "draft") for name in ("parameters", "bytes")),
        *("1.91× [1.84, 1.97]", "1.37×", "0.84×", "A round gives"),
        *(in_words(Interval(**one["acceptance_sampling"]), "%") for one in answers.values()),
        *(in_words(Interval(**one["forward_kl"]), ".4f") for one in answers.values()),
        *(f"{answers['after']['tokens']:,}", f"{file['bytes']:,}", in_words(file["parity"]["top1_agreement"], "%")),
        *(machine["cpu"], machine["torch"], "temperature 1", "distill train recipe.yaml"),
        *("assistant_model=draft", "-md gguf/draft-f16.gguf --spec-type draft-simple --spec-draft-n-max 3"),
        *('"num_speculative_tokens": 3', '"method": "draft_model"'),
    ):
        assert figure in words and figure in card, figure
    first, *folded = re.split(r"<details><summary><h2>", page.partition("<main>")[2])
    assert '<span class="bad">0.84×' in page  # slower than plain decoding
    assert all(("<table>" in part) == ('<p class="command">distill ' in part) for part in folded)
    assert "big target ×4 &amp; &lt;draft&gt;" in folded[-3] and first.count("<figure>") == 3 and "# serve it" in first
    best = (
        "Use the draft (draft 3) in PyTorch: 76.5 tokens/s instead of 40.0 (1.91×, 4 prompts of the run's test split)."
    )
    assert best in words and best in card.replace("\\", "")
    assert card.startswith("---\n")
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["library_name"] == "transformers" and head["base_model"] == "example/donor-30m"
    assert "speculative-decoding" in head["tags"] and head["base_model_relation"] == "finetune"


@pytest.mark.usefixtures("without_pictures")
def test_a_training_that_did_not_help_is_named(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the report, on the card, and at the end of the command; and which weights were taken."""
    trained = TrainingSummary(800, 1, 3e-4, {"jsd": 1.0}, EvaluatedWeights(600, 0.5678, 0.5678, 200, 9))
    (tmp_path / "stages").mkdir()
    record = {"key": "", "inputs": {}, "artifacts": {}, "digest": ""}
    (tmp_path / "stages" / "train.json").write_text(json.dumps(record))
    for best, said in ((EvaluatedWeights(0, 0.4, 0.5, 90, 9), True), (trained.best, False), (None, False)):
        results["training"] = asdict(replace(trained, best=best))
        write_result(tmp_path / "training.json", replace(trained, best=best))
        say_outcome(Run(tmp_path, Recipe.model_construct()))
        page = page_words(results)
        for words in (page, build_card(results), capsys.readouterr().err):
            assert ("Training did not help" in words) == said
        assert "800 steps at a peak rate of 0.0003; loss: 1 jsd." in page
        assert ("The weights of step 600 were taken: " in page) == (best is trained.best)


def test_hostile_text_stays_text(results: dict[str, Any]) -> None:
    results["name"] = results["command"] = results["draft"]["path"] = results["machine"]["cpu"] = EVIL
    part = results["speedup"]["parts"][0]
    part["measurements"][1]["pair"] = "_$x_{" + EVIL
    part["measurements"].append(other(part["measurements"][1], EVIL, "lookup", lossy=EVIL))
    part["pair"] = "$" + EVIL
    page = build_page(results)
    checker = checked(page)
    assert "<script" not in page and "\x00" not in page and "\x1b" not in page
    assert "<script>alert('x')</script>" in "".join(checker.words)


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("absent", [[name] for name in OPTIONAL] + [list(OPTIONAL)])
def test_stages_that_have_not_run_are_named(results: dict[str, Any], absent: list[str]) -> None:
    results |= {name: [] if name == "steps" else None for name in absent}
    page, card = build_page(results), build_card(results)
    checked(page)
    for name, stage in OPTIONAL.items():
        assert (f"The stage <code>{stage}</code> has not run" in page) == (name in absent)
        assert (f"The stage `{stage}` has not run" in card) == (name in absent)


@pytest.mark.usefixtures("without_pictures")
def test_a_run_whose_server_measures_it(results: dict[str, Any], finished: Path, world: Path) -> None:
    """With `speedup.backends: []` the stage ran and timed nothing; the run still has its line beside others."""
    results["speedup"] = results["speedup"] | {"parts": []}
    page = build_page(results)
    checked(page)
    assert "No speed was measured" in page and "serve-check" in page
    recipe = load_recipe(world / "recipe.yaml")
    run = Run(finished, recipe)
    gathered = cards.gather(recipe, run)
    assert gathered.speedup is not None and gathered.speedup.parts
    (line,) = beside.lines_of(run, replace(gathered, speedup=replace(gathered.speedup, parts=[])), {})
    assert line["fastest way"] == "not measured yet" and line["acceptance"] and line["training, min"]


def test_figures_that_were_not_measured_are_dashes(results: dict[str, Any]) -> None:
    results["donor"] = None
    unknown = {"mean": None, "low": None, "high": None}
    evaluation, (part, *_) = results["evaluation"], results["speedup"]["parts"]
    del evaluation["domains"]["answers"]["before"]
    evaluation["differences"] = {}
    evaluation["domains"]["files"]["after"]["acceptance_match"] = unknown
    row = {"position": 1, "drafted": 0, "accepted": 0, "rate": unknown}
    evaluation["positions"] = {"before": [], "after": [row]}
    part["measurements"][1] |= {"speedup": None, "speedup_low": None, "speedup_high": None}
    results["steps"] = training_steps([{"stage": "train", **results["steps"][0]}, {"stage": "export", "step": 1}])
    page = build_page(results)
    checked(page)
    assert not re.search(r"\bnan\b", re.sub(r"<svg.*?</svg>", "", page, flags=re.S))
    assert "–" in build_card(results)


def test_a_page_without_matplotlib_says_so(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DataError, match="matplotlib>=3"):
        plots.training_curve(as_results(results).steps)
    page = build_page(results)
    checked(page)
    assert "<svg" not in page and "pip install &#34;matplotlib&gt;=3" in page and "1.91×" in page


@pytest.mark.usefixtures("without_pictures")
def test_a_repeated_step_counts_once_and_long_runs_are_averaged(results: dict[str, Any]) -> None:
    steps = [{"stage": "train", **results["steps"][0], "step": step} for step in range(1, 901)]
    results["steps"] = training_steps([*steps, steps[-1] | {"loss": 0.125}])
    page = build_page(results)
    assert (
        as_results(results).steps[-1].loss == 0.125 and "900 steps" in page and "each point the mean of 3 steps" in page
    )


@pytest.mark.usefixtures("without_pictures")
def test_limits_and_doubts_follow_the_results(results: dict[str, Any]) -> None:
    doubts = ("not shown to be lossless", "3 outputs differ from the plain")
    page, measurements = build_page(results), results["speedup"]["parts"][0]["measurements"]
    assert not any(words in page for words in doubts)
    measurements[1] |= {"different": 3}
    page = build_page(results)
    assert all(words in page for words in doubts)


@pytest.mark.usefixtures("without_pictures")
def test_every_server_has_its_command(results: dict[str, Any]) -> None:
    """On the page and in the card; a target that is a GGUF file is served by llama.cpp and its like alone."""
    libraries = ("from_pretrained", "vllm serve", "--speculative-algorithm STANDALONE")
    for target, shown in (("target", True), ("served.gguf", False)):
        results["target"]["path"] = target
        for text in (page_words(results), build_card(results)):
            part = text.split("How to use it", 1)[1].split("donor")[0]
            assert "--spec-draft-n-max 3" in part and "-md gguf/draft-f16.gguf --draft-max 3" in part
            assert [word in part for word in libraries] == [shown] * 3


def test_an_engine_that_was_timed_with_another_type_was_timed(results: dict[str, Any]) -> None:
    part = results["speedup"]["parts"][2] | {"backend": "gguf:q5_0"}
    rows = [row | {"backend": "gguf:q5_0"} for row in part["measurements"]]
    results["speedup"]["parts"][2] = part | {"measurements": rows}
    first = next(file for file in results["export"]["files"] if file["model"] == "draft")
    results["export"]["files"].append(first | {"path": "gguf/draft-q5_0.gguf", "outtype": "q5_0"})
    assert "-md gguf/draft-q5_0.gguf " in build_card(results)
    # What drafted nothing has no fastest length.
    for row in (row for one in results["speedup"]["parts"] for row in one["measurements"]):
        row |= {"acceptance": None, "tokens_per_round": None}
    assert "No draft length was timed" in (card := build_card(results)) and "Nothing was drafted." in card


def test_the_machine_is_the_one_that_measured(finished: Path, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that draws the report."""
    monkeypatch.setattr(cards, "machine", lambda: {"cpu": "another"})
    recipe = load_recipe(world / "recipe.yaml")
    found = cards.gather(recipe, Run(finished, recipe))
    assert found.speedup is not None and found.machine == found.speedup.machine != {"cpu": "another"}


def test_texts_that_differ_are_counted_over_all_configurations(results: dict[str, Any]) -> None:
    rows = results["speedup"]["parts"][0]["measurements"]
    rows += [
        other(rows[1], "a tree", "tree", different=2),
        other(rows[1], "lossy", "draft", different=4, lossy="drafts are dropped"),
    ]
    assert "2 outputs differ from the plain run" in build_card(results)


def test_the_command_names_the_files_that_were_timed(results: dict[str, Any]) -> None:
    first = next(file for file in results["export"]["files"] if file["model"] == "draft")
    results["export"]["files"].append(first | {"path": "gguf/draft-q5_0.gguf", "outtype": "q5_0"})
    assert f"-md {first['path']} " in build_card(results)
    results["config"]["speedup"] = {"outtype": "q5_0"}
    assert "-md gguf/draft-q5_0.gguf " in build_card(results)
    # No file of the draft, a target that is a file, and an engine that was not timed.
    results["export"], results["target"]["path"] = None, "served.gguf"
    results["speedup"]["parts"].pop()
    card = build_card(results)
    assert "llama-server -m served.gguf -md draft.gguf" in card and "`distill export-gguf" in card
    assert "--spec-draft-n-max 3" in card  # the fastest in PyTorch
    results["speedup"] = None
    assert "No draft length was timed; the one shown is only a starting point." in build_card(results)


def test_card_survives_hostile_text_and_its_python_compiles(results: dict[str, Any]) -> None:
    results["name"] = "evil\n---\nlicense: stolen\n# x"
    results["donor"]["path"] = "/tmp/a: b\n---"
    results["draft"]["path"] = 'it\'s `quoted` "$(rm)"\n```'
    results["draft"]["vocabulary"] = 32000
    results["speedup"]["parts"][0]["measurements"][2]["pair"] = "a|b*c*<img src=x>"
    card = build_card(results)
    head = yaml.safe_load(card.split("---\n")[1])
    assert "base_model" not in head and "license" not in head
    assert "<img" not in card and "a\\|b" in card
    blocks = re.findall(r"(`{3,})python\n(.*?)\n\1\n", card, flags=re.S)
    compile(blocks[0][1], "card", "exec")
    assert "assistant_tokenizer=assistant_tokenizer" in blocks[0][1]


@pytest.mark.usefixtures("without_pictures")
def test_every_configuration_shows_its_distribution(results: dict[str, Any]) -> None:
    """And the first section the fastest lossless greedy way of all that was tried on a pair and backend."""
    part = results["speedup"]["parts"][0]
    rows = part["measurements"]
    sampled = {"sampler": {"temperature": 0.8}, "identical": None, "excused": None, "different": None}
    fast = {"speedup": 9.0, "speedup_low": 8.5, "speedup_high": 9.5}
    rows += [
        other(rows[0], "plain sampled", None, **sampled),
        other(rows[1], "draft 8 sampled", "draft", **sampled, lossy="drafts are dropped"),
        other(rows[1], "dropped drafts", "draft", lossy="drafts are dropped", **fast),
        other(rows[1], "draft, sampled", "draft", **sampled, **fast),
        other(rows[1], "a tree", "tree", speedup=4.25, speedup_low=4.125, speedup_high=4.5, tokens_per_second=170.0),
    ]
    words, card = page_words(results), build_card(results)
    for shown in ("LOSSY: drafts are dropped", "4.25× [4.12, 4.50]", "plain sampled", "the target's"):
        assert shown in words, shown
    assert "LOSSY: drafts are dropped" in card and "plain sampled" in card and "1.37×" in card
    first = re.split("<h2>", build_page(results))[1]
    # Not the dropped drafts, which are no text of the target's.
    assert "Use trees of the draft (a tree) in PyTorch: 170.0 tokens/s instead of 40.0 (4.25× [4.12, 4.50]," in first
    assert "A draft of 0.1 million parameters, 2 of 3 layers of" in first


def page_words(results: dict[str, Any]) -> str:
    """The visible text of the page."""
    return " ".join(" ".join(checked(build_page(results)).words).split())


def test_a_figure_of_one_text_has_no_bounds() -> None:
    found = [Interval(0.334, 0.334, 0.334), Interval(0.334, 0.25, 0.5), Interval(0.334, math.nan, math.nan)]
    assert [in_words(one, "%") for one in found] == ["33.4 %", "33.4 % [25.0, 50.0]", "33.4 %"]
    assert [counted(count, "prompt") for count in (0, 1, 2043)] == ["0 prompts", "1 prompt", "2,043 prompts"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/where/models/a.gguf", "a.gguf"),
        ("/where it/models/big target/", "big target"),
        ("org/name", "org/name"),
        ("./draft", "./draft"),
        (
            "distill train r/demo.yaml target.model=/where/x/a.gguf --runs /where/r 'b=/q/w.e'",
            "distill train r/demo.yaml target.model=a.gguf --runs r 'b=w.e'",
        ),
        ("https://host/v1/models and 3/4 of a/b/c", "https://host/v1/models and 3/4 of a/b/c"),
        ({"a": ["/x/y", 3, None], "b": {"c": "/"}}, {"a": ["y", 3, None], "b": {"c": "/"}}),
    ],
)
def test_no_folder_of_the_makers_machine_is_shown(given: Any, shown: Any) -> None:
    assert placeless(given) == shown


def test_the_picture_draws_what_the_sentence_names(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in turns decide, also if another engine's bar was higher before they took turns."""
    small, _, gguf = results["speedup"]["parts"]
    results["speedup"]["parts"] = [small, gguf]
    gguf["measurements"][2] |= {"tokens_per_second": 90.0}  # beyond PyTorch's 55
    found = as_results(results).speedup
    assert found is not None
    ways = [(part, place) for part in found.parts for place in (2, 0)]
    speeds = (60.0, 40.0, 50.0, 35.0)
    turns = [
        InTurns(*part.key, place, part.measurements[place].configuration, speed, speed / 40, speed / 42, speed / 38)
        for (part, place), speed in zip(ways, speeds, strict=True)
    ]
    turns[1] = replace(turns[1], speedup=1)
    found = replace(found, in_turns=sorted(turns, key=lambda one: -one.tokens_per_second))
    assert verdict(found).startswith("Use the draft (draft 3) in PyTorch: 60.0 tokens/s instead of 40.0 (1.50×")
    drawn = plots.speeds(found)
    assert drawn.count("▸") == 1 and "▸ draft 3, PyTorch" in drawn
    assert drawn.index("engines in turns") < drawn.index("90.0 (") and "60.0 (1.50×)" in drawn
