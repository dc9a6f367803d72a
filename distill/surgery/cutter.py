"""Cut layers and MLP width of a model, repair the kept layers, and measure the KL of each cut to the target.

A layer adds the outputs of its attention and of its MLP, W a, to the residual stream. If the layers after a kept layer
are removed, ridge regression refits the kept layer's W (down_proj), so that the stream is near the uncut model's where
the next kept layer reads it. Legend: L layers, n blocks, S positions, T tokens, H hidden, F neurons, W [H, F], a [F].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from distill import divergences
from distill.data.packing import pack, repeated_next
from distill.data.samples import NEW, SEEN, learnt_answers
from distill.devices import as_float64, pick_device
from distill.engines.pairs import require_pair
from distill.engines.torch.blocks import Packed, scored_states
from distill.engines.torch.hugging_face import (
    context_length,
    describe_model,
    empty_model,
    encode_text,
    load_config,
    load_model,
    load_tokenizer,
    local_folder,
    real_tokens,
    settled_type,
    text_folder,
    write_kept,
)
from distill.errors import DataError, RecipeError
from distill.files import copy_file, file_digest, require_new_folder, write_folder, write_result
from distill.folders import ModelSizes, copy_tokenizer
from distill.progress import Progress
from distill.recipe import Cut, Recipe
from distill.run import Run
from distill.surgery.layers import (
    BATCH,
    check_layers,
    check_width,
    choose_layers,
    choose_neurons,
    cut_parts,
    has_token,
    layer_calls,
    layer_settings,
    layers_of,
    parts_of,
    require_floats,
    require_supported,
    take_neurons,
    watching,
    written_shares,
)
from distill.surgery.results import Change, Closeness, CutReport, read_changes, record_change, size_of
from distill.surgery.sparsity import require_fewer
from distill.surgery.vocabulary import (
    always_kept,
    check_size,
    check_transplant,
    count_tokens,
    expected_shares,
    largest_shares,
    rank_tokens,
    smallest_size,
    transplant,
)
from distill.teacher.distributions import TeacherChunk, compress, head_logits
from distill.teacher.store import TeacherStore
from distill.teacher.texts import answer_blocks
from distill.vocabulary.vocabulary import Vocabulary, opening_of

RIDGE = 0.3  # of the repair. 0.1 and 1 change the agreement by less than 0.01 on SmolLM2 and Qwen2.5-0.5B.


@torch.no_grad()
def repair(
    model: Any, kept: Sequence[int], neurons: Sequence[Sequence[int]] | None, blocks: Packed, ridge: float = RIDGE
) -> tuple[list[Tensor], dict[str, Any]]:
    """Cut as `cut_parts` does, layer by layer. From the first cut on, refit down_proj of each layer that stays.

    Each refit reads the outputs of the layers that are already refitted, so that errors do not add up. Every position
    counts alike, because errors are relative to the length of the position's state.

    Returns the weights of down_proj without the refit, and JSON-able details. For each refitted layer the details have
    the mean squared error of the stream after the layer, relative to the stream, without the refit and with it.
    """
    layers, parts = list(layers_of(model)), parts_of(model, blocks)
    begun = [layer_calls(model, part) for part in parts]
    calls = [others for _, others in begun]
    uncut = [states for states, _ in begun]
    streams, exact, plain = list(uncut), kept[0] == 0, []
    for index in range(kept[0]):
        uncut = _through(layers[index], uncut, calls, index)
    report: dict[str, Any] = {"ridge": ridge, "lost_without_refit": [], "lost": []}
    count = sum(int(has_token(part.documents).sum()) for part in parts)
    progress = Progress("layers: cut and refitted", len(kept), brief=True)
    for index, following in itertools.pairwise([*kept, len(layers)]):
        layer = layers[index]
        for passed in range(index, following):
            uncut = _through(layers[passed], uncut, calls, passed)
        exact = exact and following == index + 1 and neurons is None
        if neurons is not None:
            take_neurons(layer, neurons[index])
        plain.append(layer.mlp.down_proj.weight.detach())
        if exact:
            streams = uncut
        else:
            losses = _refit(model, layer, [batch[index] for batch in calls], parts, streams, uncut, ridge)
            streams = _through(layer, streams, calls, index)
            left = sum(
                float(_missing(end, stream, part)[0].square().sum())
                for part, end, stream in zip(parts, uncut, streams, strict=True)
            )
            report["lost_without_refit"].append(losses / count)
            report["lost"].append(left / count)
        progress.step()
    cut_parts(model, kept, neurons)
    return plain, report


def _through(layer: Any, streams: Sequence[Tensor], calls: Sequence[list[dict[str, Any]]], index: int) -> list[Tensor]:
    """Return what a layer, the `index`-th of the uncut model, makes of the stream of each batch."""
    return [layer(stream, **others[index]) for stream, others in zip(streams, calls, strict=True)]


def _refit(
    model: Any,
    layer: Any,
    calls: Sequence[dict[str, Any]],
    parts: Sequence[Packed],
    streams: Sequence[Tensor],
    ends: Sequence[Tensor],
    ridge: float,
) -> float:
    """Refit a layer that reads `streams`, so that its output is near `ends`.

    Returns the sum of the relative squared errors before the refit.
    """
    down, lost = layer.mlp.down_proj, 0.0
    gram = torch.zeros(down.in_features, down.in_features, dtype=torch.float32, device=down.weight.device)
    cross = torch.zeros(down.in_features, down.out_features, dtype=torch.float32, device=down.weight.device)
    for part, end, stream, others in zip(parts, ends, streams, calls, strict=True):
        neurons: list[Tensor] = []
        with watching([(down, neurons.append)]):
            missing, share = _missing(end, layer(stream, **others), part)
        a = neurons[0][has_token(part.documents)]
        positions, channels = written_shares(model, layer, a)
        a = a.float() * positions * share
        gram.addmm_(a.T, a)
        cross.addmm_(a.T, missing / channels)
        lost += float(missing.square().sum())
    _set_weights([down], [(down.weight.detach().float() + _ridge(gram, cross, ridge).T).to(down.weight.dtype)])
    return lost


def _set_weights(downs: Sequence[Any], weights: Sequence[Tensor]) -> None:
    for down, weight in zip(downs, weights, strict=True):
        down.weight = torch.nn.Parameter(weight, requires_grad=down.weight.requires_grad)


def _missing(uncut: Tensor, actual: Tensor, part: Packed) -> tuple[Tensor, Tensor]:
    """Return the relative difference of states [n, S, H] from the uncut model's, and the reciprocal lengths.

    The differences [T, H] are taken at the T positions with a token and divided by the length of the uncut state. The
    second value is 1 / length [T, 1].
    """
    used = has_token(part.documents)
    wanted = uncut[used].float()
    share = wanted.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
    return (wanted - actual[used].float()) * share, share


def _ridge(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """Return X = (G + μ I)⁻¹ C [F, H] with μ = ridge · mean of diag G, solved in fp64."""
    g, c = as_float64(gram), as_float64(cross)
    shrink = max(ridge * float(g.diagonal().mean()), torch.finfo(g.dtype).tiny)  # G is 0 if all neurons are zero.
    factor = torch.linalg.cholesky(g + shrink * torch.eye(len(g), dtype=g.dtype, device=g.device))
    return torch.cholesky_solve(c, factor).to(cross.device, torch.float32)


# ── The target's distributions on a few blocks, computed once and compared with many cuts of a donor ──
# Legend: n blocks, S positions, N scored positions, k stored entries, V vocabulary.

STORED = 256  # entries per position: nearly the whole distribution at a small part of its size


@dataclass(frozen=True)
class TargetDistributions:
    """Blocks and the target's compact distributions at their N scored positions, in order.

    Ids from `vocabulary` on are padding. Models are compared with products in type `dtype`.
    """

    blocks: Packed
    distributions: TeacherChunk
    vocabulary: int
    dtype: str = "float32"

    def products(self) -> torch.autocast:
        """Within this context, a model with fp32 weights computes its products in `dtype`."""
        return torch.autocast(self.distributions.log_tail.device.type, torch.bfloat16, self.dtype == "bfloat16")

    @classmethod
    @torch.inference_mode()
    def measure(cls, target: Any, blocks: Packed, vocabulary: int, dtype: str = "float32") -> TargetDistributions:
        """Run the target once over the blocks and keep its distributions."""
        parts, batches = [], blocks.batches(BATCH)
        progress = Progress("the target's distributions, batches", len(batches), brief=True)
        for batch in batches:
            parts.append(compress(scored_logits(target, batch), min(STORED, vocabulary - 1), vocabulary))
            progress.step()
        return cls(blocks, joined_chunks(parts), vocabulary, dtype)

    @classmethod
    def stored(cls, recipe: Recipe, run: Run) -> TargetDistributions:
        """Read the distributions of the validation store. Its first blocks are the target's answers.

        Raises DataError if the store is empty.
        """
        store = TeacherStore(run, "validation")
        index = torch.arange(min(recipe.cut.score_blocks, store.blocks))
        if not len(index):
            hint = "request answers to validation prompts (train.acceptance.prompts), or add text (corpus.sources)"
            raise DataError("there is neither an answer nor text of the validation split to compare cuts on", hint)
        stored, parts = store.read(index), []
        teacher = stored.distributions(torch.device("cpu"))
        for start in range(0, len(teacher), STORED):
            chunk = teacher.chunk(slice(start, start + STORED))
            few = min(STORED, store.vocabulary - 1)
            parts.append(chunk if chunk.ids is not None else compress(chunk.log_probabilities, few, store.vocabulary))
        return cls(stored.blocks, joined_chunks(parts), store.vocabulary, recipe.target.dtype)

    @torch.inference_mode()
    def compare(self, model: Any) -> Closeness:
        """Return the KL to the target in nats per position, and the top-1 agreement by kind of text.

        All tokens outside the stored entries are one bucket, so the KL is a lower bound. With this many entries it is
        close to the full KL.
        """
        total, at, stored = 0.0, 0, self.distributions
        assert stored.ids is not None
        best = stored.ids.gather(1, stored.log_probabilities.argmax(-1, keepdim=True))[:, 0]
        equal = torch.zeros(len(best), dtype=torch.bool)
        for batch in self.blocks.batches(BATCH):
            logits = scored_logits(model, batch).float()
            logits[:, self.vocabulary :] = -torch.inf
            rows = slice(at, at + len(logits))
            at += len(logits)
            parts = (stored.ids.long(), stored.log_probabilities, stored.log_tail)
            ids, logs, tail = (part[rows].to(logits.device) for part in parts)
            total += float(as_float64(divergences.bucketed_forward_kl(ids, logs, tail, logits)).sum())
            equal[rows] = logits.argmax(-1).cpu() == best[rows]
        seen = repeated_next(self.blocks)
        kinds = {NEW: equal[~seen], SEEN: equal[seen]}
        shares = {name: float(matches.float().mean()) for name, matches in kinds.items() if len(matches)}
        return Closeness(total / max(1, at), shares)


def joined_chunks(parts: Sequence[TeacherChunk]) -> TeacherChunk:
    """Concatenate the positions of several chunks with ids, on the CPU."""
    return TeacherChunk(
        *(torch.cat([getattr(part, name).cpu() for part in parts]) for name in TeacherChunk.__dataclass_fields__)
    )


def scored_logits(model: Any, part: Packed) -> Tensor:
    """Return a model's logits [N, V] at the scored positions of some blocks, in order."""
    return head_logits(model, scored_states(model, part))


