"""`distill speedup --target A --draft B`: any pair on the user's prompts, without a recipe's run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from distill.benchmark.batches import measure_batches, not_batched, require_rows
from distill.benchmark.calibrate import calibrate_pair, need_calibration
from distill.benchmark.pair import Comparison, largest_tree, measure_pair
from distill.benchmark.rounds import by_class, by_depth
from distill.documents.user_prompts import UserPrompts, read_user_prompts, sources_of
from distill.errors import RecipeError
from distill.machine import machine
from distill.models.hugging_face import pick_device, settled_type
from distill.models.loaded import context_of, load_pair
from distill.recipe import (
    Configuration,
    Corpus,
    Gguf,
    PyTorch,
    Recipe,
    SamplerSettings,
    Speedup,
    Target,
    parse_section,
)
from distill.results.pair_results import PairSpeedup
from distill.results.speedup_results import PairMeasured
from distill.sampler import Sampler
from distill.speculative.other_vocabulary.drafters import read_with

CALIBRATION_PROMPTS = 8  # for configurations that read calibrations, measured costs or a chosen tree
LEAST = 8  # tokens of a prompt that a context must leave room for
REPEATS = 7  # of timed steps


def pair_settings(
    target: str,
    prompts: Sequence[str | Path],
    sampler: SamplerSettings,
    dtype: str,
    *,
    count: int,
    tokens: int,
    seed: int = 0,
    threads: int | None = None,
    gguf: Gguf | None = None,
    pytorch: PyTorch | None = None,
    allow_lossy: bool = False,
    of_run: Recipe | None = None,
) -> Recipe:
    """The settings of a measurement of any pair, in the form that all measuring code reads; loads nothing.

    The chat template and the device are those of `of_run`, the recipe of the pair's run, if it has one.
    """
    kept = {} if of_run is None else {"chat": of_run.chat, "device": of_run.device}
    return Recipe(
        name="pair",
        seed=seed,
        threads=threads,
        target=parse_section(Target, {"model": target, "dtype": settled_type(dtype, pick_device("auto"))}),
        corpus=Corpus(sources=sources_of([Path(one) for one in prompts])),
        sampler=sampler,
        speedup=Speedup(
            backends=("gguf" if target.endswith(".gguf") else "pytorch",),
            prompts=count,
            repeats=REPEATS,
            new_tokens=tokens,
            configurations=(),
            allow_lossy=allow_lossy,
        ),
        gguf=gguf or Gguf(),
        pytorch=pytorch or PyTorch(),
        **kept,
    )


def measure_any_pair(
    recipe: Recipe,
    names: tuple[str, str | None],
    draft: str | None,
    sweep: Sequence[Configuration],
    others: Sequence[Configuration],
    *,
    prompt_tokens: int,
    batches: Sequence[int] = (),
    command: str = "",
) -> PairSpeedup:
    """Read the prompts, load both models and measure them; `recipe` holds the settings, and is of no run.

    `names` are target and draft as they were given, `draft` is the draft to load. `sweep` is a configuration a length.
     Raises RecipeError or DataError for prompts, contexts and
    configurations that do not go together.
    """
    configurations, new_tokens = (*sweep, *others), recipe.speedup.new_tokens
    other_vocabulary = any(one.other_vocabulary for one in configurations)
    own_draft = None if other_vocabulary else draft
    count = CALIBRATION_PROMPTS if need_other_prompts(configurations) else 0
    prompts = _read_prompts(recipe, own_draft, count, prompt_tokens)
    if batches and max(batches) > len(prompts.measured):
        raise RecipeError(f"--batch {max(batches)} needs as many prompts, and there are {len(prompts.measured)}")
    measured, spare = [prompt.ids for prompt in prompts.measured], [prompt.ids for prompt in prompts.others]
    longest_step = max(recipe.speedup.max_tokens, *(one.max_length + 1 for one in configurations))
    with load_pair(
        recipe.target,
        own_draft,
        tokens=max(max(map(len, [*measured, *spare])) + new_tokens, 2 * longest_step),
        nodes=largest_tree(recipe, others),
        threads=recipe.threads,
        gguf=recipe.gguf,
        pytorch=recipe.pytorch,
    ) as pair:
        if batches:
            require_rows(pair)
        reader = None
        if other_vocabulary:
            assert draft is not None
            place = pair.pytorch.draft_device or recipe.device
            reader = read_with(recipe.target, draft, place, pair.target.vocabulary_size, pair.pytorch)
        calibrated = None
        if need_calibration(configurations):
            calibrated = calibrate_pair(pair, spare, new_tokens, command, "prompts of the same files")
        label = PairMeasured("draft + target", pair.backend)
        comparison = Comparison(
            label=label,
            prompts=measured,
            spare_prompts=spare or measured,  # costs do not depend on the text
            sweep=tuple(sweep),
            others=tuple(others),
            calibrated=calibrated,
            reader=reader,
        )
        compared = measure_pair(recipe, pair, comparison)
        classes = prompts.classes()
        return PairSpeedup(
            command=command,
            machine=machine(),
            target=names[0],
            draft=names[1],
            backend=pair.backend,
            gguf=recipe.gguf.described() if pair.backend == "gguf" else "",
            sampler=Sampler.of(recipe.sampler).describe(),
            prompts=len(measured),
            classes=dict(Counter(classes)),
            new_tokens=new_tokens,
            dropped=prompts.dropped,
            measurements=compared.measurements,
            chosen=compared.chosen,
            rounds=compared.rounds,
            steps=compared.steps,
            by_class=by_class(compared.texts, compared.prepared, classes),
            by_depth=by_depth(compared.texts, compared.prepared),
            reasons=compared.explanations,
            batches=measure_batches(recipe, pair, measured, batches, compared.prepared, compared.fitted),
            not_batched=not_batched(compared.prepared) if batches else [],
            calibration=None if calibrated is None else calibrated.table,
            pytorch=recipe.pytorch.suffix.removeprefix(", "),
        )


def need_other_prompts(configurations: Sequence[Configuration]) -> bool:
    """Whether some configuration reads what is measured on other prompts beforehand."""
    return need_calibration(configurations) or any(one.needs_costs for one in configurations)


def _read_prompts(recipe: Recipe, draft: str | None, spare: int, prompt_tokens: int) -> UserPrompts:
    """The user's prompts, as long as the contexts of target and draft leave room for; loads no weights."""
    new_tokens, target = recipe.speedup.new_tokens, recipe.target.model
    contexts = [context for one in (target, draft) if one is not None and (context := context_of(one)) is not None]
    room = min(contexts, default=2**31) - new_tokens
    if room < LEAST:
        raise RecipeError(
            f"--tokens {new_tokens} leave {max(room, 0)} tokens of the context of {min(contexts)} for a prompt"
        )
    count = recipe.speedup.prompts
    return read_user_prompts(target, recipe.corpus, recipe.chat, count, spare, prompt_tokens, room)
