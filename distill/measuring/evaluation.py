"""Acceptance and divergences of targets with their drafts, measured behind prompts: of a run (stage `eval`: before and
after training, on the test split, also where its target is not loaded), and of any target with its drafts, also in
several GGUF types.

Whoever opens the pairs, `evaluate_pairs` lets the target write its texts, measures the drafts on them and counts the
rounds in which decoding would have written them; `as_report` makes the report.
"""

from __future__ import annotations

import functools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from distill import divergences
from distill.data.packing import Packed, pack, scored_documents, scored_states
from distill.data.prompts import UserPrompts, open_tokenizer, read_user_prompts
from distill.data.samples import Sample, how_to_redo, prompt_seed, read_prompts
from distill.decoding.calibration import Recorded
from distill.decoding.rules import GREEDY, Rules
from distill.devices import pick_device
from distill.engines.loaded import LoadedPair, load_pair, pair_of_models, settled_decoding
from distill.engines.pairs import require_pair
from distill.engines.server_commands import DRAWN_AMONG
from distill.engines.torch.described import read_kept
from distill.engines.torch.hugging_face import (
    encode_text,
    load_model,
    load_target,
    load_tokenizer,
)
from distill.errors import DataError
from distill.files import is_gguf, write_result, write_text
from distill.gguf.importing import file_type, folder_of
from distill.measuring.evaluation_results import (
    Bounds,
    EvaluationReport,
    Group,
    StoredMeasures,
    evaluation_blocks,
)
from distill.measuring.identity import files_in_types, kl_of_bits
from distill.measuring.measure import (
    METRICS,
    Measured,
    SlicedValues,
    Text,
    Values,
    block_values,
    judged_positions,
    position_acceptance,
    positions_by_text,
    record_rounds,
    sum_by_document,
    text_values,
    tokens_per_round,
    write_texts,
)
from distill.recipe import Chat, Corpus, Evaluate, Gguf, PyTorch, Recipe, Target, is_path
from distill.recipe.recipe import REASON
from distill.run import Run
from distill.sampler import Sampler
from distill.tables import document, paired_ratio_interval, ratio_interval
from distill.teacher.distributions import TeacherChunk, head_logits
from distill.teacher.store import TeacherStore, held_out
from distill.vocabulary.files import opening_of

# ── Targets with their drafts, measured behind prompts ──


@dataclass(frozen=True)
class EvaluationOptions:
    """What is measured of every pair; `acceptance` says whether rounds of a grid are counted."""

    sampler: Sampler
    settings: Evaluate
    command: str
    divergences: bool = True
    seed: int = 0
    acceptance: bool = True


@dataclass(frozen=True)
class TargetWithDrafts:
    """A target with its drafts by name, loaded, and what they are measured on: prompts with their classes, and `given`
    text in blocks of `block` tokens, which no text exceeds. Rounds are counted of the drafts called `decoded`."""

    pairs: Mapping[str, LoadedPair]
    prompts: Sequence[Sample]
    block: int
    classes: Sequence[str] = ()
    given: Packed | None = None
    decoded: Sequence[str] = ()


