"""The user's server under test: processes, requests, counts, whole checks, on servers with the real formats."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import fake_llama_server
import psutil
import pytest
import tiny
from loopback import LoopbackHandler, running
from tiny import Capture, Patch
from vllm_serving import VERSION, VllmServing

from distill.data.samples import Sample
from distill.decoding.decode import Decoded, Round
from distill.engines.server_commands import SAMPLING
from distill.errors import EndpointError, RecipeError, ServingError
from distill.files import from_json, read_result
from distill.progress import Interrupted
from distill.recipe import Sampler
from distill.serving import check
from distill.serving.check import (
    Addresses,
    CheckSettings,
    LlamaClient,
    ServerRules,
    VllmClient,
    check_addresses,
    check_started,
    kind_of_server,
    vllm_text,
)
from distill.serving.history import History, compared, not_compared
from distill.serving.results import (
    OURS,
    Counts,
    ServeReport,
    Text,
    acceptance,
    option_differences,
    rise_of_tokens,
    sentences,
    serving_blocks,
    totals_of,
)
from distill.serving.server import Http, LlamaServer, Running, _options, free_port, require_binary, started
from distill.tables import Interval, records

PROMPTS = [[place + 10, 3, 4, 20 * (place % 3)] for place in range(6)]
LIMIT = 24


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The GGUF files of a tiny pair."""
    from distill.gguf.writer import export_gguf

    folder = tmp_path_factory.mktemp("files")
    for name, layers in (("target", 3), ("draft", 1)):
        tiny.build_model(folder / f"{name}-model", layers)
        export_gguf(folder / f"{name}-model", folder / f"{name}.gguf", "f16")
    return folder / "target.gguf", folder / "draft.gguf"


@pytest.fixture
def settings(files: tuple[Path, Path], tmp_path: Path) -> LlamaServer:
    return LlamaServer(fake_llama_server.install(tmp_path), *files, n_max=4)


def wanted(**changes: Any) -> CheckSettings:
    prompts = changes.pop("prompts", None) or [Sample(str(place), ids) for place, ids in enumerate(PROMPTS)]
    return CheckSettings(prompts, LIMIT, **({"repeats": 1, "concurrency": (1, 3), "seconds": (20.0, 20.0)} | changes))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid: int) -> bool:
    """Whether a process ends."""
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


class Saying(LoopbackHandler):
    """A server that says the same to every request: `owner` is the status and the body."""

    def do_GET(self) -> None:
        self.reply(*self.owner)

    def do_POST(self) -> None:
        self.body()
        self.reply(*self.owner)


# The process.


def test_a_server_runs_as_long_as_its_block(settings: LlamaServer) -> None:
    with started(settings, 20) as running:
        pid = running.process.pid
        with pytest.raises(KeyError), started(settings.plain, 20) as other:
            assert LlamaClient(Http(other.url, 20)).drafts() is False and other.url != running.url
            raise KeyError
        assert gone(other.process.pid) and alive(pid)
    assert gone(pid)


@pytest.mark.parametrize("mode", ["", "stubborn"])
def test_a_server_behind_a_wrapper_is_ended_with_it(
    settings: LlamaServer, tmp_path: Path, monkeypatch: Patch, mode: str
) -> None:
    """A script that starts the server as a process of its own, and ends by the signal before it."""
    monkeypatch.setenv("FAKE", mode)
    monkeypatch.setattr("distill.serving.server.STOP_SECONDS", 0.5)
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f'#!/bin/sh\n"{settings.binary}" "$@" &\necho $! > "{tmp_path}/pid"\nwait\n')
    wrapper.chmod(0o755)
    with started(replace(settings, binary=wrapper), 20) as running:
        own = int((tmp_path / "pid").read_text())
        assert alive(own) and own != running.process.pid
    assert gone(own) and gone(running.process.pid)


