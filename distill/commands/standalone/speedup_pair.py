"""`distill speedup --target A --draft B --prompts FILE`: from the options to what is measured."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distill.commands.gguf_options import require_used
from distill.commands.shared import local_reference, numbers, prepare, print_table, pytorch_settings, require_drafts
from distill.errors import DataError, RecipeError
from distill.files import require_path

if TYPE_CHECKING:
    from distill.benchmark.pair.wanted import Wanted
    from distill.recipe import Configuration, Gguf, Recipe

REPEATS = 7  # of timed steps
CALIBRATION_PROMPTS = 8  # for configurations that read calibrations, measured costs or a chosen tree
LEAST = 8  # tokens of a prompt that a context must leave room for


def measure(options: Mapping[str, Any], threads: int | None, gguf: Gguf | None, output: str) -> None:
    """Measure the pair that the options name and print the tables; RecipeError or DataError for what cannot be."""
    if options["target"] is None or not options["prompts"]:
        raise RecipeError("a pair without a run needs --target and --prompts", "and --draft, where a draft is asked")
    target = local_reference(options["target"])
    draft = None if options["draft"] is None else local_reference(options["draft"])
    sweep, others = _configurations(options)
    foreign = _check_draft(target, draft, (*sweep, *others))
    if draft is not None:
        target, draft = require_drafts(target, draft, foreign)
    require_used(gguf, target, draft)
    if options["to"] is not None:
        require_path(options["to"], "--to")
        if not options["to"].resolve().parent.is_dir():
            raise DataError(f"there is no folder {options['to'].resolve().parent}", "make it, or correct --to")
    if target.endswith(".gguf") and options["dtype"] != "float32":
        raise RecipeError(
            f"--dtype {options['dtype']} is for folders; a GGUF file has types of its own", "leave it out"
        )
    recipe = _recipe(options, target, threads, gguf)
    batches = _batches(options, target)
    prepare(threads)
    from distill.benchmark.pair.any_pair import measure_pair
    from distill.benchmark.pair.asked import read_asked
    from distill.benchmark.pair.markdown_tables import as_markdown, flat_rows
    from distill.benchmark.pair.wanted import Wanted
    from distill.models.loaded import context_of, load_pair
    from distill.results.serialise import as_json, write_result
    from distill.speculative.configured import check_configurations
    from distill.speculative.other_vocabulary.drafters import read_with

    for line in check_configurations(recipe, [one for one in (*sweep, *others) if not one.foreign], "the options"):
        print(line, file=sys.stderr)
    wanted = Wanted(
        sweep,
        others,
        batches,
        _rates(options["synthetic_acceptance"]),
        options["library"],
        shlex.join(["distill", *sys.argv[1:]]),
        options["allow_lossy"],
    )
    _check_rates(wanted)
    contexts = [context for one in (target, draft) if one is not None and (context := context_of(one)) is not None]
    if foreign:
        contexts = contexts[:1]
    room = min(contexts, default=2**31) - options["tokens"]
    if room < LEAST:
        raise RecipeError(
            f"--tokens {options['tokens']} leave {max(room, 0)} tokens of the context of {min(contexts)} for a prompt",
            "give fewer --tokens",
        )
    spare = CALIBRATION_PROMPTS if wanted.fitted else 0
    asked = read_asked(target, recipe.corpus, recipe.chat, options["count"], spare, options["prompt_tokens"], room)
    if batches and max(batches) > len(asked.measured):
        raise RecipeError(
            f"--batch {max(batches)} needs as many prompts, and there are {len(asked.measured)}",
            "give more, or --count",
        )
    nodes = max(
        (one.drawn_nodes or one.nodes or recipe.profile.max_tokens - 1 for one in others if one.drafter == "tree"),
        default=0,
    )
    longest = max(one.most + 1 for one in wanted.configurations)
    size = max(len(prompt.ids) for prompt in (*asked.measured, *asked.others)) + options["tokens"]
    with load_pair(
        recipe.target,
        None if foreign else draft,
        tokens=max(size, 2 * recipe.profile.max_tokens, 2 * longest),
        nodes=nodes,
        threads=threads,
        gguf=gguf,
        pytorch=recipe.pytorch,
    ) as pair:
        reader = None
        if foreign:
            assert draft is not None
            reader = read_with(recipe.target, draft, "auto", pair.target.vocabulary_size)
        report = measure_pair(recipe, wanted, pair, reader, asked, (options["target"], options["draft"]))
    if options["to"] is not None:
        write_result(options["to"], report)
    print_table(flat_rows(report), as_markdown(report), as_json(report), output)


def _configurations(options: Mapping[str, Any]) -> tuple[tuple[Configuration, ...], tuple[Configuration, ...]]:
    """The sweep of lengths and all others; under a sampler the sweep belongs to the others."""
    from distill.recipe import Configuration, parse_section
    from distill.recipe.load import read_yaml

    sampled = options["temperature"] > 0
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if not sampled and options[name] != off:
            raise RecipeError(f"--{name.replace('_', '-')} does nothing without --temperature", "give both, or neither")
    fixed: dict[str, Any] = {"drafter": options["drafter"]}
    if options["verifier"] is not None:
        fixed["verifier"] = options["verifier"]
    if sampled:
        fixed["sampler"] = "recipe"
    wanted = sorted({length for length in numbers(options["lengths"], "--lengths", int, "1,2,4") if length})
    sweep = tuple(parse_section(Configuration, fixed | {"length": length}, "--lengths") for length in wanted)
    others = []
    for text in options["configuration"] or ():
        raw = read_yaml(text, "--configuration")
        if not isinstance(raw, dict):
            raise RecipeError(f"--configuration {text[:60]}: not a mapping", "such as '{rule: p_min, length: 8}'")
        others.append(parse_section(Configuration, raw, f"--configuration {text[:60]}"))
    titles = [one.title for one in (*sweep, *others)]
    for one in (*sweep, *others):
        if titles.count(one.title) > 1:
            raise RecipeError(f"the configuration `{one.title}` is asked for twice", "leave one of them out")
        if one.sampler == "recipe" and not sampled:
            raise RecipeError(f"`{one.title}` is sampled", "give the sampler's --temperature")
        if not one.drafts:
            raise RecipeError(f"`{one.title}` is always measured", "leave it out")
    if not titles:
        raise RecipeError("nothing is to be measured but plain decoding", "give --lengths or --configuration")
    return ((), (*sweep, *others)) if sampled else (sweep, tuple(others))


def _check_draft(target: str, draft: str | None, configurations: tuple[Configuration, ...]) -> bool:
    """Whether the draft is of another vocabulary; errors for a draft that is missing, unused or does not fit."""

    foreign = [one for one in configurations if one.foreign]
    native = [one for one in configurations if one.asks_the_draft]
    if foreign and native:
        raise RecipeError(
            f"`{native[0].title}` asks a draft of the target's vocabulary, `{foreign[0].title}` one of another",
            "measure them in two calls; --drafter is of the sweep",
        )
    if draft is None:
        if foreign or native:
            raise RecipeError(f"`{(foreign or native)[0].title}` needs a draft", "give --draft, or --drafter lookup")
        return False
    if not foreign and not native:
        raise RecipeError("no configuration asks the draft", "leave --draft out")
    if foreign and target.endswith(".gguf"):
        raise DataError(
            f"drafter {foreign[0].drafter} reads both tokenizers from Hugging Face folders", "give two of those"
        )
    return bool(foreign)


def _recipe(options: Mapping[str, Any], target: str, threads: int | None, gguf: Gguf | None) -> Recipe:
    """The settings of the measurement, in the form that all measuring code reads."""
    from distill.benchmark.pair.asked import sources_of
    from distill.recipe import Corpus, Gguf, Profile, PyTorch, Recipe, SamplerSettings, Speedup, Target, parse_section

    place = parse_section(Target, {"model": target, "dtype": options["dtype"]})
    pytorch = {name: options[name] for name in ("static", "compile", "draft_device", "prepack")}
    sampled = {name: options[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    return Recipe(
        name="pair",
        seed=options["seed"],
        threads=threads,
        target=place,
        corpus=Corpus(sources=sources_of(options["prompts"])),
        sampler=SamplerSettings(**sampled),
        profile=Profile(repeats=REPEATS),
        speedup=Speedup(
            backends=("gguf" if target.endswith(".gguf") else "pytorch",),
            prompts=options["count"],
            new_tokens=options["tokens"],
            configurations=(),
            allow_lossy=options["allow_lossy"],
        ),
        gguf=gguf or Gguf(),
        pytorch=pytorch_settings(PyTorch(), target, **pytorch),
    )


def _rates(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    rates = tuple(numbers(text, "--synthetic-acceptance", float, "0.8,0.7"))
    if not all(0 <= rate <= 1 for rate in rates):
        raise RecipeError(f"--synthetic-acceptance {text}: rates lie between 0 and 1", "for instance 0.8 or 0.8,0.7")
    return rates


def _check_rates(wanted: Wanted) -> None:
    """Refuse what synthetic acceptance would make meaningless."""
    if wanted.rates is None:
        return
    learning = next((one for one in wanted.configurations if one.learns or one.chosen), None)
    if learning is not None:
        raise RecipeError(
            f"`{learning.title}` is fitted to what the target accepts, and synthetic acceptance is not that",
            "use `calibration: none`, or a configuration that fits nothing",
        )
    if wanted.batches:
        raise RecipeError("--batch decodes with the target's own acceptance", "leave --synthetic-acceptance out")


def _batches(options: Mapping[str, Any], target: str) -> tuple[int, ...]:
    if options["batch"] is None:
        return ()
    sizes = sorted(set(numbers(options["batch"], "--batch", int, "1,4,16")))
    if sizes[0] < 1:
        raise RecipeError(f"--batch {options['batch']}: at least 1 text", "for instance --batch 1,4")
    if target.endswith(".gguf"):
        raise RecipeError("GGUF files are decoded text by text: --batch is for folders", "leave --batch out")
    return tuple(sizes)
