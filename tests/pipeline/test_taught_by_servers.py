"""Runs whose teacher is the server that writes the answers: the target computes every token once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import unloaded_worlds
import wheel_server
from killed_runs import run_jobs
from served_pairs import served
from tiny import Capture, Patch

from distill.data.samples import SPLITS, read_answers, read_prompts, read_samples
from distill.engines.torch.blocks import packed_logits
from distill.engines.torch.hugging_face import load_model, load_tokenizer
from distill.files import parse_object
from distill.recipe import load_recipe
from distill.run import Run
from distill.serving.server import LlamaServer, started
from distill.teacher.distributions import compress
from distill.teacher.readers import AnswerReader
from distill.teacher.scores import Scores
from distill.teacher.store import TeacherStore

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with tiny.one_thread():
        return unloaded_worlds.build(tmp_path_factory.mktemp("taught"))


class Watched(unloaded_worlds.AnsweringServer):
    """Says which requests ask again for what the run's files held when its process began, by /v1/models."""

    run: Run
    known: Any = ()
    again = 0
    begun = 0

    def models(self) -> dict[str, Any]:
        self.begun += 1
        self.known = kept(self.run) if self.run.path("answers").exists() else []
        return super().models()

    def completion(self, body: dict[str, Any], fault: str | None) -> tuple[int, dict[str, Any]]:
        assert "prompt_logprobs" not in body, "the target reads no text a second time"
        self.again += list(body["prompt"]) in self.known
        return super().completion(body, fault)


def kept(run: Run) -> list[list[int]]:
    """The prompts whose answers are on disk."""
    found = []
    for split in SPLITS:
        prompts = {one.id: list(one.prompt) for one in read_prompts(run, split)}
        for path in run.path("answers", split).glob(".*.journal"):
            records = map(parse_object, path.read_bytes().split(b"\n"))
            found += [prompts[one["id"]] for one in records if isinstance(one, dict) and one.get("id") in prompts]
        for path in run.path("answers", split).glob("*.arrow"):
            found += [list(one.prompt) for one in read_samples(path, "answers")]
    return found


def values_of(place: Path) -> dict[str, Any]:
    values = unloaded_worlds.values(place)
    values["target"].pop("load", None)
    values["train"]["acceptance"].pop("new_tokens", None)
    return values


def recipe_of(place: Path, name: str, server: Watched, runs: Path) -> Path:
    """A small recipe whose writer is the server, which it also watches."""
    values = values_of(place) | {"name": name}
    values["corpus"] |= {"tokens": 0}
    values["answers"] |= {"group": 3, "writer": {"urls": [server.url], "connections": 2}}
    values["teacher"] = {"top_k": 12, "shard_blocks": 1, "mass": 0.95}
    values["sampler"] = {"temperature": 0.3, "top_p": 0.95}
    values["train"] |= {"protocol": "match"}
    recipe = tiny.write_recipe(place / f"{name}.yaml", values)
    server.run = Run(runs / name, load_recipe(recipe))
    return recipe


@contextmanager
def serving(place: Path) -> Iterator[Watched]:
    model = load_model(str(place / "whole"), "float32", CPU)
    tokenizer = load_tokenizer(str(place / "target"))
    with Watched(model, tokenizer=tokenizer, context=512).running() as server, tiny.one_thread():
        yield server


@pytest.fixture(scope="module")
def taught(place: Path) -> Iterator[tuple[Path, Watched]]:
    """A finished run, and its server."""
    with serving(place) as server:
        recipe = recipe_of(place, "taught", server, place / "runs")
        assert tiny.call("train", recipe, "--runs", place / "runs") == 0
        yield place / "runs" / "taught", server


def test_a_server_that_writes_also_teaches(taught: tuple[Path, Watched]) -> None:
    """From questions to the report with one request a prompt; two short ones try it, in the check and in the stage."""
    run, server = taught
    assert (run / "report.html").exists() and (run / "draft" / "config.json").exists()
    opened = Run(run, load_recipe(run / "config.yaml"))
    answers = [one for split in SPLITS for one in read_answers(opened, split)]
    asked = [body for body in server.requests if body["max_tokens"] > 1]
    assert len(asked) == len(answers) and server.again == 0
    assert len(server.requests) == len(asked) + 4 and all(body["logprobs"] == 12 for body in server.requests)
    origin = json.loads((run / "teacher" / "train" / "manifest.json").read_text())["origin"]
    assert origin == {"kind": "answers"}


