"""Stage `cut`: from a donor to a draft by transplant, layers, widths and head, each step with its KL."""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from distill import divergences
from distill.data.packing import Packed, pack
from distill.data.texts import Answer, drop_reason, read_answers
from distill.decoding.costs import measure_steps, predicted_speedups
from distill.devices import doubled, pick_device
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import growing_decoder, target_file
from distill.engines.model import Model
from distill.engines.torch.described import empty_model, trimmed_head, write_kept
from distill.engines.torch.hugging_face import (
    describe_model,
    load_config,
    load_model,
    load_target,
    load_tokenizer,
    local_folder,
    real_tokens,
    text_folder,
)
from distill.errors import DataError
from distill.files import copy_file, file_digest, read_json, read_result, write_folder, write_json, write_result
from distill.folders import ModelSizes, copy_tokenizer
from distill.gguf.writer import export_gguf
from distill.recipe import Cut, Recipe
from distill.recipe.recipe import REASON
from distill.run import Run
from distill.sampler import Sampler
from distill.surgery.cutter import TargetDistributions, cut_model, kept_share, scored_logits
from distill.surgery.results import Change, Comparison, CutReport, PricedCut, record_change, size_of
from distill.surgery.vocabulary import (
    Counts,
    always_kept,
    count_tokens,
    expected_shares,
    keep,
    rank_tokens,
    sizes_between,
    smallest_size,
    transplant,
)
from distill.tables import document
from distill.teacher.store import TeacherSource, TeacherStore, open_teacher
from distill.training.setup import adapted
from distill.training.step import heal, loss_settings, with_rate
from distill.vocabulary.vocabulary import Vocabulary

# ── The price of a cut: its acceptance after a short training, the cost of its steps here, and the speed of both ──
# A round drafts γ tokens and verifies them in one step of γ + 1. With acceptance probability a at every position it
# gives 1 + a + … + a^γ tokens in T(γ + 1) + γ·D seconds (Leviathan et al. 2023, eq. 1, measured): the best γ gives
# the cut's tokens per second. The figures of each cut are kept in a file, so that a killed comparison resumes.
# Legend: γ drafted tokens, T(m) seconds of a target step of m tokens, D seconds of a draft step.

TARGET_COUNTS = range(1, 18)  # m of each T(m): a price considers up to 16 drafted tokens

Backend = Literal["pytorch", "gguf"]
ApplyCut = Callable[[Any, Cut], object]  # alters a model in place


def price(
    name: str,
    parameters: int,
    kl: float | None,
    acceptance: float,
    target_seconds: Sequence[float],
    draft_seconds: float,
) -> PricedCut:
    """The predicted speed of one cut, with the figures it follows from; `target_seconds` are T(1) to T(γ + 1)."""
    speedups = predicted_speedups(target_seconds, draft_seconds, [acceptance] * (len(target_seconds) - 1))
    speedup = max(speedups)
    length = speedups.index(speedup)
    return PricedCut(name, parameters, kl, acceptance, draft_seconds, length, speedup / target_seconds[0], speedup)


def compare_cuts(
    recipe: Recipe, run: Run, donor: Any, target: Any, distributions: TargetDistributions, apply_cut: ApplyCut
) -> None:
    """Price each cut that the recipe lists, and write compared/compared.json; the table is shown.

    `donor` and `target` are loaded models; `apply_cut` is called on copies of the donor. Steps are those of GGUF files
    of type speedup.outtype where the recipe measures the speedup of those, else PyTorch's.
    """
    backend: Backend = "gguf" if recipe.speedup.files else "pytorch"
    folder = run.path("compared")
    costs_path = folder / "target.json"
    if not costs_path.exists():
        write_json(costs_path, _seconds(recipe, target, "target", backend, TARGET_COUNTS))
    costs = [float(seconds) for seconds in read_json(costs_path)]
    source = open_teacher(run, recipe, next(target.parameters()).device, target)
    cuts = []
    for choice in recipe.cut.compare:
        path = folder / f"{choice.name.replace(', ', '-').replace(' ', '')}.json"
        if not path.exists():
            model = copy.deepcopy(donor)
            apply_cut(model, recipe.cut.model_copy(update={"drop_layers": None, **choice.model_dump()}))
            _heal(recipe, model, source)
            parameters, kl = sum(p.numel() for p in model.parameters()), distributions.kl(model)
            accepted = acceptance(recipe, target, distributions, model)
            (step,) = _seconds(recipe, model, "draft", backend, [1])
            write_result(path, price(choice.name, parameters, kl, accepted, costs, step))
        cuts.append(read_result(path, PricedCut))
        run.say(f"  {choice.name}: acceptance probability {cuts[-1].acceptance:.3f}, predicted {cuts[-1].speedup:.2f}×")
    comparison = Comparison(backend, recipe.cut.heal_steps, costs, cuts, run.command)
    write_result(folder / "compared.json", comparison)
    run.say(document([comparison.table()]))


