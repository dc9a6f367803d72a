"""Stage `cut`: from a donor to a draft by transplant, layers, widths and head, each step with its KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from distill.data.packing import Packed, pack
from distill.data.samples import Sample, Samples, read_answers
from distill.devices import pick_device
from distill.engines.torch.described import empty_model, write_kept
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
from distill.files import copy_file, file_digest, write_folder, write_result
from distill.folders import ModelSizes, copy_tokenizer
from distill.recipe import Recipe
from distill.recipe.recipe import REASON
from distill.run import Run
from distill.surgery.cutter import TargetDistributions, cut_model
from distill.surgery.results import Change, CutReport, record_change, size_of
from distill.surgery.vocabulary import (
    always_kept,
    count_tokens,
    expected_shares,
    keep,
    rank_tokens,
    smallest_size,
    transplant,
)
from distill.teacher.store import TeacherStore, answer_blocks
from distill.vocabulary.vocabulary import Vocabulary


def cut(recipe: Recipe, run: Run) -> list[Path]:
    """Make the draft's starting weights: cut/, which `from_pretrained` loads, with the target's tokenizer."""
    parent = run.parent()
    if parent is not None:
        return inherit(run, parent)
    settings = recipe.cut
    device, answers = pick_device(recipe.device), read_answers(run, "train")
    if recipe.target.load:
        target = load_target(recipe.target, device)
        vocabulary = real_tokens(target.config, load_tokenizer(recipe.target.model))
        distributions = TargetDistributions.measure(
            target, comparison_blocks(recipe, run, answers), vocabulary, recipe.target.dtype
        )
        del target  # the donor takes its memory
    else:
        distributions = TargetDistributions.stored(recipe, run)
        run.say(f"  KL to the stored distributions of {len(distributions.blocks)} validation blocks, {REASON}")
    model, donor, changes = load_donor(recipe, run, device, distributions)
    say(run, changes)
    scores, own = score_blocks(recipe, run, answers), settings.donor == "target"
    made = cut_model(model, settings, scores, distributions, own)
    say(run, made)
    changes += made
    kept: list[int] | None = None
    if settings.trim is not None:
        kept, metadata, change = choose_head(recipe, run, model, distributions.vocabulary, answers)
        say(run, [change])
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
        write_result(place / "cut.json", CutReport(sizes, replace(sizes, path="cut"), []))

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
    folder = run.path("cut")  # which the cut draft replaces
    change = transplant(
        local_folder(reference),
        text_folder(recipe.target.model),
        folder,
        overrides=settings,
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
    return model, sizes, [replace(change, close_after=distributions.compare(model))]


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


def _own_blocks(recipe: Recipe, answers: Sequence[Sample]) -> Packed:
    kept = ((a.prompt + a.answer, len(a.prompt)) for a in answers if not a.dropped)
    return pack(kept, recipe.corpus.block, split_long=False)


def score_blocks(recipe: Recipe, run: Run, answers: Sequence[Sample]) -> Packed:
    """The text on which neurons and layers are scored and refitted: the target's first answers, packed, of few answers
    those on which no cut is compared; without answers, text of the validation split."""
    return _answers_or_text(recipe, run, answers[: len(answers) - compared_answers(answers)] or answers)


def compared_answers(answers: Sequence[Sample]) -> int:
    """How many of the last answers cuts may be compared on: half of them, because a cut fits those that it was made
    from."""
    return max(1, len(answers) // 2)


def comparison_blocks(recipe: Recipe, run: Run, answers: Sequence[Sample]) -> Packed:
    """The text on which cuts are compared: the target's last answers, or where there are none text of the validation
    split. DataError where there is neither."""
    blocks = _answers_or_text(recipe, run, answers[::-1][: compared_answers(answers)])
    if not len(blocks):
        raise DataError("there is neither an answer nor validation text to compare cuts on", "raise answers.prompts")
    return blocks


def _answers_or_text(recipe: Recipe, run: Run, answers: Sequence[Sample]) -> Packed:
    own = _own_blocks(recipe, answers)
    blocks = own if len(own) else Packed.load(run.path("corpus", "text-validation.safetensors"))
    return blocks.take(slice(0, recipe.cut.score_blocks))


APART = 4  # of this many blocks of answers one measures what a trimmed head holds


def choose_head(
    recipe: Recipe, run: Run, model: Any, vocabulary: int, answers: Samples
) -> tuple[list[int], dict[str, Any], Change]:
    """Choose the kept tokens by the target's own text and its distributions there; the model itself stays whole.

    The share that they hold is measured on the answers of some blocks, which do not rank them.
    """
    share, size = recipe.cut.trim, recipe.cut.trim_size
    assert share is not None
    tokens = Vocabulary.read(text_folder(recipe.target.model))
    forced = [index for index in always_kept(tokens) if index < vocabulary]
    learnt = answers.take(answers.column("dropped") == "")
    rows = answer_blocks(learnt, recipe)[1]  # of the first blocks of the teacher's store
    apart = range(1, len(rows), APART)
    held = [one for block in apart for own in rows[block] for one in own]
    rest = numpy.setdiff1d(numpy.arange(len(learnt)), held)
    counts = count_tokens(learnt.take(rest), vocabulary)
    measured = count_tokens(learnt.take(held), vocabulary) if held else counts
    stored = recipe.teacher.kind != "online"  # an online teacher stores no distributions
    expected = expected_shares(TeacherStore(run), pick_device(recipe.device), apart) if stored else None
    order = rank_tokens(counts, forced, expected)
    least = max(len(forced), recipe.teacher.top_k + 1)
    metadata: dict[str, Any] = {"forced": len(forced), "by": "mass" if size is None else "size"}
    if size is None:
        size = smallest_size(measured, order, least, share)
    kept, metadata["mass"] = keep(measured, order, size)
    change = Change("trim", size_of(model), size_of(model, len(kept)), details=metadata | {"kept": len(kept)})
    return kept, metadata, change
