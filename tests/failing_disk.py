"""A program and the tests' helper: a tiny run on a disk that fails at the n-th read or write, for many n.

    python tests/failing_disk.py [--stages corpus,answers,…] [--share 20] [--seed 0]

For each stage, the calls that read or write below the world and the run are counted once (tests/faulty_disk.c, which
is preloaded, so that the readers and writers of Rust and C++ libraries count too). Calls of one function on one file
are a group. Of every n-th group (--share 1: of all) one call is drawn. The stage runs from a copy of the run as it was
before it, and that call fails: a read with EIO; a write with EIO, or with ENOSPC from there on. The command must end
with exit status 2 and one message that names a path below the world or the run, or finish with the right files where a
library tried again; the same command afterwards must finish, and its files must be those of a run without faults.
"""

from __future__ import annotations

import argparse
import collections
import errno
import json
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
from killed_runs import run_jobs

FOLDERS = ("corpus", "answers", "teacher", "cut", "draft", "gguf")  # whose files are the same in every run
TIMED = ("README.md", "export.json")  # apart from these, which hold a time, a command or a machine


@dataclass(frozen=True)
class Call:
    """A call of a stage: `number` counts those of its kind, 'r' or 'w', from 1."""

    stage: str
    kind: str
    number: int
    function: str
    path: str


@dataclass(frozen=True)
class Failure:
    """What a command made of a fault: its exit status and output, those of the same command again, and the files that
    differ in the end."""

    call: Call
    error: int
    code: int
    output: str
    again: int
    output_again: str
    different: tuple[str, ...]

    def fault(self, places: tuple[str, ...]) -> str | None:
        """What is wrong with this outcome; None where nothing is."""
        said = self.output[self.output.index("distill: ") :] if "distill: " in self.output else self.output
        if self.again != 0:
            return f"the same command ends with {self.again}: {self.output_again[-600:]}"
        if self.different:
            return f"other files: {', '.join(self.different[:5])}"
        if self.code == 0:
            return None
        if self.code != 2:
            return f"exit status {self.code}: {self.output[-600:]}"
        if self.output.count("distill: ") != 1 or "Traceback" in self.output or "Exception ignored" in self.output:
            return f"not one message: {self.output[-600:]}"
        if not any(place in said for place in places):
            return f"no path is named: {said}"
        if "delete" in said or "--redo" in said:
            return f"it advises to remove what may be whole: {said}"
        return None


