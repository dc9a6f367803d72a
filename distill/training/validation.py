"""Acceptance on the validation split: drafts are decoded and verified as they will be served, and the best are kept.

Where the target is not loaded, nothing is decoded: at each position of its validation answers, the stored distribution
and the draft's give the chance that a drafted token is accepted: the acceptance probability. Legend: B prompts, γ draft
length, S positions, c of them at once, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distill import divergences
from distill.data.packing import scored_states
from distill.data.samples import Sample, prompt_seed, read_prompts
from distill.decoding.batch import decode_batch
from distill.decoding.decode import Decoded
from distill.decoding.rules import Rules
from distill.devices import agree, as_float64, is_main, memory_explained
from distill.engines.loaded import BatchedTorchModel, growing_decoder
from distill.engines.torch.hugging_face import end_ids, load_tokenizer, trimmed_head
from distill.files import from_json
from distill.recipe import Recipe
from distill.run import Run
from distill.sampler import Sampler
from distill.teacher.distributions import TeacherChunk, head_logits
from distill.teacher.store import TeacherStore, held_out
from distill.training.learner import CHUNK
from distill.training.saved import (
    ACCEPTANCE_STAGE,
    BEST,
    STORED,
    EvaluatedWeights,
    load_weights,
    save_weights,
    step_of_weights,
)
from distill.training.setup import Training
from distill.training.step import Verifying, protocol_of

# ── The message when memory runs out: during which work, and which settings to lower ──

LENGTH = 4  # tokens drafted where weights are judged
FREE = "free memory that other programs hold, and the same command goes on from the last checkpoint"


def advice(recipe: Recipe, doing: str, state: dict[str, Any] | None = None) -> tuple[str, str]:
    """What was done when memory ran out, behind which step of `state`, and what to do now."""
    place = doing if state is None else f"{doing}, after step {state['step']}"
    settings = recipe.train
    if doing == "in a step":  # what changes nothing but rounding
        blocks = f"lower train.micro_batch (now {settings.micro_batch or settings.batch})"
        return place, f"{blocks}, or set train.checkpointing=true; {FREE}"
    if doing == "while weights were evaluated" and settings.acceptance is not None and recipe.target.load:
        lengths = f"train.acceptance.prompts (now {settings.acceptance.prompts}) or train.acceptance.new_tokens"
        return place, f"lower {lengths} and train again (--redo train), or {smaller_target(recipe)}"
    if doing == "while the draft was loaded":
        draft = "choose a smaller draft (cut.layers, cut.mlp_width) or train.adapter={base: int4}"
        return place, f"{draft}; {smaller_target(recipe)}" if recipe.teacher.kind == "online" else draft
    return place, FREE


def smaller_target(recipe: Recipe) -> str:
    """Advice for a target that takes less memory of this accelerator."""
    spread = "" if recipe.target.shard else "set target.shard=true where one process has several accelerators, or "
    smaller = {None: "target.quantise=int8 or int4", "int8": "target.quantise=int4", "int4": ""}[recipe.target.quantise]
    if not smaller:
        return spread + "take a smaller target"
    return f"{spread}set {smaller}, which makes its answers and distributions again"


# ── Acceptance on the validation split ──

VERIFIERS: dict[Verifying, str] = {"sampling": "token", "match": "match", "greedy": "greedy"}


class ServedTarget:
    """A target and how it verifies drafts; `vocabulary` real tokens, `ends` end a text.

    Greedy verification decodes greedily, whatever the sampler.
    """

    def __init__(
        self, model: Any, vocabulary: int, ends: Sequence[int], sampler: Sampler, protocol: Verifying, seed: int
    ) -> None:
        self.model, self.vocabulary, self.ends = model.eval(), vocabulary, tuple(ends)
        self.sampler = Sampler(temperature=0) if protocol == "greedy" else sampler
        self.protocol, self.seed = protocol, seed

    def decode(self, draft: Any, prompts: Sequence[Sample], new_tokens: int, length: int) -> list[Decoded]:
        """Decode B prompts with γ = `length`; each has random numbers of its own, the same at every call.

        Together, or one by one with models that take no rows of different lengths.
        """
        rules = Rules(self.sampler, VERIFIERS[self.protocol], self.ends)
        randoms = [random.Random(prompt_seed(self.seed, prompt.id)).random for prompt in prompts]
        ids = [one.prompt for one in prompts]
        target, small = (growing_decoder(model, self.vocabulary, prepack=False) for model in (self.model, draft))
        decode = partial(decode_batch, limit=new_tokens, rules=rules, length=length, argmax=self.protocol == "match")
        if not (target.max_leaves and small.max_leaves):
            alone = zip(ids, randoms, strict=True)
            return [decode(target, small, [own], randoms=[draw])[0] for own, draw in alone]
        rows = [BatchedTorchModel(model, len(prompts), self.vocabulary) for model in (self.model, draft)]
        return decode(rows[0], rows[1], ids, randoms=randoms)

    @torch.inference_mode()
    def expected(
        self, draft: Any, prompts: Sequence[Sample], texts: Sequence[Sequence[int]]
    ) -> list[tuple[float, int]]:
        """Of each of these B texts, which follow the prompts, the sum of the probability to be accepted over the
        positions that the draft's context reaches, and their number.

        On the same texts at each call and without chance, so that two drafts are compared far more sharply than by
        decoding as many tokens with each.
        """
        sums: list[tuple[float, int]] = []
        for prompt, text in zip(prompts, texts, strict=True):
            whole = [*prompt.prompt, *text][: draft.config.max_position_embeddings]
            if (count := len(whole) - len(prompt.prompt)) <= 0:
                sums.append((0.0, 0))
                continue
            ids = torch.tensor([whole], device=self.model.device)
            own, drafts = (self._logits(model, ids, count) for model in (self.model, draft))
            if self.protocol == "greedy":
                chances = divergences.acceptance_greedy(own, drafts)
            elif self.protocol == "match":
                chances = divergences.acceptance_match(self.sampler.probabilities(own), drafts)
            else:
                chances = divergences.acceptance_sampling(*map(self.sampler.probabilities, (own, drafts)))
            sums.append((round(float(as_float64(chances).sum()), 6), count))
        return sums

    def _logits(self, model: Any, ids: Tensor, count: int) -> Tensor:
        """The logits [count, V] that predict the last `count` of ids [1, S]."""
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1, : self.vocabulary]
        return logits.float()


def decoded_acceptance(texts: Sequence[Decoded]) -> dict[str, Any]:
    """Conditional acceptance (accepted ÷ reached) and tokens per round of some decoded texts; None where nothing was
    drafted, as where the prompts fill the draft's context.

    And of each text how many drafted tokens were accepted and reached, from which intervals follow.
    """
    accepted = [sum(own.accepted for own in text.rounds) for text in texts]
    missed = [sum(own.accepted < own.drafted for own in text.rounds) for text in texts]
    reached = [hit + miss for hit, miss in zip(accepted, missed, strict=True)]
    rounds = sum(len(text.rounds) for text in texts)
    return {
        "acceptance": sum(accepted) / sum(reached) if any(reached) else None,
        "tokens_per_round": (sum(accepted) + rounds) / rounds if any(reached) else None,
        "rounds": rounds,
        "accepted": accepted,
        "reached": reached,
    }


def stored_chances(chunk: TeacherChunk, draft_logits: Tensor, protocol: Verifying) -> tuple[Tensor, Tensor]:
    """The least and the largest chance [c] that a drafted token is accepted, as far as stored entries tell."""
    assert chunk.ids is not None, "a compact store has ids"
    if protocol == "greedy":
        same = (chunk.ids[:, 0] == draft_logits.argmax(-1)).to(draft_logits.dtype)
        return same, same
    bounds = divergences.acceptance_bounds if protocol == "sampling" else divergences.acceptance_match_bounds
    return bounds(chunk.ids, chunk.log_probabilities, chunk.log_tail, draft_logits)


@torch.inference_mode()
def stored_acceptance(recipe: Recipe, run: Run, draft: Any, protocol: Verifying) -> dict[str, Any]:
    """Acceptance probability of a draft on a run's validation answers, from the target's stored distributions on them:
    the mean of the least chances (they choose) and of the largest."""
    store = TeacherStore(run, "validation")
    least = largest = 0.0
    positions = 0
    for block in range(len(held_out(recipe, run, "validation").own)):  # the first ones of the store
        index = torch.tensor([block])
        hidden = scored_states(draft, store.packed.take(index))
        teacher = store.teacher(index, hidden.device)
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            logits = head_logits(draft, hidden[rows])
            logits[:, store.vocabulary :] = -torch.inf
            low, high = stored_chances(teacher.chunk(rows), logits, protocol)
            least, largest = least + float(as_float64(low).sum()), largest + float(as_float64(high).sum())
        positions += len(hidden)
    mean, most = (sums / positions if positions else None for sums in (least, largest))
    return {"acceptance": mean, "most": most, "positions": positions, "measure": STORED}


# ── Acceptance of a training in progress ──


@contextmanager
def served_form(draft: Any, kept: Sequence[int] | None) -> Iterator[Any]:
    """Within the block, the draft as it is served: in evaluation mode, and a trimmed one with the kept head alone."""
    training, caching = draft.training, draft.config.use_cache
    draft.eval()
    try:
        with contextlib.nullcontext() if kept is None else trimmed_head(draft, kept):
            yield draft
    finally:
        draft.config.use_cache = caching
        draft.train(training)


def measure_acceptance(work: Training) -> dict[str, Any]:
    """The acceptance of the present weights in their served form on the validation prompts, computed by the main
    process and the same in every process; every process must call it.

    Decoded with the target: the first texts, whose distribution is the target's alone, are kept, so that the expected
    acceptance of all weights is measured on the same ones. Where the target is not loaded: its probability on stored
    distributions.
    """
    settings, recipe = work.settings.acceptance, work.recipe
    assert settings is not None
    protocol = protocol_of(work.settings, recipe.sampler.temperature)

    def decoded(draft: Any) -> tuple[dict[str, Any], list[list[int]] | None]:
        ends = end_ids(recipe.target.model, load_tokenizer(recipe.target.model))
        sampler = Sampler.of(recipe.sampler)
        target = ServedTarget(work.loaded_target(), work.source.vocabulary, ends, sampler, protocol, recipe.seed)
        prompts = read_prompts(work.run, "validation")[: settings.prompts]
        found = target.decode(draft, prompts, settings.new_tokens, LENGTH)
        texts = [text.tokens for text in found] if work.state["texts"] is None else work.state["texts"]
        sums, counts = zip(*target.expected(draft, prompts, texts), strict=True)
        expected = sum(sums) / sum(counts) if any(counts) else None
        return decoded_acceptance(found) | {"expected_acceptance": expected}, texts

    def stored(draft: Any) -> tuple[dict[str, Any], list[list[int]] | None]:
        return stored_acceptance(recipe, work.run, draft, protocol), None

    measure, value = decoded if recipe.target.load else stored, None
    with work.draft() as present:
        if is_main():
            with served_form(present, work.kept) as draft, torch.compiler.set_stance("force_eager"):
                value = measure(draft)
    figures: dict[str, Any]
    figures, work.state["texts"] = agree(value)
    return figures


# ── The choice of weights ──


def evaluation_due(work: Training) -> bool:
    """Whether the weights are evaluated after this step: at intervals and at the end."""
    settings, step = work.settings.acceptance, work.state["step"]
    return settings is not None and (step == work.settings.steps or step % settings.every == 0)


def evaluate_weights(work: Training) -> None:
    """Measure the present weights and keep them if they are the best so far."""
    state, step, began = work.state, work.state["step"], time.monotonic()
    with memory_explained(advice, work.recipe, "while weights were evaluated", state):
        measured = measure_acceptance(work)
    figures = {name: value for name, value in measured.items() if not isinstance(value, list)}
    seconds = time.monotonic() - began
    work.run.record(ACCEPTANCE_STAGE, step=step, **measured, tokens=state["tokens"], seconds=seconds)
    work.run.redraw()
    found = from_json({"step": step, **figures}, EvaluatedWeights, "the evaluation")
    if math.isnan(found.score):
        work.run.say(f"  step {step}: {found.words}; nothing is chosen by it", warning=True)
        return
    best = None if state["best"] is None else from_json(state["best"], EvaluatedWeights, "the last checkpoint")
    better = best is None or found.score > best.score
    # Before a kill they were, and took the place of `best`; where rounding differs they may not be any more.
    better |= step_of_weights(work.run, BEST) == step
    state["misses"] = 0 if better else state["misses"] + 1
    if better:
        state["best"] = {"step": step, **figures}
        save_weights(work.run, BEST, work.learner, step)
    before = "" if best is None or better else f" (best {best.score:.3f} at step {best.step})"
    work.run.say(f"  step {step}: {found.words}{' (the best so far)' if better else before}")


def ended(work: Training) -> bool:
    """Whether the training is over, by its steps or because patience ran out; its last step is noted."""
    settings, state = work.settings.acceptance, work.state
    if state["step"] < work.settings.steps:
        if settings is None or settings.patience is None or state["misses"] < settings.patience:
            return False
        work.run.say(f"  the training ends early: {state['misses']} evaluations without a better one")
    state["ended"], state["step"] = state["step"], work.settings.steps
    return True


def take_best(work: Training) -> None:
    """Go back to the best weights; without evaluations, or under a sparsity penalty, the last ones stay."""
    best = work.state["best"]
    if best is None or work.penalty is not None:
        return
    load_weights(work.run, BEST, work.learner)
    shown = from_json(best, EvaluatedWeights, "the last checkpoint").words
    work.run.say(f"  the weights of step {best['step']} are taken: {shown}")
    if best["step"] == 0:
        work.run.say("  training gained nothing on the validation prompts", warning=True)
