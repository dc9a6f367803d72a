"""Kill `distill train` at seeded moments of every stage, continue with the same command, and compare the final files.

    python scripts/fuzz/kill_runs.py --kills 100 --seed 0
    python scripts/fuzz/kill_runs.py recipes/demo.yaml --kills 22 --to DIR

Without RECIPE, the recipe is the tests' tiny one, with models of 0.1M parameters, which takes seconds. Each command is
a process of its own. One run without interruption gives the files to compare with, and the time of each stage. Each of
the other runs is killed once before its first stage and once in every stage, at a moment drawn within the stage's time,
or at once if the stage is already done. The same command then continues. 70 % of the kills are SIGKILL, 15 % SIGTERM,
15 % SIGINT. After the last two, the command must end with one line that says how to continue.

At the end, every file of corpus/, answers/, teacher/, cut/, draft/ and gguf/ must be equal (except the model card and
the parity record, which hold times and commands), and every figure of eval.json. Lost work is the time between the last
file that the killed stage kept, or its start, and the kill. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distill.files import file_digest
from distill.pipeline.stages import NAMES, find_stage
from distill.recipe import load_recipe
from distill.run import Run
from distill.tables import Cell, Row, Table, document

ROOT = Path(__file__).resolve().parents[2]
SAME = ("corpus", "answers", "teacher", "cut", "draft", "gguf")
VARYING = {"README.md", "export.json"}
RESUMING = ("answers", "teacher", "train", "speedup")  # These stages keep what they have saved.
SIGNALS = {signal.SIGKILL: 0.7, signal.SIGTERM: 0.15, signal.SIGINT: 0.15}  # signal -> share
START = "start"  # before the first stage
SAYS_HOW = ("the same command resumes", "the same command goes on", "start the same command again")


@dataclass(frozen=True)
class Kill:
    """A kill: its place, signal, exit status, seconds of lost work, and fault."""

    place: str
    number: signal.Signals
    code: int
    lost_seconds: float
    fault: str | None


class Job:
    """`distill train` of one recipe into one folder."""

    def __init__(self, recipe: Path, runs: Path) -> None:
        self.command = [sys.executable, "-m", "distill", "train", str(recipe), "--runs", str(runs)]
        self.run = Run(runs / load_recipe(recipe).name, load_recipe(recipe))
        self.log = runs / "stderr.txt"
        runs.mkdir(parents=True, exist_ok=True)

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.log, "wb") as log:
            return subprocess.Popen(self.command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def finish(self) -> float:
        """Run to the end and return the seconds until the first stage began. SystemExit if the command fails."""
        started = time.time()
        process = self.start()
        begun = 0.0
        while process.poll() is None:
            if not begun and self.run.path("stages").exists():
                begun = time.time() - started
            time.sleep(0.01)
        if process.returncode != 0:
            sys.exit(f"{' '.join(self.command)} ends with {process.returncode}:\n{self.said()}")
        return begun

    def kill(self, place: str, after_seconds: float, number: signal.Signals) -> Kill:
        """Start, wait for the place and a time within it, kill, and wait for the end."""
        started = time.time()
        process = self.start()
        begun = started if place == START else self._wait_for(process, place, started)
        done = self.run.path("stages", f"{place}.json")
        while time.time() < begun + after_seconds and process.poll() is None and not done.exists():
            time.sleep(0.002)
        if process.poll() is not None:
            return Kill(place, number, process.returncode, 0.0, self._fault(number, process.returncode))
        process.send_signal(number)
        killed = time.time()
        code = process.wait()
        fault = None if place == START else self._fault(number, code)
        return Kill(place, number, code, 0.0 if done.exists() else killed - self._kept(place, begun, killed), fault)

    def _wait_for(self, process: subprocess.Popen[bytes], stage: str, started: float) -> float:
        """Return when the stage began. Returns early if the process ends."""
        path = self.run.path("stages", f"{stage}.begun.json")
        while process.poll() is None:
            if path.exists() and path.stat().st_mtime >= started - 0.01:
                return time.time()
            time.sleep(0.002)
        return time.time()

    def _kept(self, place: str, begun: float, killed: float) -> float:
        """Return the time of the last file that the stage kept before it was killed, or of its start."""
        if place not in RESUMING:
            return begun
        files = [
            file for name in find_stage(place).writes for file in [self.run.path(name), *self.run.path(name).rglob("*")]
        ]
        times = [file.stat().st_mtime for file in files if file.is_file() and ".tmp" not in str(file)]
        return min(killed, max([begun, *times]))

    def _fault(self, number: signal.Signals, code: int) -> str | None:
        """Describe what is wrong with the end of a killed command. None if nothing is, or if its work was done."""
        if self.run.path("stages", f"{NAMES[-1]}.json").exists():
            return None
        if number == signal.SIGKILL:
            return None if code == -number else f"exit status {code}"
        said = self.said()
        if code != 128 + number or "Traceback" in said or not any(words in said for words in SAYS_HOW):
            return f"exit status {code} after {number.name}: {said[-500:]}"
        return None

    def digests(self) -> dict[str, str]:
        """Return SHA-256 of every file that must be equal, and of the figures of eval.json."""
        found = {
            file.relative_to(self.run.folder).as_posix(): file_digest(file)
            for name in SAME
            for file in sorted(self.run.path(name).rglob("*"))
            if file.is_file() and file.name not in VARYING
        }
        figures = json.loads(self.run.path("eval.json").read_text(encoding="utf-8"))
        del figures["command"]  # It names the folder of the run.
        found["figures of eval.json"] = json.dumps(figures, sort_keys=True)
        return found


def places_of(kills: int, stages: Sequence[str]) -> list[list[str]]:
    """Return the kills of each run, in order: every place once, and the rest in the last run."""
    every = [START, *stages]
    flat = [every[index % len(every)] for index in range(kills)]
    return [flat[first : first + len(every)] for first in range(0, kills, len(every))]


def table(kills: Sequence[tuple[Kill, bool]]) -> Table:
    """Return by place: kills by signal, orderly ends, lost seconds, and kills in runs with equal files."""
    rows: list[Row] = []
    for place in [START, *NAMES, "all"]:
        own = [(kill, equal) for kill, equal in kills if place in (kill.place, "all")]
        if own:
            lost = [kill.lost_seconds for kill, _ in own if kill.place != START]
            seconds = [sum(lost) / len(lost), max(lost)] if lost else [None, None]
            numbers = [sum(kill.number == number for kill, _ in own) for number in SIGNALS]
            in_order, equal = sum(kill.fault is None for kill, _ in own), sum(equal for _, equal in own)
            rows.append([place, len(own), *numbers, in_order, *(Cell(one, ".1f") for one in seconds), equal])
    heads = [
        "stage",
        "kills",
        *(number.name for number in SIGNALS),
        "in order",
        "lost, mean s",
        "lost, most s",
        "equal",
    ]
    return Table(heads, rows)


def kill_runs(recipe: Path, folder: Path, kills: int, seed: int) -> int:
    """Make all runs of a recipe and return the exit status."""
    draw = random.Random(seed)
    whole = Job(recipe, folder / "whole")
    startup = whole.finish()
    done = {name: whole.run.done(name) for name in NAMES}  # None for a stage that the recipe does not have
    seconds = {name: record["seconds"] for name, record in done.items() if record is not None}
    expected = whole.digests()
    print(f"without interruption: {startup + sum(seconds.values()):.0f} s, {len(expected)} files")
    rows: list[tuple[Kill, bool]] = []
    wrong = False
    for index, places in enumerate(places_of(kills, [*seconds])):
        job = Job(recipe, folder / f"killed-{index}")
        own = []
        for place in places:
            number = draw.choices([*SIGNALS], [*SIGNALS.values()])[0]
            own.append(job.kill(place, draw.uniform(0, seconds.get(place, startup)), number))
        job.finish()
        found = job.digests()
        different = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        rows += [(kill, not different) for kill in own]
        faults = [f"{kill.place}: {kill.fault}" for kill in own if kill.fault is not None]
        wrong = wrong or bool(different or faults)
        print(f"run {index}: {len(own)} kills; different files: {len(different)}", *different, *faults, flush=True)
        shutil.rmtree(folder / f"killed-{index}")
    print(document([table(rows)]))
    return int(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill runs at seeded moments, resume them, and compare their files.")
    parser.add_argument("recipe", nargs="?", type=Path, help="by default the tests' tiny one")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, help="folder for the runs; by default a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.to or Path(temporary)
        recipe = arguments.recipe
        if recipe is None:
            sys.path.append(str(ROOT / "tests"))
            import tiny

            recipe = tiny.build_world(folder / "world")
        sys.exit(kill_runs(recipe.resolve(), folder.resolve(), arguments.kills, arguments.seed))


if __name__ == "__main__":
    main()
