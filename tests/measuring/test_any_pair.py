"""`distill speedup --target A --draft B`: figures against steps by hand, prompts against transformers, whole calls."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from table_model import TableModel
from tiny import Capture, Patch
from toys import speculative, toy

from distill.data.prompts import read_user_prompts, sources_of
from distill.decoding.decode import Decoded, Round
from distill.engines.model import ROOT, Step, Watch
from distill.engines.torch.static import StaticTorchModel
from distill.errors import DataError
from distill.files import read_result
from distill.gguf.writer import export_gguf
from distill.measuring import speedup_results
from distill.measuring.compare import TimedConfiguration, TimedText, by_class, round_figures, time_steps
from distill.measuring.speedup import speedup
from distill.measuring.speedup_results import (
    InTurns,
    Measurement,
    RoundFigures,
    SpeedupPart,
    SpeedupReport,
    StepFigures,
)
from distill.measuring.speedup_tables import speedup_blocks
from distill.measuring.verdict import explain, explanations, next_steps, verdict
from distill.recipe import Chat, Configuration, Corpus, Sampler, load_recipe
from distill.recipe.configuration import PLAIN, names
from distill.run import Run
from distill.tables import document

# Steps and rounds by hand.

CHAIN = Configuration(length=2)


def made(configuration: Configuration, *texts: TimedText, base: TimedConfiguration | None = None) -> TimedConfiguration:
    return TimedConfiguration(configuration, Sampler(temperature=0), base=base, texts=[*texts])


def steps_at(depths: Sequence[int], tokens: Sequence[int], seconds: float, gap: float) -> list[Step]:
    return [Step(d, m, i * (seconds + gap), seconds) for i, (d, m) in enumerate(zip(depths, tokens, strict=True))]


PLAIN_TEXT = TimedText(0, 2.5, Decoded(tokens=[1] * 4), steps_at([126, 127, 128], [1, 1, 1], 0.5, 0.25))
# Two rounds: 2 drafted and both accepted, then 2 drafted and none; the second begins with two tokens.
DRAFTED = TimedText(
    *(0, 3.0),
    Decoded(tokens=[1] * 5, rounds=[Round(126, 2, 2, 2.0), Round(129, 2, 0, 1.0)]),
    steps_at([126, 129], [3, 3], 0.75, 0.0),
    steps_at([126, 127, 128, 130], [1, 1, 2, 1], 0.125, 0.0),
)
ALONE = StepFigures(100, {1: 0.5, 3: 0.625}, {1: 0.0625, 2: 0.09375})


def test_the_seconds_of_a_round() -> None:
    found = round_figures(made(CHAIN, DRAFTED), ALONE, synchronous=True)
    assert (found.tokens, found.verified, found.draft_steps) == (2.0, 3.0, 2.0)
    assert (found.seconds, found.target_seconds, found.draft_seconds, found.overhead_seconds) == (1.5, 0.75, 0.25, 0.5)
    # τ ÷ (T(3) + 2 D(1)): the step of two tokens counts as one.
    assert found.bound == pytest.approx(2 / (0.625 + 2 * 0.0625))
    assert found.tokens_per_second == pytest.approx(4 / 3)
    tree = round_figures(made(Configuration(drafter="tree", nodes=2), DRAFTED), ALONE, synchronous=False)
    assert tree.bound == pytest.approx(4 / (2 * 0.625 + 3 * 0.0625 + 0.09375))  # of a tree two nodes are two nodes
    assert tree.target_seconds is tree.draft_seconds is tree.overhead_seconds is None


def test_the_seconds_of_a_plain_step_run_to_the_next_one() -> None:
    found = round_figures(made(PLAIN, PLAIN_TEXT), ALONE, synchronous=True)
    assert found.tokens == 1.0
    assert found.seconds == pytest.approx((0.75 + 0.75 + 0.5) / 3)  # what comes after the last step is not known
    assert found.target_seconds == pytest.approx(0.5) and found.bound == pytest.approx(2)


def test_figures_by_class() -> None:
    def texts(seconds: Sequence[float], rounds: bool) -> list[TimedText]:
        own = [[Round(3, 2, prompt, taken)] * rounds for prompt, taken in enumerate(seconds)]
        return [TimedText(i, s, Decoded(tokens=[1] * 6, rounds=own[i])) for i, s in enumerate(seconds)]

    one = made(CHAIN, *texts([1.0, 3.0, 1.0], True), base=made(PLAIN, *texts([2.0, 3.0, 2.0], False)))
    found = by_class(one, ["code", "chat", "code"])
    assert [(figures.group, figures.count) for figures in found] == [("code", 2), ("chat", 1)]
    assert [figures.speedup for figures in found] == pytest.approx([2, 1])
    assert found[0].acceptance == 0.5 and found[0].speedup_low == pytest.approx(2)  # both prompts take half the time
    assert math.isnan(found[1].speedup_low)
    assert by_class(one, ["code"] * 3) == []


PLAINLY = RoundFigures(1, 1, 0, 0.5, 0.5, 0, 2)


def measured(
    configuration: Configuration,
    speedup: float,
    low: float,
    acceptance: float | None,
    rounds: RoundFigures = PLAINLY,
) -> Measurement:
    drafter = configuration.drafter if configuration.drafts else None
    return Measurement(
        *("p", "b", *names([configuration]), None, drafter, None, None, 8.0, 8.0, None, acceptance),
        *(speedup, low, speedup + (speedup - low), None, 1, 0, 0, None, 0.0),
        *(0.018 if drafter else 0.010, rounds),
    )


# What stands in the sentence about a chain of this speedup and its lower end, whose rounds give and verify so many
# tokens and cost so much in target, draft and beside them, in plain steps.
TOLD: dict[str, tuple[float, float, float, float, Sequence[float]]] = {
    "A round gives 3.40 tokens and costs 1.70 plain steps (1.20 in the target, 0.40 in the draft).": (
        *(2.0, 1.8, 3.4, 5),
        (1.2, 0.4, 0.1),
    ),
    "because a round costs more than it gives. It would gain with 25% of the drafted tokens accepted instead of "
    "20%, or with drafting that takes 0.20 instead of 0.40 plain steps a round, or with an engine whose steps of 5.0 "
    "tokens cost 1.30 instead of 1.50 plain steps a round.": (
        *(0.9, 0.8, 1.8, 5),
        (1.5, 0.4, 0.1),
    ),
    "gains nothing, because it hardly drafts (1.10 tokens": (0.95, 0.9, 1.05, 1.1, (1, 0.05, 0.05)),
    "reading the prompt takes 18.0 ms with the draft, 10.0 without.": (0.95, 0.9, 2.1, 5, (1.5, 0.4, 0.1)),
    "prompts vary by more than it gains": (1.05, 0.9, 2.2, 5, (1.5, 0.4, 0.1)),
}


@pytest.mark.parametrize("words", TOLD)
def test_what_is_told_about_a_speedup(words: str) -> None:
    speedup, low, tokens, verified, (target, draft, rest) = TOLD[words]
    rounds = RoundFigures(tokens, verified, 4, (target + draft + rest) / 2, target / 2, draft / 2, 1)
    rows = [measured(PLAIN, 1, 1, None), measured(Configuration(length=4), speedup, low, (tokens - 1) / 4, rounds)]
    sentence = explain(SpeedupPart("p", "b", rows, ALONE))
    assert words in sentence and ("gains nothing" in sentence) is (speedup < 1)
    assert sentence.startswith(
        f"Fastest configuration that drafts: `draft 4`, {speedup:.2f}× over the whole request. A round"
    )


def test_a_draft_whose_file_is_slow_has_other_types_proposed() -> None:
    part = SpeedupPart("p", "gguf", [measured(PLAIN, 1, 1, None)], ALONE)
    for draft, seconds, said in (("d.gguf", 0.2, True), ("d.gguf", 0.1, False), ("folder", 0.2, False)):
        one = replace(part, steps=StepFigures(100, {1: 0.5}, {1: seconds}))
        told = explanations(SpeedupReport("c", {}, 8, 16, {}, [one], target="t.gguf", draft=draft))
        assert any("0.40 target steps. `distill profile d.gguf --types q8_0,q4_0`" in line for line in told) is said


def test_expensive_steps_on_an_accelerator_may_wait_for_the_processor() -> None:
    on_device = replace(PLAINLY, target_seconds=None, draft_seconds=None)
    for rounds, seconds, settings, said in (
        (on_device, 0.4, "", True),
        (on_device, 0.4, "static cache, compiled", False),
        (on_device, 0.1, "", False),
        (PLAINLY, 0.4, "", False),
    ):
        rows, steps = [measured(PLAIN, 1, 1, None, rounds)], StepFigures(100, {1: 0.5}, {1: seconds})
        part = SpeedupPart("p", "pytorch", rows, steps, pytorch=settings)
        sentences = explanations(SpeedupReport("c", {}, 8, 16, {}, [part], target="big", draft="small"))
        assert any("0.80 target steps. On an accelerator" in line for line in sentences) is said


def test_one_sentence_says_what_to_use() -> None:
    """In tokens per second over all engines; a gain over a slow engine's plain decoding is none. The commands are of
    the same way."""
    lookup, chain = Configuration(drafter="lookup", rule="expected-value"), Configuration(length=4)
    paid = RoundFigures(2.0, 5, 4, 0.8, 0.6, 0.15, 2)

    def part(backend: str, plain: float, speedup: float, drafted: float = 0.8) -> SpeedupPart:
        speeds = {PLAIN: 1.0, lookup: speedup, chain: drafted}
        rows = [
            measured(
                one, speed, speed - 0.1 * one.drafts, 0.25 if one.drafts else None, paid if one is chain else PLAINLY
            )
            for one, speed in speeds.items()
        ]
        own = [
            replace(
                *(row,),
                **dict(pair="pair", backend=backend, plain_tokens_per_second=plain, settings=one.settings),
                tokens_per_second=plain * row.speedup,
            )
            for one, row in zip(speeds, rows, strict=True)
        ]
        return SpeedupPart("pair", backend, own, ALONE, target="big it.gguf", draft="small.gguf")

    def asked(*parts: SpeedupPart, **more: Any) -> SpeedupReport:
        return SpeedupReport("command", {}, 8, 16, {}, [*parts], texts="he.jsonl", **more)

    told = asked(part("pytorch", 30, 1.5), part("gguf", 65, 1.2))
    assert verdict(told) == (
        "Use lookup in llama.cpp: 78.0 tokens/s instead of 65.0 (1.20× [1.10, 1.30], 8 prompts of he.jsonl). "
        "The draft alone gives 0.80×."
    )
    assert next_steps(told).splitlines()[1::2] == [
        "llama-server -m 'big it.gguf' --spec-type ngram-mod",
        "distill generate 'def fib(n):' 'big it.gguf' -C drafter=lookup,rule=expected-value,length=8",
    ]
    # A GGUF file in PyTorch decodes in the file's own bits, which no other server does.
    options = "'big it.gguf' --pytorch target_weights=file -C drafter=lookup,rule=expected-value,length=8"
    assert next_steps(asked(part("pytorch", 70, 1.5))).splitlines()[1::2] == [
        f"distill serve {options}",
        f"distill generate 'def fib(n):' {options}",
    ]
    best = asked(part("gguf", 65, 1.2, 1.5))
    assert verdict(best).startswith("Use the draft (draft 4) in llama.cpp: 97.5") and "Without the draft it" in verdict(
        best
    )
    assert "llama-server -m 'big it.gguf' -md small.gguf --spec-type draft-simple --spec-draft-n-max 4" in next_steps(
        best
    )
    assert "1.05×, 8" in verdict(asked(part("pytorch", 30, 1.4), part("gguf", 40, 0.9)))  # one engine after the other

    # Nothing gains: what would have to change. A round costs 1.6 plain steps and gives 2 of 5 tokens.
    poor = replace(paid, tokens=1.2)
    rows = [measured(PLAIN, 1, 1, None), measured(chain, 0.75, 0.7, 0.05, poor)]
    nothing = verdict(asked(SpeedupPart("p", "gguf", [replace(row, backend="gguf", pair="p") for row in rows], ALONE)))
    assert nothing.startswith("Nothing is clearly faster than plain decoding in llama.cpp: 8.0 tokens/s (8 prompts of")
    assert nothing.endswith("It would gain with 15% of the drafted tokens accepted instead of 5%.")
    assert "plain decoding in llama.cpp: 40.0 tokens/s" in (plainly := verdict(asked(part("gguf", 40, 1.05))))
    assert "prompts vary by more than it gains" in plainly and "-C drafter=none" in next_steps(
        asked(part("gguf", 40, 1))
    )

    again = [
        InTurns("pair", "gguf", 1, "lookup", 66.0, 1.2, 1.1, 1.3),
        InTurns("pair", "gguf", 0, "plain", 55.0, 1, 1, 1),
    ]
    turns = verdict(asked(part("gguf", 60, 1.15), part("pytorch", 30, 1.4), in_turns=again))
    assert "66.0 tokens/s instead of 55.0 (1.20× [1.10, 1.30], 8 prompts" in turns
    for gain, contenders in ((1.4, {"gguf", "pytorch"}), (1.3, {"gguf"})):  # 42 and 39 tokens/s beside 66
        report = asked(part("gguf", 60, 1.1), part("pytorch", 30, gain))
        assert {backend for _, backend in report.contenders} == contenders

    # Another engine or type of file counts where it is near to the target's own distributions, and says how near.
    own, other = part("gguf", 60, 1.2), part("ik:q8_0", 90, 1.2)
    near, far = (asked(own, replace(other, kl=kl)) for kl in (0.004, 0.3))
    assert "in ik_llama.cpp (q8_0): 108.0" in verdict(near) and "KL 0.004 nats to the target's own)" in verdict(near)
    assert "in llama.cpp: 72.0 tokens/s" in verdict(far)
    text = document(speedup_blocks(far))
    assert "ik_llama.cpp, does not count: its distributions are 0.3 nats of KL from the target's own" in text
    assert "# serve it" in "\n".join(text.splitlines()[-10:])

    # Where all that draft are sampled, these are compared with each other.
    drawn = [replace(row, sampler={"temperature": 1.0}) for row in own.measurements]
    greedy = replace(own, measurements=[own.measurements[0], *drawn])
    assert verdict(asked(greedy)).startswith("Use lookup in llama.cpp: 72.0 tokens/s instead of 60.0")


def test_the_engines_of_a_run_take_turns(copied: Path, monkeypatch: Patch) -> None:
    """Plain decoding of both and what beats it there, the fastest first; the fastest plain one is the base.

    An engine that is too slow on this machine takes none, and does where every one may."""
    for near in (speedup_results.CONTENDER_RATIO, 0.0):
        monkeypatch.setattr(speedup_results, "CONTENDER_RATIO", near)
        if not near:
            recipe = load_recipe(copied / "config.yaml")
            speedup(recipe, Run(copied, recipe))  # the parts are there
        report = read_result(copied / "speedup.json", SpeedupReport)
        shown = "engines in turns" in (copied / "speedup.md").read_text(encoding="utf-8")
        assert bool(report.in_turns) == shown == (len(report.contenders) > 1)
    turns = report.in_turns
    found = {(one.backend, one.configuration) for one in turns}
    assert {("pytorch", "plain"), ("gguf", "plain")} <= found
    assert {backend for backend, _ in found} == {"pytorch", "gguf"} and len(found) == len(turns)
    rates = [one.tokens_per_second for one in turns]
    assert rates == sorted(rates, reverse=True)
    base = max((one for one in turns if one.configuration == "plain"), key=lambda one: one.tokens_per_second)
    for one in turns:
        assert one.speedup == pytest.approx(one.tokens_per_second / base.tokens_per_second)


@tiny.needs_llama
def test_an_engine_alone_is_judged_by_the_targets_own(copied: Path) -> None:
    """Also where the target's own engine is not measured: the KL of its file to the folder is there."""
    recipe = load_recipe(
        copied / "config.yaml", ["speedup.backends=[gguf]", "speedup.lengths=[2]", "speedup.prompts=2"]
    )
    shutil.rmtree(copied / "speedup")
    speedup(recipe, Run(copied, recipe))
    (part,) = read_result(copied / "speedup.json", SpeedupReport).parts
    assert part.backend == "gguf" and part.kl is not None and 0 < part.kl < 0.01


