"""`distill profile` measures the cost curve of one model; `distill plan` predicts from costs whether a draft pays."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distill import MOST_PRIMITIVES, PRIMITIVES
from distill.cli import shared
from distill.errors import DataError, RecipeError
from distill.files import is_gguf, read_result
from distill.machine import machine, thread_count
from distill.progress import announce, command_line, note
from distill.recipe import Gguf, PyTorch, Target, resolve_model
from distill.recipe.measuring import MOST_KL, OUTTYPES
from distill.tables import Block, Cell, Row, Table

# ── `distill profile`: measures the cost curve of one model on this machine ──

if TYPE_CHECKING:
    from distill.decoding.costs import CostCurve
    from distill.planning.cases import LayerSwap


def profile(
    invocation: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder, hub name or GGUF file.")],
    depths: Annotated[str, typer.Option(help="Tokens already in the cache, separated by commas.")] = "64,512",
    max_tokens: Annotated[int, typer.Option(min=2, max=64, help="Measure steps of 1 to this many tokens.")] = 64,
    repeats: Annotated[int, typer.Option(min=5, help="Repeats of each step. The median counts.")] = 7,
    adapter: shared.AdapterOption = None,
    dtype: shared.DtypeOption = None,
    pytorch: shared.PyTorchOption = None,
    types: Annotated[
        str | None,
        typer.Option(help=f"Compare the model's files in these GGUF types, separated by commas: {shared.FILE_TYPES}."),
    ] = None,
    most_kl: Annotated[float, shared.number_option(min=0, help="With --types: maximum KL, in nats.")] = MOST_KL,
    threads: shared.ThreadsOption = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to save the curve to, for `distill plan`.")] = None,
    output: shared.FormatOption = "md",
    llama: shared.LlamaOption = None,
) -> None:
    """Measure the cost curve of one model on this machine. A GGUF file runs in llama.cpp, then in every other engine.

    T(m) is the time of a step of m tokens, in seconds, with a given number of tokens (depth) in the cache.
    """
    model = model if adapter is None else shared.model_of(model, adapter)
    if types is not None:
        of_curves = ("depths", "max_tokens", "dtype", "pytorch", "out", "llama")
        shared.refuse(invocation, "with --types, which compares files", *of_curves)
        kinds = [kind.strip() for kind in types.split(",")]
        shared.require_known("--types", kinds, OUTTYPES)
        shared.print_blocks(_engines(model, kinds, most_kl, threads, repeats), None, output)
        return
    gguf = shared.gguf_of(invocation, [model], llama)
    shared.require_folders(invocation, [model])
    decoding = shared.pytorch_of(invocation, pytorch, PyTorch(), [model])
    # Formats for programs hold the curve alone.
    in_every_engine = is_gguf(model) and gguf is None and not decoding.in_bits and output == "md"
    if not in_every_engine:
        shared.refuse(invocation, "on a cost curve", "most_kl")
    from distill.engines.torch.hugging_face import settled_target

    place, places = settled_target(model, dtype or "auto"), shared.numbers(depths, "--depths", int, least=1)
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
    engines = _engines(model, [], most_kl, threads, repeats) if in_every_engine else []
    shared.print_blocks([*engines, *notes, table], None, output)


def _engines(model: str, kinds: list[str], most_kl: float, threads: int | None, repeats: int) -> list[Block]:
    """Measure a model's files of these types in every engine. A GGUF file comes first, in its own type."""
    if is_gguf(model) and not Path(model).is_file():
        raise DataError(f"there is no file {model}", "give a GGUF file")
    from distill.measuring.identity import compare_types, recommend, types_table

    figures = compare_types(model, kinds, threads, repeats)
    return [recommend(figures, most_kl), types_table(figures, command_line(sys.argv))]


