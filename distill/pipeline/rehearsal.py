"""A rehearsal: every stage with the real models on 4 prompts and 3 steps, which finds failures within minutes.

It keeps every size that peak memory depends on (blocks, batches of training, lengths of texts) and shortens what
repeats. From its figures follows what the whole run will take.
"""

from __future__ import annotations

import gc
import math
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.data.traffic import first_lines
from distill.devices import take_peaks
from distill.errors import RunError, faults_explained
from distill.files import read_result, write_atomically, write_result, write_text
from distill.pipeline.running import forget_begun, run_pipeline
from distill.pipeline.stages import find_stage
from distill.planning.hours import Rehearsed, StageEstimate, estimate_table, rehearsed_hours
from distill.processes import process_count
from distill.progress import Progress, watched
from distill.recipe import Recipe, dump_recipe
from distill.run import Run
from distill.surgery.sparsity import LEAST_RAMP
from distill.tables import bullets, document, size


@dataclass(frozen=True)
class Rehearsal:
    """rehearsal.json. `config` is the shortened recipe; `expected` holds one entry for each of `stages`."""

    recipe: str
    config: str
    stages: list[Rehearsed]
    expected: list[StageEstimate]


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
                write_result(path, Rehearsal(recipe.name, config, done, rehearsed_hours(recipe, short, run, done)))
            loops.clear()

        run_pipeline(short, run, show=record)
    expected = rehearsed_hours(recipe, short, run, done)
    write_result(path, Rehearsal(recipe.name, config, done, expected))
    table = document([estimate_table(expected, done), bullets(verdicts(expected, run.folder))])
    write_text(run.path("rehearsal.md"), table)
    return table


def verdicts(expected: Sequence[StageEstimate], place: Path) -> list[str]:
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
            found = max(self._peak, self._process.memory_info().rss), take_peaks()
            gc.collect()
            self._peak = 0
        return found