def test_a_server_that_does_not_listen_to_a_signal_is_killed(settings: LlamaServer, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FAKE", "stubborn")
    monkeypatch.setattr("distill.serving.server.STOP_SECONDS", 0.2)
    with started(settings, 20) as running:
        pass
    assert running.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("fault", "further", "message"),
    [
        ("exits", (), r"ended at once \(status 1\)[\s\S]*failed to load model[\s\S]*damaged"),
        ("", ("--nonsense", "1"), r"invalid argument: --nonsense[\s\S]*does not know --nonsense"),
        ("never healthy", (), r"was not healthy after 20 s[\s\S]*load_model[\s\S]*--wait"),
    ],
)
def test_a_server_that_does_not_start(
    settings: LlamaServer, monkeypatch: Patch, fault: str, further: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("FAKE", fault)
    if fault == "never healthy":  # the seconds are over once its log has a line
        seen: list[Running] = []
        died = Running.death
        monkeypatch.setattr(Running, "death", lambda running: (seen.append(running), died(running))[1])
        monotonic = lambda: 60.0 if seen and "load_model" in seen[-1].text() else 0.0  # noqa: E731
        clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
        monkeypatch.setattr("distill.serving.server.time", clock)
    with pytest.raises(ServingError, match=message), started(replace(settings, further=further), 20):
        pass


def test_a_port_in_use(settings: LlamaServer, monkeypatch: Patch) -> None:
    with running(Saying, (404, {})) as port:
        # A free one that is taken before the server binds it: the next is tried, and a third one.
        ports = iter([*[port] * 3, port, free_port()])
        monkeypatch.setattr("distill.serving.server.free_port", lambda: next(ports))
        with pytest.raises(ServingError, match="another program listens"), started(settings, 10):
            pass
        with started(settings, 10) as server:
            assert not server.url.endswith(f":{port}")


def test_programs_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such program"):
        require_binary(tmp_path / "nothing")
    with pytest.raises(RecipeError, match="no such program"):
        require_binary(Path("no-llama-server-of-this-name"))
    (tmp_path / "text").write_text("words")
    for path in (tmp_path, tmp_path / "text"):
        with pytest.raises(RecipeError, match=r"cannot be run"):
            require_binary(path)
    (tmp_path / "text").chmod(0o755)
    (tmp_path / "text").write_bytes(b"\x7fELF damaged")
    broken = LlamaServer(tmp_path / "text", Path("a"))
    with pytest.raises(ServingError, match="cannot be started"), started(broken, 5):
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux ties a child to its parent")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_command(settings: LlamaServer, tmp_path: Path, number: int) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom distill.progress import handled\n"
        "from distill.serving.server import LlamaServer, started\n"
        f"with handled(), started(LlamaServer(Path({str(settings.binary)!r}), Path('t')), 20):\n"
        "    print('up', flush=True)\n    time.sleep(60)\n"
    )
    pids = tmp_path / "pids"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"FAKE_PID": str(pids)},
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(number)
    process.wait(60)
    process.stdout.close()
    assert gone(int(pids.read_text()))


def test_a_plain_server_gets_no_option_of_a_draft(settings: LlamaServer) -> None:
    further = ("-ctkd", "q4_0", "--spec-draft-p-split", "0.2", "-ub", "64", "--no-spec-draft-backend-sampling")
    one = replace(settings, further=further, p_min=0.5)
    assert one.served[-len(further) :] == list(further) and "--spec-draft-p-min" in one.served
    assert one.plain.served == ["-m", str(one.target), "-ub", "64", "--no-spec-draft-backend-sampling"]


# Requests.


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuses", r"status 400\): request \(160 tokens\) exceeds[\s\S]*larger context"),
        ("killed", r"died under a request:[\s\S]*signal 9[\s\S]*out of memory"),
        ("slow", r"did not answer within 1 s[\s\S]*--wait"),
        ("fails later", r"compute error"),
        ("no timings", r"gives no timings"),
        ("warm", r"took 5 tokens of a prompt from its cache"),
        ("draft-less", r"without its draft[\s\S]*vocabs are not compatible"),
    ],
)
def test_each_fault_is_one_message(settings: LlamaServer, monkeypatch: Patch, fault: str, message: str) -> None:
    monkeypatch.setenv("FAKE", fault)
    with pytest.raises(ServingError, match=message) as caught:
        check_started(wanted(seconds=(20.0, 1.0 if fault == "slow" else 20.0)), settings)
    assert caught.value.hint and "Traceback" not in str(caught.value)


