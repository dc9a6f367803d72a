"""Feed hostile files and command lines to every reader. Each input must be read, or refused in one clear message.

    python scripts/fuzz/fuzz.py                              100,000 inputs of all kinds; the same command resumes
    python scripts/fuzz/fuzz.py --kinds recipes,safetensors --inputs 5000 --seed 7
    python scripts/fuzz/fuzz.py --replay FILE                one saved input again, with its traceback

An input passes if its readers return, or raise a DistillError with a short, printable message without words of Python
or of a library's internals. Everything else is a failure: another exception, the death of the process, more than the
kind's seconds (twice, since other programs use the machine too), or more than 1 GB of memory above the process's own.
RLIMIT_AS refuses more memory, and a MemoryError that a reader turned into a message counts too. A failure is printed
once per place, with the smallest input found, which is saved under --to.

The kinds are in fuzz_kinds.py. Inputs are made from the valid files of the tests' tiny job (tests/tiny.py), which runs
first. A kind is fed in a child process that is forked after all imports. Kinds that may end their process (llama.cpp)
get a child for each input. Batches of inputs depend only on seed, kind and number.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import pickle
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(
    {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GGML_NO_BACKTRACE": "1"}
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "fuzz"), str(ROOT / "tests")]

from fuzz_kinds import KINDS, Kind, World, Wrong  # noqa: E402
from hypothesis.control import BuildContext  # noqa: E402
from hypothesis.errors import StopTest  # noqa: E402
from hypothesis.internal.conjecture.data import ConjectureData  # noqa: E402

from distill.errors import DistillError  # noqa: E402
from distill.tables import Cell, Table, document  # noqa: E402

MOST_MEMORY = 2**30  # bytes that a small file may make a reader use
TOO_LONG = "took too long"
# Words of Python's own errors and of libraries' internals. Messages for users must not contain them.
FOREIGN = re.compile(
    r"object has no attribute|object is not (subscriptable|iterable|callable)|index out of range|unhashable type|"
    r"not supported between instances|unsupported operand|NoneType|must be (str|real number|a string), not|"
    r"takes \d+ positional|unexpected keyword|required positional|<class '|<built-in|Traceback|pydantic|"
    r"validation error|Input should|codec can't|embedded null|indices must be integers|not all arguments|"
    r"PanicException|called `(Result|Option)::|bug in distill"
)
# Words of torch, numpy, Rust and the operating system for refused memory, in exceptions other than MemoryError.
NO_MEMORY = re.compile("can't allocate memory|annot allocate memory|Unable to allocate|out of memory|ENOMEM", re.I)
MOST_CHARACTERS = 4000


class Hang(BaseException):
    """An input took longer than its kind allows."""


@dataclass
class Failure:
    """What went wrong with an input, and where. Failures of one place have one cause."""

    place: str
    words: str
    example: str  # repr of the input


@dataclass
class Outcome:
    """The figures of a batch of inputs of one kind."""

    kind: str
    batch: int
    inputs: int = 0
    read: int = 0
    refused: int = 0
    aborted: int = 0
    failed: int = 0
    seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)


# ── One input ──


def place_of(error: BaseException) -> str:
    """Return the kind of an exception and the last of our own lines that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}distill{os.sep}" in frame.filename] or frames[-1:]
    return f"{type(error).__name__} {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else repr(error)


def fault_of(error: DistillError) -> str | None:
    """Return what is wrong with the message of a refusal, or None for a good message."""
    text = str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or NO_MEMORY.search(str(cause)):
            return "more memory than allowed, refused as if the file were damaged"
        cause = cause.__cause__ or cause.__context__
    try:
        text.encode()
    except UnicodeEncodeError:
        return "a message that cannot be printed"
    if len(text) > MOST_CHARACTERS:
        return f"a message of {len(text)} characters"
    found = FOREIGN.search(text)
    return f"foreign words: {found[0]}" if found else None