# ── What a recipe's cuts need, from configurations only: possible sizes, and a draft smaller than its target ──

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # A step of such models reads few weights.
SHAPE = {
    "layers": "num_hidden_layers",
    "hidden size": "hidden_size",
    "MLP width": "intermediate_size",
    "KV heads": "num_key_value_heads",
    "rows": "vocab_size",
}


def check_shape(config: Any, settings: Cut) -> None:
    """Raise RecipeError, with the possible cuts, for cuts that a model of this configuration does not allow."""
    checks: list[tuple[str, Callable[[Any, Any], object], Any]] = [
        ("layers", check_layers, settings.layers),
        ("mlp_width", check_width, settings.mlp_width),
    ]
    for key, check, value in checks:
        if value is not None:
            try:
                check(config, value)
            except RecipeError as error:
                raise RecipeError(f"cut.{key}: {error.what}", error.hint) from None


def check_cut(recipe: Recipe) -> list[str]:
    """Describe the planned draft in lines to print. Raises for an impossible donor or cut. Loads no weights."""
    settings, donor = recipe.cut, recipe.donor_model
    config = load_config(donor)
    require_supported(config)
    require_floats(donor)
    lines = []
    if settings.transplant is not None:
        check_transplant(local_folder(donor), text_folder(recipe.target.model), settings.transplant)
        lines.append(f"transplant: {donor} gets the vocabulary of {recipe.target.model}")
    else:
        require_pair(recipe.target.model, donor)
        rows = load_config(recipe.target.model).get_text_config().vocab_size
        if rows != config.vocab_size:
            lines.append(
                f"rows: the draft gets the target's {rows} rows instead of the donor's {config.vocab_size}, because "
                "vLLM requires equal numbers; only padding differs"
            )
    check_shape(config, settings)
    if settings.trim is not None:
        vocabulary = Vocabulary.read(text_folder(recipe.target.model))
        check_size(settings.trim_size, len(always_kept(vocabulary)), vocabulary.size, recipe.teacher.top_k)
    sparsity, full = recipe.train.sparsity, settings.mlp_width or config.intermediate_size
    if sparsity is not None and sparsity.mlp_width is not None:
        require_fewer(sparsity.mlp_width, full)
    layers = config.num_hidden_layers
    kept, _ = _left(settings, layers, full)
    return [*lines, f"cut: {layers} layers -> {kept}, MLP {config.intermediate_size} -> {full}"]


