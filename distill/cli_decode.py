"""The commands that decode or time bare models: `distill generate` and `distill profile`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli_shared import (
    DEFAULT_RUNS,
    FormatOption,
    RunsOption,
    bare_recipe,
    find_run,
    prepare,
    print_table,
)
from distill.errors import DataError, RecipeError, RunError


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    run: Annotated[str | None, typer.Option("--run", help="Run name or folder; the newest run if left out.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Bare pair: Hugging Face folder, hub name or GGUF file.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Bare pair: of the same kind; a GGUF pair runs in llama.cpp.")
    ] = None,
    length: Annotated[int, typer.Option(min=0, max=63, help="Tokens drafted per round; 0 decodes plainly.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0001, max=1, help="1: off.")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=0.9999, help="0: off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(min=0.01, help="1: off.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    verifier: Annotated[
        str | None, typer.Option("--verifier", help="greedy, match, token, block, or for drawn trees distinct.")
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            help="model, lookup (earlier text), both, tree (of the best tokens, or drawn: --widths); for a draft of "
            "another vocabulary: intersection (the tokens both share) or string (its text).",
        ),
    ] = "model",
    widths: Annotated[
        str | None,
        typer.Option("--widths", help="--drafter tree: drawn, with so many children a node, level by level: 3,2,1."),
    ] = None,
    rule: Annotated[
        str,
        typer.Option(
            "--rule",
            help="How many tokens to draft, --length at most: fixed, p_min, p_min-after, start-continue, plus-minus, "
            "ratio, entropy, beta or expected-value (docs/recipes.md).",
        ),
    ] = "fixed",
    p_min: Annotated[
        float, typer.Option("--p-min", min=0.0001, max=1, help="--rule p_min, p_min-after: the floor.")
    ] = 0.5,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Also decode in ways that change the target's law; says LOSSY.")
    ] = False,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="The new text must match this, whole.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="A file; the new text is JSON that follows it.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option("--grammar", help="A file in GBNF or Lark; the new text follows it.")
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
) -> None:
    """Continue a prompt, streamed, with the accepted tokens marked (green on a terminal); losslessly or not at all."""
    text = sys.stdin.read() if prompt == "-" else prompt
    known = ("model", "lookup", "both", "tree", "intersection", "string")
    if drafter not in known:
        raise RecipeError(f"there is no drafter `{drafter}`", f"use one of {', '.join(known)}")
    wanted = _grammar(regex, json_schema, grammar)
    from distill.recipe.trial import RULES

    if rule not in RULES:
        raise RecipeError(f"there is no length rule `{rule}`", f"use one of {', '.join(RULES)}")
    if p_min != 0.5 and rule not in ("p_min", "p_min-after"):
        raise RecipeError(f"--p-min is not read by --rule {rule}", "use --rule p_min, or leave it out")
    levels = None if widths is None else tuple(_numbers(widths, "--widths", int, "3,2,1"))
    if levels is not None and drafter != "tree":
        raise RecipeError(f"--widths is not read by --drafter {drafter}", "use --drafter tree, or leave it out")
    if levels is not None and length != 4:
        raise RecipeError("--length is not read beside --widths, which says how deep the tree is", "leave one out")
    folder = None
    if target or draft:
        if not (target and draft):
            raise RecipeError("a bare pair needs both --target and --draft")
        from distill.models.pair import require_pair

        recipe = bare_recipe(target, draft, [Path(".")])
        references = (recipe.target.model, recipe.draft.donor)
        prepare(recipe)
        if target.endswith(".gguf") != draft.endswith(".gguf"):
            raise RecipeError(
                f"{target} and {draft} would run in two engines", "give two GGUF files, or two Hugging Face folders"
            )
        if drafter not in ("intersection", "string"):
            require_pair(*references)
    else:
        recipe, found = find_run(run, runs)
        if not found.path("draft", "config.json").exists():
            raise RunError(f"{found.folder} has no trained draft yet", "run `distill train` on its recipe")
        references = (recipe.target.model, str(found.path("draft").resolve()))
        folder = found
        prepare(recipe)
    from distill.sampler import Sampler
    from distill.speculative.stream import Way, stream

    sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty)
    costs, fitted = None, {}
    if rule == "expected-value" and folder is not None:
        from distill.benchmark.calibrate import curve_costs, load_calibrations

        costs = curve_costs(folder, "pytorch") if "pytorch" in recipe.speedup.backends else None
        measured = folder.path("speedup", "calibration.json")
        fitted = load_calibrations(measured) if measured.exists() else {}
    stops = tuple(stop or ())
    way = Way(sampler, verifier, drafter, length, seed, stops, rule, p_min, costs, fitted, allow_lossy, wanted, levels)
    stream(recipe, references, text, tokens, way)


def _grammar(regex: str | None, json_schema: Path | None, grammar: Path | None) -> tuple[str, str] | None:
    """The kind and text of the one that was given; RecipeError for several, DataError for a file that is not there."""
    if sum(given is not None for given in (regex, json_schema, grammar)) > 1:
        raise RecipeError("--regex, --json-schema and --grammar were given together", "choose one of them")
    if regex is not None:
        return "regex", regex
    path = json_schema or grammar
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "give a text file") from None
    return ("json" if json_schema else "gbnf" if "::=" in text else "lark"), text


def profile(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Hugging Face folder, hub name or GGUF file.")
    ] = None,
    depths: Annotated[str, typer.Option("--depths", help="Tokens already in the cache, by commas.")] = "64,512",
    most: Annotated[int, typer.Option("--most", min=2, max=64, help="Steps of 1 to this many tokens.")] = 64,
    repeats: Annotated[int, typer.Option(min=5, help="Timed repeats; the median is kept.")] = 7,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all if left out.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also save the curve as JSON.")] = None,
    batched_bench: Annotated[
        Path | None, typer.Option("--batched-bench", help="Instead: a llama-batched-bench log in jsonl.")
    ] = None,
    acceptance: Annotated[
        str | None, typer.Option("--acceptance", help="By position, by commas: prints llama.cpp settings that follow.")
    ] = None,
    draft_cost: Annotated[
        float, typer.Option("--draft-cost", min=0, help="With --acceptance: a draft step, in units of T(1).")
    ] = 0.05,
    output: FormatOption = "md",
) -> None:
    """The cost curve of one model on this machine: T(m), the seconds of a step of m tokens, by depth."""
    if (model is None) == (batched_bench is None):
        raise RecipeError("name a model, or a log with --batched-bench", "one of the two")
    if batched_bench is not None:
        from distill.speculative.batched_bench import import_curve

        curve = import_curve(batched_bench)
    else:
        assert model is not None
        curve = _measured(model, _numbers(depths, "--depths", int), most, repeats, threads)
    if out is not None:
        from distill.speculative.cost import save_curve

        save_curve(curve, out)
    rows: list[dict[str, Any]] = [
        {"depth": depth, "tokens": m, "seconds": seconds, "relative": seconds / row[0]}
        for depth, row in zip(curve.depths, curve.seconds, strict=True)
        for m, seconds in enumerate(row, start=1)
    ]
    lines = [f"{curve.model}, {curve.backend}; T(m) of m tokens at a depth, in {curve.unit}", ""]
    if curve.note:
        lines[1:1] = ["", f"Note: {curve.note}."]
    lines += ["| depth | m | T(m) | T(m) / T(1) |", "|--:|--:|--:|--:|"]
    lines += [f"| {r['depth']} | {r['tokens']} | {r['seconds']:.6g} | {r['relative']:.3f} |" for r in rows]
    if acceptance is not None:
        from distill.speculative.batched_bench import settings

        rates = _numbers(acceptance, "--acceptance", float)
        if not all(0 <= rate <= 1 for rate in rates):
            raise RecipeError(f"--acceptance {acceptance}: rates lie between 0 and 1", "for instance 0.8,0.75,0.7")
        lines += ["", *(str(setting) for setting in settings(curve, rates, draft_cost, curve.depths[0]))]
    print_table(rows, "\n".join(lines), rows, output)


def _numbers(text: str, option: str, kind: type, example: str = "64,512") -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"{option} {text}: not numbers by commas", f"for instance {option} {example}") from None
    if not found or min(found) < 0:
        raise RecipeError(f"{option} {text}: numbers must not be negative", "correct them")
    return found


def _measured(model: str, depths: list[int], most: int, repeats: int, threads: int | None) -> Any:
    from distill.run import usable_cores
    from distill.speculative.cost import measure_curve

    if model.endswith(".gguf"):
        from distill.models.gguf import GgufModel

        if not Path(model).is_file():
            raise DataError(f"there is no file {model}", "give a GGUF file or a Hugging Face folder")
        with GgufModel(model, context=max(depths) + most, threads=threads) as quantised:
            return measure_curve(quantised, model, "gguf", depths, most, repeats)
    import torch

    from distill.models.hugging_face import load_model, pick_device
    from distill.models.torch_model import TorchModel

    torch.set_num_threads(threads or usable_cores())
    return measure_curve(
        TorchModel(load_model(model, "float32", pick_device("auto"))), model, "pytorch", depths, most, repeats
    )