def compile_disk(folder: Path) -> Path | None:
    """The library to preload; None where there is no gcc."""
    if shutil.which("gcc") is None:
        return None
    library = folder / "faulty_disk.so"
    source = Path(__file__).with_suffix("").with_name("faulty_disk.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


class Disk:
    """A world with a run in pieces, whose stages can be run on a disk that fails."""

    def __init__(self, world: Path, folder: Path, library: Path, stages: tuple[str, ...]) -> None:
        self.world, self.folder, self.stages = world, folder, stages
        self.environment = {"LD_PRELOAD": str(library), "FAULT_ROOTS": f"{world}:{folder / 'runs'}"}
        self.calls = self._count()

    def _argv(self, runs: Path, stage: str) -> list[str]:
        return ["train", str(self.world / "recipe.yaml"), "--runs", str(runs), "--until", stage]

    def _count(self) -> list[Call]:
        """Run every stage once, keep the run as it was before each, and list the calls of those that were asked for."""
        runs, jobs = self.folder / "runs" / "whole", []
        last = max(tiny.STAGES.index(stage) for stage in self.stages)
        (runs / "tiny").mkdir(parents=True)
        for stage in tiny.STAGES[: last + 1]:
            if stage in self.stages:
                jobs.append({"copy": [str(runs), str(self.folder / "before" / stage)]})
            jobs.append({"argv": self._argv(runs, stage), "calls": str(self.folder / f"calls-{stage}")})
        for job, outcome in zip(jobs, run_jobs(self.folder, jobs, self.environment), strict=True):
            assert outcome["code"] == 0, (job, outcome["output"])
        return [
            Call(stage, kind, int(number), function, path)
            for stage in self.stages
            for kind, number, function, path in (
                line.split("\t") for line in (self.folder / f"calls-{stage}").read_text().splitlines()
            )
        ]

    def fail(self, chosen: list[tuple[Call, int]], timeout: float = 900) -> list[Failure]:
        """Run the stage of each call with that error at it, and the same command again without."""
        jobs: list[dict[str, Any]] = []
        for index, (call, error) in enumerate(chosen):
            runs = self.folder / "runs" / str(index)
            shutil.rmtree(runs, ignore_errors=True)
            fault = {"kind": call.kind, "at": call.number, "error": error, "repeat": error == errno.ENOSPC}
            jobs += [
                {"copy": [str(self.folder / "before" / call.stage), str(runs)]},
                {"argv": self._argv(runs, call.stage), "fault": fault},
                {"argv": self._argv(runs, call.stage)},
            ]
        outcomes = run_jobs(self.folder, jobs, self.environment, timeout)
        found = []
        for index, (call, error) in enumerate(chosen):
            failed, again = outcomes[3 * index + 1 : 3 * index + 3]
            runs = self.folder / "runs" / str(index)
            different = self._different(runs / "tiny", call.stage)
            shutil.rmtree(runs)
            found.append(
                Failure(call, error, failed["code"], failed["output"], again["code"], again["output"], different)
            )
        return found

    def _different(self, run: Path, stage: str) -> tuple[str, ...]:
        """The files that are not those of the run without faults; temporary ones that were left count too."""
        made = set(tiny.STAGES[: tiny.STAGES.index(stage) + 1])
        folders = [name for name in FOLDERS if {"draft": "train", "gguf": "export"}.get(name, name) in made]
        whole = self.folder / "runs" / "whole" / "tiny"
        names = []
        for folder in folders:
            one, other = tiny.contents(run / folder, *TIMED), tiny.contents(whole / folder, *TIMED)
            names += [f"{folder}/{name}" for name in {*one, *other} if one.get(name) != other.get(name)]
        return tuple(sorted([*names, *(p.name for p in run.rglob("*") if p.name.endswith((".tmp", ".old")))]))


def choose(calls: list[Call], share: int, draw: random.Random) -> list[tuple[Call, int]]:
    """A call, drawn, of every `share`-th group in the order of first calls, with its error."""
    found = []
    for index, own in enumerate(list(groups(calls).values())[draw.randrange(share) :: share]):
        call = draw.choice(own)
        found.append((call, errno.EIO if call.kind == "r" else (errno.ENOSPC, errno.EIO)[index % 2]))
    return found


def groups(calls: list[Call]) -> dict[tuple[str, ...], list[Call]]:
    """The calls by stage, kind, function and file."""
    found: dict[tuple[str, ...], list[Call]] = collections.defaultdict(list)
    for call in calls:
        found[call.stage, call.kind, call.function, call.path].append(call)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--stages", default=",".join(tiny.STAGES))
    parser.add_argument("--share", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        library = compile_disk(folder)
        if library is None:
            sys.exit("this needs gcc")
        tiny.build_world(folder / "world")
        disk = Disk(folder / "world", folder / "work", library, tuple(arguments.stages.split(",")))
        draw, wrong = random.Random(arguments.seed), 0
        print("| stage | reads | writes | groups | failed | refused, one message | finished all the same | wrong |")
        print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
        for stage in disk.stages:
            own = [call for call in disk.calls if call.stage == stage]
            found = disk.fail(choose(own, arguments.share, draw), timeout=24 * 3600)
            places = (str(folder),)
            faults = [(failure, fault) for failure in found if (fault := failure.fault(places)) is not None]
            kinds = collections.Counter(call.kind for call in own)
            codes = collections.Counter(failure.code for failure in found if failure.fault(places) is None)
            counts = [kinds["r"], kinds["w"], len(groups(own)), len(found), codes[2], codes[0], len(faults)]
            print(f"| {stage} | {' | '.join(map(str, counts))} |")
            for failure, fault in faults:
                print(json.dumps({"call": vars(failure.call), "error": failure.error, "fault": fault}), file=sys.stderr)
            sys.stdout.flush()
            wrong += len(faults)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
