"""Answers on this machine: sampling in batches, refilled rows, groups, journals, GGUF files, turns, compact stores."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from question_worlds import scripted
from tables import goodness
from tiny import Capture, Patch
from torch import Tensor
from toys import KINDS, random_prompts, toy
from writing_worlds import answer_lines, begin, interrupt_after, interrupted, new_ids

from distill.data.samples import Reply, Request, Sample, fault_of, is_looping, read_answers
from distill.decoding.batch import refill
from distill.decoding.rules import stop_before
from distill.engines.loaded import BatchedTorchModel, growing_decoder
from distill.engines.torch.model import TorchModel
from distill.errors import RecipeError
from distill.files import read_json
from distill.gguf.writer import export_gguf
from distill.recipe import Sampler, parse_recipe
from distill.sampler import probabilities_of
from distill.teacher.answers import AnswerRules, answers
from distill.teacher.distributions import EMPTY, compress
from distill.teacher.writers import GgufWriter, TorchWriter

torch.set_num_threads(1)

V = 61
SAMPLERS = [
    Sampler(temperature=0.0),
    Sampler(temperature=1.0, top_k=20, top_p=0.95, min_p=0.01),
    Sampler(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0).penalised(1.3),
]


def requests(count: int, seed: int, longest: int = 12) -> list[Request]:
    prompts = random_prompts(count, V, seed, longest=longest)
    return [Request(f"r{n}", ids, 11 * n, 3 + 7 * n % 23) for n, ids in enumerate(prompts)]


def written(model: Any, asked: list[Request], *rest: Any) -> dict[str, Reply]:
    found = {reply.id: reply for reply in refill(model, deque(asked), *rest)}
    assert len(found) == len(asked)
    return found


# ── refilled rows ──


@pytest.mark.parametrize(("kind", "sampler"), list(zip(KINDS, [*SAMPLERS, SAMPLERS[1]], strict=True)))
def test_refilled_rows_equal_each_text_alone(kind: str, sampler: Sampler) -> None:
    """fp32; each text has its own limit, so rows end at different steps and are filled again."""
    model, asked, ends = toy(kind), requests(9, seed=3), range(5, 12)
    together = written(BatchedTorchModel(model, 3, V), asked, sampler, ends)
    for request in asked:
        alone = written(TorchModel(model, V), [request], sampler, ends)[request.id]
        assert together[request.id] == alone
        assert len(alone.ids) <= request.limit and alone.ended == (alone.ids[-1] in ends)
    assert written(BatchedTorchModel(model, 4, V), asked[::-1], sampler, ends) == together
    assert {reply.ended for reply in together.values()} == {True, False}


def test_long_prompts_are_read_in_chunks(monkeypatch: Patch) -> None:
    model, asked = toy(), requests(6, seed=4, longest=40)
    whole = written(BatchedTorchModel(model, 3, V), asked, Sampler(), [])
    monkeypatch.setattr("distill.decoding.batch.PROMPT_TOKENS", 7)
    assert written(BatchedTorchModel(model, 3, V), asked, Sampler(), []) == whole
    assert max(len(request.ids) for request in asked) > 4 * 7


def test_a_stop_string_ends_a_text_before_it() -> None:
    model, asked = toy(), [Request("r", [4, 9, 2], 1, 30)]
    free = written(TorchModel(model, V), asked, Sampler(), [])["r"]

    def text_of(ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in ids)

    wanted = f"{free.ids[6]}><{free.ids[7]}"  # begins and ends within tokens
    stop = stop_before(lambda token: text_of([token]).encode(), [wanted])
    stopped = written(TorchModel(model, V), asked, Sampler(), [], None, stop)["r"]
    assert stopped.ended and free.ids[: len(stopped.ids)] == stopped.ids
    assert len(text_of(stopped.ids)) <= text_of(free.ids).index(wanted)


def test_a_request_that_the_context_cannot_hold() -> None:
    model = toy()
    with pytest.raises(ValueError, match="do not fit a context of 160"):
        written(TorchModel(model, V), [Request("r", [1] * 150, 0, 12)], Sampler(), [])
    assert (
        len(written(TorchModel(model, V), [Request("r", [1] * 150, 0, 11)], Sampler(temperature=0.0), [])["r"].ids)
        == 11
    )


# ── groups and files ──


def test_files_of_answers(world: Path, tmp_path: Path) -> None:
    """Read in the order of the prompts; what is left out stands in them too, and is counted."""
    recipe, run = begin(world, tmp_path, 13, "answers.keep_truncated=false")
    answers(recipe, run)
    assert [one.id for one in read_answers(run, "train")] == [f"p{n}" for n in range(13)]
    lines = answer_lines(run)
    assert [line["number"] for line in lines] != list(range(13)), "files are sorted by length"
    cut = [line for line in lines if not line["ended"]]
    assert cut and all(line["dropped"] == "truncated" for line in cut)
    manifest = read_json(run.path("answers", "manifest.json"))
    assert manifest["dropped"]["truncated"] == len(cut) and manifest["answers"] == 13
    assert manifest["writer"] == "transformers"
    assert manifest["answer_tokens"] == sum(len(line["answer"]) for line in lines)


def test_faults_of_answers() -> None:
    assert [fault_of(ids) for ids in ([2, 3], [2], [2] * 9)] == ["", "empty", "looping"]


def test_interrupted_answers_end_in_equal_bytes(world: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """In bfloat16, where the texts of other rows matter; test_resume.py kills processes, in fp32."""
    overrides = ("target.dtype=bfloat16", "answers.group=6", "answers.batch=3")
    recipe, whole = begin(world, tmp_path / "whole", 20, *overrides)
    answers(recipe, whole)
    _, run = begin(world, tmp_path / "run", 20, *overrides)
    interrupted(monkeypatch, TorchWriter, (3, 8, 9), lambda: answers(recipe, run))
    answers(recipe, run)
    assert tiny.contents(run.path("answers")) == tiny.contents(whole.path("answers"))


def test_a_model_that_takes_no_rows_writes_text_by_text(
    world: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe, run = begin(world, tmp_path / "rows", 9)
    answers(recipe, run)

    def refuse(*_: Any) -> None:
        raise ValueError("a window of 8")

    monkeypatch.setattr("distill.teacher.writers.BatchedTorchModel", refuse)
    _, other = begin(world, tmp_path / "alone", 9)
    answers(recipe, other)
    assert "answers were written one by one: a window of 8" in capsys.readouterr().err
    assert answer_lines(other) == answer_lines(run)


# ── conversations ──


def echo(request: Request) -> Reply:
    """The prompt's first and last token and an end."""
    return Reply(request.id, [request.ids[0], request.ids[-1], 0], True)


