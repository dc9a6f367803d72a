"""Stages `questions` and `answers`: the target writes its own questions, and its answers to the prompts of all splits.

Draft and cut learn from the answers to train prompts. Cuts are compared, weights chosen and figures measured on the
answers to held-out prompts.

An instruct model that continues the user header of its chat template writes a message of the kind that it was trained
to answer (Magpie, arXiv 2406.08464). A model without a template writes texts, from its beginning token or from given
first words, and prompts are cut from them. The texts are numbered, and each has its own system prompt and random
numbers. The target writes them in rounds until enough are usable. The rounds do not change which texts come first.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy

from distill.data.chat_template import ChatTemplate, Message, PlainTexts, UserHeader, next_prompt
from distill.data.prompts import ChatPrompts
from distill.data.samples import (
    SPLITS,
    TEXT_FAULTS,
    AnswerTexts,
    AskedQuestions,
    QuestionTexts,
    Reply,
    Request,
    Sample,
    Samples,
    Split,
    count_texts,
    decoded,
    fault_of,
    how_to_redo,
    is_looping,
    listed,
    prompt_seed,
    read_answers,
    read_groups,
    read_prompts,
    write_samples,
)
from distill.data.sources import question_files
from distill.data.traffic import SOURCE, write_traffic
from distill.devices import barrier, process_count, process_index, process_share
from distill.engines.ends import target_ends
from distill.engines.torch.hugging_face import (
    context_length,
    empty_model,
    encode,
    load_config,
    load_tokenizer,
    local_snapshot,
)
from distill.errors import DataError, EndpointError, RecipeError, faults_explained, printable
from distill.files import has_form, parse_object, reference_digest, write_json, write_result, write_text
from distill.progress import Caution, Progress
from distill.recipe import Recipe, Sampler, Source, is_path
from distill.run import Run
from distill.teacher.endpoint import Endpoint
from distill.teacher.scores import Scores, scores_of, scores_path, write_scores
from distill.teacher.texts import held_out, held_out_sizes, renew, served_answers, target_metadata
from distill.teacher.writers import MAX_FAULTS, GgufWriter, ServerWriter, TorchWriter, require_gguf

# ── Groups of prompts: each has a file of answers, and a journal while it is written ──
# Groups are a pure function of the prompts. The files do not depend on the order of replies, on kills or on the number
# of processes.

REPLY = {"id": str, "ids": [int], "ended": bool, "dropped": str}  # the form of a line of a journal

# A writer continues prompts as the target does, `together` of them at once. If it is `by_prompt`, a reply does not
# depend on other requests and is kept at once. If not, requests change each other by rounding, and a group is written
# whole.
Writer = TorchWriter | GgufWriter | ServerWriter


@dataclass(frozen=True)
class AnswerRules:
    """The recipe's seed and limits for requests and answers.

    `room` is the most tokens of a prompt with its answer. `text_of` decodes the ids of an answer without its end token.
    `template` renders the further turns of conversations; None if no prompt has any.
    """

    seed: int
    new_tokens: int
    room: int
    keep_truncated: bool
    text_of: Callable[[Sequence[int]], str]
    template: ChatTemplate | None = None

    def request(self, name: str, ids: list[int]) -> Request | None:
        """The request for an answer to a prompt; None if the block has no room for it."""
        limit = min(self.new_tokens, self.room - len(ids))
        if limit < 1:
            return None
        return Request(name, ids, prompt_seed(self.seed, name), limit)

    def next_prompt(self, prompt: Sample, texts: list[str]) -> list[int] | None:
        """The next prompt of a conversation after answers with these texts; None at its end."""
        if self.template is None or prompt.chat is None:
            return None
        try:
            return next_prompt(self.template, prompt.chat, texts)
        except ValueError:  # The template refuses the target's text.
            return None


def rules_of(recipe: Recipe, tokenizer: Any, template: ChatTemplate | None = None) -> AnswerRules:
    """The rules of requests and answers."""
    config = load_config(recipe.target.model)
    context: int = context_length(config) or config.get_text_config().max_position_embeddings
    ends = target_ends(recipe.target.model, tokenizer).ids

    def text_of(ids: Sequence[int]) -> str:
        return decoded(tokenizer, [token for token in ids if token not in ends])

    room = min(recipe.corpus.block, context)
    return AnswerRules(recipe.seed, recipe.answers.new_tokens, room, recipe.answers.keep_truncated, text_of, template)


@dataclass
class PromptAnswers:
    """A prompt and its answers so far. `request` is None after the last answer."""

    number: int
    prompt: Sample
    group: Group
    request: Request | None = None
    answers: list[Sample] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def begin(self, rules: AnswerRules, known: dict[str, Reply]) -> None:
        """Continue to the first request without a reply in `known`."""
        self.request = rules.request(self.prompt.id, self.prompt.prompt)
        if self.request is None:
            self._add(self.prompt.id, self.prompt.prompt, Reply("", [], False, "no room in the block"), rules)
        while self.request is not None and self.request.id in known:
            self.take(known[self.request.id], rules)

    def take(self, reply: Reply, rules: AnswerRules) -> None:
        """Add the answer of a reply to the request, and continue to the next request."""
        assert self.request is not None
        answer = self._add(self.request.id, self.request.ids, reply, rules)
        self.request = None
        if not answer.ended or answer.dropped:
            return  # A user would not continue after such an answer.
        self.texts.append(rules.text_of(answer.answer))
        ids = rules.next_prompt(self.prompt, list(self.texts))
        if ids is not None:
            self.request = rules.request(f"{self.prompt.id}/{len(self.texts)}", ids)

    def _add(self, name: str, ids: list[int], reply: Reply, rules: AnswerRules) -> Sample:
        dropped = reply.dropped or ("" if reply.ended or rules.keep_truncated else "truncated") or fault_of(reply.ids)
        answer = replace(self.prompt, id=name, prompt=ids, answer=reply.ids, ended=reply.ended, dropped=dropped)
        self.answers.append(replace(answer, number=self.number, chat=None))
        return self.answers[-1]


@dataclass
class Group:
    """Prompts whose answers are one file, by their numbers in the list of all prompts."""

    path: Path
    prompts: Sequence[Sample]
    rules: AnswerRules
    numbers: list[int]
    scored: bool = False  # The server returns distributions, which are written next to the answers.
    conversations: list[PromptAnswers] = field(default_factory=list)

    @property
    def journal(self) -> Path:
        """The file of replies until the answers are written. It is hidden, and so is no artifact."""
        return self.path.with_name(f".{self.path.stem}.journal")

    def known(self) -> dict[str, Reply]:
        """The replies in the journal, by request. Lines that a kill cut are skipped."""
        if not self.journal.exists():
            return {}
        records = map(parse_object, self.journal.read_bytes().split(b"\n"))
        return {
            record["id"]: Reply(**record) for record in records if isinstance(record, dict) and has_form(record, REPLY)
        }

    def note(self, reply: Reply) -> None:
        """Append a reply to the journal, so that a kill does not lose it."""
        line = json.dumps(asdict(reply)) + "\n"
        with faults_explained(self.journal):
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            with open(self.journal, "ab") as handle:
                # The first line break ends a line that a kill cut. Blank lines are skipped.
                handle.write(b"\n" + line.encode())

    def finish(self) -> None:
        """Write the file in the order of the prompts and remove the journal, if all conversations have ended."""
        if any(conversation.request is not None for conversation in self.conversations):
            return
        answers = [answer for conversation in self.conversations for answer in conversation.answers]
        if self.scored:
            known = self.known()
            write_scores(scores_path(self.path), [self._scores(known, answer) for answer in answers])
        write_samples(self.path, answers)
        self.journal.unlink(missing_ok=True)
        self.conversations = []

    def _scores(self, known: dict[str, Reply], answer: Sample) -> Scores:
        """The scores of an answer's tokens from the journal, unknown for a prompt without reply."""
        reply = known.get(answer.id)
        if reply is None or not reply.scores:
            return scores_of([None] * len(answer.answer), 0)
        return Scores.unpacked(reply.scores, len(answer.answer))