def evaluate_pairs(opened: TargetWithDrafts, options: EvaluationOptions) -> EvaluationReport:
    """The report of a target with each of its drafts."""
    measured: dict[str, dict[str, Measured]] = {}
    rounds: dict[str, list[list[Recorded]]] = {}
    texts: list[list[int]] = []
    sliced: SlicedValues | None = None
    pairs, ids = opened.pairs, [sample.prompt for sample in opened.prompts]
    first = next(iter(pairs.values()))
    size = min(model.vocabulary_size for pair in pairs.values() for model in (pair.target, pair.draft))
    if options.divergences:
        seeds = [prompt_seed(options.seed, prompt.id) for prompt in opened.prompts]
        limit = min(options.settings.new_tokens, opened.block - max(map(len, ids)))  # served prompts may be long
        rules = Rules(options.sampler, "token" if options.sampler.temperature else "greedy", first.ends)
        texts = write_texts(first.target, ids, limit, rules, size, seeds)
        answers = zip(ids, texts, strict=True)  # each prompt with its text behind it, which is scored
        own = pack((([*prompt, *text], len(prompt)) for prompt, text in answers), opened.block, False)
        sliced = SlicedValues.of(own)
        measured["answers"] = sum_by_document(sliced.watch(_values(pairs, own, options.sampler, size, "answers")))
        if opened.given is not None and len(opened.given):
            measured["files"] = sum_by_document(_values(pairs, opened.given, options.sampler, size, "files"))
    if opened.decoded and (options.sampler != GREEDY or not texts):
        texts = write_texts(first.target, ids, options.settings.new_tokens, Rules(ends=first.ends), size)
    written = [*zip(ids, texts, strict=False)]  # none where nothing is asked for
    for name in opened.decoded:
        rounds[name] = record_rounds(pairs[name].draft, written, first.ends, length=options.settings.length)
    return as_report(measured, rounds, options, len(ids), opened.classes, sliced=sliced, texts=written)


def _values(pairs: Mapping[str, LoadedPair], blocks: Packed, sampler: Sampler, size: int, domain: str) -> Any:
    """What a target's drafts are at each position: of whole blocks where the models can read them."""
    first = next(iter(pairs.values()))
    if first.hugging_face is None:
        drafts = {name: pair.draft for name, pair in pairs.items()}
        return text_values(first.target, drafts, blocks, sampler, size, domain)
    models = {name: pair.hugging_face[1] for name, pair in pairs.items() if pair.hugging_face is not None}
    return block_values(first.hugging_face[0], models, blocks, sampler, size)


# ── The report ──


def as_report(
    measured: Mapping[str, Mapping[str, Measured]],
    rounds: Mapping[str, Sequence[Sequence[Recorded]]],
    options: EvaluationOptions,
    prompts: int,
    classes: Sequence[str] = (),
    stored: StoredMeasures | None = None,
    sliced: SlicedValues | None = None,
    texts: Sequence[Text] = (),
) -> EvaluationReport:
    """The report of what was measured of each draft in each domain, and of the rounds of each draft.

    `classes` names that of each document of domain `answers`, which are the `prompts` of `decoded`; none, where they
    are not distinguished. `sliced` has seen the values of domain `answers`; `texts` are those of the rounds.
    """
    length = options.settings.length
    judged = {name: judged_positions(found, texts) for name, found in rounds.items()}
    report = EvaluationReport(
        command=options.command,
        sampler=options.sampler.describe(),
        length=length,
        domains={
            domain: {name: own.divergences() for name, own in drafts.items()} for domain, drafts in measured.items()
        },
        positions={name: position_acceptance(own, length) for name, own in judged.items()},
        positions_by_text={name: positions_by_text(own, length) for name, own in judged.items()},
        tokens_per_round={name: tokens_per_round(own) for name, own in rounds.items()},
        stored=stored,
    )
    answers, measure = measured.get("answers", {}), report.acceptance_measure
    groups = by_class(classes, answers, rounds, measure) if classes and answers else []
    groups += [] if sliced is None else sliced.results(measure)
    agreed = [] if sliced is None else sliced.results("acceptance_greedy")
    agreed = [one for one in agreed if one.of == "repetition"]
    drafts = agreed[0].acceptance if agreed else ()
    agreement = {name: {one.label: one.acceptance[name] for one in agreed} for name in drafts}
    # Each draft's acceptance beside that of the first, paired by prompt.
    sums = {name: by_unit(own, measure, prompts) for name, own in answers.items()}
    first = next(iter(sums.values()), None)
    differences = {
        name: paired_ratio_interval(*first, *own) for name, own in sums.items() if first and own is not first
    }
    return replace(report, groups=groups, differences=differences, agreement=agreement)


