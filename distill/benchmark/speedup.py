"""Stage `speedup`: the draft with the target as it is and, where asked for, with the same target grown."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distill.benchmark.calibrate import (
    calibrate_run,
    load_calibrations,
    load_ranks,
    load_texts,
    validation_prompts,
)
from distill.benchmark.compare import (
    TimedText,
    choose_length,
    compare_library,
    judge_identity,
    measurements,
    time_texts,
)
from distill.benchmark.explain import Costs, explain
from distill.benchmark.identity import TORCH_NOISE, Identity, rounding_noise
from distill.benchmark.part import Part, open_part
from distill.benchmark.prepared import Prepared, prepare_others, prepare_sweep
from distill.benchmark.samples import sample_texts
from distill.benchmark.table import as_markdown
from distill.benchmark.tree_choice import Choice, choose_trees
from distill.files import write_text
from distill.machine import machine
from distill.models.hugging_face import load_tokenizer
from distill.recipe import Recipe
from distill.recipe.configuration import PLAIN
from distill.recipe.measuring import fixed_length
from distill.results.serialise import read_result, write_result
from distill.results.speedup_results import (
    ChosenLength,
    Measurement,
    Noise,
    PlainReference,
    Sample,
    SpeedupPart,
    SpeedupReport,
)
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.calibration import Calibration
from distill.speculative.configured import check_configurations, require_trees
from distill.speculative.costs.cheapest import cheapest_pair
from distill.speculative.costs.curve import accepted_by_position, shorter_rounds
from distill.speculative.costs.paid import PROMPTS, PaidMeter, measure_paid, prompts_as_long

REFERENCE_PROMPTS = {False: 4, True: 2}  # by grown: a grown target takes a minute for each pair of runs
TREE_ROUNDS = 2, 5  # prompts, and rounds after each that are timed with trees of every size


def speedup(recipe: Recipe, run: Run) -> list[Path]:
    """Write speedup.json and speedup.md; each pair and backend is a part, kept when the run is interrupted."""
    settings = recipe.speedup
    for line in check_configurations(recipe):
        run.say(f"  {line}")
    calibration = calibrate_run(recipe, run)
    parts = []
    for grown in [False, True] if settings.grown is not None else [False]:
        for backend in settings.backends:
            path = run.path("speedup", f"{'grown' if grown else 'shipped'}-{backend}.json")
            if path.exists():
                run.say(f"  {path.stem}: measured before the interruption")
            else:
                with open_part(recipe, run, backend, grown) as part:
                    write_result(path, measure_part(recipe, run, part))
            parts.append(read_result(path, SpeedupPart))
            gc.collect()
    report = SpeedupReport(
        command=run.command,
        machine=machine(),
        prompts=settings.prompts,
        new_tokens=settings.new_tokens,
        sampler=Sampler.of(recipe.sampler).describe(),
        parts=parts,
        calibration=calibration,
        gguf=recipe.gguf.described() if "gguf" in settings.backends else "",
    )
    write_result(run.path("speedup.json"), report)
    write_text(run.path("speedup.md"), as_markdown(report))
    return [run.path("speedup"), run.path("speedup.json"), run.path("speedup.md")]


def measure_part(recipe: Recipe, run: Run, part: Part) -> SpeedupPart:
    """All measurements of one pair: the plain reference, costs, trees, every configuration, and their explanations."""
    if any(one.drafter == "tree" for one in part.configurations):
        require_trees(part.target, part.draft)
    reference = _plain_reference(recipe, part)
    part, costs = _measure_costs(recipe, run, part)
    target, draft = part.target, part.draft
    fitted: dict[str, Calibration] = {}
    if any(one.learns for one in part.configurations):
        fitted = load_calibrations(run.path("speedup", "calibration.json"))
    choices = _choose_trees(recipe, run, part, costs, fitted)
    sweep = prepare_sweep(recipe, part.lengths, draft, part.loaded.ends)
    trees = {choice.title: choice.tree for choice in choices}
    others = prepare_others(recipe, part.configurations, draft, part.loaded.ends, costs.of_rounds, fitted, trees)
    prepared = [*sweep, *others]
    # Costs of the same minutes as the texts: the machine does not stay the same from one minute to the next.
    meter = PaidMeter(
        target, draft, _paid_prompts(recipe, run, part), part.lengths, (False,), recipe.speedup.new_tokens
    )
    title = f"{part.pair.backend}, prompts"
    texts = time_texts(target, draft, part.prompts, recipe.speedup.new_tokens, prepared, title, meter.text)
    meter.until(1)
    costs = replace(costs, during=meter.costs())
    noise, together = rounding(recipe, part, texts)
    identities = judge_identity(target, part.prompts, texts, prepared, noise, together)
    rows = _rows(recipe, run, part, texts, prepared, identities, costs, choices)
    chosen = choose_length(texts, part.lengths, part.pair, recipe.eval.resamples, recipe.eval.confidence)
    explanations = explain(costs, [row for row in rows if row.in_sweep], chosen)
    explanations += [f"{part.pair.pair}, {part.pair.backend}: {choice.sentence()}" for choice in choices]
    for sentence in explanations:
        run.say(f"    {sentence}")
    return SpeedupPart(
        measurements=rows,
        chosen=chosen,
        plain_reference=reference,
        noise=Noise(part.pair.pair, part.pair.backend, part.pair.grown, noise),
        costs=costs.as_result(part.pair),
        trees=[choice.as_result(part.pair) for choice in choices],
        explanations=explanations,
        samples=[] if part.pair.grown else _samples(recipe, part, texts, rows, chosen),
    )


def _plain_reference(recipe: Recipe, part: Part) -> PlainReference:
    pair, prompts = part.pair, part.prompts[: REFERENCE_PROMPTS[part.pair.grown]]
    found = compare_library(part.target, part.library, prompts, recipe.speedup.new_tokens, part.loaded.ends)
    name = part.library_name
    return PlainReference(pair.pair, pair.backend, pair.grown, name, found.ours, found.library, found.ratio)


def _measure_costs(recipe: Recipe, run: Run, part: Part) -> tuple[Part, Costs]:
    """Time single steps and then, with each given the cheapest way, whole rounds on validation text.

    Rounds of the lengths that the configurations may draft are timed. The part is returned with those steps.
    """
    target, draft, profile = part.target, part.draft, recipe.profile
    most = max(part.lengths)
    lengths = [*part.lengths]
    if any(one.priced for one in part.configurations):
        trees = [profile.max_tokens - 1] if any(one.chosen for one in part.configurations) else []
        most = max([most, *(one.most for one in part.configurations if one.priced), *trees])
        lengths = [*range(1, most + 1)]
    depth = min(profile.depth, min(target.capacity, draft.capacity) - most - 1)
    cheapest = cheapest_pair(target, draft, most + 1, depth, profile.repeats)
    steps, padded = cheapest.target_steps, dict[int, int]()
    # Rounds on a device drive the models themselves, whose steps are compiled by size.
    if part.pair.backend != "pytorch" or not recipe.pytorch.static:
        padded, part = cheapest.target.padded, replace(part, target=cheapest.target, draft=cheapest.draft)
        for line in cheapest.describe():
            run.say(f"    {line}")
    texts, new_tokens = _paid_prompts(recipe, run, part), recipe.speedup.new_tokens
    paid = measure_paid(part.target, part.draft, texts, lengths, profile.repeats, new_tokens)
    seconds = {m: steps[padded.get(m, m)][0] for m in steps}
    return part, Costs(seconds, cheapest.draft_steps[1][0], paid, paid)


def _paid_prompts(recipe: Recipe, run: Run, part: Part) -> list[list[int]]:
    """Validation text as long as the prompts of the part."""
    texts = validation_prompts(run, recipe.answers.prompt_tokens, PROMPTS)
    return prompts_as_long(texts, [len(prompt) for prompt in part.prompts])


def _choose_trees(
    recipe: Recipe, run: Run, part: Part, costs: Costs, fitted: Mapping[str, Calibration]
) -> list[Choice]:
    """Choose the tree of every configuration that leaves it open."""
    if not any(one.chosen for one in part.configurations):
        return []
    return choose_trees(
        recipe,
        part.configurations,
        part.target,
        part.draft,
        load_texts(run.path("speedup", "validation.json")),
        TREE_ROUNDS,
        part.loaded.ends,
        costs.of_rounds,
        fitted,
        load_ranks(run.path("speedup", "calibration.json")).rates(),
    )


def rounding(recipe: Recipe, part: Part, texts: Sequence[TimedText]) -> tuple[float, int]:
    """Below which logit difference two tokens count as tied, and how many tokens at once a tie is read with."""
    fine = part.pair.backend == "pytorch" and recipe.target.dtype == "float32" and recipe.target.quantise is None
    if fine:
        return TORCH_NOISE, 0
    longest = next(text.decoded.tokens for text in texts if text.title == PLAIN.title)
    pieces = [longest[start : start + length + 1] for length in part.lengths for start in (0, 16)]
    # A text may end before the longest length.
    noise = max(
        (rounding_noise(part.target, part.prompts[0], piece) for piece in pieces if len(piece) > 1), default=0.0
    )
    return noise, max(part.lengths) + 1


def _rows(
    recipe: Recipe,
    run: Run,
    part: Part,
    texts: Sequence[TimedText],
    prepared: Sequence[Prepared],
    identities: Mapping[str, Identity],
    costs: Costs,
    choices: Sequence[Choice],
) -> list[Measurement]:
    """The measurements, with predictions for fixed lengths and for chosen trees."""
    evaluated = _evaluated_rounds(run, part.prompts, recipe.speedup.new_tokens)
    chosen = {choice.title: choice for choice in choices}
    prompt = round(sum(map(len, part.prompts)) / len(part.prompts))
    rows = measurements(texts, prepared, identities, part.pair, recipe.eval.resamples, recipe.eval.confidence)
    found = []
    for row in rows:
        accepted = accepted_by_position([one for own in evaluated for one in shorter_rounds(own, row.length or 0)])
        if row.length and row.length <= len(accepted):
            predicted = costs.during.predicted_speedup(row.length, accepted, prompt, recipe.speedup.new_tokens)
            row = replace(row, predicted=predicted)
        if row.configuration in chosen:
            choice = chosen[row.configuration]
            row = replace(row, configuration=choice.title_with_tree, nodes=choice.nodes, predicted=choice.speedup)
        found.append(row)
    return found


def _evaluated_rounds(run: Run, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[tuple[int, int]]]:
    """The evaluation's rounds (drafted, accepted) of each of the first test prompts, in order.

    Its texts may be longer than those timed here, whose `new_tokens` alone count: acceptance differs by depth. None
    before the evaluation has run.
    """
    path = run.path("rounds.parquet")
    if not path.exists():
        return []
    import pyarrow.parquet

    wanted = [("draft", "=", "after"), ("prompt", "<", len(prompts))]
    columns = ["prompt", "depth", "drafted", "accepted"]
    found = pyarrow.parquet.read_table(path, columns=columns, filters=wanted).to_pylist()
    rounds: list[list[tuple[int, int]]] = [[] for _ in prompts]
    for r in sorted(found, key=lambda r: (r["prompt"], r["depth"])):
        if r["depth"] < len(prompts[r["prompt"]]) + new_tokens:
            rounds[r["prompt"]].append((r["drafted"], r["accepted"]))
    return rounds


def _samples(
    recipe: Recipe, part: Part, texts: Sequence[TimedText], rows: Sequence[Measurement], chosen: ChosenLength
) -> list[Sample]:
    """Texts of the chosen length; of the fastest one where plain decoding was chosen."""
    fastest = max((row for row in rows if row.length), key=lambda row: row.tokens_per_second)
    title = fixed_length(chosen.length or fastest.length or 0).title
    tokenizer = load_tokenizer(recipe.target.model)
    own = [text for text in texts if text.title == title]
    return sample_texts(tokenizer, part.loaded.token_bytes, part.prompts, own, part.pair)