def groups_of(prompts: Sequence[Sample], rules: AnswerRules, size: int, folder: Path, name: str = "") -> list[Group]:
    """The groups of a list of prompts, ordered from the longest, so that texts of a group have similar lengths.

    The longest take the most memory. If memory does not suffice, that shows at once.
    """
    lengths = prompts.column("prompt") if isinstance(prompts, Samples) else [len(prompt.prompt) for prompt in prompts]
    order: list[int] = numpy.argsort(-numpy.asarray(lengths, int), kind="stable").tolist()
    return [
        Group(folder / f"{name}{group:05d}.arrow", prompts, rules, order[start : start + size])
        for group, start in enumerate(range(0, len(order), size))
    ]


def write_groups(
    recipe: Recipe, run: Run, stage: str, groups: Sequence[Group], part: tuple[int, int], what: str, idle: bool = False
) -> None:
    """Write this process's part of a stage's groups. The progress counts `what`.

    With `idle`, there may be more processes than groups. Replies find their prompts by their unique names.
    """
    index, count = part
    mine = groups[index::count] if idle else process_share(groups, part, "groups of prompts", "answers.group")
    if stage == "answers" and recipe.writer_teaches:
        for group in mine:  # An answer without its distributions is asked for again.
            if not scores_path(group.path).exists():
                group.path.unlink(missing_ok=True)
    missing = [group for group in mine if not group.path.exists()]
    for group in mine:
        if group.path.exists():
            group.journal.unlink(missing_ok=True)  # A kill after the file was written leaves its journal.
    whose = f" of process {index}" if count > 1 else ""
    if len(missing) < len(mine):
        run.say(f"  resuming: {len(mine) - len(missing)} of {len(mine)} groups{whose} exist")
    if missing:
        _GroupWriter(recipe, run, stage, f"{what}{whose}", mine).write(missing)


