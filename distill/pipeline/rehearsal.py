"""A rehearsal: every stage with the real models on 4 prompts and 3 steps, which finds failures within minutes.

It keeps every size that peak memory depends on (blocks, batches of training, lengths of texts) and shortens what
repeats. From its figures follows what the whole run will take.
"""

from __future__ import annotations

import gc
import math
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from distill.data.texts import read_answers
from distill.data.traffic import SOURCE, first_lines, pin_of
from distill.errors import RunError, faults_explained
from distill.files import read_result, write_atomically, write_result, write_text
from distill.pipeline.running import forget_begun, run_pipeline
from distill.pipeline.stages import find_stage
from distill.processes import process_count
from distill.progress import Progress, duration, watched
from distill.recipe import Recipe, dump_recipe
from distill.recipe.target import TYPE_BYTES
from distill.run import Run
from distill.surgery.sparsity import LEAST_RAMP
from distill.tables import Cell, Table, Value, bullets, document, size
from distill.training.results import ACCEPTANCE_STAGE

# ── What a rehearsal measured, stage by stage, and what the whole run is expected to take ──


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


@dataclass(frozen=True)
class Expected:
    """The same stage in the whole run: seconds from `low` to `high`, peak memory and disk."""

    stage: str
    low: float
    high: float
    memory_bytes: int
    device_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Rehearsal:
    """rehearsal.json. `config` is the shortened recipe; `expected` holds one entry for each of `stages`."""

    recipe: str
    config: str
    stages: list[Rehearsed]
    expected: list[Expected]


# ── From what a rehearsal measured to what the whole run takes: hours from a low to a high bound, memory, disk ──
# A stage's loops (its Progress lines, a training's steps) grow with the recipe's counts; loading does not. Where a
# stage has work outside its loops that grows too, the low bound takes it as it was, the high one in proportion.


def expect(recipe: Recipe, short: Recipe, run: Run, measured: Sequence[Rehearsed]) -> list[Expected]:
    """What each measured stage takes in the whole run; the recipe was shortened to `short` and rehearsed in `run`."""
    return [_expected(stage, recipe, short, run) for stage in measured]


def _expected(stage: Rehearsed, recipe: Recipe, short: Recipe, run: Run) -> Expected:
    fixed, loop = stage.seconds - stage.loop_seconds, stage.loop_seconds
    counts = _count(stage.stage, recipe, run), _count(stage.stage, short, run)
    if stage.stage == "train":
        low = high = _training(stage, recipe, run)
    else:
        low, high = (outside * fixed + inside * loop for outside, inside in _growth(stage.stage, recipe, short, counts))
    memory, device = stage.memory_bytes, stage.device_bytes
    rows = {
        "answers": min(recipe.answers.batch, recipe.answers.prompts) - short.answers.prompts,
        "eval": min(recipe.answers.batch, recipe.eval.prompts) - short.eval.prompts,
    }.get(stage.stage, 0)
    if rows > 0 and not (stage.stage == "answers" and recipe.answers.writer is not None):
        more = rows * _row_bytes(recipe)
        memory, device = (memory, device + more) if device else (memory + more, device)
    if stage.stage == "train":
        disk = stage.disk_bytes * (1 + recipe.train.keep) // 2
    else:
        counted = stage.stage in ("questions", "corpus", "answers", "teacher")
        growth = _ratio(*counts) if counted else 1.0
        disk = round(max(1.0, growth) * stage.disk_bytes)
    return Expected(stage.stage, low, high, memory, device, disk)


