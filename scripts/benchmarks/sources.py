"""What a draft learns from answers of a GGUF file or of a server, against answers that transformers writes here.

    python scripts/benchmarks/sources.py runs/demo --to sources/           # makes what is missing; resumes

RUN is a run that has cut/ (`distill train recipes/demo.yaml --until cut`); its corpus and cut are used as they are. The
same prompts, sampler and seeds go to each writer; distributions are taken and drafts trained by the stages themselves,
with the same settings, from the same cut. Acceptance is that under sampling on the target's own continuations of test
prompts, averaged over seeds, with the interval of the difference to transformers' answers, paired by prompt. The server
is llama-cpp-python's own, and serves the same file as the GGUF writer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy  # noqa: E402
import torch  # noqa: E402
from acceptance import Texts  # noqa: E402
from writing_worlds import llama_server  # noqa: E402

from distill.files import write_json  # noqa: E402
from distill.intervals import Interval, paired_ratio_interval, ratio_interval  # noqa: E402
from distill.models.conversion.writer import export_gguf  # noqa: E402
from distill.models.hugging_face import load_model  # noqa: E402
from distill.recipe import Recipe, load_recipe  # noqa: E402
from distill.run import Run  # noqa: E402
from distill.target.answers import answers  # noqa: E402
from distill.target.teacher import teacher  # noqa: E402
from distill.texts import read_answers, read_prompts  # noqa: E402
from distill.training.loop import train  # noqa: E402

SOURCES = ("transformers", "GGUF file", "server")
PLAIN = ("train.acceptance=null",)


@contextlib.contextmanager
def writer_of(source: str, target: str, folder: Path, concurrency: int) -> Iterator[list[str]]:
    """The overrides that make `source` write the answers; a server runs meanwhile."""
    if source == "transformers":
        yield ["answers.writer=null"]
        return
    path = folder / "target-f32.gguf"
    if not path.exists():
        export_gguf(Path(target), path, "f32")
    if source == "GGUF file":
        yield ["answers.writer=" + json.dumps({"gguf": str(path)})]
        return
    with llama_server(path) as url:
        yield ["answers.writer=" + json.dumps({"urls": [url], "model": "tiny", "concurrency": concurrency})]


def prepared(folder: Path, source: Path, names: Sequence[str]) -> None:
    """A run directory that shares some folders with another run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / name).exists():
            (folder / name).symlink_to((source / name).resolve(), target_is_directory=True)


def finished(recipe: Recipe, run: Run, name: str, stage: Callable[[Recipe, Run], list[Path]]) -> None:
    """Run a stage and record it, as the command line does."""
    started = time.time()
    run.finish(name, "benchmark", {}, stage(recipe, run), started)


def taught(options: Any, source: str) -> tuple[Path, dict[str, Any]]:
    """Answers and distributions of one source; what is there stays. The run directory and figures of the answers."""
    folder = options.to / source.replace(" ", "-")
    prepared(folder, options.run, ("corpus", "cut"))
    for name in ("corpus", "cut"):
        (folder / "stages").mkdir(exist_ok=True)
        shutil.copy(options.run / "stages" / f"{name}.json", folder / "stages")
    figures = folder / "answers.json"
    plain = load_recipe(options.run / "config.yaml", [*PLAIN, *options.overrides])
    if not figures.exists():
        with writer_of(source, plain.target.model, options.to, options.concurrency) as more:
            recipe = load_recipe(options.run / "config.yaml", [*PLAIN, *options.overrides, *more])
            started = time.perf_counter()
            finished(recipe, Run(folder, recipe), "answers", answers)
            seconds = time.perf_counter() - started
        found = read_answers(Run(folder, recipe), "train")
        finished(plain, Run(folder, plain), "teacher", teacher)
        write_json(figures, {"answers": len(found), "tokens": sum(len(a.answer) for a in found), "seconds": seconds})
    return folder, json.loads(figures.read_text())


def trained(options: Any, folder: Path, seed: int, texts: Texts) -> list[list[float]]:
    """Acceptance of the draft trained with one seed: sum and positions by prompt [U][2]."""
    path = folder / f"seed-{seed}.json"
    if not path.exists():
        recipe: Recipe = load_recipe(options.run / "config.yaml", [*PLAIN, *options.overrides, f"seed={seed}"])
        own = folder / f"seed-{seed}"
        prepared(own, folder, ("corpus", "cut", "answers", "teacher", "stages"))
        train(recipe, Run(own, recipe))
        draft = load_model(str(own / "draft"), "float32", torch.device("cpu"))
        write_json(path, texts.accepted(draft)["sampling"])
    found: list[list[float]] = json.loads(path.read_text())
    return found


def compare(options: Any) -> dict[str, dict[str, Any]]:
    """Makes what is missing: by source its answers, acceptance and the gain over the first source, with intervals."""
    recipe = load_recipe(options.run / "config.yaml", list(options.overrides))
    options.to.mkdir(parents=True, exist_ok=True)
    run = Run(options.run, recipe)
    vocabulary = json.loads((options.run / "teacher" / "manifest.json").read_text())["vocabulary"]
    target = load_model(recipe.target.model, "float32", torch.device("cpu"))
    texts = Texts(target, recipe, read_prompts(run, "test"), options, vocabulary)
    del target
    before = numpy.array(texts.accepted(load_model(str(run.path("cut")), "float32", torch.device("cpu")))["sampling"])
    found: dict[str, dict[str, Any]] = {"cut": {"alpha": ratio_interval(*before.T, 2000, 0.95)}}
    first = None
    for source in SOURCES:
        folder, figures = taught(options, source)
        values = sum(numpy.array(trained(options, folder, seed, texts)) for seed in options.seeds)
        first = values if first is None else first
        gain = paired_ratio_interval(*first.T, *values.T, 2000, 0.95)
        found[source] = {**figures, "alpha": ratio_interval(*values.T, 2000, 0.95), "gain": gain}
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """The comparison as Markdown."""

    def shown(interval: Interval, sign: str = "") -> str:
        return f"{interval.mean:{sign}.4f} [{interval.low:{sign}.4f}, {interval.high:{sign}.4f}]"

    lines = [
        "| answers by | answers | tokens | tokens/s | acceptance | against transformers |",
        "|---|--:|--:|--:|---|---|",
    ]
    for source, one in found.items():
        if "answers" not in one:
            lines.append(f"| none: the cut draft | | | | {shown(one['alpha'])} | |")
            continue
        rate = one["tokens"] / one["seconds"]
        gain = "" if source == SOURCES[0] else shown(one["gain"], "+")
        lines.append(f"| {source} | {one['answers']} | {one['tokens']} | {rate:.0f} | {shown(one['alpha'])} | {gain} |")
    return "\n".join(lines)


def parsed(arguments: list[str] | None = None) -> Any:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=Path("sources"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96, help="of the texts on which acceptance is measured")
    parser.add_argument("overrides", nargs="*", help="of the run's recipe, a.b=c")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(table(compare(parsed())))
