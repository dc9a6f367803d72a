"""Hours, memory and disk of a run's stages, from a rehearsal or from counts and sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from distill.data.samples import SPLITS, CorpusTexts, read_answers
from distill.data.traffic import SOURCE, pin_of
from distill.engines.torch.hugging_face import load_config
from distill.export import PARITY_POSITIONS
from distill.files import is_gguf, read_result
from distill.progress import duration
from distill.recipe import Recipe
from distill.recipe.recipe import left_out
from distill.recipe.target import TYPE_BYTES
from distill.run import Run
from distill.surgery.cutter import planned_sizes, shape_of, weights_of
from distill.tables import Cell, Columns, Table, table_of
from distill.teacher.store import planned_bytes
from distill.teacher.texts import held_out_sizes
from distill.training.saved import ACCEPTANCE_STAGE, CHECKPOINTS_KEPT

PROCESS = 0.55e9  # bytes of memory that a process takes beside models, as scripts/benchmarks/scale.py measures them


@dataclass(frozen=True)
class StageEstimate:
    """A stage of a run that is planned: seconds from `low` to `high`, bytes on disk and the peaks of memory."""

    stage: str
    low: float
    high: float
    disk_bytes: int
    memory_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Rehearsed:
    """One stage: seconds, the part of them in loops whose length the recipe sets, peak memory and disk, as measured.

    `memory_bytes` is the process's peak resident size, `device_bytes` the peak allocated on accelerators (0 without).
    """

    stage: str
    seconds: float
    loop_seconds: float
    memory_bytes: int
    device_bytes: int
    disk_bytes: int


def estimate_table(found: Sequence[StageEstimate], rehearsed: Sequence[Rehearsed]) -> Table:
    """A row for each stage and one for all, in the columns that some stage has figures for."""
    before = {one.stage: one.seconds for one in rehearsed}
    sums = (sum(getattr(one, name) for one in found) for name in ("low", "high", "disk_bytes"))
    peaks = (max(getattr(one, name) for one in found) for name in ("memory_bytes", "device_bytes"))
    every = StageEstimate("all", *sums, *peaks)
    columns: Columns[StageEstimate] = {
        "stage": lambda one: one.stage,
        "rehearsed": lambda one: duration(sum(before.values()) if one is every else before[one.stage]),
        "whole run": lambda one: bounds(one.low, one.high),
        "peak memory": lambda one: Cell(one.memory_bytes, "size"),
        "GPU memory": lambda one: Cell(one.device_bytes, "size"),
        "disk": lambda one: Cell(one.disk_bytes or None, "size"),
    }
    known = {"peak memory": bool(every.memory_bytes), "GPU memory": bool(every.device_bytes)}
    shown = {name: of for name, of in columns.items() if known.get(name, True)}
    return table_of([*found, every], shown, classes=[*[""] * len(found), "best"])


def bounds(least: float, most: float) -> str:
    """Seconds from `least` to `most` in words."""
    low, high = duration(least), duration(most)
    return low if low == high else f"{low} to {high}"


DOUBT = 60.0  # seconds: stages that took less say little of the pace


def time_left(expected: Sequence[StageEstimate], took: Mapping[str, float | None]) -> str:
    """Return the remaining time in words. The pace of finished stages scales the estimates.

    `took` has the seconds of finished stages, and None for the others.
    """
    known = {one.stage: one for one in expected}
    past = [(seconds, known[name]) for name, seconds in took.items() if seconds is not None and name in known]
    pace = (DOUBT + sum(seconds for seconds, _ in past)) / (DOUBT + sum(one.low + one.high for _, one in past) / 2)
    due = [name for name, seconds in took.items() if seconds is None]
    found = [(pace * known[name].low, pace * known[name].high) for name in due if name in known]
    unknown = ", ".join(name for name in due if name not in known)
    said = f"{bounds(*map(sum, zip(*found, strict=True)))} left" if found else ""
    more = f"the time of {unknown} is not known without a rehearsal (--rehearse)" if unknown else ""
    return "; ".join(filter(None, (said, more)))


# ── Without a rehearsal, from counts and sizes ──
# Fitted to whole runs on 2 cores: SmolLM2-135M, and Qwen2.5-Coder-1.5B with its 0.5B sibling. Their seconds and bytes,
# and how far off this is, stand in tests/planning/test_hours.py.
# Work that waits for memory takes as long on cores with slower products: decoding, the optimiser, passes over logits.
MEASURED_SPEED = 1.05e12  # products and sums per second of those cores
SHARE = 0.64  # of the speed of a large product, in the steps of a model
LAYER, LOGIT = 1.3e-3, 8e-9  # seconds of a layer's step without its products, and of a logit that is drawn from
FEWEST = 32  # A step takes constant time up to this many rows, because every step reads all weights.
TRIED, AT_ONCE = 2.2, 384  # texts written for a usable question; questions written at once
OVERHEAD = 1.2  # memory-bound share of training steps, in the time of their products at MEASURED_SPEED
PARITY = 8e-8  # seconds of a GGUF file's comparison, by weight
READ = 30e9  # bytes of memory per second
READY, LOADED = 1.0, 4.0  # seconds of a stage without a model; in which a small one is loaded
TOKENISED = 3e5  # tokens of text a second
# Of a weight in a GGUF file; other types have the bits of their name and some.
BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0}


def planned_hours(recipe: Recipe, prompts: int, speed: float) -> list[StageEstimate]:
    """Estimate the stages with `prompts` to answer, on a CPU that makes `speed` products and sums per second.

    The list is empty for models of unknown sizes, and if servers do the estimated work.
    """
    target, cut_from = load_config(recipe.target.model), load_config(recipe.donor_model)
    big, donor, cut = shape_of(target), shape_of(cut_from), planned_sizes(recipe, target, cut_from)
    if (
        big is None
        or donor is None
        or cut is None
        or recipe.answers.writer is not None
        or not recipe.teacher_reads_weights
    ):
        return []
    (body, head), (kept, rows), given = weights_of(big), weights_of(cut), sum(weights_of(donor))
    whole, small, rate = body + head, kept + rows, SHARE * speed / 2  # weights; weights × tokens a second
    trim = recipe.cut.trim
    learnt = kept + (rows if trim is None else rows * trim if trim <= 1 else rows * trim / cut["rows"])
    answers, train, timed = recipe.answers, recipe.train, recipe.speedup
    block, width = recipe.corpus.block, TYPE_BYTES[recipe.target.dtype]

    def texts(count: float, tokens: int, most: int) -> float:
        """Seconds in which the target writes so many texts, at most so many at once."""
        at_once = count / (batches := math.ceil(count / most) or 1)
        step = max(at_once, FEWEST) * whole / rate + big["layers"] * LAYER + at_once * big["rows"] * LOGIT
        return batches * tokens * step

    positions, scored = prompts * answers.new_tokens + recipe.corpus.tokens, recipe.cut.score_blocks * block
    passes = 6 * (recipe.cut.mlp_width is not None) + 0.27 * (donor["layers"] - cut["layers"])
    judged, batch = train.acceptance, train.batch * block
    held = [held_out_sizes(recipe, split) for split in SPLITS[1:]]
    given_text = block if recipe.corpus.tokens else 0  # in a block of held-out text
    validated, tested = (one.prompts * one.new_tokens + one.blocks * given_text for one in held)
    judging = validated * (small + head) / rate if judged else 0.0  # of one evaluation
    own = is_gguf(recipe.target.model)
    kinds = [BYTES.get(kind) or int(kind.strip("itq")[0]) / 7.5 for kind in recipe.export.outtypes]
    decoded, plain = timed.prompts * timed.new_tokens, float(big["layers"] * LAYER / 8)
    bits = Path(recipe.target.model).stat().st_size if own else whole * width
    engines = dict.fromkeys(timed.backends, plain + bits / READ)
    if "pytorch" in engines and not (own and recipe.pytorch.target_weights in ("auto", "file")):
        engines["pytorch"] = plain + whole * width / READ
    ways, turns = 1 + len(timed.lengths) + len(timed.configurations), timed.turns if len(engines) > 1 else 0
    weights = whole * width + PROCESS
    without = ("cut", "train", "eval")  # which read stores in the place of the target
    stored = sum(planned_bytes(recipe, prompts).values())
    asked = sum(texts(TRIED * (one.questions or 0), one.tokens, AT_ONCE) for one in recipe.corpus.asked)
    continued = sum(texts(one.prompts, one.new_tokens, answers.batch) for one in held)
    per_product = 1 / rate + OVERHEAD / (SHARE * MEASURED_SPEED / 2)

    def training(steps: int) -> float:
        """Return the seconds of this many steps and of the evaluations between them."""
        evaluations = 1 + math.ceil(steps / judged.every) if judged and steps else 0
        return steps * batch * (3 * learnt + head / 2) * per_product + evaluations * judging

    # With a patience, the training can end early.
    fewest = judged.every * (1 + judged.patience) if judged and judged.patience else train.steps
    compared = small * len(kinds) + whole * (1 if own else len(kinds)) if kinds else 0
    written = sum(kinds) * (small + (0 if own else whole))
    loading = sum(12 + 25e-9 * whole + (ways + 2 * bool(turns)) * decoded * each for each in engines.values())
    found = {  # seconds, bytes of memory beside the target, bytes on disk
        "questions": (asked, 0, 0),
        "corpus": (READY + recipe.corpus.tokens / TOKENISED, 0, 0),
        "answers": (texts(prompts, answers.new_tokens, answers.batch) + continued, 0, 0),
        "teacher": (LOADED + (positions + validated + tested) * body / rate, 0, stored),
        "table": (positions * head / rate, 0, 0),
        "cut": (scored * (head + passes * given) / rate, 4 * given, 4 * small),
        "train": (training(train.steps), 16 * small + 12 * batch * big["rows"], 12 * small if train.steps else 0),
        "eval": (LOADED + 2 * tested * (small + head) / rate, 4 * small, 0),
        "export": (
            max(1.0, MEASURED_SPEED / speed) * PARITY * compared,
            4 * head + 8 * PARITY_POSITIONS * big["rows"],
            written,
        ),
        "speedup": (loading + turns * len(engines) * (2 + 5e-9 * whole), 4 * small, 0),
        "report": (READY, 0, 0),
    }
    absent = left_out(recipe)
    memory = dict.fromkeys(("questions", "answers"), answers.batch * _row_bytes(recipe))
    least = {"train": training(min(train.steps, fewest))}
    return [
        StageEstimate(
            stage,
            least.get(stage, seconds),
            seconds,
            round(disk),
            round((PROCESS if stage in without else weights) + more + memory.get(stage, 0)),
            0,
        )
        for stage, (seconds, more, disk) in found.items()
        if stage not in absent
    ]


# ── By a rehearsal, from what it measured ──
# A stage's loops (its Progress lines, a training's steps) grow with the recipe's counts; loading does not. Where a
# stage has work outside its loops that grows too, the low bound takes it as it was, the high one in proportion.


def rehearsed_hours(recipe: Recipe, short: Recipe, run: Run, measured: Sequence[Rehearsed]) -> list[StageEstimate]:
    """Estimate each measured stage of the whole run. `run` is the rehearsal of `short`, the shortened recipe."""
    return [_rehearsed(stage, recipe, short, run) for stage in measured]


def _rehearsed(stage: Rehearsed, recipe: Recipe, short: Recipe, run: Run) -> StageEstimate:
    fixed, loop = stage.seconds - stage.loop_seconds, stage.loop_seconds
    counts = _count(stage.stage, recipe, run), _count(stage.stage, short, run)
    growth = _ratio(*counts)
    if stage.stage == "train":
        low = high = _paced(stage, recipe, run)
    elif stage.stage in ("questions", "answers"):
        low, high = (fixed + more * loop for more in _texts(recipe, *map(int, counts)))
    else:
        low = fixed + growth * loop
        high = low + (max(0.0, growth - 1) * fixed if stage.stage in ("cut", "eval", "speedup") else 0.0)
    memory, device = stage.memory_bytes, stage.device_bytes
    rows = {
        "answers": min(recipe.answers.batch, _prompts(recipe, run)) - _prompts(short, run),
    }.get(stage.stage, 0)
    if rows > 0 and not (stage.stage == "answers" and recipe.answers.writer is not None):
        more = rows * _row_bytes(recipe)
        memory, device = (memory, device + more) if device else (memory + more, device)
    if stage.stage == "train":
        disk = stage.disk_bytes * (1 + CHECKPOINTS_KEPT) // 2
    else:
        counted = stage.stage in ("questions", "corpus", "answers", "teacher", "table")
        disk = round(max(1.0, growth if counted else 1.0) * stage.disk_bytes)
    return StageEstimate(stage.stage, low, high, disk, memory, device)


def _count(stage: str, recipe: Recipe, run: Run) -> float:
    """Return the count that a stage's seconds grow with. Disk space of texts and distributions grows with it, too."""
    speedup = recipe.speedup
    if stage == "teacher":
        return _positions(recipe, run)
    counts: dict[str, float] = {
        "questions": sum(source.questions or 0 for source in recipe.corpus.asked),
        "corpus": recipe.corpus.tokens,
        "answers": _prompts(recipe, run) + sum(held_out_sizes(recipe, split).prompts for split in SPLITS[1:]),
        "table": _prompts(recipe, run),
        "cut": recipe.cut.score_blocks,
        "eval": recipe.eval.prompts + recipe.eval.file_blocks,
        "speedup": speedup.prompts * (1 + len(speedup.lengths) + len(speedup.configurations)),
    }
    return counts.get(stage, 1.0)


