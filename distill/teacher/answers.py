"""Stage `answers`: the target's own text, group by group, from whatever runs the target.

And stages `validation` and `test` of a run that never loads the target: its answers to held-out prompts, and its
distributions on them and on held-out text, in stores like the teacher's. They take the place of the target wherever it
would be run on held-out texts: to compare cuts, to choose weights, and to measure. Nothing in them is learnt from.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from distill.data.chat_template import ChatTemplate, next_prompt
from distill.data.samples import (
    TEXT_FAULTS,
    AnswerTexts,
    Reply,
    Request,
    Sample,
    Samples,
    count_texts,
    decoded,
    fault_of,
    listed,
    prompt_seed,
    read_answers,
    read_prompts,
    write_samples,
)
from distill.data.traffic import SOURCE, write_traffic
from distill.devices import barrier, process_count, process_index, share_of
from distill.engines.torch.hugging_face import empty_model, end_ids, load_config, load_tokenizer, local_snapshot
from distill.errors import DataError, EndpointError, faults_explained
from distill.files import has_form, parse_object, write_json, write_result
from distill.progress import Caution, Progress
from distill.recipe import Recipe, is_path
from distill.recipe.target import WriterSettings
from distill.run import Run
from distill.teacher.endpoint import Endpoint
from distill.teacher.store import ANSWERS, Split, held_out, served_answers, sizes, target_metadata, write_store
from distill.teacher.writers import MAX_FAULTS, GgufWriter, ServerWriter, TorchWriter, require_gguf

# ── Groups of prompts: a file of answers each, and the journal of a group that is being written ──
# Groups are a pure function of the prompts, so the files do not depend on the order of replies, on kills or on the
# number of processes.

REPLY = {"id": str, "ids": [int], "ended": bool, "dropped": str}  # the form of a line of a journal

# Continues prompts as the target does. `by_prompt`: a reply does not depend on other requests, so each is kept as it
# comes. Else requests that are written together affect each other through rounding, and a group is written whole.
# `together`: this many are written at once.
Writer = TorchWriter | GgufWriter | ServerWriter


@dataclass(frozen=True)
class AnswerRules:
    """The recipe's seed and limits for requests and answers, and how texts are decoded.

    `room` is the most tokens of a prompt with its answer. `text_of` decodes the ids of an answer without its end token.
    `template` renders the further turns of conversations; None where no prompt has any.
    """

    seed: int
    new_tokens: int
    room: int
    keep_truncated: bool
    text_of: Callable[[Sequence[int]], str]
    template: ChatTemplate | None = None

    def request(self, name: str, ids: list[int]) -> Request | None:
        """The request for an answer to a prompt; None where the block has no room left for it."""
        limit = min(self.new_tokens, self.room - len(ids))
        if limit < 1:
            return None
        return Request(name, ids, prompt_seed(self.seed, name), limit)

    def next_prompt(self, prompt: Sample, texts: list[str]) -> list[int] | None:
        """The next prompt of a conversation after answers with these texts; None where it is over."""
        if self.template is None or prompt.chat is None:
            return None
        try:
            return next_prompt(self.template, prompt.chat, texts)
        except ValueError:  # the template refuses what the target wrote
            return None


def rules_of(recipe: Recipe, tokenizer: Any, template: ChatTemplate | None = None) -> AnswerRules:
    """The rules of requests and answers."""
    context: int = load_config(recipe.target.model).get_text_config().max_position_embeddings
    ends = set(end_ids(recipe.target.model, tokenizer))

    def text_of(ids: Sequence[int]) -> str:
        return decoded(tokenizer, [token for token in ids if token not in ends])

    room = min(recipe.corpus.block, context)
    return AnswerRules(recipe.seed, recipe.answers.new_tokens, room, recipe.answers.keep_truncated, text_of, template)


@dataclass
class PromptAnswers:
    """A prompt and its answers so far; a prompt without further turns has one. `request` is None where it is over."""

    number: int
    prompt: Sample
    group: Group
    request: Request | None = None
    answers: list[Sample] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def begin(self, rules: AnswerRules, known: dict[str, Reply]) -> None:
        """Go on to the first request that no reply in `known` answers."""
        self.request = rules.request(self.prompt.id, self.prompt.prompt)
        if self.request is None:
            self._add(self.prompt.id, self.prompt.prompt, Reply("", [], False, "no room in the block"), rules)
        while self.request is not None and self.request.id in known:
            self.take(known[self.request.id], rules)

    def take(self, reply: Reply, rules: AnswerRules) -> None:
        """Add the answer of a reply to the request, and go on to the next one."""
        assert self.request is not None
        answer = self._add(self.request.id, self.request.ids, reply, rules)
        self.request = None
        if not answer.ended or answer.dropped:
            return  # a user would not go on after such an answer
        self.texts.append(rules.text_of(answer.answer))
        ids = rules.next_prompt(self.prompt, list(self.texts))
        if ids is not None:
            self.request = rules.request(f"{self.prompt.id}/{len(self.texts)}", ids)

    def _add(self, name: str, ids: list[int], reply: Reply, rules: AnswerRules) -> Sample:
        dropped = reply.dropped or ("" if reply.ended or rules.keep_truncated else "truncated") or fault_of(reply.ids)
        own = replace(self.prompt, id=name, prompt=ids, answer=reply.ids, ended=reply.ended, dropped=dropped)
        self.answers.append(replace(own, number=self.number, chat=None))
        return self.answers[-1]


@dataclass
class Group:
    """Prompts whose answers make one file, by their numbers in the list of all; `conversations` while it is open."""

    path: Path
    numbers: list[int]
    conversations: list[PromptAnswers] = field(default_factory=list)

    @property
    def journal(self) -> Path:
        """Where replies are kept until the file is written; hidden, so that it is not an artifact."""
        return self.path.with_name(f".{self.path.stem}.journal")

    def known(self) -> dict[str, Reply]:
        """The replies in the journal, by request; lines that a kill left torn are skipped."""
        if not self.journal.exists():
            return {}
        records = map(parse_object, self.journal.read_bytes().split(b"\n"))
        return {one["id"]: Reply(**one) for one in records if isinstance(one, dict) and has_form(one, REPLY)}

    def note(self, reply: Reply) -> None:
        """Append a reply to the journal, so that a kill does not lose it."""
        line = json.dumps(asdict(reply)) + "\n"
        with faults_explained(self.journal):
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            with open(self.journal, "ab") as handle:
                # A line of its own, whatever a kill left before it; blank lines are skipped.
                handle.write(b"\n" + line.encode())

    def finish(self) -> None:
        """Write the file, in prompt order, and remove the journal; nothing while a conversation goes on."""
        if any(one.request is not None for one in self.conversations):
            return
        write_samples(self.path, (answer for one in self.conversations for answer in one.answers))
        self.journal.unlink(missing_ok=True)
        self.conversations = []


def groups_of(prompts: Sequence[Sample], size: int, folder: Path, name: str = "train") -> list[Group]:
    """The groups of a list of prompts, the longest prompts first, so that texts of a group have like lengths.

    The longest also take the most memory: where it does not suffice, that shows at once.
    """
    lengths = prompts.column("prompt") if isinstance(prompts, Samples) else [len(one.prompt) for one in prompts]
    order: list[int] = numpy.argsort(-numpy.asarray(lengths, int), kind="stable").tolist()
    return [
        Group(folder / f"{name}-{group:05d}.arrow", order[start : start + size])
        for group, start in enumerate(range(0, len(order), size))
    ]


def write_answers(
    recipe: Recipe,
    run: Run,
    prompts: Sequence[Sample],
    rules: AnswerRules,
    share: tuple[int, int],
    stage: str = "answers",
    name: str = "train",
    what: str = "answers, prompts",
    idle: bool = False,
) -> int:
    """Write this process's share of the answers to prompts, as STAGE/NAME-NNNNN.arrow; the number of all files.

    `what` is counted in the progress. With `idle`, there may be more processes than groups. Replies find their prompts
    by name: each has its own.
    """
    groups = groups_of(prompts, recipe.answers.group_size, run.path(stage), name)
    index, count = share
    mine = groups[index::count] if idle else share_of(groups, share, "groups of prompts", "answers.group")
    missing = [group for group in mine if not group.path.exists()]
    for group in mine:
        if group.path.exists():
            group.journal.unlink(missing_ok=True)  # a kill after the file was written leaves its journal
    whose = f" of process {index}" if count > 1 else ""
    if len(missing) < len(mine):
        run.say(f"  resuming: {len(mine) - len(missing)} of {len(mine)} groups{whose} exist")
    if missing:
        _GroupWriter(recipe, run, rules, f"{what}{whose}", mine).write(prompts, missing)
    return len(groups)


class _GroupWriter:
    """Writes groups: asks for the conversations' answers, and keeps those that got no reply until the end."""

    def __init__(self, recipe: Recipe, run: Run, rules: AnswerRules, what: str, groups: Sequence[Group]) -> None:
        self.run, self.rules, self.what = run, rules, what
        self.writer = open_writer(recipe)
        if isinstance(self.writer, ServerWriter):
            self.writer.endpoint.require_same(groups[0].path.parent)
        self.allowed = 0.0 if recipe.answers.writer is None else recipe.answers.writer.missing
        self.total = sum(len(group.numbers) for group in groups)
        self.unanswered: list[tuple[PromptAnswers, Reply]] = []
        self.tokens, self.started = 0, time.monotonic()

    def write(self, prompts: Sequence[Sample], missing: list[Group]) -> None:
        """Write the missing groups of these prompts: all at once where each reply stands for itself, else in turn."""
        done = self.total - sum(len(group.numbers) for group in missing)
        self.progress = Progress(self.what, self.total, done, self.writer.together)
        try:
            for part in [missing] if self.writer.by_prompt else [[group] for group in missing]:
                self._write(prompts, part)
            self._settle()
        finally:
            for line in self.writer.close():
                self.run.say(f"  {self.what.partition(',')[0]}: {line}")

    def _write(self, prompts: Sequence[Sample], groups: Sequence[Group]) -> None:
        """Ask for everything that the journals of the groups lack, and write each group with its last reply; a group is
        opened, and its prompts are read, once the requests of those before it do not suffice."""
        waiting: deque[Request] = deque()
        pending: dict[str, PromptAnswers] = {}
        unopened = deque(groups)

        def ask(conversation: PromptAnswers) -> None:
            if conversation.request is not None:
                waiting.append(conversation.request)
                pending[conversation.request.id] = conversation

        def open_next() -> None:
            while unopened and len(waiting) < self.writer.together + MAX_FAULTS:  # replies that a writer holds back
                group = unopened.popleft()
                known = group.known() if self.writer.by_prompt else {}
                group.conversations = [PromptAnswers(one, prompts[one], group) for one in group.numbers]
                for conversation in group.conversations:
                    conversation.begin(self.rules, known)
                    ask(conversation)
                if done := sum(one.request is None for one in group.conversations):
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
        conversation.take(reply, self.rules)
        if conversation.request is None:
            rate = self.tokens / max(1e-9, time.monotonic() - self.started)
            self.progress.step(note=f"{rate:.0f} tokens/s")
            conversation.group.finish()

    def _settle(self) -> None:
        """Drop the prompts without a reply; EndpointError where those are more than the allowed share of all."""
        left = self.unanswered
        if left and len(left) > self.allowed * self.total:
            reasons = listed(Counter(reply.dropped for _, reply in left), " × ")
            first = f"; the first: {left[0][1].detail}" if left[0][1].detail else ""
            raise EndpointError(
                f"{len(left)} of {self.total} prompts have no reply after all attempts: {reasons}{first}",
                "the same command asks for these alone; answers.writer.missing lets a share of prompts go without",
            )
        for conversation, reply in left:
            self._take(conversation, reply)


