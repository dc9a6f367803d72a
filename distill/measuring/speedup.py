"""Stage `speedup`: plain against speculative decoding of the run's target and draft, by each backend."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from distill.data.prompts import UserPrompts, read_user_prompts, sources_of
from distill.data.texts import read_prompts
from distill.decoding.batch import decode_batch, plain_batch
from distill.decoding.configured import check_configurations, make_rule
from distill.decoding.decode import Decoded
from distill.decoding.other_vocabulary import read_with
from distill.decoding.round_costs import PROMPTS
from distill.decoding.rules import Characters, Rules
from distill.decoding.verify import CHAINS, Random
from distill.engines.llama_cpp.model import MOST_LEAVES
from distill.engines.loaded import LoadedPair, context_of, load_pair
from distill.engines.model import Model
from distill.engines.torch.hugging_face import end_ids, load_tokenizer, pick_device, settled_type
from distill.engines.torch.model import BatchedTorchModel, TorchModel, model_name
from distill.engines.torch.static import StaticTorchModel
from distill.errors import RecipeError
from distill.files import read_result, write_result, write_text
from distill.gguf.importing import file_type
from distill.gguf.writer import own_file
from distill.machine import machine
from distill.measuring.calibrate import (
    Calibrated,
    calibrate_pair,
    calibrate_run,
    need_calibration,
    round_costs,
    validation_prompts,
)
from distill.measuring.compare import Fitted, Prepared, TimedText, acceptance, by_class, by_depth
from distill.measuring.speedup_results import Noise, PairMeasured, Sample, Segment, SpeedupPart, SpeedupReport
from distill.measuring.speedup_tables import BatchFigures, PairSpeedup, run_blocks
from distill.measuring.timing import ComparedPair, Comparison, largest_tree, measure_pair
from distill.progress import Progress
from distill.recipe import Configuration, Corpus, Gguf, PyTorch, Recipe, SamplerSettings, Speedup, Target, parse_section
from distill.recipe.measuring import fixed_length
from distill.run import Run
from distill.sampler import Sampler
from distill.tables import document

# ── Stage `speedup`: plain against speculative decoding of the run's target and draft, by each backend ──

SAMPLES = 3


def speedup(recipe: Recipe, run: Run) -> list[Path]:
    """Write speedup.json and speedup.md; each backend is a part, kept when the run is interrupted."""
    settings = recipe.speedup
    for line in check_configurations(recipe):
        run.say(f"  {line}")
    calibrated = calibrate_run(recipe, run)
    parts = []
    for backend in settings.backends:
        path = run.path("speedup", f"{backend}.json")
        if path.exists():
            run.say(f"  {backend}: measured before the interruption")
        else:
            label = _label(recipe, backend)
            with _load(recipe, run, backend) as pair:
                run.say(f"  {label.pair}, {backend}")
                write_result(path, _measure(recipe, run, pair, label, calibrated))
        parts.append(read_result(path, SpeedupPart))
        gc.collect()
    report = SpeedupReport(
        command=run.command,
        machine=machine(),
        prompts=settings.prompts,
        new_tokens=settings.new_tokens,
        sampler=Sampler.of(recipe.sampler).describe(),
        parts=parts,
        calibration=None if calibrated is None else calibrated.table,
        gguf=recipe.gguf.described() if "gguf" in settings.backends else "",
    )
    write_result(run.path("speedup.json"), report)
    write_text(run.path("speedup.md"), document(run_blocks(report)))
    return [run.path("speedup"), run.path("speedup.json"), run.path("speedup.md")]


def _measure(
    recipe: Recipe, run: Run, pair: LoadedPair, label: PairMeasured, calibrated: Calibrated | None
) -> SpeedupPart:
    """All measurements of the pair by one backend, on test prompts; their explanations are said, too."""
    settings = recipe.speedup
    prompts = [prompt.ids for prompt in read_prompts(run, "test")][: settings.prompts]
    spare = validation_prompts(run, recipe.answers.prompt_tokens, PROMPTS)
    if not spare:
        run.say("    there is no validation text: costs are timed on the test prompts, which does not change them")
    comparison = Comparison(
        label=label,
        prompts=prompts,
        spare_prompts=spare or prompts,
        sweep=tuple(fixed_length(length) for length in settings.lengths),
        others=settings.configurations,
        calibrated=calibrated,
        evaluated=_evaluated_rounds(run, prompts, settings.new_tokens),
        of_run=True,
    )
    compared = measure_pair(recipe, pair, comparison)
    assert compared.chosen is not None and compared.paid is not None  # a run sweeps lengths and keeps its costs
    explanations = [f"{label.pair}, {label.backend}: {sentence}" for sentence in compared.explanations]
    for sentence in explanations:
        run.say(f"    {sentence}")
    return SpeedupPart(
        measurements=compared.measurements,
        chosen=compared.chosen,
        noise=Noise(*label.key, compared.noise),
        costs=round_costs(compared.paid, label),
        steps=compared.steps,
        trees=[choice.as_result(label) for choice in compared.choices.values()],
        rounds=compared.rounds,
        explanations=explanations,
        samples=_samples(recipe, pair, label, prompts, compared),
    )


def _label(recipe: Recipe, backend: str) -> PairMeasured:
    """The name of the run's pair: with PyTorch's settings that are not the defaults, or the types of GGUF files."""
    title = "draft + target"
    if backend == "pytorch":
        title += recipe.pytorch.suffix
    elif (own := own_file(recipe)) is not None:
        title += f", target {file_type(own)}, draft {recipe.speedup.outtype}"
    return PairMeasured(title, backend)


def _load(recipe: Recipe, run: Run, backend: str) -> LoadedPair:
    """The run's target and trained draft."""
    settings = recipe.speedup
    if backend == "pytorch":
        return load_pair(recipe.target, str(run.path("draft")), device=recipe.device, pytorch=recipe.pytorch)
    target = Target(model=str(own_file(recipe) or run.path("gguf", f"target-{settings.outtype}.gguf")))
    draft = str(run.path("gguf", f"draft-{settings.outtype}.gguf"))
    nodes = min(largest_tree(recipe, settings.configurations), MOST_LEAVES)
    options = Gguf(target=recipe.gguf_options("target"), draft=recipe.gguf_options("draft"))
    pair = load_pair(target, draft, tokens=recipe.corpus.block, nodes=nodes, gguf=options)
    # Both backends end their texts with the same tokens: llama.cpp knows some more by their names.
    ends = end_ids(recipe.target.model, load_tokenizer(recipe.target.model))
    return replace(pair, ends=ends)