class _GroupWriter:
    """Writes groups of conversations, and collects those without a reply until the end."""

    def __init__(self, recipe: Recipe, run: Run, stage: str, what: str, groups: Sequence[Group]) -> None:
        self.run, self.what = run, what
        teaches = stage == "answers" and recipe.writer_teaches
        self.writer = open_writer(recipe, recipe.teacher.top_k if teaches else 0)
        for group in groups:
            group.scored = teaches
        if isinstance(self.writer, ServerWriter):
            self.writer.endpoint.require_same(run.path(stage))
        self.allowed = 0.0 if recipe.answers.writer is None else recipe.answers.writer.missing
        self.total = sum(len(group.numbers) for group in groups)
        self.unanswered: list[tuple[PromptAnswers, Reply]] = []
        self.tokens, self.started = 0, time.monotonic()

    def write(self, missing: list[Group]) -> None:
        """Write the missing groups: all at once if the writer is `by_prompt`, else one after the other."""
        done = self.total - sum(len(group.numbers) for group in missing)
        self.progress = Progress(self.what, self.total, done, self.writer.together)
        try:
            for part in [missing] if self.writer.by_prompt else [[group] for group in missing]:
                self._write(part)
            self._settle()
        finally:
            for line in self.writer.close():
                self.run.say(f"  {self.what.partition(',')[0]}: {line}")

    def _write(self, groups: Sequence[Group]) -> None:
        """Request everything that the journals of the groups lack, and write each group after its last reply.

        The prompts of a group are read when the requests of earlier groups no longer suffice.
        """
        waiting: deque[Request] = deque()
        pending: dict[str, PromptAnswers] = {}
        unopened = deque(groups)

        def ask(conversation: PromptAnswers) -> None:
            if conversation.request is not None:
                waiting.append(conversation.request)
                pending[conversation.request.id] = conversation

        def open_next() -> None:
            while (
                unopened and len(waiting) < self.writer.together + MAX_FAULTS
            ):  # A writer may hold MAX_FAULTS replies.
                group = unopened.popleft()
                known = group.known() if self.writer.by_prompt else {}
                group.conversations = [PromptAnswers(number, group.prompts[number], group) for number in group.numbers]
                for conversation in group.conversations:
                    conversation.begin(group.rules, known)
                    ask(conversation)
                if done := sum(conversation.request is None for conversation in group.conversations):
                    self.progress.step(done)
                group.finish()

        open_next()
        with closing(self.writer.write(waiting)) as replies:
            for reply in replies:
                conversation = pending.pop(reply.id)
                if not reply.lasting:
                    self.unanswered.append((conversation, reply))
                    continue
                if self.writer.by_prompt:
                    conversation.group.note(reply)
                self._take(conversation, reply)
                ask(conversation)
                open_next()

    def _take(self, conversation: PromptAnswers, reply: Reply) -> None:
        self.tokens += len(reply.ids)
        conversation.take(reply, conversation.group.rules)
        if conversation.request is None:
            rate = self.tokens / max(1e-9, time.monotonic() - self.started)
            self.progress.step(note=f"{rate:.0f} tokens/s")
            conversation.group.finish()

    def _settle(self) -> None:
        """Drop the prompts without a reply. Raises EndpointError if they exceed the allowed share."""
        left = self.unanswered
        if left and len(left) > self.allowed * self.total:
            reasons = listed(Counter(reply.dropped for _, reply in left), " × ")
            first = f"; the first: {left[0][1].detail}" if left[0][1].detail else ""
            raise EndpointError(
                f"{len(left)} of {self.total} prompts have no reply after all attempts: {reasons}{first}",
                "run the same command again to request only the missing replies, or raise answers.writer.missing",
            )
        for conversation, reply in left:
            self._take(conversation, reply)


def open_writer(recipe: Recipe, entries: int = 0) -> Writer:
    """Open the writer of a recipe's answers. Servers also return the log-probabilities of `entries` tokens.

    Raises DataError or PairError for a model that cannot be used, and EndpointError for a server.
    """
    settings, tokenizer = recipe.answers.writer, load_tokenizer(recipe.target.model)
    if settings is None:
        return TorchWriter(recipe, tokenizer)
    config = load_config(recipe.target.model)
    if settings.gguf is not None:
        return GgufWriter(recipe, tokenizer, config)
    return ServerWriter(recipe, tokenizer, config, entries)


