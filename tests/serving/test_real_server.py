"""Real llama-servers: that of the wheel `xllamacpp`, a llama.cpp of October 2026, and with DISTILL_LLAMA_BIN that of a
build (scripts/build_llama_cpp.sh), which is older.

DISTILL_LLAMA_BIN=build/llama.cpp/bin pytest -m "" tests/serving/test_real_server.py
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import served_pairs
import test_record
import tiny
import wheel_server
from scipy.stats import chisquare

from distill.cli import measure
from distill.data.chat_template import ChatTemplate
from distill.data.samples import Sample
from distill.data.traffic import Line, pin_of, read_lines
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.server_commands import SAMPLING, llama_server, pair_arguments
from distill.errors import ServingError
from distill.gguf.library import GgufFile
from distill.recipe import Sampler
from distill.serving.check import CheckSettings, LlamaClient, ServerRules, check_started, opened
from distill.serving.results import acceptance, counts_of, sentences, serving_blocks
from distill.serving.server import Http, LlamaServer, started
from distill.tables import document

FOLDER = os.environ.get("DISTILL_LLAMA_BIN", "")
BUILD = Path(FOLDER) / "llama-server"
PROGRAMS = [
    pytest.param("wheel", marks=pytest.mark.skipif(not wheel_server.INSTALLED, reason="needs xllamacpp")),
    pytest.param(
        "build",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not FOLDER, reason="DISTILL_LLAMA_BIN names no build of llama.cpp"),
        ],
    ),
]
LIMIT = 32
SAMPLED = Sampler(temperature=0.8)
TEXTS, LEAST = 200, 5  # of one server, and those that a cell of a test expects


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return served_pairs.build(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILD if request.param == "build" else wheel_server.program(tmp_path_factory.mktemp("program"))


@pytest.fixture
def settings(pairs: dict[str, Path], program: Path) -> LlamaServer:
    return LlamaServer(program, pairs["target"], pairs["draft"], n_max=4, threads=1, context=512)


@pytest.fixture(scope="module")
def template(pairs: dict[str, Path]) -> Iterator[ChatTemplate]:
    with ExitStack() as stack:
        found = measure.template_of(measure.PairFiles(pairs["target"], None), stack)
        assert found is not None
        yield found


@pytest.fixture(scope="module")
def prompts(pairs: dict[str, Path], template: ChatTemplate) -> list[Sample]:
    """Conversations about code of the test split."""
    return conversations(pairs, template, 8)


def conversations(pairs: dict[str, Path], template: ChatTemplate, count: int) -> list[Sample]:
    def render(text: str) -> str:
        return template.text([{"role": "user", "content": text}])

    return served_pairs.prompts(pairs["target"], 160, render=render, count=count)


def wanted(prompts: list[Sample], **changes: Any) -> CheckSettings:
    return CheckSettings(prompts, LIMIT, **({"repeats": 1, "concurrency": (1,), "seconds": (60.0, 120.0)} | changes))


def test_the_server_accepts_what_our_decoder_accepts(
    settings: LlamaServer, prompts: list[Sample], template: ChatTemplate
) -> None:
    asked = wanted(prompts, concurrency=(1, 4), template=template, predicted=0.5)
    found = check_started(asked, settings)
    server, ours = found.acceptance
    assert server.drafted > 100 and abs(server.rate.mean - ours.rate.mean) < 0.02
    assert ours.rate.low <= server.rate.mean <= ours.rate.high
    assert server.by_position is not None and len(server.by_position) == 4
    assert server.by_position == sorted(server.by_position, reverse=True)
    assert not found.differences and "as predicted" in sentences(found)[0] and "50.0 %" in sentences(found)[0]
    assert "Greedy" in document(serving_blocks(found))
    assert found.same_texts >= found.texts - 1
    assert [one.concurrency for one in found.speeds] == [1, 1, 4, 4]
    # Texts that end keep their places until others begin: several were in flight, and never more than four.
    assert all(1 < one.in_flight < 4 + 1e-9 for one in found.speeds[2:4])
    assert all(one.speedup.low <= one.speedup.mean <= one.speedup.high for one in found.speeds[1::2])
    assert [one.requests for one in found.speeds] == [8, 8, 8, 8]
    assert all(one.token_seconds[0] <= one.token_seconds[1] for one in found.speeds)


@pytest.mark.parametrize(("further", "shared"), [((), "true"), (("--no-kv-unified",), "false")])
def test_slots_share_one_cache(settings: LlamaServer, further: tuple[str, ...], shared: str) -> None:
    with started(replace(settings, parallel=3, further=further), 60) as running:
        assert re.search(rf"kv_unified\s*=\s*'?{shared}", running.text())


@pytest.mark.parametrize(
    ("draft", "changes", "what"),
    [
        ("outliers", {"further": ("-ctkd", "q4_0")}, "the type of the draft's cached keys"),
        ("draft", {"p_min": 0.75}, "p_min, the least probability of a drafted token"),
        ("other", {}, "the draft's file"),
        ("chat", {"further": ("--chat-template", served_pairs.OTHER_TEMPLATE)}, "the chat template"),
    ],
)
def test_what_costs_acceptance_is_named(
    settings: LlamaServer,
    pairs: dict[str, Path],
    prompts: list[Sample],
    template: ChatTemplate,
    draft: str,
    changes: dict[str, Any],
    what: str,
) -> None:
    asked = conversations(pairs, template, 24) if draft == "chat" else prompts[:4]  # its loss differs more by prompt
    more = {"chat": {"template": template}, "other": {"made": (pairs["target"], pairs["draft"])}}.get(draft, {})
    found = check_started(wanted(asked, **more), replace(settings, draft=pairs[draft], **changes))
    assert [one.what for one in found.differences if one.explains] == [what]
    assert ("It lacks" in sentences(found)[0]) == (draft != "chat")  # its prompts come as token ids
    assert not any("not explained" in one for one in sentences(found))
    (explained,) = (one for one in sentences(found) if one.startswith("EXPLAINED"))
    assert what in explained
    served, ours = (one.rate.mean for one in found.acceptance[:2])
    if draft == "outliers":
        assert served < 0.6 * ours
    if draft == "draft":
        assert served > ours  # of fewer tokens, more


def test_a_draft_that_does_not_fit_is_not_used_in_silence(settings: LlamaServer, tmp_path: Path) -> None:
    from distill.gguf.writer import export_gguf

    tiny.build_model(tmp_path / "small", 1)
    export_gguf(tmp_path / "small", tmp_path / "small.gguf", "f16")
    with (
        pytest.raises(ServingError, match=r"without its draft: [\s\S]*transplant"),
        opened(replace(settings, draft=tmp_path / "small.gguf"), (60.0, 60.0)),
    ):
        pass


def test_a_killed_server_is_one_message(settings: LlamaServer, prompts: list[Sample]) -> None:
    with started(settings, 60) as running:
        client = LlamaClient(Http(running.url, 60, death=running.death))
        reply = client.complete(prompts[0].prompt, 8)
        assert reply.count == len(reply.tokens) == 8 and 0 < reply.first_seconds <= reply.seconds
        assert client.vocabulary_size() == 4096 and client.build()
        running.process.send_signal(signal.SIGKILL)
        with pytest.raises(ServingError, match=r"signal 9|cannot be reached"):
            client.complete(prompts[0].prompt, 8)


def test_refusals_of_the_real_program(settings: LlamaServer, prompts: list[Sample]) -> None:
    removed = "does not know" if settings.binary != BUILD else r"has been removed[\s\S]*no longer has that option"
    for further, message in (
        (("--nonsense", "1"), r"invalid argument: --nonsense[\s\S]*does not know"),
        (("--draft-max", "4"), removed),
    ):
        with pytest.raises(ServingError, match=message), started(replace(settings, further=further), 60):
            pass
    with pytest.raises(ServingError, match=r"failed to load"), started(replace(settings, target=Path("none.gguf")), 60):
        pass
    with started(replace(settings, context=256), 60) as running:
        client = LlamaClient(Http(running.url, 60))
        with pytest.raises(ServingError, match=r"context[\s\S]*shorter prompts"):
            client.complete(prompts[0].prompt * 8, 8)


def test_both_ways_to_draft_are_ours(settings: LlamaServer, pairs: dict[str, Path], prompts: list[Sample]) -> None:
    """Under a sampler: best tokens compared with the target's draw, and drawn ones under rejection sampling."""
    sampled, draws = wanted(prompts[:5], repeats=2, sampler=SAMPLED), settings.has(SAMPLING)
    found = check_started(sampled, replace(settings, probabilistic=draws))
    assert "as predicted" in sentences(found)[0] and "temperature 0.8" in document(serving_blocks(found))
    assert found.texts == 0 and math.isnan(found.predicted) and ("probabilistic" in found.served) == draws
    ways = [(found.acceptance[0], next(one for one in found.acceptance if one.source.startswith("distill")))]
    if draws:
        rules = ServerRules(SAMPLED, 4, probabilistic=False)
        texts = rules.decode_files(pairs["target"], pairs["draft"], sampled.ids, LIMIT, 2, 1)
        ways.append((found.acceptance[1], acceptance("best tokens", counts_of(texts))))
        drawn, best = (server.rate.mean for server, _ in ways)
        assert drawn > 1.2 * best and found.acceptance[1].source.endswith("best tokens drafted")
    for server, ours in ways:
        # Texts of one prompt are alike, so that their spread by prompt is what the two can differ by.
        assert abs(server.rate.mean - ours.rate.mean) < 3 * (server.rate.high - server.rate.low) / 4, sentences(found)


