"""`distill serve-check`: a pair on the user's own server."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.commands import shared
from distill.commands.gguf_options import takes_gguf_options
from distill.errors import DataError, RecipeError, RunError

if TYPE_CHECKING:
    from distill.recipe import Gguf
    from distill.run import Run
    from distill.serving.check import Conversation
    from distill.texts import Prompt

PAIR = "A pair without a run, or other files than the run's"
SERVED = "A server that runs already"
USUAL_LENGTH = 4
LEAST = 2  # prompts
SPARE = 12  # validation prompts, on which settings are chosen
# Options of llama-server that are options of this command.
OWN = {"--spec-draft-n-max": "--n-max", "--spec-draft-p-min": "--p-min", "--draft-p-min": "--p-min", "-m": "--target"}
OWN |= {"--model": "--target", "-md": "--draft", "--spec-draft-model": "--draft", "--model-draft": "--draft"}
OWN |= {"-np": "--concurrency", "--parallel": "--concurrency"}


def pair_option(**settings: Any) -> Any:
    """An option of the pair, in a group of its own in the help."""
    return typer.Option(rich_help_panel=PAIR, **settings)


def served_option(**settings: Any) -> Any:
    """An option of servers that run already."""
    return typer.Option(rich_help_panel=SERVED, **settings)


@takes_gguf_options("target", "draft")
def serve_check(
    context: typer.Context,
    run: shared.RunArgument = None,
    server: Annotated[
        Path | None, typer.Option(help="llama-server, which is started with the draft and without.")
    ] = None,
    n_max: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Tokens drafted a round, at most; by default 4, or what a server says."),
    ] = None,
    p_min: Annotated[
        float | None, shared.number_option(min=0, max=1, help="Least probability of a drafted token.")
    ] = None,
    choose: Annotated[
        bool,
        typer.Option("--choose/--no-choose", help="Find the fastest n_max and p_min on validation prompts (--server)."),
    ] = True,
    whole_grid: Annotated[
        bool,
        typer.Option(
            "--whole-grid",
            help="Then measure every n_max and p_min on the held-out prompts too, and the fastest again.",
        ),
    ] = False,
    count: Annotated[int, shared.number_option(min=2, help="Prompts, at most.")] = 12,
    tokens: Annotated[int, shared.number_option(min=8, help="New tokens after each prompt, at most.")] = 96,
    concurrency: Annotated[
        str, typer.Option(help="Requests at once, separated by commas; 1 is always measured.")
    ] = "1,4,16",
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Times that every prompt is replayed.")] = 3,
    outtype: Annotated[str | None, typer.Option(help="Of a run's files; by default the first written.")] = None,
    server_option: Annotated[
        list[str] | None, typer.Option(help="Further arguments of llama-server, such as '-ub 256'; or after --.")
    ] = None,
    start_seconds: Annotated[float, shared.number_option(min=1, help="A server is healthy by then.")] = 300.0,
    reply_seconds: Annotated[float, shared.number_option(min=1, help="A reply is complete by then.")] = 300.0,
    target: Annotated[Path | None, pair_option(help="The target's GGUF file.")] = None,
    draft: Annotated[Path | None, pair_option(help="The draft's GGUF file.")] = None,
    prompts: Annotated[
        list[Path] | None, pair_option(help="File or folder with prompts, as of `distill speedup`; may be repeated.")
    ] = None,
    prompt_tokens: Annotated[
        int, pair_option(min=2, callback=shared.finite, help="Tokens of a prompt that is cut from text.")
    ] = 64,
    url: Annotated[str | None, served_option(help="The server with the draft, such as http://127.0.0.1:8080.")] = None,
    plain_url: Annotated[str | None, served_option(help="The same without the draft.")] = None,
    kind: Annotated[str | None, served_option(help="llama-server or vllm; by default the server is asked.")] = None,
    key: Annotated[str | None, served_option(help="Environment variable that holds the servers' key.")] = None,
    model: Annotated[str | None, served_option(help="vLLM: the model's name, where it serves several.")] = None,
    to: Annotated[Path | None, typer.Option(help="Also write all figures to this file, as JSON.")] = None,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    output: shared.FormatOption = "md",
    gguf: Gguf | None = None,
) -> None:
    """Test a pair on your own llama-server or vLLM: speed, acceptance by the server's counts, and what explains it."""
    shared.require_format(output)
    if (server is None) == (url is None):
        raise RecipeError(
            "serve-check needs a server: its program or its address", "give --server PATH or --url URL, one of them"
        )
    further = list(context.args)
    if run is not None and run.startswith("-"):  # behind --, without a run
        further, run = [run, *further], None
    _check_options(context.params | {"run": run}, gguf, [*further, *(server_option or ())])
    shared.require_place(to)
    counts = sorted({1, *shared.numbers(concurrency, "--concurrency", int, "1,4,16")})
    if counts[0] < 1 or counts[-1] > 64:
        raise RecipeError(f"--concurrency {concurrency}: from 1 to 64 requests", "for instance 1,4,16")
    files = _pair_files(run, runs, target, draft, outtype, required=server is not None)
    length = n_max or USUAL_LENGTH
    shared.prepare(threads)
    from distill.machine import thread_count
    from distill.recipe import Gguf as Options
    from distill.results.serialise import as_json, write_result
    from distill.serving.check import CheckSettings, check_addresses, check_started
    from distill.serving.llama_server import LlamaServer, require_binary
    from distill.serving.markdown import as_markdown, flat_rows
    from distill.serving.opening import Addresses

    with ExitStack() as stack:
        room = _room(files, tokens + length + 2)
        spare = SPARE if choose and url is None else 0
        if prompts:
            measured, choosing, left_out = _prompts_of_files(files, prompts, count, prompt_tokens, spare, room)
        else:
            measured, choosing, left_out = _prompts_of_run(files, count, spare, room)
        settings = CheckSettings(
            prompts=measured,
            limit=tokens,
            repeats=repeats,
            concurrency=tuple(counts),
            choosing=[prompt.ids for prompt in choosing],
            whole_grid=whole_grid,
            made=files.made,
            predicted=_predicted_acceptance(files.run, n_max if url is not None else length),
            conversation=_conversation(files.target, stack),
            seconds=(start_seconds, reply_seconds),
            left_out=left_out,
            command=shlex.join(["distill", *sys.argv[1:]]),
        )
        if url is not None:
            pair = None if files.target is None or files.draft is None else (files.target, files.draft)
            places = Addresses(url, plain_url, kind, key, model, pair, n_max, thread_count(threads))
            report = check_addresses(settings, places)
        else:
            assert server is not None and files.target is not None
            longest = max(len(prompt.ids) for prompt in (*measured, *choosing))
            started = LlamaServer(
                binary=require_binary(server),
                target=files.target,
                draft=files.draft,
                n_max=length,
                p_min=p_min,
                gguf=gguf or Options(),
                threads=thread_count(threads),
                context=-(-(longest + tokens + max(length, 8) + 2) // 256) * 256,
                further=(*[part for one in server_option or () for part in shlex.split(one)], *further),
            )
            report = check_started(settings, started)
    if to is not None:
        write_result(to, report)
    shared.print_table(flat_rows(report), as_markdown(report), as_json(report), output)


def _check_options(given: Mapping[str, Any], gguf: Gguf | None, further: Sequence[str]) -> None:
    """Refuse options that would do nothing, or contradict each other; `further` are llama-server's."""
    if given["kind"] not in (None, "llama-server", "vllm"):
        raise RecipeError(f"--kind {given['kind']} is unknown", "llama-server or vllm")
    for name in ("plain_url", "kind", "model"):
        if given[name] is not None and given["url"] is None:
            option = "--" + name.replace("_", "-")
            raise RecipeError(f"{option} is of a server that runs already", "give its --url, or leave it out")
    if given["url"] is not None and (gguf is not None or further):
        raise RecipeError("options of llama-server were given for a server that runs already", "start it with them")
    for one in further:
        name = one.split()[0].split("=")[0] if one.split() else ""
        if name in OWN:
            raise RecipeError(f"{name} is {OWN[name]} of this command", f"give {OWN[name]} in its place")
    if given["run"] is None and (given["target"] is None) != (given["draft"] is None):
        raise RecipeError("a pair without a run is --target and --draft", "give both, or a run")
    if given["run"] is None and given["target"] is not None and not given["prompts"]:
        raise RecipeError("a pair without a run needs --prompts", "a file or a folder with prompts")


# ── what is served ──


@dataclass(frozen=True)
class PairFiles:
    """What is served; of a run also its own files (`made`)."""

    target: Path | None
    draft: Path | None
    made: tuple[Path, Path] | None = None
    run: Run | None = None


def _pair_files(
    name: str | None, runs: Path, target: Path | None, draft: Path | None, outtype: str | None, required: bool
) -> PairFiles:
    """The files of the pair; a run's own where none are named. RunError for a run without GGUF files."""
    given = [None if one is None else Path(_gguf(one)) for one in (target, draft)]
    if name is None and given[0] is not None and given[1] is not None:
        return PairFiles(given[0], given[1])
    from distill.results.export_results import ExportReport
    from distill.results.serialise import read_result

    _, run = shared.find_run(name, runs)
    path = run.path("gguf", "export.json")
    if not path.exists():
        if required:
            raise RunError(f"{run.folder} has no GGUF files yet", f"`distill train {run.folder} --until export`")
        return PairFiles(given[0], given[1], None, run)
    files = read_result(path, ExportReport).files
    own: dict[str, Path] = {}
    for file in files:
        if outtype in (None, file.outtype) or Path(file.path).is_absolute():  # a target that is its own file
            own.setdefault(file.model, run.folder / file.path)
    if outtype is not None and "draft" not in own:
        kinds = ", ".join(dict.fromkeys(file.outtype for file in files))
        raise RecipeError(f"the run has no files of type {outtype}, but of {kinds}", "correct --outtype")
    if "target" not in own and given[0] is None:
        raise RunError("the run wrote no file of its target, which it never loads", "give the target's file: --target")
    made = (own["target"], own["draft"]) if "target" in own else None
    return PairFiles(given[0] or own["target"], given[1] or own["draft"], made, run)


def _gguf(path: Path) -> str:
    reference = shared.local_reference(str(path))
    if not reference.endswith(".gguf"):
        raise RecipeError(f"{path} is no GGUF file", "llama-server serves those: `distill export-gguf` writes them")
    return reference


def _conversation(target: Path | None, stack: ExitStack) -> Conversation | None:
    """How the target's own chat template writes messages; None without one."""
    if target is None:
        return None
    from distill.benchmark.prompts import GgufTokenizer
    from distill.documents.chat_template import ChatTemplate
    from distill.recipe import Chat
    from distill.serving.check import Conversation

    tokenizer = GgufTokenizer(str(target), stack)
    if not tokenizer.chat_template:
        return None
    template = ChatTemplate(tokenizer, Chat())
    return Conversation(
        lambda messages: template.text(messages, None),
        lambda ids: tokenizer.file.detokenize(list(ids)).decode("utf-8", "replace"),
    )


def _room(files: PairFiles, behind: int) -> int:
    """The most tokens of a prompt that leave room for `behind` more in the context of both models."""
    from distill.models.loaded import context_of

    contexts = [context_of(str(one)) for one in (files.target, files.draft) if one is not None]
    room = min((context for context in contexts if context is not None), default=2**31) - behind
    if room < LEAST:
        raise RecipeError(f"--tokens leave {max(room, 0)} tokens of the context for a prompt", "give fewer --tokens")
    return room


Prompts = tuple["list[Prompt]", "list[Prompt]", dict[str, int]]  # measured, for choosing settings; left out, by reason


def _prompts_of_files(files: PairFiles, paths: list[Path], count: int, size: int, spare: int, room: int) -> Prompts:
    """Up to `count` prompts of files; texts are cut into prompts of `size` tokens."""
    from distill.benchmark.prompts import read_user_prompts, sources_of
    from distill.recipe import Chat, Corpus

    if files.target is None:
        raise RecipeError("--prompts are encoded with the target's tokenizer", "give its GGUF file: --target")
    asked = read_user_prompts(str(files.target), Corpus(sources=sources_of(paths)), Chat(), count, spare, size, room)
    return asked.measured, asked.others, asked.dropped


def _prompts_of_run(files: PairFiles, count: int, spare: int, room: int) -> Prompts:
    """Up to `count` of the run's test prompts, and `spare` of its validation prompts."""
    from distill.texts import read_prompts

    assert files.run is not None
    fitting, left_out = {}, {}
    for split in ("test", "validation"):
        own = read_prompts(files.run, split)
        fitting[split] = [prompt for prompt in own if 1 < len(prompt.ids) <= room]
        if missing := len(own) - len(fitting[split]):
            left_out[f"{split} prompts of more than {room} tokens, which the context has no room for"] = missing
    measured, choosing = fitting["test"][:count], fitting["validation"][:spare]
    if len(measured) < LEAST:
        raise DataError(
            f"{len(measured)} of the run's test prompts fit into {room} tokens of the context", "give fewer --tokens"
        )
    if spare and len(choosing) < LEAST:
        raise DataError(f"the run has {len(choosing)} validation prompts to choose settings on", "give --no-choose")
    return measured, choosing, left_out


def _predicted_acceptance(run: Run | None, length: int | None) -> float:
    """The acceptance that the run measured at this draft length, with its own target; NaN where it did not."""
    if run is None or length is None or not run.path("speedup.json").exists():
        return math.nan
    from distill.results.serialise import read_result
    from distill.results.speedup_results import SpeedupReport

    found = {
        one.backend: one.acceptance
        for one in read_result(run.path("speedup.json"), SpeedupReport).measurements
        if one.length == length and not one.grown and one.sampler is None and one.acceptance is not None
    }
    return found.get("gguf", found.get("pytorch", math.nan))