def test_each_turn_is_an_answer_of_its_own(world: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    recipe, run = begin(world, tmp_path, 5)

    def following(_: AnswerRules, prompt: Sample, texts: list[str]) -> list[int] | None:
        turns = int(prompt.id[1:]) % 3  # p0 and p3 have one turn, p1 and p4 two, p2 three
        return [*prompt.prompt, 40 + len(texts)] if len(texts) <= turns else None

    script = scripted(monkeypatch, recipe, echo)
    monkeypatch.setattr(AnswerRules, "next_prompt", following)
    answers(recipe, run)
    found = [(one.id, one.prompt[-1]) for one in read_answers(run, "train") if one.id.startswith("p2")]
    assert [name for name, _ in found] == ["p2", "p2/1", "p2/2"] and [last for _, last in found[1:]] == [41, 42]
    assert len(script.asked) == 5 + 0 + 1 + 2 + 0 + 1 == len(answer_lines(run))
    assert len({request.seed for request in script.asked}) == len(script.asked)
    first = {one["id"]: one for one in answer_lines(run)}["p2/1"]
    assert first["number"] == 2 and first["source"] == "code" and first["ended"]
    monkeypatch.setattr(AnswerRules, "next_prompt", lambda *_: [7] * recipe.corpus.block)
    _, full = begin(world, tmp_path / "full", 2)
    answers(recipe, full)
    assert {line["id"] for line in answer_lines(full)} == {"p0", "p1"}, "what does not fit the block is not asked"


# ── GGUF files ──


@pytest.fixture(scope="module")
def gguf(world: Path) -> Path:
    path = world / "target-f32.gguf"
    export_gguf(world / "target", path, "f32")
    return path


def test_a_gguf_file_writes_what_the_target_writes(world: Path, gguf: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """The same sampler and seeds; llama.cpp's cache is in f16, so a few texts part ways. Kills change no byte."""
    overrides = (f"answers.writer.gguf={gguf}", "answers.repetition_penalty=1.1", "answers.stop=[buffer]")
    recipe, whole = begin(world, tmp_path / "gguf", 20, *overrides)
    answers(recipe, whole)
    local, torch_run = begin(world, tmp_path / "torch", 20, *overrides[1:])
    answers(local, torch_run)
    pairs = list(zip(read_answers(whole, "train"), read_answers(torch_run, "train"), strict=True))
    same = sum(ours == theirs for ours, theirs in pairs)
    assert same >= 15, f"{same} of 20"
    assert read_json(whole.path("answers", "manifest.json"))["writer"] == "gguf"

    _, run = begin(world, tmp_path / "run", 20, *overrides)
    interrupted(monkeypatch, GgufWriter, (3, 6), lambda: answers(recipe, run))
    journals = list(run.path("answers", "train").glob(".*.journal"))
    assert journals, "replies of unfinished groups are kept"
    with journals[0].open("ab") as handle:
        handle.write(b'{"id": "p1", "ids": [1')  # a kill in the middle of a line
    with monkeypatch.context() as patch:
        asked = interrupt_after(patch, GgufWriter, 10**6)
        answers(recipe, run)
    assert len(asked) == 20 - 3 - 6, "every kept reply is used"
    assert tiny.contents(run.path("answers")) == tiny.contents(whole.path("answers"))


def test_a_gguf_file_of_another_model_is_refused(world: Path, gguf: Path, tmp_path: Path, capsys: Capture) -> None:
    check, key = (capsys, "check", world / "recipe.yaml"), "answers.writer.gguf"
    assert "which has the target's tokens" in tiny.shown(*check, f"{key}={gguf}")
    assert f"{key}: there is no file" in tiny.refused(*check, f"{key}=nowhere.gguf")
    tiny.build_model(tmp_path / "other", layers=1, vocabulary=420, seeds=range(50, 60))
    export_gguf(tmp_path / "other", tmp_path / "other.gguf", "f16")
    other = f"{key}={tmp_path / 'other.gguf'}"
    for command in ("check", "train"):
        assert "has other tokens than" in tiny.refused(capsys, command, world / "recipe.yaml", other)


# ── recipes ──

SMALL = {"name": "a", "target": {"model": "a"}, "corpus": {"sources": [{"kind": "text", "path": "a"}]}}


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ({"writer": {}}, "either gguf, a file, or urls"),
        ({"writer": {"gguf": "a", "urls": ["http://a/v1"]}}, "either gguf, a file, or urls"),
        ({"writer": {"gguf": "a", "connections": 2}}, "connections: for servers"),
        ({"writer": {"urls": ["localhost:8000"]}}, "a URL such as"),
        ({"writer": {"urls": ["http://user:secret@a/v1"]}}, "keys come from the environment"),
        ({"writer": {"urls": ["http://a/v1?key=secret"]}}, "keys come from the environment"),
        ({"writer": {"urls": ["http://a:99999/v1"]}}, "a URL such as"),
        ({"writer": {"urls": ["http://a/v1"], "key": "sk-123"}}, "answers.writer.key"),
        ({"writer": {"urls": ["http://a/v1"], "headers": {"X-Key": "sk-123"}}}, "never the value itself"),
        ({"stop": [""]}, "an empty stop string"),
    ],
)
def test_recipes_that_no_writer_can_follow(section: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        parse_recipe({**SMALL, "answers": section}, "recipe")


# ── batched sampling ──


def generated(model: object, prompts: list[list[int]], limit: int, ends: list[int], pad: int = 0) -> list[list[int]]:
    """transformers' greedy generation of left-padded prompts, cut after the first end token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    made = model.generate(  # type: ignore[attr-defined]
        ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=ends or None, pad_token_id=pad
    )[:, longest:].tolist()
    return [row[: next((i + 1 for i, t in enumerate(row) if t in ends), len(row))] for row in made]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind: str) -> None:
    model = toy(kind)
    prompts, rows = random_prompts(9, V, seed=1), BatchedTorchModel(model, 4)
    free = new_ids(rows, prompts, Sampler(temperature=0.0), 24)
    assert free == generated(model, prompts, 24, [])
    assert all(len(text) == 24 for text in free)
    ends = [free[0][5], free[1][3]]  # tokens that do come up
    stopped = new_ids(rows, prompts, Sampler(temperature=0.0), 24, ends)
    assert stopped == generated(model, prompts, 24, ends)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "bamba", "lfm2"])
def test_recurrent_models_write_what_they_generate(kind: str) -> None:
    model, prompts = toy(kind), random_prompts(4, V, seed=1)
    found = new_ids(growing_decoder(model), prompts, Sampler(temperature=0.0), 24)
    assert found == [generated(model, [prompt], 24, [])[0] for prompt in prompts]


@pytest.mark.parametrize(
    "sampler", [Sampler(), Sampler(temperature=0.7, top_k=12), Sampler(temperature=1.2, top_k=0, top_p=0.8, min_p=0.02)]
)
def test_frequencies_follow_the_distribution(sampler: Sampler) -> None:
    model = toy(initializer_range=0.15)
    prompt = [5, 17, 3, 40]
    rows = BatchedTorchModel(model, 500)
    drawn = torch.tensor(new_ids(rows, [prompt] * 4000, sampler, 1))
    counts = torch.bincount(drawn.flatten(), minlength=V)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[:, -1]
    distribution = probabilities_of(sampler, logits)[0]

    def p_value(one: Tensor) -> float:
        """Of Pearson's χ², cells expected fewer than 8 times pooled."""
        return goodness(counts.double()[None], one.double()[None], rare=8)

    assert not bool(counts[distribution == 0].any())
    assert p_value(distribution) > 1e-3
    # The same test rejects a distribution that is a little off.
    wrong = probabilities_of(
        Sampler(temperature=sampler.temperature * 1.2, top_k=sampler.top_k, top_p=sampler.top_p, min_p=sampler.min_p),
        logits,
    )[0]
    wrong = (wrong + 1e-6) / (wrong + 1e-6).sum()
    assert p_value(wrong) < 1e-3


def test_looping() -> None:
    assert not is_looping([]) and not is_looping([1] * 5) and is_looping([1] * 6)
    assert is_looping([9, 8, 7] + [1] * 6)
    assert not is_looping([1] * 6 + [2])  # it got out
    assert is_looping([4, 1, 2, 3] * 6) and not is_looping([4, 1, 2, 3] * 5 + [4, 1, 2])
    assert is_looping([0] + [4, 1, 2, 3] * 6 + [4, 1])  # the last repetition may be cut anywhere
    assert is_looping(list(range(16)) * 6) and not is_looping(list(range(17)) * 6)
    assert not is_looping(list(range(200)))


def exact(logits: Tensor, k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Sorted log-probabilities and log of the tail's mass in fp64, by loops."""
    tops, tails = [], []
    for row in logits.double()[:, :vocabulary].tolist():
        best = max(row)
        terms = sorted((math.exp(x - best) for x in row), reverse=True)
        total = math.fsum(terms)
        tops.append([x - best - math.log(total) for x in sorted(row, reverse=True)[:k]])
        rest = math.fsum(sorted(terms[k:]))
        tails.append(math.log(rest / total) if rest else EMPTY)
    return torch.tensor(tops), torch.tensor(tails)


@pytest.mark.parametrize("k", [1, 4, 39, 40])
def test_compact_distribution(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    logits = 4 * torch.randn(50, 47, generator=generator)
    logits[:, 40:] += 30  # padding that would win
    before = logits.clone()
    chunk = compress(logits, k, 40)
    assert torch.equal(logits, before)
    assert chunk.ids.dtype == torch.int32 and chunk.ids.shape == (50, k) and int(chunk.ids.max()) < 40
    assert all(len(set(row)) == k for row in chunk.ids.tolist())
    tops, tails = exact(logits, k, 40)
    torch.testing.assert_close(chunk.log_probabilities, tops, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(chunk.log_tail, tails, rtol=1e-5, atol=3e-6)
    gathered = logits.gather(-1, chunk.ids.long()) - logits[:, :40].logsumexp(-1, keepdim=True)
    torch.testing.assert_close(chunk.log_probabilities, gathered, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("depth", [20.0, 40.0, 80.0, 300.0])
def test_small_tails_are_summed_and_not_subtracted(depth: float) -> None:
    """One token is e^depth times as likely as each of 9 others: 1 − Σ would give 0 in fp32."""
    logits = torch.zeros(2, 12)
    logits[:, 4] = depth
    logits[:, 10:] = 1000  # padding
    chunk = compress(logits, 1, 10)
    assert float(1 - chunk.log_probabilities.exp().sum(-1)[0]) == 0
    assert chunk.ids.tolist() == [[4], [4]]
    torch.testing.assert_close(chunk.log_tail, torch.full((2,), math.log(9) - depth), rtol=1e-6, atol=1e-5)


def test_empty_tail_is_finite() -> None:
    chunk = compress(torch.tensor([[-math.inf, 2.0, -math.inf]]), 1, 3)
    assert chunk.log_tail.item() == EMPTY and math.exp(EMPTY) == 0 == chunk.log_probabilities.item()