def check_writer(recipe: Recipe, offline: bool) -> tuple[list[str], list[str]]:
    """Check that the writer's file has the target's tokens, or that each server answers and serves its model.

    Returns lines to print, and the servers that were not contacted.
    """
    settings = recipe.answers.writer
    if settings is None:
        return served_rather(recipe), []
    if settings.gguf is not None:
        require_gguf(recipe.target.model, settings.gguf, "answers.writer.gguf")
        return [f"answers: written by {settings.gguf}, which has the target's tokens"], []
    if offline:
        return [], [f"server {url}" for url in settings.urls]
    once = settings.model_copy(update={"retries": 0})
    with closing(Endpoint(once, "answers.writer")) as endpoint:
        lines = [f"answers: {url} serves {model}" for url, model, _ in endpoint.served()]
    if recipe.writer_teaches:
        answers = recipe.answers.model_copy(update={"writer": once})
        with closing(open_writer(recipe.model_copy(update={"answers": answers}), recipe.teacher.top_k)) as writer:
            assert isinstance(writer, ServerWriter)
            lines += [f"teacher: {writer.form.name} gives {writer.entries} log-probabilities a token", *writer.notes]
    return lines, []


LARGE = 7e9  # The check proposes a server for targets of so many parameters.


def served_rather(recipe: Recipe) -> list[str]:
    """Propose a server for a large target, with its command. Empty for other targets."""
    model = recipe.target.model
    if recipe.answers.prompts == 0 or not (is_path(model) or local_snapshot(model)):
        return []
    parameters = sum(weight.numel() for weight in empty_model(load_config(model)).parameters())
    what = f"a server writes the answers of {parameters / 1e9:.0f} billion parameters sooner, many at once"
    way = f"`vllm serve {model} --max-model-len {recipe.corpus.block}`, answers.writer.urls=[http://localhost:8000/v1]"
    return [Caution(f"warning: {what}: {way}, or llama-server; docs/big-targets.md")] if parameters >= LARGE else []


# ── The stages ──


def answers(recipe: Recipe, run: Run, part: tuple[int, int] | None = None) -> list[Path]:
    """Let the target continue the prompts of all splits. Each group of prompts is a file in answers/SPLIT/.

    The stage resumes by the group. GGUF files and servers resume by the reply. Served answers come first, if the recipe
    names a file of them. In train conversations, the target answers each turn of the user. Held-out conversations end
    with its first answer.

    `part` = (index, count) makes this process write every count-th group. By default it is the process's own part. The
    first process finishes the stage after all processes have finished.
    """
    part = part or (process_index(), process_count())
    tokenizer = load_tokenizer(recipe.target.model)
    if part[0] == 0:
        if recipe.answers.traffic is not None:
            write_traffic(recipe, run, tokenizer)
            _learn_again(recipe, run)
        for split in SPLITS[1:]:
            renew(run.path("answers", split), _origin(recipe, run, split))
    barrier()
    groups = [group for split in SPLITS for group in _groups(recipe, run, split, tokenizer)]
    if groups:
        write_groups(recipe, run, "answers", groups, part, "answers, prompts")
    barrier()
    if part[0] == 0:
        _write_manifest(recipe, run)
    return [run.path("answers")]


def _origin(recipe: Recipe, run: Run, split: Split) -> dict[str, Any]:
    """The sources of the answers to held-out prompts that are not in the stage's key."""
    sizes = held_out_sizes(recipe, split)
    return {"ids": asked_prompts(recipe, run, split).column("id").tolist(), "new_tokens": sizes.new_tokens}


def asked_prompts(recipe: Recipe, run: Run, split: Split) -> Samples:
    """The prompts of a split that the target answers. Served answers count towards the size of a held-out split."""
    prompts = read_prompts(run, split)
    if recipe.answers.prompts == 0:  # Only served texts are used.
        return prompts.take(slice(0, 0))
    if split == "train":
        return prompts
    served = served_answers(run, split).column("id")
    left = max(0, held_out_sizes(recipe, split).prompts - len(served))
    return prompts.take(~numpy.isin(prompts.column("id").astype(str), served.astype(str)))[:left]


def _groups(recipe: Recipe, run: Run, split: Split, tokenizer: Any) -> list[Group]:
    """The groups of a split's prompts."""
    prompts, template = asked_prompts(recipe, run, split), None
    if split == "train" and any(chat and json.loads(chat)["turns"] for chat in prompts.column("chat")):
        template = ChatTemplate(tokenizer, recipe.chat)
    rules = rules_of(recipe, tokenizer, template)
    if split != "train":
        rules = replace(rules, new_tokens=held_out_sizes(recipe, split).new_tokens, keep_truncated=True)
    return groups_of(prompts, rules, recipe.answers.group, run.path("answers", split))


