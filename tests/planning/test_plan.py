"""distill/planning/plan.py, cases.py and `distill plan`: predictions from costs, before there is a draft."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from test_cost import enumerated
from tiny import Capture, Patch, edit
from toys import save_toy, toy, toy_tokenizer

from distill.decoding.costs import CostCurve, load_cost_curve, save_cost_curve
from distill.errors import DataError
from distill.files import write_result
from distill.measuring.evaluation_results import EvaluationReport, PositionAcceptance
from distill.planning import order
from distill.planning.cases import planned_config
from distill.planning.order import decide, siblings
from distill.planning.plan import ALL, RATES, Case, by_position, forecast, step_costs
from distill.recipe import load_recipe
from distill.tables import UNKNOWN, Interval

LENGTHS = (1, 2, 4, 8)


def straight(slope: float, draft: float, single: float = 3.0) -> Case:
    """T(m) = T(1)·(1 + slope·(m − 1)) and D = draft·T(1), so that all figures have a closed form."""
    target = [single * (1 + slope * m) for m in range(9)]
    return Case("a line", [step_costs(target, draft * single, draft * single, LENGTHS)], LENGTHS)


@pytest.mark.parametrize("rates", [[0.3], [0.9, 0.5, 0.2], [1.0], [0.0], [0.62, 0.55]])
def test_speedups_follow_from_the_tokens_of_a_round(rates: list[float]) -> None:
    case = straight(0.07, 0.12)
    for n in LENGTHS:
        tokens = enumerated(by_position(rates, n))
        assert case.speedup(case.timings[0], n, rates) == pytest.approx(tokens / (1 + 0.07 * n + 0.12 * n))


def test_break_even_has_its_closed_form() -> None:
    """1 + a = 1 + s + d for one drafted token; 1 + a + a² = 1 + 2(s + d) for two."""
    case = straight(0.2, 0.3)
    one, two, *_ = forecast(case, {}).lengths
    assert one.break_even == pytest.approx(0.5) and two.break_even == pytest.approx((math.sqrt(1 + 4 * 1.0) - 1) / 2)
    assert case.needed(case.timings[0], 1, 2 / 1.5) == pytest.approx(1.0)
    assert one.upper_bound == pytest.approx(2 / 1.5) and one.verify_cost == pytest.approx(1.2)
    assert math.isinf(case.needed(case.timings[0], 1, 1.5))


@pytest.mark.parametrize("rates", [[0.4], [0.9, 0.3], [1.0], [0.5]])
@pytest.mark.parametrize("prompt", [0, 40])
def test_the_largest_cost_of_a_draft_step_is_just_as_fast_as_plain_decoding(rates: list[float], prompt: int) -> None:
    """With a prompt that both models read, too, which is then paid for."""
    case = straight(0.0, 0.1)
    costs = replace(case.timings[0], target_prompt=0.3, draft_prompt=0.2)
    case = replace(case, timings=[costs], prompt=prompt, new=21)
    plain, rounds = prompt * 0.3 + 20 * 3.0, 20 / (1 + rates[0])
    assert case.speedup(costs, 1, rates) == pytest.approx(plain / (prompt * 0.5 + rounds * 3.3))
    largest = 3 * case.largest_cost(costs, rates)
    expensive = replace(costs, draft=largest, draft_two=largest)
    assert max(case.speedup(expensive, n, rates) for n in LENGTHS) == pytest.approx(1.0)


def test_verdicts() -> None:
    pays = forecast(straight(0.05, 0.1), {"mine": [0.9]})
    assert "pays from a conditional acceptance of 0.15 on (1 drafted)" in pays.sentences[0]
    assert f"at most {9 / 2.2:.2f}× (8 drafted)" in pays.sentences[0] and "it pays" in pays.sentences[1]
    slow = forecast(straight(0.1, 1.0), {"mine": [0.9]})
    assert "This draft cannot pay" in slow.sentences[0] and "less than 0.90 T(1) could" in slow.sentences[0]
    assert "it does not pay" in slow.sentences[1] and all(one.best == 0 for one in slow.scenarios)
    never = forecast(straight(1.0, 0.1), {})
    assert "No draft can pay here, because verifying" in never.sentences[0]
    assert all(one.break_even is None and one.upper_bound <= 1 for one in never.lengths)
    for plan in (pays, never):
        bound = next(one for one in plan.scenarios if one.title == ALL)
        assert [one.upper_bound for one in plan.lengths] == [speed.mean for speed in bound.speedups]
    assert max(one.largest_cost for one in never.scenarios) == pytest.approx(0, abs=1e-9)


def test_several_timings_give_a_range() -> None:
    slow, middle, fast = (straight(0.1, draft).timings[0] for draft in (0.3, 0.2, 0.1))
    found = forecast(Case("three", [slow, fast, middle], LENGTHS), {}).scenarios[0].speedups
    for place, n in enumerate(LENGTHS):
        low, mean, high = ((1 + enumerated([0.2] * n) - 1) / (1 + (0.1 + d) * n) for d in (0.3, 0.2, 0.1))
        assert (found[place].low, found[place].mean, found[place].high) == pytest.approx((low, mean, high))


# ── the command ──


def planned(capsys: Capture, *arguments: object) -> Any:
    found = json.loads(tiny.shown(capsys, "plan", *arguments, "-o", "json"))
    tiny.require_form(capsys, "plan", found)
    return found


def saved(path: Path, seconds: Sequence[float], unit: str = "seconds") -> Path:
    save_cost_curve(CostCurve("big", "x", (64,), (tuple(seconds),), 5, unit), path)
    return path


def test_saved_curves(tmp_path: Path, capsys: Capture) -> None:
    target = saved(tmp_path / "t.json", [2.0, 2.2, 2.4, 2.6, 2.8])
    draft = saved(tmp_path / "d.json", [0.2, 0.3])
    assert load_cost_curve(target).seconds == ((2.0, 2.2, 2.4, 2.6, 2.8),)
    found = planned(capsys, target, draft, "--acceptance", "0.8,0.5")
    (one,) = found["forecasts"]
    assert [length["length"] for length in one["lengths"]] == [1, 2, 3, 4]  # as far as the curve reaches
    mine = next(row for row in one["scenarios"] if row["title"] == "--acceptance")
    # After a round that was accepted whole, the draft's first step reads two tokens.
    assert mine["speedups"][1]["mean"] == pytest.approx(2.0 * (1 + 0.8 + 0.4) / (2.4 + 0.4 + 0.4 * 0.1))
    assert found["settings"][0].startswith("GGML_BATCH_COSTS=1,0.55,")
    shown = tiny.shown(capsys, "plan", target, 0.1, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(shown)))
    assert len(rows) == len(RATES) + 1 + 2 and len({row["table"] for row in rows}) == 2
    assert float(rows[0]["n = 1"]) > 0 and rows[0]["n = 1, low"] == ""
    (swapped,) = planned(capsys, target, 0.1, "--swap", "4,8,1.0")["forecasts"]
    assert swapped["token_seconds"] == pytest.approx(4.0)  # the transfers of four layers
    for swap in ("9,8,1", "9", "1,2"):
        assert "expected streamed layers" in tiny.refused(capsys, "plan", target, "--swap", swap)


def test_the_acceptance_that_a_run_measured(tmp_path: Path, capsys: Capture) -> None:
    rates = [PositionAcceptance(n, 10, 5, Interval(rate, 0.0, 1.0)) for n, rate in ((1, 0.62), (2, 0.55))]
    rates.append(PositionAcceptance(3, 0, 0, UNKNOWN))  # which no round reached
    write_result(tmp_path / "eval.json", EvaluationReport("x", {}, 2, {}, {"after": rates}, {}))
    target = saved(tmp_path / "t.json", [1.0, 1.1, 1.2])
    (one,) = planned(capsys, target, "--acceptance", tmp_path / "eval.json")["forecasts"]
    assert one["scenarios"][-1]["acceptance"] == [0.62, 0.55]
    assert one["draft_cost"] == 0  # no draft was named


def test_a_pair_and_a_target_alone(world: Path, capsys: Capture) -> None:
    options = ("--lengths", "1,2", "--depth", 8)
    pair = (world / "target", world / "target", *options, "--tokens", 8, "--threads", 1)
    (here,) = planned(capsys, *pair)["forecasts"]
    assert here["title"] == "this machine, measured" and here["draft_cost"] > 0
    assert here["prompt"] == 8 and all(row["speedups"][0]["low"] > 0 for row in here["scenarios"])
    (alone,) = planned(capsys, world / "target", *options, "--acceptance", "0.9")["forecasts"]
    assert alone["draft_cost"] == 0 and alone["prompt"] == 0


def test_two_files_in_every_engine(gguf_toys: tuple[Path, Path], capsys: Capture) -> None:
    options = (*gguf_toys, "--lengths", "1,2", "--depth", 8, "--tokens", 8, "--threads", 1)
    found = planned(capsys, *options)["forecasts"]
    names = [one["title"].removeprefix("this machine, measured, ") for one in found]
    assert (
        names[0] == "llama.cpp" and {*names} <= {"llama.cpp", "ik_llama.cpp", "PyTorch"} and len({*names}) == len(names)
    )
    (alone,) = planned(capsys, *options, "--llama", "ub=8")["forecasts"]
    assert alone["title"] == "this machine, measured"
    shown = tiny.shown(capsys, "plan", *options)
    assert len(found) == 1 or shown.split("side by side")[1].count("this machine, measured, ") == len(found)


def test_a_recipe(world: Path, capsys: Capture) -> None:
    """Its draft has the shape of the cut; by every backend that it asks for."""
    recipe = load_recipe(world / "recipe.yaml")
    config = planned_config(recipe)
    assert (config.num_hidden_layers, config.intermediate_size, config.hidden_size) == (2, 64, 64)
    assert len(config.layer_types) == 2
    found = planned(capsys, world / "recipe.yaml", "speedup.new_tokens=8", "--lengths", "1,2")["forecasts"]
    assert [one["title"] for one in found] == [f"this machine, measured, {name}" for name in recipe.speedup.backends]
    for one in found:
        assert (one["prompt"], one["new"]) == (56, 8) and one["draft_cost"] > 0


def test_a_verdict_is_told_before_the_next_engine_is_measured(world: Path, capsys: Capture, monkeypatch: Patch) -> None:
    told = []

    def measured(_: object) -> Iterator[Case]:
        for title in ("one", "two"):
            told.append(capsys.readouterr().err)
            yield replace(straight(0.1, 0.1), title=title)

    monkeypatch.setattr("distill.planning.cases.measured_cases", measured)
    assert tiny.call("plan", world / "recipe.yaml") == 0
    shown = capsys.readouterr()
    assert "one:\n" not in told[0] and "one:\n" in told[1] and "two:\n" not in shown.err  # the last one is in the table
    assert "**one**" in shown.out and "**two**" in shown.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("x.gguf",), "there is no file x.gguf"),
        (("x", "a.b=c"), "expected RECIPE"),
        (("x", "y", "z"), "expected RECIPE"),
        (("x", "-0.1"), "No such option"),
        (("missing.yaml",), "no recipe at missing.yaml"),
        (("missing.json",), "there is no curve missing.json"),
        (("missing.json", "x"), "give the draft's curve"),
        (("x", "inf"), "is not the cost of a draft step"),
        (("x.json", "--lengths", "0"), "from 1 to 63"),
        (("x.json", "--acceptance", "1.2"), "from 0 to 1"),
        (("x.json", "--acceptance", "missing/eval.json"), "missing/eval.json"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: str, capsys: Capture) -> None:
    said = tiny.refused(capsys, "plan", *arguments)
    assert words in said


def test_files_that_are_no_curves(tmp_path: Path) -> None:
    texts = {"[]": "JSON object", '{"format": 9}': "not a cost curve", '{"format": 1}': "`model` is missing"}
    for text, words in texts.items():
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(DataError, match=words):
            load_cost_curve(tmp_path / "c.json")


def test_curves_that_do_not_go_together(tmp_path: Path, capsys: Capture) -> None:
    target, draft = saved(tmp_path / "t.json", [1.0, 1.1], "T(1)"), saved(tmp_path / "d.json", [0.1, 0.2])
    assert "the draft's in seconds" in tiny.refused(capsys, "plan", target, draft)
    short = saved(tmp_path / "s.json", [1.0])
    assert "ends at m = 1" in tiny.refused(capsys, "plan", short)


def test_the_figures_of_the_order_are_those_of_the_documents() -> None:
    text = (tiny.ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name, (tokens, drafted) in order.LOOKED_UP.items():
        (row,) = re.findall(rf"^\| \**pytorch\** \| \**{name.split()[1]}\** \|.* % ?\**.*", text, re.M)
        cells = [cell.strip(" *") for cell in row.split("|")]
        rate = float(cells[5].removesuffix(" %")) / 100
        assert (tokens, drafted) == (float(cells[4]), pytest.approx((tokens - 1) / rate, abs=0.006))
    text = text.replace("\n", " ")
    (sibling,) = re.findall(r"sibling's acceptance probability is ([\d.]+) %", text)
    assert pytest.approx(float(sibling) / 100, abs=0.005) == order.SIBLING
    adapted = (tiny.ROOT / "docs" / "tuned-target.md").read_text(encoding="utf-8")
    for row, figure in (("the official", order.TUNED), ("adapted:", order.ADAPTED)):
        assert float(re.findall(rf"^\| {row} [^|]*\| ([\d.]+)", adapted, re.M)[0]) == pytest.approx(figure, abs=0.005)
    (gain,) = re.findall(r"the whole sibling, [\d,]+ tokens at 1e-5 \| [\d.]+ \| \+([\d.]+)", text)
    assert float(gain) == order.STOCK_GAIN
    steps, positions = re.findall(r"self-asked questions, (\d+) steps of ([\d,]+) positions", text)[0]
    assert int(steps) * int(positions.replace(",", "")) == pytest.approx(order.POSITIONS, rel=0.01)
    (reached,) = re.findall(r"questions\.jsonl acceptance rises from [^]]*\] to ([\d.]+)", text)
    assert float(reached) == pytest.approx(order.REACHED, abs=0.005)
    # The demo's draft stopped after 0.30 M positions.
    before = float(re.findall(r"rejection sampling \| [^|]* \| ([\d.]+) %", text)[0]) / 100
    doublings = math.log2(order.POSITIONS / 0.30e6)
    assert (float(reached) - before) / doublings == pytest.approx(order.DOUBLING, abs=0.003)


def test_the_order_of_decision(tmp_path: Path, monkeypatch: Patch) -> None:
    """Each line is the last one where it suffices: by hand, of a target with and without what comes first."""
    tokenizer = toy_tokenizer()
    for name, layers, hidden in (("big", 6, 48), ("small", 1, 16)):
        model = toy(vocabulary=len(tokenizer), layers=layers, hidden_size=hidden, intermediate_size=2 * hidden)
        save_toy(model, tokenizer, tmp_path / name)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    ((name, share, trimmed),) = siblings(str(tmp_path / "big"))
    sizes = [(tmp_path / one / "model.safetensors").stat().st_size for one in ("small", "big")]
    assert name == str(tmp_path / "small") and share == sizes[0] / sizes[1] and trimmed == share  # 300 tokens

    def decided(slope: float, draft: float = 0.3) -> list[str]:
        return decide(str(tmp_path / "big"), straight(slope, draft))

    flat = decided(0.01)
    tokens, drafted = order.LOOKED_UP["a lookup"]
    assert [line[:2] for line in flat] == ["1.", "2.", "3.", "Me"]
    assert f"a lookup {tokens / (1 + 0.01 * drafted):.2f} and" in flat[1]
    assert decided(1.1)[-1] == "No draft gains more. Plain decoding is the fastest."
    (command,) = re.findall("No draft gains more. Measure them: `distill (.*)`", decided(0.2, 0.95)[-1])
    words = shlex.split(command.replace("FILE", str(tiny.ROOT / "data" / "test")))
    assert tiny.call(*words, "--tokens", 8, "--count", 2) == 0
    assert decide(str(tmp_path / "big"), None)[0].startswith(f"3. {name} has its tokens and {share:.2f}")
    (tmp_path / "small" / "config.json").unlink()
    alone, case = decided(0.01), straight(0.01, 0.3)
    needed = min(case.needed(case.timings[0], length) for length in LENGTHS)
    assert "3. No smaller model" in alone[2] and f"pays from {needed:.2f}" in alone[3]
    assert decide(str(tmp_path / "big"), None)[0].startswith("5. Training")
    edit(tmp_path / "big" / "config.json", mtp_num_hidden_layers=1)
    monkeypatch.setattr("distill.engines.server_commands.HEAD_TENSORS", re.compile("embed"))
    assert decided(0.01)[0].startswith("1. A head ships with the target")
