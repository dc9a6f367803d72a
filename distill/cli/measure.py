"""Commands that measure: `serve-check` and `record` on the user's own server, `eval` and `speedup` here."""

from __future__ import annotations

import functools
import ipaddress
import math
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import typer

from distill.cli import shared
from distill.errors import DataError, RecipeError, RunError, explain_write_fault, faults_explained
from distill.files import is_gguf, read_result, require_path, take_lock
from distill.machine import thread_count
from distill.measuring.evaluation_results import EvaluationReport, evaluation_blocks
from distill.progress import command_line, note, warn
from distill.recipe import Chat, Configuration, Corpus, Gguf, PyTorch, Recipe
from distill.recipe.configuration import USUAL_LENGTH
from distill.recipe.measuring import OUTTYPES
from distill.run import Run

if TYPE_CHECKING:
    from distill.data.chat_template import ChatTemplate
    from distill.data.recorder import Recording
    from distill.data.samples import Sample
    from distill.serving.results import ServeReport

# ── The pair, the prompts and the load that `distill serve-check` takes ──

MIN_PROMPTS = 2


@dataclass(frozen=True)
class PairFiles:
    """The files that are served. `made` are a run's own files. A run whose target only servers hold has no `target`."""

    target: Path | None
    draft: Path | None
    made: tuple[Path, Path] | None = None
    run: Run | None = None

    @property
    def chat(self) -> Chat:
        """The chat settings of the run's recipe. A pair without a run has the defaults."""
        return Chat() if self.run is None else self.run.recipe.chat

    @property
    def model(self) -> str:
        """The target whose tokenizer, template and context are read: its file, or the model that the run names."""
        if self.target is not None:
            return str(self.target)
        assert self.run is not None
        return self.run.recipe.target.model


def pair_files(
    invocation: typer.Context, words: Sequence[str], runs: Path, outtype: str | None, required: bool, prompts: bool
) -> PairFiles:
    """Return the files of RUN or of TARGET DRAFT; RunError for a run without GGUF files."""
    models = shared.models_of(invocation, words, runs)
    if not models:
        return files_of_run(shared.find_run(words[0] if words else None, runs)[1], outtype, required)
    if len(models) < 2:
        raise RecipeError("a pair is TARGET and DRAFT", "give both, or a run")
    if not prompts:
        raise RecipeError("a pair without a run needs --prompts", "a file or a folder with prompts")
    return PairFiles(_gguf(models[0]), _gguf(models[1]))


def files_of_run(run: Run, outtype: str | None, required: bool) -> PairFiles:
    """Return the GGUF files of a run's target and draft: of type `outtype`, or the first that were written."""
    from distill.export import ExportReport

    path = run.path("gguf", "export.json")
    if run.outdated("export") and required:
        state = "files of an earlier draft" if path.exists() else "no GGUF files yet"
        raise RunError(f"{run.folder} has {state}", f"`{run.again('--until', 'export')}`")
    files = [] if run.outdated("export") else read_result(path, ExportReport).files
    own: dict[str, Path] = {}
    for file in files:
        if outtype in (None, file.outtype) or Path(file.path).is_absolute():  # a target that is its own file
            own.setdefault(file.model, run.folder / file.path)
    if outtype is not None and files and "draft" not in own:
        kinds = ", ".join(dict.fromkeys(file.outtype for file in files))
        raise RecipeError(f"the run has no files of type {outtype}, but of {kinds}", "correct --outtype")
    missing = [role for role in ("target", "draft") if role not in own]
    if missing and required:
        hint = "write it with `distill export-gguf`, or give both files: TARGET DRAFT --prompts FILE"
        raise RunError(f"{run.folder} holds no GGUF file of its {missing[0]}", hint)
    return PairFiles(own.get("target"), own.get("draft"), None if missing else (own["target"], own["draft"]), run)


def _gguf(reference: str) -> Path:
    if not is_gguf(reference):
        hint = "llama-server serves those: `distill export-gguf` writes them"
        raise RecipeError(f"{reference} is not a GGUF file", hint)
    return Path(reference)


def template_of(files: PairFiles, stack: ExitStack) -> ChatTemplate | None:
    """Return the target's chat template, or None."""
    from distill.data.chat_template import ChatTemplate
    from distill.engines.tokenizer import open_tokenizer

    tokenizer = stack.enter_context(open_tokenizer(files.model))
    return ChatTemplate(tokenizer, files.chat) if tokenizer.chat_template else None


