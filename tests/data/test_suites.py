"""Published suites: their files' forms, the questions that are taken of each category, and every turn of a question."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import question_worlds
import tiny
from tiny import Capture

from distill.data import suites
from distill.data.suites import read_suite, suite_prompts
from distill.decoding.decode import Round
from distill.errors import DataError
from distill.files import from_json
from distill.measuring import evaluation
from distill.measuring.evaluation_results import EvaluationReport, evaluation_blocks
from distill.measuring.speedup_results import SpeedupReport
from distill.measuring.speedup_tables import speedup_blocks
from distill.recipe import Chat, Evaluate, Sampler
from distill.tables import document, ratio_interval

SHARED = tiny.TOKENIZERS.parent / "prompts" / "spec-bench.jsonl"
COUNTS = {"math": 3, "qa": 4, "rag": 2}  # questions of the made suite; those of maths have two turns


def written(path: Path, questions: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in questions), encoding="utf-8")
    return path


def made(counts: dict[str, int] | None = None) -> list[dict[str, Any]]:
    kinds = [kind for kind, count in (counts or COUNTS).items() for _ in range(count)]
    return [
        {"question_id": number, "category": kind, "turns": [f"{kind} {number}"] + ["and then?"] * (kind == "math")}
        for number, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny instruct model that ends its texts, and a made suite."""
    folder = tmp_path_factory.mktemp("suite")
    question_worlds.build_instruct(folder, question_worlds.biased)
    written(folder / "made.jsonl", made())
    return folder


def test_some_questions_of_each_category(tmp_path: Path) -> None:
    suite = read_suite(written(tmp_path / "made.jsonl", made()))
    assert suite.name == "made" and Counter(one.category for one in suite.questions) == COUNTS
    chosen = suite.take(2, 0)
    assert [one.category for one in chosen] == ["math", "qa", "rag"] * 2  # in turns
    again = suite.take(2, 1)
    assert {one.id for one in again} != {one.id for one in chosen} and suite.take(2, 0) == chosen
    assert Counter(one.category for one in again) == dict.fromkeys(COUNTS, 2)
    assert len(suite.take(None, 0)) == 9 and Counter(one.category for one in suite.take(3, 0))["rag"] == 2
    assert "6 of 9 questions, 2 of each of 3 categories, seed 4, 8 turns" in suite.words(chosen, 8, 4)
    assert "all questions, 2 to 4 of each of 3 categories, 12 turns" in suite.words(suite.questions, 12, 0)


def test_suites_are_known_by_their_categories(tmp_path: Path) -> None:
    """Spec-Bench counts MT-Bench's eight categories as one; a draw of it has them in turns."""
    mt = read_suite(written(tmp_path / "question.jsonl", made(dict.fromkeys(suites.MT_BENCH, 2))))
    assert mt.name == "MT-Bench" and len({one.category for one in mt.questions}) == 8
    spec = read_suite(written(tmp_path / "question.jsonl", made(dict.fromkeys(suites.SPEC_BENCH, 8))))
    assert spec.name == "Spec-Bench"
    chosen = spec.take(8, 3)
    assert Counter(one.category for one in chosen) == dict.fromkeys(
        ("MT-Bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 8
    )
    assert {one.kind for one in chosen} == {*suites.SPEC_BENCH}
    assert read_suite(written(tmp_path / "a.jsonl", made(dict.fromkeys(suites.SPEED_BENCH, 1)))).name == "SPEED-Bench"


def test_spec_bench_itself() -> None:
    """Categories and counts of the published file: 480 questions, 560 turns."""
    if not SHARED.is_file():
        pytest.skip(f"no {SHARED}; set DISTILL_SHARED")
    suite = read_suite(SHARED)
    rows = [json.loads(line) for line in SHARED.read_text(encoding="utf-8").splitlines()]
    assert suite.name == "Spec-Bench" and [one.kind for one in suite.questions] == [row["category"] for row in rows]
    assert [list(one.turns) for one in suite.questions] == [row["turns"] for row in rows]
    assert {*Counter(one.category for one in suite.questions).values()} == {80}
    assert (len(suite.questions), sum(len(one.turns) for one in suite.questions)) == (480, 560)
    assert len(suite.take(8, 0)) == 48


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"category": "qa", "turns": "one text"}, "line 2 is not a question of a suite .*--prompts"),
        ({"category": "qa", "turns": []}, "not a question"),
        ({"category": "qa", "turns": ["a", " "]}, "not a question"),
        ({"question_id": 1, "turns": ["a"]}, r"not a question of a suite \(it has: question_id, turns\)"),
        ({"question_id": 0, "category": "qa", "turns": ["a"]}, "question_id 0 occurs twice"),
        ({"category": "qa", "turns": [suites.PLACEHOLDER]}, "1 of 2 questions are placeholders"),
    ],
)
def test_files_of_another_form(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "a.jsonl", [made()[0], record])
    with pytest.raises(DataError, match=f"(?s){message}"):
        read_suite(path)
    with pytest.raises(DataError, match="there is no file"):
        read_suite(tmp_path / "none.jsonl")