def test_every_step_of_both_models_is_noted() -> None:
    target, draft = TableModel(6), TableModel(6, seed=1)
    watch = Watch()
    decoded = speculative(*watch.models(target, draft), [1, 2, 3], 12, 2)  # type: ignore[arg-type]
    steps, drafting = watch.take(decoded.prefilled)
    assert len(steps) == len(decoded.rounds) and drafting  # but for the prompt
    assert [step.tokens for step in steps] == [r.drafted + 1 for r in decoded.rounds]
    assert [step.depth for step in steps] == [r.depth for r in decoded.rounds]
    assert sum(step.seconds for step in steps) < decoded.seconds
    assert watch.take() == ([], [])
    big, small = watch.models(target, target)  # type: ignore[arg-type]
    assert big is small
    big.rollback([0])
    big.extend([1, 2])
    assert [step.tokens for step in watch.target] == [2] and not watch.draft


def test_a_round_has_every_step_behind_the_prompt_and_only_its_own_are_timed() -> None:
    """Also one that reads from the beginning; what is read late or again is paid, and no step of m tokens."""
    watch, target, draft = Watch(), TableModel(6), TableModel(6, seed=1)
    decoded = speculative(*watch.models(target, draft), [1], 4, 2)  # type: ignore[arg-type]
    steps, drafting = watch.take(decoded.prefilled)
    assert drafting[0].depth == 0 and len(steps) == len(decoded.rounds)
    late = TimedText(0, 3.0, decoded, [*steps, Step(9, 33, 9.0, 0.5)], [*drafting, Step(5, 40, 9.0, 0.25)])
    found = time_steps([made(CHAIN, late)], target, draft, 1)
    assert set(found.target) <= {1, 2, 3} and set(found.draft) <= {1, 2}
    both, once = (round_figures(made(CHAIN, one), ALONE, True) for one in (late, replace(late, target=[], draft=[])))
    assert both.target_seconds is not None and both.target_seconds * len(decoded.rounds) > 0.5
    tokens = sum(r.accepted + 1 for r in decoded.rounds)
    own = round_figures(made(CHAIN, replace(late, target=steps, draft=drafting)), ALONE, True)
    assert tokens / both.bound == pytest.approx(tokens / own.bound + 0.75) and math.isnan(once.bound)