def room_of(files: PairFiles, behind: int) -> int:
    """Return the maximum tokens of a prompt that leave room for `behind` more in the context of both models."""
    from distill.engines.loaded import room_for_prompts

    return room_for_prompts(files.model, None if files.draft is None else str(files.draft), behind)


Prompts = tuple["list[Sample]", dict[str, int]]  # and those left out, by reason


def prompts_of_files(files: PairFiles, paths: list[Path], count: int, sizes: Sequence[int], room: int) -> Prompts:
    """Return up to `count` prompts of files. Texts are cut into equal numbers of prompts of these `sizes` in tokens."""
    from distill.data.prompts import read_user_prompts, sources_of

    read = read_user_prompts(files.model, Corpus(sources=sources_of(paths)), files.chat, count, sizes, room)
    note(f"prompts: {read.asked}")
    return read.measured, read.dropped


def prompts_of_run(files: PairFiles, count: int, room: int) -> Prompts:
    """Return up to `count` of the run's test prompts."""
    from distill.data.samples import read_prompts

    assert files.run is not None
    own = read_prompts(files.run, "test")
    fitting = [prompt for prompt in own if 1 < len(prompt.prompt) <= room]
    if len(fitting) < MIN_PROMPTS:
        raise DataError(f"{len(fitting)} of the run's test prompts fit into {room} tokens of the context")
    missing = len(own) - len(fitting)
    reason = f"test prompts of more than {room} tokens, which the context has no room for"
    return fitting[:count], {reason: missing} if missing else {}


def predicted_acceptance(run: Run | None, length: int | None) -> float:
    """Return the acceptance rate that the run measured at this draft length; NaN without a measurement."""
    if run is None or length is None or run.outdated("speedup"):
        return math.nan
    from distill.measuring.speedup_results import SpeedupReport

    found = {
        one.backend: one.acceptance
        for one in read_result(run.path("speedup.json"), SpeedupReport).measurements
        if one.length == length and one.sampler is None and one.acceptance is not None
    }
    return found.get("gguf", found.get("pytorch", math.nan))


# ── `distill serve-check` ──

DRAWN = "How the server drafts. The default with --sampler is probabilistic, if the server can. --url: as started."
ENDED_EARLY = "the check ended before its last measurement: missing figures were not measured"
# Options of llama-server that are options or arguments of this command.
RENAMED = {"--spec-draft-n-max": "--n-max", "--spec-draft-p-min": "--p-min", "--draft-p-min": "--p-min"}
RENAMED |= {"--spec-draft-sampling": "--draft-sampling", "-np": "--concurrency", "--parallel": "--concurrency"}
RENAMED |= dict.fromkeys(("--model", "-m"), "TARGET")
RENAMED |= dict.fromkeys(("-md", "--spec-draft-model", "--model-draft"), "DRAFT")
STARTED, RUNNING = "A server to start", "A server that runs already"
start_option = functools.partial(typer.Option, rich_help_panel=STARTED)
served_option = functools.partial(typer.Option, rich_help_panel=RUNNING)


