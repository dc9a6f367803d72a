"""Stage `answers`: the target's own text, group by group, from whatever runs the target."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from distill import processes
from distill.documents.chat_template import ChatTemplate, next_prompt
from distill.errors import DataError, EndpointError
from distill.files import write_json
from distill.models.hugging_face import end_ids, load_config, load_tokenizer
from distill.progress import Progress
from distill.recipe import Recipe
from distill.run import Run
from distill.target.groups import Conversation, Group, NextPrompt, Rules, groups_of
from distill.target.traffic import write_traffic
from distill.target.writers.writing import Writer, open_writer
from distill.teacher.source import target_metadata
from distill.texts import Prompt, Reply, Request, count_texts, drop_reason, read_answers, read_prompts


def answers(recipe: Recipe, run: Run, share: tuple[int, int] | None = None) -> list[Path]:
    """Let the target continue the train prompts; each group of prompts is one file in answers/, the unit of resuming.

    Where replies do not depend on each other (GGUF files, servers), each is also kept as it comes. Served answers,
    where the recipe names a file of them, come first. With several processes, `share` = (index, count) makes this one
    write every count-th group; the first process finishes the stage when all are done. None: the share of this process
    among those it was launched with. In conversations the target answers one turn of the user after the other.
    """
    share = share or (processes.process_index(), processes.process_count())
    tokenizer = load_tokenizer(recipe.target.model)
    if recipe.answers.traffic is not None and share[0] == 0:
        write_traffic(recipe, run, tokenizer, tokenizer.eos_token_id)
    if recipe.answers.prompts == 0:
        return _finish(recipe, run, share, 0)
    prompts = read_prompts(run, "train")
    rules = rules_of(recipe, tokenizer, _further_turns(recipe, tokenizer, prompts))
    return _finish(recipe, run, share, write_answers(recipe, run, prompts, rules, share))


def write_answers(
    recipe: Recipe,
    run: Run,
    prompts: list[Prompt],
    rules: Rules,
    share: tuple[int, int],
    stage: str = "answers",
    name: str = "train",
    what: str = "answers, prompts",
    idle: bool = False,
) -> int:
    """Write this process's share of the answers to prompts, as STAGE/NAME-NNNNN.jsonl; the number of all files.

    `what` is counted in the progress. With `idle`, there may be more processes than groups.
    """
    groups = groups_of(_distinct(prompts), recipe.answers.group_size, run.path(stage), name)
    index, count = share
    mine = groups[index::count] if idle else processes.share_of(groups, share, "groups of prompts", "answers.group")
    missing = [group for group in mine if not group.path.exists()]
    for group in mine:
        if group.path.exists():
            group.journal.unlink(missing_ok=True)  # a kill after the file was written leaves its journal
    whose = f" of process {index}" if count > 1 else ""
    if len(missing) < len(mine):
        run.say(f"  resuming: {len(mine) - len(missing)} of {len(mine)} groups{whose} exist")
    if missing:
        writer = open_writer(recipe, load_tokenizer(recipe.target.model), load_config(recipe.target.model))
        _write(recipe, run, rules, mine, missing, writer, f"{what}{whose}")
    return len(groups)


def _further_turns(recipe: Recipe, tokenizer: Any, prompts: Sequence[Prompt]) -> NextPrompt | None:
    """What renders the further turns of conversations; None where no prompt has any."""
    if not any(prompt.chat and prompt.chat["turns"] for prompt in prompts):
        return None
    template = ChatTemplate(tokenizer, recipe.chat)

    def following(prompt: Prompt, texts: list[str]) -> list[int] | None:
        try:
            return None if prompt.chat is None else next_prompt(template, prompt.chat, texts)
        except ValueError:  # the template refuses what the target wrote: the conversation is over
            return None

    return following


def rules_of(recipe: Recipe, tokenizer: Any, next_prompt: NextPrompt | None = None) -> Rules:
    """The rules of requests and answers; DataError where the target's context is too short for the recipe."""
    config = load_config(recipe.target.model)
    context: int = config.get_text_config().max_position_embeddings
    settings = recipe.answers
    if settings.new_tokens > context - settings.prompt_tokens:
        raise DataError(
            f"the target's context leaves {context - settings.prompt_tokens} tokens after a prompt of "
            f"{settings.prompt_tokens}",
            "lower answers.new_tokens",
        )
    ends = set(end_ids(config, tokenizer))

    def text_of(ids: Sequence[int]) -> str:
        kept = [token for token in ids if token not in ends]
        text: str = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    room = min(recipe.corpus.block, context)
    return Rules(recipe.seed, settings.new_tokens, room, settings.keep_truncated, text_of, next_prompt)


def _distinct(prompts: list[Prompt]) -> list[Prompt]:
    """The prompts; DataError where two have one name, by which replies find their prompts."""
    twice = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        raise DataError(
            f"{len(twice)} prompts have the name of another one, such as {twice[0]}",
            "make them again with `distill train RECIPE --redo corpus`",
        )
    return prompts