def open_writer(recipe: Recipe) -> Writer:
    """The writer of a recipe's answers, ready to write.

    Raises DataError or PairError for a model that cannot be used, EndpointError for a server.
    """
    settings, tokenizer = recipe.answers.writer, load_tokenizer(recipe.target.model)
    if settings is None:
        return TorchWriter(recipe, tokenizer)
    writer = ServerWriter if settings.gguf is None else GgufWriter
    return writer(recipe, tokenizer, load_config(recipe.target.model))


def check_writer(recipe: Recipe, offline: bool) -> tuple[list[str], list[str]]:
    """The file is a GGUF of the target, or each server answers and serves its model; lines to print, and the servers
    that were not contacted."""
    settings = recipe.answers.writer
    if settings is None:
        return served_rather(recipe), []
    if settings.gguf is not None:
        require_gguf(recipe.target.model, settings.gguf, "answers.writer.gguf")
        return [f"answers: written by {settings.gguf}, which has the target's tokens"], []
    if offline:
        return [], [f"server {url}" for url in settings.urls]
    with closing(Endpoint(settings.model_copy(update={"retries": 0}), "answers.writer")) as endpoint:
        return [f"answers: {url} serves {model}" for url, model, _ in endpoint.served()], []


LARGE = 7e9  # parameters of a target from which a server is the first proposal