def serve_check(
    invocation: typer.Context,
    words: shared.PairArgument = None,
    prompts: shared.PromptsOption = None,
    count: Annotated[int, shared.number_option(min=2, help="Maximum number of prompts.")] = 12,
    prompt_tokens: Annotated[
        str,
        typer.Option(help="Tokens of prompts cut from text, separated by commas. Several show acceptance by length."),
    ] = "64",
    tokens: Annotated[int, shared.number_option(min=8, help="Maximum new tokens after each prompt.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Number of times that each prompt is measured.")] = 3,
    sampler: shared.SamplerOption = None,
    n_max: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Maximum tokens drafted per round. The default is 4, or the running server's."
        ),
    ] = None,
    draft_sampling: Annotated[Literal["greedy", "probabilistic"] | None, typer.Option(help=DRAWN)] = None,
    concurrency: Annotated[
        str, typer.Option(help="Simultaneous requests, separated by commas. 1 is no load.")
    ] = "1,4,16",
    wait: Annotated[
        float, shared.number_option(min=1, help="Maximum seconds to wait for a healthy server, and for each reply.")
    ] = 300.0,
    outtype: Annotated[
        str | None,
        typer.Option(help=f"Type of a run's files. The default is the first written. One of {shared.FILE_TYPES}."),
    ] = None,
    server: Annotated[Path | None, start_option(help="Path of llama-server. Its own arguments follow --.")] = None,
    p_min: Annotated[
        float | None,
        shared.number_option(min=0, max=1, help="Minimum probability of a drafted token.", rich_help_panel=STARTED),
    ] = None,
    url: Annotated[
        str | None, served_option(help="Address of the server with the draft, such as http://127.0.0.1:8080.")
    ] = None,
    plain_url: Annotated[str | None, served_option(help="Address of the same server without the draft.")] = None,
    key: Annotated[str | None, served_option(help="Environment variable that holds the servers' key.")] = None,
    model: Annotated[str | None, served_option(help="Name of the model, if vLLM serves several.")] = None,
    history: Annotated[
        Path | None, typer.Option(help="File that keeps the results. The default is serve-checks.json of the run.")
    ] = None,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="Exit with 3 if acceptance fell, or if no result is comparable.")
    ] = False,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
) -> None:
    """Test a pair on your llama-server or vLLM: speed, acceptance rate, and causes of a shortfall."""
    if (server is None) == (url is None):
        raise RecipeError("serve-check needs a server: its program or its address", "give --server or --url")
    if url is None:
        shared.refuse(invocation, "with --server", "plain_url", "key", "model", hint="give --url, or leave it out")
    else:
        shared.refuse(invocation, "with --url, a server that runs already", "p_min")
    place = next((at for at, word in enumerate(words or []) if word.startswith("-")), len(words or []))
    named, further = (words or [])[:place], (words or [])[place:]  # llama-server's arguments follow --
    drawn = shared.sampler_of(sampler)
    _check_options(further, url, draft_sampling, drawn.temperature > 0)
    counts = sorted({1, *shared.numbers(concurrency, "--concurrency", int, "1,4,16", 1, 64)})
    sizes = shared.numbers(prompt_tokens, "--prompt-tokens", int, "64,512,2048", 2, 2**20)
    if not prompts:
        shared.refuse(invocation, "without --prompts", "prompt_tokens")
    if len(named) > 1:
        shared.refuse(invocation, "with TARGET and DRAFT, which are files", "outtype")
    files = pair_files(invocation, named, runs, outtype, server is not None, bool(prompts))
    kept_in = _place_of_history(history, files.run, fail_if_worse)
    length = n_max or USUAL_LENGTH
    shared.prepare(threads)
    from distill.engines.loaded import context_of
    from distill.engines.server_commands import SAMPLING
    from distill.serving.check import Addresses, CheckSettings, check_addresses, check_started
    from distill.serving.history import History, compared, keep, not_compared, read_history
    from distill.serving.server import LlamaServer, require_binary

    earlier = History() if kept_in is None else read_history(kept_in)
    with ExitStack() as stack, _kept(output) as kept:
        room = room_of(files, tokens + 2 * length + 2)
        if prompts:
            measured, left_out = prompts_of_files(files, prompts, count, sizes, room)
        else:
            measured, left_out = prompts_of_run(files, count, room)
        settings = CheckSettings(
            prompts=measured,
            limit=tokens,
            repeats=repeats,
            sampler=drawn,
            concurrency=tuple(counts),
            made=files.made,
            predicted=predicted_acceptance(files.run, n_max if url is not None else length),
            template=template_of(files, stack),
            seconds=(wait, wait),
            left_out=left_out,
            command=command_line(sys.argv),
            context=None if server is None or files.target is None else context_of(str(files.target)),
        )
        probabilistic = draft_sampling == "probabilistic"
        if url is not None:
            pair = None if files.target is None or files.draft is None else (files.target, files.draft)
            places = Addresses(url, plain_url, key, model, pair, n_max, probabilistic, thread_count(threads))
            report = check_addresses(settings, places, kept.append)
        else:
            assert server is not None and files.target is not None
            longest = max(len(prompt.prompt) for prompt in measured)
            started = LlamaServer(
                binary=require_binary(server),
                target=files.target,
                draft=files.draft,
                n_max=length,
                p_min=p_min,
                threads=thread_count(threads),
                context=-(-(longest + tokens + max(length, 8) + 2) // 256) * 256,
                further=tuple(further),
            )
            if draft_sampling is None and drawn.temperature:
                probabilistic = started.has(SAMPLING)
            report = check_started(settings, replace(started, probabilistic=probabilistic), kept.append)
    report = compared(report, earlier)
    _show(report, output)
    if kept_in is not None:
        try:
            keep(kept_in, earlier, report)
        except RunError as error:
            if history is not None:
                raise
            warn(f"the result is not kept: {error.what}")
    if other := not_compared(report, earlier):
        what = f"nothing was compared, because the last kept result has other {other}"
        warn(f"{what}. The next check compares with this one")
    if fail_if_worse and (other or (report.change is not None and report.change.fell)):
        raise typer.Exit(WORSE)


WORSE = 3  # exit status


def _place_of_history(given: Path | None, run: Run | None, needed: bool) -> Path | None:
    """Return the file that keeps the results; None without a run and a file."""
    if given is None:
        if run is None and needed:
            raise RecipeError("--fail-if-worse compares with a result that was kept", "name a file for them: --history")
        return None if run is None else run.path("serve-checks.json")
    require_path(given, "--history")
    if given.is_dir() or not given.absolute().parent.is_dir():
        raise RecipeError(f"--history {given} is no file in a folder that exists", "name a file, such as checks.json")
    return given


def _show(report: ServeReport, output: str) -> None:
    from distill.serving.results import serving_blocks

    shared.print_blocks(serving_blocks(report), report, output)


@contextmanager
def _kept(output: str) -> Iterator[list[ServeReport]]:
    """Yield a list for the reports so far. The last one is shown if Ctrl-C or a server's fault ends the check."""
    kept: list[ServeReport] = []
    try:
        yield kept
    except BaseException:
        if kept:
            _show(replace(kept[-1], notes=[ENDED_EARLY, *kept[-1].notes]), output)
        raise


def _check_options(further: Sequence[str], url: str | None, draft_sampling: str | None, sampled: bool) -> None:
    """Refuse options that contradict each other. `further` are llama-server's."""
    if url is not None and further:
        raise RecipeError("options of llama-server were given for a server that runs already", "start it with them")
    if draft_sampling == "probabilistic" and not sampled:
        raise RecipeError("greedy requests have no drafts to draw", "give --sampler, or --draft-sampling greedy")
    for one in further:
        name = one.partition("=")[0]
        if name in RENAMED:
            raise RecipeError(f"{name} is {RENAMED[name]} of this command", f"give {RENAMED[name]} in its place")


# ── `distill record` ──

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def record(
    upstream: Annotated[str, typer.Option(help="Address of your server, such as http://127.0.0.1:8000.")],
    to: Annotated[Path, typer.Option(help="Folder for the files, which a recipe names as answers.traffic.")] = Path(
        "traffic"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 8100,
    redact: Annotated[
        list[str] | None, typer.Option(help="Regular expression whose matches are replaced. Repeatable.")
    ] = None,
    sample: Annotated[float, shared.number_option(min=0, max=1, help="Share of the exchanges to keep.")] = 1.0,
) -> None:
    """Record your server's requests and answers through a proxy, for answers.traffic and --refresh.

    The proxy changes nothing. It never records headers, keys, and requests with `X-Distill-Record: no`.
    """
    address = _address(upstream)
    if _reaches(address, (host, port)):
        raise RecipeError(f"--upstream {upstream} is the address of the proxy itself", "choose another --port")
    for pattern in redact or ():
        _require_pattern(pattern)
    require_path(to, "--to")
    with faults_explained(to):
        to.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(to, os.W_OK | os.X_OK):
        raise explain_write_fault(to, PermissionError(13, os.strerror(13)))
    from distill.data.recorder import Recording, record, summary

    settings = Recording(address, (host, port), to.resolve(), tuple(redact or ()), sample)
    for line in _consent(settings):
        warn(line)
    with ExitStack() as stack:
        with faults_explained(to):
            lock = stack.enter_context(open(to / ".lock", "w"))
        if not take_lock(lock):
            raise RunError(f"another `distill record` writes into {to}", "give each a folder of its own: --to")
        counts = record(settings, lambda port: note(f"ready: http://{host}:{port}; Ctrl-C ends it"))
    print(summary(counts))


def _address(upstream: str) -> tuple[str, int]:
    """Return host and port of the server; RecipeError for an address that cannot take unchanged requests."""
    hint = "give http://HOST:PORT of your server, without a path"
    try:
        parts = urlsplit(upstream)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        raise RecipeError(f"--upstream {upstream} is not the address of a server", hint) from None
    if parts.scheme == "https":
        raise RecipeError(
            f"--upstream {upstream}: https cannot be passed on, as the proxy changes no byte",
            "put the proxy between the end of TLS and the server: http://HOST:PORT",
        )
    more = parts.path.rstrip("/") not in ("", "/v1") or parts.query or parts.fragment or parts.username is not None
    if parts.scheme != "http" or not host or more:
        raise RecipeError(f"--upstream {upstream} is not the address of a server", hint)
    return host, port


def _reaches(upstream: tuple[str, int], listen: tuple[str, int]) -> bool:
    """Whether requests to an address arrive at the address that is listened on. All of loopback counts as one."""
    hosts = [host or "0.0.0.0" for host, _ in (upstream, listen)]
    try:
        there, here = (ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0]) for host in hosts)
    except (OSError, UnicodeError, ValueError):
        return False
    own = [one.is_loopback or one.is_unspecified for one in (there, here)]
    return upstream[1] == listen[1] and (there == here or all(own))