def price_vocabulary(
    recipe: Recipe,
    run: Run,
    model: Any,
    target: Any,
    distributions: TargetDistributions,
    counts: Mapping[str, Counts],
    order: Sequence[int],
    least: int,
) -> tuple[int, list[dict[str, Any]]]:
    """The number of kept tokens with the most predicted tokens per second, and every number tried.

    A copy of the cut model is healed once with its full head; a trimmed one's acceptance probability is that times the
    smallest share of a domain's target-written tokens that is kept. Its step is measured with each head, in PyTorch.
    """
    healed = copy.deepcopy(model)
    _heal(recipe, healed, open_teacher(run, recipe, next(model.parameters()).device, target))
    whole = acceptance(recipe, target, distributions, healed)
    costs = _seconds(recipe, target, "target", "pytorch", TARGET_COUNTS)
    tried = []
    for size in sizes_between(least, len(order)):
        kept, shares = keep(counts, order, size)
        mass = min(shares.values())
        with contextlib.nullcontext() if size == len(order) else trimmed_head(healed, kept):
            (step,) = _seconds(recipe, healed, "draft", "pytorch", [1])
        point = price(f"head of {size}", size, None, whole * mass, costs, step)
        tried.append({"size": size, "mass": mass, **asdict(point)})
        run.say(
            f"  {point.name}: {mass:.2%} of the target's tokens, step {step * 1e3:.2f} ms, "
            f"{point.tokens_per_second:.1f} tokens/s"
        )
    best = max(tried, key=lambda row: row["tokens_per_second"])
    return int(best["size"]), tried


def _heal(recipe: Recipe, model: Any, source: TeacherSource) -> None:
    """Train a cut for a few steps, with adapters where the draft will be trained with them."""
    with adapted(model, recipe.train.adapter, recipe.seed):
        settings = with_rate(recipe.train, kept_share(recipe, model.config))
        loss = loss_settings(settings, recipe.sampler.temperature)
        heal(model, source, settings, loss, recipe.cut.heal_steps, recipe.seed)


def _seconds(
    recipe: Recipe, loaded: Any, role: Literal["target", "draft"], backend: Backend, counts: Sequence[int]
) -> list[float]:
    """Median seconds of steps of `counts` tokens at the recipe's depth, of a loaded model or of a GGUF file of it."""
    with contextlib.ExitStack() as stack:
        model: Model
        if backend == "pytorch":
            model = growing_decoder(loaded, prepack=recipe.pytorch.prepack)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            path = folder / f"{role}.gguf"
            if role == "target":
                path = target_file(recipe, path)
            else:
                loaded.save_pretrained(folder)
                copy_tokenizer(text_folder(recipe.target.model), folder)
                export_gguf(folder, path, recipe.speedup.outtype)
            options = recipe.gguf_options(role)
            model = stack.enter_context(GgufModel(path, context=recipe.corpus.block + 64, options=options))
        depth = min(recipe.speedup.depth, model.capacity - max(counts))
        seconds = measure_steps(model, counts, depth, recipe.speedup.repeats)
    return [seconds[m] for m in counts]


@torch.inference_mode()
def acceptance(recipe: Recipe, target: Any, distributions: TargetDistributions, draft: Any) -> float:
    """Mean Σ min(p, q) over the scored positions of the blocks, both distributions through the recipe's sampler."""
    blocks, vocabulary, sampler = distributions.blocks, distributions.vocabulary, Sampler.of(recipe.sampler)
    total, count = 0.0, 0
    for part in blocks.batches(2):  # whole distributions take much memory
        p, q = (sampler.probabilities(scored_logits(model, part)[:, :vocabulary]) for model in (target, draft))
        total += float(doubled(divergences.acceptance_sampling(p, q.to(p.device))).sum())
        count += len(p)
    return total / max(1, count)


# ── The stage ──