def _learn_again(recipe: Recipe, run: Run) -> None:
    """Add as many old served answers as there are new ones, so that a refreshed draft does not unlearn them.

    The parent run has learnt from the old answers. The seed draws them. If the target has changed since then, they are
    those of another model, and none is added.
    """
    parent, path = run.parent(), run.path("answers", "train", "traffic-earlier.arrow")
    if parent is None or path.exists():
        return
    before = Run(run.folder.parent / parent["run"], recipe)
    answered = (before.done("answers") or {"inputs": {}})["inputs"].get("target.model")
    if answered != reference_digest(recipe.target.model):
        run.say(f"  the served answers of {before.folder.name} are those of another target, and are not learnt from")
        return
    every = read_answers(before, "train")
    old = every.take((every.column("source") == SOURCE) & (every.column("dropped") == ""))
    fresh = len(read_groups(sorted(run.path("answers", "train").glob("traffic-*.arrow")), "answers"))
    kept = random.Random(recipe.seed).sample(old, min(len(old), fresh))
    write_samples(path, kept)
    run.say(f"  {len(kept)} of {len(old)} served answers of {before.folder.name} are learnt from again")


def _write_manifest(recipe: Recipe, run: Run) -> None:
    """Write manifest.json with the target, the sampler, and counts of train and held-out answers."""
    answers = read_answers(run, "train")
    reasons = answers.column("dropped")
    dropped = Counter(reasons[reasons != ""])
    if answers and dropped.total() == len(answers):
        hint = "correct what wrote them (answers, sampler, chat) and run again with --redo answers"
        raise DataError(f"all {len(answers)} answers of the target were dropped: {listed(dropped, ' × ')}", hint)
    train = _counted(recipe, answers, answers.take(reasons == ""), dict(sorted(dropped.items())))
    few = 2 * dropped.total() > len(answers)
    summary = f"{_summary(train)}, {train.not_ended} of them cut short by a limit"
    run.say(f"  {'warning: most were dropped: ' if few else ''}{summary}", warning=few)
    held: dict[str, Any] = {}
    for split in SPLITS[1:]:
        texts = held_out(recipe, run, split)
        counts = _counted(recipe, texts.answers, texts.answers, texts.dropped)
        run.say(f"  {split}: {_summary(counts)}; {int(texts.given.mask.sum())} positions of given text")
        held[split] = asdict(counts)
    manifest = {**target_metadata(recipe), "sampler": recipe.sampler.model_dump(mode="json"), "held_out": held}
    write_json(run.path("answers", "manifest.json"), manifest | asdict(train))


def _counted(recipe: Recipe, answers: Samples, learnt: Samples, dropped: dict[str, int]) -> AnswerTexts:
    """The counts of answers, with the learnt or measured ones by class."""
    written = numpy.isin(answers.column("dropped"), ("", "truncated", *TEXT_FAULTS))
    return AnswerTexts(
        answers=len(answers),
        answer_tokens=int(answers.column("answer").sum()),
        not_ended=int((written & ~answers.column("ended").astype(bool)).sum()),
        writer=writer_kind(recipe),
        dropped=dropped,
        by_class=count_texts(learnt.column("label"), learnt.column("answer")),
    )


def _summary(texts: AnswerTexts) -> str:
    reasons = "".join(f", {count} dropped: {reason}" for reason, count in texts.dropped.items())
    return f"{texts.answers} answers of {texts.answer_tokens} tokens{reasons}"


def writer_kind(recipe: Recipe) -> str:
    """The kind of writer, for the manifest, without addresses."""
    settings = recipe.answers.writer
    return "transformers" if settings is None else "server" if settings.gguf is None else "gguf"


# ── Usable questions ──

MIN_QUESTION_TOKENS = 3
SIMILAR = 0.7  # Two questions are near-duplicates from this Jaccard similarity of their word 3-grams on.
SHORT, WORDLESS = f"shorter than {MIN_QUESTION_TOKENS} tokens", "without words"
SPECIAL = "with special tokens or control characters"
LOOPING = "that end in a loop"
EQUAL, ALIKE = "equal to another", f"like another (Jaccard similarity of word 3-grams of {SIMILAR} or more)"
NOT_ENDED = "not ended within the limit"
# In scripts without spaces between words, each character counts as a word.
_WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\ufffd\ufffe\uffff\ud800-\udfff]")