def served_rather(recipe: Recipe) -> list[str]:
    """The command of a server that writes the answers of a large target sooner; none for others."""
    model = recipe.target.model
    if recipe.answers.prompts == 0 or not (is_path(model) or local_snapshot(model)):
        return []
    parameters = sum(weight.numel() for weight in empty_model(load_config(model)).parameters())
    what = f"a server writes the answers of {parameters / 1e9:.0f} billion parameters sooner, many at once"
    way = f"`vllm serve {model} --max-model-len {recipe.corpus.block}`, answers.writer.urls=[http://localhost:8000/v1]"
    return [Caution(f"warning: {what}: {way}, or llama-server; docs/big-targets.md")] if parameters >= LARGE else []


# ── The stages ──


def answers(recipe: Recipe, run: Run, share: tuple[int, int] | None = None) -> list[Path]:
    """Let the target continue the train prompts; each group of prompts is one file in answers/, the unit of resuming.

    Where replies do not depend on each other (GGUF files, servers), each is also kept as it comes. Served answers,
    where the recipe names a file of them, come first. With several processes, `share` = (index, count) makes this one
    write every count-th group; the first process finishes the stage when all are done. None: the share of this process
    among those it was launched with. In conversations the target answers one turn of the user after the other.
    """
    share = share or (process_index(), process_count())
    tokenizer = load_tokenizer(recipe.target.model)
    if recipe.answers.traffic is not None and share[0] == 0:
        write_traffic(recipe, run, tokenizer)
        _learn_again(recipe, run)
    groups = 0
    if recipe.answers.prompts != 0:
        prompts = read_prompts(run, "train")
        turns = any(chat and json.loads(chat)["turns"] for chat in prompts.column("chat"))
        rules = rules_of(recipe, tokenizer, ChatTemplate(tokenizer, recipe.chat) if turns else None)
        groups = write_answers(recipe, run, prompts, rules, share)
    barrier()
    if share[0] == 0:
        _write_manifest(recipe, run, groups)
    return [run.path("answers")]