def test_parquet_is_read_as_speed_bench_has_it(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [row | {"question_id": str(row["question_id"]), "multiturn": False, "source": None} for row in made()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    found = read_suite(tmp_path / "test.parquet")
    assert found.questions == read_suite(written(tmp_path / "test.jsonl", made())).questions


def test_a_later_turn_follows_the_targets_answer(world: Path) -> None:
    suite = read_suite(world / "made.jsonl")
    found = suite_prompts(suite, str(world / "target"), Chat(), 2, 0, 400, 16)
    assert len(found.asked) == 6 and "8 turns" in found.words
    asked: list[list[int]] = []

    def write(prompts: list[list[int]]) -> list[list[int]]:
        asked.extend(prompts)
        return [[number] for number, _ in enumerate(prompts)]

    turns, units = found.all_turns(write, lambda ids: f"answer {ids[0]}")
    assert asked == [one.prompt for one in found.asked if one.label == "math"]
    assert [units.count(number) for number in range(6)] == [2 if one.label == "math" else 1 for one in found.asked]
    from distill.engines.torch.hugging_face import load_tokenizer

    texts = [load_tokenizer(str(world / "target")).decode(one.prompt) for one in turns]
    later = [text for text in texts if "and then?" in text]
    assert len(later) == 2 and all(f"answer {number}" in text for number, text in enumerate(later))
    assert max(len(one.prompt) for one in turns) <= found.longest <= 400 and not found.dropped
    short = suite_prompts(suite, str(world / "target"), Chat(), 2, 0, 30, 16)
    kept, _ = short.all_turns(write, lambda ids: "a long answer " * 9)
    assert max(len(one.prompt) for one in kept) == 30 and short.dropped["beginnings of prompts of more than 30 tokens"]
    with pytest.raises(DataError, match="chat template"):
        suite_prompts(suite, str(world / "plain"), Chat(), 2, 0, 400, 16)


@pytest.mark.usefixtures("one_thread")
def test_a_suite_as_papers_report_it(world: Path, capsys: Capture) -> None:
    pair = world / "target", world / "target", "--suite", world / "made.jsonl", "--count", 1, "--tokens", 8
    shown = tiny.shown(capsys, "speedup", *pair, "--lengths", 2, "-C", "drafter=lookup", "-o", "json")
    report, found = json.loads(shown), from_json(json.loads(shown), SpeedupReport, "-")
    rows = {one["configuration"]: one for one in report["parts"][0]["measurements"]}
    assert {*rows} == {"plain", "draft 2", "plain sampled", "draft 2 sampled", "lookup", "lookup sampled"}
    assert report["prompts"] == 4 and rows["draft 2 sampled"]["sampler"]["temperature"] == 1
    for one in rows.values():
        assert [(group["group"], group["count"]) for group in one["by_class"]] == [
            *((kind, 1) for kind in ("math", "qa", "rag")),
            ("all", 3),  # questions, of which one has two turns
        ]
    whole = rows["draft 2"]["by_class"][-1]
    assert whole["tokens_low"] <= whole["tokens_per_round"] <= whole["tokens_high"]
    assert whole["speedup"] == rows["draft 2"]["speedup"] and whole["speedup_low"] == rows["draft 2"]["speedup_low"]
    text = document(speedup_blocks(found))
    assert "3 of 9 questions, 1 of each of 3 categories, seed 0, 4 turns, up to 8 new tokens a turn" in text
    assert "temperature 0: verifier greedy" in text and "temperature 1: verifier token (rejection sampling)" in text
    assert "| category | configuration | questions |" in text and "Intervals resample questions" in text
    alone = json.loads(tiny.shown(capsys, "speedup", *pair, "--lengths", 2, "--sampler", "temperature=0", "-o", "json"))
    assert [one["configuration"] for one in alone["parts"][0]["measurements"]] == ["plain", "draft 2"]
    for option in (("--prompts", world / "made.jsonl"), ("--prompt-tokens", 8)):
        assert "without effect with --suite, which has its own prompts" in tiny.refused(
            capsys, "speedup", *pair, *option
        )


def test_tokens_per_round_of_a_category() -> None:
    """A question's turns are one unit: the rounds of both count, and one question has no interval."""

    def turn(*accepted: int) -> list[Round]:
        return [Round(1, 8, one, 0.0) for one in accepted]

    rounds = {"draft": [turn(3, 1), turn(0), turn(5), turn(2, 2)]}
    opened = evaluation.TargetWithDrafts({}, [], 64, ["math", "math", "qa", "qa"], units=[0, 0, 1, 2])
    options = evaluation.EvaluationOptions(Sampler(temperature=0), Evaluate(), "")
    math_, qa, whole = evaluation.by_category(opened, options, rounds, [])
    assert [(one.category, one.questions) for one in (math_, qa, whole)] == [("math", 1), ("qa", 2), ("all", 3)]
    assert math_.tokens_per_round.mean == (4 + 2 + 1) / 3 and math.isnan(math_.tokens_per_round.low)
    assert qa.tokens_per_round == ratio_interval([6, 6], [1, 2])
    assert whole.tokens_per_round == ratio_interval([7, 6, 6], [3, 1, 2])


@pytest.mark.usefixtures("one_thread")
def test_acceptance_on_a_suite(world: Path, capsys: Capture) -> None:
    pair = world / "target", world / "target", "--suite", world / "made.jsonl", "--count", 1
    shown = tiny.shown(capsys, "eval", *pair, "--seed", 2, "-o", "json")
    report = from_json(json.loads(shown), EvaluationReport, "-")
    text = document(evaluation_blocks(report))
    # All intervals resample questions, with or without categories. One of the questions has two turns.
    (whole,) = [one for one in report.categories if (one.category, one.temperature) == ("all", 0.0)]
    assert report.tokens_per_round["draft"] == whole.tokens_per_round
    assert report.domains["answers"]["draft"].prompts == 3
    assert {(group.label, group.prompts) for group in report.groups if group.of == "class"} == {
        (kind, 1) for kind in COUNTS
    }
    assert all(group.prompts <= 3 for group in report.groups)
    assert "3 of 9 questions, 1 of each of 3 categories, seed 2, 4 turns, up to" in text
    assert "temperature 0: verifier greedy" in text and "temperature 1: verifier token (rejection sampling)" in text
    rows = re.findall(r"\| (math|qa|rag|all) \| draft \| (0|1) \| (\d) \|", text)
    assert rows == [(kind, drawn, "3" if kind == "all" else "1") for kind in (*COUNTS, "all") for drawn in "01"]
    for option in (("--prompts", world / "made.jsonl"), ("--seed", -1)):
        assert tiny.refused(capsys, "eval", *pair, *option)