def failure_of(kind: Kind, world: World, given: Any) -> tuple[bool, Failure | None]:
    """Return whether the input was refused, and its failure. Every reader of the kind gets it in turn."""
    refused = False
    for reader in kind.readers(world, given):
        try:
            reader()
        except DistillError as error:
            refused = True
            fault = fault_of(error)
            if fault is not None:
                return True, Failure(f"{fault}, {place_of(error)}", str(error)[:600], repr(given))
        except Hang as error:
            return False, Failure(place_of(error), TOO_LONG, repr(given))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            last = "".join(traceback.format_exception(error)[-14:])[-2500:]
            return False, Failure(
                place_of(error) if not isinstance(error, Wrong) else f"exit {error}"[:80], last, repr(given)
            )
    return refused, None


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang in this process if the block takes longer."""

    def hang(*_: Any) -> None:
        raise Hang(TOO_LONG)

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ── A batch, in a child process ──


def limit_memory() -> None:
    """Refuse this process more than MOST_MEMORY above its present address space."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_MEMORY, resource.RLIM_INFINITY))


def forked(work: Callable[[], bytes], hangs: Callable[[], bool]) -> tuple[bytes, int]:
    """Return the result of `work` in a forked child, and its exit status.

    `hangs` is asked each second whether to kill the child.
    """
    receive, send = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            os.write(send, work())
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(send)
    data, piece = b"", b"-"
    while piece:
        if select.select([receive], [], [], 1.0)[0]:
            data += (piece := os.read(receive, 1 << 20))
        elif hangs():
            os.kill(child, signal.SIGKILL)
    os.close(receive)
    return data, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ended(status: int) -> str:
    """Say how a process ended."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def feed_isolated(kind: Kind, world: World, given: Any) -> tuple[str, Failure | None]:
    """Return the outcome of an input in a child of its own: read, refused, failed, or aborted by C code."""

    def work() -> bytes:
        limit_memory()
        return pickle.dumps(timed(kind, world, given))

    limit = time.monotonic() + kind.most_seconds + 5
    data, status = forked(work, lambda: time.monotonic() > limit)
    if status == -signal.SIGKILL and time.monotonic() > limit:
        return "failed", Failure("hang in C code", "killed", repr(given))
    if status != 0 or not data:
        return "aborted", Failure(f"process ended: {ended(status)}", ended(status), repr(given))
    refused, failure = pickle.loads(data)
    return ("failed" if failure else "refused" if refused else "read"), failure


def timed(kind: Kind, world: World, given: Any) -> tuple[bool, Failure | None]:
    """Return `failure_of` within the kind's seconds. An input that takes longer is a failure."""
    try:
        with limited(kind.most_seconds):
            return failure_of(kind, world, given)
    except Hang as error:
        return False, Failure(place_of(error), TOO_LONG, repr(given))


def batches_of(kind: Kind, world: World, seed: int, batch: int, count: int, current: Path | None = None) -> Outcome:
    """Feed one batch. Every failure's place counts once, with its smallest input.

    If this process dies, the parent finds the input that was being read in the file `current`.
    """
    outcome, places = Outcome(kind.name, batch), dict[str, Failure]()
    started = time.monotonic()

    def one(given: Any) -> None:
        if current is not None:
            current.write_bytes(pickle.dumps(given))
        if kind.isolated:
            verdict, failure = feed_isolated(kind, world, given)
        else:
            refused, failure = timed(kind, world, given)
            if failure is not None and failure.words == TOO_LONG:  # Another program may have slowed the machine down.
                refused, failure = timed(kind, world, given)
            verdict = "failed" if failure else "refused" if refused else "read"
        setattr(outcome, verdict, getattr(outcome, verdict) + 1)
        outcome.inputs += 1
        if failure is not None:
            kept = places.get(failure.place)
            if kept is None or len(failure.example) < len(kept.example):
                places[failure.place] = failure

    run_examples(one, kind.inputs(world), seed, batch, count)
    outcome.failures = [vars(failure) for failure in places.values()]
    outcome.seconds = time.monotonic() - started
    return outcome