def likely(target: Path, ids: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """The expected number of TEXTS texts of three tokens behind these that are likely, and of those that only begin as
    a likely one."""
    cells, begun = dict[tuple[int, ...], float](), {(): float(TEXTS)}
    with GgufModel(target, context=64) as model:
        for _ in range(3):
            longer = dict[tuple[int, ...], float]()
            for text, number in begun.items():
                model.rollback([0])
                expected = number * (model.extend([*ids, *text]).full()[-1] / temperature).softmax(-1)
                own = {(*text, token): float(expected[token]) for token in (expected >= LEAST).nonzero()[:, 0].tolist()}
                cells[text] = number - sum(own.values())
                longer |= own
            begun = longer
    return cells | begun


def fit(texts: list[list[int]], cells: dict[tuple[int, ...], float]) -> float:
    """The p-value of texts under a distribution; small cells are pooled with the texts that begin as no likely one."""
    found = Counter(next(tuple(text[:n]) for n in (3, 2, 1, 0) if tuple(text[:n]) in cells) for text in texts)
    large = [(found[cell], expected) for cell, expected in cells.items() if cell and expected >= LEAST]
    rest = len(texts) - sum(count for count, _ in large), len(texts) - sum(expected for _, expected in large)
    return float(chisquare(*zip(*large, rest, strict=True)).pvalue)


@pytest.mark.parametrize("drawn", [False, True])
def test_drafted_texts_follow_the_targets_distribution(
    settings: LlamaServer, pairs: dict[str, Path], drawn: bool
) -> None:
    """Against the probabilities of texts of three tokens by the file itself, and not by it at another temperature."""
    if drawn and not settings.has(SAMPLING):
        pytest.skip(f"this build has no {SAMPLING}")
    with contextlib.closing(GgufFile(pairs["target"], vocabulary_only=True)) as file:
        ids = file.tokenize("    def get(self, key):\n        ")
    with opened(replace(settings, probabilistic=drawn), (60.0, 60.0), SAMPLED) as client:
        replies = [client.complete(ids, 3, seed) for seed in range(TEXTS)]
    assert sum(reply.counts.accepted for reply in replies) > TEXTS / 10
    texts = [list(reply.tokens) for reply in replies]
    assert fit(texts, likely(pairs["target"], ids, 0.8)) > 1e-4 > fit(texts, likely(pairs["target"], ids, 1.5))


def test_what_is_recorded_in_front_of_it(settings: LlamaServer, tmp_path: Path) -> None:
    """Its replies, whole and streamed, by each API, are what `answers.traffic` then reads."""
    question = [{"role": "user", "content": "def total(values):"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": question, "max_tokens": 6}),
        ("/v1/completions", {"prompt": "def total(values):", "max_tokens": 6}),
        ("/completion", {"prompt": "def total(values):", "n_predict": 6}),
    ]
    with started(settings.plain, 60) as server:
        process, url, _ = test_record.start("--upstream", server.url, "--to", tmp_path / "served")
        expected = []
        # A server ends an idle connection after some seconds: on a machine that stalls, a request may meet that end.
        limits = httpx2.Limits(max_keepalive_connections=0)
        with ExitStack() as stack:
            stack.enter_context(process)
            stack.callback(process.kill)
            client = stack.enter_context(httpx2.Client(trust_env=False, timeout=60, limits=limits))
            for path, body in asked:
                for stream in (False, True):
                    reply = client.post(url + path, json={**body, "temperature": 0, "stream": stream})
                    assert reply.status_code == 200
                found = client.post(server.url + path, json={**body, "temperature": 0}).json()
                choice = found.get("choices", [{"text": found.get("content"), "finish_reason": "length"}])[0]
                message = choice.get("message", {})
                answer = choice.get("text", {"role": "assistant", "content": message.get("content")})
                expected += [
                    Line(0, body.get("messages", body.get("prompt")), answer, choice["finish_reason"] == "stop")
                ] * 2
            code, out, _ = test_record.end(process, signal.SIGINT)
    assert code == 0 and out.startswith("kept 6 answers"), out
    found = list(read_lines(pin_of(tmp_path / "served")))
    assert [replace(line, number=0, tokens=0) for line in found if isinstance(line, Line)] == expected


def test_every_printed_option_is_known_to_the_server(settings: LlamaServer) -> None:
    """Options are parsed before the model is looked for: a file that is not there is all that may be wrong."""
    of_pair = pair_arguments("none.gguf", "none.gguf", 4, 0.5)
    alone = ["-m", "none.gguf", "--ctx-size", "512", "--load-mode", "none"]
    if settings.binary == BUILD:
        alone += ["--spec-type", "none"]
    else:
        of_pair += ["--spec-draft-sampling", "probabilistic"]
    for arguments in (of_pair, alone):
        done = subprocess.run([settings.binary, *arguments], capture_output=True, text=True, check=False, timeout=120)
        said = done.stdout + done.stderr
        assert "failed to load model" in said and "invalid argument" not in said
    assert llama_server("a", "b", 4).split()[1:] == pair_arguments("a", "b", 4)


def test_the_server_s_distributions_are_those_of_its_file(
    settings: LlamaServer, pairs: dict[str, Path], prompts: list[Sample]
) -> None:
    """Token by token, with and without a draft beside it."""
    ids = prompts[0].prompt
    with GgufModel(pairs["target"], context=256) as model:
        logs = model.extend(ids).full()[-1].log_softmax(-1)
    with started(settings, 60) as server:
        body = {"prompt": ids, "n_predict": 1, "n_probs": 40, "temperature": 0}
        reply = json.loads(Http(server.url, 60).get("/completion", body).content)
    (listed,) = reply["completion_probabilities"]
    found = {one["id"]: one["logprob"] for one in listed["top_logprobs"]}
    assert len(found) == 40 and set(found) == set(logs.topk(40).indices.tolist())
    assert found == pytest.approx({token: float(logs[token]) for token in found}, abs=1e-2)
