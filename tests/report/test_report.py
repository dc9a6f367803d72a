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
from distill.decoding.costs import NO_STEPS, PaidCosts
from distill.errors import DataError
from distill.export import ExportedFile, Parity
from distill.files import from_json, write_result
from distill.folders import ModelSizes
from distill.measuring import speedup_results
from distill.measuring.evaluation_results import (
    MEASURES,
    RELIABILITIES,
    EvaluationReport,
    Reliability,
    ReliabilityBin,
    SliceResult,
)
from distill.recipe import Recipe
from distill.report import card as cards
from distill.report import page as pages
from distill.report import plots
from distill.report.tables import RunResults
from distill.run import Run
from distill.tables import Interval, counted, placeless
from distill.tables import shown as in_words
from distill.training.saved import EvaluatedWeights, TrainingStep, TrainingSummary, training_steps

SURROGATE = "[lone surrogate]"  # which JSON cannot hold: put in after reading
EVIL = (
    "</pre><script>alert('x')</script><img src=https://evil.example/x.png onerror=\"y\">&amp;\x00\x1b[31m" + SURROGATE
)
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
    return found


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


def interval(mean: float, half: float = 0.012) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


def measured(shift: float) -> dict[str, Any]:
    means = dict.fromkeys(MEASURES, 0.412 + shift / 3) | {"acceptance_sampling": 0.537 + shift / 3}
    means |= {"forward_kl": 1.431 - shift, "acceptance_ceiling": 1.0}
    return {"tokens": 48213, "prompts": 96, **{name: interval(mean) for name, mean in means.items()}}


def positions(first: float) -> list[dict[str, Any]]:
    rows, drafted = [], 6120
    for position in range(1, 9):
        rate = first - 0.015 * position
        row = {"position": position, "drafted": drafted, "accepted": int(drafted * rate)}
        rows.append(row | {"rate": interval(rate, 0.01 * position**0.5)})
        drafted = int(drafted * rate)
    return rows


def speedup_rows(pair: str, backend: str, peak: float) -> list[dict[str, Any]]:
    speeds = {length: peak - 0.045 * (length - 4) ** 2 / 2 for length in (1, 2, 3, 4, 5, 6, 8)}
    plain = (3072, 84.31, 36.44, 36.44, None, None, 1.0, 1.0, 1.0, None, 24, 0, 0, None)
    rows = [speedup_results.Measurement(pair, backend, "plain", 0, None, None, None, None, *plain)]
    for length, speed in speeds.items():
        named = (pair, backend, f"draft, γ = {length}", length, "draft", "fixed", "greedy", None)
        pace = (3072, 84.31 / speed, 36.44 * speed, 36.44, 1 + 0.52 * length, 0.71 - 0.02 * length)
        rows.append(
            speedup_results.Measurement(*named, *pace, speed, speed - 0.07, speed + 0.06, speed * 1.05, 23, 1, 0, None)
        )
    return [asdict(row) for row in rows]


def speedup_part(pair: str, backend: str, peak: float, **others: Any) -> dict[str, Any]:
    costs = PaidCosts(0.027, {1: 0.03, 2: 0.04}, NO_STEPS, NO_STEPS, 0.01, 0.001)
    part = speedup_results.SpeedupPart(
        *(pair, backend, []),
        speedup_results.ChosenLength(4, peak, peak - 0.07, peak + 0.06, 36.44 * peak),
        1e-4,
        costs,
        speedup_results.StepFigures(256, {m: 0.0214 * (0.94 + 0.06 * m) for m in range(1, 17)}, {1: 0.0021, 2: 0.0022}),
    )
    return asdict(part) | {"measurements": speedup_rows(pair, backend, peak)} | others


def other(row: dict[str, Any], configuration: str, drafter: str | None, **values: Any) -> dict[str, Any]:
    """A measurement of another configuration than a fixed greedy length."""
    return row | {"configuration": configuration, "length": None, "drafter": drafter, "rule": drafter, **values}


def exported(
    name: str, outtype: str, size: int, figures: tuple[float, float, float], mismatches: list[tuple[int, int]]
) -> dict[str, Any]:
    parity = Parity(2048, *figures, 512, mismatches, 0.001)
    return asdict(ExportedFile(f"gguf/{name}-{outtype}.gguf", name, outtype, size, 0, parity))