def weights_of(sizes: dict[str, int]) -> tuple[int, int]:
    """Estimate the number of weights in the layers and in the head of a model of these sizes (see `shape_of`)."""
    layers, hidden, mlp, _, rows = sizes.values()
    return layers * hidden * (4 * hidden + 3 * mlp), rows * hidden


def shape_of(config: Any) -> dict[str, int] | None:
    """Return the sizes that a step's cost depends on. None if the model does not state them all, or has experts."""
    config = config.get_text_config()
    sizes = {word: getattr(config, name, None) for word, name in SHAPE.items()}
    if any(getattr(config, name, None) for name in EXPERTS):
        return None
    return {word: size for word, size in sizes.items() if isinstance(size, int)} if all(sizes.values()) else None


def _left(cut: Cut, layers: int, width: int) -> tuple[int, int]:
    """Return the numbers of layers and MLP neurons that remain of a donor after a cut."""
    return cut.layers or layers, cut.mlp_width or width


def planned_layers(recipe: Recipe) -> dict[str, Any]:
    """Return the entries about layers in config.json of the draft that a recipe cuts.

    The first layers stand for the kept ones, because only text decides which layers stay.
    """
    config = load_config(recipe.donor_model)
    return layer_settings(config, range(recipe.cut.layers or config.num_hidden_layers))