def _require_pattern(pattern: str) -> None:
    try:
        empty = re.compile(pattern).search("")
    except (re.error, RecursionError, OverflowError) as error:
        raise RecipeError(f"--redact {pattern}: {error}", "correct the regular expression") from None
    if empty:
        raise RecipeError(f"--redact {pattern} matches the empty text", "let it match at least one character")


def _consent(settings: Recording) -> list[str]:
    """Return lines that say what is recorded, where, and what never is."""
    share = "all" if settings.sample == 1 else f"a share of {settings.sample:g} of all"
    count = len(settings.patterns)
    removed = f"matches of {count} patterns are replaced" if count else "nothing: --redact PATTERN replaces matches"
    lines = [
        f"recording prompts and answers of http://{settings.upstream[0]}:{settings.upstream[1]}, as they are, into",
        f"  {settings.folder}/traffic-*.jsonl, readable by you alone; delete those that a run has read",
        f"  {share} successful /v1/chat/completions, /v1/completions and /completion",
        "  never written: headers, keys, other requests, and those with the header X-Distill-Record: no",
        f"  redacted: {removed}",
    ]
    if settings.listen[0] not in LOOPBACK:
        lines.append(f"  {settings.listen[0]} can be reached from outside: requests are neither encrypted nor checked")
    return lines


