"""llama-server's own API: completions of token ids with its counts, and what it says about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distill.errors import ServingError
from distill.serving.client import Http, Reply, Totals, totals_of

# Every sampler that could make greedy decoding another text is switched off: a server may have defaults of its own.
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "top_k": 1,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "seed": 0,
}


class LlamaClient:
    """A llama-server, started by us or by the user."""

    kind = "llama-server"

    def __init__(
        self, url: str, seconds: float, key: str | None = None, death: Callable[[], str | None] = lambda: None
    ) -> None:
        self.http = Http(url, seconds, key, death)
        self.url = self.http.url

    def complete(self, ids: Sequence[int], limit: int) -> Reply:
        """Up to `limit` tokens, greedily, without the prompt cache."""
        body = GREEDY | {"prompt": list(ids), "n_predict": limit, "cache_prompt": False, "return_tokens": True}
        events, first, seconds = self.http.stream("/completion", body | {"stream": True})
        last = events[-1]
        timings = last.get("timings")
        if not isinstance(timings, dict):
            raise ServingError(f"{self.url} gives no timings with its replies", "llama-server of this year does")
        tokens = [token for event in events for token in event.get("tokens", ())]
        count = timings.get("predicted_n", last.get("tokens_predicted", len(tokens)))
        return Reply(
            tokens=tokens,
            count=int(count),
            first_seconds=first,
            seconds=seconds,
            drafted=int(timings.get("draft_n", 0)),
            accepted=int(timings.get("draft_n_accepted", 0)),
            cached=max(0, int(timings.get("cache_n", 0))),
            later_seconds=float(timings.get("predicted_ms", 0)) / 1e3,
        )

    def totals(self) -> Totals | None:
        """Its counters, where it was started with --metrics."""
        response = self.http.get("/metrics")
        return totals_of(response.text, "llamacpp") if response.status_code == 200 else None

    def properties(self) -> dict[str, Any]:
        """/props: the build, the chat template, the model's path and the context of a request; empty where refused."""
        return self.http.object("/props")

    def drafts(self) -> bool | None:
        """Whether its slots speculate; None where it does not say."""
        response = self.http.get("/slots")
        try:
            found = response.json() if response.status_code == 200 else None
        except ValueError:
            return None
        if isinstance(found, list) and found and isinstance(found[0], dict) and "speculative" in found[0]:
            return any(slot.get("speculative") is True for slot in found if isinstance(slot, dict))
        return None

    def vocabulary_size(self) -> int | None:
        """Tokens of its model; None where it does not say."""
        listed = self.http.object("/v1/models").get("data")
        first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
        meta = first.get("meta")
        size = meta.get("n_vocab") if isinstance(meta, dict) else None
        return size if isinstance(size, int) else None

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text as the server reads it, control tokens in it as such."""
        found = self.http.post("/tokenize", {"content": text, "add_special": False, "parse_special": True})
        tokens = found.get("tokens")
        return [token for token in tokens if isinstance(token, int)] if isinstance(tokens, list) else []

    def rendered(self, messages: list[dict[str, str]]) -> str:
        """A conversation through the server's chat template."""
        return str(self.http.post("/apply-template", {"messages": messages}).get("prompt", ""))

    def close(self) -> None:
        """Free the connections."""
        self.http.close()