def planned_sizes(recipe: Recipe, target: Any, donor: Any) -> dict[str, int] | None:
    """Return the sizes of the draft that a recipe cuts, by SHAPE. None if the donor does not state them."""
    cut, sparsity, draft = recipe.cut, recipe.train.sparsity, shape_of(donor)
    if draft is None:
        return None
    layers, width = _left(cut, draft["layers"], draft["MLP width"])
    if sparsity is not None and sparsity.mlp_width is not None:
        width = min(width, sparsity.mlp_width)
    return draft | {"layers": layers, "MLP width": width, "rows": target.get_text_config().vocab_size}


def kept_share(recipe: Recipe, draft: Any = None) -> float:
    """Return the share of the donor's layers that remain, by `draft`'s configuration or (None) the recipe's cut.

    Narrower MLPs do not count, because a draft with all layers keeps most of the donor's abilities.
    """
    donor: int = load_config(recipe.donor_model).get_text_config().num_hidden_layers
    return (recipe.cut.layers or donor if draft is None else draft.num_hidden_layers) / donor


def check_smaller(recipe: Recipe, target: Any, donor: Any) -> None:
    """Raise RecipeError for a draft that is smaller than its target in no size."""
    full, draft = shape_of(target), planned_sizes(recipe, target, donor)
    if full is None or draft is None or recipe.cut.trim is not None:
        return
    if all(draft[word] >= full[word] for word in SHAPE):
        sizes = ", ".join(
            f"{draft[word]} {word}" if word in ("layers", "rows") else f"{word} {draft[word]}" for word in SHAPE
        )
        raise RecipeError(
            f"cut: the draft costs as much as its target ({sizes}), so drafting with it cannot save time",
            "cut it, for instance cut.layers="
            f"{max(1, full['layers'] // 4)}, or name a smaller cut.donor, or set cut.allow_full_size: true",
        )


