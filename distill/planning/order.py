"""The order in which to try drafts for a target, as in docs/choosing.md: a head, a lookup, a sibling, training.

Each line has the number that it rests on: costs of this machine, and acceptance of the nearest pair that was measured.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distill.data.prompts import sources_of
from distill.decoding.costs import Costs
from distill.engines.pairs import compare_pair
from distill.engines.server_commands import MORE, MOST_BESIDE, shipped_heads
from distill.engines.torch.hugging_face import load_config, local_snapshot
from distill.errors import DistillError
from distill.files import is_gguf, parts_of
from distill.folders import present_files
from distill.gguf.head import open_head
from distill.measuring.evaluation import EvaluationOptions, Grid, evaluate_grid, prompts_of
from distill.planning.plan import Case
from distill.recipe import Corpus, Evaluate, Gguf, Sampler, is_path
from distill.tables import Interval

# docs/benchmarks.md, to which a test holds these. Tokens a round and tokens drafted of SmolLM2's lookup and table (the
# demo, PyTorch).
LOOKED_UP = {"a lookup": (1.39, 1.25), "a table": (1.68, 2.19)}
SIBLING = 0.79  # acceptance probability of Qwen2.5-Coder's 0.5B
TRIMMED = 8192  # tokens of a smaller head
# Acceptance of SmolLM2, cut to 5 layers, after this many positions of answers, and what twice as many add.
POSITIONS, REACHED, DOUBLING = 1.15e6, 0.39, 0.049


# Greedy acceptance probability of the same sibling by a tuned target: as it is, and adapted (docs/tuned-target.md).
# Training on 74,656 tokens of a stock target gained STOCK_GAIN, by rejection sampling (docs/benchmarks.md).
TUNED, ADAPTED, STOCK_GAIN = 0.80, 0.98, 0.005
ENOUGH = 0.95  # Nearly ADAPTED: a sibling that is accepted this often has little to gain.
PROMPTS, TOKENS = 8, 64  # answers on which a sibling's acceptance is measured


@dataclass(frozen=True)
class MeasuredAcceptance:
    """A draft's greedy acceptance probability on a target's own answers; `rates` are conditional, by draft position."""

    probability: Interval
    prompts: int
    tokens: int
    rates: list[float]


def measured_acceptance(
    target: str, draft: str, prompts: Sequence[Path], threads: int | None, gguf: Gguf | None, dtype: str = "auto"
) -> MeasuredAcceptance:
    """Measure it on the first prompts of these files; `dtype` is for folders. DataError for fewer than 4 prompts,
    PairError for models that do not fit."""
    corpus = Corpus(sources=sources_of(prompts))
    settings = Evaluate(new_tokens=TOKENS)
    options = EvaluationOptions(Sampler(temperature=0.0), settings, "")
    grid = Grid(target, [draft], corpus.block, (), threads=threads, gguf=gguf, dtype=dtype)
    report = evaluate_grid(grid, prompts_of(corpus, PROMPTS), options)
    answers = report.domains["answers"]["draft"]
    rates = [one.rate.mean for one in report.positions["draft"] if one.drafted]
    return MeasuredAcceptance(answers.acceptance_greedy, answers.prompts, answers.tokens, rates)


def advice(target: str, draft: str, measured: MeasuredAcceptance) -> str:
    """Whether to adapt a sibling to its target, by its measured acceptance."""
    mean = measured.probability
    found = (
        f"The sibling is accepted {mean.mean:.2f} [{mean.low:.2f}, {mean.high:.2f}] on the target's answers to "
        f"{measured.prompts} prompts ({measured.tokens} tokens)"
    )
    if mean.low >= ENOUGH:
        return f"{found}: adapting it would gain little."
    base, adapter = parts_of(target)
    named = [f"target.model={base}", *([] if adapter is None else [f"target.adapter={adapter}"])]
    command = shlex.join(["distill", "train", "adapt.yaml", *named, f"cut.donor={draft}"])
    return (
        f"{found}. Adapting took a sibling of a tuned target from {TUNED:.2f} to {ADAPTED:.2f}. For a stock target it "
        f"gained {STOCK_GAIN}. If yours is tuned: `distill recipes adapt`, then `{command}`."
    )


def decide(target: str, case: Case | None) -> list[str]:
    """A line for each answer up to the first that suffices; without the costs of a `case`, that alone."""
    heads = [line for line in shipped_heads(target) if line != MORE]
    if usable := [line for line in heads if "this copy lost it" not in line]:
        return ["1. A head ships with the target, so measure it first.", *usable, MORE]
    if case is None:
        for name, share, _ in siblings(target):
            return [f"3. {name} has its tokens and {share:.2f} of its bytes: measure it first (`distill plan`)."]
        return [
            f"5. Training: a draft of SmolLM2 reached {REACHED} after {POSITIONS / 1e6:.2f} M positions of answers."
        ]
    costs, lines = case.timings[0], ["1. No head ships with the target.", *heads]
    gains = {name: tokens / _relative(costs, 1 + drafted) for name, (tokens, drafted) in LOOKED_UP.items()}
    bound = max(case.speedup(costs, length, [1.0]) for length in case.lengths)
    words = " and ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
    lines.append(f"2. At this target's costs SmolLM2's rounds give {words}; a draft that is always right {bound:.2f}.")
    if max(gains.values()) >= bound or bound <= 1:
        if max(gains.values()) <= 1:
            return [*lines, "No draft gains more. Plain decoding is the fastest."]
        measured = f"distill speedup {shlex.quote(target)} --prompts FILE --lengths 0"
        return [
            *lines,
            f"No draft gains more. Measure them: `{measured} -C drafter=lookup,rule=expected-value -C drafter=table`.",
        ]
    found = list(siblings(target))
    for name, share, trimmed in sorted(found, key=lambda one: one[1]):
        for what, step in ((f"3. {name}", share), (f"4. {name} with a head of {TRIMMED} tokens", trimmed)):
            needed = _needed(case, step)
            pays = "never pays" if math.isinf(needed) else f"pays from {needed:.2f}"
            lines.append(f"{what}: a step of {step:.2f} T(1) {pays}; siblings have {SIBLING}.")
            if needed < SIBLING:
                if what.startswith("3"):
                    pair = shlex.join([target, name])
                    return [*lines, f"Measure it: `distill speedup {pair} --prompts FILE`."]
                donor = shlex.quote(f"cut.donor={name}")
                return [*lines, f"Make it: `distill train RECIPE {donor} cut.trim={TRIMMED} train.steps=0`."]
    if not found:
        lines.append("3. No smaller model with the target's tokens is next to the target or in the hub cache.")
    needed = _needed(case, step := costs.draft / costs.target[0])
    if math.isinf(needed):
        return [*lines, f"5. Training cannot make a step of {step:.2f} T(1) pay: cut the draft further."]
    positions = POSITIONS * 2 ** max((needed - REACHED) / DOUBLING, -8.0)
    return [
        *lines,
        f"5. Training: this draft pays from {needed:.2f}, by SmolLM2's slope (+{DOUBLING} a doubling, {REACHED} after "
        f"{POSITIONS / 1e6:.2f} M) after {positions / 1e6:.2g} M positions of answers.",
    ]


def _relative(costs: Costs, tokens: float) -> float:
    """T(m) in T(1) for a number of tokens between two that were timed; the last one's beyond."""
    whole = min(int(tokens), len(costs.target))
    low, high = costs.target[whole - 1], costs.target[min(whole, len(costs.target) - 1)]
    return (low + (high - low) * (tokens - int(tokens))) / costs.target[0]


