"""vLLM's completions of token ids, and its counters at /metrics; formats of the version in server_commands.VLLM."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from distill.errors import ServingError
from distill.files import parse_object
from distill.serving.client import Http, Reply, Totals, totals_of

# A server takes defaults from the model's generation_config.json; greedy decoding of the model alone has none of them.
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": 0,
}
SETTLED_SECONDS, PATIENCE_SECONDS = 0.05, 2.0  # counters are written by another task of the server than replies


class VllmClient:
    """A vLLM server that the user started.

    Its counters are the server's, not a request's: while `alone` is true, requests come one at a time and each reply
    gets what the counters rose by.
    """

    kind = "vllm"

    def __init__(self, url: str, seconds: float, key: str | None = None, model: str | None = None) -> None:
        self.http = Http(url, seconds, key)
        self.url, self.alone = self.http.url, True
        self.model = model or self._only_model()

    def _only_model(self) -> str:
        listed = self.http.object("/v1/models").get("data")
        names = (
            [str(one["id"]) for one in listed if isinstance(one, dict) and "id" in one]
            if isinstance(listed, list)
            else []
        )
        if len(names) != 1:
            raise ServingError(
                f"{self.url} serves {len(names)} models: {', '.join(names)[:200]}", "name one: --model NAME"
            )
        return names[0]

    def complete(self, ids: Sequence[int], limit: int) -> Reply:
        """Up to `limit` tokens, greedily; a salt of its own keeps the request out of the prefix cache."""
        body = GREEDY | {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": limit,
            "cache_salt": secrets.token_hex(16),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        before = self.totals() if self.alone else None
        events, first, seconds = self.http.stream("/v1/completions", body)
        tokens = [
            token for event in events for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()
        ]
        usage: dict[str, Any] = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
        count = int(usage.get("completion_tokens", len(tokens)))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        found = None if before is None else self._settled(before).since(before)
        return Reply(
            tokens=tokens,
            count=count,
            first_seconds=first,
            seconds=seconds,
            drafted=None if found is None else found.drafted,
            accepted=None if found is None else found.accepted,
            cached=int(cached),
        )

    def _settled(self, before: Totals) -> Totals:
        """The counters once they stand still."""
        deadline, last = time.monotonic() + PATIENCE_SECONDS, before
        while True:
            found = self.totals() or before
            if (found == last and found != before) or time.monotonic() > deadline:
                return found
            last = found
            time.sleep(SETTLED_SECONDS)

    def totals(self) -> Totals | None:
        """Its counters, summed over engines; None where the server does not speculate."""
        response = self.http.get("/metrics")
        return totals_of(response.text, "vllm") if response.status_code == 200 else None

    def version(self) -> str:
        """/version; empty where there is none."""
        return str(self.http.object("/version").get("version", ""))

    def drafts(self) -> bool:
        """Whether it speculates: its counters exist then alone."""
        return self.totals() is not None

    def close(self) -> None:
        """Free the connections."""
        self.http.close()


def kind_of_server(url: str, seconds: float, key: str | None) -> str:
    """llama-server or vllm, by what only one of them has; ServingError for another server, or none."""
    http = Http(url, seconds, key)
    try:
        properties = parse_object(http.get("/props").content)
        if not isinstance(properties, str) and "build_info" in properties:
            return "llama-server"
        version = parse_object(http.get("/version").content)
        if not isinstance(version, str) and "version" in version:
            return "vllm"
    finally:
        http.close()
    raise ServingError(
        f"{http.url} is neither llama-server nor vLLM, by /props and /version", "name it: --kind, or correct --url"
    )
