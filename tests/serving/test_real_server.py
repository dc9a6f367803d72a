"""Real llama-servers: that of the wheel `xllamacpp`, a llama.cpp of October 2026, and with DISTILL_LLAMA_BIN that of a
build (scripts/build_llama_cpp.sh), which is older.

DISTILL_LLAMA_BIN=build/llama.cpp/bin pytest -m "" tests/serving/test_real_server.py
"""

from __future__ import annotations

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
import numpy
import pytest
import served_pairs
import test_record
import tiny
import wheel_server
from scipy.stats import chi2_contingency

from distill.cli import serve
from distill.data.chat_template import ChatTemplate
from distill.data.texts import Prompt
from distill.data.traffic import Line, pin_of, read_lines
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.server_commands import (
    OF_DRAFT,
    OF_TARGET,
    SAMPLING,
    llama_server,
    option_arguments,
    pair_arguments,
)
from distill.errors import ServingError
from distill.recipe import Gguf, SamplerSettings, parse_section
from distill.serving.check import CheckSettings, check_started
from distill.serving.clients import LlamaClient, Reply, opened
from distill.serving.load import Load, served_curve
from distill.serving.server import Http, LlamaServer, started

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
SAMPLED = SamplerSettings(temperature=0.8)
TEXTS = 400


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
        found = serve.template_of(pairs["target"], stack)
        assert found is not None
        yield found


@pytest.fixture(scope="module")
def prompts(pairs: dict[str, Path], template: ChatTemplate) -> list[Prompt]:
    """Conversations about code of the test split."""
    return served_pairs.prompts(
        pairs["target"], 160, render=lambda text: template.text([{"role": "user", "content": text}])
    )


def wanted(prompts: list[Prompt], **changes: Any) -> CheckSettings:
    return CheckSettings(prompts, LIMIT, **({"repeats": 1, "concurrency": (1,), "seconds": (60.0, 120.0)} | changes))


def explained(found: Any) -> list[str]:
    return [one.what for one in found.differences if one.explains]


def test_the_server_accepts_what_our_decoder_accepts(settings: LlamaServer, prompts: list[Prompt]) -> None:
    found = check_started(wanted(prompts, concurrency=(1, 4), arrivals=(Load(rate=20.0),)), settings)
    server, ours = found.acceptance
    assert server.drafted > 100 and abs(server.rate.mean - ours.rate.mean) < 0.02
    assert ours.rate.low <= server.rate.mean <= ours.rate.high
    assert server.by_position is not None and len(server.by_position) == 4
    assert not found.differences and "as predicted" in found.sentences[0]
    assert found.same_texts >= found.texts - 1
    assert [one.concurrency for one in found.speeds] == [1, 1, 4, 4, 0, 0]
    # Texts that end keep their places until others begin: several were in flight, and never more than four.
    assert all(1 < one.in_flight < 4 + 1e-9 for one in found.speeds[2:4])
    assert all(one.speedup.low <= one.speedup.mean <= one.speedup.high for one in found.speeds[1::2])
    assert [one.requests for one in found.speeds] == [8, 8, 8, 8, 16, 16]
    assert all(one.token_seconds[0] <= one.token_seconds[1] for one in found.speeds)


