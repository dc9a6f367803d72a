"""Stage `speedup`: plain against speculative decoding of the run's target and draft, by each backend."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from distill.benchmark.calibrate import Calibrated, calibrate_run, round_costs, validation_prompts
from distill.benchmark.compare import TimedText
from distill.benchmark.pair import ComparedPair, Comparison, largest_tree, measure_pair
from distill.files import write_text
from distill.machine import machine
from distill.models.conversion.importing import file_type
from distill.models.conversion.writer import own_file
from distill.models.gguf.model import MOST_LEAVES
from distill.models.hugging_face import end_ids, load_tokenizer
from distill.models.loaded import LoadedPair, load_pair
from distill.recipe import Gguf, Recipe, Target
from distill.recipe.measuring import fixed_length
from distill.results.serialise import read_result, write_result
from distill.results.speedup_results import Noise, PairMeasured, Sample, Segment, SpeedupPart, SpeedupReport
from distill.results.speedup_tables import run_blocks
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.configured import check_configurations
from distill.speculative.costs.paid import PROMPTS
from distill.speculative.stop_strings import Characters
from distill.tables import document
from distill.texts import read_prompts

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