def run_examples(test: Callable[[Any], None], inputs: Any, seed: int, batch: int, count: int) -> None:
    """Call `test` with `count` inputs of a strategy, which depend only on seed and batch.

    The strategy is drawn from directly, because hypothesis's engine keeps a tree of all choices and collects garbage,
    which costs several times as much as most readers. An input that exceeds hypothesis's limit is drawn again.
    """
    number = int.from_bytes(hashlib.sha256(f"{seed}/{batch}".encode()).digest()[:8], "big")
    choices, made = random.Random(number), 0
    while made < count:
        data = ConjectureData(random=random.Random(choices.getrandbits(64)))
        try:
            with BuildContext(data, is_final=False, wrapped_test=test):
                given = data.draw(inputs)
        except StopTest:
            continue
        test(given)
        made += 1


# ── All kinds, in the parent ──


def preload() -> None:
    """Import everything heavy once before the forks. No threads may be started here."""
    import gguf  # noqa: F401
    import llguidance  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import transformers.models.auto.modeling_auto
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen2.tokenization_qwen2

    import distill.cli.app
    import distill.engines.loaded
    import distill.report.card  # noqa: F401
    from distill.pipeline.stages import STAGES

    for stage in STAGES:
        stage.load()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def in_child(kind: Kind, number: int, count: int, base: Path, seed: int) -> Outcome:
    """Return the outcome of a batch in a forked child. If it dies or hangs, include the input that it was reading."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    current = place / "current.pickle"

    def work() -> bytes:
        try:
            outcome = vars(feed(kind, number, count, World(base, place / "world"), seed, current))
        except BaseException as error:
            outcome = {"broken": "".join(traceback.format_tb(error.__traceback__)[-6:]) + repr(error)[:300]}
        return json.dumps(outcome).encode()

    def hangs() -> bool:  # Python could not interrupt it in this time.
        return current.exists() and time.time() - current.stat().st_mtime > kind.most_seconds * 3 + 60

    data, status = forked(work, hangs)
    try:
        if data:
            found = json.loads(data)
            if "broken" in found:
                raise SystemExit(f"fuzz.py itself failed on {kind.name}:\n{found['broken']}")
            return Outcome(**found)
        given = pickle.loads(current.read_bytes()) if current.exists() else None  # It may die while it warms up.
        failure = Failure(f"process ended: {ended(status)}", ended(status), repr(given))
        return Outcome(kind.name, number, count, failed=count, failures=[vars(failure)])
    finally:
        shutil.rmtree(place, ignore_errors=True)


def feed(kind: Kind, number: int, count: int, world: World, seed: int, current: Path) -> Outcome:
    """Feed one batch in this process, a child that prints nothing. `current` holds the input that is being read."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    warnings.simplefilter("ignore")
    world.place.mkdir()
    warm_up(kind, world)
    if not kind.isolated:
        limit_memory()
    return batches_of(kind, world, seed, number, count, current)


def warm_up(kind: Kind, world: World) -> None:
    """Feed a few inputs that do not count, so that lazy imports take no memory or time from those that do."""
    if kind.isolated:
        from distill.gguf.library import library

        library()
        return

    def once(given: Any) -> None:
        with contextlib.suppress(Hang), limited(60):
            failure_of(kind, world, given)

    run_examples(once, kind.inputs(world), 0, 0, 5)


def planned(kinds: Sequence[Kind], inputs: int) -> list[tuple[Kind, int, int]]:
    """Return the batches of each kind by number, with their inputs. The shares add up to `inputs`."""
    total = sum(kind.share for kind in kinds)
    counts = [max(1, int(inputs * kind.share / total)) for kind in kinds]
    counts[0] += max(0, inputs - sum(counts))
    return [
        (kind, number, min(kind.batch, count - start))
        for kind, count in zip(kinds, counts, strict=True)
        for number, start in enumerate(range(0, count, kind.batch))
    ]


def kept(outcome: Outcome, known: set[tuple[str, str]], file: Path) -> Outcome:
    """Write the outcome to the file of outcomes and return it. A failure of a new place is printed and saved."""
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(vars(outcome)) + "\n")
    for failure in outcome.failures:
        if (outcome.kind, failure["place"]) not in known:
            known.add((outcome.kind, failure["place"]))
            path = save_example(file.parent, outcome.kind, failure)
            print(f"FAILURE {outcome.kind}: {failure['place']}\n  {path}\n{failure['words']}\n", flush=True)
    return outcome


