"""Requests for log-probabilities of generated tokens, and their replies, for each kind of server.

docs/answers.md#log-probabilities has the table, from the servers' sources. A reply is read into the generated ids, and
for each of them the ids and natural logarithms of the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from distill.teacher.endpoint import FromModel
from distill.teacher.scores import NotDistributions, Row
from distill.vocabulary.vocabulary import Vocabulary

# ── Tokens that a server names by their text ──


class Spellings:
    """The ids of a vocabulary's tokens by their bytes. A reply that needs it opens the vocabulary."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._open = vocabulary

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens."""
        return self._open()

    @cached_property
    def ids(self) -> dict[bytes, int | None]:
        """The id of each token's bytes; None if several tokens have them."""
        ids: dict[bytes, int | None] = {}
        for token, spelled in enumerate(self.vocabulary.bytes_of):
            if spelled:
                ids[spelled] = None if spelled in ids else token
        return ids

    def id_of(self, spelled: bytes) -> int | None:
        """The token with these bytes; None if there is none, or several."""
        return self.ids.get(spelled)


# ── Replies ──


class Usage(BaseModel):
    """The tokens that a server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Entry(BaseModel):
    """A likely token: llama-server returns its id, OpenAI's chat form its text and bytes."""

    logprob: float
    id: int | None = None
    token: str = ""
    spelled: list[Annotated[int, Field(ge=0, le=255)]] | None = Field(None, alias="bytes")

    @property
    def text(self) -> bytes:
        """The token's bytes."""
        return self.token.encode() if self.spelled is None else bytes(self.spelled)


class ScoredToken(Entry):
    """A generated token with the likeliest tokens in its place."""

    top_logprobs: list[Entry] | None = None


class TokenScores(BaseModel):
    """`logprobs` of a choice: lists in the older form of completions, `content` in the chat form."""

    tokens: list[str] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[ScoredToken] | None = None


class Choice(BaseModel):
    """A finished text: `text` of a completion, and the generated ids if the server returns them (vLLM)."""

    finish_reason: Literal["stop", "length"]
    text: str = ""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    stop_reason: Any = None  # vLLM
    matched_stop: Any = None  # SGLang
    logprobs: TokenScores | None = None

    @property
    def ended(self) -> bool:
        """Whether the target ended the text."""
        return self.finish_reason != "length"

    @property
    def ended_by(self) -> list[Any]:
        """The stop string or end token that ended the text, None for the end; empty if the server does not tell."""
        given = ("stop_reason", "matched_stop")
        return [getattr(self, name) for name in given if name in self.model_fields_set]


class Completion(FromModel):
    """The reply of /v1/completions with one answer."""

    choices: list[Choice] = Field(min_length=1, max_length=1)
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None

    @property
    def prompt_ids(self) -> list[int] | None:
        """The tokens that the server read; None if it does not tell."""
        return self.choices[0].prompt_token_ids or self.prompt_token_ids

    def is_of(self, ids: list[int]) -> bool:
        """Whether the server read these tokens, or does not tell."""
        if self.prompt_ids is not None:
            return self.prompt_ids == ids
        return self.usage is None or self.usage.prompt_tokens in (None, len(ids))


Answered = tuple[Completion, list[Row | None]]  # an answer with its generated ids, and a row for each of them


def _require_tokens(ids: Sequence[int | None], named: Iterable[int | None]) -> None:
    """Raise NotDistributions unless the log-probabilities belong to the generated tokens."""
    if list(ids) != list(named):
        raise NotDistributions("the log-probabilities are those of other tokens than the generated ones")


# ── vLLM: the older form, whose texts are ids (`return_tokens_as_token_ids`) ──

ID_MARK = "token_id:"


def _ask_vllm(body: Mapping[str, Any], entries: int) -> dict[str, Any]:
    return {**body, "logprobs": entries, "return_tokens_as_token_ids": True}


def _read_vllm(reply: Completion, spellings: Spellings) -> Answered:
    choice = reply.choices[0]
    scores = choice.logprobs
    if choice.token_ids is None or scores is None or scores.tokens is None or scores.top_logprobs is None:
        raise NotDistributions("the reply has no ids or no log-probabilities of its tokens")
    try:
        _require_tokens(choice.token_ids, [int(token.removeprefix(ID_MARK)) for token in scores.tokens])
        rows: list[Row | None] = [
            None if top is None else ([int(token.removeprefix(ID_MARK)) for token in top], list(top.values()))
            for top in scores.top_logprobs
        ]
    except ValueError:
        raise NotDistributions("the reply names tokens by their text instead of their id") from None
    return reply, rows