# ── `distill eval` ──


def evaluate(
    invocation: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | TARGET DRAFT...]",
            help="A run (by default the newest), or models: folders, hub names, GGUF files. Drafts are compared.",
        ),
    ] = None,
    kl: Annotated[
        bool, typer.Option("--kl", help="Measure divergences, and acceptance probability by verifier.")
    ] = False,
    acceptance: Annotated[
        bool, typer.Option("--acceptance", help="Measure conditional acceptance of decoded rounds.")
    ] = False,
    types: Annotated[
        str | None,
        typer.Option(help=f"Compare the draft in these GGUF types, separated by commas: {shared.FILE_TYPES}."),
    ] = None,
    adapter: shared.AdapterOption = None,
    prompts: shared.PromptsOption = None,
    suite: shared.SuiteOption = None,
    temperature: Annotated[
        float | None, shared.number_option(min=0, max=100, help="Models: sampling temperature. The default is 1.")
    ] = None,
    count: shared.CountOption = None,
    seed: shared.SeedOption = None,
    dtype: shared.DtypeOption = None,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    llama: shared.LlamaOption = None,
    llama_draft: shared.LlamaDraftOption = None,
) -> None:
    """Measure divergences and acceptance of a target and its draft, with intervals.

    Both are measured by default. Several drafts or types are compared by divergences alone, paired by prompt.
    """
    models = shared.models_of(invocation, words, runs, most=64, adapter=adapter)
    command = command_line(sys.argv)
    from distill.measuring.evaluation import evaluate_types

    kinds = () if types is None else tuple(part.strip() for part in types.split(","))
    shared.require_known("--types", kinds, OUTTYPES)
    alone = not kinds and len(models) < 3
    kl, acceptance = (kl, acceptance) if kl or acceptance else (True, alone)
    if models:
        shared.require_folders(invocation, models)
        if kinds:
            shared.refuse(invocation, "with --types, which compares GGUF files", "dtype")
        if len(models) < 2 or not (prompts or suite):
            hint = "or name a run: `distill runs` lists them"
            raise RecipeError("models need TARGET, DRAFT and --prompts FILE (or --suite FILE)", hint)
        shared.prepare(threads)
        from distill import api
        from distill.recipe import Sampler

        report = api.evaluate(
            models[0],
            models[1:],
            prompts or (),
            suite=suite,
            sampler=Sampler(temperature=1.0 if temperature is None else temperature),
            count=count,
            seed=seed or 0,
            kl=kl,
            acceptance=acceptance,
            types=kinds,
            dtype=dtype or "auto",
            threads=threads,
            gguf=shared.gguf_of(invocation, [] if kinds else models[:2], llama, llama_draft),
            command=command,
        )
    else:
        of_models, of_files = ("prompts", "suite", "temperature", "count", "seed", "dtype"), ("llama", "llama_draft")
        hint = "give the run's models: TARGET RUN/draft --prompts FILE"
        shared.refuse(invocation, "with a run, which has settings of its own", *of_models, hint=hint)
        if not kinds:
            shared.refuse(invocation, "with a run, which is evaluated in PyTorch", *of_files)
        recipe, own_run = shared.find_run(words[0] if words else None, runs)
        shared.run_until(recipe, own_run, "train" if kinds else "eval", threads=threads)
        if kinds:
            gguf = shared.gguf_of(invocation, [], llama, llama_draft)
            report = evaluate_types(recipe, own_run, kinds, threads, gguf, command, kl, acceptance)
        else:
            report = read_result(own_run.path("eval.json"), EvaluationReport)
    _print_report(report, kl, acceptance, output)