def measured_curve(
    place: Target,
    depths: list[int],
    max_tokens: int,
    repeats: int,
    threads: int | None,
    gguf: Gguf | None,
    pytorch: PyTorch,
) -> CostCurve:
    """Measure the curve of a folder or a GGUF file; DataError or RecipeError if it cannot be opened."""
    from distill.decoding.costs import measure_curve

    if os.environ.get(PRIMITIVES) == MOST_PRIMITIVES:
        # Sizes take turns, and each has primitives of its own: up to 64 of them would push one another out, and every
        # step would be timed with the compilation of its own. The process ends with the command.
        os.environ[PRIMITIVES] = str(2 * int(MOST_PRIMITIVES))
    model, room = place.model, max(depths) + max_tokens
    if is_gguf(model) and not pytorch.in_bits:
        from distill.engines.llama_cpp.model import GgufModel

        if not Path(model).is_file():
            raise DataError(f"there is no file {model}", "give a GGUF file or a Hugging Face folder")
        with GgufModel(model, context=room, threads=threads, options=(gguf or Gguf()).target) as quantised:
            return measure_curve(quantised, model, "gguf", depths, max_tokens, repeats)
    import torch

    from distill.devices import pick_device
    from distill.engines.loaded import growing_decoder, load_big, settled_decoding, torch_decoder

    torch.set_num_threads(thread_count(threads))
    place = place.model_copy(update={"model": resolve_model(model)})
    place, pytorch = settled_decoding(place, None, pytorch)
    loaded = load_big(place, pick_device("auto"), pytorch)
    decoder = torch_decoder(loaded, None, pytorch, room)
    title = model + pytorch.suffix + ("" if place.dtype == "float32" else f", {place.dtype}")
    curve = measure_curve(decoder, title, "pytorch", depths, max_tokens, repeats)
    if pytorch.target_weights != "file":
        return curve
    from distill.measuring.identity import kl_of_bits

    words = kl_of_bits(place.model, growing_decoder(loaded)).words
    return replace(curve, note="; ".join(filter(None, (curve.note, words))))


# ── `distill plan`: whether a draft will pay, how much and why not, from costs alone, before hours are spent ──

CURVE_REPEATS = 5  # of a curve's steps
RECIPES, CURVE = (".yaml", ".yml"), ".json"