@pytest.mark.parametrize("split", SPLITS)
def test_its_distributions_are_the_targets(taught: tuple[Path, Watched], place: Path, split: Any) -> None:
    """At temperature 1, whatever the sampler; of each position the fewest entries that hold the mass."""
    store = TeacherStore(Run(taught[0], load_recipe(taught[0] / "config.yaml")), split)
    model = load_model(str(place / "whole"), "float32", CPU)
    for block in range(store.blocks):
        packed = store.packed.take(torch.tensor([block]))
        found = store.read(torch.tensor([block])).distributions(CPU).chunk(slice(None))
        rows = []
        for document in packed.documents[0].unique():
            own = packed.documents[0] == document
            if bool(packed.mask[0][own].any()):
                logits = model(input_ids=packed.ids[0][own].unsqueeze(0).long()).logits[0]
                rows.append(logits[packed.mask[0][own]].float())
        logits = torch.cat(rows).detach()
        logs = logits[:, : store.vocabulary].log_softmax(-1)
        assert len(logs) == len(found.log_tail) == int(packed.mask.sum())
        best = compress(logits, 12, store.vocabulary)
        for row in range(len(logs)):
            used = int(found.log_probabilities[row].isfinite().sum())
            ids = found.ids[row, :used]
            assert found.log_probabilities[row, :used] == pytest.approx(logs[row, ids], abs=5e-3)
            rest = 1 - logs[row, ids].exp().sum()
            assert float(found.log_tail[row].exp()) == pytest.approx(float(rest), abs=1e-4)
            mass = logs[row, ids].exp().cumsum(-1)
            if split == "train":  # held-out positions keep all that the server gave
                assert used == 12 or used == 13 or float(mass[-1]) >= 0.949
                assert used < 2 or float(mass[-2]) <= 0.951
            assert best.ids is not None and {*ids.tolist()[:12]} <= {*best.ids[row].tolist(), int(ids[-1])}


def test_tokens_without_a_distribution_are_not_measured(
    taught: tuple[Path, Watched], tmp_path: Path, monkeypatch: Patch
) -> None:
    """A server of OpenAI's form gives none at the last token. The sums and the slices of `eval` leave it out."""
    whole = AnswerReader._answer

    def without_the_last(self: AnswerReader, split: Any, number: int) -> tuple[Scores, Any]:
        scores, ids = whole(self, split, number)
        return scores.fitted(len(ids) - 1).fitted(len(ids)), ids

    monkeypatch.setattr(AnswerReader, "_answer", without_the_last)
    run = tmp_path / "taught"
    shutil.copytree(taught[0], run)
    command = ("train", run / "config.yaml", "--runs", tmp_path, "--redo", "teacher", "--until", "eval")
    assert tiny.call(*command) == 0
    before, after = (json.loads((place / "eval.json").read_text()) for place in (taught[0], run))
    answers = len(read_answers(Run(run, load_recipe(run / "config.yaml")), "test"))
    counts = [report["domains"]["answers"]["after"]["tokens"] for report in (before, after)]
    assert counts[0] - counts[1] == answers > 0
    assert after["stored"]["left_out"]["positions without a distribution from the server"] == answers
    for kind in ("depth", "repetition"):
        assert sum(group["tokens"] for group in after["groups"] if group["of"] == kind) == counts[1]


