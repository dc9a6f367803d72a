"""`distill generate`: continue a text, streamed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli import shared
from distill.cli.shared import require_used, section_options, takes, takes_gguf_options, takes_sampler
from distill.errors import DataError, RecipeError
from distill.files import read_result, read_utf8, require_path, utf8_text
from distill.progress import note
from distill.recipe import Chat, Configuration, Gguf, PyTorch, SamplerSettings, Target, parse_section
from distill.recipe.configuration import TREES
from distill.run import Run

LENGTH = 4  # tokens drafted a round where no option says


@takes_gguf_options("target", "draft")
@takes("pytorch", section_options(PyTorch, "static compile draft_device draft_weights", defaults=False))
@takes("given", section_options(Configuration, "drafter rule p_min widths verifier"))
@takes_sampler()
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    run: Annotated[str | None, typer.Option(help="Run name or folder; the newest run if left out.")] = None,
    target: Annotated[str | None, typer.Option(help="Without a run: folder, hub name or GGUF file.")] = None,
    draft: Annotated[str | None, typer.Option(help="Without a run: a draft of the same kind as the target.")] = None,
    length: Annotated[
        int | None,
        typer.Option(min=0, max=63, help="Most tokens drafted a round, 0: none; by default the run's fastest, or 4."),
    ] = None,
    tokens: Annotated[int, shared.number_option(min=1, help="New tokens at most.")] = 128,
    repetition_penalty: Annotated[float, shared.number_option(min=0.01, max=100, help="1: off.")] = 1.0,
    seed: Annotated[int, shared.number_option(min=0, help="Seed of the sampler.")] = 0,
    table: Annotated[
        Path | None, typer.Option(help="For drafter table: a run, or a file, with n-grams of the target.")
    ] = None,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Allow what changes the target's distribution (LOSSY).")
    ] = False,
    chat: Annotated[
        bool | None, typer.Option(help="Ask as a message; the default where there is a chat template.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    regex: Annotated[str | None, typer.Option(help="The whole new text must match this.")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="A file; the new text is JSON that follows it.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="A file in GBNF or Lark; the new text follows it.")] = None,
    threads: shared.ThreadsOption = None,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
    *,
    sampler: SamplerSettings,
    given: dict[str, Any],
    pytorch: dict[str, Any],
    gguf: Gguf | None,
) -> None:
    """Answer a question or continue a text, streamed, with the draft's accepted tokens marked (green on a terminal).

    Without a temperature the text is that of plain decoding, up to tokens that tie within the rounding of the type.
    """
    text = utf8_text(sys.stdin.buffer.read(), "standard input") if prompt == "-" else prompt
    if run is not None and (target or draft):
        raise RecipeError("--run was given beside --target or --draft", "name a run, or a pair of models")
    configuration = _configuration(given, length, sampler)
    asked_draft = configuration.asks_the_draft or configuration.other_vocabulary
    shared.refuse_idle(
        context,
        (target or draft, "runs", shared.NO_RUN),
        (not asked_draft and configuration.drafts, "draft", f"is not asked by drafter {configuration.drafter}"),
        (not asked_draft, "draft_device draft_weights", "is for a draft, and none is asked"),
        (not configuration.counts_ngrams, "table", "is for --drafter table"),
    )
    constraint = _grammar(regex, json_schema, grammar)
    from distill.gguf.importing import one_engine

    settings = PyTorch()
    if target or draft:
        pair = _standalone_pair(target, draft, configuration)
        place, device, asked = Target(model=pair[0]), "auto", Chat()
        model, found = pair[1], None
    else:
        recipe, found = shared.find_run(run, runs)
        shared.require_draft(found)
        found.verify("train", "draft/*")
        if length is None and not given.keys() & {"drafter", "rule", "widths"}:
            configuration = _configuration(given, _fastest(found), sampler)
        device, threads, settings, asked = recipe.device, threads or recipe.threads, recipe.pytorch, recipe.chat
        big, model = one_engine(recipe.target.model, str(found.path("draft").resolve()))
        place = recipe.target.model_copy(update={"model": big})
    if configuration.counts_ngrams:
        table = shared.place_of_table(table, found)
    require_used(gguf, place.model, model if configuration.asks_the_draft else None)
    decoding = shared.pytorch_settings(settings, place.model, pytorch)
    shared.prepare(threads)
    from distill.data.prompts import user_message
    from distill.measuring.stream import Request, stream
    from distill.sampler import Sampler

    fitted = {} if found is None or configuration.rule != "expected-value" else _calibrations(found)
    request = Request(
        configuration,
        replace(Sampler.of(sampler), repetition_penalty=repetition_penalty),
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
    stream(place, model, text, tokens, request, device, threads, gguf, decoding, message)


def _configuration(given: dict[str, Any], length: int | None, sampler: SamplerSettings) -> Configuration:
    """The configuration that the options name; RecipeError for options that do not go together."""
    settings = given | {"sampler": "recipe" if sampler.temperature > 0 else "greedy"}
    drafter = given.get("drafter")
    if length == 0:
        if drafter not in (None, "none"):
            raise RecipeError(f"--length 0 drafts nothing, and --drafter {drafter} drafts", "give one of them")
        settings["drafter"] = "none"
    elif length is not None or ("widths" not in settings and drafter != "none"):
        settings["length"] = LENGTH if length is None else length
        if drafter in TREES and "widths" not in settings:
            settings["nodes"] = min(2 * settings["length"], 63)
    return parse_section(Configuration, settings)


def _standalone_pair(target: str | None, draft: str | None, configuration: Configuration) -> tuple[str, str | None]:
    """The target and draft of the command line; the draft may be left out where it is not used."""
    from distill.engines.pairs import require_drafts

    if target is None:
        raise RecipeError("--draft was given without --target", "give both, or name a run with --run")
    if draft is None and (configuration.asks_the_draft or configuration.other_vocabulary):
        raise RecipeError(f"drafter {configuration.drafter} needs a draft", "give --draft, or --drafter lookup")
    target = shared.local_reference(target)
    if draft is None:
        return target, None
    return require_drafts(target, shared.local_reference(draft), configuration.other_vocabulary)


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
    length = next((one.length for one in report.fastest if one.backend == "pytorch"), None)
    if length is not None:
        note(f"drafts {length} token{'s' * (length > 1)} a round, the fastest fixed length of the run (--length)")
    return length


def _calibrations(run: Run) -> dict[str, Any]:
    """The calibrations that a run has fitted, by name."""
    from distill.measuring.calibrate import load_calibrations

    path = run.path("speedup", "calibration.json")
    return dict(load_calibrations(path)) if path.exists() else {}


def _grammar(regex: str | None, json_schema: Path | None, grammar: Path | None) -> tuple[str, str] | None:
    """The kind and text of the one that was given; RecipeError for several, DataError for a file that is not there."""
    if sum(given is not None for given in (regex, json_schema, grammar)) > 1:
        raise RecipeError("--regex, --json-schema and --grammar were given together", "choose one of them")
    if regex is not None:
        return "regex", regex
    path = json_schema or grammar
    if path is None:
        return None
    require_path(path, "--json-schema" if json_schema else "--grammar")
    text = read_utf8(path)
    return ("json" if json_schema else "gbnf" if "::=" in text else "lark"), text
