"""A served target's distributions: the log-probabilities of prompts that vLLM's /v1/completions returns.

A request sends a document as the prompt and asks for `prompt_logprobs`. The reply lists for each prompt token the K
likeliest tokens at its place, given the tokens before, and the token itself: {"ID": {"logprob": …, "rank": …}}; the
first token has none. vLLM applies no temperature to them.

Legend: N scored positions, K entries, V tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distill.errors import EndpointError
from distill.models.hugging_face import encode, load_config, load_tokenizer, real_tokens
from distill.packing import Packed
from distill.recipe import Recipe, TeacherServer
from distill.target.endpoint import Endpoint, Refused, Unanswered
from distill.target.logprobs.entries import Document, Entries, scored_documents

MOST_PADDING = 32  # entries asked for beyond K, for padding rows that may be among the likeliest
BYTES_PER_ENTRY = 70  # of JSON
EXCESS = 1e-3  # by which rounding may lift a sum of probabilities above 1
NO_LOGPROBS = (
    "vLLM returns them; llama-server, SGLang's OpenAI API and most gateways do not. From those take the answers alone, "
    "and make the distributions from the weights (target.model) or a GGUF file (teacher.gguf)"
)


def asked_entries(k: int, padding: int) -> int:
    """How many entries a request asks for, K and a few for padding rows; vLLM's --max-logprobs must allow it."""
    return k + min(padding, MOST_PADDING)


def open_server(recipe: Recipe) -> ServerReader:
    """The recipe's servers, checked with one short request each."""
    assert recipe.teacher.server is not None
    tokenizer = load_tokenizer(recipe.target.model)
    config = load_config(recipe.target.model).get_text_config()
    vocabulary = real_tokens(config, tokenizer)
    k = min(recipe.teacher.top_k, vocabulary - 1)
    return ServerReader(recipe.teacher.server, tokenizer, vocabulary, config.vocab_size, k, recipe.corpus.block)


