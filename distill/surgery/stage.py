"""Stage `cut`: from a donor to a draft by transplant, layers, widths and head, each step with its KL."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distill.errors import DataError, RecipeError
from distill.files import write_folder, write_json
from distill.models.hugging_face import (
    describe_model,
    load_config,
    load_model,
    load_target,
    load_tokenizer,
    local_folder,
    pick_device,
    real_tokens,
    text_folder,
)
from distill.models.model_files import copy_tokenizer
from distill.models.pairs import require_pair
from distill.models.trimmed_head import write_kept
from distill.packing import Packed, pack
from distill.recipe import Cut, Recipe
from distill.recipe.text.unloaded import REASON
from distill.results.cut_results import Change, CutReport, ModelSizes
from distill.results.serialise import write_result
from distill.run import Run
from distill.surgery.change import RECORD, require_supported, size_of
from distill.surgery.cuts.attention import check_kv_heads, drop_kv_groups
from distill.surgery.cuts.hidden import check_hidden, narrow_hidden
from distill.surgery.cuts.layers import check_layers, choose_layers, keep_layers, parse_layers
from distill.surgery.cuts.width import check_width, narrow
from distill.surgery.divergence import TargetDistributions
from distill.surgery.inherit import inherit
from distill.surgery.vocabulary.rows import match_rows
from distill.surgery.vocabulary.transplant import transplant
from distill.surgery.vocabulary.transplant_plan import check_transplant
from distill.surgery.vocabulary.trim import (
    Kept,
    Shares,
    always_kept,
    check_size,
    count_tokens,
    expected_shares,
    keep,
    rank_tokens,
    require_counts,
    smallest_size,
)
from distill.target.store import TeacherStore
from distill.texts import Answer, drop_reason, read_answers
from distill.vocabulary import Vocabulary

GREEDY_LAYERS = 28  # greedy removal costs layers × removals passes over the blocks
RIDGES = (1e-4, 1e-3, 1e-2)  # of the least-squares repair; the one of least KL on validation text is taken


def donor_reference(recipe: Recipe) -> str:
    """The name of the model that the draft is cut from."""
    return recipe.target.model if recipe.cut.donor == "target" else recipe.cut.donor


def _read_by(method: str) -> Callable[[str], Path]:
    """What fetches the files of a target that a transplant reads: its weights for a pursuit alone."""
    return local_folder if method == "pursuit" else text_folder


def check_shape(config: Any, settings: Cut) -> None:
    """Raise RecipeError for cuts that a model of this configuration does not allow, with the possible ones."""
    drop, heads, hidden = settings.drop_layers, settings.kv_heads, settings.hidden
    checks: list[tuple[str, Callable[[], object]]] = []
    if settings.search is not None:
        checks += [("search.layers", partial(check_layers, config, count)) for count in settings.search.layers]
        checks += [("search.mlp_width", partial(check_width, config, width)) for width in settings.search.mlp_width]
    if settings.layers is not None:
        checks.append(("layers", partial(check_layers, config, settings.layers)))
    if drop is not None:
        checks.append(("drop_layers", partial(parse_layers, drop, config.num_hidden_layers)))
    if settings.mlp_width is not None:
        checks.append(("mlp_width", partial(check_width, config, settings.mlp_width)))
    if heads is not None:
        checks.append(("kv_heads", partial(check_kv_heads, config, heads)))
    if hidden is not None:
        checks.append(("hidden", partial(check_hidden, config, hidden)))
    for key, check in checks:
        try:
            check()
        except RecipeError as error:
            raise RecipeError(f"cut.{key}: {error.what}", error.hint) from None


def check_cut(recipe: Recipe) -> list[str]:
    """The planned draft, in lines to print; raises for an impossible donor or cut. Loads no weights."""
    settings, donor = recipe.cut, donor_reference(recipe)
    config = load_config(donor)
    require_supported(config.model_type)
    lines = []
    if settings.transplant is not None:
        target = _read_by(settings.transplant.method)(recipe.target.model)
        folders = (local_folder(donor), target)
        check_transplant(*folders, settings.transplant.overrides, method=settings.transplant.method)
        lines.append(f"transplant: {donor} gets the vocabulary of {recipe.target.model}")
    else:
        require_pair(recipe.target.model, donor)
        rows = load_config(recipe.target.model).get_text_config().vocab_size
        if settings.rows == "target" and rows != config.vocab_size:
            lines.append(
                f"rows: the draft gets the target's {rows} rows instead of the donor's {config.vocab_size}, so that "
                "vLLM takes it too; only padding differs"
            )
    check_shape(config, settings)
    if settings.trim is not None:
        vocabulary = Vocabulary.read(text_folder(recipe.target.model))
        check_size(settings.trim.size, len(always_kept(vocabulary)), vocabulary.size, recipe.teacher.top_k)
    sparsity, full = recipe.train.sparsity, settings.mlp_width or config.intermediate_size
    if sparsity is not None and sparsity.mlp_width is not None and not 0 < sparsity.mlp_width < full:
        raise RecipeError(
            f"train.sparsity.mlp_width is {sparsity.mlp_width}; training starts with {full} neurons a layer",
            f"ask for a multiple of 32 below that, for instance {max(32, full // 2 // 32 * 32)}",
        )
    if settings.search is not None:
        widths = list(settings.search.mlp_width) or [full]
        return [*lines, f"search: layers {list(settings.search.layers)}, MLP {widths}"]
    layers = config.num_hidden_layers
    kept = settings.layers or layers
    if settings.drop_layers is not None:
        kept = layers - len(parse_layers(settings.drop_layers, layers))
    return [*lines, f"cut: {layers} layers -> {kept}, MLP {config.intermediate_size} -> {full}"]


class Cutter:
    """Applies the cuts of a recipe to loaded models and records each change."""

    def __init__(self, blocks: Packed, distributions: TargetDistributions) -> None:
        self.blocks, self.distributions = blocks, distributions
        self.changes: list[Change] = []

    def __call__(self, model: Any, settings: Cut) -> None:
        """Cut a model in place: layers, KV groups, hidden size, MLP width."""
        self.changes = []
        if settings.layers is not None or settings.drop_layers is not None:
            self._apply("layers", model, lambda: self._layers(model, settings))
        heads, hidden = settings.kv_heads, settings.hidden
        if heads is not None:
            self._apply("KV groups", model, lambda: drop_kv_groups(model, self.blocks, heads))
        if hidden is not None:
            self._apply("hidden size", model, lambda: narrow_hidden(model, self.blocks, hidden))
        if settings.mlp_width is not None:
            self._apply("MLP width", model, lambda: self._width(model, settings))

    def _apply(self, name: str, model: Any, cut: Callable[[], dict[str, Any]]) -> None:
        before = size_of(model)
        kl_before = self.changes[-1].kl_after if self.changes else self.distributions.kl(model)
        details = cut()
        self.changes.append(Change(name, before, size_of(model), kl_before, self.distributions.kl(model), details))

    def _layers(self, model: Any, settings: Cut) -> dict[str, Any]:
        rule: str = settings.layer_rule
        if settings.drop_layers is not None:
            rule = "explicit"
        elif rule == "auto":
            rule = "greedy" if model.config.num_hidden_layers <= GREEDY_LAYERS else "influence"
        kept, report = choose_layers(
            model, settings.layers, rule, blocks=self.blocks, loss=self.distributions.kl, drop=settings.drop_layers
        )
        keep_layers(model, kept)
        return {"rule": rule, "kept": kept, **report}

    def _width(self, model: Any, settings: Cut) -> dict[str, Any]:
        assert settings.mlp_width is not None
        details = narrow(
            model,
            self.blocks,
            settings.mlp_width,
            score=settings.mlp_rule,
            repair=settings.mlp_repair,
            ridge=RIDGES,
            loss=self.distributions.kl,
        )
        return {name: value for name, value in details.items() if name != "neurons"}  # thousands of numbers


def cut(recipe: Recipe, run: Run) -> list[Path]:
    """Make the draft's starting weights: cut/, which `from_pretrained` loads, with the target's tokenizer."""
    parent = run.parent()
    if parent is not None:
        return inherit(run, parent)
    settings = recipe.cut
    device = pick_device(recipe.device)
    if settings.transplant is None:
        require_pair(recipe.target.model, donor_reference(recipe))
    target, answers = None, read_answers(run, "train")
    if recipe.target.load:
        target = load_target(recipe.target, device)
        vocabulary = real_tokens(target.config, load_tokenizer(recipe.target.model))
        distributions = TargetDistributions.measure(target, judged_blocks(recipe, run, answers), vocabulary)
    else:
        distributions = TargetDistributions.stored(recipe, run)
        run.say(f"  KL to the stored distributions of {len(distributions.blocks)} validation blocks, {REASON}")
    model, donor, changes = load_donor(recipe, run, device, distributions)
    cutter = Cutter(score_blocks(recipe, run, answers), distributions)
    if settings.search is not None:
        from distill.surgery.search import search

        settings = search(recipe, run, model, target, distributions, cutter)
    cutter(model, settings)
    changes += cutter.changes
    kept: Kept | None = None
    if settings.trim is not None:
        kept, metadata, change = trim(recipe, run, model, target, distributions, answers)
        changes.append(change)
    for change in changes:
        run.say(f"  {change.sentence()}")
    sizes = describe_model("cut", model)
    context = getattr(model.config, "max_position_embeddings", None)

    def save(place: Path) -> None:
        model.save_pretrained(place)
        copy_tokenizer(text_folder(recipe.target.model), place)
        if kept is not None:
            write_kept(place, kept.ids, model.config.vocab_size, metadata)
        write_json(place / RECORD, {"changes": [change.as_json() for change in changes]})
        write_result(place / "cut.json", CutReport(donor, sizes, changes, context))

    write_folder(run.path("cut"), save)
    shutil.rmtree(run.path("search", "transplant"), ignore_errors=True)
    report = run.path("search")
    return [run.path("cut"), *([report] if report.exists() and any(report.iterdir()) else [])]


def load_donor(
    recipe: Recipe, run: Run, device: torch.device, distributions: TargetDistributions
) -> tuple[Any, ModelSizes, list[Change]]:
    """The donor, loaded whole, transplanted where the recipe asks for it, with the rows that it asks for; its original
    sizes; its changes so far."""
    reference, settings = donor_reference(recipe), recipe.cut.transplant
    if settings is None:
        model = load_model(reference, "float32", device, trimmed=False)
        sizes, changes = describe_model(reference, model), []
        if recipe.cut.rows == "target":
            rows = load_config(recipe.target.model).get_text_config().vocab_size
            changes = match_rows(model, rows, distributions.vocabulary)
        return model, sizes, changes
    folder = run.path("search", "transplant")
    change = transplant(
        local_folder(reference),
        _read_by(settings.method)(recipe.target.model),
        folder,
        overrides=settings.overrides,
        method=settings.method,
        decay=settings.decay,
        dtype="float32",
    )
    model = load_model(str(folder), "float32", device, trimmed=False)
    old = change.before
    sizes = describe_model(reference, model)
    original = replace(sizes, parameters=old.parameters, vocabulary=old.vocabulary, bytes=4 * old.parameters)
    return model, original, [replace(change, kl_after=distributions.kl(model))]


def _own_blocks(recipe: Recipe, answers: list[Answer]) -> Packed:
    kept = ((a.prompt + a.answer, len(a.prompt)) for a in answers if not drop_reason(a))
    return pack(kept, recipe.corpus.block, split_long=False)


def score_blocks(recipe: Recipe, run: Run, answers: list[Answer]) -> Packed:
    """The text on which neurons, layers and heads are scored: the target's first answers, packed."""
    own = _own_blocks(recipe, answers).take(slice(0, recipe.cut.score_blocks))
    return own if len(own) else Packed.load(run.path("corpus", "text-validation.safetensors"))


