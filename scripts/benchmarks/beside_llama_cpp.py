"""Compare our decoder with llama-server and llama-speculative-simple on one GGUF pair and the same prompts, greedily.

    bash scripts/build_llama_cpp.sh
    python scripts/benchmarks/beside_llama_cpp.py --server build/llama.cpp/bin/llama-server \\
        --simple build/llama.cpp/bin/llama-speculative-simple --target T --draft D --prompts FILE
    python scripts/benchmarks/beside_llama_cpp.py --server PATH --target T --draft D --prompts FILE \\
        --types ngram-simple --types ngram-mod --types ngram-simple,draft-simple

--prompts is any file that `distill speedup --prompts` takes. All programs draft up to --n-max tokens with p_min 0 and
the same threads. Every prompt goes to each program in turn, --repeats times. Speeds count the tokens after the first
one by each program's own clock, so that neither the start of a process nor the reading of the prompt counts.
llama-speculative-simple takes text. Prompts whose text gives other ids are left out and counted. It also drafts the
first token after the prompt, which the others do not. --types are further values of llama-server's --spec-type, each
with its own server. Options may follow a value.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from distill.data.prompts import read_user_prompts, sources_of
from distill.decoding.decode import decode_text, plain
from distill.decoding.lengths import Fixed
from distill.decoding.rules import GREEDY, Rules
from distill.engines.loaded import LoadedPair, context_of, load_pair
from distill.engines.model import Model
from distill.errors import DataError, DistillError
from distill.gguf.library import GgufFile
from distill.machine import machine, thread_count
from distill.recipe import Chat, Corpus, Target, parse_section
from distill.serving.check import LlamaClient, ServerDrafter, our_text
from distill.serving.results import Counts, acceptance
from distill.serving.server import Http, LlamaServer, require_binary, started
from distill.tables import Cell, Row, Table, document, speed_ratio

START_SECONDS, REPLY_SECONDS = 300.0, 600.0
DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
COUNTED = re.compile(r"n_(drafted|accept)\s*=\s*(\d+)")


@dataclass
class Program:
    """The work of one program on each prompt: tokens after the first, its own seconds, and the counts of each text."""

    name: str
    run: Callable[[int], tuple[float, float, Counts]]
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)

    def measure(self, place: int) -> None:
        """Continue one prompt. The repeats of a prompt are added up."""
        tokens, seconds, counts = self.run(place)
        if place == len(self.tokens):
            self.tokens.append(0.0)
            self.seconds.append(0.0)
            self.counts.append(counts)
        self.tokens[place] += tokens
        self.seconds[place] += seconds


def with_texts(target: Path, prompts: list[list[int]]) -> list[tuple[list[int], str]]:
    """Return the prompts whose text gives the same ids again."""
    file = GgufFile(target, vocabulary_only=True)
    try:
        usable = []
        for ids in prompts:
            with contextlib.suppress(UnicodeDecodeError):
                text = file.detokenize(ids).decode()
                if "\0" not in text and file.tokenize(text, parse_special=True) == ids:
                    usable.append((ids, text))
    finally:
        file.close()
    return usable


def plainly(target: Model, ends: list[int], prompt: list[int], limit: int) -> tuple[float, float, Counts]:
    result = plain(target, prompt, limit, ends)
    return len(result.tokens) - 1, result.seconds, Counts.of_text(len(result.tokens), 0, 0)


def speculatively(pair: LoadedPair, prompt: list[int], limit: int, n_max: int) -> tuple[float, float, Counts]:
    drafter = ServerDrafter(pair.draft, Fixed(n_max), GREEDY, lambda: 0.0)
    result = decode_text(pair.target, drafter, prompt, limit, Rules(ends=pair.ends))
    text = our_text(result)
    return text.counts.later, result.seconds, text.counts


def on_server(client: LlamaClient, prompt: list[int], limit: int) -> tuple[float, float, Counts]:
    reply = client.complete(prompt, limit)
    return reply.counts.later, reply.later_seconds or 0.0, reply.counts


def simple_command(
    binary: Path, files: tuple[Path, Path], n_max: int, tokens: int, context: int, threads: int
) -> list[str]:
    """Return llama-speculative-simple's command for target and draft, greedy. `-n` counts tokens after the first."""
    command = [str(binary), "-m", str(files[0]), "-md", str(files[1]), "--spec-type", "draft-simple"]
    command += ["--spec-draft-n-max", str(n_max), "-n", str(tokens - 1), "--temp", "0", "--no-escape"]
    return [*command, "--ctx-size", str(context), "--threads", str(threads)]


