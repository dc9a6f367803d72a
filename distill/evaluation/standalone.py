"""Any two models on given texts, and every pair of several targets, drafts and GGUF types, without a recipe."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from distill.documents.user_prompts import UserPrompts, read_user_prompts
from distill.errors import RecipeError
from distill.evaluation.pairs import LONGEST, Asked, Opened, evaluate_pairs
from distill.models.conversion.importing import file_type, is_gguf, one_engine
from distill.models.conversion.writer import export_files
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import encode, load_model, local_folder, pick_device
from distill.models.loaded import LoadedPair, load_pair, pair_of_models
from distill.models.pairs import require_pair
from distill.packing import Packed, pack
from distill.recipe import Chat, Corpus, Evaluate, Gguf, GgufOptions, PyTorch, Recipe, Target, is_path
from distill.recipe.gguf import UNQUANTISED
from distill.results.evaluation_results import EvaluationReport
from distill.run import Run
from distill.sampler import Sampler
from distill.texts import read_prompts

PROMPT_TOKENS, SEED = 64, 0  # tokens of a prompt cut from a text, and the seed of the order of texts

Prompts = Callable[[str, int], UserPrompts]  # of a target, with room for so many tokens


@dataclass(frozen=True)
class Types:
    """GGUF types to compare: of the target, of the draft, and of the draft's cache."""

    target: Sequence[str] = ()
    draft: Sequence[str] = ()
    caches: Sequence[str] = ()

    @property
    def given(self) -> bool:
        """Whether any is named."""
        return any((self.target, self.draft, self.caches))


NO_TYPES = Types()


@dataclass(frozen=True)
class Grid:
    """Every target with every draft; with `types` given, as GGUF files of each type. `block` is the most tokens of a
    text, `written` holds files that a run has exported."""

    targets: Sequence[str]
    drafts: Sequence[str]
    block: int
    types: Types = NO_TYPES
    written: Path | None = None
    threads: int | None = None
    gguf: Gguf | None = None


Small = tuple[str, str | None]  # a draft, and the type of its cache where that was named


def evaluate_grid(grid: Grid, prompts: Prompts, asked: Asked, acceptance: bool) -> EvaluationReport:
    """The report of every pair of the grid; with `acceptance` rounds are decoded, too.

    Raises RecipeError for types of a model that is a GGUF file already, and for a cache type that the build or the
    draft's sizes do not allow, PairError for models that do not fit, DataError for fewer than 4 prompts.
    """
    for target in grid.targets:
        for draft in grid.drafts:
            require_pair(target, draft)
    with tempfile.TemporaryDirectory() as scratch:
        targets = _labelled(grid.targets, grid.types.target, grid, Path(scratch), "target")
        drafts: dict[str, Small] = {
            f"{label}, cache {cache}" if len(grid.types.caches) > 1 else label: (path, cache)
            for label, (path, _) in _labelled(grid.drafts, grid.types.draft, grid, Path(scratch), "draft").items()
            for cache in dict.fromkeys(grid.types.caches) or [None]
        }
        groups: dict[tuple[str, str], dict[str, Small]] = {}  # pairs by their target's writer and engine
        for label, (path, writer) in targets.items():
            for own, (draft, cache) in drafts.items():
                big, small = one_engine(path, draft)
                name = "draft" if len(targets) * len(drafts) == 1 and not grid.types.given else own
                name = name if len(targets) == 1 else f"{name} for {label}"
                groups.setdefault((writer, big), {})[name] = small, cache
        with closing(_opened(groups, grid, prompts, asked, acceptance)) as opened:
            return evaluate_pairs(opened, asked)[0]


def _labelled(
    models: Sequence[str], types: Sequence[str], grid: Grid, scratch: Path, role: str
) -> dict[str, tuple[str, str]]:
    """Each model, or its file of each type, with the model itself, by a name for tables."""
    found = {}
    short = [Path(model).name if is_path(model) else model for model in models]
    names = short if len(set(short)) == len(short) else models
    for number, (name, model) in enumerate(dict(zip(names, models, strict=True)).items()):
        if not grid.types.given:
            found[name] = model, model
            continue
        if types and is_gguf(model):
            raise RecipeError(f"{model} has its types already", "leave its types out, or give the folder")
        files = {file_type(Path(model)): Path(model)} if is_gguf(model) else {}
        if not files:
            place = scratch / f"{role}-{number}"
            files = {kind: (grid.written or place) / f"{role}-{kind}.gguf" for kind in types or ["f16"]}
            missing = {kind: place / path.name for kind, path in files.items() if not path.is_file()}
            place.mkdir()
            if missing:
                export_files(local_folder(model), {path: kind for kind, path in missing.items()})
            files |= missing
        found |= {kind if len(models) == 1 else f"{name}, {kind}": (str(path), model) for kind, path in files.items()}
    return found