def fault(template: ChatTemplate, before: Sequence[Message], answer: Sample, text: str, thinking: bool | None) -> str:
    """The reason why a text is no usable question after the messages `before`; empty if it is one.

    `text` is the decoded `answer`, without its end and the white space around it.
    """
    if answer.dropped not in ("", *TEXT_FAULTS):
        return answer.dropped
    if not answer.ended and not isinstance(template, PlainTexts):
        return NOT_ENDED
    if not words(text):
        return WORDLESS
    ids = encode(template.tokenizer, text)
    if _CONTROL.search(text) or template.special & {*ids, *answer.answer[:-1]}:
        return SPECIAL
    if len(ids) < MIN_QUESTION_TOKENS:
        return SHORT
    if is_looping(ids):
        return LOOPING
    try:
        template.text([*before, {"role": "user", "content": text}], thinking)
    except ValueError as error:
        return str(error)
    return ""


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return _WORD.findall(text.casefold())


def grams(text: str, length: int) -> Iterator[tuple[str, ...]]:
    """The n-grams of a text's words. All words of a shorter text make one n-gram."""
    every = words(text)
    for start in range(max(1, len(every) - length + 1)):
        yield tuple(every[start : start + length])


def repeats(texts: Sequence[str]) -> list[str]:
    """Label each text EQUAL or ALIKE if an earlier text is; else the label is empty. Later texts ignore labelled ones.

    The result is exact. Two sets with a similarity of at least s share one of the rarest ⌊(1 − s) n⌋ + 1 of their n
    elements, so that only texts that share one of those are compared (prefix filtering, Chaudhuri et al. 2006).
    """
    numbers: dict[tuple[str, ...], int] = {}
    sets = [frozenset(numbers.setdefault(gram, len(numbers)) for gram in grams(text, 3)) for text in texts]
    frequency = Counter(number for elements in sets for number in elements)
    seen: set[str] = set()
    index: dict[int, list[int]] = {}
    labels = []
    for place, (text, elements) in enumerate(zip(texts, sets, strict=True)):
        plain = " ".join(text.casefold().split())
        rarest = sorted(elements, key=lambda number: (frequency[number], number))
        rarest = rarest[: len(elements) - math.ceil(SIMILAR * len(elements) - 1e-9) + 1]
        others = {other for number in rarest for other in index.get(number, ())}
        if plain in seen:
            labels.append(EQUAL)
        elif any(_alike(elements, sets[other]) for other in others):
            labels.append(ALIKE)
        else:
            labels.append("")
            seen.add(plain)
            for number in rarest:
                index.setdefault(number, []).append(place)
    return labels


def _alike(left: frozenset[int], right: frozenset[int]) -> bool:
    if min(len(left), len(right)) < SIMILAR * max(len(left), len(right)) - 1e-9:
        return False
    common = len(left & right)
    return common >= SIMILAR * (len(left) + len(right) - common) - 1e-9


# ── Requests for questions ──

OPENINGS_SHOWN = 4
TEXTS_PER_QUESTION = 3  # The target writes at most so many texts per wanted question.


@dataclass(frozen=True)
class Question:
    """A numbered question: the messages before it (a system prompt or none), the template's setting of thinking, the
    first words, and the text after it was written."""

    id: str
    before: list[dict[str, Any]]
    thinking: bool | None
    opening: str = ""
    text: str = ""