def _evaluated_rounds(run: Run, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[tuple[int, int]]]:
    """The evaluation's rounds (drafted, accepted) of each of the first test prompts, in order.

    Its texts may be longer than those timed here, whose `new_tokens` alone count: acceptance differs by depth. None
    before the evaluation has run.
    """
    path = run.path("rounds.parquet")
    if not path.exists():
        return []
    import pyarrow.parquet

    filters = [("draft", "=", "after"), ("prompt", "<", len(prompts))]
    columns = ["prompt", "depth", "drafted", "accepted"]
    rows = pyarrow.parquet.read_table(path, columns=columns, filters=filters).to_pylist()
    rounds: list[list[tuple[int, int]]] = [[] for _ in prompts]
    for r in sorted(rows, key=lambda r: (r["prompt"], r["depth"])):
        if r["depth"] < len(prompts[r["prompt"]]) + new_tokens:
            rounds[r["prompt"]].append((r["drafted"], r["accepted"]))
    return rounds


def _samples(
    recipe: Recipe, pair: LoadedPair, label: PairMeasured, prompts: Sequence[Sequence[int]], compared: ComparedPair
) -> list[Sample]:
    """Texts of the chosen length; of the fastest one where plain decoding was chosen."""
    assert compared.chosen is not None
    fastest = max((row for row in compared.measurements if row.length), key=lambda row: row.tokens_per_second)
    title = fixed_length(compared.chosen.length or fastest.length or 0).title
    own = [text for text in compared.texts if text.title == title]
    return sample_texts(load_tokenizer(recipe.target.model), pair.token_bytes, prompts, own, label)