def cut(recipe: Recipe, run: Run) -> list[Path]:
    """Make the draft's starting weights: cut/, which `from_pretrained` loads, with the target's tokenizer."""
    parent = run.parent()
    if parent is not None:
        return inherit(run, parent)
    settings = recipe.cut
    device = pick_device(recipe.device)
    target, answers = None, read_answers(run, "train")
    if recipe.target.load:
        target = load_target(recipe.target, device)
        vocabulary = real_tokens(target.config, load_tokenizer(recipe.target.model))
        distributions = TargetDistributions.measure(target, comparison_blocks(recipe, run, answers), vocabulary)
    else:
        distributions = TargetDistributions.stored(recipe, run)
        run.say(f"  KL to the stored distributions of {len(distributions.blocks)} validation blocks, {REASON}")
    model, donor, changes = load_donor(recipe, run, device, distributions)
    say(run, changes)
    scores, own = score_blocks(recipe, run, answers), settings.donor == "target"
    apply_cut = functools.partial(cut_model, blocks=scores, distributions=distributions, own=own)
    if settings.compare:
        compare_cuts(recipe, run, model, target, distributions, apply_cut)
    made = apply_cut(model, settings)
    say(run, made)
    changes += made
    kept: list[int] | None = None
    if settings.trim is not None:
        kept, metadata, change = trim(recipe, run, model, target, distributions, answers)
        say(run, [change])
        changes.append(change)
    sizes = describe_model("cut", model)
    context = getattr(model.config, "max_position_embeddings", None)

    def save(place: Path) -> None:
        model.save_pretrained(place)
        copy_tokenizer(text_folder(recipe.target.model), place)
        if kept is not None:
            write_kept(place, kept, model.config.vocab_size, metadata)
        record_change(place, [], *changes)
        write_result(place / "cut.json", CutReport(donor, sizes, changes, context))

    write_folder(run.path("cut"), save)
    shutil.rmtree(run.path("compared", "transplant"), ignore_errors=True)
    report = run.path("compared")
    return [run.path("cut"), *([report] if report.exists() and any(report.iterdir()) else [])]


def say(run: Run, changes: Sequence[Change]) -> None:
    """A line for each change, as soon as it is made."""
    for change in changes:
        run.say(f"  {change.sentence()}")


def inherit(run: Run, parent: dict[str, Any]) -> list[Path]:
    """The start of a refreshed run: its parent's draft is copied to cut/ (weights, tokenizer, kept tokens), uncut.

    Raises DataError when the parent's draft is missing or has changed since the refresh began.
    """
    name = f"{parent['run']}/draft"
    source = run.folder.parent / parent["run"] / "draft"
    for file, expected in parent["files"].items():
        if not (source / file).is_file() or file_digest(source / file) != expected:
            raise DataError(
                f"{source / file} is missing or is not the one that this run goes on from",
                f"put the folder {source.parent} back as it was",
            )
    config = load_config(str(source))
    sizes = describe_model(name, empty_model(config))

    def save(place: Path) -> None:
        for file in parent["files"]:
            if file != "sparsity.json":  # of the training that made it
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                copy_file(source / file, place / file)
        context = getattr(config, "max_position_embeddings", None)
        write_result(place / "cut.json", CutReport(sizes, replace(sizes, path="cut"), [], context))

    write_folder(run.path("cut"), save)
    run.say(f"  generation {parent['generation']}: starts from {name}, without cuts")
    return [run.path("cut")]


def load_donor(
    recipe: Recipe, run: Run, device: torch.device, distributions: TargetDistributions
) -> tuple[Any, ModelSizes, list[Change]]:
    """The donor, loaded whole, transplanted where the recipe asks for it, with the rows that it asks for; its original
    sizes; its changes so far."""
    reference, settings = recipe.donor_model, recipe.cut.transplant
    if settings is None:
        model = load_model(reference, "float32", device, trimmed=False)
        sizes = describe_model(reference, model)
        rows = load_config(recipe.target.model).get_text_config().vocab_size
        return model, sizes, match_rows(model, rows, distributions.vocabulary)
    folder = run.path("compared", "transplant")
    change = transplant(
        local_folder(reference),
        text_folder(recipe.target.model),
        folder,
        overrides=settings.overrides,
        decay=settings.decay,
        dtype="float32",
    )
    model = load_model(str(folder), "float32", device, trimmed=False)
    old = change.before
    sizes = replace(
        describe_model(reference, model),
        parameters=old.parameters,
        vocabulary=old.vocabulary,
        bytes=4 * old.parameters,
    )
    return model, sizes, [replace(change, kl_after=distributions.kl(model))]