def _needed(case: Case, step: float) -> float:
    """The least conditional acceptance from which a draft whose step costs `step` T(1) pays; else infinite."""
    costs = replace(case.timings[0], draft=step * case.timings[0].target[0], draft_two=step * case.timings[0].target[0])
    return min(case.needed(costs, length) for length in case.lengths)


def siblings(target: str) -> Iterator[tuple[str, float, float]]:
    """Smaller models with the target's tokens, beside its file or folder or in the hub's cache: each with its share of
    the target's bytes, and that with a smaller head."""
    base, _ = parts_of(target)
    with contextlib.suppress(DistillError, OSError):
        whole = _bytes(base)[0]
        for name in list(_beside(base))[:MOST_BESIDE]:
            with contextlib.suppress(DistillError, OSError):
                size, head, rows = _bytes(name)
                if size < 0.75 * whole and compare_pair(target, name).distill is None:
                    yield name, size / whole, (size - head * max(0.0, 1 - TRIMMED / rows)) / whole


def _beside(target: str) -> Iterator[str]:
    if is_gguf(target):
        yield from map(str, sorted(set(Path(target).parent.glob("*.gguf")) - {Path(target)}))
    elif is_path(target):
        yield from (str(one.parent) for one in sorted(Path(target).parent.glob("*/config.json")))
    else:
        from huggingface_hub import CacheNotFound, scan_cache_dir

        with contextlib.suppress(CacheNotFound):
            yield from sorted(one.repo_id for one in scan_cache_dir().repos if one.repo_type == "model")


def _bytes(reference: str) -> tuple[int, float, int]:
    """The bytes of a model's weights and of its head, and the head's rows."""
    if is_gguf(reference):
        head = open_head(Path(reference))
        name = "output.weight" if "output.weight" in head.sizes else "token_embd.weight"
        return sum(head.sizes.values()), head.sizes[name], head.shapes[name][-1]
    config, folder = load_config(reference).get_text_config(), local_snapshot(reference)
    size = sum(path.stat().st_size for path in present_files(folder)) if folder else 0
    return size, 2.0 * config.vocab_size * config.hidden_size, config.vocab_size
