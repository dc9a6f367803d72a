"""Writers of answers: the target in transformers, a GGUF file of it in llama.cpp, and servers with OpenAI's API."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from distill.data.samples import Reply, Request, decoded, listed
from distill.decoding.batch import continue_prompts, refill
from distill.decoding.rules import Stop, stop_before, token_bytes
from distill.devices import pick_device
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import BatchedTorchModel
from distill.engines.model import Model
from distill.engines.pairs import VocabularyMetadata, compare_pair
from distill.engines.torch.hugging_face import encode, end_ids, load_target, real_tokens, text_folder
from distill.engines.torch.products import prepacked
from distill.errors import DataError, EndpointError, PairError
from distill.files import has_form
from distill.gguf.head import open_head
from distill.gguf.library import require_loadable
from distill.recipe import Recipe
from distill.sampler import Sampler
from distill.teacher.endpoint import Endpoint, Refused, Unanswered, delay_seconds
from distill.vocabulary.vocabulary import Vocabulary


def require_gguf(target: str, path: str, setting: str) -> VocabularyMetadata:
    """What a GGUF file, which a recipe's `setting` names, says of its vocabulary; loads no weights.

    Raises DataError for a file that cannot be read, PairError where an id is not the same token as in the target's
    tokenizer.
    """
    if not Path(path).is_file():
        raise DataError(f"{setting}: there is no file {path}", "export the target with distill export-gguf")
    require_loadable(open_head(Path(path)))
    pair = compare_pair(target, path)
    if pair.distill is not None:
        raise PairError(
            f"{setting}: {path} has other tokens than {target}: {pair.distill.reason}",
            "give a GGUF file of the same target, or set target.model to the model that it was made from",
        )
    return pair.draft


def _stop_of(recipe: Recipe, ends: Sequence[int]) -> Stop | None:
    """What ends an answer before a stop string; None without any."""
    if not recipe.answers.stop:
        return None
    return stop_before(token_bytes(Vocabulary.read(text_folder(recipe.target.model)), ends), recipe.answers.stop)


class _LocalWriter:
    """A model whose rows finished texts leave to waiting prompts; see `distill.teacher.answers.Writer`.

    The sampler is the served one with the penalty of the answers. Without `engine`, subclasses write otherwise.
    """

    engine: Model | None = None
    together = 1

    def __init__(self, recipe: Recipe, ends: Sequence[int], vocabulary: int) -> None:
        self.ends, self.vocabulary = ends, vocabulary
        self.stop = _stop_of(recipe, ends)
        self.sampler = replace(Sampler.of(recipe.sampler), repetition_penalty=recipe.answers.repetition_penalty)
        self.notes: list[str] = []

    def write(self, waiting: deque[Request]) -> Generator[Reply, None, None]:
        """A reply to each request, in any order; requests appended to `waiting` between replies are answered too."""
        assert self.engine is not None
        self.engine.rollback([0] * self.engine.rows)
        yield from refill(self.engine, waiting, self.sampler, self.ends, self.vocabulary, self.stop)

    def close(self) -> list[str]:
        """Free the cache; lines about what went wrong and was mended."""
        if self.engine is not None:
            self.engine.close()
        return self.notes


class TorchWriter(_LocalWriter):
    """The target in transformers, `answers.batch` texts at a time.

    A model whose attention takes no rows of different lengths is asked batch by batch: each ends with its longest text.
    """

    by_prompt = False

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        self.model = load_target(recipe.target, pick_device(recipe.device))
        config = self.model.config
        super().__init__(recipe, end_ids(recipe.target.model, tokenizer), real_tokens(config, tokenizer))
        self.batch = recipe.answers.batch
        try:
            packs = recipe.pytorch.prepack
            fast, reason = prepacked(self.model) if packs else (self.model, "")
            self.notes += filter(None, [reason])
            self.engine = BatchedTorchModel(fast, self.batch, self.vocabulary)
            self.together = self.batch
        except ValueError as error:
            if recipe.answers.repetition_penalty != 1:
                raise DataError(
                    f"answers.repetition_penalty is not possible with this target: {error}",
                    "set it to 1, or use a GGUF file or a server (answers.writer)",
                ) from None
            self.notes.append(f"batches were not refilled: {error}")

    def write(self, waiting: deque[Request]) -> Generator[Reply, None, None]:
        """See `_LocalWriter`."""
        if self.engine is not None:
            yield from super().write(waiting)
        while waiting:
            asked = [waiting.popleft() for _ in range(min(self.batch, len(waiting)))]
            limit = max(request.limit for request in asked)
            prompts, seeds = [request.ids for request in asked], [request.seed for request in asked]
            texts = continue_prompts(self.model, prompts, self.sampler, limit, seeds, self.ends, self.vocabulary)
            for request, text in zip(asked, texts, strict=True):
                text = text[: request.limit]
                found = None if self.stop is None else self.stop(text, 0)
                if found is not None and found.ended:
                    yield Reply(request.id, text[: found.kept], True)
                else:
                    yield Reply(request.id, text, text[-1] in self.ends)


class GgufWriter(_LocalWriter):
    """A GGUF file of the target in llama.cpp, text by text."""

    by_prompt = True

    def __init__(self, recipe: Recipe, tokenizer: Any, config: Any) -> None:
        settings = recipe.answers.writer
        assert settings is not None and settings.gguf is not None
        require_gguf(recipe.target.model, settings.gguf, "answers.writer.gguf")
        super().__init__(recipe, end_ids(recipe.target.model, tokenizer), real_tokens(config, tokenizer))
        # A prompt is at most as long as the block leaves room for, whatever its turn in a conversation.
        context = max(2, recipe.corpus.block)
        self.engine = GgufModel(settings.gguf, context=context, options=recipe.gguf_options("target"))


# ── Servers with OpenAI's API: vLLM, SGLang, llama-server and others ──

MAX_FAULTS = 8  # replies without one answer, after which it is the settings that are wrong
LARGEST_SEED = 2**31
STOPPED = ("stop", "tool_calls")
OTHER_PROMPT = "the server read other tokens than the prompt's"


class ServerWriter:
    """The target on servers, `concurrency` requests at a time, each sent again where it may succeed later.

    A prompt goes as token ids to servers that take them, which a first request finds out, else as text. The ids of a
    reply are the server's where it gives them, else those of its text.
    """

    by_prompt = True

    def __init__(self, recipe: Recipe, tokenizer: Any, config: Any) -> None:
        settings = recipe.answers.writer
        assert settings is not None
        self.settings, self.recipe, self.tokenizer = settings, recipe, tokenizer
        self.together = settings.concurrency
        self.ends, self.vocabulary = end_ids(recipe.target.model, tokenizer), real_tokens(config, tokenizer)
        self.stop = _stop_of(recipe, self.ends)
        self.endpoint = Endpoint(settings, "answers.writer")
        self.notes: Counter[str] = Counter()
        self.first_faults: dict[str, str] = {}  # what the server said about the first of each kind
        self._lock = Lock()
        self.takes_ids: bool | None = None
        self.as_text = ""  # why prompts are sent as text
        try:
            self.model = self.endpoint.served()[0][1]
        except BaseException:
            self.endpoint.close()
            raise

    def write(self, waiting: deque[Request]) -> Generator[Reply, None, None]:
        """A reply to each request, in any order, also to those that are appended to `waiting` between replies.

        Raises EndpointError where no reply can be used.

        Until there is an answer, faults are held back: a server that refuses the first requests is set up wrongly, and
        these are asked again by the next command.
        """
        if waiting and self.takes_ids is None:
            self.takes_ids = self._probe(waiting[0])
        answered = faults = 0
        held: list[Reply] = []
        with closing(self.endpoint.stream(self._ask, waiting)) as replies:
            for reply in replies:
                if reply.dropped:
                    faults += 1
                    self.first_faults.setdefault(reply.dropped, reply.detail)
                else:
                    answered, faults = answered + 1, 0
                self._require_answers(reply, answered, faults)
                held.append(reply)
                if answered:
                    yield from held
                    held.clear()
        yield from held

    def _require_answers(self, reply: Reply, answered: int, faults: int) -> None:
        """Raise EndpointError where requests fail one after another: none would bring an answer."""
        limit = MAX_FAULTS if not answered else max(MAX_FAULTS, 4 * self.settings.concurrency)
        if faults >= limit and not (answered and reply.lasting):
            fault = ": ".join(filter(None, (reply.dropped, reply.detail)))
            raise EndpointError(
                f"the last {faults} requests brought no answer; the last: {fault}",
                "the same command asks again for what is missing; if it is not a passing fault, correct answers.writer",
            )

    def _probe(self, request: Request) -> bool:
        """Whether the servers take token ids as a prompt, asked with one token of answer.

        A server that is busy or cannot be reached is asked again: one that takes none refuses, or fails with status 500
        each time (llama-cpp-python).
        """
        if self.settings.api == "chat":
            return False
        body = {"model": self.model, "prompt": request.ids, "max_tokens": 1, "temperature": 0, "stream": False}
        failed, reason = 0, ""
        with closing(Endpoint(self.settings.model_copy(update={"retries": 0}), "answers.writer")) as once:
            for attempt in range(self.settings.retries + 1):
                try:
                    once.post("completions", body)
                    return True
                except Refused as error:
                    reason = f"{error.reason}: {error.detail}"
                    break
                except Unanswered as error:
                    reason = f"{error.reason}: {error.detail}".removesuffix(": ")
                    failed += error.status == 500
                    if failed == 2 or attempt == self.settings.retries:
                        break
                    time.sleep(delay_seconds(attempt, error.wait_seconds))
        self.as_text = (
            f"prompts were sent as text, which may be read as other tokens: no token ids were taken ({reason})"
        )
        return False

    def _ask(self, request: Request) -> Reply:
        """The reply to one request; runs in a thread of the pool."""
        try:
            return self._chat(request) if self.settings.api == "chat" else self._complete(request)
        except Refused as error:
            return Reply(request.id, [], False, f"refused by the server ({error})", error.detail)
        except Unanswered as error:
            return Reply(request.id, [], False, f"no reply ({error})", error.detail, lasting=False)

    def _body(self, request: Request) -> dict[str, Any]:
        """What both kinds of request say. Every setting is sent: the servers' defaults differ, and none is off."""
        sampler, answers = self.recipe.sampler, self.recipe.answers
        body = {
            "model": self.model,
            "max_tokens": request.limit,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "top_k": sampler.top_k,
            "min_p": sampler.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": answers.repetition_penalty,  # vLLM, SGLang
            "repeat_penalty": answers.repetition_penalty,  # llama-server, llama-cpp-python
            "repeat_last_n": len(request.ids) + request.limit,  # llama-server: over the whole text; some refuse −1
            "seed": request.seed % LARGEST_SEED,
            "stream": False,
            "n": 1,
            "return_token_ids": True,  # vLLM
            "skip_special_tokens": False,  # vLLM, SGLang: special tokens within an answer are part of it
            "spaces_between_special_tokens": False,
        }
        return body | ({"stop": list(answers.stop)} if answers.stop else {})

    def _complete(self, request: Request) -> Reply:
        read = request if self.takes_ids else self._as_text(request)
        if not read.ids:
            return Reply(request.id, [], False, "a prompt whose tokens are not text")
        if read.limit < 1:
            return Reply(request.id, [], False, "no room in the block")
        text = decoded(self.tokenizer, read.ids)
        body = self._body(read) | {"prompt": read.ids if self.takes_ids else text, "add_special_tokens": False}
        answer = self.endpoint.post("completions", body, self._require_choice)
        if not self._read_prompt(answer, read.ids):
            return Reply(request.id, [], False, OTHER_PROMPT)
        reply = self._reply(read, answer, answer["choices"][0]["text"], text)
        return reply if read.ids == request.ids else replace(reply, prompt=read.ids)

    def _as_text(self, request: Request) -> Request:
        """The request with the tokens that a server makes of its prompt's text.

        They differ where the prompt was cut within what the tokenizer writes as one token; the answer loses that room.
        """
        ids = encode(self.tokenizer, decoded(self.tokenizer, request.ids))
        return replace(request, ids=ids, limit=request.limit - max(0, len(ids) - len(request.ids)))

    def _chat(self, request: Request) -> Reply:
        if request.messages is None:
            raise DataError(
                "answers.writer.api is chat, and the prompts are not chats",
                "make chat prompts in section corpus, or use api: completions, which takes any prompt",
            )
        body = self._body(request) | {"messages": request.messages}
        arguments = dict(request.arguments)
        if tools := arguments.pop("tools", self.recipe.chat.tools):
            body["tools"] = list(tools)
        if arguments:
            body["chat_template_kwargs"] = arguments
        answer = self.endpoint.post("chat/completions", body, self._require_choice)
        if not self._read_prompt(answer, request.ids):
            return Reply(request.id, [], False, OTHER_PROMPT)
        if answer["choices"][0].get("token_ids") is None:
            raise EndpointError(
                "a chat reply without token_ids: the text of a message is not the target's own, which had thinking "
                "and tool calls taken out of it",
                "serve the target with vLLM, which returns them, or use answers.writer.api: completions, which any "
                "server with OpenAI's API takes (llama-server, SGLang)",
            )
        return self._reply(request, answer, "", "")

    def _require_choice(self, found: dict[str, Any]) -> None:
        """Raise Unanswered for a reply without a finished choice."""
        choices: Any = found.get("choices")
        form = {"message": dict} if self.settings.api == "chat" else {"text": str}
        whole = has_form(choices, [dict]) and choices and has_form(choices[0], form)
        if not whole or choices[0].get("finish_reason") not in (*STOPPED, "length"):
            raise Unanswered("a reply without a finished choice")

    def _read_prompt(self, found: dict[str, Any], ids: list[int]) -> bool:
        """Whether a server read these tokens, as far as it tells."""
        given = found["choices"][0].get("prompt_token_ids", found.get("prompt_token_ids"))
        if given is not None:
            return bool(given == ids)
        count = (found.get("usage") or {}).get("prompt_tokens")
        return count is None or count == len(ids)

    def _given_ids(self, choice: dict[str, Any]) -> list[int] | None:
        """The generated ids, where a server gives them."""
        given = choice.get("token_ids")
        if not given or not has_form(given, [int]) or not 0 <= min(given) <= max(given) < self.vocabulary:
            return None
        return list(given)

    def _stop_string(self, choice: dict[str, Any]) -> bool:
        """Whether a stop string may have ended a text: sure where the server tells, else wherever there are some."""
        if not self.recipe.answers.stop or choice["finish_reason"] != "stop":
            return False
        for name in ("stop_reason", "matched_stop"):  # vLLM, SGLang
            if name in choice:
                return isinstance(choice[name], str)
        return True

    def _reply(self, request: Request, answer: dict[str, Any], text: str, prompt: str) -> Reply:
        """The reply of a server's answer with this text after the request's prompt, which is given as text too."""
        choice = answer["choices"][0]
        ended, by_string = choice["finish_reason"] in STOPPED, self._stop_string(choice)
        new = self._given_ids(choice)
        if new is not None and by_string and self.stop is not None:
            stopped = self.stop(new, 0)
            new = new[: stopped.kept] if stopped.ended else new
        if new is None:
            if not ended:
                text = text.rstrip("\ufffd")  # the beginning of a character whose other tokens were not generated
            new = self._encoded(text, request.ids, prompt)
            count = (answer.get("usage") or {}).get("completion_tokens")
            if count is not None and count not in (len(new), len(new) + ended):
                with self._lock:
                    self.notes["answers whose text has another number of tokens than the server counted"] += 1
        if ended and not by_string and not (new and new[-1] in self.ends):
            new = [*new, self._end(choice)]
        return Reply(request.id, new[: request.limit], ended and len(new) <= request.limit)

    def _encoded(self, text: str, ids: list[int], prompt: str) -> list[int]:
        """The tokens of a text after its prompt: encoded together where that leaves the prompt's tokens as they are."""
        whole = encode(self.tokenizer, prompt + text)
        return whole[len(ids) :] if whole[: len(ids)] == ids else encode(self.tokenizer, text)

    def _end(self, choice: dict[str, Any]) -> int:
        """The end token: the server's where it names one of the target's, else the tokenizer's."""
        for name in ("stop_reason", "matched_stop"):
            if choice.get(name) in self.ends:
                return int(choice[name])
        own = self.tokenizer.eos_token_id
        return int(own if own is not None else self.ends[0])

    def close(self) -> list[str]:
        """Free the connections; lines about attempts that failed and texts that are not exact."""
        self.endpoint.close()
        failed = self.endpoint.counts
        return [
            *([f"{failed.total()} requests were sent again: {listed(failed, ' × ')}"] if failed else []),
            *([self.as_text] if self.as_text else []),
            *(f"{count} {what}" for what, count in sorted(self.notes.items())),
            *(f"{what}, the first: {detail}" for what, detail in self.first_faults.items() if detail),
        ]