def test_addresses_where_nobody_answers() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServingError, match=r"cannot be reached[\s\S]*--url"):
        kind_of_server(Http(url, 2))
    for wrong in ("127.0.0.1:80", "ftp://x"):
        with pytest.raises(RecipeError, match="not the address of a server"):
            Http(wrong, 1).get("/props")
    with pytest.raises(EndpointError, match="is not set"):
        Http(url, 1, "NO_SUCH_VARIABLE_HERE")


# Counts.


def test_rounds_follow_from_tokens_and_accepted_ones() -> None:
    assert Counts.of_text(10, 8, 5).rounds == 4  # the prompt's token, then 9, of which 5 were accepted
    assert Counts.of_text(1, 0, 0).rounds == 0 and Counts.of_text(1, 0, 0).later == 0
    assert Counts.of_text(3, 8, 5).rounds == 1  # ended within its first round
    found = acceptance("x", [Counts.of_text(10, 8, 5), Counts.of_text(5, 8, 1)], Counts(4, 16, 6, (3, 2, 1, 0)))
    assert found.rate.mean == 6 / 16 and found.tokens_per_round.mean == 13 / 7
    assert found.by_position == [0.75, 0.5, 0.25, 0.0] and found.rate.low < found.rate.mean < found.rate.high
    rise = rise_of_tokens([Counts.of_text(9, 8, 0)] * 3, [Counts.of_text(9, 8, 4)] * 3)
    assert rise.mean == rise.low == rise.high == 1.0  # 8 tokens in 8 rounds, then in 4


def test_the_counts_of_vllm_are_of_whole_rounds() -> None:
    # A prompt of 3 tokens; the first token, then rounds that accept 2, 0 and 4 of 4, behind them further ones.
    result = Decoded(list(range(20, 40)), [], [Round(3, 4, 2, 0.0), Round(6, 4, 0, 0.0), Round(7, 4, 4, 0.0)])
    result.rounds += [Round(12, 4, 1, 0.0), Round(14, 4, 0, 0.0)]
    for limit, ends, tokens, rounds, accepted in (
        (5, (), 5, 2, 2),  # exactly two rounds
        (6, (), 6, 3, 6),  # the third is counted whole, though but one token of it is kept
        (12, (22,), 3, 1, 2),  # an end token, accepted in the first round
        (12, (20,), 1, 0, 0),  # the very first token
    ):
        found = vllm_text(result, 3, limit, ends)
        assert found.tokens == result.tokens[:tokens]
        assert found.counts == Counts(rounds, 4 * rounds, accepted, later=tokens - 1)


def test_counters_of_both_servers() -> None:
    llama = (
        "# HELP llamacpp:spec_decode_num_drafts_total x\nllamacpp:spec_decode_num_draft_tokens_total 48\n"
        "llamacpp:spec_decode_num_accepted_tokens_total 18\nllamacpp:spec_decode_num_drafts_total 12\n"
        'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 8\n'
        'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 4\n'
    )
    found = totals_of(llama, "llamacpp")
    assert found == Counts(12, 48, 18, (8, 4))
    assert found - Counts(2, 8, 3) == Counts(10, 40, 15, (8, 4))
    serving = VllmServing()
    serving.count([4, 2, 0])
    assert totals_of(serving.metrics(), "vllm") == Counts(3, 12, 6, (2, 2, 1, 1))
    assert totals_of(VllmServing(length=0).metrics(), "vllm") is None
    assert totals_of("nonsense {\nllamacpp:spec_decode_num_drafts_total x\n", "llamacpp") is None


# Whole checks of a llama-server. Our decoder is replaced by what the server does with its own defaults.


def server_texts(
    rules: ServerRules, _target: Path, _draft: Path, prompts: Any, limit: int, samples: int, _threads: int | None
) -> list[list[Text]]:
    drawn = {"--spec-draft-sampling": "probabilistic"} if rules.probabilistic else {}
    state = fake_llama_server.Server({"-md": "d", "--spec-draft-n-max": str(rules.n_max)} | drawn, "")
    found = []
    for prompt in prompts:
        tokens, drafted, accepted, _ = state.text(list(prompt), limit)
        found.append([Text(tokens, Counts.of_text(limit, drafted, accepted))] * samples)
    return found


@pytest.fixture
def ours(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ServerRules, "decode_files", server_texts)


SAMPLED = Sampler(temperature=0.8)


