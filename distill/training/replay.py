"""Replay: the draft learns the target's distribution at the positions where verification rejected it.

The decoded texts are stored with a mask of those positions; the distribution after an accepted prefix is the target's
own, computed when the position is learnt. The result is kept only if tokens per round rise on validation prompts.
Replaying verified errors comes from Draft-OPD (arXiv 2605.29343). Legend: n blocks, S positions per block.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.files import write_atomically, write_json
from distill.intervals import paired_ratio_interval
from distill.packing import PADDING, Packed, pack
from distill.progress import Progress
from distill.recipe import Replay
from distill.results.training_results import REPLAY_STAGE
from distill.speculative.decode import Decoded
from distill.texts import Answer, Prompt, read_answers
from distill.training.checkpoint import BEST, REPLAYED, load_weights, save_weights
from distill.training.memory import memory_explained, replaying
from distill.training.setup import Training
from distill.training.validation import (
    ServedTarget,
    measured_on_main,
    served_target,
    take_best,
    validation_prompts,
)

BATCH = 16  # prompts decoded together
RESAMPLES, CONFIDENCE = 2000, 0.95  # of the interval that decides


def replay_prompts(answers: Sequence[Answer], count: int) -> list[Prompt]:
    """At most `count` of the answered prompts, spread evenly: generated and served ones in proportion, each once."""
    prompts: dict[tuple[int, ...], Prompt] = {}
    for answer in answers:
        prompts.setdefault(tuple(answer.prompt), Prompt(answer.id, answer.prompt, answer.source))
    distinct, taken = list(prompts.values()), min(count, len(prompts))
    return [distinct[number * len(distinct) // taken] for number in range(taken)]


def rejected_positions(prompt: int, text: Decoded) -> list[int]:
    """Indices, in prompt and text, of the tokens with which the target replaced a rejected drafted token."""
    positions, at = [], prompt + 1  # the first token comes from the prompt's own pass, before any round
    for own in text.rounds:
        if own.accepted < own.drafted and at + own.accepted < prompt + len(text.tokens):
            positions.append(at + own.accepted)
        at += own.accepted + 1
    return positions


def pack_rejected(prompts: Sequence[Prompt], texts: Sequence[Decoded], block: int) -> Packed:
    """Blocks [n, S] of the decoded texts in which the distributions of rejected positions alone count."""
    rows = [
        ([*prompt.ids, *text.tokens], rejected_positions(len(prompt.ids), text))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    rows = [(ids[:block], [at for at in marks if at < block]) for ids, marks in rows]
    rows = [(ids, marks) for ids, marks in rows if marks]
    packed = pack(((ids, 1) for ids, _ in rows), block, split_long=False)
    packed.mask.zero_()
    starts = ((packed.positions == 0) & (packed.documents != PADDING)).nonzero().tolist()
    for (index, start), (_, marks) in zip(starts, rows, strict=True):
        packed.mask[index, [start + at - 1 for at in marks]] = True
    return packed


def decoding_batches(prompts: int) -> int:
    """Into how many batches prompts are divided."""
    return -(-prompts // BATCH)


def decode_all(target: ServedTarget, draft: Any, prompts: Sequence[Prompt], settings: Replay) -> list[Decoded]:
    """Every prompt decoded, some of them together."""
    texts: list[Decoded] = []
    progress = Progress("replay, batches decoded", decoding_batches(len(prompts)))
    for start in range(0, len(prompts), BATCH):
        texts += target.decode(draft, prompts[start : start + BATCH], settings.new_tokens, settings.length)
        progress.step()
    return texts


def collect(
    target: ServedTarget, draft: Any, prompts: Sequence[Prompt], settings: Replay, block: int, path: Path
) -> dict[str, Any]:
    """Decode train prompts with the draft, write the rejected positions to `path`; how many there are."""
    texts = decode_all(target, draft, prompts, settings)
    packed = pack_rejected(prompts, texts, block)
    write_atomically(path, packed.save)
    return {
        "prompts": len(prompts),
        "tokens": sum(len(text.tokens) for text in texts),
        "rounds": sum(len(text.rounds) for text in texts),
        "rejected": int(packed.mask.sum()),
        "blocks": len(packed),
    }


def compare_rounds(
    before: Sequence[Decoded], after: Sequence[Decoded], resamples: int, confidence: float
) -> dict[str, Any]:
    """Whether tokens per round rose, with the interval of the difference, paired by prompt.

    The replay is kept only when the whole interval lies above 0: a measured draft is not replaced by one that may be
    worse.
    """

    def sums(texts: Sequence[Decoded]) -> tuple[list[float], list[float]]:
        tokens = [float(sum(own.accepted + 1 for own in text.rounds)) for text in texts]
        return tokens, [float(len(text.rounds)) for text in texts]

    (old_tokens, old_rounds), (new_tokens, new_rounds) = sums(before), sums(after)
    difference = paired_ratio_interval(old_tokens, old_rounds, new_tokens, new_rounds, resamples, confidence)
    return {
        "before": sum(old_tokens) / max(1.0, sum(old_rounds)),
        "after": sum(new_tokens) / max(1.0, sum(new_rounds)),
        "difference": asdict(difference),
        "prompts": len(before),
        "kept": difference.low > 0,
    }


def enter_replay(work: Training) -> bool:
    """Go back to the best weights and find the positions where their drafts are rejected; False where there is none."""
    settings, run = work.settings.replay, work.run
    assert settings is not None
    path = run.path("replay", "blocks.safetensors")
    if work.state.get("replay") is None:
        take_best(work)
        if work.state["best"] is None:
            save_weights(run, BEST, work.learner, work.is_main, work.state["step"])

        def collected(draft: Any) -> dict[str, Any]:
            prompts = replay_prompts(read_answers(run, "train"), settings.prompts)
            return collect(served_target(work), draft, prompts, settings, work.recipe.corpus.block, path)

        began = time.monotonic()
        with memory_explained(replaying, work):
            work.state["replay"] = figures = measured_on_main(work, collected)
        run.record(REPLAY_STAGE, batches=decoding_batches(figures["prompts"]), seconds=time.monotonic() - began)
        run.say("  replay: {rejected} rejected positions in {rounds} rounds of {prompts} prompts".format_map(figures))
    packed = Packed.load(path)
    if not len(packed):
        run.say("  replay: nothing was rejected, so there is nothing to learn")
        if work.is_main:
            write_json(run.path("replay", "decision.json"), {"collected": work.state["replay"], "kept": False})
        return False
    with memory_explained(replaying, work):  # the target, which other processes have not loaded yet
        work.replayed = work.online(packed)
    return True


def is_replayed(work: Training) -> bool:
    """Whether the present weights were trained on the replay, in this command or in the one that it resumes."""
    collected = work.state.get("replay")
    return collected is not None and collected["blocks"] > 0 and work.state["step"] == work.steps


def decide_on_replay(work: Training) -> None:
    """Keep the replayed weights only if they are better on validation prompts; writes replay/decision.json."""
    settings, run = work.settings.replay, work.run
    assert settings is not None
    save_weights(run, REPLAYED, work.learner, work.is_main, work.state["step"])
    _, prompts = validation_prompts(work)
    decoded: list[list[Decoded]] = []
    began = time.monotonic()
    for name in (BEST, REPLAYED):
        load_weights(run, name, work.learner)
        with memory_explained(replaying, work):
            decoded.append(
                measured_on_main(work, lambda draft: decode_all(served_target(work), draft, prompts, settings))
            )
    run.record(REPLAY_STAGE, batches=2 * decoding_batches(len(prompts)), seconds=time.monotonic() - began)
    decision = compare_rounds(decoded[0], decoded[1], RESAMPLES, CONFIDENCE)
    if work.is_main:
        record = decision | {"collected": work.state["replay"], "confidence": CONFIDENCE}
        write_json(run.path("replay", "decision.json"), record)
    if not decision["kept"]:
        load_weights(run, BEST, work.learner)
    gain = decision["difference"]
    run.say(
        f"  replay: tokens per round {decision['before']:.3f} -> {decision['after']:.3f} on {decision['prompts']} "
        f"validation prompts, {gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]: "
        + ("kept" if decision["kept"] else "not kept, the weights before it are taken")
    )