def _write(
    recipe: Recipe, run: Run, rules: Rules, mine: list[Group], missing: list[Group], writer: Writer, what: str
) -> None:
    """Write the missing groups: all at once where each reply stands for itself, else one after the other."""
    total = sum(len(group.prompts) for group in mine)
    done = total - sum(len(group.prompts) for group in missing)
    work = _Work(rules, writer, Progress(what, total, done))
    try:
        for part in [missing] if writer.by_prompt else [[group] for group in missing]:
            work.write(part)
        settings = recipe.answers.writer
        work.settle(run, total, 0.0 if settings is None else settings.missing)
    finally:
        for line in writer.close():
            run.say(f"  {what.partition(',')[0]}: {line}")


class _Work:
    """Conversations under way: which one a reply belongs to, and those that stay without one."""

    def __init__(self, rules: Rules, writer: Writer, progress: Progress) -> None:
        self.rules, self.writer, self.progress = rules, writer, progress
        self.unanswered: list[tuple[Conversation, Request, Reply]] = []
        self.tokens, self.started = 0, time.monotonic()

    def write(self, groups: Sequence[Group]) -> None:
        """Ask for everything that the journals of the groups lack, and write each group with its last reply."""
        waiting: deque[Request] = deque()
        asked: dict[str, tuple[Conversation, Request]] = {}
        for group in groups:
            known = group.known() if self.writer.by_prompt else {}
            for number, prompt in group.prompts:
                conversation = Conversation(number, prompt, group)
                group.conversations.append(conversation)
                request = conversation.begin(self.rules, known)
                if request is not None:
                    group.open += 1
                    waiting.append(request)
                    asked[request.id] = conversation, request
            done = len(group.prompts) - group.open
            if done:
                self.progress.step(done)
            if not group.open:
                group.finish()
        with closing(self.writer.write(waiting)) as replies:
            for reply in replies:
                conversation, request = asked.pop(reply.id)
                if not reply.lasting:
                    self.unanswered.append((conversation, request, reply))
                    continue
                if self.writer.by_prompt:
                    conversation.group.note(reply)
                following = self._take(conversation, request, reply)
                if following is not None:
                    waiting.append(following)
                    asked[following.id] = conversation, following

    def _take(self, conversation: Conversation, request: Request, reply: Reply) -> Request | None:
        self.tokens += len(reply.ids)
        following = conversation.take(request, reply, self.rules)
        if following is None:
            conversation.group.open -= 1
            rate = self.tokens / max(1e-9, time.monotonic() - self.started)
            self.progress.step(note=f"{rate:.0f} tokens/s")
            if not conversation.group.open:
                conversation.group.finish()
        return following

    def settle(self, run: Run, total: int, allowed: float) -> None:
        """Drop the prompts without a reply; EndpointError where those are more than a share `allowed` of all."""
        left = self.unanswered
        if left and len(left) > allowed * total:
            reasons = Counter(reply.dropped for _, _, reply in left)
            listed = ", ".join(f"{count} × {reason}" for reason, count in sorted(reasons.items()))
            listed += f"; the first: {left[0][2].detail}" if left[0][2].detail else ""
            raise EndpointError(
                f"{len(left)} of {total} prompts have no reply after all attempts: {listed}",
                "the same command asks for these alone; answers.writer.missing lets a share of prompts go without",
            )
        for conversation, request, reply in left:
            self._take(conversation, request, reply)


def _finish(recipe: Recipe, run: Run, share: tuple[int, int], groups: int) -> list[Path]:
    """Wait for all processes; the first one writes manifest.json with the target, the sampler and counts of answers."""
    processes.barrier()
    folder = run.path("answers")
    if share[0] == 0:
        found = read_answers(run, "train")
        dropped = Counter(filter(None, map(drop_reason, found)))
        counts: dict[str, Any] = {
            "answers": len(found),
            "prompt_tokens": sum(len(one.prompt) for one in found),
            "answer_tokens": sum(len(one.answer) for one in found),
            "not_ended": sum(not one.ended and not one.dropped for one in found),
            "dropped": dict(sorted(dropped.items())),
            "by_class": count_texts((one.label, one.mode, len(one.answer)) for one in found if not drop_reason(one)),
        }
        listed = "".join(f", {count} dropped: {reason}" for reason, count in counts["dropped"].items())
        run.say(
            f"  {counts['answers']} answers of {counts['answer_tokens']} tokens, {counts['not_ended']} of them cut "
            f"short by the limit{listed}"
        )
        manifest = {"format": 2, **target_metadata(recipe), "sampler": recipe.sampler.model_dump(mode="json")}
        write_json(folder / "manifest.json", manifest | {"writer": writer_kind(recipe), "groups": groups} | counts)
    return [folder]


def writer_kind(recipe: Recipe) -> str:
    """What wrote the answers, without addresses."""
    settings = recipe.answers.writer
    return "transformers" if settings is None else "gguf" if settings.gguf is not None else f"server, {settings.api}"