class QuestionRequests:
    """The requests for questions of a source: headers, sampler and limits.

    Raises DataError or RecipeError if the target's user header cannot be found, if a target without a template cannot
    begin a text, and if the questions would not fit a block.
    """

    def __init__(self, recipe: Recipe, source: Source, number: int) -> None:
        self.recipe, self.source, self.number = recipe, source, number
        tokenizer = load_tokenizer(recipe.target.model)
        self.plain = not tokenizer.chat_template
        self.template = (PlainTexts if self.plain else ChatTemplate)(tokenizer, recipe.chat)
        self.chat = ChatPrompts(self.template, recipe.corpus.block - recipe.answers.new_tokens, recipe.seed)
        self.ends = target_ends(recipe.target.model, tokenizer).ids
        self.rules = rules_of(recipe, tokenizer)
        self._headers: dict[str, UserHeader] = {}
        self._require_room()

    def _require_room(self) -> None:
        """Raise RecipeError if the longest question could not be answered in a block."""
        openings = [len(encode(self.template.tokenizer, text)) for text in self.source.openings]
        longest, room = self.source.tokens + max(openings, default=0), min(self.chat.longest, self.rules.room)
        if self.plain and longest < self.recipe.answers.prompt_tokens:
            raise RecipeError(
                f"a text of corpus.sources has at most {longest} tokens, fewer than the prompts that are cut from it "
                f"(answers.prompt_tokens {self.recipe.answers.prompt_tokens})",
                "raise tokens of the source, or lower answers.prompt_tokens",
            )
        before = [[{"role": "system", "content": text}] for text in self.recipe.chat.system] or [[]]
        for system in before:
            for opening in self.source.openings if self.plain and self.source.openings else ("", *self.source.openings):
                self.header(system, None, opening)
        around = max(len(self.template.prompt([*system, {"role": "user", "content": "a"}])) for system in before)
        if around + longest > room:
            raise RecipeError(
                f"a question of corpus.sources may have {longest} tokens, with {around} of the template around it: "
                f"corpus.block has room for {room} before answers.new_tokens",
                "raise corpus.block, or lower tokens of the source, or answers.new_tokens",
            )

    def begin(self, number: int) -> Question:
        """A numbered question. The seed draws its system prompt, thinking and opening."""
        name = f"question-{self.number}-{number:07d}"
        openings = self.source.openings
        opening = self.chat.draw(name, "opening", openings) if openings else ""
        return Question(name, self.chat.system(name), self.chat.thinking(name), opening)

    def record(self, question: Question) -> dict[str, Any]:
        """The line of a question in its file: a text for a target without a template, else messages."""
        if self.plain:
            return {"text": question.text}
        return {"messages": [*question.before, {"role": "user", "content": question.text}]}

    def header(self, messages: list[dict[str, Any]], thinking: bool | None, opening: str = "") -> UserHeader:
        """The user header after messages, with the message's opening. Raises DataError if it cannot be found."""
        name = json.dumps([messages, thinking, opening])
        if name in self._headers:
            return self._headers[name]
        try:
            header = self.template.user_header(messages, self.ends, thinking, opening)
        except ValueError as error:
            if self.plain:
                raise DataError(f"the target cannot begin a text: {error}", "give openings of its texts") from error
            what = f"the target's chat template has no user header that the target could continue: {error}"
            raise DataError(what, "use other corpus.sources than kind: target") from error
        self._headers[name] = header  # Many questions share a header.
        return header

    def first_header(self) -> UserHeader:
        """The header of the first text, with its opening if the target has no template."""
        first = self.begin(0)
        return self.header(first.before, None, first.opening if self.plain else "")

    def writing(self, ends: Sequence[str]) -> Recipe:
        """The recipe of a writer of questions, which also end before each of the texts `ends`."""
        settings = {"stop": tuple(ends), "repetition_penalty": 1.0}
        return self.recipe.model_copy(
            update={
                "sampler": Sampler(temperature=self.source.temperature, top_p=self.source.top_p),
                "answers": self.recipe.answers.model_copy(update=settings),
            }
        )


def check_questions(recipe: Recipe) -> list[str]:
    """Describe the questions of each source of kind target, without weights. Raises as `QuestionRequests` does."""
    lines = []
    for number, source in enumerate(recipe.corpus.asked):
        asking = QuestionRequests(recipe, source, number)
        header = asking.first_header()
        limits = f"of at most {source.tokens} tokens, at temperature {source.temperature:g} and top-p {source.top_p:g}"
        count = TEXTS_PER_QUESTION * (source.questions or 0)
        if asking.plain:
            begun = "first words" if source.openings else f"its beginning token {header.text!r}"
            lines.append(
                f"no chat template: {source.questions} continuations of {begun} by the target, from at most {count} "
                f"texts {limits}; prompts are their first {recipe.answers.prompt_tokens} tokens"
            )
        else:
            lines += [
                f"questions: {source.questions} of the target's own, from at most {count} texts {limits}",
                f"written after the template's user header ({len(header.ids)} tokens): {header.text!r}"
                + ("" if header.end is None else f", up to {header.end!r}"),
            ]
        if source.openings:
            shown = ", ".join(repr(text) for text in source.openings[:OPENINGS_SHOWN])
            more = len(source.openings) - OPENINGS_SHOWN
            lines.append(f"they begin with one of: {shown}" + (f" and {more} more" if more > 0 else ""))
    return lines


# ── Stage `questions` ──

USABLE_SHARE, MIN_USABLE_SHARE = 0.8, 1 / TEXTS_PER_QUESTION  # estimates of the share of usable texts
SURPLUS = 1.1  # A round asks for so many times the texts that the estimate gives.
ROUND_TEXTS = 32  # Rounds are multiples of so many texts.
EXAMPLES, SHOWN_CHARACTERS = 3, 500
SUMMARY = "summary.json"


def questions(recipe: Recipe, run: Run) -> list[Path]:
    """Write the questions of each source of kind target to questions/target.jsonl (target-2.jsonl, …).

    Processes share the texts, and the stage resumes, as in stage `answers`. summary.json has the counts.
    """
    part = process_index(), process_count()
    summaries = []
    for number, (source, name) in enumerate(zip(recipe.corpus.asked, question_files(recipe.corpus), strict=True)):
        asking = QuestionRequests(recipe, source, number)
        kept, summary = _ask(asking, run, part, name)
        if part[0] == 0:
            lines = (json.dumps(asking.record(question)) + "\n" for question in kept)
            write_text(run.path("questions", name), "".join(lines))
            _say(run, summary)
        summaries.append(summary)
    if part[0] == 0:
        write_result(run.path("questions", SUMMARY), QuestionTexts(writer_kind(recipe), summaries))
    barrier()
    return [run.path("questions")]


