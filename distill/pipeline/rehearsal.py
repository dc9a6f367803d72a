"""A rehearsal: every stage with the real models on 4 prompts and 3 steps, to know within minutes what cannot work.

It keeps every size that peak memory depends on (blocks, batches of training, lengths of texts) and shortens what
repeats. estimate.py says from its figures what the whole run will take.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from distill.errors import RunError
from distill.faults import faults_explained
from distill.files import write_atomically, write_text
from distill.pipeline.estimate import as_markdown, expect, verdicts
from distill.pipeline.memory_watch import MemoryWatch
from distill.pipeline.running import run_pipeline
from distill.pipeline.stages import find_stage
from distill.progress import Progress, watched
from distill.recipe import Recipe, dump_recipe
from distill.results.rehearsal_results import Rehearsal, Rehearsed
from distill.results.serialise import read_result, write_result
from distill.run import Run
from distill.target.traffic import first_lines

PROMPTS, STEPS, LINES = 4, 3, 32
QUESTIONS, HELD_OUT = 48, 0.25  # of the target's own at least, and the share of them for validation and for test
RESULT = "rehearsal.json"
SUFFIX = "-rehearsal"


def _changed(section: Any, **values: Any) -> Any:
    return section.model_copy(update=values)


def shortened(recipe: Recipe, runs: Path) -> Recipe:
    """The recipe of a rehearsal in the folder `runs`."""
    name = recipe.name[: 100 - len(SUFFIX)] + SUFFIX
    train, cut, speedup, traffic = recipe.train, recipe.cut, recipe.speedup, recipe.answers.traffic
    if traffic is not None:
        traffic = _changed(traffic, path=str((runs / name / "traffic.jsonl").resolve()))
    search = cut.search
    if search is not None:  # the largest cut: it takes the most memory
        search = _changed(
            search,
            layers=(max(search.layers),),
            mlp_width=search.mlp_width and (max(search.mlp_width),),
            heal_steps=min(STEPS, search.heal_steps),
            outtypes=search.outtypes[:1],
        )
    steps = max(STEPS, len(train.parts))
    each = max(1, STEPS // max(1, len(train.parts)))
    replay = train.replay
    if replay is not None:
        replay = _changed(replay, prompts=min(PROMPTS, replay.prompts), steps=1, judges=PROMPTS)
    acceptance = train.acceptance
    if acceptance is not None:
        acceptance = _changed(acceptance, every=steps, patience=None)
    return recipe.model_copy(
        update={
            "name": name,
            "corpus": _shortened_corpus(recipe),
            "answers": _changed(recipe.answers, prompts=min(PROMPTS, recipe.answers.prompts), traffic=traffic),
            "cut": _changed(cut, search=search, score_blocks=min(2, cut.score_blocks)),
            "profile": _changed(recipe.profile, repeats=5),
            "train": _changed(
                train,
                steps=steps,
                parts=tuple(_changed(part, share=None, tokens=None, steps=each) for part in train.parts),
                embedding_steps=min(1, train.embedding_steps),
                save_every=steps,
                acceptance=acceptance,
                replay=replay,
                trackers=(),
            ),
            "eval": _changed(recipe.eval, prompts=PROMPTS, file_blocks=min(PROMPTS, recipe.eval.file_blocks)),
            "speedup": _changed(
                speedup,
                prompts=2,
                grown_prompts=2,
                calibration_prompts=2,
                lengths=(max(speedup.lengths),),
                grown_lengths=(max(speedup.grown_lengths),),
            ),
        }
    )


def _shortened_corpus(recipe: Recipe) -> Any:
    """Fewer tokens, and fewer questions of the target's own: of those, a larger share is held out, so that each split
    has some."""
    corpus = recipe.corpus
    values: dict[str, Any] = {"tokens": min(corpus.tokens, recipe.teacher.batch * corpus.block)}
    if corpus.asked:
        most = QUESTIONS
        if recipe.train.replay is not None:  # refused where too few validation prompts are left to judge it
            acceptance = recipe.train.acceptance
            judged = PROMPTS + (0 if acceptance is None else acceptance.prompts)
            most = max(most, round(2 * judged / HELD_OUT))
        values["sources"] = tuple(
            source if source.questions is None else _changed(source, questions=min(most, source.questions))
            for source in corpus.sources
        )
        values |= {name: max(HELD_OUT, getattr(corpus, name)) for name in ("validation", "test")}
    return _changed(corpus, **values)


def rehearse(recipe: Recipe, short: Recipe, run: Run) -> str:
    """Run the stages of `short` in `run` and return the table of what `recipe` will take, in Markdown, with a
    verdict on this machine.

    A killed rehearsal goes on where it was; that of another recipe is replaced. Raises RunError where the folder is a
    run that no rehearsal made.
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
    table = as_markdown(done, expected) + "\n" + "\n".join(verdicts(expected, run.folder)) + "\n"
    write_text(run.path("rehearsal.md"), table)
    return table


def _measured(run: Run, name: str, loops: list[Progress], memory: tuple[int, int]) -> Rehearsed:
    record = run.done(name) or {}
    disk = 0
    for place in find_stage(name).writes:
        path = run.path(place)
        disk += sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    return Rehearsed(name, record.get("seconds", 0.0), sum(loop.seconds for loop in loops), *memory, disk)