def match_rows(model: Any, rows: int, real: int) -> list[Change]:
    """Give a loaded model `rows` rows, of which the first `real` hold tokens and stay; the change, if there is one.

    vLLM asks for equal vocab_size of target and draft, padding included, and models of one tokenizer may be padded
    differently (Qwen2.5: 151,936 and 152,064 rows).
    Appended rows are copies of the model's last padding row, or the mean of all tokens' rows: engines that do not mask
    padding then give it no more than a common logit, where a zero row would outrank every negative one.
    """
    present: int = model.config.vocab_size
    if present == rows:
        return []
    assert real <= min(present, rows), "a token would lose its row"
    before = size_of(model)

    def weights() -> list[Tensor]:
        return [layer.weight.detach() for layer in (model.get_input_embeddings(), model.get_output_embeddings())]

    padding = [own[-1].clone() if present > real else own[:real].float().mean(0) for own in weights()]
    model.resize_token_embeddings(rows, mean_resizing=False)
    for own, row in zip(weights(), padding, strict=True):
        own[present:] = row
    return [Change("rows", before, size_of(model), details={"rows": rows, "donor_rows": present, "tokens": real})]


def _own_blocks(recipe: Recipe, answers: list[Answer]) -> Packed:
    kept = ((a.prompt + a.answer, len(a.prompt)) for a in answers if not drop_reason(a))
    return pack(kept, recipe.corpus.block, split_long=False)


def score_blocks(recipe: Recipe, run: Run, answers: list[Answer]) -> Packed:
    """The text on which neurons, layers and heads are scored and refitted: the target's first answers, packed; of few
    answers those on which no cut is compared."""
    text = Packed.load(run.path("corpus", "text-validation.safetensors"))
    first = answers if len(text) else answers[: len(answers) - compared_answers(answers)] or answers
    own = _own_blocks(recipe, first).take(slice(0, recipe.cut.score_blocks))
    return own if len(own) else text


def compared_answers(answers: list[Answer]) -> int:
    """How many of the last answers cuts may be compared on, where there is no validation text: half of them, because a
    cut fits those that it was made from."""
    return max(1, len(answers) // 2)


def comparison_blocks(recipe: Recipe, run: Run, answers: list[Answer]) -> Packed:
    """The text on which cuts are compared: that of the validation split, or the target's last answers where the corpus
    has questions alone. DataError where there is neither."""
    text = Packed.load(run.path("corpus", "text-validation.safetensors"))
    blocks = text if len(text) else _own_blocks(recipe, answers[::-1][: compared_answers(answers)])
    if not len(blocks):
        raise DataError("there is neither validation text nor an answer to compare cuts on", "raise answers.prompts")
    return blocks.take(slice(0, recipe.cut.score_blocks))


def trim(
    recipe: Recipe, run: Run, model: Any, target: Any, distributions: TargetDistributions, answers: list[Answer]
) -> tuple[list[int], dict[str, Any], Change]:
    """Choose the kept tokens by the target's own text and its distributions there; the model itself stays whole."""
    settings = recipe.cut.trim
    assert settings is not None
    vocabulary = distributions.vocabulary
    tokens = Vocabulary.read(text_folder(recipe.target.model))
    forced = [index for index in always_kept(tokens) if index < vocabulary]
    counts = count_tokens(answers, vocabulary)
    stored = recipe.teacher.kind != "online"  # an online teacher stores no distributions
    expected = expected_shares(TeacherStore(run), pick_device(recipe.device)) if stored else None
    order = rank_tokens(counts, forced, expected)
    least = max(len(forced), recipe.teacher.top_k + 1)
    metadata: dict[str, Any] = {"forced": len(forced), "by": settings.by if settings.size is None else "size"}
    size = settings.size
    if size is None and settings.by == "price":
        size, metadata["tried"] = price_vocabulary(recipe, run, model, target, distributions, counts, order, least)
    elif size is None:
        size = smallest_size(counts, order, least, settings.mass)
    kept, metadata["mass"] = keep(counts, order, size)
    change = Change("trim", size_of(model), size_of(model, len(kept)), details=metadata | {"kept": len(kept)})
    return kept, metadata, change