def _learn_again(recipe: Recipe, run: Run) -> None:
    """Mix served answers that the parent of a refreshed run has learnt from with as many new ones, drawn by the seed,
    so that the draft does not unlearn them."""
    parent, path = run.parent(), run.path("answers", "train-traffic-earlier.arrow")
    if parent is None or path.exists():
        return
    before = Run(run.folder.parent / parent["run"], recipe)
    every = read_answers(before, "train")
    old = every.take((every.column("source") == SOURCE) & (every.column("dropped") == ""))
    fresh = len(read_answers(run, "train-traffic"))
    kept = random.Random(recipe.seed).sample(old, min(len(old), fresh))
    write_samples(path, kept)
    run.say(f"  {len(kept)} of {len(old)} served answers of {before.folder.name} are learnt from again")


def _write_manifest(recipe: Recipe, run: Run, groups: int) -> None:
    """Write manifest.json with the target, the sampler and counts of answers."""
    answers = read_answers(run, "train")
    reasons = answers.column("dropped")
    dropped = Counter(reasons[reasons != ""])
    if answers and dropped.total() == len(answers):
        raise DataError(
            f"all {len(answers)} answers of the target were dropped: {listed(dropped, ' × ')}",
            "correct what wrote them (answers, sampler, chat) and run again with --redo answers",
        )
    found = _counted(recipe, answers, answers.take(reasons == ""), dict(sorted(dropped.items())))
    few = 2 * dropped.total() > len(answers)
    said = f"{_said(found)}, {found.not_ended} of them cut short by a limit"
    run.say(f"  {'warning: most were dropped: ' if few else ''}{said}", warning=few)
    manifest = {**target_metadata(recipe), "sampler": recipe.sampler.model_dump(mode="json"), "groups": groups}
    write_json(run.path("answers", "manifest.json"), manifest | asdict(found))