def test_slots_share_a_cache_where_the_build_can(settings: LlamaServer, monkeypatch: Patch) -> None:
    many = replace(settings, parallel=3)
    assert "--kv-unified" in many.command(1) and "--kv-unified" not in settings.command(1)
    apart_again = replace(many, further=("--no-kv-unified",)).command(1)
    assert apart_again.index("--kv-unified") < apart_again.index("--no-kv-unified")  # the last one counts
    monkeypatch.setenv("FAKE", "old")
    _options.cache_clear()
    assert "--kv-unified" not in many.command(1)
    _options.cache_clear()


@pytest.mark.usefixtures("ours")
def test_a_build_that_cannot_draw_its_drafts(settings: LlamaServer, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FAKE", "old")
    assert not settings.has(SAMPLING)
    found = check_started(wanted(concurrency=(1,), sampler=SAMPLED), settings)
    assert [one.source for one in found.acceptance[1:]] == [f"{OURS}the same files"]
    assert any("--spec-draft-sampling" in line for line in found.notes)


@pytest.mark.usefixtures("ours")
def test_what_costs_nothing_is_no_cause_and_the_rest_is_named(settings: LlamaServer) -> None:
    found = check_started(wanted(concurrency=(1,)), replace(settings, further=("--cache-type-k", "q8_0")))
    assert sentences(found)[1].startswith("Not a cause: the type of the target's cached keys is q8_0")
    assert "It lacks" not in sentences(found)[0]
    worse = replace(found, differences=[], short=Interval(1.0, 0.8, 1.2))
    assert found.reference == found.acceptance[1] and found.acceptance[1].source == f"{OURS}the same files"
    assert any("are not explained" in one and "b1-0c1e570" in one for one in sentences(worse))


def test_the_environment_and_aliases_set_options_too(settings: LlamaServer) -> None:
    assert not option_differences(settings, {})
    (found,) = option_differences(settings, {"LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V": "q4_0"})
    assert found[0].found == "q4_0" and found[1].further == ("--spec-draft-type-v", "f16")
    given = replace(settings, further=("--cache-type-k-draft", "q8_0", "--draft-p-min", "0.50"))
    assert [one.found for one, _ in option_differences(given, {})] == ["q8_0", "0.50"]
    assert not option_differences(replace(settings, p_min=0.0, further=("-ctkd", "f16")), {})


@pytest.mark.usefixtures("ours")
def test_a_template_without_conversations_is_not_measured(settings: LlamaServer) -> None:
    before, behind = fake_llama_server.TEMPLATES["chatml"]
    template = SimpleNamespace(
        text=lambda messages: before + messages[0]["content"] + behind,
        tokenizer=SimpleNamespace(decode=lambda ids: "def f(x):"),
    )
    other = replace(settings, further=("--chat-template", "llama2"))
    found = check_started(wanted(concurrency=(1,), template=template), other)
    (difference,) = found.differences
    assert difference.what == "the chat template" and "[INST]" in difference.found
    assert math.isnan(difference.loss.mean) and "was not measured" in found.notes[0]


# Servers that run already.


def test_a_running_pair_of_llama_servers(settings: LlamaServer) -> None:
    with started(settings, 20) as draft, started(settings.plain, 20) as plain:
        found = check_addresses(wanted(), Addresses(draft.url, plain.url))
        assert found.server == "llama-server" and found.n_max == 4 and found.speeds[1].speedup.mean > 0
        assert len(found.acceptance) == 1 and not found.differences
        alone = check_addresses(wanted(concurrency=(1,)), Addresses(draft.url))
        assert any("--plain-url" in sentence for sentence in sentences(alone))
        with pytest.raises(ServingError, match=r"drafts, and was given as the plain"):
            check_addresses(wanted(), Addresses(draft.url, draft.url))
        with pytest.raises(ServingError, match=r"reports that it serves without a draft"):
            check_addresses(wanted(), Addresses(plain.url))
        large = replace(wanted(), prompts=[Sample("a", [1, 4000]), Sample("b", [2, 3])])
        with pytest.raises(ServingError, match=r"400 tokens, and the prompts have token 4000"):
            check_addresses(large, Addresses(draft.url))


@pytest.mark.usefixtures("ours")
def test_several_servers_behind_one_address(settings: LlamaServer, monkeypatch: Patch) -> None:
    """The counters are those of one of them; each reply has its own counts."""
    monkeypatch.setenv("FAKE", "paced")
    whole = check_started(wanted(), settings)
    assert [one.concurrency for one in whole.speeds] == [1, 1, 3, 3]
    slow = [replace(one, speedup=Interval(0.5, 0.4, 0.6)) for one in whole.speeds]
    told = sentences(replace(whole, speeds=slow))[-1]
    assert "With n_max 4 the draft makes no load faster" in told
    monkeypatch.setenv("FAKE", "balanced")
    found = check_started(wanted(), settings)
    own = found.acceptance[0]
    assert (own.accepted, own.drafted) == (whole.acceptance[0].accepted, whole.acceptance[0].drafted)
    assert own.by_position is None and whole.acceptance[0].by_position is not None
    assert any("several servers answer" in line for line in found.notes) and not whole.notes
    speeds = [row for row in records(serving_blocks(found)) if row["table"] == "speed"]
    assert any(row["load"] == "3 at once" and row["per token, ms, p95"] > 0 for row in speeds)


def test_counters_of_vllm_that_fall() -> None:
    class Balanced(VllmServing):
        """One server is asked before a request, another behind it."""

        def metrics(self) -> str:
            return super().metrics() if not self.bodies else VllmServing().metrics()

    balanced = Balanced()
    balanced.count([4, 2])
    with balanced.running() as serving:
        client = VllmClient(Http(serving.url, 5))
        with pytest.raises(ServingError, match=r"counters of .* fell[\s\S]*not of a load balancer"):
            client.complete([1, 2], 8)


def test_a_running_vllm() -> None:
    with VllmServing().running() as draft, VllmServing(length=0).running() as plain:
        assert kind_of_server(Http(draft.url + "/v1", 5)) == "vllm"
        found = check_addresses(wanted(), Addresses(draft.url, plain.url))
    assert found.server == "vllm" and found.build == VERSION and found.n_max == 4
    own = found.acceptance[0]
    body = draft.bodies[1]
    assert own.drafted == 4 * len(PROMPTS) * (own.drafted // (4 * len(PROMPTS))) and 0 < own.accepted < own.drafted
    assert own.by_position is not None and len(own.by_position) == 4
    assert len({body["cache_salt"] for body in draft.bodies}) == len(draft.bodies)
    assert body["prompt"] == PROMPTS[0] and body["temperature"] == 0 and body["max_tokens"] == LIMIT
    assert found.same_texts == found.texts == len(PROMPTS)
    # Its own count of rounds, as many for each prompt, not one from the tokens: the last round is cut by the limit.
    assert own.tokens_per_round.mean == (LIMIT - 1) * len(PROMPTS) / (own.drafted // 4)
    assert [one.concurrency for one in found.speeds] == [1, 1, 3, 3]

    class Used(VllmServing):
        """A server that counts for each request, in which others draft, too."""

        def metrics(self) -> str:
            self.count([4, 4])
            return super().metrics()

    with Used(of_requests=True).running() as draft, VllmServing(length=0).running() as plain:
        counted = check_addresses(wanted(), Addresses(draft.url, plain.url))
    assert counted.acceptance == found.acceptance and counted.n_max == 4 and not counted.notes


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        (VllmServing(length=0), r"without a draft"),
        (VllmServing(fault="refuses"), r"status 400\): This model's maximum context length[\s\S]*shorter prompts"),
        (VllmServing(fault="slow"), r"did not answer within 1 s"),
        (VllmServing(fault="two models"), r"serves 2 models[\s\S]*--model"),
        (VllmServing(fault="fails later"), r"EngineCore died"),
        (VllmServing(key="secret"), r"status 401[\s\S]*--key"),
    ],
)
def test_each_fault_of_vllm_is_one_message(serving: VllmServing, message: str) -> None:
    with serving.running(), pytest.raises(ServingError, match=message):
        check_addresses(wanted(seconds=(20.0, 1.0 if serving.fault == "slow" else 20.0)), Addresses(serving.url))


TIMINGS = {"predicted_n": 1, "draft_n": "many"}


@pytest.mark.parametrize(
    ("status", "said", "shown"),
    [
        (500, {"error": {"message": "slot is busy", "code": 500}}, r"\(status 500\): slot is busy"),
        (503, {"detail": "no worker"}, r"\(status 503\): no worker"),
        (401, {"error": "wrong key: hidden-1"}, r"\(status 401\): wrong key: \*\*\*[\s\S]*--key"),
        (502, "<html>Bad Gateway</html>", r"\(status 502\): <html>Bad Gateway</html>"),
        (200, "<html>Welcome, hidden-1</html>", r"neither llama-server's nor vLLM's: <html>Welcome, \*\*\*</html>"),
        (200, "", r"neither llama-server's nor vLLM's: no message"),
        (200, "data: [1]\n\n", r"neither llama-server's nor vLLM's: \[1\]"),
        (200, 'data: {"tokens": [1], "ti', r'neither llama-server\'s nor vLLM\'s: \{"tokens": \[1\], "ti'),
        (200, f"data: {json.dumps({'timings': TIMINGS})}\n\n", r'vLLM\'s: \{"timings": .*"draft_n": "many"'),
        (200, 'data: {"timings": [3]}\n\n', r'vLLM\'s: \{"timings": \[3\]\}'),
        (200, 'data: {"tokens": 7, "timings": {}}\n\n', r'vLLM\'s: \{"tokens": 7'),
        (500, "x" * 5000, r"\(status 500\): x{300}\n"),
    ],
)
def test_a_wrong_reply_shows_the_servers_own_words(monkeypatch: Patch, status: int, said: Any, shown: str) -> None:
    monkeypatch.setenv("SERVER_KEY", "hidden-1")
    with running(Saying, (status, said)) as port, pytest.raises(ServingError, match=shown) as caught:
        LlamaClient(Http(f"http://127.0.0.1:{port}", 20, "SERVER_KEY")).complete([1, 2], 4)
    assert "hidden-1" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "said", "shown"),
    [
        (401, {"error": {"message": "Invalid API Key"}}, r"/props refused a request \(status 401\): Invalid API Key"),
        (404, {"detail": "Not Found"}, r"neither llama-server nor vLLM, by /props \(Not Found\) and /version"),
        (200, "<html>a router</html>", r"by /props \(<html>a router</html>\) and /version"),
    ],
)
def test_an_unknown_server_is_shown_with_its_words(status: int, said: Any, shown: str) -> None:
    with running(Saying, (status, said)) as port, pytest.raises(ServingError, match=shown):
        kind_of_server(Http(f"http://127.0.0.1:{port}", 20))