def _ask(asking: QuestionRequests, run: Run, part: tuple[int, int], name: str) -> tuple[list[Question], AskedQuestions]:
    """Let the target write the questions of a source. Returns the usable ones, and counts."""
    goal = asking.source.questions
    assert goal is not None
    asked: list[Question] = []
    reasons: list[str] = []
    usable: list[Question] = []
    repeated: Counter[str] = Counter()
    for number in itertools.count(1):
        if len(usable) >= goal or len(asked) >= TEXTS_PER_QUESTION * goal:
            break
        count = _next(goal, len(usable), len(asked))
        fresh = [asking.begin(place) for place in range(len(asked), len(asked) + count)]
        for question, text, reason in _written(asking, run, part, fresh, f"asked-{asking.number}-round-{number}"):
            asked.append(replace(question, text=text))
            reasons.append(reason)
        sound = [question for question, reason in zip(asked, reasons, strict=True) if not reason]
        labels = repeats([question.text for question in sound])
        usable = [question for question, label in zip(sound, labels, strict=True) if not label]
        repeated = Counter(filter(None, labels))
    dropped = Counter(filter(None, reasons)) + repeated
    if not usable:
        raise DataError(
            f"the target wrote no usable question in {len(asked)} texts: {listed(dropped)}",
            "raise tokens of this corpus source (and use --redo questions), or use other sources"
            + ("" if asking.plain else ": the target may not be an instruct model"),
        )
    kept = usable[:goal]
    shown = [question.text[:SHOWN_CHARACTERS] for question in kept[:EXAMPLES]]
    counts = goal, len(asked), len(asked) - dropped.total(), len(kept)
    return kept, AskedQuestions(name, *counts, dict(sorted(dropped.items())), shown)


def _written(
    asking: QuestionRequests, run: Run, part: tuple[int, int], fresh: Sequence[Question], name: str
) -> Iterator[tuple[Question, str, str]]:
    """Yield each question with its text, and the reason why the text is not usable, or "".

    Each process writes its part and reads all texts.
    """
    headers = [asking.header(question.before, question.thinking, question.opening) for question in fresh]
    recipe = asking.writing(sorted({header.end for header in headers if header.end is not None}))
    rules = replace(asking.rules, new_tokens=asking.source.tokens, keep_truncated=True)
    names = [f"{question.id}/1" for question in fresh]
    prompts = [Sample(name, header.ids, source="target") for name, header in zip(names, headers, strict=True)]
    groups = groups_of(prompts, rules, recipe.answers.group, run.path("questions"), f"{name}-")
    write_groups(recipe, run, "questions", groups, part, "questions, texts", idle=True)
    barrier()
    answers = read_groups([group.path for group in groups], "questions")
    if [answer.id for answer in answers] != names:
        raise DataError(f"{run.path('questions')} holds other texts than were requested", how_to_redo("questions"))
    for question, header, answer in zip(fresh, headers, answers, strict=True):
        # The header may lack the last tokens of the opening, which the target then writes.
        empty = asking.template.prompt([]) if asking.plain else asking.header(question.before, question.thinking).ids
        begun = header.ids[len(empty) :] if question.opening else []
        # A text that was cut short may end within a character.
        text = rules.text_of([*begun, *answer.answer]).strip().rstrip("\ufffd" if asking.plain else "")
        reason = fault(asking.template, question.before, answer, text, question.thinking)
        yield question, text, reason or (WORDLESS if not words(rules.text_of(answer.answer)) else "")


def _next(goal: int, usable: int, asked: int) -> int:
    """The number of texts of the next round, estimated from the share of usable texts so far."""
    rate = max(MIN_USABLE_SHARE, usable / asked) if asked else USABLE_SHARE
    count = math.ceil(SURPLUS * (goal - usable) / rate / ROUND_TEXTS) * ROUND_TEXTS
    return min(count, TEXTS_PER_QUESTION * goal - asked)


def _say(run: Run, asked: AskedQuestions) -> None:
    """Write a source's counts and examples to the log."""
    few = asked.kept < asked.wanted
    left = f"; dropped: {listed(asked.dropped)}" if asked.dropped else ""
    run.say(
        f"  {'warning: only ' if few else ''}{asked.kept} of {asked.wanted} questions: {asked.usable} of {asked.asked} "
        f"texts that the target wrote are usable{left}",
        warning=few,
    )
    for text in asked.examples:
        run.say(f"  such as: {printable(' '.join(text.split()))}")
