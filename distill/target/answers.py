"""Stage `answers`: the target's own text, group by group, from whatever runs the target.

And stages `validation` and `test` of a run that never loads the target: its answers to held-out prompts, and its
distributions on them and on held-out text, in stores like the teacher's. They take the place of the target wherever it
would be run on held-out texts: to compare cuts, to choose weights, and to measure. Nothing in them is learnt from.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distill import processes
from distill.documents.chat_template import ChatTemplate
from distill.files import write_json
from distill.models.hugging_face import load_tokenizer
from distill.recipe import Recipe
from distill.run import Run
from distill.target.groups import rules_of, write_answers
from distill.target.teacher import write_store
from distill.target.traffic import write_traffic
from distill.teacher.held_out import ANSWERS, Split, held_out, served_answers, sizes
from distill.teacher.source import target_metadata
from distill.texts import count_texts, drop_reason, read_answers, read_prompts


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
        write_traffic(recipe, run, tokenizer)
    groups = 0
    if recipe.answers.prompts:
        prompts = read_prompts(run, "train")
        turns = any(prompt.chat and prompt.chat["turns"] for prompt in prompts)
        rules = rules_of(recipe, tokenizer, ChatTemplate(tokenizer, recipe.chat) if turns else None)
        groups = write_answers(recipe, run, prompts, rules, share)
    processes.barrier()
    if share[0] == 0:
        _write_manifest(recipe, run, groups)
    return [run.path("answers")]


def _write_manifest(recipe: Recipe, run: Run, groups: int) -> None:
    """Write manifest.json with the target, the sampler and counts of answers."""
    answers = read_answers(run, "train")
    dropped = Counter(filter(None, map(drop_reason, answers)))
    counts: dict[str, Any] = {
        "answers": len(answers),
        "prompt_tokens": sum(len(one.prompt) for one in answers),
        "answer_tokens": sum(len(one.answer) for one in answers),
        "not_ended": sum(not one.ended and not one.dropped for one in answers),
        "dropped": dict(sorted(dropped.items())),
        "by_class": count_texts((one.label, one.mode, len(one.answer)) for one in answers if not drop_reason(one)),
    }
    reasons = "".join(f", {count} dropped: {reason}" for reason, count in counts["dropped"].items())
    run.say(
        f"  {counts['answers']} answers of {counts['answer_tokens']} tokens, {counts['not_ended']} of them cut "
        f"short by a limit{reasons}"
    )
    manifest = {"format": 2, **target_metadata(recipe), "sampler": recipe.sampler.model_dump(mode="json")}
    manifest |= {"writer": writer_kind(recipe), "groups": groups}
    write_json(run.path("answers", "manifest.json"), manifest | counts)


def writer_kind(recipe: Recipe) -> str:
    """The kind of writer, for the manifest; without addresses."""
    settings = recipe.answers.writer
    return "transformers" if settings is None else "gguf" if settings.gguf is not None else f"server, {settings.api}"


def _hold_out(recipe: Recipe, run: Run, split: Split) -> list[Path]:
    """Answer the held-out prompts of a split, then store the distributions; resumes by the reply and by the shard.

    One process does it. Without a writer, served answers are all there are.
    """
    count, new_tokens = sizes(recipe, split)
    served = {one.id for one in served_answers(run, split)}
    left = 0 if recipe.answers.writer is None else max(0, count - len(served))
    prompts = [prompt for prompt in read_prompts(run, split) if prompt.id not in served][:left]
    if prompts:
        rules = rules_of(recipe, load_tokenizer(recipe.target.model))
        rules = replace(rules, new_tokens=new_tokens, keep_truncated=True)
        write_answers(recipe, run, prompts, rules, (0, 1), split, ANSWERS)
    texts = held_out(recipe, run, split)
    tokens = sum(len(one.answer) for one in texts.answers)
    listed = "".join(f", {count} dropped: {reason}" for reason, count in texts.dropped.items())
    run.say(
        f"  {len(texts.answers)} answers of {tokens} tokens to {split} prompts{listed}; "
        f"{int(texts.given.mask.sum())} positions of given text"
    )
    write_store(recipe, run, texts.blocks, (0, 1), split, all_entries=True)
    summary: dict[str, Any] = {
        "answers": len(texts.answers),
        "answer_tokens": tokens,
        "not_ended": sum(not one.ended for one in texts.answers),
        "dropped": texts.dropped,
        "by_class": count_texts((one.label, one.mode, len(one.answer)) for one in texts.answers),
    }
    write_json(run.path(split, "summary.json"), summary)
    return [run.path(split)]


# Stage `validation`, on which cuts are compared and weights are chosen, and stage `test`, of the printed figures.
hold_out_validation = partial(_hold_out, split="validation")
hold_out_test = partial(_hold_out, split="test")