def sample(prompt: str, *segments: tuple[str, str]) -> dict[str, Any]:
    return asdict(speedup_results.Sample("draft, γ = 4", prompt, [speedup_results.Segment(*one) for one in segments]))


def make_metadata() -> dict[str, Any]:
    small, large = "small 14M target", "big target ×4 & <draft>"
    steps = []
    for step in range(1, 901):
        losses = [1.4 * (step + 9) ** -0.22, 1.1 * (step + 9) ** -0.25, 3.4 * (step + 9) ** -0.09]
        time = f"2026-11-21T14:{step // 25:02d}:{step % 60:02d}"
        agreement, speed = 0.72 - 0.5 * (step + 9) ** -0.3, 5210.0 + step % 17
        steps.append(TrainingStep(step, *losses, agreement, 3e-4, 8192, speed, 2_140_000_000, time))
    text = [("def ", "target"), ("fibonacci(n):\n    if n <", "accepted"), (" 2", "target"), (": return", "accepted")]
    why = "On gguf a step over five tokens costs 1.9 × one token, so no draft can win."
    hostile = sample(EVIL, (EVIL, "accepted"), (EVIL, "target"))
    parts = [
        speedup_part(
            *(small, "pytorch", 1.374),
            samples=[sample("# fibonacci\n", *text)],
        ),
        speedup_part(large, "pytorch", 1.912, samples=[hostile]),
        speedup_part(small, "gguf", 0.843, explanations=[why]),
    ]
    files = [
        exported("draft", "q4_k_m", 13_204_512, (0.9619, 0.0413, 0.917), [(3, 17)]),
        exported("target", "f16", 269_311_040, (0.9995, 0.00031, 0.0042), []),
    ]
    domains = {
        "answers": {"before": measured(0.0), "after": measured(0.63)},
        "files": {"before": measured(0.05), "after": measured(0.48)},
    }
    sampler = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0}
    slices = [
        SliceResult(name, label, tokens, tokens / 5000, {"after": Interval(rate, rate - 0.04, rate + 0.03)})
        for name, label, tokens, rate in (
            ("repetition", "new", 13100, 0.512),
            ("repetition", "repeated", 1900, 0.871),
            ("language", "text", 4000, 0.633),
            ("language", "code, python", 1000, 0.744),
        )
    ]
    reached = {"before": positions(0.55), "after": positions(0.78)}
    bins = [
        ReliabilityBin(at / 10, at / 10 + 0.1, 321, at / 10 + 0.05, Interval(at / 12, at / 13, at / 11))
        for at in range(10)
    ]
    trust = {
        "after": [
            Reliability(of, 3210, 0.617, Interval(0.533, 0.512, 0.551), 0.0837, 0.0191, bins) for of in RELIABILITIES
        ]
    }
    llama, versions = "LlamaForCausalLM", {"python": "3.11.7", "torch": "2.9.1+cpu", "transformers": "5.3.0"}
    machine = {"cpu": "AMD EPYC 7B13", "cores": 2, "memory_bytes": 16_800_000_000, "gpu": None}
    return {
        "name": "demo",
        "date": "2026-11-21T14:31:00+00:00",
        "command": "distill train recipes/demo.yaml train.steps=900",
        "machine": machine | {"platform": "Linux-6.1-x86_64"} | versions,
        "config": {"name": "demo", "cut": {"layers": 2, "mlp": 384}, "train": {"steps": 900, "loss": "forward_kl"}},
        "target": asdict(ModelSizes("models/target", llama, 134_515_008, 30, 576, 1536, 49152, 269_060_552)),
        "donor": asdict(ModelSizes("example/donor-30m", llama, 31_408_640, 12, 320, 960, 49152, 62_830_111)),
        "draft": asdict(ModelSizes("runs/demo/draft", llama, 18_203_456, 2, 320, 384, 49152, 36_421_777)),
        "steps": [{"stage": "train", **asdict(step)} for step in steps],
        "evaluation": asdict(
            EvaluationReport(
                "distill eval demo --kl --acceptance",
                sampler,
                8,
                domains,
                reached,
                {},
                slices=slices,
                reliability=trust,
            )  # type: ignore[arg-type]
        ),
        "export": {"command": "distill export-gguf demo", "files": files},
        "speedup": asdict(
            speedup_results.SpeedupReport("distill speedup demo", {}, 24, 128, {"temperature": 0.8, "top_k": 0}, parts)  # type: ignore[arg-type]
        ),
    }


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