def test_steps_of_static_models_are_noted() -> None:
    """Chains and trees; either the model or the watched one goes on with a text."""
    model, watch = StaticTorchModel(toy()), Watch()
    watched, _ = watch.models(model, model)
    watched.extend([1, 2, 3])
    watched.extend([4, 5], parents=[ROOT, ROOT])
    watched.keep([[1]])
    watched.extend([6, 7])
    assert model.lengths == watched.lengths == [6]
    assert watched.model is model.model  # type: ignore[attr-defined]  # messages name it
    assert [(step.depth, step.tokens) for step in watch.target] == [(0, 3), (3, 2), (4, 2)]
    model.rollback([4])
    assert watched.lengths == [4] and watch.take()[0][1].depth == 3


# Prompts.

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, draft/, other/ (of another vocabulary), GGUF files of the first two, and files of prompts."""
    folder = tmp_path_factory.mktemp("pairs")
    tiny.build_model(folder / "target", layers=3)
    tiny.build_model(folder / "draft", layers=1)
    tiny.build_model(folder / "other", layers=1, vocabulary=350, seeds=range(30, 45))
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    with (folder / "texts.jsonl").open("w") as file:
        for index in range(16):
            record = {"text": tiny.document(200 + index)[:700], "category": "even" if index % 2 == 0 else "odd"}
            file.write(json.dumps(record) + "\n")
    questions = [f"def {word}(buffer, stream):" for word in tiny.WORDS[:6]]
    messages = [{"messages": [{"role": "user", "content": one}]} for one in questions]
    (folder / "chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in messages))
    (folder / "plain.txt").write_text("\n".join(tiny.document(seed) for seed in range(100, 106)))
    for name in ("target", "draft"):
        export_gguf(folder / name, folder / f"{name}.gguf", "f32")
    return folder


def asked(place: Path, name: str, target: str = "target", **more: Any) -> Any:
    settings = {"count": 4, "tokens": 16, "room": 200} | more
    return read_user_prompts(str(place / target), Corpus(sources=sources_of([place / name])), Chat(), **settings)


@tiny.needs_llama
@pytest.mark.parametrize("name", ["chat.jsonl", "texts.jsonl"])
def test_a_gguf_file_gives_the_prompts_of_its_folder(name: str, place: Path) -> None:
    folder, file = asked(place, name), asked(place, name, "target.gguf")
    assert [one.prompt for one in file.measured] == [one.prompt for one in folder.measured]


def test_prompts_have_the_class_of_their_label(place: Path) -> None:
    assert set(asked(place, "texts.jsonl", count=16).classes()) == {"even", "odd"}


def test_how_prompts_are_asked_is_said_with_the_other_way(place: Path) -> None:
    text, chat = asked(place, "plain.txt"), asked(place, "chat.jsonl")
    assert text.asked == (
        '4 cuts of plain text of 16 tokens. To ask each line in the chat template, write it as {"prompt": "…"} into a '
        ".jsonl file"
    )
    assert chat.asked.startswith("4 asked in the target's chat template. To continue them as plain text, write each as")
    both = read_user_prompts(
        str(place / "target"),
        Corpus(sources=sources_of([place / "plain.txt", place / "chat.jsonl"])),
        Chat(),
        9,
        16,
        200,
    )
    assert {"cuts of plain text" in part for part in both.asked.split("; ")} == {True, False}
    report = SpeedupReport("", {}, 4, 12, {}, [], target="m", asked=text.asked)
    assert f"Prompts: {text.asked}." in document(speedup_blocks(report))


# Whole calls.

QUICK = ("--tokens", 12, "--prompt-tokens", 16, "--count", 4, "--threads", 1)


def call(place: Path, capsys: Capture, target: str, draft: str, *arguments: Any) -> str:
    pair = [place / target, *([place / draft] if draft else [])]
    with tiny.one_thread():
        return tiny.shown(capsys, "speedup", *pair, *QUICK, *arguments)


@pytest.mark.parametrize("engine", [(), ("--pytorch", "static=true,draft_device=cpu")])
def test_a_pair_of_folders(engine: tuple[str, ...], place: Path, capsys: Capture, tmp_path: Path) -> None:
    """Also with static caches, whose rounds drive both models past `extend`."""
    more = ("--configuration", "{drafter: tree, nodes: 4, length: 2}")
    more = (*more, *engine)
    pair = ("target", "draft", "--prompts", place / "texts.jsonl", "--lengths", "1,3", *more)
    out = tmp_path / "measured.json"
    out.write_text(call(place, capsys, *pair, "-o", "json"))
    found = read_result(out, SpeedupReport)
    text = document(speedup_blocks(found))
    (part,) = found.parts
    assert [row.configuration for row in found.measurements] == [*("plain", "draft 1", "draft 3", "tree")]
    assert all(row.different == 0 and (row.identical or 0) + (row.excused or 0) == 4 for row in found.measurements)
    for row in found.measurements:
        one = row.rounds
        assert row.tokens_per_round is None or one.tokens == pytest.approx(row.tokens_per_round)
        assert one.target_seconds is not None and one.draft_seconds is not None and one.overhead_seconds is not None
        assert one.overhead_seconds > 0
        assert {group.group for group in row.by_class} == {"even", "odd"}
    chain = found.measurements[2].rounds
    assert chain.verified <= 4 and {1, 4} <= set(part.steps.target) and 1 in part.steps.draft
    assert chain.bound >= chain.tokens / (max(part.steps.target.values()) + 3 * part.steps.draft[1])
    assert "| even | draft 3 |" in text
    assert "| attained |" in text and "A round gives" in text and f"`{found.command}`" in text
    assert ("PyTorch's settings" in text) == bool(engine)
    assert found.pytorch == ("static cache, draft on cpu" if engine else "")
    assert not list(tmp_path.glob("runs"))
    # Fixed lengths are predicted in both caches.
    assert [row.predicted is not None for row in found.measurements] == [False, True, True, False]
    assert all((row.predicted or 1) > 0 for row in found.measurements)
    assert "Predicted, for fixed lengths" in text


@tiny.needs_llama
def test_a_pair_of_gguf_files(place: Path, capsys: Capture) -> None:
    options = (
        "--prompts",
        place / "chat.jsonl",
        *shlex.split("--llama ctk=f32 --llama-draft fa=on --lengths 2 -o json"),
    )
    report = json.loads(call(place, capsys, "target.gguf", "draft.gguf", *options))
    (found,) = report["parts"]
    assert report["gguf"] == "target: cache-type-k f32; draft: flash-attn on"
    row = found["measurements"][1]
    assert row["backend"] == "gguf" and row["different"] == 0 and row["tokens_per_round"] >= 1 and row["predicted"] > 0


def test_fitted_configurations_and_every_kind_of_drafter(place: Path, capsys: Capture) -> None:
    more = [
        "{rule: expected-value, length: 3}",
        "{drafter: tree, length: 2}",
        "{drafter: lookup, length: 3}",
        "{drafter: lookup+tree, length: 3}",
        "{drafter: lookup+draft, length: 3, rule: p_min, p_min: 0.01}",
    ]
    options: list[Any] = [part for one in more for part in ("--configuration", one)]
    options += ["--prompts", place / "texts.jsonl", "--lengths", "0", "-o", "json"]
    report = json.loads(call(place, capsys, "target", "draft", *options))
    (found,) = report["parts"]
    assert report["prompts"] == 4
    assert len(found["measurements"]) == 6 and all(row["different"] == 0 for row in found["measurements"])


def test_sampled_texts_have_a_sampled_base(place: Path, capsys: Capture) -> None:
    options = ("--sampler", "temperature=0.8", "--lengths", 0, "-C", "verifier=block,length=2", "-o", "jsonl")
    text = call(place, capsys, "target", "draft", "--prompts", place / "plain.txt", *options)
    rows = [row for line in text.splitlines() if (row := json.loads(line))["table"] == "configurations"]
    titles = ["plain", "plain sampled", "draft 2 sampled"]
    assert [row["configuration"] for row in rows] == titles
    assert rows[2]["plain tokens/s"] == rows[1]["tokens/s"] != rows[0]["tokens/s"]
    assert rows[2]["distribution"] == "the target's" and rows[2]["same text"] == "sampled"


PRICED = "--lengths {0} --configuration '{{rule: expected-value, drafter: {1}, length: {2}}}'"


@pytest.mark.parametrize(
    ("target", "draft", "options", "drafters"),
    [
        ("target", "other", "--lengths 0 -C drafter=string,length=2", ["string"]),
        ("draft", "target", "--lengths 2", ["draft"]),  # larger than its target
        ("target", "", "--lengths 0 -C drafter=lookup,length=4", ["lookup"]),
        # Its costs are the target's steps, also where the context is as long as the texts.
        ("target.gguf", "", PRICED.format(0, "lookup", 8), ["lookup"]),
        # Texts that end before the longest draft, whose steps are timed in contexts that the texts do not need.
        ("target.gguf", "draft.gguf", PRICED.format(31, "draft", 31), ["draft", "draft"]),
        pytest.param(
            *("target.gguf", "draft.gguf", PRICED.format(63, "draft", 63), ["draft", "draft"]), marks=pytest.mark.slow
        ),
    ],
)
def test_drafts_of_other_kinds(
    place: Path, capsys: Capture, target: str, draft: str, options: str, drafters: list[str]
) -> None:
    if target.endswith(".gguf"):
        pytest.importorskip("llama_cpp")
    prompts = ("--prompts", place / "plain.txt", "--count", 2)
    report = json.loads(call(place, capsys, target, draft, *shlex.split(options), *prompts, "-o", "json"))
    (found,) = report["parts"]
    assert [row["drafter"] for row in found["measurements"]] == [None, *drafters]
    assert all(row["different"] == 0 for row in found["measurements"])
    asked = found["steps"]["draft"], found["measurements"][1]["rounds"]["draft_steps"], report["draft"]
    assert [bool(one) for one in asked] == [bool(draft)] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompts", "{}/empty.jsonl"], "empty.jsonl is empty"),
        (["--prompts", "{}/missing.jsonl"], "there is no file {}/missing.jsonl"),
        (["--prompts", "{}/short.txt"], "the files give 0 prompts"),
        (["--prompts", "{}/keys.jsonl"], "field `text` (it has: a)\n  records need a field text, prompt, "),
        ([], "two models need --prompts FILE or --suite FILE"),
        (["{}/target", "{}/other"], "drafter=string"),
        (["{}/target", "{}/nothing"], "nothing"),
        (["--lengths", "0", "-C", "drafter=lookup,length=2"], "no configuration uses the draft"),
        (["--lengths", "0"], "nothing is measured but plain decoding"),
        (["--lengths", "64"], "draft lengths run from 1 to 63"),
        (["--lengths", "2", "--configuration", "{length: 2}"], "is measured as a length already"),
        (["--configuration", "p_min"], "expected KEY=VALUE"),
        (["--configuration", "{rule: pmin}"], "there is no rule 'pmin'"),
        (["--configuration", "{sampler: recipe}"], "give a sampler (--sampler temperature=1)"),
        (["--configuration", "{drafter: string}"], "needs a draft with the target's vocabulary"),
        (
            ["--sampler", "temperature=1", "-C", "length=3,verifier=greedy"],
            "the options: `drafter draft, rule fixed, length 3, verifier greedy, sampler recipe`",
        ),
        (["-C", "length=3,verifier=distinct"], "no verifier `distinct` for chains"),
        (["--sampler", "top_p=0.5"], "draws nothing"),
        (["--tokens", "4000"], "of the context of 512 for a prompt"),
        (["--dtype", "int8"], "'int8' is not one of 'auto', 'float32'"),
        (["--llama", "ngl=4"], "PyTorch runs {}/target"),
        (["--pytorch", "compile=true"], "set static, too"),
        (["--pytorch", "static=true,draft_device=nowhere"], "device `nowhere` cannot be used"),
        (
            ["{}/target.gguf", "{}/draft.gguf", "--pytorch", "static=true"],
            "--pytorch: without effect on {}/target.gguf, which runs in llama.cpp",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_error(options: list[str], words: str, place: Path, capsys: Capture) -> None:
    (place / "empty.jsonl").write_text("")
    (place / "short.txt").write_text("alpha\n")
    (place / "keys.jsonl").write_text('{"a": 1}\n')
    filled = [option.replace("{}", str(place)) for option in options]
    given = [] if filled and filled[0][0] == "/" else [place / "target", place / "draft"]
    given += ["--prompts", place / "texts.jsonl"] if options and "--prompts" not in filled else []
    assert words.replace("{}", str(place)) in tiny.refused(capsys, "speedup", *given, *QUICK, *filled)


def test_the_pair_of_a_run_on_other_prompts(place: Path, finished: Path, world: Path, capsys: Capture) -> None:
    """A run with prompts is its target and draft by name: the same prompts, texts and counts."""
    more = [*QUICK, "--prompts", place / "plain.txt", "--lengths", "2", "-o", "json"]
    pair = [world / "target", finished / "draft"]
    reports = []
    for named in (pair, ["tiny", "--runs", finished.parent]):
        with tiny.one_thread():
            assert tiny.call("speedup", *named, *more) == 0
        reports.append(json.loads(capsys.readouterr().out))
    keys = ("configuration", "tokens_per_round", "acceptance", "identical")
    wanted, other = ([[row[key] for key in keys] for row in one["parts"][0]["measurements"]] for one in reports)
    assert wanted == other and len(wanted) == 2


def test_the_settings_of_a_run_hold_on_other_prompts(place: Path, copied: Path, monkeypatch: Patch) -> None:
    """Its engine, threads and template, unless an option says otherwise."""
    import yaml

    from distill import api

    config = yaml.safe_load((copied / "config.yaml").read_text())
    changed = {"pytorch": {"prepack": True}, "threads": 1, "chat": {"system": ["Be brief."]}}
    (copied / "config.yaml").write_text(yaml.safe_dump(config | changed))
    seen: list[Any] = []

    def noted(settings: Any, *_: Any, chat: Any, **__: Any) -> None:
        seen.append((settings, chat))
        raise DataError("seen")

    monkeypatch.setattr(api, "measure_any_pair", noted)
    for more in ((), ("--pytorch", "prepack=false")):
        assert tiny.call("speedup", copied, "--prompts", place / "plain.txt", *more) == 2
    (first, chat), (second, same) = seen
    assert first.pytorch.prepack and first.threads == 1 and chat.system == ("Be brief.",)
    assert not second.pytorch.prepack and same == chat