# The command.


def asked(settings: LlamaServer, files: tuple[Path, Path], folder: Path) -> tuple[object, ...]:
    """Options of the command for a pair, prompts of four documents and a server."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": tiny.document(seed)}) + "\n" for seed in range(4)))
    return (files[0], files[1], "--prompts", prompts, "--server", settings.binary)


@tiny.needs_llama
def test_the_whole_command(
    settings: LlamaServer, files: tuple[Path, Path], tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("FAKE", "paced")
    small = ("--count", 3, "--tokens", 12, "--prompt-tokens", 8, "--repeats", 1, "--concurrency", "1,2")
    of_server = ("--", "-ctkd", "q4_0")
    command = ("serve-check", *asked(settings, files, tmp_path), *small)
    out = tiny.shown(capsys, *command, *of_server)
    assert "| llama-server, its own counts |" in out and "| distill, the same files |" in out and "q4_0" in out
    (tmp_path / "found.json").write_text(tiny.shown(capsys, *command, "-o", "json", *of_server))
    found = read_result(tmp_path / "found.json", ServeReport)
    assert "| 2 at once | plain | 4 |" in out and [one.concurrency for one in found.speeds] == [1, 1, 2, 2]
    assert found.prompts == 3 and str(files[1]) in found.served and "-ctkd q4_0" in found.served


@pytest.mark.usefixtures("ours")
def test_a_draft_that_is_watched(
    settings: LlamaServer, files: tuple[Path, Path], tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Each result is kept; the next one on the same prompts is compared with it, text by text."""
    kept = tmp_path / "checks.json"
    pair = asked(settings, files, tmp_path)
    small = ("--count", 6, "--tokens", 24, "--prompt-tokens", "8,32", "--repeats", 1, "--concurrency", "1")
    command = ("serve-check", *pair, *small, "--fail-if-worse")
    assert "name a file for them: --history" in tiny.refused(capsys, *command)
    command = (*command, "--history", kept)
    first = tiny.shown(capsys, *command)
    assert "since build" not in first and "| 8 to 15 | 3 |" in first and "| 32 to 63 | 3 |" in first
    again = tiny.shown(capsys, *command, "-o", "json")
    found = from_json(json.loads(again), ServeReport, "-")
    assert found.change is not None and found.change.rise.mean == 0 and not found.change.fell
    assert found.lengths == [8] * 3 + [32] * 3 and found.context == 512
    assert sum(one.drafted for one in found.by_prompt) == found.acceptance[0].drafted
    capsys.readouterr()
    assert tiny.call(*command, "--", "-ctkd", "q4_0") == 3  # which lowers its acceptance
    out = capsys.readouterr().out
    worse = read_result(kept, History).checks
    rates = [sum(text.accepted for text in one.texts) / sum(text.drafted for text in one.texts) for one in worse]
    assert len(worse) == 3 and rates[0] == rates[1] > rates[2]
    assert f"Acceptance FELL: {rates[1]:.2f} → {rates[2]:.2f} since build b1-0c1e570" in out
    assert "Its flags were `" in out and "-ctkd" not in worse[1].served and "-ctkd q4_0" in worse[2].served
    # A result that fell is no reference for the next one, which would otherwise pass.
    assert [one.fell for one in worse] == [False, False, True]
    assert tiny.call(*command, "--", "-ctkd", "q4_0") == 3
    assert f"FELL: {rates[1]:.2f} → {rates[2]:.2f}" in capsys.readouterr().out
    history = read_result(kept, History)
    mended = compared(found, history).change
    assert mended is not None and mended.rise.mean == 0 and mended.time == worse[1].time
    for other in ({"n_max": 2}, {"new_tokens": 8}, {"digest": "0"}, {"sampler": {"temperature": 1}}):
        changed = replace(found, change=None, **other)
        assert compared(changed, history).change is None and not_compared(found, history) is None
        assert not_compared(changed, history)
    assert tiny.call(*command, "--n-max", 2) == 3
    said = capsys.readouterr().err
    assert "nothing was compared, because the last kept result has other draft lengths" in said
    assert tiny.call(*command, "--n-max", 2) == 0
    kept.write_text('{"checks": [1]}')
    assert "move the file away" in tiny.refused(capsys, *command)
    missing = ("--history", tmp_path / "none" / "checks.json")
    assert "in a folder that exists" in tiny.refused(capsys, "serve-check", *pair, *small, *missing)


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("end", [Interrupted(), ServingError("the server died", "look at its log")])
def test_what_was_measured_before_an_end_is_shown(
    settings: LlamaServer,
    files: tuple[Path, Path],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: Patch,
    end: BaseException,
) -> None:
    def ends(*_: object) -> NoReturn:
        raise end

    monkeypatch.setattr(check, "send", ends)
    pair = asked(settings, files, tmp_path)
    small = ("--count", 3, "--tokens", 12, "--prompt-tokens", 8, "--repeats", 1)
    status = tiny.call("serve-check", *pair, *small)
    out, err = capsys.readouterr()
    assert status == (130 if isinstance(end, Interrupted) else 2)
    assert "missing figures were not measured" in out and "| llama-server, its own counts |" in out
    assert "| distill, the same files |" in out and ("interrupted" in err or "the server died" in err)
    monkeypatch.setattr(check, "interleaved", ends)  # before anything was measured nothing is shown
    assert tiny.call("serve-check", *pair, *small) == status
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs a server"),
        (("--server", "a", "--url", "b"), "give --server or --url"),
        (("--url", "http://a", "--", "-ctkd", "q4_0"), "for a server that runs already"),
        (("--server", "a", "t.gguf"), "a pair is TARGET and DRAFT"),
        (("--server", "a", "t.gguf", "d.gguf"), "--prompts"),
        (("--server", "a", "--", "--spec-draft-n-max", "8"), "give --n-max"),
        (("--server", "a", "--", "-np", "4"), "give --concurrency"),
        (("--server", "a", "--concurrency", "1,900"), "from 1 to 64"),
        (("--server", "a", "-o", "xml"), "'xml' is not one of 'md', 'json'"),
    ],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], message: str, capsys: Capture) -> None:
    assert message in tiny.refused(capsys, "serve-check", *arguments)
