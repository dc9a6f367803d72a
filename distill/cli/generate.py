"""`distill generate`, `distill chat` and `distill serve` decode with a pair, for a person or for programs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli import shared
from distill.errors import DataError, RecipeError, RunError
from distill.files import read_result, read_utf8, require_path, utf8_text
from distill.machine import install_extra
from distill.progress import note
from distill.recipe import Chat, Configuration, Gguf, PyTorch, Sampler, Target, parse_section
from distill.recipe.configuration import TREES, USUAL_LENGTH
from distill.recipe.target import HOTTEST
from distill.run import Run

Opened = tuple[Any, Any, Chat]  # an Opening (distill.engines.loaded), a Continuation (distill.serving.answering): heavy
Opener = Callable[..., Opened]


TokensOption = Annotated[int, shared.number_option(min=1, help="Maximum new tokens.")]
ContextOption = Annotated[int, typer.Option(min=16, max=2**24, help="Maximum tokens of a conversation.")]


def _opening(
    words: Sequence[str],
    temperature: float | None = None,
    *,
    invocation: typer.Context,
    adapter: shared.AdapterOption = None,
    configuration: Annotated[
        str | None,
        typer.Option(
            "--configuration",
            "-C",
            metavar="K=V,...",
            help=f"How to decode, such as drafter=lookup or length=0. Keys: {shared.CONFIGURED}",
        ),
    ] = None,
    sampler: shared.SamplerOption = None,
    table: shared.TableOption = None,
    allow_lossy: shared.LossyOption = False,
    dtype: shared.DtypeOption = None,
    pytorch: shared.PyTorchOption = None,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    llama: shared.LlamaOption = None,
    llama_draft: shared.LlamaDraftOption = None,
) -> Opened:
    """Open the pair that a command names. Returns it with the request and the settings of its chat template."""
    drawn, models = shared.sampler_of(sampler, temperature), shared.models_of(invocation, words, runs, adapter=adapter)
    given = shared.keys_of(Configuration, configuration, "--configuration")
    chosen = _configuration(given, drawn)
    from distill.engines.loaded import settled_decoding
    from distill.gguf.importing import one_engine

    own, device, asked, found = PyTorch(), "auto", Chat(), None
    if models:
        shared.require_folders(invocation, models)
        decoding, named = (
            shared.pytorch_of(invocation, pytorch, own, models),
            Target(model=models[0], dtype=dtype or "auto"),
        )
        place, decoding = settled_decoding(named, next(iter(models[1:]), None), decoding)
        big, small = _standalone_pair(models, chosen, decoding.in_bits)
    else:
        recipe, found = shared.find_run(words[0] if words else None, runs)
        shared.require_draft(found)
        found.verify("train", "draft/*")
        if not given.keys() & {"drafter", "rule", "widths", "length"} and (length := _fastest(found)) is not None:
            chosen = _configuration(given | {"length": length}, drawn)
        device, threads, own, asked = recipe.device, threads or recipe.threads, recipe.pytorch, recipe.chat
        draft = str(found.path("draft").resolve())
        target = recipe.target if dtype is None else recipe.target.model_copy(update={"dtype": dtype})
        place, decoding = settled_decoding(target, draft, shared.pytorch_of(invocation, pytorch, own, ()), device)
        big, small = one_engine(recipe.target.model, draft, decoding.in_bits)
    if chosen.counts_ngrams:
        table = shared.place_of_table(table, found)
    else:
        shared.refuse(invocation, "without -C drafter=table", "table")
    loaded = [big, small] if chosen.asks_the_draft and small is not None else [big]
    gguf, place = shared.gguf_of(invocation, loaded, llama, llama_draft), place.model_copy(update={"model": big})
    shared.prepare(threads)
    from distill.engines.loaded import Opening
    from distill.serving.answering import Continuation

    request = Continuation(chosen, drawn, lossy=allow_lossy, table=table)
    return Opening(place, small, device, threads, gguf or Gguf(), decoding), request, asked


def of_pair(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of `_opening` after its own; `opened` is `_opening` with their values."""
    own, options = (signature(one, eval_str=True).parameters.values() for one in (command, _opening))
    added = [*options][2:]

    @wraps(command)
    def run(**given: Any) -> None:
        command(partial(_opening, **{one.name: given.pop(one.name) for one in added}), **given)

    run.__signature__ = Signature([*[*own][1:], *added])  # type: ignore[attr-defined]  # which typer reads
    return run


