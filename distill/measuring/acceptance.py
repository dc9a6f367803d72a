"""Targets with their drafts, measured behind prompts: those of a run, any two models, or a grid of several.

Whoever opens the pairs (stage `eval`, or `distill eval` of given models), `evaluate_pairs` lets each target write its
texts, measures the drafts on them and decodes rounds; `as_report` makes the report.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from distill.data.packing import Packed, pack
from distill.data.samples import Sample, prompt_seed
from distill.decoding.batch import continue_prompts
from distill.decoding.calibration import Recorded, expected_calibration_error
from distill.decoding.costs import measure_steps, predicted_speedups
from distill.decoding.decode import Round, plain, room_for
from distill.decoding.rules import Rules
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import LoadedPair, growing_decoder
from distill.errors import DataError
from distill.gguf.head import open_head
from distill.measuring.evaluation_results import (
    CalibrationError,
    ComparedPair,
    EvaluationReport,
    Group,
    PairCosts,
    StoredMeasures,
)
from distill.measuring.measure import (
    METRICS,
    DecodedRounds,
    Measured,
    SlicedValues,
    block_values,
    decode_rounds,
    position_acceptance,
    sum_by_document,
    text_values,
    tokens_per_round,
)
from distill.progress import Progress
from distill.recipe import Evaluate
from distill.sampler import Sampler
from distill.tables import paired_ratio_interval, ratio_interval

SIMULATED = 200  # outcomes drawn to see what calibration error chance alone makes


def calibration_error(rounds: Sequence[Sequence[Recorded]]) -> CalibrationError | None:
    """Of the drafted tokens that were judged, in the rounds of each prompt; None where no token was drafted.

    Length rules that stop at a probability (llama.cpp's p_min) take the draft's probabilities at their word.
    """
    rows = [[(seen.top, accepted) for one in own for _, seen, accepted in one.judged()] for own in rounds]
    if not any(rows):
        return None
    promised = numpy.array([p for own in rows for p, _ in own])
    true = numpy.array([y for own in rows for _, y in own], dtype=float)
    draws = numpy.random.default_rng(0).random((SIMULATED, len(promised))) < promised
    return CalibrationError(
        tokens=len(promised),
        promised=float(promised.mean()),
        accepted=ratio_interval([sum(y for _, y in own) for own in rows], [len(own) for own in rows]),
        error=expected_calibration_error(promised, true),
        error_of_chance=float(numpy.mean([expected_calibration_error(promised, drawn) for drawn in draws])),
    )


# ── Targets with their drafts, measured behind prompts ──

LONGEST = 8  # tokens drafted a round, at most, where steps are timed
REPEATS = 7  # of timed steps
NO_COSTS: Mapping[str, PairCosts] = {}


@dataclass(frozen=True)
class EvaluationOptions:
    """What is measured of every pair. `batch` prompts are continued at once in transformers; `prepack` says whether
    decoders lay out their layers, `costs` whether steps are timed, `acceptance` whether rounds of a grid are decoded.
    """

    sampler: Sampler
    settings: Evaluate
    command: str
    divergences: bool = True
    costs: bool = False
    seed: int = 0
    batch: int = 32
    prepack: bool = True
    acceptance: bool = True


@dataclass(frozen=True)
class TargetWithDrafts:
    """A target with its drafts by name, loaded, and what they are measured on: prompts with their classes, and `given`
    text in blocks of `block` tokens, which no text exceeds. Rounds are decoded with the drafts called `decoded`.
    Targets of one `writer` read the texts that the first of them wrote."""

    pairs: Mapping[str, LoadedPair]
    prompts: Sequence[Sample]
    block: int
    classes: Sequence[str] = ()
    given: Packed | None = None
    decoded: Sequence[str] = ()
    writer: str = ""


def evaluate_pairs(
    targets: Iterable[TargetWithDrafts], options: EvaluationOptions
) -> tuple[EvaluationReport, dict[str, list[list[Round]]]]:
    """The report of all pairs, and the decoded rounds of each prompt by pair.

    DataError for targets that have room for other prompts.
    """
    measured: dict[str, dict[str, Measured]] = {}
    decoded: dict[str, DecodedRounds] = {}
    texts: dict[str, list[list[int]]] = {}
    sliced: dict[str, SlicedValues] = {}  # by the target that wrote the texts
    costs: dict[str, PairCosts] = {}
    names: list[str] = []
    measure = "acceptance_sampling" if options.sampler.temperature else "acceptance_greedy"
    for one in targets:
        first, ids = next(iter(one.pairs.values())), [sample.prompt for sample in one.prompts]
        size = min(model.vocabulary_size for pair in one.pairs.values() for model in (pair.target, pair.draft))
        if names and names != [prompt.id for prompt in one.prompts]:
            what = f"{', '.join(one.pairs)}: there is room for other prompts than with the models before"
            raise DataError(what, "give prompts that fit all of them")
        names = [prompt.id for prompt in one.prompts]
        if options.divergences:
            if one.writer not in texts:
                texts[one.writer] = _continued(first, one, options, size)
            answers = zip(ids, texts[one.writer], strict=True)  # each prompt with its text behind it, which is scored
            own = pack((([*prompt, *text], len(prompt)) for prompt, text in answers), one.block, False)
            if one.writer not in sliced:
                sliced[one.writer] = SlicedValues.of(own)
            domains = {"answers": own, **({"files": one.given} if one.given is not None and len(one.given) else {})}
            for domain, blocks in domains.items():
                values = _values(one.pairs, blocks, options.sampler, size, domain)
                watched = sliced[one.writer].watch(values) if domain == "answers" else values
                measured.setdefault(domain, {}).update(sum_by_document(watched))
            if options.costs:
                depth = sum(len(prompt) + len(text) // 2 for prompt, text in zip(ids, texts[one.writer], strict=True))
                accepted = {name: measured["answers"][name].divergences().measure(measure).mean for name in one.pairs}
                costs |= _step_costs(one.pairs, accepted, depth // len(ids))
        for name in one.decoded:
            target, draft = one.pairs[name].target, one.pairs[name].draft
            models = one.pairs[name].hugging_face
            if models is not None:  # with the layers laid out, without which they were loaded
                target, draft = (growing_decoder(model, size, options.prepack) for model in models)
            decoded[name] = decode_rounds(target, draft, ids, options.settings, first.ends, f"rounds {name}, prompts")
    several = len(sliced) > 1  # texts, whose slices and classes are not those of each other
    report = as_report(
        measured,
        decoded,
        options,
        len(names),
        () if several else one.classes,
        sliced=None if several else next(iter(sliced.values()), None),
        costs=costs,
    )
    return report, {name: own.rounds for name, own in decoded.items()}


def _values(pairs: Mapping[str, LoadedPair], blocks: Packed, sampler: Sampler, size: int, domain: str) -> Any:
    """What a target's drafts are at each position: of whole blocks where the models can read them."""
    first = next(iter(pairs.values()))
    if first.hugging_face is None:
        drafts = {name: pair.draft for name, pair in pairs.items()}
        return text_values(first.target, drafts, blocks, sampler, size, domain)
    models = {name: pair.hugging_face[1] for name, pair in pairs.items() if pair.hugging_face is not None}
    return block_values(first.hugging_face[0], models, blocks, sampler, size)


def _step_costs(pairs: Mapping[str, LoadedPair], accepted: Mapping[str, float], depth: int) -> dict[str, PairCosts]:
    """Timed steps behind `depth` tokens, and what they predict with the acceptance of single positions."""
    found = {}
    target = next(iter(pairs.values())).target
    seconds = [*measure_steps(target, range(1, LONGEST + 2), depth, REPEATS).values()]
    for name, pair in pairs.items():
        assert isinstance(pair.draft, GgufModel) and isinstance(target, GgufModel)
        step = measure_steps(pair.draft, [1], depth, REPEATS)[1]
        speeds = predicted_speedups(seconds, step, [accepted[name]] * LONGEST)
        length = speeds.index(max(speeds))
        sizes = open_head(target.path).bytes, open_head(pair.draft.path).bytes
        found[name] = PairCosts(*sizes, seconds, step, length, speeds[length])
    return found


# ── The target's texts ──


def _continued(pair: LoadedPair, opened: TargetWithDrafts, options: EvaluationOptions, size: int) -> list[list[int]]:
    """The target's own continuations, each drawn with its own seed."""
    ids = [one.prompt for one in opened.prompts]
    seeds = [prompt_seed(options.seed, prompt.id) for prompt in opened.prompts]
    limit = min(options.settings.new_tokens, opened.block - max(map(len, ids)))  # served prompts may be long
    texts: list[list[int]] = []
    if pair.hugging_face is not None:
        target = pair.hugging_face[0]
        limit = min(limit, target.config.max_position_embeddings - max(map(len, ids)))
        if limit < 1:
            raise DataError("the prompts fill the target's context", "lower answers.prompt_tokens")
        for start in range(0, len(ids), options.batch):
            rows = slice(start, start + options.batch)
            texts += continue_prompts(target, ids[rows], options.sampler, limit, seeds[rows], pair.ends, size)
        return texts
    progress = Progress("the target continues prompts", len(ids))
    for prompt, seed in zip(ids, seeds, strict=True):
        verifier = "token" if options.sampler.temperature else "greedy"
        rules = Rules(options.sampler, verifier, pair.ends, random.Random(seed).random)
        texts.append(
            plain(pair.target, prompt, room_for(pair.target, pair.target, len(prompt), limit), rules=rules).tokens
        )
        progress.step()
    return texts


# ── The report ──


def as_report(
    measured: Mapping[str, Mapping[str, Measured]],
    decoded: Mapping[str, DecodedRounds],
    options: EvaluationOptions,
    prompts: int,
    classes: Sequence[str] = (),
    stored: StoredMeasures | None = None,
    sliced: SlicedValues | None = None,
    costs: Mapping[str, PairCosts] = NO_COSTS,
) -> EvaluationReport:
    """The report of what was measured of each draft in each domain, and of the decoded rounds of each draft.

    `classes` names that of each document of domain `answers`, which are the `prompts` of `decoded`; none, where they
    are not distinguished. `sliced` has seen the values of domain `answers`.
    """
    rounds = {name: own.rounds for name, own in decoded.items()}
    report = EvaluationReport(
        command=options.command,
        sampler=options.sampler.describe(),
        length=options.settings.length,
        domains={
            domain: {name: own.divergences() for name, own in drafts.items()} for domain, drafts in measured.items()
        },
        positions={name: position_acceptance(own, options.settings.length) for name, own in rounds.items()},
        tokens_per_round={name: tokens_per_round(own) for name, own in rounds.items()},
        calibration_error={
            name: error for name, own in decoded.items() if (error := calibration_error(own.seen)) is not None
        },
        stored=stored,
    )
    answers, measure = measured.get("answers", {}), report.acceptance_measure
    groups = by_class(classes, answers, rounds, measure) if classes and answers else []
    groups += [] if sliced is None else sliced.results(measure)
    pairs = {}
    if costs or len(answers) > 1:
        # Each draft's acceptance beside that of the first, paired by prompt.
        (base, first_sums), *others = [(name, by_unit(own, measure, prompts)) for name, own in answers.items()]
        apart = {name: paired_ratio_interval(*first_sums, *sums) for name, sums in others}
        pairs = {name: ComparedPair(apart.get(name), costs.get(name)) for name in (base, *apart)}
    return replace(report, groups=groups, pairs=pairs)


def by_unit(measured: Measured, measure: str, units: int) -> tuple[Any, Any]:
    """Sums of a measure, of bounds the middle, and counts [U] of all prompts, 0 for one whose text is empty."""
    sums, counts, column = numpy.zeros(units), numpy.zeros(units), METRICS.index(measure)
    sums[measured.units] = (measured.least[:, column] + measured.most[:, column]) / 2
    counts[measured.units] = measured.counts
    return sums, counts


def by_class(
    classes: Sequence[str],
    answers: Mapping[str, Measured],
    rounds: Mapping[str, list[list[Round]]],
    measure: str,
) -> list[Group]:
    """Acceptance and tokens per round of each class of documents, of `classes` by number; none where all are alike."""
    units = next(iter(answers.values())).units
    names = list(dict.fromkeys(classes[unit] for unit in units))
    found = []
    for name in names if len(names) > 1 else ():
        rows = [row for row, unit in enumerate(units) if classes[unit] == name]
        results = {draft: one.take(rows).divergences() for draft, one in answers.items()}
        tokens = next(iter(results.values())).tokens
        accepted = {draft: result.measure(measure) for draft, result in results.items()}
        decoded = {draft: tokens_per_round([one[units[row]] for row in rows]) for draft, one in rounds.items()}
        found.append(Group("class", name, len(rows), tokens, accepted, decoded))
    return found