def _opened(
    groups: Mapping[tuple[str, str], Mapping[str, Small]],
    grid: Grid,
    prompts: Prompts,
    asked: Asked,
    acceptance: bool,
) -> Generator[Opened, None, None]:
    """The pairs of each target in turn, closed when the next are asked for."""
    alone = sum(map(len, groups.values())) == 1
    more = LONGEST + 1 if asked.costs else 0  # tokens of timed steps, behind a text
    for (writer, target), drafts in groups.items():
        with ExitStack() as stack:
            pairs = _load(target, drafts, grid, grid.block + more, stack)
            capacities = (model.capacity for pair in pairs.values() for model in (pair.target, pair.draft))
            block = min(grid.block, min(capacities) - more)
            found = prompts(target, block)
            given = _given(next(iter(pairs.values())), found.texts, block, asked.settings.file_blocks)
            decoded = [*pairs] if acceptance else []
            yield Opened(pairs, found.measured, block, found.classes(), given if alone else None, decoded, writer)


def _load(target: str, drafts: Mapping[str, Small], grid: Grid, tokens: int, stack: ExitStack) -> dict[str, LoadedPair]:
    """A target with each of its drafts; the layers of models that decode are laid out later."""
    gguf = grid.gguf or Gguf()
    if not is_gguf(target):
        device = pick_device("auto")
        big = stack.enter_context(load_pair(Target(model=target), pytorch=PyTorch(prepack=False)))
        assert big.hugging_face is not None
        models = {name: load_model(draft, Target(model=target).dtype, device) for name, (draft, _) in drafts.items()}
        parts = big.reference, big.hugging_face[0]
        return {name: pair_of_models(*parts, model, big.tokenizer, big.pytorch) for name, model in models.items()}
    small = {}
    for name, (draft, cache) in drafts.items():
        options = Gguf(target=gguf.draft if cache is None else with_cache(gguf.draft, cache))
        alone = load_pair(Target(model=draft), tokens=tokens, threads=grid.threads, gguf=options)
        small[name] = stack.enter_context(alone).target
    big = stack.enter_context(load_pair(Target(model=target), tokens=tokens, threads=grid.threads, gguf=gguf))
    return {name: replace(big, draft=draft) for name, draft in small.items()}


def with_cache(options: GgufOptions, cache: str) -> GgufOptions:
    """The options with keys and values cached in a type; llama.cpp quantises values with flash attention alone."""
    changed = {"cache_type_k": cache, "cache_type_v": cache}
    if cache not in UNQUANTISED and options.flash_attn == "off":
        changed["flash_attn"] = "on"
    return GgufOptions.model_validate(options.model_dump() | changed)


def _given(pair: LoadedPair, texts: Sequence[str], block: int, blocks: int) -> Packed | None:
    """Plain texts in blocks, in an order drawn from the seed."""
    order = list(texts)
    random.Random(SEED).shuffle(order)
    target = pair.target

    def ids(text: str) -> list[int]:
        return target.tokenize(text, True) if isinstance(target, GgufModel) else encode(pair.tokenizer, text)

    return pack(((ids(text), 1) for text in order), block, True).take(slice(0, blocks)) if order else None


def prompts_of(corpus: Corpus, count: int) -> Prompts:
    """Prompts of files for a target, with room for their answers in a block; DataError for fewer than 4."""
    answer = Evaluate().new_tokens

    def read(target: str, block: int) -> UserPrompts:
        room = block - min(answer, block // 2)
        found = read_user_prompts(target, corpus, Chat(), count, 0, PROMPT_TOKENS, room, answer=answer, least=4)
        for reason, number in found.dropped.items():
            print(f"{number} left out: {reason}", file=sys.stderr)
        return found

    return read


def evaluate_types(
    recipe: Recipe,
    run: Run,
    types: Types,
    threads: int | None,
    gguf: Gguf | None,
    command: str,
    divergences: bool,
    acceptance: bool,
) -> EvaluationReport:
    """The report of a run's target and trained draft in the grid's types, behind the run's test prompts."""
    found = UserPrompts(read_prompts(run, "test")[: recipe.eval.prompts], [], {}, [])
    written = None if run.outdated("export") else run.path("gguf")
    models = [recipe.target.model], [str(run.path("draft"))]
    grid = Grid(*models, recipe.corpus.block, types, written, threads, gguf)
    asked = Asked(Sampler.of(recipe.sampler), recipe.eval, command, divergences, costs=True, seed=recipe.seed)
    return evaluate_grid(grid, lambda *_: found, asked, acceptance)