class ServerReader:
    """Servers of one target, checked when opened: each has the model, and gives log-probabilities of these very ids.

    `vocabulary` tokens are real, `rows` has the head; `longest` is the longest document in tokens.
    """

    def __init__(
        self, settings: TeacherServer, tokenizer: Any, vocabulary: int, rows: int, k: int, longest: int
    ) -> None:
        self.settings, self.tokenizer, self.vocabulary = settings, tokenizer, vocabulary
        self.padding, self.k = rows - vocabulary, k
        self.endpoint = Endpoint(settings, "teacher.server")
        self.origin: dict[str, Any] = {"kind": "server", "model": settings.model}
        try:
            for url, _, listed in self.endpoint.served():
                self._require_context(url, listed.get("max_model_len"), longest)
            for _ in settings.urls:  # requests take turns: each server gets one
                self._read(Document([0, 1 % vocabulary], [0]), k)
        except BaseException:
            self.close()
            raise

    def __call__(self, blocks: Packed, k: int, temperatures: tuple[float, ...]) -> Entries:
        """See `Reader`; temperature 1 alone."""
        assert temperatures == (1.0,), "a server gives distributions at temperature 1"
        documents = scored_documents(blocks)
        parts = self.endpoint.each(lambda document: self._read(document, k), documents)
        return Entries.join(parts, k, 1)

    @property
    def asked(self) -> int:
        """The largest number of log-probabilities that a request asks for."""
        return asked_entries(self.k, self.padding)

    def announcement(self, blocks: Packed) -> str:
        """What the servers will be asked for, to print before the first request."""
        documents = scored_documents(blocks)
        tokens = sum(len(document.ids) for document in documents)
        size = tokens * self.asked * BYTES_PER_ENTRY
        return (
            f"distributions of {self.settings.model} at temperature 1 from {len(self.settings.urls)} server(s): "
            f"{len(documents)} documents of {tokens} tokens, at most {size / 1e6:.0f} MB of replies; train at "
            "temperature 1, the evaluation uses the served sampler"
        )

    def scorable(self, blocks: Packed) -> tuple[Packed, int]:
        """The blocks without the scores of documents that cannot be sent as text, and how many those are."""
        if self.settings.prompts == "ids":
            return blocks, 0
        mask, left_out = blocks.mask.clone(), 0
        for row in range(len(blocks)):
            for number in blocks.documents[row][blocks.mask[row]].unique().tolist():
                here = blocks.documents[row] == number
                ids = blocks.ids[row][here].tolist()[: int(blocks.mask[row][here].nonzero()[-1]) + 2]
                if encode(self.tokenizer, self._text(ids)) != ids:
                    mask[row][here] = False
                    left_out += 1
        return Packed(blocks.ids, blocks.documents, blocks.positions, mask, blocks.first), left_out

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _require_context(self, url: str, context: Any, longest: int) -> None:
        """Raise EndpointError for a server that says that it serves a context too short for the blocks."""
        if isinstance(context, int) and context < longest + 1:  # one token is generated
            raise EndpointError(
                f"{url} serves a context of {context} tokens, and corpus.block + 1 = {longest + 1} are needed",
                f"start vLLM with --max-model-len {longest + 1}, or lower corpus.block",
            )

    def close(self) -> None:
        """End the connections."""
        self.endpoint.close()

    def report(self) -> str:
        """A sentence on the requests, to print after the last one."""
        return f"server: {self.endpoint.summary()}"

    def _read(self, document: Document, k: int) -> Entries:
        """The entries of one document's scored positions."""
        ids, text = document.ids, self.settings.prompts == "text"
        body = {
            "model": self.settings.model,
            "prompt": self._text(ids) if text else ids,
            "prompt_logprobs": asked_entries(k, self.padding),
            "max_tokens": 1,  # 0 is refused by some versions
            "temperature": 0,
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        reply = self._reply(body)
        if reply.get("model") != self.settings.model:
            raise EndpointError(
                f"a server asked for {self.settings.model} answered for {str(reply.get('model'))[:100]}",
                "correct teacher.server.model or urls: the name must be the one that /v1/models lists",
            )
        places = self._places(reply, ids)
        rows = [self._entries(places[position + 1], position + 1, k) for position in document.scored]
        found, logs = (
            torch.tensor([row[0] for row in rows]),
            torch.tensor([row[1] for row in rows], dtype=torch.float64),
        )
        tails = log_tails(logs)
        return Entries(found.to(torch.int32), logs.float(), tails.float().unsqueeze(-1))

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """A server's reply; EndpointError, with what to do, where none comes."""
        try:
            return self.endpoint.post("completions", body)
        except Refused as refusal:
            hint = "see the server's log"
            if "greater than max allowed" in refusal.detail:
                hint = "start vLLM with a larger --max-logprobs, or lower teacher.top_k"
            elif self.settings.prompts == "ids":
                hint = "if the server takes no token ids as a prompt, set teacher.server.prompts: text"
            raise EndpointError(
                f"a server of {self.settings.model} refused a request ({refusal.reason}): {refusal.detail}", hint
            ) from None
        except Unanswered as fault:
            raise EndpointError(
                f"the servers of {self.settings.model} gave no usable reply, {self.settings.retries + 1} times in a "
                f"row, the last time: {fault.reason} {fault.detail}".rstrip(),
                "see the server's log; the same command goes on with what is missing. teacher.server.concurrency, "
                "retries and timeout can be changed without losing anything",
            ) from None

    def _places(self, reply: dict[str, Any], ids: list[int]) -> list[dict[int, float]]:
        """The log-probabilities by id at each prompt token [S]; EndpointError unless they are those of these ids."""
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        listed = choice.get("prompt_logprobs")
        if not isinstance(listed, list):
            raise EndpointError(
                f"the server of {self.settings.model} returns no log-probabilities of prompts "
                "(choices[0].prompt_logprobs)",
                NO_LOGPROBS,
            )
        own = choice.get("prompt_token_ids")
        if len(listed) != len(ids) or (isinstance(own, list) and own != ids):
            raise self._other_ids(f"{len(listed)} tokens" if len(listed) != len(ids) else "other tokens", len(ids))
        places: list[dict[int, float]] = [{}]
        for place, (entries, token) in enumerate(zip(listed[1:], ids[1:], strict=True), 1):
            try:
                found = {int(name): float(entry["logprob"]) for name, entry in entries.items()}
            except (AttributeError, KeyError, TypeError, ValueError):
                raise EndpointError(
                    f"the log-probabilities at prompt token {place} are not of the form that vLLM returns: "
                    f"{str(entries)[:100]}",
                    NO_LOGPROBS + "; with vLLM, start it with --no-enable-prefix-caching" * (entries is None),
                ) from None
            if token not in found:
                raise self._other_ids(f"no token {token} at place {place}", len(ids))
            places.append(found)
        return places

    def _other_ids(self, what: str, count: int) -> EndpointError:
        return EndpointError(
            f"the server read {what} from a prompt of {count} tokens: its ids are not those of the target's tokenizer",
            "serve the target with the tokenizer of target.model, without added tokens (add_special_tokens)",
        )

    def _entries(self, found: dict[int, float], place: int, k: int) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities of the k likeliest real tokens at one place."""
        real = sorted(((-log, token) for token, log in found.items() if 0 <= token < self.vocabulary))[:k]
        logs = [-negative for negative, _ in real]
        if len(real) < k:
            raise EndpointError(
                f"the server returned {len(found)} log-probabilities at prompt token {place}, of which {len(real)} are "
                f"of tokens, and {k} are needed",
                f"start vLLM with --max-logprobs {asked_entries(k, self.padding)}, or lower teacher.top_k",
            )
        total = math.fsum(math.exp(log) for log in logs if log < 1)
        if not all(math.isfinite(log) and log <= EXCESS for log in logs) or total > 1 + EXCESS:
            raise EndpointError(
                f"the numbers at prompt token {place} are no log-probabilities: the largest is {logs[0]:g}, their "
                f"probabilities add up to {total:g}",
                "start vLLM with --logprobs-mode raw_logprobs, its default",
            )
        return [token for _, token in real], logs


def log_tails(logs: Tensor) -> Tensor:
    """The log of 1 − Σ p [N] from log p [N, K] of the likeliest tokens, in fp64.

    The server rounds log p to fp32, so that 1 − Σ p is known up to the rounding of the sum: a smaller tail counts as
    that rounding, about 1e-7.
    """
    logs = logs.double()
    rounding = (logs.exp() * (1 + logs.abs())).sum(-1) * torch.finfo(torch.float32).eps
    return torch.maximum(-torch.expm1(logs.logsumexp(-1)), rounding).log()
