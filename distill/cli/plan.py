"""`distill plan`: whether a draft will pay, how much and why not, from costs alone, before hours are spent."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill import MOST_PRIMITIVES, PRIMITIVES
from distill.cli import shared
from distill.cli.shared import require_used, section_options, takes, takes_gguf_options
from distill.errors import DataError, RecipeError
from distill.files import read_result
from distill.machine import machine, thread_count
from distill.progress import announce, command_line, note
from distill.recipe import Gguf, PyTorch, Recipe, Target
from distill.recipe.measuring import MOST_KL, OUTTYPES
from distill.tables import Cell, Row, Table

# ── `distill profile`: measures the cost curve of one model on this machine ──

if TYPE_CHECKING:
    from distill.decoding.costs import CostCurve
    from distill.planning.cases import PlanRequest
    from distill.planning.plan import Case


@takes_gguf_options("target")
@takes("pytorch", section_options(PyTorch, "static compile prepack", defaults=False))
def profile(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder, hub name or GGUF file.")],
    depths: Annotated[str, typer.Option(help="Tokens already in the cache, separated by commas.")] = "64,512",
    max_tokens: Annotated[int, typer.Option(min=2, max=64, help="Measure steps of 1 to this many tokens.")] = 64,
    repeats: Annotated[int, typer.Option(min=5, help="Repeats per step; the median counts.")] = 7,
    dtype: Annotated[str, typer.Option(help=shared.DTYPE_HELP)] = "float32",
    types: Annotated[str | None, typer.Option(help="Of a GGUF file: compare it with these, such as q8_0,f16.")] = None,
    most_kl: Annotated[float, shared.number_option(min=0, help="--types: the KL that is accepted, in nats.")] = MOST_KL,
    threads: shared.ThreadsOption = None,
    out: Annotated[Path | None, typer.Option(help="Also save the curve to this JSON file.")] = None,
    output: shared.FormatOption = "md",
    *,
    pytorch: dict[str, Any],
    gguf: Gguf | None,
) -> None:
    """Measure the cost curve of one model on this machine.

    T(m) is the time of a step of m tokens, in seconds, with a given number of tokens (depth) in the cache.
    """
    shared.refuse_idle(
        context,
        (model.endswith(".gguf"), "dtype", shared.TYPES_OF_ITS_OWN),
        (types is None, "most_kl", "is for --types"),
        (types is not None, "static compile prepack", "is for folders, and --types for a GGUF file"),
        (types is not None, "depths max_tokens out", "is for the curve of one model, and --types compares several"),
    )
    if types is not None:
        _compare_types(model, types, most_kl, threads, repeats, gguf, output)
        return
    decoding = shared.pytorch_settings(PyTorch(), model, pytorch)
    from distill.engines.torch.hugging_face import settled_target

    place, places = settled_target(model, dtype), shared.numbers(depths, "--depths", int, least=1)
    curve = measured_curve(place, places, max_tokens, repeats, threads, gguf, decoding)
    if out is not None:
        from distill.decoding.costs import save_cost_curve

        announce(out)
        save_cost_curve(curve, out)
    rows: list[Row] = [
        [depth, m, Cell(seconds, ".6g"), Cell(seconds / row[0], ".3f")]
        for depth, row in zip(curve.depths, curve.seconds, strict=True)
        for m, seconds in enumerate(row, start=1)
    ]
    notes = [f"{curve.model}, {curve.backend}", *([f"Note: {curve.note}."] if curve.note else [])]
    table = Table(["depth", "m", f"T(m), {curve.unit}", "T(m) / T(1)"], rows)
    shared.print_blocks([*notes, table], None, output)


def _compare_types(
    model: str, types: str, most_kl: float, threads: int | None, repeats: int, gguf: Gguf | None, output: str
) -> None:
    kinds = [kind.strip() for kind in types.split(",")]
    shared.require_known("--types", kinds, OUTTYPES)
    if gguf is not None:
        raise RecipeError(f"--types takes none of llama.cpp's options ({gguf.described()})", "leave them out")
    if model.endswith(".gguf") and not Path(model).is_file():
        raise DataError(f"there is no file {model}", "give a GGUF file")
    if not model.endswith(".gguf"):
        raise RecipeError(f"--types is for a GGUF file, and {model} is none", "export one with `distill export-gguf`")
    from distill.measuring.identity import TypesReport, compare_types, recommend, types_table

    figures = compare_types(Path(model), kinds, threads, repeats)
    report = TypesReport(command_line(sys.argv), machine(), most_kl, figures)
    shared.print_blocks([recommend(report), types_table(report)], report, output)


def measured_curve(
    place: Target,
    depths: list[int],
    max_tokens: int,
    repeats: int,
    threads: int | None,
    gguf: Gguf | None,
    pytorch: PyTorch,
) -> CostCurve:
    """The curve of a folder or a GGUF file on this machine; DataError or RecipeError where it cannot be opened."""
    from distill.decoding.costs import measure_curve

    if os.environ.get(PRIMITIVES) == MOST_PRIMITIVES:
        # Sizes take turns, and each has primitives of its own: up to 64 of them would push one another out, and every
        # step would be timed with the compilation of its own. The process ends with the command.
        os.environ[PRIMITIVES] = str(2 * int(MOST_PRIMITIVES))
    model, room = place.model, max(depths) + max_tokens
    if model.endswith(".gguf"):
        from distill.engines.llama_cpp.model import GgufModel

        if not Path(model).is_file():
            raise DataError(f"there is no file {model}", "give a GGUF file or a Hugging Face folder")
        with GgufModel(model, context=room, threads=threads, options=(gguf or Gguf()).target) as quantised:
            return measure_curve(quantised, model, "gguf", depths, max_tokens, repeats)
    require_used(gguf, model, None)
    import torch

    from distill.devices import pick_device
    from distill.engines.loaded import torch_decoder
    from distill.engines.torch.hugging_face import load_model

    torch.set_num_threads(thread_count(threads))
    loaded = load_model(shared.local_reference(model), place.dtype, pick_device("auto"))
    decoder = torch_decoder(loaded, None, pytorch, room)
    title = model + pytorch.suffix + ("" if place.dtype == "float32" else f", {place.dtype}")
    return measure_curve(decoder, title, "pytorch", depths, max_tokens, repeats)


# ── `distill plan`: whether a draft will pay, how much and why not, from costs alone, before hours are spent ──

# The keys by which a recipe says what options say of models.
KEYS = {
    "depth": "speedup.depth",
    "tokens": "speedup.new_tokens",
    "dtype": "target.dtype",
    "threads": "threads",
    **dict.fromkeys(("draft", "draft_cost", "draft_curve"), "cut.layers"),
}
REPEATS = 5  # of a curve's steps
REPLY_SECONDS = 600.0  # that a server may take for one


@takes_gguf_options("target", "draft")
def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="TARGET|RECIPE", help="Folder, hub name or GGUF file; or a recipe: its target and cut."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="Override recipe keys.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft: folder, hub name or GGUF file.")] = None,
    draft_cost: Annotated[
        float | None, shared.number_option(min=0, help="Instead of a draft: the cost of its step, in units of T(1).")
    ] = None,
    target_curve: Annotated[
        Path | None, typer.Option(help="Instead of measuring: what `distill profile --out` saved.")
    ] = None,
    draft_curve: Annotated[Path | None, typer.Option(help="The same for the draft.")] = None,
    batched_bench: Annotated[Path | None, typer.Option(help="The target's curve: a llama-batched-bench log.")] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The target's curve: measured on a llama-server or vLLM that does not draft."),
    ] = None,
    key: Annotated[str | None, typer.Option(help="--server: environment variable that holds its key.")] = None,
    served_model: Annotated[
        str | None, typer.Option("--model", help="Name of the served model, where vLLM has several.")
    ] = None,
    acceptance: Annotated[str | None, typer.Option(help="Conditional acceptance by position, with commas.")] = None,
    sister: Annotated[Path | None, typer.Option(metavar="RUN", help="A run: its conditional acceptance, too.")] = None,
    hardware: Annotated[Path | None, typer.Option(help="YAML file of another machine (docs/plan.md).")] = None,
    measure: Annotated[bool, typer.Option(help="Measure on this machine, or only estimate.")] = True,
    lengths: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "1,2,3,4,6,8",
    depth: Annotated[int, typer.Option(min=1, max=2**20, help="Prompt length, in tokens.")] = 128,
    tokens: Annotated[int, typer.Option(min=8, max=2**20, help="New tokens after it.")] = 96,
    dtype: Annotated[str, typer.Option(help=shared.DTYPE_HELP)] = "float32",
    threads: shared.ThreadsOption = None,
    output: shared.FormatOption = "md",
    gguf: Gguf | None = None,
) -> None:
    """Predict a draft's speedup before it is made, from measured or described costs; a minute or two.

    By draft length and conditional acceptance: what pays, from which on, and how much a draft step may cost.
    """
    if [model, target_curve, batched_bench, server].count(None) != 3:
        raise RecipeError("expected a target, a recipe, --target-curve, --batched-bench or --server")
    if [draft, draft_cost, draft_curve].count(None) < 2:
        raise RecipeError("--draft, --draft-cost and --draft-curve were given together", "give one of them")
    if model is not None and not measure and hardware is None:
        raise RecipeError("--no-measure leaves nothing but an estimate", "give --hardware FILE")
    drafted = sorted(set(shared.numbers(lengths, "--lengths", int, "1,2,4", 1, 63)))
    given = _given(acceptance, sister)
    of_recipe = model is not None and model.endswith((".yaml", ".yml"))
    timed = draft is not None or server is not None or hardware is not None
    shared.refuse_idle(
        context,
        *((of_recipe, name, f"is for models; of a recipe, override its key: {key}=…") for name, key in KEYS.items()),
        (of_recipe, "gguf", "is for models; a recipe has a section gguf"),
        (server is None, "key served_model", "is for --server"),
        (model is None, "draft", "is measured beside its target, and a curve stands for that: give --draft-curve"),
        (model is None, "hardware", "needs the model's sizes, and a curve has none: give the target or a recipe"),
        (model is None, "measure", "leaves nothing but an estimate: give the model and --hardware FILE"),
        (hardware, "draft_curve", "is in seconds of another machine than --hardware: give --draft-cost or --draft"),
        (not measure, "threads gguf", "is for what is measured here (--measure)"),
        (model is None, "dtype threads gguf", "is for a model that is measured here, and a curve stands for it"),
        (not of_recipe and not timed, "tokens", "is for --draft, --server and --hardware: a curve has no requests"),
        (model is not None and model.endswith(".gguf"), "dtype", shared.TYPES_OF_ITS_OWN),
    )
    recipe = _recipe(model, overrides or [])
    from distill.decoding.costs import load_cost_curve
    from distill.engines.server_commands import shipped_heads
    from distill.engines.torch.hugging_face import settled_target
    from distill.planning.cases import (
        PlanRequest,
        curve_case,
        estimated_case,
        import_curve,
        llama_settings,
        planned_config,
    )
    from distill.planning.hardware import read_hardware
    from distill.planning.hours import StageEstimate, estimated_hours
    from distill.planning.plan import SpeedupPlan, by_position, forecast, plan_blocks

    if recipe is not None:
        request = replace(PlanRequest.of(recipe), lengths=drafted)
    else:
        if model is not None:
            require_used(gguf, model, draft)
        place = settled_target(shared.local_reference(model or "."), dtype)
        small = None if draft is None else shared.local_reference(draft)
        request = PlanRequest(place, small, draft_cost, None, drafted, depth, tokens, threads, gguf)
    cases: list[Case] = []
    curve: CostCurve | None = None
    if recipe is not None or draft is not None:
        if measure:
            shared.prepare(threads if recipe is None else recipe.threads)
            cases += _told_as_they_come(request, given)
    elif measure:
        if model is not None:
            curve = measured_curve(request.target, [depth], max(drafted) + 1, REPEATS, threads, gguf, PyTorch())
        elif server is not None:
            curve = _served_curve(server, key, served_model, depth, tokens, max(drafted) + 1)
        elif batched_bench is not None:
            curve = import_curve(batched_bench)
        else:
            assert target_curve is not None
            curve = load_cost_curve(target_curve)
        small_curve = None if draft_curve is None else load_cost_curve(draft_curve)
        cases.append(curve_case(curve, small_curve, request, model is not None))
    run: list[StageEstimate] = []
    described = None if hardware is None else read_hardware(hardware)
    if described is not None:
        cases.append(estimated_case(described, request))
        if recipe is not None:
            run = estimated_hours(recipe, described, request.works(), planned_config(recipe))
    settings: list[str] = []
    if curve is not None and given and curve.backend != "vllm":
        costs = cases[0].timings[0]
        rates = by_position(next(iter(given.values())), max(drafted))
        settings = llama_settings(curve, rates, costs.by_argmax.later / costs.token, depth)
    found = SpeedupPlan(command_line(sys.argv), machine(), [forecast(one, given) for one in cases], settings)
    heads = [] if recipe is None and model is None else shipped_heads(request.target.model)
    found = replace(found, run=run, run_on="" if described is None else described.name, heads=heads)
    shared.print_blocks(plan_blocks(found), found, output)


def _told_as_they_come(request: PlanRequest, given: Mapping[str, Sequence[float]]) -> Iterator[Case]:
    """The measured cases; what each says is a line of progress where another, of minutes, follows."""
    from distill.planning.cases import measured_cases
    from distill.planning.plan import forecast

    backends = 1 if request.recipe is None else len(request.recipe.speedup.backends)
    for place, case in enumerate(measured_cases(request), 1):
        if place < backends:
            note("\n  ".join([f"{case.title}:", *forecast(case, given).sentences]))
        yield case


def _served_curve(url: str, key: str | None, name: str | None, depth: int, tokens: int, limit: int) -> CostCurve:
    """The curve of a server that runs, at requests of `depth` and `tokens`."""
    from contextlib import closing

    from distill.serving.clients import client_of
    from distill.serving.load import served_curve
    from distill.serving.server import Http

    with closing(Http(url, REPLY_SECONDS, key)) as http:
        return served_curve(client_of(http, model=name), depth, tokens, limit)


def _given(acceptance: str | None, sister: Path | None) -> dict[str, list[float]]:
    """The conditional acceptance by position that the options name, each with its title."""
    found = {}
    if acceptance is not None:
        found["--acceptance"] = shared.numbers(acceptance, "--acceptance", float, "0.8,0.75,0.7", most=1)
    if sister is not None:
        from distill.measuring.evaluation_results import EvaluationReport

        if not (sister / "eval.json").is_file():
            raise DataError(f"{sister} holds no eval.json", "give the folder of a run that stage eval has measured")
        counted = read_result(sister / "eval.json", EvaluationReport).positions.get("after")
        if not counted:
            raise DataError(f"{sister}/eval.json holds no conditional acceptance", "give a run that decoded rounds")
        found[f"--sister {sister.name}"] = [one.rate.mean for one in counted]
    return found


def _recipe(model: str | None, overrides: Sequence[str]) -> Recipe | None:
    """The recipe that was named, None where a model was."""
    if model is None or not model.endswith((".yaml", ".yml")):
        if overrides:
            raise RecipeError(f"`{overrides[0]}` overrides a recipe's key, and no recipe was named", "leave it out")
        return None
    return shared.read_recipe(Path(model), overrides)