def by_unit(measured: Measured, measure: str, units: int) -> tuple[Any, Any]:
    """Sums of a measure, of bounds the middle, and counts [U] of all prompts, 0 for one whose text is empty."""
    sums, counts, column = numpy.zeros(units), numpy.zeros(units), METRICS.index(measure)
    sums[measured.units] = (measured.least[:, column] + measured.most[:, column]) / 2
    counts[measured.units] = measured.counts
    return sums, counts


def by_class(
    classes: Sequence[str],
    answers: Mapping[str, Measured],
    rounds: Mapping[str, Sequence[Sequence[Recorded]]],
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


# ── Stage `eval` ──


def evaluate(recipe: Recipe, run: Run) -> list[Path]:
    """Write eval.json and eval.md: the draft before (cut/) and after (draft/) training.

    Where the target is not loaded there are no rounds, and the rest is measured on its stored distributions.
    """
    if not recipe.target.load:
        run.say(f"  measured on stored distributions of test/, no rounds are decoded: {REASON}")
        return _written(run, evaluate_stored(recipe, run))
    opened = open_run(recipe, run)
    run.say(f"  the target continues {len(opened.prompts)} test prompts")
    options = EvaluationOptions(
        Sampler.of(recipe.sampler),
        recipe.eval,
        run.command,
        seed=recipe.seed,
    )
    report, pytorch = evaluate_pairs(opened, options), recipe.pytorch
    if "pytorch" in recipe.speedup.backends:  # where the target decodes
        _, pytorch = settled_decoding(recipe.target, str(run.path("draft")), pytorch, recipe.device)
    words = kl_of_bits(recipe.target.model).words if pytorch.target_weights == "file" else ""
    return _written(run, replace(report, bits=words))


def open_run(recipe: Recipe, run: Run) -> TargetWithDrafts:
    """A run's target with its drafts, behind the run's test prompts and beside its test texts."""
    device = pick_device(recipe.device)
    target, tokenizer = load_target(recipe.target, device), load_tokenizer(recipe.target.model)
    load = functools.partial(load_model, dtype=recipe.target.dtype, device=device)
    drafts = {name: load(str(run.path(folder))) for name, folder in sides_of(recipe).items()}
    if read_kept(run.path("draft")) is not None:  # as llama.cpp and others run it, without the trimmed head
        drafts["after, full head"] = load(str(run.path("draft")), trimmed=False)
    prompts = read_prompts(run, "test")[: recipe.eval.prompts]
    return TargetWithDrafts(
        {
            name: pair_of_models(
                recipe.target.model, target, draft, tokenizer, PyTorch(prepack=False, draft_weights=None)
            )
            for name, draft in drafts.items()
        },
        prompts,
        recipe.corpus.block,
        [prompt.label for prompt in prompts],
        Packed.load(run.path("corpus", "text-test.safetensors")).take(slice(0, recipe.eval.file_blocks)),
        ["after"],  # almost nothing of an untrained cut is accepted
    )


def sides_of(recipe: Recipe) -> dict[str, str]:
    """The drafts of a run by name, with their folders; one alone where nothing is trained."""
    return {"before": "cut", "after": "draft"} if recipe.train.steps else {"after": "draft"}


def _written(run: Run, report: EvaluationReport) -> list[Path]:
    """The files of a report."""
    write_result(run.path("eval.json"), report)
    write_text(run.path("eval.md"), document(evaluation_blocks(report)))
    return [run.path("eval.json"), run.path("eval.md")]


# ── Where the target is not loaded: the drafts against its stored distributions, and its answers ──
# A compact store holds the K likeliest tokens and the mass of the rest, so each measure has a least and a largest
# value between which the exact one lies, the rounding of the stored numbers included. Legend: N positions, c of
# them at once, V vocabulary, M measures.

CHUNK = 256  # positions whose logits are held at once
HALF, SMALLEST = 2.0**-11, 2.0**-25  # relative and absolute rounding of a logarithm to fp16


def stored_metrics(chunk: TeacherChunk, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value [c, M] of METRICS at temperature 1, from draft logits [c, V].

    NaN where a store gives no bound: the reverse KL, which depends on the target's rarest tokens, and the KL of a draft
    with a trimmed head, which is between distributions over the tokens that it has.
    """
    ids, logs, tail = chunk.ids, chunk.log_probabilities, chunk.log_tail
    assert ids is not None, "a compact store has ids"
    error = logs.abs() * HALF + SMALLEST
    low, high = logs - error, logs + error
    absent = torch.isneginf(draft_logits)
    unknown = torch.full_like(tail, torch.nan)
    agreement = (ids[:, 0] == draft_logits.argmax(-1)).to(tail.dtype)

    def bounded(bounds: Callable[..., tuple[Tensor, Tensor]], logits: Tensor) -> tuple[Tensor, Tensor]:
        return bounds(ids, low, tail, logits)[0], bounds(ids, high, tail, logits)[1].clamp(max=1)

    accepted = bounded(divergences.acceptance_bounds, draft_logits)
    if bool(absent.any()):
        kept = ~absent.gather(-1, ids)
        kl = (unknown, unknown)
        ceiling = (low.exp() * kept).sum(-1), ((high.exp() * kept).sum(-1) + tail.exp()).clamp(max=1)
    else:
        least, most = divergences.forward_kl_bounds(ids, logs, tail, draft_logits)
        # p log(p / q) has the slope log(p / q) + 1, so that rounding moves each term by at most this.
        ratio = (logs - draft_logits.log_softmax(-1).gather(-1, ids)).abs()
        slack = (logs.exp() * torch.expm1(error) * (ratio + 1 + error)).sum(-1)
        kl = (least - slack).clamp(min=0), most + slack
        ceiling = (torch.ones_like(tail),) * 2
    found = {
        "forward_kl": kl,
        "reverse_kl": (unknown, unknown),
        "acceptance_sampling": accepted,
        "acceptance_drawn": bounded(divergences.acceptance_bounds, divergences.likeliest(draft_logits, DRAWN_AMONG)),
        "acceptance_match": bounded(divergences.acceptance_match_bounds, draft_logits),
        "acceptance_greedy": (agreement, agreement),
        "acceptance_ceiling": ceiling,
    }
    least, most = (torch.stack([found[name][side] for name in METRICS], -1) for side in (0, 1))
    return least, most


def stored_values(store: TeacherStore, blocks: Packed, index: range, name: str, draft: Any) -> Iterator[Values]:
    """Of a draft against the stored distributions of the blocks at `index`; `blocks` are the store's, with the numbers
    of their documents."""
    for block in index:
        one = blocks.take(slice(block, block + 1))
        hidden = scored_states(draft, one)
        labels = one.labels()[one.mask]
        teacher = store.teacher(torch.tensor([block]), hidden.device)
        end = 0  # among the block's scored positions, which run through its documents in turn
        for _, place, here in scored_documents(one):
            number = one.number(0, place)
            start, end = end, end + int(here.sum())
            for at in range(start, end, CHUNK):
                rows = slice(at, min(at + CHUNK, end))
                logits = head_logits(draft, hidden[rows])[:, : store.vocabulary]
                hits = int((logits.argmax(-1).cpu() == labels[rows]).sum())
                yield name, number, *stored_metrics(teacher.chunk(rows), logits), hits


def evaluate_stored(recipe: Recipe, run: Run) -> EvaluationReport:
    """The report of stage `eval` from test/, without the target.

    Raises DataError where the store does not hold the blocks of the held-out texts.
    """
    device = pick_device(recipe.device)
    store, texts = TeacherStore(run, "test"), held_out(recipe, run, "test")
    blocks, stored = texts.blocks, store.packed.take(slice(None))
    if not torch.equal(stored.ids, blocks.ids):
        raise DataError(f"{store.folder} holds other texts than those of this run", how_to_redo("test"))
    blocks = replace(blocks, mask=stored.mask)  # without documents that could not be sent as text
    own = len(texts.own)
    domains = {"answers": range(own), **({"files": range(own, len(blocks))} if len(blocks) > own else {})}
    measured: dict[str, dict[str, Measured]] = {domain: {} for domain in domains}
    for name, folder in sides_of(recipe).items():
        draft = load_model(str(run.path(folder)), recipe.target.dtype, device)
        for domain, index in domains.items():
            measured[domain] |= sum_by_document(stored_values(store, blocks, index, name, draft))
        del draft  # one at a time in memory
    left_out = {f"answers ({reason})": count for reason, count in texts.dropped.items()}
    unscored = texts.blocks.mask.sum() - blocks.mask.sum()
    if int(unscored):
        left_out["positions of documents that are read as other tokens when sent as text"] = int(unscored)
    measures = StoredMeasures(
        source=_source(store.manifest.get("origin") or {}),
        temperature=1.0,
        entries=store.manifest["k"],
        served=Sampler.of(recipe.sampler).describe(),
        bounds={
            domain: {
                name: {of: Bounds(low.mean, high.mean) for of, (low, high) in found.bounds().items()}
                for name, found in drafts.items()
            }
            for domain, drafts in measured.items()
        },
        sampled={name: ratio_interval(found.hits, found.counts) for name, found in measured["answers"].items()},
        left_out=left_out,
    )
    classes = [answer.label for answer in texts.answers]
    options = EvaluationOptions(Sampler(), recipe.eval, run.command)
    return as_report(measured, {}, options, len(classes), classes, measures)


def _source(origin: dict[str, Any]) -> str:
    """What gave the distributions, in words."""
    if origin.get("kind") == "gguf":
        return f"the GGUF file {origin.get('path')}"
    return f"{origin.get('model')} on a server" if origin.get("kind") == "server" else "the stored target"


# ── Any target with its drafts on given texts, also in several GGUF types, without a recipe ──

PROMPT_TOKENS, SEED = 64, 0  # tokens of a prompt cut from a text, and the seed of the order of texts

Prompts = Callable[[str, int], UserPrompts]  # of a target, with room for this many tokens


@dataclass(frozen=True)
class Grid:
    """A target with every draft; where `types` of the draft are given, as GGUF files. `block` is the
    most tokens of a text, `written` holds files that a run has exported."""

    target: str
    drafts: Sequence[str]
    block: int
    types: Sequence[str] = ()
    written: Path | None = None
    threads: int | None = None
    gguf: Gguf | None = None


def evaluate_grid(grid: Grid, prompts: Prompts, options: EvaluationOptions) -> EvaluationReport:
    """The report of every draft of the grid.

    Raises PairError for models that do not fit, DataError for fewer than 4 prompts.
    """
    for draft in grid.drafts:
        require_pair(grid.target, draft)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        (target,) = _files([grid.target], (), grid, Path(scratch, "target")).values()
        drafts = _files(grid.drafts, grid.types, grid, Path(scratch, "draft"))
        if not all(map(is_gguf, (target, *drafts.values()))):  # one engine for all
            target = str(folder_of(target)) if is_gguf(target) else target
            drafts = {name: str(folder_of(path)) if is_gguf(path) else path for name, path in drafts.items()}
        if len(drafts) == 1 and not grid.types:
            drafts = dict(zip(["draft"], drafts.values(), strict=True))
        pairs = _load(target, drafts, grid, grid.block, stack)
        block = min(grid.block, *(model.capacity for one in pairs.values() for model in (one.target, one.draft)))
        found = prompts(target, block)
        alone = next(iter(pairs.values())) if len(pairs) == 1 else None
        given = None if alone is None else _given(alone, found.texts, block, options.settings.file_blocks)
        decoded = [*pairs] if options.acceptance else []
        return evaluate_pairs(TargetWithDrafts(pairs, found.measured, block, found.classes(), given, decoded), options)


def _files(models: Sequence[str], types: Sequence[str], grid: Grid, scratch: Path) -> dict[str, str]:
    """Each model, or its file of each type, by a name for tables; files are written to `scratch`, a role's folder."""
    found = {}
    short = [Path(model).name if is_path(model) else model for model in models]
    names = short if len(set(short)) == len(short) else models
    for number, (name, model) in enumerate(dict(zip(names, models, strict=True)).items()):
        if not grid.types:
            found[name] = model
            continue
        folder = scratch / str(number)
        folder.mkdir(parents=True)

        def place(kind: str, folder: Path = folder) -> Path:
            exported = None if grid.written is None else grid.written / f"{scratch.name}-{kind}.gguf"
            return exported if exported is not None and exported.is_file() else folder / f"{scratch.name}-{kind}.gguf"

        kinds = types or [file_type(Path(model)) if is_gguf(model) else "f16"]
        files = files_in_types(model, kinds, place)
        found |= {kind if len(models) == 1 else f"{name}, {kind}": str(path) for kind, path in files.items()}
    return found


def _load(target: str, drafts: Mapping[str, str], grid: Grid, tokens: int, stack: ExitStack) -> dict[str, LoadedPair]:
    """A target with each of its drafts; the layers of models that decode are laid out later."""
    gguf = grid.gguf or Gguf()
    if not is_gguf(target):
        device = pick_device("auto")
        big = stack.enter_context(load_pair(Target(model=target), pytorch=PyTorch(prepack=False, draft_weights=None)))
        assert big.hugging_face is not None
        models = {name: load_model(draft, Target(model=target).dtype, device) for name, draft in drafts.items()}
        parts = big.reference, big.hugging_face[0]
        return {name: pair_of_models(*parts, model, big.tokenizer, big.pytorch) for name, model in models.items()}
    small = {}
    for name, draft in drafts.items():
        options = Gguf(target=gguf.of("draft"))
        alone = load_pair(Target(model=draft), tokens=tokens, threads=grid.threads, gguf=options)
        small[name] = stack.enter_context(alone).target
    big = stack.enter_context(load_pair(Target(model=target), tokens=tokens, threads=grid.threads, gguf=gguf))
    return {name: replace(big, draft=draft) for name, draft in small.items()}


def _given(pair: LoadedPair, texts: Sequence[str], block: int, blocks: int) -> Packed | None:
    """Plain texts in blocks, in an order drawn from the seed."""
    order = list(texts)
    random.Random(SEED).shuffle(order)
    with open_tokenizer(pair.reference) as tokenizer:
        sequences = [(encode_text(tokenizer, text), 1) for text in order]
        return pack(sequences, block, True, opening_of(tokenizer)).take(slice(0, blocks)) if order else None


def prompts_of(corpus: Corpus, count: int) -> Prompts:
    """Prompts of files for a target, with room for their answers in a block; DataError for fewer than 4."""
    answer = Evaluate().new_tokens

    def read(target: str, block: int) -> UserPrompts:
        room = block - min(answer, block // 2)
        found = read_user_prompts(target, corpus, Chat(), count, 0, PROMPT_TOKENS, room, answer=answer, least=4)
        for reason, number in found.dropped.items():
            print(f"{number} left out: {reason}", file=sys.stderr)
        return found

    return read


def evaluate_types(
    recipe: Recipe,
    run: Run,
    types: Sequence[str],
    threads: int | None,
    gguf: Gguf | None,
    command: str,
    kl: bool,
    acceptance: bool,
) -> EvaluationReport:
    """The report of a run's target and trained draft in the grid's types, behind the run's test prompts."""
    found = UserPrompts([*read_prompts(run, "test")[: recipe.eval.prompts]], [], {}, [])
    written = None if run.outdated("export") else run.path("gguf")
    models = recipe.target.model, [str(run.path("draft"))]
    grid = Grid(*models, recipe.corpus.block, types, written, threads, gguf)
    sampler, seed = Sampler.of(recipe.sampler), recipe.seed
    options = EvaluationOptions(sampler, recipe.eval, command, kl, seed=seed, acceptance=acceptance)
    return evaluate_grid(grid, lambda *_: found, options)