def sample_texts(
    tokenizer: Any,
    token_bytes: Callable[[int], bytes],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[TimedText],
    pair: PairMeasured,
) -> list[Sample]:
    """The first texts, cut into the draft's accepted tokens and the target's own, for the report.

    A character that several tokens share belongs to the segment of the last of them.
    """
    samples = []
    for text in texts[:SAMPLES]:
        tokens = list(zip(text.decoded.tokens, text.decoded.from_draft, strict=True))
        segments, characters = [], Characters()
        for from_draft, group in groupby(tokens, key=lambda pair: pair[1]):
            written = "".join(characters.add(token_bytes(token)) for token, _ in group)
            segments.append(Segment(written, "accepted" if from_draft else "target"))
        if segments:
            segments[-1] = Segment(segments[-1].text + characters.finish(), segments[-1].kind)
        prompt = tokenizer.decode(list(prompts[text.prompt]))
        samples.append(Sample(*pair.key, text.title, prompt, segments))
    return samples


# ── Several texts at once, plain and speculative, in PyTorch ──
# Legend: B texts of a batch.

BatchRun = Callable[..., list[Decoded]]  # of prompts, at most so many new tokens, and `randoms`


def require_rows(pair: LoadedPair) -> None:
    """Raise RecipeError where a model cannot decode texts of different lengths at once."""
    for model in (pair.target, pair.draft):
        if isinstance(model, TorchModel) and not model.max_leaves:
            raise RecipeError(
                f"--batch: {model_name(model.model)} has attention windows, or an attention of its own, which take no "
                "texts of different lengths",
                "add --static, which many such models can, or leave --batch out",
            )


def not_batched(prepared: Sequence[Prepared]) -> list[str]:
    """A sentence for each configuration that cannot decode several texts at once."""
    return [
        f"`{one.configuration.title}`: {why}"
        for one in prepared
        if one.make is not None and (why := _refusal(one)) is not None
    ]


def _refusal(one: Prepared) -> str | None:
    configuration = one.configuration
    if configuration.drafter != "draft":
        return f"drafter {configuration.drafter} drafts for one text at a time"
    return None if configuration.verified_by in CHAINS else f"verifier {configuration.verified_by} is for trees"


def measure_batches(
    recipe: Recipe,
    pair: LoadedPair,
    prompts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    prepared: Sequence[Prepared],
    fitted: Fitted,
) -> list[BatchFigures]:
    """Every configuration that can at each size B, over groups of B prompts; the last prompts that fill none are left.

    Each group is decoded plainly and by each configuration in turn.
    """
    able = [one for one in prepared if one.make is not None and _refusal(one) is None]
    new_tokens, figures = recipe.speedup.new_tokens, list[BatchFigures]()
    for size in sizes if able else ():
        groups = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
        target, draft = (_with_rows(model, size, recipe.pytorch.compile) for model in (pair.target, pair.draft))
        runs: dict[str, BatchRun] = {}
        for one in able:
            verifier = "token" if one.sampled else "greedy"
            rules = Rules(one.rules.sampler, verifier, one.rules.ends)
            runs.setdefault(one.base, partial(plain_batch, target, rules=rules))
        for one in able:
            rule = partial(make_rule, one.configuration, fitted.costs, fitted.calibrations)
            argmax = one.rules.verifier == "match"
            runs[one.title] = partial(decode_batch, target, draft, rules=one.rules, length=rule, argmax=argmax)
        seconds: dict[str, float] = dict.fromkeys(runs, 0.0)
        texts: dict[str, list[Decoded]] = {title: [] for title in runs}
        for run in runs.values():  # a throw-away text each
            run(groups[0], min(8, new_tokens), randoms=_randoms(recipe.seed, size))
        order = list(runs.items())
        progress = Progress(f"batches of {size}", len(groups))
        for index, group in enumerate(groups):
            turn = index % len(order)
            limit = min(new_tokens, min(target.capacity, draft.capacity) - max(map(len, group)))
            for title, run in order[turn:] + order[:turn]:
                started = time.perf_counter()
                texts[title] += run(group, limit, randoms=_randoms(recipe.seed + index, size))
                seconds[title] += time.perf_counter() - started
            progress.step()
        figures += [_figures(size, one, texts, seconds) for one in able]
        target.close()
        draft.close()
    return figures


