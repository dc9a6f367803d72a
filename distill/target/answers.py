"""Stage `answers`: the target's own text, group by group, from whatever runs the target."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from distill import processes
from distill.documents.chat_template import ChatTemplate
from distill.files import write_json
from distill.models.hugging_face import load_tokenizer
from distill.recipe import Recipe
from distill.run import Run
from distill.target.groups import rules_of, write_answers
from distill.target.traffic import write_traffic
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
        f"short by the limit{reasons}"
    )
    manifest = {"format": 2, **target_metadata(recipe), "sampler": recipe.sampler.model_dump(mode="json")}
    manifest |= {"writer": writer_kind(recipe), "groups": groups}
    write_json(run.path("answers", "manifest.json"), manifest | counts)


def writer_kind(recipe: Recipe) -> str:
    """The kind of writer, for the manifest; without addresses."""
    settings = recipe.answers.writer
    return "transformers" if settings is None else "gguf" if settings.gguf is not None else f"server, {settings.api}"