# ── SGLang: its own form, /generate ──


class SglangEnd(BaseModel):
    """The end of a text. `matched` is the end token or the stop string."""

    type: str
    matched: Any = None


class SglangMeta(BaseModel):
    """SGLang's data of a text: (logarithm, id, text or null) of each token, and of the likeliest tokens."""

    finish_reason: SglangEnd
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    output_token_logprobs: list[tuple[float, int, Any]] | None = None
    output_top_logprobs: list[list[tuple[float, int, Any]] | None] | None = None


class SglangReply(FromModel):
    """The reply of /generate."""

    text: str = ""
    output_ids: list[int] | None = None
    meta_info: SglangMeta


def _ask_sglang(body: Mapping[str, Any], entries: int) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    sampling = {name: body[name] for name in (*names, "stop", "stop_token_ids") if name in body}
    sampling["top_k"] = body.get("top_k") or -1
    return {
        "input_ids": body["prompt"],
        "sampling_params": sampling | {"max_new_tokens": body["max_tokens"], "skip_special_tokens": False},
        "return_logprob": True,
        "top_logprobs_num": entries,
        "stream": False,
    }


def _read_sglang(reply: SglangReply, spellings: Spellings) -> Answered:
    about = reply.meta_info
    if reply.output_ids is None or about.output_token_logprobs is None or about.output_top_logprobs is None:
        raise NotDistributions("the reply has no ids or no log-probabilities of its tokens")
    if about.finish_reason.type not in ("stop", "length"):
        raise NotDistributions(f"the server broke off ({about.finish_reason.type})")
    _require_tokens(reply.output_ids, [token for _, token, _ in about.output_token_logprobs])
    rows: list[Row | None] = [
        None if top is None else ([token for _, token, _ in top], [log for log, _, _ in top])
        for top in about.output_top_logprobs
    ]
    if len(rows) != len(reply.output_ids):
        raise NotDistributions("there are other numbers of tokens and of log-probabilities")
    kind: Literal["stop", "length"] = "stop" if about.finish_reason.type == "stop" else "length"
    choice = Choice(
        finish_reason=kind, text=reply.text, token_ids=reply.output_ids, matched_stop=about.finish_reason.matched
    )
    usage = Usage(prompt_tokens=about.prompt_tokens, completion_tokens=about.completion_tokens)
    return Completion(model=reply.model, choices=[choice], usage=usage), rows


# ── llama-server: its own form, /completion, because /v1/completions names no ids of unfinished characters ──


class LlamaReply(FromModel):
    """The reply of /completion with `return_tokens`."""

    content: str = ""
    tokens: list[int] | None = None
    stop_type: str = ""
    stopping_word: str = ""
    tokens_evaluated: int | None = None
    tokens_predicted: int | None = None
    completion_probabilities: list[ScoredToken] | None = None


def _ask_llama(body: Mapping[str, Any], entries: int) -> dict[str, Any]:
    more = {"n_predict": body["max_tokens"], "n_probs": entries, "post_sampling_probs": False, "return_tokens": True}
    return {**body, **more}


def _read_llama(reply: LlamaReply, spellings: Spellings) -> Answered:
    if reply.tokens is None or reply.completion_probabilities is None:
        raise NotDistributions("the reply has no tokens or no completion_probabilities")
    if reply.stop_type not in ("eos", "word", "limit"):
        raise NotDistributions(f"the server broke off ({reply.stop_type or 'no stop_type'})")
    kind: Literal["stop", "length"] = "length" if reply.stop_type == "limit" else "stop"
    by = reply.stopping_word if reply.stop_type == "word" else None
    choice = Choice(finish_reason=kind, text=reply.content, token_ids=reply.tokens, stop_reason=by)
    usage = Usage(prompt_tokens=reply.tokens_evaluated, completion_tokens=reply.tokens_predicted)
    answer = Completion(model=reply.model, choices=[choice], usage=usage)
    return answer, _llama_rows(reply.tokens, reply.completion_probabilities, spellings.vocabulary)