def _print_report(report: EvaluationReport, kl: bool, acceptance: bool, output: str) -> None:
    """Print the requested parts of a report."""
    if not kl:
        stored = None if report.stored is None else replace(report.stored, bounds={})
        report = replace(report, domains={}, differences={}, stored=stored)
    if not acceptance:
        report = replace(report, positions={}, tokens_per_round={}, categories=[])
    shared.print_blocks(evaluation_blocks(report), report, output)


# ── `distill speedup` ──


def speedup(
    invocation: typer.Context,
    words: shared.PairArgument = None,
    adapter: shared.AdapterOption = None,
    prompts: shared.PromptsOption = None,
    suite: shared.SuiteOption = None,
    count: shared.CountOption = None,
    prompt_tokens: Annotated[
        int | None, shared.number_option(min=2, help="Tokens of a prompt cut from text. The default is 64.")
    ] = None,
    tokens: Annotated[
        int | None, shared.number_option(min=8, help="Maximum new tokens per prompt. The default is 96.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Fixed draft lengths; 0 for none. The default is 1,2,4,8, or 4 with --suite."),
    ] = None,
    configuration: Annotated[
        list[str] | None,
        typer.Option(
            "--configuration",
            "-C",
            metavar="K=V,...",
            help=f"Another way to decode, such as drafter=tree,nodes=12. Repeatable. Keys: {shared.CONFIGURED}",
        ),
    ] = None,
    sampler: shared.SamplerOption = None,
    seed: shared.SeedOption = None,
    table: shared.TableOption = None,
    at_once: Annotated[
        int | None, shared.number_option(min=2, max=256, help="Texts that PyTorch decodes at once, by chains alone.")
    ] = None,
    dtype: shared.DtypeOption = None,
    pytorch: shared.PyTorchOption = None,
    allow_lossy: shared.LossyOption = False,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    llama: shared.LlamaOption = None,
    llama_draft: shared.LlamaDraftOption = None,
) -> None:
    """Time plain and speculative decoding, end to end.

    RUN measures a run on its test prompts, RUN --prompts FILE on your prompts, TARGET [DRAFT] --prompts FILE any
    models. --suite FILE reports as papers do: tokens per round and speedup by category, at temperature 0 and 1.
    """
    models = shared.models_of(invocation, words, runs, adapter=adapter)
    name = words[0] if words and not models else None
    if suite is not None:
        shared.refuse(invocation, "with --suite, which has its own prompts", "prompts", "prompt_tokens")
    if not prompts and suite is None:
        if models:
            raise RecipeError("two models need --prompts FILE or --suite FILE", "name the prompts to measure on")
        of_pairs = ("count", "prompt_tokens", "tokens", "lengths", "configuration", "sampler", "seed", "table", "dtype")
        more = ("at_once", "pytorch", "threads", "llama", "llama_draft", "allow_lossy")
        hint = "add --prompts FILE, or change the recipe: `distill train RUN/config.yaml KEY=VALUE --until speedup`"
        shared.refuse(invocation, "with a run alone, whose recipe says what is measured", *of_pairs, *more, hint=hint)
        _of_run(name, runs, output)
        return
    configurations = [shared.keys_of(Configuration, one, "--configuration") for one in configuration or ()]
    if not any(one.get("drafter") == "table" for one in configurations):
        shared.refuse(invocation, "without -C drafter=table", "table")
    swept = sorted(
        {n for n in shared.numbers(lengths or ("1,2,4,8" if suite is None else "4"), "--lengths", int, "1,2,4") if n}
    )
    device, chat, own, section = "auto", None, PyTorch(), None
    if models:
        gguf = shared.gguf_of(invocation, models, llama, llama_draft)
    else:
        asked = shared.gguf_of(invocation, [], llama, llama_draft)
        folders = any(value is not None for value in (dtype, pytorch))
        recipe, found, pair, type_of_run = _pair_of(name, runs, asked, folders)
        models, dtype, device, chat = list(pair), dtype or type_of_run, recipe.device, recipe.chat
        in_files = is_gguf(pair[1])
        gguf = shared.merged(recipe.gguf, asked) if in_files else None
        threads, own = threads or recipe.threads, PyTorch() if in_files else recipe.pytorch
        section = None if in_files else recipe.target.model_copy(update={"dtype": dtype})
        table = table or (found.folder if found.path("table").is_dir() else None)
    shared.require_folders(invocation, models)
    shared.prepare(threads)
    from distill import api
    from distill.measuring.speedup_tables import speedup_blocks

    report = api.measure_speedup(
        section or models[0],
        models[1] if len(models) > 1 else None,
        prompts or (),
        suite=suite,
        lengths=swept,
        configurations=configurations,
        sampler=shared.sampler_of(sampler, greedy=suite is not None) if sampler or suite is None else None,
        count=count,
        max_new_tokens=96 if tokens is None else tokens,
        prompt_tokens=64 if prompt_tokens is None else prompt_tokens,
        at_once=at_once or 1,
        dtype=dtype or "auto",
        seed=seed or 0,
        device=device,
        threads=threads,
        gguf=gguf,
        pytorch=shared.pytorch_of(invocation, pytorch, own, models),
        chat=chat,
        table=table,
        allow_lossy=allow_lossy,
        command=command_line(sys.argv),
    )
    shared.print_blocks(speedup_blocks(report), report, output)