def _with_rows(model: Model, rows: int, compiled: bool) -> Model:
    """A model of `rows` texts with the weights of a PyTorch model of one, prepacked where they are."""
    if isinstance(model, StaticTorchModel):
        return StaticTorchModel(model.model, model.vocabulary_size, rows, model.size, compiled)
    assert isinstance(model, TorchModel)
    return BatchedTorchModel(model.model, rows, model.vocabulary_size)


def _randoms(seed: int, rows: int) -> list[Random]:
    return [random.Random(f"{seed}/{row}").random for row in range(rows)]


def _figures(size: int, one: Prepared, texts: dict[str, list[Decoded]], seconds: dict[str, float]) -> BatchFigures:
    each, accepted = acceptance([r for text in texts[one.title] for r in text.rounds])
    tokens, plain = (sum(len(text.tokens) for text in texts[title]) for title in (one.title, one.base))
    rate, plain_rate = tokens / seconds[one.title], plain / seconds[one.base]
    return BatchFigures(size, one.title, tokens, rate, plain_rate, each or 0.0, accepted, rate / plain_rate)


# ── `distill speedup --target A --draft B`: any pair on the user's prompts, without a recipe's run ──

CALIBRATION_PROMPTS = 8  # for configurations that read calibrations, measured costs or a chosen tree
LEAST = 8  # tokens of a prompt that a context must leave room for
REPEATS = 7  # of timed steps


def pair_settings(
    target: str,
    prompts: Sequence[str | Path],
    sampler: SamplerSettings,
    dtype: str,
    *,
    count: int,
    tokens: int,
    seed: int = 0,
    threads: int | None = None,
    gguf: Gguf | None = None,
    pytorch: PyTorch | None = None,
    allow_lossy: bool = False,
    of_run: Recipe | None = None,
) -> Recipe:
    """The settings of a measurement of any pair, in the form that all measuring code reads; loads nothing.

    The chat template and the device are those of `of_run`, the recipe of the pair's run, if it has one.
    """
    kept = {} if of_run is None else {"chat": of_run.chat, "device": of_run.device}
    return Recipe(
        name="pair",
        seed=seed,
        threads=threads,
        target=parse_section(Target, {"model": target, "dtype": settled_type(dtype, pick_device("auto"))}),
        corpus=Corpus(sources=sources_of([Path(one) for one in prompts])),
        sampler=sampler,
        speedup=Speedup(
            backends=("gguf" if target.endswith(".gguf") else "pytorch",),
            prompts=count,
            repeats=REPEATS,
            new_tokens=tokens,
            configurations=(),
            allow_lossy=allow_lossy,
        ),
        gguf=gguf or Gguf(),
        pytorch=pytorch or PyTorch(),
        **kept,
    )


