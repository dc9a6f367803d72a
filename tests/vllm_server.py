"""A server with the formats of vLLM's /v1/models and /v1/completions, on loopback, over a tiny model.

`prompt_logprobs` are computed by the model in the same precision as vLLM's (fp32 log-softmax over all rows of the head,
the prompt's own token beside the likeliest K, −9999 for no mass). `faults` names what goes wrong with a request: a list
by number of POST requests, or one fault for all of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from loopback import LoopbackHandler, running

KEY = "sk-secret-0123456789"


class VllmServer:
    """`max_logprobs` as vLLM's option; with `key`, requests need it; `requests` keeps the bodies that were received."""

    def __init__(
        self,
        model: Any,
        name: str = "target",
        tokenizer: Any = None,
        max_logprobs: int = 20,
        context: int = 4096,
        key: str | None = None,
        faults: Any = None,
        path_of_models: bool = True,
    ) -> None:
        self.model, self.name, self.tokenizer, self.max_logprobs = model, name, tokenizer, max_logprobs
        self.context, self.key, self.faults, self.path_of_models = context, key, faults, path_of_models
        self.requests: list[dict[str, Any]] = []
        self.active = self.most_active = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def models(self) -> dict[str, Any]:
        entry = {"id": self.name, "object": "model", "created": 1, "owned_by": "vllm", "root": "/models/x"}
        return {"object": "list", "data": [entry | {"parent": None, "max_model_len": self.context}]}

    def fault(self, number: int) -> str | None:
        if isinstance(self.faults, str) or self.faults is None:
            return self.faults
        return self.faults[number] if number < len(self.faults) else None

    @torch.inference_mode()
    def completion(self, body: dict[str, Any], fault: str | None) -> tuple[int, dict[str, Any]]:
        if body["model"] != self.name:
            return 404, error(f"The model `{body['model']}` does not exist.", "NotFoundError", 404)
        count = body.get("prompt_logprobs")
        if count is not None and count > self.max_logprobs:
            message = f"Requested prompt logprobs of {count}, which is greater than max allowed: {self.max_logprobs}"
            return 400, error(message, "BadRequestError", 400)
        ids = body["prompt"]
        if isinstance(ids, str):
            assert body["add_special_tokens"] is False
            ids = self.tokenizer(ids, add_special_tokens=False)["input_ids"]
        elif fault == "text alone":
            return 422, {"detail": "Input should be a valid string"}
        if fault == "other ids":
            ids = [*ids[:-1], (ids[-1] + 1) % 200]
        if fault == "a bos":
            ids = [0, *ids]
        with self.lock:
            logs = self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        listed: Any = [None]
        for place in range(1, len(ids)):
            row = logs[place - 1]
            values, likeliest = row.topk(count)
            rank = int((row > row[ids[place]]).sum()) + 1
            entries = {ids[place]: entry(float(row[ids[place]]), rank)}
            for index, (token, value) in enumerate(zip(likeliest.tolist(), values.tolist(), strict=True), 1):
                entries[token] = entry(value, index)
            listed.append(entries)
        if fault == "no logprobs":
            listed = None
        if fault == "raw logits":
            listed = [None, *({token: entry(1.5, 1) for token in entries} for entries in listed[1:])]
        if fault == "a hole":
            listed[1] = None
        if fault == "few":
            listed = [None, *(dict(list(entries.items())[:3]) for entries in listed[1:])]
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        choice |= {"prompt_logprobs": listed, "prompt_token_ids": ids, "token_ids": [1]}
        usage = {"prompt_tokens": len(ids), "total_tokens": len(ids) + 1, "completion_tokens": 1}
        name = "another-model" if fault == "another model" else self.name
        choices = [choice] * (2 if fault == "twice" else 1)
        return 200, {"id": "cmpl-1", "object": "text_completion", "model": name, "choices": choices, "usage": usage}

    @contextlib.contextmanager
    def running(self) -> Iterator[VllmServer]:
        with running(Handler, self) as self.port:
            yield self


class Handler(LoopbackHandler):
    owner: VllmServer
    working = False  # on a request that is not yet answered

    def reply(self, status: int, value: Any, **more: Any) -> None:
        self.end_work()  # before the client can send its next request
        super().reply(status, value, **more)

    def end_work(self) -> None:
        with self.owner.lock:
            self.owner.active -= self.working
        self.working = False

    def refused(self) -> bool:
        if self.owner.key is None or self.headers.get("Authorization") == f"Bearer {self.owner.key}":
            return False
        self.reply(401, error(f"Invalid key: {self.headers.get('Authorization')}", "Unauthorized", 401))
        return True

    def do_GET(self) -> None:
        if self.refused():
            return
        if self.path == "/v1/models" and self.owner.path_of_models:
            self.reply(200, self.owner.models())
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.body()
        if self.refused():
            return
        with self.owner.lock:
            number = len(self.owner.requests)
            self.owner.requests.append(body)
            self.working = True
            self.owner.active += 1
            self.owner.most_active = max(self.owner.active, self.owner.most_active)
        try:
            self.answer(body, self.owner.fault(number))
        finally:
            self.end_work()

    def answer(self, body: dict[str, Any], fault: str | None) -> None:
        if fault in ("408", "429", "500", "503"):
            more = {"Retry_After": "0"} if fault == "429" else {}
            self.reply(int(fault), error("busy", "Error", int(fault)), **more)
        elif fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"id": "cm')
            self.close_connection = True
        elif fault == "wrong JSON":
            self.reply(200, b"<html>try again</html>")
        elif fault == "slow":
            time.sleep(2.0)
            self.close_connection = True
        elif fault == "redirect":
            self.reply(307, b"", Location="http://127.0.0.1:1/v1/completions")
        else:
            self.reply(*self.owner.completion(body, fault))


def entry(logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": max(logprob, -9999.0), "rank": rank, "decoded_token": "x"}


def error(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