def _prompts(recipe: Recipe, run: Run) -> int:
    """The prompts that a recipe answers, whose files a rehearsal in `run` has read."""
    path = run.path("corpus", "summary.json")
    documents = read_result(path, CorpusTexts).train.documents if path.exists() else 0
    return recipe.answers.count(documents + sum(source.questions or 0 for source in recipe.corpus.asked))


def _ratio(whole: float, part: float) -> float:
    return whole / part if part else 1.0


def _positions(recipe: Recipe, run: Run) -> float:
    """Positions that the teacher reads, answers counted at the mean length of those rehearsed in `run`."""
    total = float(recipe.corpus.tokens)
    for split in SPLITS[1:]:
        sizes = held_out_sizes(recipe, split)
        total += sizes.prompts * sizes.new_tokens + sizes.blocks * recipe.corpus.block
    traffic, answers = recipe.answers.traffic, read_answers(run, "train")
    counts = _prompts(recipe, run), 0 if traffic is None else pin_of(Path(traffic))["lines"]
    for served, count in enumerate(counts):
        lengths = (answers.column("prompt") + answers.column("answer"))[(answers.column("source") == SOURCE) == served]
        total += count * float(lengths.mean()) if len(lengths) else 0
    return total


def _texts(recipe: Recipe, whole: int, part: int) -> tuple[float, float]:
    """Return how many times longer the target writes `whole` texts than `part`, as a low and a high bound."""
    texts = _ratio(whole, part)
    if recipe.answers.writer is not None:  # text by text, or as many at once as the servers take
        return texts * min(part, recipe.answers.writer.connections) / recipe.answers.writer.connections, texts
    batch = recipe.answers.batch
    batches = _ratio(math.ceil(whole / batch), math.ceil(part / batch))
    # A batch of many prompts takes as long as one of few where the device is not busy, else longer in proportion.
    return batches, max(texts, batches)


