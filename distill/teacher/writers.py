"""Writers of answers: the target in transformers, a GGUF file of it in llama.cpp, and servers with OpenAI's API."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any

from distill.data.records import fault_of_text
from distill.data.samples import Reply, Request, decoded, listed
from distill.decoding.batch import refill
from distill.decoding.rules import Stop, stop_before, token_bytes
from distill.devices import pick_device
from distill.engines.ends import Ends, target_ends, turn_end
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import BatchedTorchModel, growing_decoder
from distill.engines.model import Model
from distill.engines.pairs import VocabularyMetadata, compare_pair
from distill.engines.torch.hugging_face import encode_behind, load_target, real_tokens, text_folder
from distill.engines.torch.products import pack
from distill.errors import DataError, EndpointError, PairError
from distill.gguf.head import open_head
from distill.gguf.library import require_loadable
from distill.http import Refused, Unanswered
from distill.recipe import Recipe, Sampler
from distill.teacher.endpoint import Endpoint, reply_bytes
from distill.teacher.forms import Choice, Completion, Spellings, form_of
from distill.teacher.scores import LEAST_DIFFERENCE, NotDistributions, Scores, largest_difference, scores_of
from distill.vocabulary.vocabulary import Vocabulary


def require_gguf(target: str, path: str, setting: str) -> VocabularyMetadata:
    """The vocabulary of a GGUF file that a recipe's `setting` names, without loading weights.

    Raises DataError for a file that cannot be read, and PairError for other tokens than the target's.
    """
    if not Path(path).is_file():
        raise DataError(f"{setting}: there is no file {path}", "export the target with distill export-gguf")
    require_loadable(open_head(Path(path)))
    pair = compare_pair(target, path)
    if pair.distill is not None:
        hint = "give a GGUF file of the same target, or set target.model to the model that it was made from"
        raise PairError(f"{setting}: {path} has other tokens than {target}: {pair.distill.reason}", hint)
    return pair.draft


def _stop_of(recipe: Recipe, ends: Ends) -> Stop | None:
    """The check for stop strings and for the texts of `ends`; None without any."""
    if not (texts := [*recipe.answers.stop, *ends.texts]):
        return None
    return stop_before(token_bytes(Vocabulary.read(text_folder(recipe.target.model)), ends.ids), texts)


class _LocalWriter:
    """A model in which waiting prompts take the rows of finished texts; see `distill.teacher.answers.Writer`.

    The sampler is the served one with the repetition penalty of the answers.
    """

    engine: Model

    def __init__(self, recipe: Recipe, tokenizer: Any, config: Any) -> None:
        ends = target_ends(recipe.target.model, tokenizer)
        self.ends, self.vocabulary = ends.ids, real_tokens(config, tokenizer)
        self.stop = _stop_of(recipe, ends)
        self.sampler = recipe.sampler.penalised(recipe.answers.repetition_penalty)
        self.notes: list[str] = []

    @property
    def together(self) -> int:
        """The number of rows of the model."""
        return self.engine.rows

    @property
    def by_prompt(self) -> bool:
        """Whether texts do not change each other by rounding."""
        return self.engine.rows == 1

    def write(self, waiting: deque[Request]) -> Generator[Reply, None, None]:
        """Yield a reply to each request in any order, also to requests that are appended to `waiting` meanwhile."""
        self.engine.rollback([0] * self.engine.rows)
        yield from refill(self.engine, waiting, self.sampler, self.ends, self.vocabulary, self.stop)

    def close(self) -> list[str]:
        """Free the cache. Returns lines to print."""
        self.engine.close()
        return self.notes


class TorchWriter(_LocalWriter):
    """The target in transformers, `answers.batch` texts at a time. A model without rows writes one text at a time.

    Raises DataError for a model that cannot be decoded here.
    """

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        model = load_target(recipe.target, pick_device(recipe.device))
        super().__init__(recipe, tokenizer, model.config)
        fast = pack(model) if recipe.pytorch.prepack else model
        try:
            self.engine = BatchedTorchModel(fast, recipe.answers.batch, self.vocabulary)
        except ValueError as error:
            self.engine = growing_decoder(fast, self.vocabulary, prepack=False)
            self.notes.append(f"answers were written one by one: {error}")


class GgufWriter(_LocalWriter):
    """A GGUF file of the target in llama.cpp, one text at a time."""

    def __init__(self, recipe: Recipe, tokenizer: Any, config: Any) -> None:
        settings = recipe.answers.writer
        assert settings is not None and settings.gguf is not None
        require_gguf(recipe.target.model, settings.gguf, "answers.writer.gguf")
        super().__init__(recipe, tokenizer, config)
        # A prompt with its answer fits a block, at each turn of a conversation.
        context = max(2, recipe.corpus.block)
        self.engine = GgufModel(settings.gguf, context=context, options=recipe.gguf_options("target"))


# ── Servers with OpenAI's API: vLLM, SGLang, llama-server and others ──

MAX_FAULTS = 8  # So many replies without an answer mean wrong settings.
LARGEST_SEED = 2**31
MISCOUNTED = "answers whose text has another number of tokens than the server counted"
OTHER_PROMPT = "the server read other tokens than the prompt's"
NO_SCORES = "without usable log-probabilities"
MOST_ENTRIES = re.compile(r"max allowed: (\d+)")  # vLLM's words for --max-logprobs

# Forms of a request without top-k, in the order of attempts: for llama-server and vLLM from 0.9 on, for older vLLM and
# SGLang, and for servers that refuse both.
ALL_TOKENS: list[dict[str, Any]] = [{"top_k": 0}, {"top_k": -1}, {}]
# Settings that a server may not know, with the values that switch them off.
OFF = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "repeat_penalty": 1}


class ServerWriter:
    """The target on servers, with up to `connections` requests at a time and retries.

    Prompts are sent as token ids. The ids of a reply are the server's, or those of its text if it returns none. With
    `entries`, each request also asks for the log-probabilities of so many tokens, in the form of the server's kind.
    """

    by_prompt = True

    def __init__(self, recipe: Recipe, tokenizer: Any, config: Any, entries: int = 0) -> None:
        settings = recipe.answers.writer
        assert settings is not None
        self.settings, self.recipe, self.tokenizer = settings, recipe, tokenizer
        self.together = settings.connections
        ends = target_ends(recipe.target.model, tokenizer)
        self.ends, self.unnamed, self.vocabulary = ends.ids, ends.unnamed, real_tokens(config, tokenizer)
        usual = *turn_end(tokenizer)[0], tokenizer.eos_token_id, *self.ends
        self.end = [token for token in usual if token is not None][:1]
        self.stops, self.stop = [*recipe.answers.stop, *ends.texts], _stop_of(recipe, ends)
        self.endpoint = Endpoint(settings, "answers.writer")
        self.miscounted = 0
        self.all_tokens = 0  # the form of ALL_TOKENS that the servers have not refused
        self.refused: set[str] = set()  # settings of OFF
        self.first_faults: dict[str, str] = {}  # the server's words about the first fault of each kind
        self._lock = Lock()
        self.entries, self.form, self.notes = 0, form_of(None), list[str]()
        self.spellings = Spellings(lambda: Vocabulary.read(text_folder(recipe.target.model)))
        try:
            self.model = self.endpoint.served()[0][1]
            if entries:
                self._ask_for_scores(entries)
        except BaseException:
            self.endpoint.close()
            raise

    def write(self, waiting: deque[Request]) -> Generator[Reply, None, None]:
        """Yield a reply to each request in any order, also to requests that are appended to `waiting` meanwhile.

        Faults before the first answer are held back. If the settings are wrong, the next command can then repeat these
        requests. Raises EndpointError if no reply can be used.
        """
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
        """Raise EndpointError if many requests fail in a row."""
        limit = MAX_FAULTS if not answered else max(MAX_FAULTS, 4 * self.together)
        if faults >= limit and not (answered and reply.lasting):
            fault = ": ".join(filter(None, (reply.dropped, reply.detail)))
            raise EndpointError(
                f"the last {faults} requests brought no answer; the last: {fault}",
                "run the same command again to request the missing answers, or correct answers.writer. "
                "A server must take token ids as a prompt, as vLLM, SGLang and llama-server do",
            )

    def _ask_for_scores(self, entries: int) -> None:
        """Choose the servers' form of log-probabilities, and try it on each server.

        Raises EndpointError if a server returns none, or values after its sampler.
        """
        if len(self.endpoint.owners) > 1:
            kinds = ", ".join(sorted(map(str, self.endpoint.owners)))
            raise EndpointError(
                f"answers.writer.urls are servers of several kinds: {kinds}", "name servers of one kind"
            )
        self.form = form_of(*self.endpoint.owners)
        self.entries = min(entries, self.form.most or entries, self.vocabulary)
        for number, url in enumerate(self.settings.urls):
            difference = largest_difference(self._probe(number, served=True), self._probe(number, served=False))
            if difference > LEAST_DIFFERENCE:
                raise EndpointError(
                    f"{url} ({self.form.name}) gives log-probabilities after its sampler: with the recipe's sampler "
                    f"they differ by {difference:.2g} from those at temperature 1",
                    f"{self.form.setting}; or name a teacher: teacher.server or teacher.gguf",
                )

    def _probe(self, number: int, served: bool) -> Scores:
        """The scores of the first token of a server's reply, with the `served` sampler or without any.

        Raises EndpointError if there are none.
        """
        request = Request("probe", [0, 1 % self.vocabulary, 0], 0, 1)  # A token that is repeated shows penalties.
        body = self._body(request) if served else self._body(request, Sampler(), 1.0)
        try:
            scores = self._scored(body, number)[1]
        except Refused as error:
            if (allowed := MOST_ENTRIES.search(error.detail)) and 0 < int(allowed[1]) < self.entries:
                self.notes.append(
                    f"the server gives {allowed[1]} log-probabilities a token, fewer than teacher.top_k: start it with "
                    f"--max-logprobs {self.entries} for more"
                )
                self.entries = int(allowed[1])
                return self._probe(number, served)
            top_k = "top_k" in error.detail and self._without_top_k(self.all_tokens)
            if top_k or self._without(error.detail, body):
                return self._probe(number, served)
            fault = f"it refused the request ({error}): {error.detail}"
        except Unanswered as error:
            fault = f"{error} {error.detail}".rstrip()
        except NotDistributions as error:
            fault = str(error)
        else:
            if len(scores.counts) and scores.counts[0]:
                return scores
            fault = "the reply has no log-probabilities of its first token"
        raise EndpointError(
            f"{self.settings.urls[number]} ({self.form.name}) gives no log-probabilities of the tokens that it "
            f"generates: {fault}",
            self.form.setting,
        )

    def _scored(self, body: dict[str, Any], start: int | None = None) -> tuple[Completion, Scores]:
        """An answer, and the scores of its tokens. Raises NotDistributions if they cannot be used."""
        size = reply_bytes(len(body["prompt"]) + body["max_tokens"], self.entries + 1)
        reply = self.endpoint.post(self.form.path, self.form.ask(body, self.entries), self.form.reply, size, start)
        answer, rows = self.form.read(reply, self.spellings)
        return answer, scores_of(rows, self.vocabulary)

    def _without_top_k(self, refused: int) -> bool:
        """Switch to the next of ALL_TOKENS after a refusal. Returns whether there is one."""
        with self._lock:
            self.all_tokens = max(self.all_tokens, min(refused + 1, len(ALL_TOKENS) - 1))
        return refused < len(ALL_TOKENS) - 1

    def _without(self, detail: str, body: Mapping[str, Any]) -> bool:
        """Leave out switched-off settings that a server refuses by name. Returns whether there are some."""
        names = [name for name, off in OFF.items() if body.get(name) == off and re.search(rf"\b{name}\b", detail)]
        with self._lock:
            self.refused.update(names)
        return bool(names)

    def _ask(self, request: Request) -> Reply:
        """The reply to a request. Runs in a thread of the pool."""
        form, body, scores = self.all_tokens, self._body(request), None
        try:
            if self.entries:
                answer, scores = self._scored(body)
            else:
                answer = self.endpoint.post(
                    "completions", body, Completion, reply_bytes(len(request.ids) + request.limit)
                )
        except Refused as error:
            top_k = "top_k" in error.detail and not self.recipe.sampler.top_k and self._without_top_k(form)
            if top_k or self._without(error.detail, body):
                return self._ask(request)
            return Reply(request.id, [], False, f"refused by the server ({error})", error.detail)
        except Unanswered as error:
            return Reply(request.id, [], False, f"no reply ({error})", error.detail, lasting=False)
        except NotDistributions as error:
            return Reply(request.id, [], False, NO_SCORES, str(error))
        if not answer.is_of(request.ids):
            # The server answered another prompt. The request is sent again.
            return Reply(request.id, [], False, OTHER_PROMPT, lasting=answer.prompt_ids is None)
        return self._reply(request, answer, scores)

    def _body(self, request: Request, sampler: Sampler | None = None, penalty: float | None = None) -> dict[str, Any]:
        """A request's body, by default with the recipe's sampler and penalty.

        All settings are sent, because the servers' defaults differ and are not off.
        """
        answers, sampler = self.recipe.answers, sampler or self.recipe.sampler
        penalty = answers.repetition_penalty if penalty is None else penalty
        body = {
            "model": self.model,
            "prompt": request.ids,
            "add_special_tokens": False,
            "max_tokens": request.limit,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "min_p": sampler.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": penalty,  # vLLM, SGLang
            "repeat_penalty": penalty,  # llama-server, llama-cpp-python
            "repeat_last_n": len(request.ids) + request.limit,  # llama-server: over the whole text; some refuse −1
            "seed": request.seed % LARGEST_SEED,
            "stream": False,
            "n": 1,
            "return_token_ids": True,  # vLLM
            "skip_special_tokens": False,  # vLLM, SGLang: special tokens within an answer are part of it
            "spaces_between_special_tokens": False,
        }
        top_k = {"top_k": sampler.top_k} if sampler.top_k else ALL_TOKENS[self.all_tokens]
        body |= {"stop_token_ids": self.unnamed} if self.unnamed else {}  # vLLM, SGLang
        body = {name: value for name, value in body.items() if name not in self.refused or value != OFF[name]}
        return body | top_k | ({"stop": self.stops} if self.stops else {})

    def _reply(self, request: Request, answer: Completion, scores: Scores | None = None) -> Reply:
        """The reply of a server's answer to the request, with the scores of the answer's tokens."""
        choice = answer.choices[0]
        by_string, ended = self._by_stop_string(choice), choice.ended
        new = choice.token_ids
        if new and 0 <= min(new) <= max(new) < self.vocabulary:
            if by_string and self.stop is not None:
                stopped = self.stop(new, 0)
                new = new[: stopped.kept] if stopped.ended else new
        elif new and scores is not None:
            return Reply(request.id, [], False, NO_SCORES, "the server generated ids without a token")
        else:
            # A cut text may end within a character.
            text = choice.text if ended else choice.text.rstrip("\ufffd")
            if fault := fault_of_text("", text):
                return Reply(request.id, [], False, fault)
            new = encode_behind(self.tokenizer, decoded(self.tokenizer, request.ids), text)[1]
            count = None if answer.usage is None else answer.usage.completion_tokens
            if count not in (None, len(new), len(new) + ended):
                with self._lock:
                    self.miscounted += 1
        last = next((at for at, token in enumerate(new) if token in self.ends), None)
        if last is not None:  # A server may ignore an end that only the template names, and write on.
            new, ended = new[: last + 1], True
        if ended and not by_string and not (new and new[-1] in self.ends):
            # The end token is the one that the server names, or that of the template or the tokenizer.
            new += [int(token) for token in choice.ended_by if token in self.ends][:1] or self.end
        ended, new = ended and len(new) <= request.limit, new[: request.limit]
        return Reply(request.id, new, ended, scores="" if scores is None else scores.fitted(len(new)).packed())

    def _by_stop_string(self, choice: Choice) -> bool:
        """Whether a stop string ended a text; true if one may have and the server does not say."""
        if self.stop is None or choice.finish_reason != "stop":
            return False
        return not choice.ended_by or isinstance(choice.ended_by[0], str)

    def close(self) -> list[str]:
        """Free the connections. Returns lines about failed attempts and inexact texts."""
        self.endpoint.close()
        failed = self.endpoint.counts
        return [
            *self.notes,
            *([f"{failed.total()} requests were sent again: {listed(failed, ' × ')}"] if failed else []),
            *([f"{self.miscounted} {MISCOUNTED}"] if self.miscounted else []),
            *(f"{what}, the first: {detail}" for what, detail in self.first_faults.items() if detail),
        ]
