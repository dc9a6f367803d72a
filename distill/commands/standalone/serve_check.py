"""`distill serve-check`: a pair on the user's own server."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.commands.gguf_options import takes_gguf_options
from distill.commands.shared import (
    DEFAULT_RUNS,
    FormatOption,
    RunArgument,
    RunsOption,
    ThreadsOption,
    finite,
    numbers,
    prepare,
    print_table,
)
from distill.commands.standalone.served_pair import pair_files, pair_prompts, predicted_acceptance
from distill.errors import DataError, RecipeError
from distill.files import require_path

if TYPE_CHECKING:
    from distill.recipe import Gguf

PAIR = "A pair without a run, or other files than the run's"
SERVED = "A server that runs already"
USUAL_LENGTH = 4


def pair_option(*names: str, **settings: Any) -> Any:
    """An option of the pair, in a group of its own in the help."""
    return typer.Option(*names, rich_help_panel=PAIR, **settings)


def served_option(*names: str, **settings: Any) -> Any:
    """An option of servers that run already."""
    return typer.Option(*names, rich_help_panel=SERVED, **settings)


@takes_gguf_options("target", "draft")
def serve_check(
    context: typer.Context,
    run: RunArgument = None,
    server: Annotated[
        Path | None, typer.Option("--server", help="llama-server, which is started with the draft and without.")
    ] = None,
    n_max: Annotated[
        int | None,
        typer.Option(
            "--n-max", min=1, max=64, help="Tokens drafted a round, at most; by default 4, or what a server says."
        ),
    ] = None,
    p_min: Annotated[
        float | None,
        typer.Option("--p-min", min=0, max=1, callback=finite, help="Least probability of a drafted token."),
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
    count: Annotated[int, typer.Option("--count", min=2, callback=finite, help="Prompts, at most.")] = 12,
    tokens: Annotated[
        int, typer.Option("--tokens", min=8, callback=finite, help="New tokens after each prompt, at most.")
    ] = 96,
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at once, separated by commas; 1 is always measured.")
    ] = "1,4,16",
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=100, help="Times that every prompt is replayed.")] = 3,
    outtype: Annotated[
        str | None, typer.Option("--outtype", help="Of a run's files; by default the first written.")
    ] = None,
    server_option: Annotated[
        list[str] | None,
        typer.Option("--server-option", help="Further arguments of llama-server, such as '-ub 256'; or after --."),
    ] = None,
    start_seconds: Annotated[
        float, typer.Option("--start-seconds", min=1, callback=finite, help="A server is healthy by then.")
    ] = 300.0,
    reply_seconds: Annotated[
        float, typer.Option("--reply-seconds", min=1, callback=finite, help="A reply is complete by then.")
    ] = 300.0,
    target: Annotated[Path | None, pair_option("--target", help="The target's GGUF file.")] = None,
    draft: Annotated[Path | None, pair_option("--draft", help="The draft's GGUF file.")] = None,
    prompts: Annotated[
        list[Path] | None,
        pair_option("--prompts", help="File or folder with prompts, as of `distill speedup`; may be repeated."),
    ] = None,
    prompt_tokens: Annotated[
        int, pair_option("--prompt-tokens", min=2, callback=finite, help="Tokens of a prompt that is cut from text.")
    ] = 64,
    url: Annotated[
        str | None, served_option("--url", help="The server with the draft, such as http://127.0.0.1:8080.")
    ] = None,
    plain_url: Annotated[str | None, served_option("--plain-url", help="The same without the draft.")] = None,
    kind: Annotated[
        str | None, served_option("--kind", help="llama-server or vllm; by default the server is asked.")
    ] = None,
    key: Annotated[str | None, served_option("--key", help="Environment variable that holds the servers' key.")] = None,
    model: Annotated[
        str | None, served_option("--model", help="vLLM: the model's name, where it serves several.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="Also write all figures to this file, as JSON.")] = None,
    threads: ThreadsOption = None,
    runs: RunsOption = DEFAULT_RUNS,
    output: FormatOption = "md",
    gguf: Gguf | None = None,
) -> None:
    """Test a pair on your own llama-server or vLLM: speed, acceptance by the server's counts, and what explains it."""
    if output not in ("md", "json", "jsonl", "csv"):
        raise RecipeError(f"output format `{output}` is unknown", "use -o md, json, jsonl or csv")
    if (server is None) == (url is None):
        raise RecipeError(
            "serve-check needs a server: its program or its address", "give --server PATH or --url URL, one of them"
        )
    further = list(context.args)
    if run is not None and run.startswith("-"):  # behind --, without a run
        further, run = [run, *further], None
    _check_options(url, plain_url, kind, model, gguf, further, server_option, target, draft, prompts, run)
    if to is not None:
        require_path(to, "--to")
        if not to.resolve().parent.is_dir():
            raise DataError(f"there is no folder {to.resolve().parent}", "make it, or correct --to")
    counts = sorted({1, *numbers(concurrency, "--concurrency", int, "1,4,16")})
    if counts[0] < 1 or counts[-1] > 64:
        raise RecipeError(f"--concurrency {concurrency}: from 1 to 64 requests", "for instance 1,4,16")
    files = pair_files(run, runs, target, draft, prompts, outtype, required=server is not None)
    length = n_max or USUAL_LENGTH
    prepare(threads)
    from distill.machine import thread_count
    from distill.results.serialise import as_json, write_result
    from distill.serving.check import CheckSettings, check_addresses, check_started
    from distill.serving.markdown import as_markdown, flat_rows

    with ExitStack() as stack:
        found = pair_prompts(files, prompts, count, prompt_tokens, tokens + length + 2, choose and url is None, stack)
        wanted = CheckSettings(
            prompts=found.measured,
            limit=tokens,
            repeats=repeats,
            concurrency=tuple(counts),
            choosing=found.choosing,
            whole_grid=whole_grid,
            made=files.made,
            predicted=predicted_acceptance(files, n_max if url is not None else length),
            conversation=found.conversation,
            seconds=(start_seconds, reply_seconds),
            left_out=found.left_out,
            command=shlex.join(["distill", *sys.argv[1:]]),
        )
        if url is not None:
            from distill.serving.opening import Addresses

            pair = None if files.target is None or files.draft is None else (files.target, files.draft)
            places = Addresses(url, plain_url, kind, key, model, pair, n_max, thread_count(threads))
            report = check_addresses(wanted, places)
        else:
            assert server is not None and files.target is not None
            from distill.recipe import Gguf as Options
            from distill.serving.llama_server import LlamaServer, require_binary

            longest = max(len(ids) for ids in (*wanted.ids, *wanted.choosing))
            settings = LlamaServer(
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
            report = check_started(wanted, settings)
    if to is not None:
        write_result(to, report)
    print_table(flat_rows(report), as_markdown(report), as_json(report), output)


OWN = {"--spec-draft-n-max": "--n-max", "--spec-draft-p-min": "--p-min", "--draft-p-min": "--p-min", "-m": "--target"}
OWN |= {"--model": "--target", "-md": "--draft", "--spec-draft-model": "--draft", "--model-draft": "--draft"}
OWN |= {"-np": "--concurrency", "--parallel": "--concurrency"}


def _check_options(
    url: str | None,
    plain_url: str | None,
    kind: str | None,
    model: str | None,
    gguf: Gguf | None,
    further: Sequence[str],
    server_option: Sequence[str] | None,
    target: Path | None,
    draft: Path | None,
    prompts: Sequence[Path] | None,
    run: str | None,
) -> None:
    """Refuse options that would do nothing, or contradict each other."""
    if kind not in (None, "llama-server", "vllm"):
        raise RecipeError(f"--kind {kind} is unknown", "llama-server or vllm")
    for name, value in (("--plain-url", plain_url), ("--kind", kind), ("--model", model)):
        if value is not None and url is None:
            raise RecipeError(f"{name} is of a server that runs already", "give its --url, or leave it out")
    if url is not None and (gguf is not None or further or server_option):
        raise RecipeError("options of llama-server were given for a server that runs already", "start it with them")
    for one in (*further, *(server_option or ())):
        name = one.split()[0].split("=")[0] if one.split() else ""
        if name in OWN:
            raise RecipeError(f"{name} is {OWN[name]} of this command", f"give {OWN[name]} in its place")
    if (target is None) != (draft is None) and run is None:
        raise RecipeError("a pair without a run is --target and --draft", "give both, or a run")
    if target is not None and run is None and not prompts:
        raise RecipeError("a pair without a run needs --prompts", "a file or a folder with prompts")