def test_page_is_whole_fetches_nothing_and_changes_no_result() -> None:
    results = as_results(make_metadata())
    before = copy.deepcopy(results)
    checker = checked(pages.build_page(results))
    assert cards.build_card(results) and results == before
    # Two of training, positions, reliability, slices, two costs for each of three pairs, a speedup for each backend.
    assert checker.tags["svg"] == 9
    assert checker.tags["h1"] == 1 and checker.tags["h2"] == 11


@pytest.mark.usefixtures("without_pictures")
def test_page_holds_the_numbers() -> None:
    words = " ".join("".join(checked(build_page(make_metadata())).words).split())
    figures = """
        134,515,008 | 18,203,456 | 269,060,552 | 49,152 | 1.91× | [1.84, 1.97] | 1.37× | 0.84×
        faster than plain | slower than plain | 74.7 % [73.5, 75.9] | 53.7 % | 0.8010 [0.7890, 0.8130] | -0.6300
        48,213 | 21.4 | 36.44 | 13,204,512 | 96.2 % | 0.0413
        7,372,800 tokens | AMD EPYC 7B13 | 2.9.1+cpu | temperature 0.8 | distill speedup demo
        distill eval demo --kl --acceptance | no draft can win
    """
    for figure in re.split(r" \| |\n *", figures.strip()):
        assert figure in words, figure


@pytest.mark.usefixtures("without_pictures")
def test_every_table_says_its_command() -> None:
    page = build_page(make_metadata())
    assert page.count("<table>") == len(re.findall(r'</table></div><p class="command">distill ', page)) > 8


@pytest.mark.usefixtures("without_pictures")
def test_every_figure_of_a_pair_names_it() -> None:
    page = build_page(make_metadata())
    # In short, in every row, of the costs of both models' steps, and of a sample.
    assert page.count("big target ×4 &amp; &lt;draft&gt;") == 1 + 8 + 2 + 1
    assert "(--spec-draft-sampling probabilistic)" in build_card(make_metadata())


@pytest.mark.usefixtures("without_pictures")
def test_the_weights_that_were_taken_are_named() -> None:
    trained = TrainingSummary(800, 1, 3e-4, {"jsd": 1.0}, EvaluatedWeights(600, 0.5678, 2.75, 200))
    words = page_words(make_metadata() | {"training": asdict(trained)})
    assert "800 steps at a peak rate of 0.0003; loss: 1 jsd." in words
    assert "The weights of step 600 were taken: conditional acceptance 0.568" in words