# ── Layers and MLP width of a loaded model, cut in this order, and of any folder without a recipe ──

BLOCK = 512  # positions per block of a folder's texts, unless the model's context is shorter


def cut_model(
    model: Any, settings: Cut, blocks: Packed, distributions: TargetDistributions, is_target: bool
) -> list[Change]:
    """Cut layers and MLP width of a loaded model in place, then repair it. Returns what was changed.

    `is_target`: the model is the target itself, so its closeness before the cut is not measured.
    """
    width = settings.mlp_width
    names = ["layers"] * (settings.layers is not None) + ["MLP width"] * (width is not None)
    if not names:
        return []
    size, full = size_of(model), model.config.intermediate_size
    with distributions.products():
        before = None if is_target else distributions.compare(model)
        kept, details, neurons = [*range(size.layers)], dict[str, Any](), None
        if settings.layers is not None:
            kept, details = choose_layers(model, settings.layers, blocks)
        if width is not None and width != full:
            neurons, details["score_kept"] = choose_neurons(model, blocks, width)
        if neurons is None and len(kept) == size.layers:
            return [Change(", ".join(names), size, size, before, before, details)]
        downs = [layers_of(model)[index].mlp.down_proj for index in kept]
        plain, report = repair(model, kept, neurons, blocks)
        repaired, fitted = distributions.compare(model), [down.weight for down in downs]
        _set_weights(downs, plain)
        after, smaller = distributions.compare(model), size_of(model)
        taken = repaired.kl < after.kl or not math.isfinite(after.kl)
        if taken:
            _set_weights(downs, fitted)
        if not math.isfinite(min(repaired.kl, after.kl)):
            raise DataError("the loss of the cut model is not finite", "check the donor's weights")
    changes = [Change(", ".join(names), size, smaller, before, after, details)]
    return [*changes, Change("repair", smaller, smaller, after, repaired, report)] if taken else changes