@of_pair
def generate(
    opened: Opener,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT [RUN | TARGET [DRAFT]]",
            help="The text to continue (- reads standard input). Then a run (by default the newest) or models.",
        ),
    ],
    tokens: TokensOption = 128,
    temperature: Annotated[
        float | None,
        shared.number_option(
            min=0, max=HOTTEST, help="Sampling temperature. The default is 0 (greedy), or the value in --sampler."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float, shared.number_option(min=0.01, max=100, help="Repetition penalty. 1 is none.")
    ] = 1.0,
    seed: Annotated[int, shared.number_option(min=0, help="Seed of the sampler.")] = 0,
    chat: Annotated[
        bool | None,
        typer.Option(help="Send the prompt as a chat message. The default if the target has a chat template."),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string: the text ends before it. Repeatable.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the whole new text matches.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="File that the new text follows: a JSON schema (.json) or a grammar in GBNF.")
    ] = None,
) -> None:
    """Answer a question or continue a text. The draft's accepted tokens are marked (green on a terminal).

    Without a temperature, the text equals that of plain decoding, unless two tokens tie within rounding.
    """
    prompt, *named = words
    text = utf8_text(sys.stdin.buffer.read(), "standard input") if prompt == "-" else prompt
    constraint = _grammar(regex, grammar)
    opening, request, asked = opened(named, temperature)
    from distill.data.prompts import user_message
    from distill.serving.terminal import stream

    penalised = request.sampler.penalised(repetition_penalty)
    request = replace(request, sampler=penalised, seed=seed, stop=tuple(stop or ()), grammar=constraint)
    message = None
    if chat is not False and text:
        message = user_message(opening.target.model, text, asked, required=bool(chat))
        if message is not None and chat is None:
            note("asked as a user's message; --no-chat continues the text as it is")
    stream(opening, text, tokens, request, message)


@of_pair
def chat(
    opened: Opener, words: shared.PairArgument = None, tokens: TokensOption = 1024, context: ContextOption = 8192
) -> None:
    """Chat with the pair. Accepted tokens are green or in ‹›. Each answer is followed by its speed and drafted share.

    /plain decodes the last answer again without drafting. /save FILE keeps the conversation for a corpus. /new starts
    another conversation. Without a terminal, each line of standard input is a message.
    """
    opening, request, asked = opened(words or [])
    from distill.serving.terminal import converse

    converse(opening, asked, request, context, tokens)


@of_pair
def serve(
    opened: Opener,
    words: shared.PairArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 8080,
    queue: Annotated[
        int, typer.Option(min=0, max=2**16, help="Maximum waiting requests. Further ones get status 503.")
    ] = 8,
    context: ContextOption = 8192,
) -> None:
    """Serve a pair with OpenAI's API, one request at a time: /v1/chat/completions and /v1/completions, also streamed.

    --sampler applies to requests without sampler settings. For many users, serve with llama-server, vLLM or SGLang
    (the report shows the commands).
    """
    require_server()
    opening, request, asked = opened(words or [])
    from distill.serving.completions import serve as run

    run(opening, asked, request, context, (host, port), queue)


def require_server() -> None:
    """Raise RunError if packages of the extra `serve` are missing."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise RunError("`distill serve` needs starlette and uvicorn", install_extra("serve"))


def _configuration(given: Mapping[str, Any], sampler: Sampler) -> Configuration:
    """Return the configuration that an option names. The default drafts four tokens a round; length 0 drafts none."""
    settings = dict(given) | {"sampler": "recipe" if sampler.temperature > 0 else "greedy"}
    drafter = settings.get("drafter")
    if settings.get("length") == 0 and drafter in (None, "none"):
        settings = {name: value for name, value in settings.items() if name != "length"} | {"drafter": "none"}
    elif "widths" not in settings and drafter != "none":
        settings.setdefault("length", USUAL_LENGTH)
        if drafter in TREES and isinstance(settings["length"], int):
            settings.setdefault("nodes", min(2 * settings["length"], 63))
    return parse_section(Configuration, settings, "--configuration")


def _standalone_pair(models: Sequence[str], configuration: Configuration, in_bits: bool) -> tuple[str, str | None]:
    """Return target and draft. The draft can be absent if the configuration does not use it."""
    from distill.engines.pairs import require_drafts

    if len(models) > 1:
        return require_drafts(models[0], models[1], configuration.other_vocabulary, in_bits)
    if configuration.asks_the_draft or configuration.other_vocabulary:
        raise RecipeError(f"drafter {configuration.drafter} needs a draft", "name one, or give -C drafter=lookup")
    return models[0], None


def _fastest(run: Run) -> int | None:
    """Return the fixed length that was fastest in a run's PyTorch; None if this draft has no readable measurement."""
    from distill.measuring.speedup_results import SpeedupReport

    if run.outdated("speedup"):
        return None
    try:
        report = read_result(run.path("speedup.json"), SpeedupReport)
    except DataError:
        return None
    fastest = report.fastest_of_backends.get("pytorch")
    length = None if fastest is None else fastest.length
    if length is not None:
        note(f"drafts {length} token{'s' * (length > 1)} a round, the fastest fixed length of the run (-C length=N)")
    return length


def _grammar(regex: str | None, grammar: Path | None) -> tuple[str, str] | None:
    """Return the kind and text of --regex or --grammar; RecipeError for both, DataError for a missing file."""
    if regex is not None and grammar is not None:
        raise RecipeError("--regex and --grammar were given together", "choose one of them")
    if regex is not None:
        return "regex", regex
    if grammar is None:
        return None
    require_path(grammar, "--grammar")
    text = read_utf8(grammar)
    return ("json" if grammar.suffix == ".json" else "gbnf" if "::=" in text else "lark"), text
