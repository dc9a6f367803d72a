"""`distill speedup --target A --draft B`: any pair on the user's prompts, without a recipe's run.

Legend: γ or n drafted tokens of a round, T target, D draft.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from distill.benchmark.compare import (
    TimedText,
    choose_length,
    compare_library,
    judge_identity,
    measurements,
    time_texts,
)
from distill.benchmark.libraries import llama_generation, transformers_generation
from distill.benchmark.pair.asked import Asked
from distill.benchmark.pair.batches import batched, measure_batches, with_rows
from distill.benchmark.pair.figures import (
    by_class,
    by_depth,
    prompt_seconds,
    round_figures,
    time_steps,
    typical_depth,
)
from distill.benchmark.pair.pair_fitting import Fitted, fit
from distill.benchmark.pair.predictions import Predictions
from distill.benchmark.pair.reasons import reasons
from distill.benchmark.pair.wanted import Wanted
from distill.benchmark.pair.watch import Watch, Watched, watched
from distill.benchmark.part import Part
from distill.benchmark.prepared import Prepared, prepare, prepare_others
from distill.benchmark.speedup import rounding
from distill.errors import RecipeError
from distill.machine import machine
from distill.models.base import Model
from distill.models.loaded import LoadedPair
from distill.progress import Progress
from distill.recipe import Configuration, Recipe
from distill.recipe.configuration import OTHER_VOCABULARY, PLAIN
from distill.results.pair_results import BatchFigures, PairSpeedup
from distill.results.speedup_results import Measurement, PairMeasured
from distill.sampler import Sampler
from distill.speculative.configured import Tree, configured_sampler, require_trees
from distill.speculative.costs.cheapest import DRAFT_STEPS, CheapestPair, cheapest_pair
from distill.speculative.other_vocabulary.drafters import Reader, other_vocabulary_drafter
from distill.speculative.rules import SYNTHETIC, Rules
from distill.speculative.verify import refusal

REFERENCE_PROMPTS = 2


def measure_pair(
    recipe: Recipe,
    wanted: Wanted,
    pair: LoadedPair,
    reader: Reader | None,
    asked: Asked,
    models: tuple[str, str | None],
) -> PairSpeedup:
    """Everything about a loaded pair; `reader` is the draft where it has another vocabulary, `models` are their names.

    `recipe` holds the settings: sampler, seed, speedup, profile and intervals; it is of no run.
    """
    loaded, steps_given = pair, list[str]()
    if any(one.drafter == "tree" for one in wanted.configurations):
        require_trees(pair.target, pair.draft)
    if not recipe.pytorch.static:  # rounds on a device drive the models themselves, whose steps are compiled by size
        cheapest = _cheapest(recipe, wanted, pair, asked)
        pair = replace(pair, target=cheapest.target, draft=cheapest.draft)
        steps_given = cheapest.describe()
    draft: Model = pair.draft if reader is None else reader.model
    ends = [] if wanted.rates is not None else pair.ends
    prompts = [prompt.ids for prompt in asked.measured]
    fitted = fit(recipe, wanted, pair, [prompt.ids for prompt in asked.others], [len(prompt) for prompt in prompts])
    with watched(pair.target, draft) as watch:
        prepared = _prepared(recipe, wanted, pair, reader, ends, fitted, watch)
        others = [prompt.ids for prompt in asked.others] or prompts  # costs are not of a text
        new_tokens = recipe.speedup.new_tokens
        predictions = Predictions(pair.target, pair.draft, prompts, others, new_tokens, prepared, wanted.rates)
        # Room for both, which of a draft of another vocabulary its reader sees to.
        texts = time_texts(
            pair.target,
            pair.draft,
            prompts,
            recipe.speedup.new_tokens,
            prepared,
            f"{pair.backend}, prompts",
            partial(predictions.text, watch),
        )
        predictions.finish(watch)
        for own in watch.texts.values():
            del own[0]  # the throw-away text
    rows = _rows(recipe, wanted, pair, prompts, texts, prepared, fitted)
    rows = [
        row if row.predicted is not None else replace(row, predicted=predictions.speedup(one.title, watch))
        for one, row in zip(prepared, rows, strict=True)
    ]
    has_draft = draft is not pair.target
    steps = time_steps(watch, pair.target, draft if has_draft else None, typical_depth(watch), recipe.profile.repeats)
    waits = pair.hugging_face is None or pair.hugging_face[0].device.type == "cpu"
    rounds = [
        round_figures(one.title, watch.texts[one.title], steps, one.configuration.drafter == "tree", waits)
        for one in prepared
    ]
    # Under the titles of the rows, which name chosen trees and synthetic acceptance.
    names = {one.title: row.configuration for one, row in zip(prepared, rows, strict=True)}
    rounds = [replace(one, configuration=names[one.configuration]) for one in rounds]
    evaluate = recipe.eval
    classes = by_class(texts, prepared, asked.classes(), evaluate.resamples, evaluate.confidence)
    chosen = None
    if wanted.sweep and wanted.rates is None:
        titles = {one.most: one.title for one in wanted.sweep} | {0: PLAIN.title}
        lengths = [one.most for one in wanted.sweep]
        chosen = choose_length(texts, lengths, _name(pair), evaluate.resamples, evaluate.confidence, titles.__getitem__)
    best = max((row for row in rows if not row.is_plain), key=lambda row: row.speedup, default=rows[0])
    reading = prompt_seconds(watch.texts, PLAIN.title), prompt_seconds(watch.texts, _title(prepared, rows, best))
    able = [one for one in prepared if one.make is not None]
    refusals = [] if predictions.refused is None else [f"No speedup is predicted: {predictions.refused}."]
    library = _library(recipe, pair, prompts) if wanted.library else None
    return PairSpeedup(
        command=wanted.command,
        machine=machine(),
        target=models[0],
        draft=models[1],
        backend=pair.backend,
        gguf=recipe.gguf.described() if pair.backend == "gguf" else "",
        sampler=Sampler.of(recipe.sampler).describe(),
        prompts=len(prompts),
        classes=dict(Counter(asked.classes())),
        new_tokens=recipe.speedup.new_tokens,
        dropped=asked.dropped,
        measurements=rows,
        chosen=chosen,
        rounds=rounds,
        steps=steps,
        by_class=[replace(one, configuration=names[one.configuration]) for one in classes],
        by_depth=[replace(one, configuration=names[one.configuration]) for one in by_depth(watch, prepared)],
        reasons=[*reasons(steps, rows, rounds, chosen, reading, wanted.rates is not None), *refusals],
        batches=_batches(recipe, wanted, loaded, prompts, able, fitted),
        not_batched=[f"`{one.title}`: {why}" for one in able if wanted.batches and (why := batched(one)) is not None],
        synthetic=None if wanted.rates is None else list(wanted.rates),
        calibration=fitted.table,
        library=library,
        pytorch=recipe.pytorch.suffix.removeprefix(", "),
        steps_given=steps_given,
    )


def _cheapest(recipe: Recipe, wanted: Wanted, pair: LoadedPair, asked: Asked) -> CheapestPair:
    """The pair with its steps given the cheapest way, at the middle of the texts that will be timed."""
    most = max(one.most for one in wanted.configurations) + 1
    prompts = [len(prompt.ids) for prompt in asked.measured]
    depth = sum(prompts) // len(prompts) + recipe.speedup.new_tokens // 2
    room = min(pair.target.capacity, pair.draft.capacity) - max(most, max(DRAFT_STEPS))
    repeats = recipe.profile.repeats
    progress = Progress(f"{pair.backend}, steps", (repeats + 1) * (1 if pair.draft is pair.target else 2))
    return cheapest_pair(pair.target, pair.draft, most, max(1, min(depth, room)), repeats, progress)


def _name(pair: LoadedPair) -> PairMeasured:
    return PairMeasured("draft + target", pair.backend, False)


def _title(prepared: Sequence[Prepared], rows: Sequence[Measurement], row: Measurement) -> str:
    """The title under which a row was decoded, before its tree or a label was named."""
    return prepared[list(rows).index(row)].title


def _prepared(
    recipe: Recipe,
    wanted: Wanted,
    pair: LoadedPair,
    reader: Reader | None,
    ends: Sequence[int],
    fitted: Fitted,
    watch: Watch,
) -> list[Prepared]:
    """Plain decoding, the sweep and all other configurations, watched; with synthetic rates where they are wanted."""
    trees: dict[str, Tree] = {choice.title: choice.tree for choice in fitted.choices}
    sweep = []
    for one in wanted.sweep:
        sweep.append(replace(_one(recipe, one, pair, reader, ends), length=one.most))
    own = [one for one in wanted.others if one.drafter not in OTHER_VOCABULARY]
    others = prepare_others(recipe, own, pair.draft, ends, fitted.costs, fitted.calibrations or {}, trees)
    others += [_one(recipe, one, pair, reader, ends) for one in wanted.others if one.drafter in OTHER_VOCABULARY]
    found = [replace(prepare(recipe, PLAIN, pair.draft, ends), length=0), *sweep, *others]
    refused = next((one for one in found if one.lossy is not None and not wanted.lossy), None)
    if refused is not None:
        raise RecipeError(
            f"`{refused.title}` would change the target's distribution: {refused.lossy}", "change it, or --allow-lossy"
        )
    if wanted.rates is not None:
        found = [
            one if one.make is None else replace(one, rules=replace(one.rules, rates=wanted.rates), lossy=SYNTHETIC)
            for one in found
        ]
    return [Watched.of(one, watch) for one in found]


def _one(
    recipe: Recipe, configuration: Configuration, pair: LoadedPair, reader: Reader | None, ends: Sequence[int]
) -> Prepared:
    """A configuration that needs nothing fitted, of a draft of any vocabulary."""
    if configuration.drafter not in OTHER_VOCABULARY:
        return prepare(recipe, configuration, pair.draft, ends)
    assert reader is not None
    sampler = configured_sampler(configuration, recipe.sampler)
    draws = random.Random(f"{recipe.seed}/{configuration.title}").random
    rules = Rules(sampler, configuration.verified_by, ends, draws)

    make = partial(other_vocabulary_drafter, configuration, reader, sampler, draws)
    lossy = refusal(configuration.verified_by, make().kind, sampler.temperature)
    return Prepared(configuration, rules, make, lossy)


def _rows(
    recipe: Recipe,
    wanted: Wanted,
    pair: LoadedPair,
    prompts: list[list[int]],
    texts: Sequence[TimedText],
    prepared: Sequence[Prepared],
    fitted: Fitted,
) -> list[Measurement]:
    """The measurements, in the order of `prepared`; text that synthetic rates made is compared with none."""
    lengths = tuple(one.most for one in wanted.sweep) or (4,)
    identities = {}
    if wanted.rates is None:
        part = Part(
            _name(pair), pair, pair.target, pair.draft, prompts, lambda prompt, limit: 0, "", lengths, wanted.others
        )
        identities = judge_identity(pair.target, prompts, texts, prepared, *rounding(recipe, part, texts))
    rows = measurements(texts, prepared, identities, _name(pair), recipe.eval.resamples, recipe.eval.confidence)
    chosen = {choice.title: choice for choice in fitted.choices}
    found = []
    for row in rows:
        if row.configuration in chosen:
            choice = chosen[row.configuration]
            row = replace(row, configuration=choice.title_with_tree, nodes=choice.nodes, predicted=choice.speedup)
        if wanted.rates is not None and not row.is_plain:
            row = replace(row, configuration=f"{row.configuration} (synthetic acceptance)")
        found.append(row)
    return found


def _batches(
    recipe: Recipe,
    wanted: Wanted,
    pair: LoadedPair,
    prompts: list[list[int]],
    prepared: Sequence[Prepared],
    fitted: Fitted,
) -> list[BatchFigures]:
    if not wanted.batches:
        return []

    compiled = recipe.pytorch.compile
    return measure_batches(
        lambda rows: (with_rows(pair.target, rows, compiled), with_rows(pair.draft, rows, compiled)),
        prompts,
        wanted.batches,
        prepared,
        recipe.speedup.new_tokens,
        recipe.seed,
        fitted.costs,
        fitted.calibrations or {},
    )


def _library(recipe: Recipe, pair: LoadedPair, prompts: list[list[int]]) -> dict[str, float]:
    """Our plain decoder beside the library's own greedy generation."""
    if pair.hugging_face is not None:
        generation = transformers_generation(pair.hugging_face[0], pair.ends)
    else:
        options = recipe.gguf_options("target")
        generation = llama_generation(Path(pair.reference), pair.target.capacity, options, pair.ends)
    found = compare_library(pair.target, generation, prompts[:REFERENCE_PROMPTS], recipe.speedup.new_tokens, pair.ends)
    return {"plain": found.ours, "library": found.library, "ratio": found.ratio}