def plan(
    invocation: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [a.b=c]... | TARGET [DRAFT]",
            help="A recipe, whose target and cut are planned. Or a target and a draft: each a model or a saved curve "
            "(docs/plan.md). The draft can also be the cost of its step in T(1).",
        ),
    ],
    acceptance: Annotated[
        str | None, typer.Option(metavar="RATES|FILE", help="Conditional acceptance: 0.8,0.7 or a run's eval.json.")
    ] = None,
    adapter: shared.AdapterOption = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="Two models: files of prompts on which the draft's acceptance is measured."),
    ] = None,
    swap: Annotated[
        str | None,
        typer.Option(metavar="N,L,COST", help="One curve: N of L layers stream, each for COST (docs/plan.md)."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "1,2,3,4,6,8",
    depth: Annotated[int, typer.Option(min=1, max=2**20, help="Models and curves: tokens of the prompt.")] = 128,
    tokens: Annotated[int, typer.Option(min=8, max=2**20, help="Two models: new tokens.")] = 96,
    dtype: shared.DtypeOption = None,
    threads: shared.ThreadsOption = None,
    output: shared.FormatOption = "md",
    llama: shared.LlamaOption = None,
    llama_draft: shared.LlamaDraftOption = None,
) -> None:
    """Predict a draft's speedup before it is made, from measured costs, in a minute or two.

    The tables show by draft length and conditional acceptance what pays, and how much a draft step may cost.
    """
    drafted = sorted(set(shared.numbers(lengths, "--lengths", int, "1,2,4", 1, 63)))
    given = {} if acceptance is None else {"--acceptance": _rates(acceptance)}
    if acceptance is not None and prompts:
        raise RecipeError("--acceptance and --prompts both give the acceptance", "leave one out")
    from distill.decoding.costs import load_cost_curve
    from distill.engines.torch.hugging_face import settled_target
    from distill.planning.cases import PlanRequest, curve_case, llama_settings, measured_cases
    from distill.planning.order import advice, decide, measured_acceptance
    from distill.planning.plan import SpeedupPlan, by_position, forecast, plan_blocks

    first, *others = words
    from_recipe = first.endswith(RECIPES)
    if not from_recipe and (len(others) > 1 or any("=" in one and not Path(one).exists() for one in others)):
        raise RecipeError("expected RECIPE [a.b=c]..., or TARGET [DRAFT]", "`distill plan --help` shows the forms")
    second, cost = (None, None) if from_recipe else _cost(others[0] if others else "0")
    pair = second is not None and _is_model(second)
    if pair and not _is_model(first):
        hint = "give the draft's curve, or the cost of its step in T(1)"
        raise RecipeError(f"{second} is measured together with its target, but {first} is a curve", hint)
    of_pairs, of_measured = ("prompts", "tokens", "llama_draft"), ("adapter", "dtype", "threads", "llama")
    if from_recipe:
        hint = f"change the recipe: distill plan {first} target.adapter=FOLDER"
        shared.refuse(invocation, "with a recipe", *of_pairs, *of_measured, "swap", "depth", hint=hint)
        recipe = shared.read_recipe(Path(first), others)
        if not recipe.speedup.backends:
            hint = f"measure one: distill plan {first} 'speedup.backends=[pytorch]'"
            raise RecipeError("speedup.backends is empty, so the recipe names no decoder to plan for", hint)
        request = replace(PlanRequest.of(recipe), lengths=drafted)
        threads = recipe.threads
    elif _is_model(first):
        shared.refuse(invocation, *(("with two models", "swap") if pair else ("without a second model", *of_pairs)))
        models = [shared.model_of(first, adapter), *([resolve_model(second)] if pair and second else [])]
        gguf = shared.gguf_of(invocation, models, llama, llama_draft)
        shared.require_folders(invocation, models)
        place, small = settled_target(models[0], dtype or "auto"), models[1] if pair else None
        request = PlanRequest(place, small, cost, None, drafted, depth, tokens, threads, gguf)
    else:
        shared.refuse(invocation, "with a saved curve", *of_pairs, *of_measured)
        request = PlanRequest(Target(model=first), None, cost, None, drafted, depth)
    curve: CostCurve | None = None
    decision: list[str] = []
    if from_recipe or pair:
        shared.prepare(threads)
        if prompts and request.draft is not None:
            measured = measured_acceptance(
                request.target.model, request.draft, prompts, threads, request.gguf, dtype or "auto"
            )
            given = {"measured": measured.rates} if measured.rates else {}
            decision = [advice(request.target.model, request.draft, measured)]
        cases = measured_cases(request)
    else:
        curve = (
            measured_curve(request.target, [depth], max(drafted) + 1, CURVE_REPEATS, threads, request.gguf, PyTorch())
            if _is_model(first)
            else load_cost_curve(Path(first))
        )
        small_curve = None if second is None else load_cost_curve(Path(second))
        cases = iter([curve_case(curve, small_curve, request, None if swap is None else _swap(swap))])
    found, backends = [], 1 if request.recipe is None else len(request.recipe.speedup.backends)
    for case in cases:
        found.append((case, forecast(case, given)))
        if len(found) < backends:  # the next one takes minutes
            note("\n  ".join([f"{case.title}:", *found[-1][1].sentences]))
    settings: list[str] = []
    if curve is not None and given:
        costs = found[0][0].timings[0]
        rates = by_position(next(iter(given.values())), max(drafted))
        settings = llama_settings(curve, rates, costs.draft / costs.target[0], depth)
    if not decision and _is_model(first):
        decision = decide(request.target.model, found[0][0])
    result = SpeedupPlan(command_line(sys.argv), machine(), [one for _, one in found], settings, decision)
    shared.print_blocks(plan_blocks(result), result, output)


def _is_model(word: str) -> bool:
    return not word.endswith(CURVE)


def _cost(word: str) -> tuple[str | None, float | None]:
    """Read a draft: a model or curve, or the cost of its step in T(1)."""
    try:
        cost = float(word)
    except ValueError:
        return word, None
    if not 0 <= cost < 1e6:
        raise RecipeError(f"{word} is not the cost of a draft step in T(1)", "such as 0.05")
    return None, cost


def _swap(text: str) -> LayerSwap:
    from distill.planning.cases import LayerSwap

    found = shared.numbers(text, "--swap", float, "37,80,0.02")
    if len(found) != 3 or not 1 <= found[0] <= found[1]:
        hint = "such as 37,80,0.02"
        raise RecipeError(f"--swap {text}: expected streamed layers, all layers and the cost of a transfer", hint)
    streamed, layers, cost = found
    return LayerSwap(int(streamed), int(layers), cost)


def _rates(text: str) -> list[float]:
    """Conditional acceptance by position: numbers, or the figures that a run has measured."""
    if not text.endswith(".json"):
        return shared.numbers(text, "--acceptance", float, "0.8,0.75,0.7", most=1)
    from distill.measuring.evaluation_results import EvaluationReport

    counted = read_result(Path(text), EvaluationReport).positions.get("after", [])
    rates = [one.rate.mean for one in counted if one.drafted]  # positions that no round reached have none
    if not rates:
        raise DataError(f"{text} holds no conditional acceptance", "give the eval.json of a run that decoded rounds")
    return rates
