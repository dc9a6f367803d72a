"""Thousands of texts through the same two models: no leak, no drift between cache and text, interrupted and continued.

    python scripts/fuzz/soak.py --backend pytorch --to soak-pytorch.json     # 10,000 prompts; goes on where it stopped
    python scripts/fuzz/soak.py --backend static --to soak-static.json
    python scripts/fuzz/soak.py --backend gguf --to soak-gguf.json

Prompts and texts have random lengths, up to a full context; drafters, length rules, verifiers and samplers take turns.
Of ten texts one is given up between rounds, and one by a signal at any moment, as Ctrl-C would. After each other text:
the target has read what it says it has, and greedy texts are those of plain decoding by models that never drafted
(every tenth text); its next logits are those of a fresh prefill (every tenth). Memory is noted every 250 prompts: its
median over the last fifth of them is compared with that over the second fifth.

In PyTorch the target is a random model of 2 layers and the draft the same with noise on its weights, in llama.cpp the
demo's target drafts for itself in fewer bits: what is looked for does not depend on weights.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from distill.benchmark.identity import TORCH_NOISE
from distill.files import read_json, write_json
from distill.models.base import Model
from distill.models.gguf.model import GgufModel
from distill.models.loaded import torch_decoder
from distill.models.static.static_model import StaticTorchModel
from distill.progress import Progress
from distill.sampler import Sampler
from distill.speculative.costs.curve import StepCosts
from distill.speculative.decode import Decoded, decode, plain
from distill.speculative.draft import Drafter, FallbackDrafter, LookupDrafter, ModelDrafter
from distill.speculative.expected_value import ExpectedValue
from distill.speculative.lengths import AcceptedRatio, Fixed, ProbabilityFloor
from distill.speculative.rules import GREEDY, Rules
from distill.speculative.trees.tree_drafter import TreeDrafter

ROOT = Path(__file__).resolve().parents[2]
CAPACITY = 160
NOTED = 250  # prompts between two readings of memory
LOOKED_AT = 10  # one text of so many is decoded again, and its cache read
NOISE = 0.03  # on the draft's weights
LATEST = 0.02  # seconds until a signal comes
CHAINS = {"gguf": 0.5}  # logit difference between steps of one and of several tokens, by backend
SAMPLED = Sampler(0.9, top_k=20)
COSTS = StepCosts((1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6), 0.1, 0.12, 0.02)


class Interrupted(BaseException):
    """What the signal's handler raises in the middle of anything."""


def interrupt(*_: Any) -> None:
    """The handler."""
    raise Interrupted


class Models(NamedTuple):
    """Two models that serve all texts, and two that check them."""

    target: Any
    draft: Any
    fresh: Any


@contextmanager
def opened(backend: str, scratch: Path) -> Iterator[Models]:
    """The models of a backend."""
    if backend == "gguf":
        from distill.models.conversion.writer import export_gguf

        files = [scratch / f"{outtype}.gguf" for outtype in ("q8_0", "q4_0")]
        for file in files:
            export_gguf(ROOT / "data" / "demo-target", file, file.stem, file.stem)
        made = [GgufModel(file, context=CAPACITY, threads=1, max_leaves=8) for file in (files[0], *files)]
        fresh, target, draft = made
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CAPACITY,
            initializer_range=0.3,
        )
        big = LlamaForCausalLM(config).eval()
        small = copy.deepcopy(big)
        with torch.no_grad():
            for weight in small.parameters():
                weight += NOISE * torch.randn_like(weight)
        make = StaticTorchModel if backend == "static" else torch_decoder
        target, draft, fresh = make(big), make(small), torch_decoder(big)
    try:
        yield Models(target, draft, fresh)
    finally:
        for model in (target, draft, fresh):
            model.close()


def drafter_of(number: int, draft: Model, sampler: Sampler, draws: Any) -> tuple[Drafter, str]:
    """The drafter of a text and its verifier; trees where the models take them."""
    verifier = "token" if sampler.temperature else "greedy"
    makers: list[Any] = [
        lambda: ModelDrafter(draft, Fixed(4), sampler, draws),
        lambda: ModelDrafter(draft, ProbabilityFloor(6, 0.3), sampler, draws),
        lambda: ModelDrafter(draft, ExpectedValue(COSTS), sampler, draws),
        lambda: ModelDrafter(draft, AcceptedRatio(3), sampler, draws),
        lambda: LookupDrafter(5),
        lambda: FallbackDrafter(LookupDrafter(4, shortest=2), ModelDrafter(draft, Fixed(3), sampler, draws)),
        lambda: TreeDrafter(draft, sampler, draws, 6, depth=3),
    ]
    makers = makers if draft.max_leaves else makers[:-1]
    made = makers[number % len(makers)]()
    return made, "match" if made.tree and sampler.temperature else verifier