def cut_folder(
    source: str, destination: Path, settings: Cut, texts: Sequence[str], target: str | None = None
) -> list[Change]:
    """Cut folder `source` into `destination`. KL is measured against `target`. None selects the uncut model.

    The first half of the texts' blocks gives the scores, the second half the KL. Raises RecipeError for impossible cuts
    before any work, and DataError if the texts give fewer than two blocks.
    """
    config = load_config(source)
    require_supported(config)
    require_floats(source)
    check_shape(config, settings)
    require_new_folder(destination)
    if target is not None:
        require_pair(target, source)
    tokenizer = load_tokenizer(source)
    block = min(BLOCK, context_length(config) or BLOCK)
    sequences = ((encode_text(tokenizer, text), 1) for text in texts if text.strip())
    blocks = pack(sequences, block, True, opening_of(tokenizer))
    if len(blocks) < 2:
        raise DataError(f"the texts give {len(blocks)} blocks of {block} tokens", "give text for at least two blocks")
    half = min(len(blocks) // 2, settings.score_blocks)
    cpu = torch.device("cpu")
    model, dtype = load_model(source, "float32", cpu, trimmed=False), settled_type("auto", cpu)
    teacher = model if target is None else load_model(target, dtype, cpu)
    compared = blocks.take(slice(half, 2 * half))
    distributions = TargetDistributions.measure(teacher, compared, real_tokens(config, tokenizer), dtype)
    changes = cut_model(model, settings, blocks.take(slice(0, half)), distributions, is_target=target is None)
    before = read_changes(text_folder(source))

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        copy_tokenizer(text_folder(source), folder)
        record_change(folder, before, *changes)

    write_folder(destination, save)
    return changes


# ── Stage `cut`: from a donor to a draft by transplant, layers, widths and head, each step with its KL ──


def cut(recipe: Recipe, run: Run) -> list[Path]:
    """Write the draft's starting weights to cut/, with the target's tokenizer. `from_pretrained` loads the folder."""
    parent = run.parent()
    if parent is not None:
        return inherit(run, parent)
    settings, device = recipe.cut, pick_device(recipe.device)
    distributions = TargetDistributions.stored(recipe, run)
    model, donor, changes = load_donor(recipe, run, device, distributions)
    log_changes(run, changes)
    made = cut_model(model, settings, score_blocks(recipe, run), distributions, is_target=settings.donor == "target")
    log_changes(run, made)
    changes += made
    kept: list[int] | None = None
    if settings.trim is not None:
        kept, metadata, change = choose_head(recipe, run, model, distributions.vocabulary)
        log_changes(run, [change])
        changes.append(change)
    sizes = describe_model("cut", model)

    def save(place: Path) -> None:
        model.save_pretrained(place)
        copy_tokenizer(text_folder(recipe.target.model), place)
        if kept is not None:
            write_kept(place, kept, model.config.vocab_size, metadata)
        record_change(place, [], *changes)
        write_result(place / "cut.json", CutReport(donor, sizes, changes))

    write_folder(run.path("cut"), save)
    return [run.path("cut")]


def log_changes(run: Run, changes: Sequence[Change]) -> None:
    """Log a line for each change."""
    for change in changes:
        run.say(f"  {change.sentence()}")


def inherit(run: Run, parent: dict[str, Any]) -> list[Path]:
    """Start a refreshed run: copy its parent's draft (weights, tokenizer, kept tokens) to cut/ without cuts.

    Raises DataError if the parent's draft is missing or has changed since the refresh began.
    """
    name = f"{parent['run']}/draft"
    source = run.folder.parent / parent["run"] / "draft"
    for file, expected in parent["files"].items():
        if not (source / file).is_file() or file_digest(source / file) != expected:
            hint = f"restore the folder {source.parent}"
            raise DataError(f"{source / file} is missing, or has changed since this run's refresh began", hint)
    config = load_config(str(source))
    sizes = describe_model(name, empty_model(config))

    def save(place: Path) -> None:
        for file in parent["files"]:
            if file != "sparsity.json":  # It belongs to the training that made the parent's draft.
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                copy_file(source / file, place / file)
        write_result(place / "cut.json", CutReport(sizes, replace(sizes, path="cut"), []))

    write_folder(run.path("cut"), save)
    run.say(f"  generation {parent['generation']}: starts from {name}, without cuts")
    return [run.path("cut")]


def load_donor(
    recipe: Recipe, run: Run, device: torch.device, distributions: TargetDistributions
) -> tuple[Any, ModelSizes, list[Change]]:
    """Load the whole donor, transplanted or with the target's number of rows. Returns it, its size and its changes.

    The size is that of the donor before any change.
    """
    reference, settings = recipe.donor_model, recipe.cut.transplant
    if settings is None:
        model = load_model(reference, "float32", device, trimmed=False)
        sizes = describe_model(reference, model)
        rows = load_config(recipe.target.model).get_text_config().vocab_size
        return model, sizes, match_rows(model, rows, distributions.vocabulary)
    folder = run.path("cut")  # The cut draft replaces this folder later.
    change = transplant(
        local_folder(reference), text_folder(recipe.target.model), folder, overrides=settings, dtype="float32"
    )
    model = load_model(str(folder), "float32", device, trimmed=False)
    old = change.before
    sizes = replace(
        describe_model(reference, model), parameters=old.parameters, vocabulary=old.vocabulary, bytes=4 * old.parameters
    )
    return model, sizes, [replace(change, close_after=distributions.compare(model))]


def match_rows(model: Any, rows: int, real: int) -> list[Change]:
    """Give a loaded model `rows` rows. The first `real` rows hold tokens and stay. Returns the change, if any.

    vLLM requires equal vocab_size of target and draft, padding included. Models of one tokenizer may be padded
    differently (Qwen2.5: 151,936 and 152,064 rows).
    Appended rows are copies of the model's last padding row, or the mean of all tokens' rows. An engine that does not
    mask padding then gives it a usual logit. A zero row would outrank every negative logit.
    """
    present: int = model.config.vocab_size
    if present == rows:
        return []
    assert real <= min(present, rows), "a token would lose its row"
    before = size_of(model)

    def weights() -> list[Tensor]:
        return [layer.weight.detach() for layer in (model.get_input_embeddings(), model.get_output_embeddings())]

    padding = [matrix[-1].clone() if present > real else matrix[:real].float().mean(0) for matrix in weights()]
    model.resize_token_embeddings(rows, mean_resizing=False)
    for matrix, row in zip(weights(), padding, strict=True):
        matrix[present:] = row
    return [Change("rows", before, size_of(model), details={"rows": rows, "donor_rows": present, "tokens": real})]


def score_blocks(recipe: Recipe, run: Run) -> Packed:
    """Return the text on which neurons and layers are scored and refitted.

    It is the first blocks that the draft learns from, which hold answers of the target.
    """
    return TeacherStore(run).packed.take(slice(0, recipe.cut.score_blocks))


HELD_OUT_EVERY = 4  # One of this many blocks of answers is held out, to measure the share of a trimmed head.


def choose_head(recipe: Recipe, run: Run, model: Any, vocabulary: int) -> tuple[list[int], dict[str, Any], Change]:
    """Choose the tokens of a trimmed head by the target's text and its distributions. The model itself stays whole.

    The tokens are ranked on most blocks of answers, and their share of the text is measured on the others, which are
    held out. Returns the kept ids, the metadata of the head, and the change.
    """
    share, size = recipe.cut.trim, recipe.cut.trim_size
    assert share is not None
    tokens = Vocabulary.read(text_folder(recipe.target.model))
    forced = [index for index in always_kept(tokens) if index < vocabulary]
    learnt = learnt_answers(run)
    answers_by_block = answer_blocks(learnt, recipe)[1]  # The first blocks of the teacher's store are those of answers.
    held_out_blocks = range(1, len(answers_by_block), HELD_OUT_EVERY)
    held_out = [answer for block in held_out_blocks for document in answers_by_block[block] for answer in document]
    ranking = numpy.setdiff1d(numpy.arange(len(learnt)), held_out)
    counts = count_tokens(learnt.take(ranking), vocabulary)
    measured = count_tokens(learnt.take(held_out), vocabulary) if held_out else counts
    expected = expected_shares(TeacherStore(run), pick_device(recipe.device), held_out_blocks)
    order = rank_tokens(counts, forced, expected)
    min_kept = max(len(forced), recipe.teacher.top_k + 1)
    metadata: dict[str, Any] = {"forced": len(forced), "by": "mass" if size is None else "size"}
    if size is None:
        size = smallest_size(measured, order, min_kept, share)
    kept, metadata["mass"] = largest_shares(measured, order, size)
    change = Change("trim", size_of(model), size_of(model, len(kept)), details=metadata | {"kept": len(kept)})
    return kept, metadata, change