def judged_blocks(recipe: Recipe, run: Run, answers: list[Answer]) -> Packed:
    """The text on which cuts are compared: that of the validation split, or the target's last answers where the corpus
    has questions alone. DataError where there is neither."""
    given = Packed.load(run.path("corpus", "text-validation.safetensors"))
    found = given if len(given) else _own_blocks(recipe, answers[::-1])
    if not len(found):
        raise DataError("there is neither validation text nor an answer to compare cuts on", "raise answers.prompts")
    return found.take(slice(0, recipe.cut.score_blocks))


def stored_shares(run: Run, recipe: Recipe) -> Shares | None:
    """The tokens' shares by the stored distributions; None for an online teacher, which stores none."""
    if recipe.teacher.kind == "online":
        return None
    return expected_shares(TeacherStore(run), pick_device(recipe.device))


def trim(
    recipe: Recipe, run: Run, model: Any, target: Any, distributions: TargetDistributions, answers: list[Answer]
) -> tuple[Kept, dict[str, Any], Change]:
    """Choose the kept tokens by the target's own text and its distributions there; the model itself stays whole."""
    settings = recipe.cut.trim
    assert settings is not None
    vocabulary = distributions.vocabulary
    tokens = Vocabulary.read(text_folder(recipe.target.model))
    forced = [index for index in always_kept(tokens) if index < vocabulary]
    counts = count_tokens(answers, vocabulary)
    require_counts(counts)
    order = rank_tokens(counts, forced, stored_shares(run, recipe))
    check_size(settings.size, len(forced), vocabulary, recipe.teacher.top_k)
    least = max(len(forced), recipe.teacher.top_k + 1)
    metadata: dict[str, Any] = {"forced": len(forced), "by": settings.by if settings.size is None else "size"}
    size = settings.size
    if size is None and settings.by == "price":
        from distill.surgery.search import price_vocabulary

        size, metadata["tried"] = price_vocabulary(recipe, run, model, target, distributions, counts, order, least)
    elif size is None:
        size = smallest_size(counts, order, least, settings.mass)
    kept = keep(counts, order, size)
    metadata["mass"] = kept.mass
    before = size_of(model)
    change = Change("trim", before, size_of(model, len(kept.ids)), details=metadata | {"kept": len(kept.ids)})
    return kept, metadata, change