def _llama_rows(tokens: Sequence[int], scored: Sequence[ScoredToken], vocabulary: Vocabulary) -> list[Row | None]:
    """A row for each token, None for tokens within a character, which the server leaves out."""
    left = list(reversed(scored))
    rows: list[Row | None] = []
    text = b""
    for token in tokens:
        text = (text + vocabulary.text_bytes([token]))[-4:]
        if left and left[-1].id == token and not unfinished(text):
            top = left.pop().top_logprobs or []
            rows.append(([-1 if entry.id is None else entry.id for entry in top], [entry.logprob for entry in top]))
        else:
            rows.append(None)
    if left:
        raise NotDistributions("the log-probabilities are those of other tokens than the generated ones")
    return rows


def unfinished(text: bytes) -> bool:
    """Whether a text ends within a character for llama-server (validate_utf8 of its server-common.cpp)."""
    for back, byte in enumerate(reversed(text[-4:]), 1):
        length = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 0
        if back < length:
            return True
    return False


# ── OpenAI's completions, and compatible servers: tokens are texts ──


def _ask_openai(body: Mapping[str, Any], entries: int) -> dict[str, Any]:
    return {**body, "logprobs": entries}


def _read_openai(reply: Completion, spellings: Spellings) -> Answered:
    choice = reply.choices[0]
    scores = choice.logprobs
    if scores is not None and scores.content is not None:
        content = scores.content
    elif scores is not None and scores.tokens is not None and scores.top_logprobs is not None:
        content = [
            ScoredToken(
                logprob=0,
                token=token,
                top_logprobs=[Entry(token=other, logprob=log) for other, log in (top or {}).items()],
            )
            for token, top in zip(scores.tokens, scores.top_logprobs, strict=True)
        ]
    else:
        raise NotDistributions("the reply has no log-probabilities (choices[0].logprobs)")
    text = b"".join(token.text for token in content)
    if not text.startswith(choice.text.encode()):
        raise NotDistributions("the texts of its tokens are not the text of the reply")
    ids = [token.id if token.id is not None else spellings.id_of(token.text) for token in content]
    if None in ids:
        unknown = content[ids.index(None)].token
        raise NotDistributions(f"no token, or several, are spelled {unknown[:40]!r}, and the reply has no ids")
    rows: list[Row | None] = []
    for scored in content:
        top = [
            (entry.id if entry.id is not None else spellings.id_of(entry.text), entry)
            for entry in scored.top_logprobs or []
        ]
        rows.append(([-1 if token is None else token for token, _ in top], [entry.logprob for _, entry in top]))
    if choice.token_ids is not None:
        _require_tokens(choice.token_ids, ids)
    return reply.model_copy(update={"choices": [choice.model_copy(update={"token_ids": ids})]}), rows


# ── The forms by kind of server ──


@dataclass(frozen=True)
class Form:
    """A kind of server: path, most entries of a token, request, reply, and the setting for values before the sampler.

    A path with a leading / begins at the server's root, other paths at its base URL.
    """

    name: str
    path: str
    most: int | None
    ask: Callable[[Mapping[str, Any], int], dict[str, Any]]
    reply: type[FromModel]
    read: Callable[[Any, Spellings], Answered]
    setting: str


VLLM = Form(
    "vLLM", "completions", None, _ask_vllm, Completion, _read_vllm, "start vLLM with --logprobs-mode raw_logprobs"
)
SGLANG = Form(
    "SGLang",
    "/generate",
    None,
    _ask_sglang,
    SglangReply,
    _read_sglang,
    "start SGLang with SGLANG_RETURN_ORIGINAL_LOGPROB=1",
)
LLAMA_SERVER = Form(
    "llama-server",
    "/completion",
    None,
    _ask_llama,
    LlamaReply,
    _read_llama,
    "start llama-server without a draft, which leaves the log-probabilities out, and from October 2026 or later",
)
OPENAI = Form(
    "a server with OpenAI's API",
    "completions",
    20,
    _ask_openai,
    Completion,
    _read_openai,
    "use vLLM, SGLang or llama-server, or name a teacher: teacher.server or teacher.gguf",
)


def form_of(owner: str | None) -> Form:
    """The form of a server, by the owner in /v1/models."""
    return {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMA_SERVER}.get(owner or "", OPENAI)
