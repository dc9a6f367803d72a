"""A server with vLLM 0.32.0's /v1/models, streamed /v1/completions, /metrics and /version, on loopback, no model.

Formats from its sources: CompletionStreamResponse of entrypoints/openai/completion/protocol.py, with the usage in a
last chunk without choices; the counters of v1/spec_decode/metrics.py with the labels model_name and engine of
v1/metrics/loggers.py and, by position, a further one, names ending in _total as prometheus_client writes them; and
entrypoints/serve/instrumentator. Counts with a reply: docs/features/speculative_decoding/acceptance_metrics.md.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from loopback import LoopbackHandler, running

VERSION = "0.32.0"


class VllmServing:
    """`length` drafted tokens a round (0: no draft), of which every round accepts the next count of `accepts`.

    Counters rise `lag` seconds after the reply, as they are written by another task. `fault` names what goes wrong.
    With `of_requests` it runs with --per-request-spec-decode-metrics summary.
    """

    def __init__(
        self,
        length: int = 4,
        accepts: tuple[int, ...] = (4, 2, 0),
        lag: float = 0.02,
        fault: str = "",
        key: str = "",
        of_requests: bool = False,
    ) -> None:
        self.length, self.accepts, self.lag, self.fault, self.key = length, accepts, lag, fault, key
        self.of_requests = of_requests
        self.rounds = self.accepted = self.drafted = 0
        self.positions = [0] * length
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def completion(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        limit, prompt = body["max_tokens"], body["prompt"]
        assert isinstance(prompt, list) and body["stream"] and body["stream_options"] == {"include_usage": True}
        assert not {"@", "/", "\\"} & set(body["cache_salt"]) and len(body["cache_salt"]) <= 128
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        events, made, counts = [], 0, []
        while made < limit:
            count = 0
            if made and self.length and limit - made > 1:
                count = min(self.accepts[len(counts) % len(self.accepts)], limit - made - 1)
                counts.append(count)
            ids = [(sum(prompt) + place) % 97 for place in range(made, made + count + 1)]
            made += count + 1
            choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": None, "stop_reason": None}
            choice |= {"prompt_token_ids": None, "token_ids": ids if body["return_token_ids"] else None}
            events.append(head | {"choices": [choice], "usage": None})
        usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + made, "completion_tokens": made}
        events.append(head | {"choices": [], "usage": usage} | self.summary(counts))
        threading.Timer(self.lag, self.count, [counts]).start()
        return events

    def summary(self, counts: list[int]) -> dict[str, Any]:
        if not self.of_requests:
            return {}
        histogram = [counts.count(accepted) for accepted in range(self.length + 1)]
        found: dict[str, Any] = {"acceptance_histogram": histogram, "num_spec_steps": len(counts)}
        found |= {"num_accepted_draft_tokens": sum(counts), "num_draft_tokens": self.length * len(counts)}
        return {"metrics": {"speculative_decoding": found | {"num_spec_tokens": self.length}}}

    def count(self, counts: list[int]) -> None:
        with self.lock:
            self.rounds += len(counts)
            self.drafted += self.length * len(counts)
            self.accepted += sum(counts)
            for accepted in counts:
                for place in range(accepted):
                    self.positions[place] += 1

    def metrics(self) -> str:
        labels = 'engine="0",model_name="org/target,v2"'
        lines = ["# HELP vllm:num_requests_running Number of requests in model execution batches."]
        lines += ["# TYPE vllm:num_requests_running gauge", f"vllm:num_requests_running{{{labels}}} 0.0"]
        with self.lock:
            found = {"drafts": self.rounds, "draft_tokens": self.drafted, "accepted_tokens": self.accepted}
            positions = list(self.positions)
        for name, value in found.items() if self.length else ():
            full = f"vllm:spec_decode_num_{name}"
            lines += [f"# HELP {full}_total Number.", f"# TYPE {full}_total counter"]
            lines += [f"{full}_total{{{labels}}} {value:.1f}", f"{full}_created{{{labels}}} 1.7e+09"]
        for place, value in enumerate(positions):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{engine="0",model_name="org/target,v2",position="{place}"}} {value:.1f}')
        return "\n".join(lines) + "\n"

    @contextlib.contextmanager
    def running(self) -> Iterator[VllmServing]:
        with running(Handler, self) as self.port:
            yield self


class Handler(LoopbackHandler):
    owner: VllmServing

    def do_GET(self) -> None:
        if self.path == "/version":
            self.reply(200, {"version": VERSION})
        elif self.path == "/metrics":
            self.reply(200, self.owner.metrics())
        elif self.path == "/v1/models":
            entry = {"id": "org/target", "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 4096}
            self.reply(200, {"object": "list", "data": [entry] * (2 if self.owner.fault == "two models" else 1)})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.body()
        self.owner.bodies.append(body)
        if self.owner.key and self.headers.get("Authorization") != f"Bearer {self.owner.key}":
            self.reply(401, {"error": f"Unauthorized: {self.headers.get('Authorization')}"})
        elif self.owner.fault == "refuses":
            message = "This model's maximum context length is 64 tokens. However, you requested 96 output tokens"
            error = {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}
            self.reply(400, {"error": error})
        elif self.owner.fault == "slow":
            time.sleep(3)
        else:
            self.stream(self.events(body))

    def events(self, body: dict[str, Any]) -> list[str]:
        events = [json.dumps(event) for event in self.owner.completion(body)]
        if self.owner.fault == "fails later":
            events[2:] = [
                json.dumps({"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}})
            ]
        return [f"data: {event}" for event in [*events, "[DONE]"]]