def simple(command: list[str], text: str) -> tuple[float, float, Counts]:
    """Run one process. Its `decoded` line counts all tokens, and the first one is drafted like the others."""
    done = subprocess.run([*command, "-p", text], capture_output=True, text=True, errors="replace", check=False)
    output = done.stdout + done.stderr
    decoded, counted = DECODED.search(output), dict(COUNTED.findall(output))
    if done.returncode or decoded is None or set(counted) != {"drafted", "accept"}:
        last = "\n".join(output.splitlines()[-8:])
        raise DataError(f"{shlex.join(command)} ended with status {done.returncode}:\n{last}", "see its own message")
    tokens, accepted = int(decoded[1]), int(counted["accept"])
    # The count is one more than its tokens, because the formula takes the first token as the prompt's.
    return tokens, float(decoded[2]), Counts.of_text(tokens + 1, int(counted["drafted"]), accepted)


def row_of(program: Program, base: Program) -> Row:
    """Return a program's speed with its ratio to our decoder's, acceptance, and tokens per round."""
    ratio = None if program is base else speed_ratio(program.tokens, program.seconds, base.tokens, base.seconds)
    row: Row = [program.name, Cell(sum(program.tokens) / sum(program.seconds), ",.0f"), ratio]
    if not any(count.drafted for count in program.counts):
        return [*row, None, None, None]
    total = acceptance(program.name, program.counts)
    return [*row, f"{total.accepted} ÷ {total.drafted}", Cell(total.rate, "%"), total.tokens_per_round]


def measure(arguments: argparse.Namespace) -> str:
    server = require_binary(arguments.server)
    speculative_simple = None if arguments.simple is None else require_binary(arguments.simple)
    threads = thread_count(arguments.threads)
    target, draft, tokens = arguments.target, arguments.draft, arguments.tokens
    contexts = context_of(str(target)), context_of(str(draft)), arguments.context
    context = min(length for length in contexts if length)
    room = context - tokens - arguments.n_max - 2
    corpus = Corpus(sources=sources_of([arguments.prompts]))
    read = read_user_prompts(str(target), corpus, Chat(), arguments.count, arguments.prompt_tokens, room)
    asked = [sample.prompt for sample in read.measured]
    prompts = with_texts(target, asked)
    if len(prompts) < 2:
        raise DataError(f"{arguments.prompts}: {len(prompts)} of {len(asked)} prompts can be used", "give others")
    settings = LlamaServer(server, target, draft, arguments.n_max, threads=threads, context=context)
    # The server uses the last --spec-type.
    others = {types: replace(settings, further=("--spec-type", *shlex.split(types))) for types in arguments.types}
    place = parse_section(Target, {"model": str(target)})
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, server_settings in {"plain": settings.plain, "draft-simple": settings, **others}.items():
            running = stack.enter_context(started(server_settings, START_SECONDS))
            http = stack.enter_context(contextlib.closing(Http(running.url, REPLY_SECONDS, death=running.death)))
            clients[name] = LlamaClient(http)

        def served(name: str) -> Program:
            return Program(f"llama-server, {name}", lambda place: on_server(clients[name], prompts[place][0], tokens))

        pair = stack.enter_context(load_pair(place, str(draft), tokens=context, threads=threads))
        base = Program("distill, plain", lambda place: plainly(pair.target, pair.ends, prompts[place][0], tokens))
        drafts = Program("distill", lambda place: speculatively(pair, prompts[place][0], tokens, arguments.n_max))
        programs = [base, served("plain"), drafts, *(served(name) for name in clients if name != "plain")]
        if speculative_simple is not None:
            command = simple_command(speculative_simple, (target, draft), arguments.n_max, tokens, context, threads)
            programs.append(Program("llama-speculative-simple", lambda place: simple(command, prompts[place][1])))
        for program in programs:
            program.run(0)  # Each program's first text is not timed.
        for repeat in range(arguments.repeats):
            for number in range(len(prompts)):
                turn = (repeat + number) % len(programs)
                for program in programs[turn:] + programs[:turn]:
                    program.measure(number)
    heads = ["program", "tokens/s", "÷ distill's", "accepted ÷ drafted", "acceptance rate", "tokens per round"]
    note = (
        f"{datetime.date.today()}; {machine()['cpu']}, {threads} threads; {len(prompts)} prompts × {tokens} tokens × "
        f"{arguments.repeats} repeats; {len(asked) - len(prompts)} prompts left out: their text gives other ids."
    )
    called = f"python scripts/benchmarks/{Path(__file__).name} {shlex.join(sys.argv[1:])}"
    return document([Table(heads, [row_of(program, drafts) for program in programs], command=called, note=note)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Path, required=True, help="llama-server")
    parser.add_argument("--simple", type=Path, help="llama-speculative-simple")
    parser.add_argument(
        "--types", action="append", default=[], help="ngram-simple, or 'ngram-cache --lookup-cache-static FILE'"
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--n-max", type=int, default=4)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    try:
        print(measure(parser.parse_args()))
    except DistillError as error:
        sys.exit(f"beside_llama_cpp: {error}")


if __name__ == "__main__":
    main()