def measure_any_pair(
    recipe: Recipe,
    names: tuple[str, str | None],
    draft: str | None,
    sweep: Sequence[Configuration],
    others: Sequence[Configuration],
    *,
    prompt_tokens: int,
    batches: Sequence[int] = (),
    command: str = "",
) -> PairSpeedup:
    """Read the prompts, load both models and measure them; `recipe` holds the settings, and is of no run.

    `names` are target and draft as they were given, `draft` is the draft to load. `sweep` is a configuration a length.
     Raises RecipeError or DataError for prompts, contexts and
    configurations that do not go together.
    """
    configurations, new_tokens = (*sweep, *others), recipe.speedup.new_tokens
    other_vocabulary = any(one.other_vocabulary for one in configurations)
    own_draft = None if other_vocabulary else draft
    count = CALIBRATION_PROMPTS if need_other_prompts(configurations) else 0
    prompts = _read_prompts(recipe, own_draft, count, prompt_tokens)
    if batches and max(batches) > len(prompts.measured):
        raise RecipeError(f"--batch {max(batches)} needs as many prompts, and there are {len(prompts.measured)}")
    measured, spare = [prompt.ids for prompt in prompts.measured], [prompt.ids for prompt in prompts.others]
    longest_step = max(recipe.speedup.max_tokens, *(one.max_length + 1 for one in configurations))
    with load_pair(
        recipe.target,
        own_draft,
        tokens=max(max(map(len, [*measured, *spare])) + new_tokens, 2 * longest_step),
        nodes=largest_tree(recipe, others),
        threads=recipe.threads,
        gguf=recipe.gguf,
        pytorch=recipe.pytorch,
    ) as pair:
        if batches:
            require_rows(pair)
        reader = None
        if other_vocabulary:
            assert draft is not None
            place = pair.pytorch.draft_device or recipe.device
            reader = read_with(recipe.target, draft, place, pair.target.vocabulary_size, pair.pytorch)
        calibrated = None
        if need_calibration(configurations):
            calibrated = calibrate_pair(pair, spare, new_tokens, command, "prompts of the same files")
        label = PairMeasured("draft + target", pair.backend)
        comparison = Comparison(
            label=label,
            prompts=measured,
            spare_prompts=spare or measured,  # costs do not depend on the text
            sweep=tuple(sweep),
            others=tuple(others),
            calibrated=calibrated,
            reader=reader,
        )
        compared = measure_pair(recipe, pair, comparison)
        classes = prompts.classes()
        return PairSpeedup(
            command=command,
            machine=machine(),
            target=names[0],
            draft=names[1],
            backend=pair.backend,
            gguf=recipe.gguf.described() if pair.backend == "gguf" else "",
            sampler=Sampler.of(recipe.sampler).describe(),
            prompts=len(measured),
            classes=dict(Counter(classes)),
            new_tokens=new_tokens,
            dropped=prompts.dropped,
            measurements=compared.measurements,
            chosen=compared.chosen,
            rounds=compared.rounds,
            steps=compared.steps,
            by_class=by_class(compared.texts, compared.prepared, classes),
            by_depth=by_depth(compared.texts, compared.prepared),
            reasons=compared.explanations,
            batches=measure_batches(recipe, pair, measured, batches, compared.prepared, compared.fitted),
            not_batched=not_batched(compared.prepared) if batches else [],
            calibration=None if calibrated is None else calibrated.table,
            pytorch=recipe.pytorch.suffix.removeprefix(", "),
        )


def need_other_prompts(configurations: Sequence[Configuration]) -> bool:
    """Whether some configuration reads what is measured on other prompts beforehand."""
    return need_calibration(configurations) or any(one.needs_costs for one in configurations)


def _read_prompts(recipe: Recipe, draft: str | None, spare: int, prompt_tokens: int) -> UserPrompts:
    """The user's prompts, as long as the contexts of target and draft leave room for; loads no weights."""
    new_tokens, target = recipe.speedup.new_tokens, recipe.target.model
    contexts = [context for one in (target, draft) if one is not None and (context := context_of(one)) is not None]
    room = min(contexts, default=2**31) - new_tokens
    if room < LEAST:
        raise RecipeError(
            f"--tokens {new_tokens} leave {max(room, 0)} tokens of the context of {min(contexts)} for a prompt"
        )
    count = recipe.speedup.prompts
    return read_user_prompts(target, recipe.corpus, recipe.chat, count, spare, prompt_tokens, room)