def test_the_cost_curve_of_a_server(settings: LlamaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(settings, draft=None, parallel=3)
    with opened(plain, (60.0, 120.0)) as client:
        replies, complete = list[Reply](), client.complete

        def noted(*asked: Any) -> Reply:
            replies.append(complete(*asked))
            return replies[-1]

        monkeypatch.setattr(client, "complete", noted)
        curve = served_curve(client, 64, 32, 5)
    (steps,) = curve.seconds
    # Three times two for each of one, two and three at once; what their moments say is tested on simulated servers.
    assert len(replies) == 3 * 2 * (1 + 2 + 3) and all(reply.count == 32 for reply in replies)
    assert len(steps) == 3 and min(steps) > 0 and "it has 3 slots" in curve.note and curve.depths == (80,)
    with opened(settings, (60.0, 120.0)) as client, pytest.raises(ServingError, match="drafts, so that"):
        served_curve(client, 64, 32, 5)


@pytest.mark.parametrize(("further", "shared"), [((), "true"), (("--no-kv-unified",), "false")])
def test_slots_share_one_cache(settings: LlamaServer, further: tuple[str, ...], shared: str) -> None:
    with started(replace(settings, parallel=3, further=further), 60) as running:
        assert re.search(rf"kv_unified\s*=\s*'?{shared}", running.text())


def test_a_quantised_cache_of_the_draft_is_named(
    settings: LlamaServer, pairs: dict[str, Path], prompts: list[Prompt]
) -> None:
    outliers = replace(settings, draft=pairs["outliers"])
    kept = check_started(wanted(prompts), outliers)
    assert "as predicted" in kept.sentences[0]
    found = check_started(wanted(prompts), replace(outliers, further=("-ctkd", "q4_0")))
    assert explained(found) == ["the type of the draft's cached keys"]
    assert found.acceptance[0].rate.mean < 0.6 * kept.acceptance[0].rate.mean


def test_a_floor_of_probability_is_named(settings: LlamaServer, prompts: list[Prompt]) -> None:
    found = check_started(wanted(prompts), replace(settings, p_min=0.75))
    assert explained(found) == ["p_min, the least probability of a drafted token"]
    assert found.acceptance[0].rate.mean > found.acceptance[1].rate.mean  # of fewer tokens, more


def test_a_draft_of_another_target_is_named(
    settings: LlamaServer, pairs: dict[str, Path], prompts: list[Prompt]
) -> None:
    made = (pairs["target"], pairs["draft"])
    found = check_started(wanted(prompts, made=made), replace(settings, draft=pairs["other"]))
    assert explained(found) == ["the draft's file"]


def test_another_template_is_named(
    settings: LlamaServer, pairs: dict[str, Path], prompts: list[Prompt], template: ChatTemplate
) -> None:
    chat = replace(settings, draft=pairs["chat"])
    asked = wanted(prompts, template=template)
    assert not check_started(asked, chat).differences
    found = check_started(asked, replace(chat, further=("--chat-template", served_pairs.OTHER_TEMPLATE)))
    assert explained(found) == ["the chat template"]


def test_a_draft_that_does_not_fit_is_not_used_in_silence(settings: LlamaServer, tmp_path: Path) -> None:
    from distill.gguf.writer import export_gguf

    tiny.build_model(tmp_path / "small", 1)
    export_gguf(tmp_path / "small", tmp_path / "small.gguf", "f16")
    with (
        pytest.raises(ServingError, match=r"without its draft: [\s\S]*transplant"),
        opened(replace(settings, draft=tmp_path / "small.gguf"), (60.0, 60.0)),
    ):
        pass


def test_a_killed_server_is_one_message(settings: LlamaServer, prompts: list[Prompt]) -> None:
    with started(settings, 60) as running:
        client = LlamaClient(Http(running.url, 60, death=running.death))
        assert client.complete(prompts[0].ids, 8).count == 8
        running.process.send_signal(signal.SIGKILL)
        with pytest.raises(ServingError, match=r"signal 9|cannot be reached"):
            client.complete(prompts[0].ids, 8)


def test_refusals_of_the_real_program(settings: LlamaServer, prompts: list[Prompt]) -> None:
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
            client.complete(prompts[0].ids * 8, 8)


def test_both_ways_to_draft_are_ours(settings: LlamaServer, prompts: list[Prompt]) -> None:
    """Under a sampler: best tokens compared with the target's draw, and drawn ones under rejection sampling."""
    sampled = wanted(prompts, repeats=2, sampler=SAMPLED)
    rates = {}
    for drawn in (False, True) if settings.has(SAMPLING) else (False,):
        found = check_started(sampled, replace(settings, probabilistic=drawn))
        server, ours = found.acceptance[0], next(one for one in found.acceptance if one.source.startswith("distill"))
        # Texts of one prompt are alike, so that their spread by prompt is what the two can differ by.
        assert abs(server.rate.mean - ours.rate.mean) < 3 * (server.rate.high - server.rate.low) / 4, found.sentences
        assert "as predicted" in found.sentences[0]
        rates[drawn] = server.rate.mean
        if settings.has(SAMPLING):
            assert found.drawn.low > 0.1
    assert not settings.has(SAMPLING) or rates[True] > 1.2 * rates[False]


def homogeneity(left: Counter[Any], right: Counter[Any]) -> float:
    """The p-value of two samples under one distribution, cells of fewer than 5 expected counts pooled; 1.0 where only
    one cell is left."""
    table = numpy.array([[left[token], right[token]] for token in sorted({*left, *right})], float)  # [tokens, 2]
    smaller = table.sum(0).min() / table.sum()
    often = table.sum(1) * smaller >= 5
    cells, rest = table[often], table[~often].sum(0)
    if rest.sum() * smaller >= 5:
        cells = numpy.vstack([cells, rest])
    return float(chi2_contingency(cells, correction=False).pvalue) if len(cells) > 1 else 1.0


def test_texts_follow_the_targets_distribution(settings: LlamaServer, prompts: list[Prompt]) -> None:
    """Texts of three tokens behind one prompt: with drafts, drawn and not, and without are of one distribution."""
    texts = {}
    ways = {"plain": settings.plain, "best": settings}
    if settings.has(SAMPLING):
        ways["drawn"] = replace(settings, probabilistic=True)
    for name, way in ways.items():
        with opened(way, (60.0, 60.0), SAMPLED) as client:
            replies = [client.complete(prompts[0].ids[:8], 3, seed) for seed in range(TEXTS)]
        texts[name] = Counter(tuple(reply.tokens) for reply in replies)
        assert name == "plain" or sum(reply.counts.accepted for reply in replies) > TEXTS / 10
    for name in list(ways)[1:]:
        assert homogeneity(texts["plain"], texts[name]) > 1e-4, name
    # The test has the power to see the target at another temperature.
    with opened(settings.plain, (60.0, 60.0), SamplerSettings(temperature=1.5)) as client:
        hotter = Counter(tuple(client.complete(prompts[0].ids[:8], 3, seed).tokens) for seed in range(TEXTS))
    assert homogeneity(texts["plain"], hotter) < 1e-4


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
    assert [replace(line, number=0) for line in found if isinstance(line, Line)] == expected


def test_every_printed_option_is_known_to_the_server(settings: LlamaServer) -> None:
    """Options are parsed before the model is looked for: a file that is not there is all that may be wrong."""
    gguf = parse_section(
        Gguf,
        {
            "target": {"n_gpu_layers": 0, "flash_attn": "on", "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
            | {"threads": 1, "threads_batch": 1, "ubatch_size": 64},
            "draft": {"n_gpu_layers": 0, "flash_attn": "on", "cache_type_k": "q4_0", "cache_type_v": "q4_0"}
            | {"threads": 1, "threads_batch": 1, "ubatch_size": 64},
        },
    )
    arguments = pair_arguments("none.gguf", "none.gguf", 4, 0.5) + option_arguments(gguf)
    devices = [OF_TARGET["device"], "none", OF_DRAFT["device"], "none", OF_TARGET["tensor_split"], "3,1"]
    if settings.binary != BUILD:
        devices = ["--spec-draft-sampling", "probabilistic"]
    done = subprocess.run(
        [settings.binary, *arguments, *devices], capture_output=True, text=True, check=False, timeout=120
    )
    assert "failed to load model" in done.stdout + done.stderr and "invalid argument" not in done.stdout + done.stderr
    assert llama_server("a", "b", 4).split()[1:] == pair_arguments("a", "b", 4)
    for arguments in (["--spec-type", "none"], ["--ctx-size", "512"], ["--load-mode", "none"]):
        if settings.binary != BUILD and arguments[0] == "--spec-type":
            continue
        done = subprocess.run(
            [settings.binary, "-m", "none.gguf", *arguments], capture_output=True, text=True, check=False
        )
        assert "failed to load model" in done.stdout + done.stderr


def test_the_server_s_distributions_are_those_of_its_file(
    settings: LlamaServer, pairs: dict[str, Path], prompts: list[Prompt]
) -> None:
    """Token by token, with and without a draft beside it."""
    ids = prompts[0].ids
    with GgufModel(pairs["target"], context=256) as model:
        logs = model.extend(ids).full()[-1].log_softmax(-1)
    with started(settings, 60) as server:
        body = {"prompt": ids, "n_predict": 1, "n_probs": 40, "temperature": 0}
        (listed,) = Http(server.url, 60).post("/completion", body)["completion_probabilities"]
    found = {one["id"]: one["logprob"] for one in listed["top_logprobs"]}
    assert len(found) == 40 and set(found) == set(logs.topk(40).indices.tolist())
    assert found == pytest.approx({token: float(logs[token]) for token in found}, abs=1e-2)