@pytest.mark.usefixtures("without_pictures")
def test_a_training_that_did_not_help_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the report, on the card, and at the end of the command."""
    best = EvaluatedWeights(0, 0.4, 2.0, 9)
    untrained = TrainingSummary(9, 1, 1e-3, {"jsd": 1.0}, best)
    (tmp_path / "stages").mkdir()
    record = {"key": "", "inputs": {}, "artifacts": {}, "digest": ""}
    (tmp_path / "stages" / "train.json").write_text(json.dumps(record))
    for training, said in (
        (untrained, True),
        (replace(untrained, best=replace(best, step=5)), False),
        (replace(untrained, best=None), False),
    ):
        results = make_metadata() | {"training": asdict(training)}
        write_result(tmp_path / "training.json", training)
        say_outcome(Run(tmp_path, Recipe.model_construct()))
        for words in (build_page(results), build_card(results), capsys.readouterr().err):
            assert ("Training did not help" in words) == said


def test_hostile_text_stays_text() -> None:
    results = make_metadata()
    results["name"] = results["command"] = results["draft"]["path"] = results["machine"]["cpu"] = EVIL
    part = results["speedup"]["parts"][0]
    part["explanations"] = [EVIL]
    part["measurements"][1]["pair"] = "_$x_{" + EVIL
    part["measurements"].append(other(part["measurements"][1], EVIL, "lookup", lossy=EVIL))
    part["pair"] = "$" + EVIL
    page = build_page(results)
    checker = checked(page)
    assert "<script" not in page and "\x00" not in page and "\x1b" not in page
    assert "<script>alert('x')</script>" in "".join(checker.words)


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("absent", [[name] for name in OPTIONAL] + [list(OPTIONAL)])
def test_stages_that_have_not_run_are_named(absent: list[str]) -> None:
    results = make_metadata()
    for name in absent:
        results[name] = [] if name == "steps" else None
    page, card = build_page(results), build_card(results)
    checked(page)
    for name in absent:
        stage = OPTIONAL[name]
        assert f"The stage <code>{stage}</code> has not run" in page
        assert f"The stage `{stage}` has not run" in card
    for name in set(OPTIONAL) - set(absent):
        assert f"The stage <code>{OPTIONAL[name]}</code> has not run" not in page


def test_figures_that_were_not_measured_are_dashes() -> None:
    results = make_metadata()
    results["donor"] = None
    unknown = {"mean": None, "low": None, "high": None}
    del results["evaluation"]["domains"]["answers"]["before"]
    results["evaluation"]["domains"]["files"]["after"]["acceptance_match"] = unknown
    results["evaluation"]["positions"] = {
        "before": [],
        "after": [{"position": 1, "drafted": 0, "accepted": 0, "rate": unknown}],
    }
    results["export"]["files"][0]["parity"] = None
    for part in results["speedup"]["parts"]:
        part["samples"], part["explanations"] = [], []
    unknown = {"speedup": None, "speedup_low": None, "speedup_high": None}
    results["speedup"]["parts"][0]["measurements"][1] |= unknown
    results["steps"] = training_steps([results["steps"][0], {"stage": "export", "step": 1}])
    page = build_page(results)
    checked(page)
    assert "nan" not in "".join(re.sub(r"<svg.*?</svg>", "", page, flags=re.S).split()).replace("finance", "")
    assert "–" in build_card(results)


def test_a_page_without_matplotlib_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DataError, match="matplotlib>=3"):
        plots.training_curve(as_results(make_metadata()).steps, "loss")
    page = build_page(make_metadata())
    checked(page)
    assert "<svg" not in page and "pip install &quot;matplotlib&gt;=3" in page and "1.91×" in page


@pytest.mark.usefixtures("without_pictures")
def test_a_repeated_step_counts_once_and_long_runs_are_averaged() -> None:
    metrics = make_metadata()["steps"]
    again = training_steps([*metrics, metrics[-1] | {"loss": 0.125}])
    page = build_page(make_metadata() | {"steps": again})
    assert "900 steps" in page and "0.125" in page and "each point the mean of 3 steps" in page


def test_plots_take_the_page_colour_and_are_the_same_each_time() -> None:
    measured = as_results(make_metadata()).speedup
    assert measured is not None
    drawn = plots.cost_curves(measured.parts[0])
    assert drawn == plots.cost_curves(measured.parts[0])
    assert "currentColor" in drawn and plots.INK not in drawn and drawn.startswith("<svg ") and drawn.endswith("</svg>")


@pytest.mark.usefixtures("without_pictures")
def test_limits_and_doubts_follow_the_results() -> None:
    results = make_metadata()
    page = build_page(results)
    assert "No GPU took part" in page
    for words in ("not shown to be lossless", "drafted nothing"):
        assert words not in page
    results["speedup"]["parts"][0]["measurements"][2] |= {"different": 3, "acceptance": None, "speedup": 1.15}
    results["machine"]["gpu"] = "NVIDIA H100"
    best = results["speedup"]["parts"][0]["measurements"][4]
    best |= {"speedup_low": 1.17, "speedup_high": 1.75}
    assert "which is wide" not in build_page(results)  # not yet: 1.4957 times its lower end
    best["speedup_high"] = 3.14
    page = build_page(results)
    assert "lies between 1.17× and 3.14×, which is wide" in page
    assert "drafted nothing: its 1.15× shows how much" in page and "not shown to be lossless" in page
    assert "3 outputs differ from the plain run" in page and "No GPU took part" not in page


def test_card_front_matter_and_numbers() -> None:
    card = build_card(make_metadata())
    assert card.startswith("---\n")
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["library_name"] == "transformers" and head["base_model"] == "example/donor-30m"
    assert "speculative-decoding" in head["tags"]
    figures = """
        1.91× [1.84, 1.97] | 74.7 % [73.5, 75.9] | 18,203,456 | slower than plain | 96.2 %
        assistant_model=draft | -md gguf/draft-q4_k_m.gguf --spec-type draft-simple --spec-draft-n-max 4
        "num_speculative_tokens": 4 | "method": "draft_model" | distill speedup demo | No GPU took part
        99.95 %
    """
    for figure in re.split(r" \| |\n *", figures.strip()):
        assert figure in card, figure


def test_whether_a_draft_pays_stands_beside_its_commands() -> None:
    """By engine, on the page and in the card; a target that is a GGUF file is served by llama.cpp alone."""

    def of_gguf(low: float, high: float) -> tuple[str, str]:
        results = make_metadata()
        for one in (row for part in results["speedup"]["parts"] for row in part["measurements"]):
            if one["backend"] == "gguf" and one["length"]:
                one |= {"speedup": (low + high) / 2, "speedup_low": low, "speedup_high": high}
        return page_words(results), build_card(results)

    for bounds, words in (
        ((0.5, 0.75), "Serve without a draft there; the command is for other machines."),
        ((1.25, 1.5), "It pays on the run's machine with the length shown"),
        ((0.75, 1.5), "Whether it pays on the run's machine is not known."),
    ):
        for shown in of_gguf(*bounds):
            assert f"{words}" in shown.split("llama.cpp", 1)[1] and f"[{bounds[0]:.2f}, {bounds[1]:.2f}]" in shown
            assert "llama-server -m" in shown and "--speculative-config" in shown
    results = make_metadata()
    results["target"]["path"] = "served.gguf"
    for shown in (page_words(results), build_card(results)):
        assert "llama-server -m" in shown and "from_pretrained" not in shown and "vllm serve" not in shown


def test_the_command_names_the_files_that_were_timed() -> None:
    results = make_metadata()
    first = next(file for file in results["export"]["files"] if file["model"] == "draft")
    results["export"]["files"].append(first | {"path": "gguf/draft-q5_0.gguf", "outtype": "q5_0"})
    assert f"-md {first['path']} " in build_card(results)
    results["config"]["speedup"] = {"outtype": "q5_0"}
    assert "-md gguf/draft-q5_0.gguf " in build_card(results)
    # No file of the draft, a target that is a file, and an engine that was not timed.
    results["export"], results["target"]["path"] = None, "served.gguf"
    for part in results["speedup"]["parts"]:
        part["measurements"] = [row for row in part["measurements"] if row["backend"] == "pytorch"]
    card = build_card(results)
    assert "llama-server -m served.gguf -md draft.gguf" in card and "`distill export-gguf RUN` does" in card.replace(
        "\\", ""
    )
    assert "It was not timed in llama.cpp: the length shown was the fastest in PyTorch." in card
    results["speedup"] = None
    assert "No draft length was timed; the one shown is only a starting point." in build_card(results)


def test_card_survives_hostile_text_and_its_python_compiles() -> None:
    results = make_metadata()
    results["name"] = "evil\n---\nlicense: stolen\n# x"
    results["donor"]["path"] = "/tmp/a: b\n---"
    results["draft"]["path"] = 'it\'s `quoted` "$(rm)"\n```'
    results["draft"]["vocabulary"] = 32000
    results["speedup"]["parts"][0]["measurements"][3]["pair"] = "a|b*c*<img src=x>"
    card = build_card(results)
    head = yaml.safe_load(card.split("---\n")[1])
    assert "base_model" not in head and "license" not in head
    assert "<img" not in card and "a\\|b" in card
    blocks = re.findall(r"(`{3,})python\n(.*?)\n\1\n", card, flags=re.S)
    compile(blocks[0][1], "card", "exec")
    assert "assistant_tokenizer=assistant_tokenizer" in blocks[0][1]


@pytest.mark.usefixtures("without_pictures")
def test_every_configuration_shows_its_distribution() -> None:
    results = make_metadata()
    rows = results["speedup"]["parts"][0]["measurements"]
    sampled = {"sampler": {"temperature": 0.8}, "identical": None, "excused": None, "different": None}
    rows += [
        other(rows[0], "plain, sampled", None, **sampled),
        other(rows[1], "draft, γ = 8, verifier greedy, sampled", "draft", **sampled, lossy="drafts are dropped"),
        other(rows[1], "lookup, ≤ 8", "lookup", speedup=1.25, speedup_low=1.125, speedup_high=1.5),
    ]
    words = page_words(results)
    for shown in (
        "LOSSY: drafts are dropped",
        "1.25× [1.12, 1.50]",
        "plain, sampled",
        "the target's",
    ):
        assert shown in words, shown
    card = build_card(results)
    assert "LOSSY: drafts are dropped" in card and "| configuration |" in card and "plain, sampled" not in card
    assert card.count("| pair |") == 1 and "| draft, γ = 4 | " in card and "1.37×" in card


def page_words(results: dict[str, Any]) -> str:
    """The visible text of the page."""
    return " ".join(" ".join(checked(build_page(results)).words).split())


def test_the_first_card_is_the_fastest_lossless_greedy_way() -> None:
    """Of all that was tried on a pair and backend; what is sampled or changes the distribution is no rival."""
    results = make_metadata()
    rows = results["speedup"]["parts"][0]["measurements"]
    sampled = {"sampler": {"temperature": 0.8}, "identical": None, "excused": None, "different": None}
    fast = {"speedup": 9.0, "speedup_low": 8.5, "speedup_high": 9.5}
    rows += [
        other(rows[1], "draft, sampled", "draft", **sampled, **fast),
        other(rows[1], "dropped drafts", "draft", lossy="drafts are dropped", **fast),
        other(rows[1], "a tree", "tree", speedup=4.25, speedup_low=4.0, speedup_high=4.5),
    ]
    words = page_words(results)
    pair = [row for row in rows if (row["pair"], row["backend"]) == (rows[1]["pair"], rows[1]["backend"])]
    tried = sum(row["drafter"] is not None for row in pair) - 2
    assert f"4.25× [4.00, 4.50] faster than plain fastest of the {tried} ways tried, a tree, pytorch;" in words


@pytest.mark.usefixtures("without_pictures")
def test_the_first_screen_says_why_and_what_to_change() -> None:
    results = make_metadata()
    results["speedup"]["parts"][0]["explanations"] = ["What to change: `this`."]
    first = re.split("<h2>", build_page(results))[1]
    assert "A draft of 18.2 million parameters, 2 of 12 layers of" in first
    assert "What to change: <code>this</code>." in first


def test_a_file_of_another_form_is_refused() -> None:
    results = make_metadata()
    del results["speedup"]["parts"][0]["measurements"][0]["verifier"]
    with pytest.raises(DataError, match=r"measurements\.0\.verifier"):
        as_results(results)


def test_a_figure_of_one_text_has_no_bounds() -> None:
    found = [Interval(0.334, 0.334, 0.334), Interval(0.334, 0.25, 0.5), Interval(0.334, math.nan, math.nan)]
    assert [in_words(one, "%") for one in found] == ["33.4 %", "33.4 % [25.0, 50.0]", "33.4 %"]
    assert [counted(count, "prompt") for count in (0, 1, 2043)] == ["0 prompts", "1 prompt", "2,043 prompts"]


def test_curves_have_room_above_and_steps_are_whole() -> None:
    """A curve whose values lie close together is not drawn along the edge, and no step is 2.5."""
    results = as_results(make_metadata())
    assert results.speedup is not None
    part = replace(results.speedup.parts[0], steps=speedup_results.StepFigures(64, {1: 0.01, 2: 0.0101}, {}))
    heights = [float(y) for y in re.findall(r'<use xlink:href="#[^"]*" x="[^"]*" y="([^"]*)"', plots.cost_curves(part))]
    assert heights and min(heights) > 10
    labels = re.findall(r"<text[^>]*>([^<]+)</text>", plots.training_curve(results.steps[:20], "loss"))
    assert all(label.isdigit() for label in labels[: labels.index("step")])


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
