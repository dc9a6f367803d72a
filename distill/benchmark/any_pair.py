"""`distill speedup --target A --draft B`: any pair on the user's prompts, without a recipe's run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distill.benchmark.batches import measure_batches, not_batched
from distill.benchmark.calibrate import calibrate_pair
from distill.benchmark.libraries import plain_reference
from distill.benchmark.pair import Comparison, largest_tree, measure_pair
from distill.benchmark.rounds import by_class, by_depth
from distill.documents.user_prompts import UserPrompts, read_user_prompts, sources_of
from distill.errors import RecipeError
from distill.machine import machine
from distill.models.hugging_face import pick_device, settled_type
from distill.models.loaded import LoadedPair, context_of, load_pair
from distill.recipe import (
    Configuration,
    Corpus,
    Gguf,
    Profile,
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
REFERENCE_PROMPTS = 2  # on which the library's own generation is timed


@dataclass(frozen=True)
class PairRequest:
    """The measurement of a pair that the command line requests.

    `names` are target and draft as they were given, `draft` is the draft to load. `sweep` is a configuration a length.
    `rates` are synthetic acceptance rates, None where the target decides. `library` times the library's own plain
    generation too, which loads a GGUF file a second time.
    """

    names: tuple[str, str | None]
    draft: str | None
    sweep: tuple[Configuration, ...]
    others: tuple[Configuration, ...]
    prompt_tokens: int
    batches: tuple[int, ...] = ()
    rates: tuple[float, ...] | None = None
    library: bool = False
    command: str = ""

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """All that draft."""
        return *self.sweep, *self.others

    @property
    def foreign(self) -> bool:
        """Whether the draft has another vocabulary than the target."""
        return any(one.foreign for one in self.configurations)

    @property
    def calibrated(self) -> bool:
        """Whether some configuration reads what is counted on other prompts beforehand."""
        return any(one.learns or one.chosen for one in self.configurations)

    @property
    def fitted(self) -> bool:
        """Whether some configuration reads what is measured on other prompts beforehand."""
        return self.calibrated or any(one.priced for one in self.configurations)


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
) -> Recipe:
    """The settings of a measurement of any pair, in the form that all measuring code reads; loads nothing."""
    return Recipe(
        name="pair",
        seed=seed,
        threads=threads,
        target=parse_section(Target, {"model": target, "dtype": settled_type(dtype, pick_device("auto"))}),
        corpus=Corpus(sources=sources_of([Path(one) for one in prompts])),
        sampler=sampler,
        profile=Profile(repeats=REPEATS),
        speedup=Speedup(
            backends=("gguf" if target.endswith(".gguf") else "pytorch",),
            prompts=count,
            new_tokens=tokens,
            configurations=(),
            allow_lossy=allow_lossy,
        ),
        gguf=gguf or Gguf(),
        pytorch=pytorch or PyTorch(),
    )


def measure_any_pair(recipe: Recipe, request: PairRequest) -> PairSpeedup:
    """Read the prompts, load both models and measure them; `recipe` holds the settings, and is of no run.

    Raises RecipeError or DataError for prompts, contexts and configurations that do not go together.
    """
    prompts = _read_prompts(recipe, request)
    measured, new_tokens = [prompt.ids for prompt in prompts.measured], recipe.speedup.new_tokens
    middle = sum(map(len, measured)) // len(measured) + new_tokens // 2  # steps are timed in the middle of a text
    recipe = recipe.model_copy(update={"profile": recipe.profile.model_copy(update={"depth": middle})})
    with _open(recipe, request, prompts) as pair:
        reader = None
        if request.foreign:
            assert request.draft is not None
            reader = read_with(recipe.target, request.draft, "auto", pair.target.vocabulary_size)
        spare = [prompt.ids for prompt in prompts.others]
        calibrated = None
        if request.calibrated:
            calibrated = calibrate_pair(pair, spare, new_tokens, request.command, "prompts of the same files")
        label = PairMeasured("draft + target", pair.backend)
        comparison = Comparison(
            label=label,
            prompts=measured,
            spare_prompts=spare or measured,  # costs do not depend on the text
            sweep=request.sweep,
            others=request.others,
            calibrated=calibrated,
            rates=request.rates,
            reader=reader,
        )
        compared = measure_pair(recipe, pair, comparison)
        classes, resamples, confidence = prompts.classes(), recipe.eval.resamples, recipe.eval.confidence
        return PairSpeedup(
            command=request.command,
            machine=machine(),
            target=request.names[0],
            draft=request.names[1],
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
            by_class=by_class(compared.texts, compared.prepared, classes, resamples, confidence),
            by_depth=by_depth(compared.texts, compared.prepared),
            reasons=compared.explanations,
            batches=measure_batches(recipe, pair, measured, request.batches, compared.prepared, compared.fitted),
            not_batched=not_batched(compared.prepared) if request.batches else [],
            synthetic=None if request.rates is None else list(request.rates),
            calibration=None if calibrated is None else calibrated.table,
            library=plain_reference(recipe, pair, label, measured[:REFERENCE_PROMPTS]) if request.library else None,
            pytorch=recipe.pytorch.suffix.removeprefix(", "),
            steps_given=compared.steps_given,
        )


def _read_prompts(recipe: Recipe, request: PairRequest) -> UserPrompts:
    """The user's prompts, as long as the contexts of both models leave room for; loads no weights."""
    new_tokens, target = recipe.speedup.new_tokens, recipe.target.model
    references = [target, *([] if request.draft is None or request.foreign else [request.draft])]
    contexts = [context for one in references if (context := context_of(one)) is not None]
    room = min(contexts, default=2**31) - new_tokens
    if room < LEAST:
        raise RecipeError(
            f"--tokens {new_tokens} leave {max(room, 0)} tokens of the context of {min(contexts)} for a prompt",
            "give fewer --tokens",
        )
    spare = CALIBRATION_PROMPTS if request.fitted else 0
    count = recipe.speedup.prompts
    prompts = read_user_prompts(target, recipe.corpus, recipe.chat, count, spare, request.prompt_tokens, room)
    if request.batches and max(request.batches) > len(prompts.measured):
        raise RecipeError(
            f"--batch {max(request.batches)} needs as many prompts, and there are {len(prompts.measured)}",
            "give more, or --count",
        )
    return prompts


def _open(recipe: Recipe, request: PairRequest, prompts: UserPrompts) -> LoadedPair:
    """Both models, with room for the prompts, their texts and the largest tree; a draft of another vocabulary apart."""
    max_tokens = recipe.profile.max_tokens
    longest = max(one.most + 1 for one in request.configurations)
    size = max(len(prompt.ids) for prompt in (*prompts.measured, *prompts.others)) + recipe.speedup.new_tokens
    return load_pair(
        recipe.target,
        None if request.foreign else request.draft,
        tokens=max(size, 2 * max_tokens, 2 * longest),
        nodes=largest_tree(recipe, request.others),
        threads=recipe.threads,
        gguf=recipe.gguf,
        pytorch=recipe.pytorch,
    )