def _paced(stage: Rehearsed, recipe: Recipe, run: Run) -> float:
    """Seconds of the whole training: steps, evaluations of weights and checkpoints at the pace of those rehearsed."""
    lines = [line for line in run.metrics() if "seconds" in line]
    own: dict[Any, list[float]] = {
        kind: [float(line["seconds"]) for line in lines if line["stage"] == kind]
        for kind in ("train", ACCEPTANCE_STAGE, "checkpoint")
    }
    trained, judged = recipe.train.steps, recipe.train.acceptance
    counts = {"train": trained, "checkpoint": math.ceil(trained / recipe.train.save_every)}
    counts[ACCEPTANCE_STAGE] = 0 if judged is None else 1 + math.ceil(trained / judged.every)
    rest = stage.seconds - sum(sum(seconds) for seconds in own.values())
    # The first step warms up caches and, with train.compile, compiles.
    paces = {kind: fmean(found[1:] or found) for kind, found in own.items() if found}
    return rest + sum(counts[kind] * pace for kind, pace in paces.items())


def _row_bytes(recipe: Recipe) -> int:
    """Bytes of keys, values and fp32 probabilities of one more prompt in a batch of the target."""
    config = load_config(recipe.target.model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = recipe.answers.prompt_tokens + recipe.answers.new_tokens
    cache = 2 * config.num_hidden_layers * heads * head * TYPE_BYTES[recipe.target.dtype] * tokens
    return int(cache + 4 * 4 * config.vocab_size)
