"""`distill generate`: continue a text, streamed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli import shared
from distill.errors import DataError, RecipeError
from distill.files import read_result, read_utf8, require_path, utf8_text
from distill.progress import note
from distill.recipe import Chat, Configuration, PyTorch, SamplerSettings, Target, parse_section
from distill.recipe.configuration import TREES
from distill.recipe.target import HOTTEST
from distill.run import Run

LENGTH = 4  # tokens drafted a round where no option says


def generate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT [RUN | TARGET [DRAFT]]",
            help="The text to continue (- reads it from standard input); a run (by default the newest), or models.",
        ),
    ],
    configuration: Annotated[
        str | None,
        typer.Option(
            "--configuration", "-C", metavar="K=V,...", help=f"Such as drafter=lookup or length=0: {shared.CONFIGURED}"
        ),
    ] = None,
    tokens: Annotated[int, shared.number_option(min=1, help="New tokens at most.")] = 128,
    temperature: Annotated[
        float | None, shared.number_option(min=0, max=HOTTEST, help="Of the sampler; greedy if left out.")
    ] = None,
    sampler: shared.SamplerOption = None,
    repetition_penalty: Annotated[float, shared.number_option(min=0.01, max=100, help="1: off.")] = 1.0,
    seed: Annotated[int, shared.number_option(min=0, help="Seed of the sampler.")] = 0,
    table: shared.TableOption = None,
    allow_lossy: shared.LossyOption = False,
    chat: Annotated[
        bool | None, typer.Option(help="Ask as a message; the default where there is a chat template.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    regex: Annotated[str | None, typer.Option(help="The whole new text must match this.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="The new text follows this file: a JSON schema (.json), or a grammar in GBNF.")
    ] = None,
    pytorch: shared.PyTorchOption = None,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    llama: shared.LlamaOption = None,
    llama_draft: shared.LlamaDraftOption = None,
) -> None:
    """Answer a question or continue a text, streamed, with the draft's accepted tokens marked (green on a terminal).

    Without a temperature the text is that of plain decoding, up to tokens that tie within the rounding of the type.
    """
    prompt, *named = words
    text = utf8_text(sys.stdin.buffer.read(), "standard input") if prompt == "-" else prompt
    models = shared.models_of(named, runs)
    drawn = shared.sampler_of(sampler, temperature)
    given = shared.keys_of(Configuration, configuration, "--configuration")
    chosen = _configuration(given, drawn)
    constraint = _grammar(regex, grammar)
    from distill.gguf.importing import one_engine

    own, device, asked, found = PyTorch(), "auto", Chat(), None
    if models:
        in_bits = shared.pytorch_of(pytorch, own, ()).in_bits
        big, small = _standalone_pair(models, chosen, in_bits)
        place = Target(model=big)
    else:
        recipe, found = shared.find_run(named[0] if named else None, runs)
        shared.require_draft(found)
        found.verify("train", "draft/*")
        if not given.keys() & {"drafter", "rule", "widths", "length"} and (length := _fastest(found)) is not None:
            chosen = _configuration(given | {"length": length}, drawn)
        device, threads, own, asked = recipe.device, threads or recipe.threads, recipe.pytorch, recipe.chat
        in_bits = shared.pytorch_of(pytorch, own, ()).in_bits
        big, small = one_engine(recipe.target.model, str(found.path("draft").resolve()), in_bits)
        place = recipe.target.model_copy(update={"model": big})
    if chosen.counts_ngrams:
        table = shared.place_of_table(table, found)
    loaded = [big, small] if chosen.asks_the_draft else [big]
    gguf, decoding = shared.gguf_of(loaded, llama, llama_draft), shared.pytorch_of(pytorch, own, loaded)
    shared.prepare(threads)
    from distill.data.prompts import user_message
    from distill.measuring.stream import Request, stream
    from distill.sampler import Sampler

    fitted = {} if found is None or not chosen.needs_calibration else _calibrations(found)
    request = Request(
        chosen,
        replace(Sampler.of(drawn), repetition_penalty=repetition_penalty),
        seed,
        tuple(stop or ()),
        fitted,
        lossy=allow_lossy,
        grammar=constraint,
        table=table,
    )
    message = None
    if chat is not False and text:
        message = user_message(place.model, text, asked, required=bool(chat))
        if message is not None and chat is None:
            note("asked as a user's message; --no-chat continues the text as it is")
    stream(place, small, text, tokens, request, device, threads, gguf, decoding, message)


def _configuration(given: Mapping[str, Any], sampler: SamplerSettings) -> Configuration:
    """The configuration that an option names; four tokens a round where it says nothing else, and length 0 for none."""
    settings = dict(given) | {"sampler": "recipe" if sampler.temperature > 0 else "greedy"}
    drafter = settings.get("drafter")
    if settings.get("length") == 0 and drafter in (None, "none"):
        settings = {name: value for name, value in settings.items() if name != "length"} | {"drafter": "none"}
    elif "widths" not in settings and drafter != "none":
        settings.setdefault("length", LENGTH)
        if drafter in TREES and isinstance(settings["length"], int):
            settings.setdefault("nodes", min(2 * settings["length"], 63))
    return parse_section(Configuration, settings, "--configuration")


def _standalone_pair(models: Sequence[str], configuration: Configuration, in_bits: bool) -> tuple[str, str | None]:
    """Target and draft; the draft may be left out where it is not asked."""
    from distill.engines.pairs import require_drafts

    if len(models) > 1:
        return require_drafts(models[0], models[1], configuration.other_vocabulary, in_bits)
    if configuration.asks_the_draft or configuration.other_vocabulary:
        raise RecipeError(f"drafter {configuration.drafter} needs a draft", "name one, or give -C drafter=lookup")
    return models[0], None


def _fastest(run: Run) -> int | None:
    """The fixed length that was fastest in a run's PyTorch, which decodes here; None where none was measured of this
    draft, or in another form than this version reads."""
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


def _calibrations(run: Run) -> dict[str, Any]:
    """The calibrations that a run has fitted, by name."""
    from distill.measuring.calibrate import load_calibrations

    path = run.path("speedup", "calibration.json")
    return dict(load_calibrations(path)) if path.exists() else {}


def _grammar(regex: str | None, grammar: Path | None) -> tuple[str, str] | None:
    """The kind and text of the one that was given; RecipeError for both, DataError for a file that is not there."""
    if regex is not None and grammar is not None:
        raise RecipeError("--regex and --grammar were given together", "choose one of them")
    if regex is not None:
        return "regex", regex
    if grammar is None:
        return None
    require_path(grammar, "--grammar")
    text = read_utf8(grammar)
    return ("json" if grammar.suffix == ".json" else "gbnf" if "::=" in text else "lark"), text