def _growth(
    stage: str, recipe: Recipe, short: Recipe, counts: tuple[float, float]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """By which a stage's seconds outside and inside its loops are multiplied: of the low bound, and of the high one."""
    more = _ratio(*counts)
    if stage in ("questions", "answers"):
        low, high = _written(recipe, *map(int, counts))
        return (1, low), (1, high)
    if stage in ("teacher", "test"):
        return (1, more), (1, more)
    if stage == "cut":
        cuts = len(recipe.cut.compare)
        if not cuts:
            return (1, 1), (more, more)
        return (1, cuts), (more, cuts * _ratio(recipe.cut.heal_steps, short.cut.heal_steps))
    if stage == "eval":
        largest = max(more, _ratio(recipe.eval.file_blocks, short.eval.file_blocks))
        return (1, more), (largest, largest)
    if stage == "speedup":
        more *= max(1.0, _ratio(recipe.speedup.prompts, short.speedup.prompts))
        return (1, more), (more, more)
    return (1, 1), (1, 1)


def _count(stage: str, recipe: Recipe, run: Run) -> float:
    """What a stage's seconds grow with; of those that write texts and distributions, also their disk space."""
    speedup = recipe.speedup
    counts: dict[str, Callable[[], float]] = {
        "questions": lambda: sum(source.questions or 0 for source in recipe.corpus.asked),
        "corpus": lambda: recipe.corpus.tokens,
        "answers": lambda: recipe.answers.prompts,
        "teacher": lambda: _positions(recipe, run),
        "test": lambda: recipe.eval.prompts,
        "cut": lambda: recipe.cut.score_blocks,
        "eval": lambda: recipe.eval.prompts,
        "speedup": lambda: 1 + len(speedup.lengths) + len(speedup.configurations),
    }
    return counts[stage]() if stage in counts else 1.0


def _ratio(whole: float, part: float) -> float:
    return whole / part if part else 1.0


def _positions(recipe: Recipe, run: Run) -> float:
    """Positions that the teacher reads, answers counted at the mean length of those rehearsed in `run`."""
    total = float(recipe.corpus.tokens)
    traffic, answers = recipe.answers.traffic, read_answers(run, "train")
    for served in (False, True):
        lengths = [len(one.prompt) + len(one.answer) for one in answers if (one.source == SOURCE) == served]
        count = recipe.answers.prompts
        if served:
            count = 0 if traffic is None else pin_of(Path(traffic.path))["lines"]
        total += count * fmean(lengths) if lengths else 0
    return total


def _written(recipe: Recipe, whole: int, part: int) -> tuple[float, float]:
    """How many times longer the target writes `whole` texts than `part`, from a low to a high bound."""
    texts = _ratio(whole, part)
    if recipe.answers.writer is not None:  # text by text, or as many at once as the servers take
        return texts * min(part, recipe.answers.writer.concurrency) / recipe.answers.writer.concurrency, texts
    batch = recipe.answers.batch
    batches = _ratio(math.ceil(whole / batch), math.ceil(part / batch))
    # A batch of many prompts takes as long as one of few where the device is not busy, else longer in proportion.
    return batches, max(texts, batches)


def _training(stage: Rehearsed, recipe: Recipe, run: Run) -> float:
    """Seconds of the whole training: steps, evaluations of weights and checkpoints at the pace of those rehearsed."""
    lines = [line for line in run.metrics() if "seconds" in line]
    own: dict[Any, list[float]] = {
        kind: [float(line["seconds"]) for line in lines if line["stage"] == kind]
        for kind in ("train", ACCEPTANCE_STAGE, "checkpoint")
    }
    trained = recipe.train.steps
    every = recipe.train.acceptance.every if recipe.train.acceptance is not None else None
    judged = 1 + math.ceil(trained / every) if every is not None else 0
    counts = {
        "train": trained,
        ACCEPTANCE_STAGE: judged,
        "checkpoint": math.ceil(trained / recipe.train.save_every),
    }
    rest = stage.seconds - sum(sum(seconds) for seconds in own.values())
    # The first step warms up caches and, with train.compile, compiles.
    paces = {kind: fmean(found[1:] or found) for kind, found in own.items() if found}
    return rest + sum(counts[kind] * pace for kind, pace in paces.items())


def _row_bytes(recipe: Recipe) -> int:
    """Bytes of keys, values and fp32 probabilities of one more prompt in a batch of the target."""
    from distill.engines.torch.hugging_face import load_config

    config = load_config(recipe.target.model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = recipe.answers.prompt_tokens + recipe.answers.new_tokens
    cache = 2 * config.num_hidden_layers * heads * head * TYPE_BYTES[recipe.target.dtype] * tokens
    return int(cache + 4 * 4 * config.vocab_size)


def estimate_table(measured: Sequence[Rehearsed], expected: Sequence[Expected]) -> Table:
    """What was rehearsed and what the whole run is expected to take."""

    def row(name: str, seconds: float, stages: Sequence[Expected]) -> list[Cell | Value]:
        low, high = (duration(sum(bounds)) for bounds in zip(*((one.low, one.high) for one in stages), strict=True))
        return [
            name,
            duration(seconds),
            low if low == high else f"{low} to {high}",
            Cell(max(one.memory_bytes for one in stages), "size"),
            *([Cell(max(one.device_bytes for one in stages), "size")] if device else []),
            Cell(sum(one.disk_bytes for one in stages), "size"),
        ]

    device = any(stage.device_bytes for stage in expected)
    heads = ["stage", "rehearsed", "whole run", "peak memory", *(["GPU memory"] if device else []), "disk"]
    rows = [row(stage.stage, stage.seconds, [whole]) for stage, whole in zip(measured, expected, strict=True)]
    rows.append(row("all", sum(stage.seconds for stage in measured), expected))
    return Table(heads, rows, classes=[*[""] * len(measured), "best"])


def verdicts(expected: Sequence[Expected], place: Path) -> list[str]:
    """A line each on memory and disk: whether this machine has what the whole run is expected to take."""
    import psutil

    disk, free = sum(stage.disk_bytes for stage in expected), shutil.disk_usage(place).free
    memory, total = max(stage.memory_bytes for stage in expected), psutil.virtual_memory().total
    lines = []
    for what, needed, available in (("disk", disk, free), ("memory", memory, total)):
        fits = "fits" if needed <= available else "warning: does not fit"
        own = "free here" if what == "disk" else "in this machine"
        lines.append(f"{what}: {fits}, {size(needed)} to expect, {size(available)} {own}")
    return lines


# ── A rehearsal: every stage with the real models on 4 prompts and 3 steps, which finds failures within minutes ──

PROMPTS, STEPS, LINES = 4, 3, 32
QUESTIONS, HELD_OUT = 48, 0.25  # of the target's own at least, and the share of them for validation and for test
RESULT = "rehearsal.json"
INTERVAL = 0.02  # seconds between samples of memory: a model's load or a batch lasts longer
SUFFIX = "-rehearsal"


def _with(section: Any, values: dict[str, Any]) -> Any:
    """A section with these values at dotted keys; what lies in a section that is off is left out."""
    if section is None:
        return None
    own = {key: value for key, value in values.items() if "." not in key}
    for name in dict.fromkeys(key.partition(".")[0] for key in values if "." in key):
        inner = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        own[name] = _with(getattr(section, name), inner)
    return section.model_copy(update=own)


def shortened(recipe: Recipe, runs: Path) -> Recipe:
    """The recipe of a rehearsal in the folder `runs`."""
    name = recipe.name[: 100 - len(SUFFIX)] + SUFFIX
    train, cut, speedup, processes = recipe.train, recipe.cut, recipe.speedup, process_count()
    warming, steps = min(1, train.embedding_steps), STEPS
    if train.sparsity is not None:  # which takes a number of steps to remove anything
        ramp = train.sparsity.ramp
        steps = max(STEPS, math.ceil(LEAST_RAMP / ramp), math.ceil(warming / (1 - ramp)) if ramp < 1 else 0)
    values: dict[str, Any] = {
        "name": name,
        "corpus": _shortened_corpus(recipe),
        "answers.prompts": min(PROMPTS, recipe.answers.prompts),
        "answers.traffic.path": str((runs / name / "traffic.jsonl").resolve()),
        "cut.score_blocks": min(2, cut.score_blocks),
        "speedup.repeats": 5,
        "train.steps": steps,
        "train.embedding_steps": warming,
        "train.save_every": steps,
        "train.acceptance.every": steps,
        "train.acceptance.patience": None,
        "train.trackers": (),
        "eval.prompts": PROMPTS,
        "eval.file_blocks": min(PROMPTS, recipe.eval.file_blocks),
        **{f"speedup.{count}": 2 for count in ("prompts", "calibration_prompts")},
        "speedup.lengths": (max(speedup.lengths),),
    }
    if processes > 1:  # each needs a group of prompts and a shard of distributions
        values["answers.group"] = min(recipe.answers.group or PROMPTS, max(1, PROMPTS // processes))
        values["teacher.shard_blocks"] = 1
    values["cut.heal_steps"] = min(STEPS, cut.heal_steps)
    if cut.compare:  # the largest one takes the most memory; null leaves all layers
        values["cut.compare"] = (max(cut.compare, key=lambda one: (one.layers or math.inf, one.mlp_width or math.inf)),)
    short: Recipe = _with(recipe, values)
    return short


def _shortened_corpus(recipe: Recipe) -> Any:
    """Fewer tokens, and fewer questions of the target's own: of those, a larger share is held out, so that each split
    has some."""
    corpus = recipe.corpus
    values: dict[str, Any] = {"tokens": min(corpus.tokens, recipe.teacher.batch * corpus.block)}
    if corpus.asked:
        values["sources"] = tuple(
            source if source.questions is None else _with(source, {"questions": min(QUESTIONS, source.questions)})
            for source in corpus.sources
        )
        values |= {name: max(HELD_OUT, getattr(corpus, name)) for name in ("validation", "test")}
    return _with(corpus, values)


def rehearse(recipe: Recipe, short: Recipe, run: Run) -> str:
    """Run the stages of `short` in `run` and return the table of what `recipe` will take, in Markdown, with a
    verdict on this machine.

    A killed rehearsal goes on at the stage where it was; that of another recipe is replaced. Raises RunError where the
    folder is a run that no rehearsal made.
    """
    path, config = run.path(RESULT), dump_recipe(short)
    if run.folder.exists() and not path.exists() and any(run.folder.iterdir()):
        raise RunError(f"{run.folder} is a run and no rehearsal", "rename it, or give the recipe another name")
    done: list[Rehearsed] = []
    if path.exists():
        before = read_result(path, Rehearsal)
        if before.config == config:
            done = before.stages
        else:
            with run.locked(), faults_explained(run.folder):
                shutil.rmtree(run.folder)
    finished = {entry.stage for entry in done}
    run.open(config)
    forget_begun(run)  # what is left of such a stage would be taken for the whole of it
    write_result(path, Rehearsal(recipe.name, config, done, []))
    traffic, own = recipe.answers.traffic, short.answers.traffic
    if traffic is not None and own is not None and not Path(own.path).exists():
        lines = first_lines(Path(traffic.path), LINES)
        write_atomically(Path(own.path), lambda place: place.write_bytes(lines))
    with MemoryWatch() as memory, watched() as loops:

        def record(stage: str) -> None:
            if stage not in finished:
                done.append(_measured(run, stage, loops, memory.take()))
                write_result(path, Rehearsal(recipe.name, config, done, expect(recipe, short, run, done)))
            loops.clear()

        run_pipeline(short, run, show=record)
    expected = expect(recipe, short, run, done)
    write_result(path, Rehearsal(recipe.name, config, done, expected))
    table = document([estimate_table(done, expected), bullets(verdicts(expected, run.folder))])
    write_text(run.path("rehearsal.md"), table)
    return table


def _measured(run: Run, name: str, loops: list[Progress], memory: tuple[int, int]) -> Rehearsed:
    record = run.done(name) or {}
    disk = 0
    for place in find_stage(name).writes:
        path = run.path(place)
        disk += sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    return Rehearsed(name, record.get("seconds", 0.0), sum(loop.seconds for loop in loops), *memory, disk)


class MemoryWatch:
    """Peak memory of this process, sampled by a thread within a `with` block; of accelerators from torch's counters."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._peak = 0
        self._lock = threading.Lock()  # a sample taken before `take` must not be noted after it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        self.take()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(INTERVAL):
            with self._lock:
                self._peak = max(self._peak, self._process.memory_info().rss)

    def take(self) -> tuple[int, int]:
        """Bytes of the process and of all accelerators at their peaks since the last call; frees what is not used."""
        with self._lock:
            found = max(self._peak, self._process.memory_info().rss), _device_peak()
            gc.collect()
            self._peak = 0
        return found


def _device_peak() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    total = 0
    for index in range(torch.cuda.device_count()):
        total += int(torch.cuda.max_memory_reserved(index))
        torch.cuda.reset_peak_memory_stats(index)
    return total
