"""One part of the speedup stage: a pair opened in one backend, with the settings that its measurement reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from distill.benchmark.libraries import llama_generation, transformers_generation
from distill.faults import faults_explained
from distill.models.base import Model
from distill.models.conversion.importing import file_type
from distill.models.conversion.writer import export_gguf, own_file
from distill.models.gguf.model import MOST_LEAVES
from distill.models.hugging_face import (
    describe_model,
    end_ids,
    load_config,
    load_model,
    load_target,
    load_tokenizer,
    pick_device,
)
from distill.models.loaded import LoadedPair, load_pair, pair_of_models
from distill.recipe import Configuration, Gguf, Recipe, Target
from distill.results.speedup_results import PairMeasured
from distill.run import Run
from distill.surgery.grow import grow
from distill.texts import read_prompts

Library = Callable[[Sequence[int], int], int]  # a library's generation: a prompt and a limit to tokens made


@dataclass(frozen=True)
class Part:
    """One pair in one backend, and the settings its measurement reads.

    `target` and `draft` are the loaded models, or these with steps given the cheapest way.
    """

    pair: PairMeasured
    loaded: LoadedPair
    target: Model
    draft: Model
    prompts: list[list[int]]
    library: Library
    library_name: str
    lengths: tuple[int, ...]
    configurations: tuple[Configuration, ...]


@contextmanager
def open_part(recipe: Recipe, run: Run, backend: str, grown: bool) -> Iterator[Part]:
    """Load a part's models, the grown target through a scratch folder that is removed at the end."""
    settings = recipe.speedup
    lengths = settings.grown_lengths if grown else settings.lengths
    configurations = settings.grown_configurations if grown else settings.configurations
    prompts = [prompt.ids for prompt in read_prompts(run, "test")]
    prompts = prompts[: settings.grown_prompts if grown else settings.prompts]
    scratch = run.path("speedup", ".scratch")
    try:
        loaded, parameters = _load(recipe, run, backend, grown, scratch)
        with loaded:
            title = f"draft + target grown to {parameters / 1e6:.0f}M" if grown else "draft + target"
            title += recipe.pytorch.suffix if backend == "pytorch" else ""
            if backend == "gguf" and not grown and (own := own_file(recipe)) is not None:
                title += f", target {file_type(own)}, draft {settings.outtype}"
            run.say(f"  {title}, {backend}")
            library, name = _library(recipe, loaded)
            pair = PairMeasured(title, backend, grown)
            yield Part(pair, loaded, loaded.target, loaded.draft, prompts, library, name, lengths, configurations)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _load(recipe: Recipe, run: Run, backend: str, grown: bool, scratch: Path) -> tuple[LoadedPair, int]:
    """The pair of a part, and the parameters of a grown target (0 for the target as it is)."""
    settings, draft, parameters = recipe.speedup, str(run.path("draft")), 0
    served = own_file(recipe) or run.path("gguf", f"target-{settings.outtype}.gguf")
    if grown:
        assert settings.grown is not None
        device = pick_device(recipe.device)
        small = load_target(recipe.target, device)
        big = grow(small.float().cpu(), settings.grown.tile, settings.grown.layers).to(device)
        parameters = describe_model("", big).parameters
        tokenizer = load_tokenizer(recipe.target.model)
        if backend == "pytorch":
            drafting = load_model(draft, recipe.target.dtype, pick_device(recipe.pytorch.draft_device or recipe.device))
            return pair_of_models(recipe.target.model, big, drafting, tokenizer, recipe.pytorch), parameters
        with faults_explained(scratch):
            scratch.mkdir(parents=True, exist_ok=True)
            big.save_pretrained(scratch / "grown")
            tokenizer.save_pretrained(scratch / "grown")
        served = scratch / "grown.gguf"
        export_gguf(scratch / "grown", served, settings.outtype, f"{recipe.name} target, grown")
    elif backend == "pytorch":
        return load_pair(recipe.target, draft, device=recipe.device, pytorch=recipe.pytorch), parameters
    files = Target(model=str(served)), str(run.path("gguf", f"draft-{settings.outtype}.gguf"))
    nodes = min(_largest_tree(recipe, grown), MOST_LEAVES)
    options = Gguf(target=recipe.gguf_options("target"), draft=recipe.gguf_options("draft"))
    pair = load_pair(*files, tokens=recipe.corpus.block, nodes=nodes, gguf=options)
    # Both backends end their texts with the same tokens: llama.cpp knows some more by their names.
    ends = end_ids(load_config(recipe.target.model), load_tokenizer(recipe.target.model))
    return replace(pair, ends=ends), parameters


def _largest_tree(recipe: Recipe, grown: bool) -> int:
    """The most nodes of a tree that a part's configurations may verify; 0 without trees."""
    settings = recipe.speedup
    configurations = settings.grown_configurations if grown else settings.configurations
    trees = [one for one in configurations if one.drafter == "tree"]
    return max((one.drawn_nodes or one.nodes or recipe.profile.max_tokens - 1 for one in trees), default=0)


def _library(recipe: Recipe, loaded: LoadedPair) -> tuple[Library, str]:
    """The backend's own greedy generation over the target, and its name."""
    if loaded.hugging_face is not None:
        return transformers_generation(loaded.hugging_face[0], loaded.ends), "transformers generate"
    context, options = loaded.target.capacity, recipe.gguf_options("target")
    generation = llama_generation(Path(loaded.reference), context, options, loaded.ends)
    return generation, "llama-cpp-python generate"