def _pair_of(
    name: str | None, runs: Path, gguf: Gguf | None, folders: bool
) -> tuple[Recipe, Run, tuple[str, str], shared.Dtype]:
    """Return a run's recipe, the run, its target and trained draft, and the type to load them in.

    The models are its GGUF files if llama.cpp's options are given, if PyTorch is not measured, or if the target is a
    file and llama.cpp is measured. Otherwise, and if options of `folders` are given, they are its folders. RunError for
    a run that lacks them.
    """
    recipe, found = shared.find_run(name, runs)
    shared.require_draft(found)
    measured = set(recipe.speedup.backends)
    served = is_gguf(recipe.target.model) and recipe.speedup.files and not found.outdated("export")
    from distill.recipe.recipe import not_loadable

    loadable = not_loadable(recipe) is None
    if gguf is None and loadable and "pytorch" in measured and (folders or not served):
        return recipe, found, (recipe.target.model, str(found.path("draft"))), recipe.target.dtype

    timed = recipe.speedup.outtype if loadable and recipe.speedup.files else None
    files = files_of_run(found, timed, required=True)
    return recipe, found, (str(files.target), str(files.draft)), "auto"


def _of_run(name: str | None, runs: Path, output: str) -> None:
    recipe, found = shared.find_run(name, runs)
    shared.run_until(recipe, found, "speedup")
    from distill.measuring.speedup_results import SpeedupReport
    from distill.measuring.speedup_tables import speedup_blocks

    report = read_result(found.path("speedup.json"), SpeedupReport)
    shared.print_blocks(speedup_blocks(report), report, output)