def _counted(recipe: Recipe, answers: Samples, learnt: Samples, dropped: dict[str, int]) -> AnswerTexts:
    """The counts of answers, by class of those that are learnt from or measured."""
    written = numpy.isin(answers.column("dropped"), ("", "truncated", *TEXT_FAULTS))
    return AnswerTexts(
        answers=len(answers),
        answer_tokens=int(answers.column("answer").sum()),
        not_ended=int((written & ~answers.column("ended").astype(bool)).sum()),
        writer=writer_kind(recipe),
        dropped=dropped,
        by_class=count_texts(learnt.column("label"), learnt.column("answer")),
    )


def _said(found: AnswerTexts) -> str:
    reasons = "".join(f", {count} dropped: {reason}" for reason, count in found.dropped.items())
    return f"{found.answers} answers of {found.answer_tokens} tokens{reasons}"


def writer_kind(recipe: Recipe) -> str:
    """The kind of writer, for the manifest; without addresses."""
    settings = recipe.answers.writer
    return "transformers" if settings is None else "server" if settings.gguf is None else "gguf"


def _hold_out(recipe: Recipe, run: Run, split: Split) -> list[Path]:
    """Answer the held-out prompts of a split, then store the distributions; resumes by the reply and by the shard.

    One process does it. Without a writer, served answers are all there are. A teacher's GGUF file also writes the
    answers: a card that holds it has no room for a server beside it.
    """
    if recipe.answers.writer is not None and recipe.teacher.gguf is not None:
        own = recipe.answers.model_copy(update={"writer": WriterSettings(gguf=recipe.teacher.gguf)})
        recipe = recipe.model_copy(update={"answers": own})
    count, new_tokens, _ = sizes(recipe, split)
    served = {*served_answers(run, split).column("id")}
    left = 0 if recipe.answers.writer is None else max(0, count - len(served))
    prompts = [prompt for prompt in read_prompts(run, split) if prompt.id not in served][:left]
    if prompts:
        rules = rules_of(recipe, load_tokenizer(recipe.target.model))
        rules = replace(rules, new_tokens=new_tokens, keep_truncated=True)
        write_answers(recipe, run, prompts, rules, (0, 1), split, ANSWERS)
    texts = held_out(recipe, run, split)
    summary = _counted(recipe, texts.answers, texts.answers, texts.dropped)
    run.say(f"  {_said(summary)} to {split} prompts; {int(texts.given.mask.sum())} positions of given text")
    write_store(recipe, run, texts.blocks, (0, 1), split, all_entries=True)
    write_result(run.path(split, "summary.json"), summary)
    return [run.path(split)]


# Stage `validation`, on which cuts are compared and weights are chosen, and stage `test`, of the printed figures.
hold_out_validation = partial(_hold_out, split="validation")
hold_out_test = partial(_hold_out, split="test")