def write_text(models: Models, number: int, found: Counter[str]) -> None:
    """Decode one text, perhaps give it up, and check what it left behind; AssertionError for any fault."""
    draws = random.Random(number)
    target, draft = models.target, models.draft
    prompt = [draws.randrange(1, target.vocabulary_size) for _ in range(draws.randrange(1, CAPACITY - 1))]
    limit = draws.randrange(1, 33)
    sampler = SAMPLED if number % 3 == 0 else GREEDY
    drafter, verifier = drafter_of(number, draft, sampler, draws.random)
    rules = Rules(sampler, verifier, random=draws.random)
    result = Decoded()
    rounds = decode(target, drafter, prompt, limit, rules, result)
    given_up = {0: "between rounds", 1: "by a signal"}.get(draws.randrange(20) // 2)
    if given_up == "by a signal":
        try:
            signal.setitimer(signal.ITIMER_REAL, draws.uniform(1e-5, LATEST))
            for _ in rounds:
                pass
            given_up = "by a signal that came too late"
        except Interrupted:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    elif given_up:
        for _, _ in zip(rounds, range(draws.randrange(1, 4)), strict=False):
            pass
        rounds.close()
    else:
        for _ in rounds:
            pass
        check_end(models, prompt, result, limit)
        found["tokens"] += len(result.tokens)
        found["accepted"] += sum(r.accepted for r in result.rounds)
    found[f"given up {given_up}" if given_up else "whole"] += 1
    if number % LOOKED_AT == 0 and not given_up:
        check_text(models, prompt, result, limit, sampler)
        found["looked at"] += 1


def check_end(models: Models, prompt: Sequence[int], result: Decoded, limit: int) -> None:
    """The text has the length asked for, and the target holds all of it but the last token."""
    room = min(limit, CAPACITY + 1 - len(prompt))
    assert len(result.tokens) == room, f"{len(result.tokens)} tokens instead of {room}"
    held = len(prompt) + len(result.tokens) - 1
    assert models.target.lengths == [held], f"the cache holds {models.target.lengths} tokens, the text has {held}"


def check_text(models: Models, prompt: Sequence[int], result: Decoded, limit: int, sampler: Sampler) -> None:
    """The cache says of the text what a fresh prefill says; greedy texts are those of plain decoding, ties aside."""
    text, fresh = [*prompt, *result.tokens], models.fresh
    noise = CHAINS.get("gguf" if isinstance(fresh, GgufModel) else "", TORCH_NOISE)
    if models.target.lengths[0] < CAPACITY:
        fresh.rollback([0])
        expected = fresh.extend(text, want=[len(text) - 1]).full()
        found = models.target.extend(text[-1:], want=[0]).full()
        worst = float((found - expected).abs().max())
        assert worst <= noise, f"the cache has drifted: logits differ by {worst:.2g}"
    if sampler.temperature == 0:
        alone = plain(fresh, prompt, limit).tokens
        first = next((i for i, both in enumerate(zip(alone, result.tokens, strict=True)) if both[0] != both[1]), None)
        if first is not None:
            fresh.rollback([0])
            logits = fresh.extend([*prompt, *alone[:first]], want=[len(prompt) + first - 1]).full()[0]
            apart = float((logits[alone[first]] - logits[result.tokens[first]]).abs())
            assert apart <= 2 * noise, f"token {first} is not the target's: its logit is {apart:.2g} below the best"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("pytorch", "static", "gguf"), required=True)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--to", type=Path, required=True, help="JSON file: what was done; the same command goes on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, interrupt)
    state = {"backend": options.backend, "next": 0, "counts": {}, "memory": []}
    if options.to.exists():
        state = read_json(options.to, {"backend": str, "next": int, "counts": dict, "memory": list})
    if state["backend"] != options.backend:
        sys.exit(f"{options.to} is of backend {state['backend']}: give another file")
    counts, readings = Counter(state["counts"]), list[int]()
    process, progress = psutil.Process(), Progress(options.backend, options.prompts)
    progress.step(state["next"])
    with tempfile.TemporaryDirectory() as scratch, opened(options.backend, Path(scratch)) as models:
        for number in range(state["next"], options.prompts):
            write_text(models, number, counts)
            progress.step()
            if (number + 1) % NOTED == 0:
                gc.collect()
                readings.append(process.memory_info().rss)
                kept = {"memory": [*state["memory"], readings], "next": number + 1, "counts": dict(counts)}
                write_json(options.to, state | kept)
    fifth = len(readings) // 5
    if fifth:
        early, late = (statistics.median(readings[start : start + fifth]) for start in (fifth, 4 * fifth))
        growth = (late - early) / (3 * fifth * NOTED)
        print(f"{options.backend}: {growth:+.0f} bytes a prompt, from {early / 1e6:.0f} to {late / 1e6:.0f} MB")
    print(f"{options.backend}: {options.prompts} prompts, {dict(counts)}")


if __name__ == "__main__":
    main()
