"""Stage `speedup`: the draft with the target as it is and, where asked for, with the same target grown."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distill.benchmark.arms import make_arms, trial_rows
from distill.benchmark.calibrate import (
    calibrate_run,
    curve_costs,
    load_calibrations,
    load_ranks,
    load_texts,
    validation_prompts,
    with_overhead,
)
from distill.benchmark.compare import (
    PLAIN,
    TORCH_NOISE,
    choose_length,
    compare_library,
    judge_identity,
    rounding_noise,
    run_trials,
    summarise_trials,
)
from distill.benchmark.libraries import llama_generation, transformers_generation
from distill.benchmark.table import as_markdown
from distill.benchmark.tree_choice import Choice, settle_trees
from distill.export.writer import export_gguf
from distill.files import faults_explained, read_json, write_json, write_text
from distill.machine import machine
from distill.models.base import Model
from distill.models.gguf.model import MOST_LEAVES, GgufModel
from distill.models.hugging_face import (
    describe_model,
    end_ids,
    load_model,
    load_target,
    load_tokenizer,
    local_folder,
    pick_device,
    real_tokens,
)
from distill.models.torch_model import TorchModel
from distill.recipe import Recipe, Trial
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.calibration import Calibration
from distill.speculative.configured import check_trials, require_trees
from distill.speculative.cost import StepCosts, measure_steps, predicted_speedup
from distill.speculative.stop_strings import BytesOf, Characters, token_bytes
from distill.surgery.grow import grow
from distill.texts import read_prompts
from distill.vocabulary import Vocabulary

REFERENCE_PROMPTS = {False: 4, True: 2}  # by grown: a grown target takes a minute for each pair of runs
SAMPLES = 3
TREE_ROUNDS = 2, 5  # prompts, and rounds after each that are timed with trees of every size
OVERHEAD_PROMPTS, OVERHEAD_TOKENS = 2, 24  # of validation text, decoded to see what a round costs beyond its steps


def speedup(recipe: Recipe, run: Run) -> list[Path]:
    """Write speedup.json and speedup.md; each pair and backend is a part, kept when the run is interrupted."""
    settings = recipe.speedup
    for line in check_trials(recipe):
        run.say(f"  {line}")
    calibration = calibrate_run(recipe, run)
    parts = []
    for grown in [False, True] if settings.grown is not None else [False]:
        for backend in settings.backends:
            path = run.path("speedup", f"{'grown' if grown else 'shipped'}-{backend}.json")
            if not path.exists():
                write_json(path, _measure_part(recipe, run, backend, grown))
            else:
                run.say(f"  {path.stem}: was there")
            parts.append(read_json(path))
            gc.collect()
    report = {
        "command": run.command,
        "machine": machine(),
        "new_tokens": settings.new_tokens,
        "prompts": settings.prompts,
        "rows": [row for part in parts for row in part["rows"]],
        "trials": [row for part in parts for row in part["trials"]],
        "sampler": Sampler.of(recipe.sampler).describe(),
        "lossy": any(row["lossy"] for part in parts for row in part["trials"]),
        "calibration": calibration,
        "costs": [part["costs"] for part in parts if part["costs"]],
        "trees": [tree for part in parts for tree in part["trees"]],
        "chosen": [part["chosen"] for part in parts],
        "plain_reference": [part["plain_reference"] for part in parts],
        "explanations": [sentence for part in parts for sentence in part["explanations"]],
        "samples": [sample for part in parts for sample in part["samples"]],
        "noise": [part["noise"] for part in parts],
    }
    write_json(run.path("speedup.json"), report)
    write_text(run.path("speedup.md"), as_markdown(report))
    return [run.path("speedup"), run.path("speedup.json"), run.path("speedup.md")]


@dataclass(frozen=True)
class _Pair:
    """Both models of one part, and all that its measurement reads."""

    title: str
    backend: str
    grown: bool
    target: Model
    draft: Model
    prompts: list[list[int]]
    ends: list[int]
    library: Callable[[Sequence[int], int], int]
    library_name: str
    lengths: tuple[int, ...]
    ways: tuple[Trial, ...]
    label: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        label = {"pair": self.title, "grown": self.grown, "backend": self.backend}
        object.__setattr__(self, "label", label)


def _measure_part(recipe: Recipe, run: Run, backend: str, grown: bool) -> dict[str, Any]:
    settings = recipe.speedup
    tokenizer = load_tokenizer(recipe.target.model)
    device = pick_device(recipe.device)
    small = load_target(recipe.target, device)
    ends = end_ids(small.config, tokenizer)
    prompts = [prompt.ids for prompt in read_prompts(run, "test")]
    prompts = prompts[: settings.grown_prompts if grown else settings.prompts]
    lengths = settings.grown_lengths if grown else settings.lengths
    ways = settings.grown_trials if grown else settings.trials
    trees = [way for way in ways if way.drafter == "tree"]
    leaves = max((way.drawn_nodes or way.nodes or recipe.profile.max_tokens - 1 for way in trees), default=0)
    title = "draft + target"
    big = small
    if grown:
        assert settings.grown is not None
        big = grow(small.float().cpu(), settings.grown.tile, settings.grown.layers).to(device)
        title = f"draft + target grown to {describe_model('', big)['parameters'] / 1e6:.0f}M"
    run.say(f"  {title}, {backend}")
    scratch = run.path("speedup", ".scratch")
    try:
        if backend == "pytorch":
            vocabulary = real_tokens(big.config, tokenizer)
            target: Model = TorchModel(big, vocabulary)
            draft: Model = TorchModel(load_model(str(run.path("draft")), recipe.target.dtype, device), vocabulary)
            library, name = transformers_generation(big, ends), "transformers generate"
        else:
            context = recipe.corpus.block
            path = run.path("gguf", f"target-{settings.outtype}.gguf")
            if grown:
                with faults_explained(scratch):
                    scratch.mkdir(parents=True, exist_ok=True)
                    big.save_pretrained(scratch / "grown")
                    tokenizer.save_pretrained(scratch / "grown")
                path = scratch / "grown.gguf"
                export_gguf(scratch / "grown", path, settings.outtype, f"{recipe.name} target, grown")
                del big
            small_path = run.path("gguf", f"draft-{settings.outtype}.gguf")
            leaves = min(leaves, MOST_LEAVES)
            target, draft = (
                GgufModel(file, context=context, threads=recipe.threads, max_leaves=leaves)
                for file in (path, small_path)
            )
            library, name = llama_generation(path, context, recipe.threads, ends), "llama-cpp-python generate"
        pair = _Pair(title, backend, grown, target, draft, prompts, ends, library, name, lengths, ways)
        return _measure_pair(recipe, run, pair)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _measure_pair(recipe: Recipe, run: Run, pair: _Pair) -> dict[str, Any]:
    settings, evaluation = recipe.speedup, recipe.eval
    target, draft, prompts, lengths = pair.target, pair.draft, pair.prompts, pair.lengths
    if any(way.drafter == "tree" for way in pair.ways):
        require_trees(target, draft)
    tokenizer = load_tokenizer(recipe.target.model)
    reference = compare_library(
        target, pair.library, prompts[: REFERENCE_PROMPTS[pair.grown]], settings.new_tokens, pair.ends
    )
    priced = any(way.priced for way in pair.ways)
    most = max(lengths)
    if priced and pair.grown:
        trees = [recipe.profile.max_tokens - 1] if any(way.chosen for way in pair.ways) else []
        most = max([most, *(way.length for way in pair.ways), *trees])
    depth = min(recipe.profile.depth, target.capacity - most - 1)
    counts = range(1, most + 2) if priced and pair.grown else [1, *(n + 1 for n in lengths)]
    steps = measure_steps(target, counts, depth, recipe.profile.repeats, target.vocabulary_size)
    costs = {m: found[0] for m, found in steps.items()}
    draft_steps = measure_steps(draft, [1, 2], depth, recipe.profile.repeats, draft.vocabulary_size)
    draft_cost = draft_steps[1][0]
    fitted: dict[str, Calibration] = {}
    if any(way.learns for way in pair.ways):
        fitted = load_calibrations(run.path("speedup", "calibration.json"))
    price = StepCosts((1.0, 1.0), 0.0, 0.0)
    choices: list[Choice] = []
    if priced:
        price = (
            StepCosts(tuple(costs[m] for m in counts), draft_cost, draft_steps[2][0])
            if pair.grown
            else curve_costs(run, pair.backend)
        )
        texts = validation_prompts(run, recipe.answers.prompt_tokens, OVERHEAD_PROMPTS)
        price = with_overhead(target, draft, texts, OVERHEAD_TOKENS, pair.ends, price)
    if any(way.chosen for way in pair.ways):
        rates = load_ranks(run.path("speedup", "calibration.json")).rates()
        written = load_texts(run.path("speedup", "validation.json"))
        choices = settle_trees(recipe, pair.ways, target, draft, written, TREE_ROUNDS, pair.ends, price, fitted, rates)
    settled = {choice.way: choice for choice in choices}
    arms = make_arms(recipe, pair.ways, draft, pair.ends, price, fitted, {c.way: c.tree for c in choices})
    trials = run_trials(
        target, draft, prompts, lengths, settings.new_tokens, pair.ends, f"{pair.backend}, prompts", arms
    )
    noise, together = TORCH_NOISE, 0
    if pair.backend == "gguf" or recipe.target.dtype != "float32" or recipe.target.quantise is not None:
        together = max(lengths) + 1
        longest = next(t.decoded.tokens for t in trials if t.way == PLAIN)
        noise = max(
            rounding_noise(target, prompts[0], longest[start : start + length + 1])
            for length in lengths
            for start in (0, 16)
            if len(longest) > start + length
        )
    sampled = {arm.title for arm in arms if arm.rules.sampler.temperature > 0}
    verdicts = judge_identity(target, prompts, [t for t in trials if t.way not in sampled], noise, together)
    accepted = _accepted_by_position(run, max(lengths))
    rows = summarise_trials(trials, lengths, evaluation.resamples, evaluation.confidence)
    for row in rows:
        length = row["length"]
        row.update(pair.label)
        row["predicted"] = (
            predicted_speedup(costs, draft_cost, length, accepted) if length and length <= len(accepted) else None
        )
        row.update(verdicts.get(length, {"identical": len(prompts), "excused": 0, "different": 0}))
    others = trial_rows(recipe, pair.ways, arms, trials, verdicts)
    for row in others:
        if row["way"] in settled:
            choice = settled[row["way"]]
            row |= {"way": choice.told, "nodes": choice.nodes, "predicted": choice.speedup}
    chosen = choose_length(trials, lengths, evaluation.resamples, evaluation.confidence)
    explanations = explain(pair.title, pair.backend, costs, draft_cost, rows, chosen)
    explanations += [f"{pair.title}, {pair.backend}: {choice.sentence()}" for choice in choices]
    for sentence in explanations:
        run.say(f"    {sentence}")
    best = (
        chosen["length"]
        or max((row for row in rows if row["length"]), key=lambda row: float(row["tokens_per_second"]))["length"]
    )
    samples: list[dict[str, Any]] = []
    if not pair.grown:
        bytes_of = token_bytes(Vocabulary.read(local_folder(recipe.target.model)))
        samples = _samples(tokenizer, bytes_of, prompts, [t for t in trials if t.way == best], pair.label)
    for model in (target, draft):
        model.close()
    return {
        "rows": rows,
        "trials": [pair.label | row for row in others],
        "costs": pair.label | asdict(price) if priced else None,
        "trees": [pair.label | choice.as_json() for choice in choices],
        "chosen": {**pair.label, **chosen},
        "plain_reference": {**pair.label, "library": pair.library_name, **reference},
        "explanations": explanations,
        "samples": samples,
        "noise": {**pair.label, "largest_logit_difference": noise},
    }


def _accepted_by_position(run: Run, longest: int) -> list[float]:
    """Acceptance at positions 1.. from the evaluation, as far as positions were reached."""
    path = run.path("eval.json")
    if not path.exists():
        return []
    rates = []
    for row in read_json(path)["positions"].get("after", [])[:longest]:
        if not row["drafted"]:
            break
        rates.append(float(row["rate"]))
    return rates


def explain(
    title: str, backend: str, costs: dict[int, float], draft: float, rows: list[dict[str, Any]], chosen: dict[str, Any]
) -> list[str]:
    """Sentences that trace the measured speedup to the cost curve, every number in them measured."""
    single = costs[1]
    row = max((r for r in rows if r["length"]), key=lambda r: float(r["tokens_per_second"]))
    length = int(row["length"])
    bound = (length + 1) / (costs[length + 1] / single + length * draft / single)
    where = f"{title}, {backend}"
    sentences = [
        f"{where}: T(1) = {single * 1e3:.2f} ms, T({length + 1}) = {costs[length + 1] / single:.2f} T(1), a draft step "
        f"costs {draft / single:.2f} T(1). If every drafted token were accepted, {length} a round would give "
        f"{bound:.2f}x; with {row['tokens_per_round']:.2f} tokens a round it gave {row['speedup']:.2f}x over the whole "
        "request, prompt included."
    ]
    if bound < 1:
        sentences.append(f"{where}: at this cost ratio no draft, however good, makes {length} drafted tokens pay.")
    if chosen["length"] == 0:
        sentences.append(
            f"{where}: on the prompts used for choosing, plain decoding was fastest: do not speculate here."
        )
    else:
        sentences.append(
            f"{where}: {chosen['length']} drafted tokens a round were chosen on the even prompts; on the odd ones "
            f"they give {chosen['speedup']:.2f}x [{chosen['speedup_low']:.2f}, {chosen['speedup_high']:.2f}]."
        )
    return sentences


def _samples(
    tokenizer: Any, bytes_of: BytesOf, prompts: Sequence[Sequence[int]], trials: Sequence[Any], label: dict[str, Any]
) -> list[dict[str, Any]]:
    """A few texts, cut into pieces that the draft proposed and pieces that the target wrote."""
    samples: list[dict[str, Any]] = []
    for trial in trials[:SAMPLES]:
        segments: list[dict[str, Any]] = []
        pieces: list[tuple[list[int], bool]] = []
        for token, from_draft in zip(trial.decoded.tokens, trial.decoded.from_draft, strict=True):
            if pieces and pieces[-1][1] == from_draft:
                pieces[-1][0].append(token)
            else:
                pieces.append(([token], from_draft))
        characters = Characters()
        for number, (ids, from_draft) in enumerate(pieces, start=1):
            said = "".join(characters.add(bytes_of(token)) for token in ids)
            said += characters.finish() if number == len(pieces) else ""
            segments.append({"text": said, "kind": "accepted" if from_draft else "target"})
        samples.append(
            {
                "prompt": tokenizer.decode(list(prompts[trial.prompt])),
                "backend": label["backend"],
                "pair": label["pair"],
                "length": trial.way,
                "segments": segments,
            }
        )
    return samples