COUNTED = ("inputs", "read", "refused", "aborted", "failed", "seconds")


def table(kinds: Sequence[Kind], outcomes: Sequence[Outcome]) -> Table:
    """Return the table of figures by kind."""
    sums = {
        kind.name: [sum(getattr(one, name) for one in outcomes if one.kind == kind.name) for name in COUNTED]
        for kind in kinds
    }
    sums["all"] = [sum(column) for column in zip(*sums.values(), strict=True)]
    return Table(
        ["kind", *COUNTED], [[name, *counts, Cell(seconds, ".0f")] for name, (*counts, seconds) in sums.items()]
    )


def save_example(folder: Path, kind: str, failure: dict[str, str]) -> Path:
    """Save the input of a failure to a file that --replay reads."""
    name = re.sub(r"\W+", "-", f"{kind} {failure['place']}")[:100].strip("-")
    path = folder / f"{name}.txt"
    path.write_text(f"{kind}\n{failure['example']}\n", encoding="utf-8", errors="backslashreplace")
    return path


def make_base(folder: Path) -> Path:
    """Run the tests' tiny job once."""
    import tiny

    base = folder / "base"
    if not (base / "runs" / "tiny" / "report.html").exists():
        shutil.rmtree(base, ignore_errors=True)
        pid = os.fork()  # torch starts threads, which later forks would not survive.
        if pid == 0:
            base.mkdir(parents=True)
            log = os.open(base / "log.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1), os.dup2(log, 2)
            tiny.build_world(base)
            os._exit(tiny.call("train", base / "recipe.yaml", "--runs", base / "runs"))
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("the tests' tiny job failed: run the tests")
    return base


def chosen(names: str | None) -> list[Kind]:
    """Return the kinds whose names begin with one of the given names."""
    if names is None:
        return list(KINDS)
    wanted = [name.strip() for name in names.split(",")]
    found = [kind for kind in KINDS if any(kind.name.startswith(name) for name in wanted)]
    if not found or not all(any(kind.name.startswith(name) for kind in KINDS) for name in wanted):
        raise SystemExit(f"--kinds {names}: known are {', '.join(kind.name for kind in KINDS)}")
    return found


def replay(path: Path, base: Path) -> int:
    """Feed one saved input in this process."""
    name, _, example = path.read_text(encoding="utf-8").partition("\n")
    kind = next(kind for kind in KINDS if kind.name == name)
    given = ast.literal_eval(example)
    with tempfile.TemporaryDirectory() as place:
        world = World(base, Path(place))
        kind.inputs(world)  # Some strategies make files that their readers need.
        limit_memory()
        refused, failure = timed(kind, world, given)
    print("refused" if refused else "read" if failure is None else f"{failure.place}\n{failure.words}")
    return int(failure is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help="kinds, separated by commas, by the beginnings of their names")
    parser.add_argument("--to", type=Path, default=Path("runs/fuzz"), help="folder for outcomes and failing inputs")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="feed one saved input again")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    arguments.to.mkdir(parents=True, exist_ok=True)
    base = make_base(arguments.to.resolve())
    preload()
    if arguments.replay is not None:
        sys.exit(replay(arguments.replay, base))
    kinds, file = chosen(arguments.kinds), arguments.to / f"outcomes-{arguments.inputs}-{arguments.seed}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    done = {(one.kind, one.batch) for one in outcomes}
    known = {(one.kind, failure["place"]) for one in outcomes for failure in one.failures}
    for kind, number, count in planned(kinds, arguments.inputs):
        if (kind.name, number) not in done:
            outcomes.append(kept(in_child(kind, number, count, base, arguments.seed), known, file))
            fed, failed = (sum(getattr(one, name) for one in outcomes) for name in ("inputs", "failed"))
            print(f"{fed} of {arguments.inputs} inputs, {failed} failures", file=sys.stderr)
    print(document([table(kinds, outcomes)]))
    sys.exit(int(any(one.failed for one in outcomes)))


if __name__ == "__main__":
    main()