def test_an_answer_without_its_distributions_is_asked_again(
    taught: tuple[Path, Watched], place: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A lost file of distributions is mended together with its answers."""
    run, _ = taught
    shutil.copytree(run, tmp_path / "taught")
    lost = sorted((tmp_path / "taught" / "answers" / "train").glob("*.safetensors"))[0]
    lost.unlink()
    with serving(place) as server:
        values = values_of(place)
        server.run = Run(tmp_path / "taught", load_recipe(run / "config.yaml"))
        urls = f"answers.writer.urls=[{server.url}]"
        command = ("train", tmp_path / "taught" / "config.yaml", urls, "--runs", tmp_path, "--until", "answers")
        assert tiny.call(*command) == 0, (capsys.readouterr().err, values)
    assert lost.exists() and lost.with_suffix(".arrow").exists()


@pytest.mark.slow
def test_kills_lose_no_answer_and_ask_for_none_twice(taught: tuple[Path, Watched], place: Path, tmp_path: Path) -> None:
    """kill -9 at ten places of both stages: before and after renames of answers, scores, records and shards."""
    with serving(place) as server:
        recipe = recipe_of(place, "killed", server, tmp_path / "runs")
        command = ["train", str(recipe), "--runs", str(tmp_path / "runs"), "--until"]
        events = (12, 13, 14, 15, 16, 17, 18, 19, 20, 21)
        jobs = [{"argv": [*command, "teacher"], "event": event} for event in events]
        jobs = run_jobs(tmp_path, [{"argv": [*command, "corpus"]}, *jobs, {"argv": [*command, "teacher"]}])
        assert [job["code"] for job in jobs] == [0, *[-9] * len(events), 0], jobs[-1]
        assert server.again == 0 and server.begun > 5
    whole, killed = taught[0], tmp_path / "runs" / "killed"
    for stage in ("answers", "teacher"):
        assert tiny.contents(killed / stage) == tiny.contents(whole / stage)


def test_what_other_text_needs_is_said(place: Path, capsys: Capture) -> None:
    """Given and served texts exist already, so something must read them."""
    values = values_of(place)
    values["answers"]["writer"] = {"urls": ["http://127.0.0.1:9/v1"]}
    values["teacher"] = {"top_k": 12}
    recipe = tiny.write_recipe(place / "given.yaml", values)
    refused = tiny.refused(capsys, "check", recipe, "--offline")
    assert "corpus.tokens: the servers of answers.writer give the distributions of texts that they write" in refused
    assert "teacher.server, teacher.gguf" in refused


# ── servers as users run them ──

DEMO = tiny.ROOT / "data" / "demo-target"
VLLM = os.environ.get("DISTILL_VLLM", "")


@contextmanager
def llama_server(folder: Path) -> Iterator[str]:
    from distill.gguf.writer import export_gguf

    export_gguf(DEMO, folder / "demo-f32.gguf", "f32")
    settings = LlamaServer(wheel_server.program(folder), folder / "demo-f32.gguf", threads=1, parallel=4)
    with started(settings, 60) as running:
        yield running.url


@contextmanager
def vllm(folder: Path) -> Iterator[str]:
    command = f"vllm serve {DEMO} --served-model-name demo --max-logprobs 32"
    with served(VLLM, command, folder / "vllm.log") as url:
        yield url


SERVERS = [
    pytest.param(llama_server, marks=pytest.mark.skipif(not wheel_server.INSTALLED, reason="needs xllamacpp")),
    pytest.param(vllm, marks=[pytest.mark.slow, pytest.mark.skipif(not VLLM, reason="DISTILL_VLLM names no vLLM")]),
]


@pytest.mark.parametrize("server", SERVERS)
def test_a_real_server_teaches_from_questions_to_the_report(server: Any, tmp_path: Path) -> None:
    """Its distributions are those of the target's weights, which the run lacks, at the tokens that it wrote."""
    with server(tmp_path) as url, tiny.one_thread():
        values = tiny.recipe_values(tmp_path) | {"name": "real", "sampler": {"temperature": 0.7, "top_p": 0.9}}
        shutil.copytree(DEMO, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
        values["target"] = {"model": str(tmp_path / "target")}
        asked = {"kind": "target", "questions": 6, "tokens": 24, "openings": ["import os", "def main():"]}
        texts = [
            {"kind": "tree", "path": str(tiny.ROOT / "data" / one), "split": one} for one in ("validation", "test")
        ]
        values["corpus"] = {"sources": [asked, *texts], "block": 128}
        values["answers"] |= {"prompts": 12, "writer": {"urls": [f"{url}/v1"], "connections": 4}}
        values["teacher"] = {"top_k": 32}
        values["cut"] = {"donor": str(DEMO), "layers": 2}
        values["train"]["steps"] = 2
        values["train"]["acceptance"].pop("new_tokens", None)
        recipe = tiny.write_recipe(tmp_path / "real.yaml", values)
        assert tiny.call("train", recipe, "--runs", tmp_path / "runs") == 0
    run = tmp_path / "runs" / "real"
    assert (run / "report.html").exists()
    model, count = load_model(str(DEMO), "float32", CPU), 0
    store = TeacherStore(Run(run, load_recipe(run / "config.yaml")))
    for block in range(store.blocks):
        packed = store.packed.take(torch.tensor([block]))
        found = store.read(torch.tensor([block])).distributions(CPU).chunk(slice(None))
        logs = packed_logits(model, packed)[packed.mask].detach().float()[:, : store.vocabulary].log_softmax(-1)
        used = found.log_probabilities.isfinite()
        count += int(used.sum())
        assert found.ids is not None
        own = logs.gather(-1, found.ids.where(used, 0).long())
        assert float((own - found.log_probabilities)[used].abs().max()) < 0.03
        rest = 1 - (own.exp() * used).sum(-1)
        assert float((found.log_tail.exp() - rest).abs().max()) < 2e-3
    assert count > 100
