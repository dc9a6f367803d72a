"""The trained draft as a folder that loads everywhere, and training.json with the choice of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill.files import copy_file, write_folder, write_json
from distill.models.model_files import copy_tokenizer
from distill.models.trimmed_head import FILE as KEPT_FILE
from distill.results.serialise import from_json, write_result
from distill.results.training_results import EvaluatedWeights, TrainedPart, TrainingSummary
from distill.surgery.change import size_of
from distill.surgery.sparsity.group_lasso import GroupLasso
from distill.surgery.sparsity.ramp import Penalty
from distill.surgery.sparsity.unstructured import UnstructuredL1
from distill.training.adapters import merge
from distill.training.setup import Training


def write_draft(work: Training) -> list[Path]:
    """Write draft/ and training.json with the present weights, adapters merged and removed neurons cut out."""
    run = work.run
    final = work.draft().eval()
    artifacts = [run.path("draft"), run.path("training.json")]
    if not work.is_main:
        return artifacts
    if work.settings.adapter is not None:
        final = merge(final, run.path("cut"))
    report = finish_penalty(final, work.penalty)
    final.config.use_cache = True

    def write(folder: Path) -> None:
        final.save_pretrained(folder)
        copy_tokenizer(run.path("cut"), folder)
        for name in (KEPT_FILE, "surgery.json"):
            if run.path("cut", name).exists():
                copy_file(run.path("cut", name), folder / name)
        if report is not None:
            write_json(folder / "sparsity.json", report)

    write_folder(run.path("draft"), write)
    if report is not None:
        run.say(f"  sparsity: {report['sentence']}")
    write_result(run.path("training.json"), _summary(work))
    return artifacts


def _summary(work: Training) -> TrainingSummary:
    # Under a sparsity penalty the last weights stay, however earlier ones were accepted.
    best, plan = work.state["best"] if work.penalty is None else None, work.plan
    steps = work.state["ended"] or plan.steps  # patience may end it early
    return TrainingSummary(
        steps=steps,
        processes=work.accelerator.num_processes,
        parts=[TrainedPart("align", 0, steps, plan.rate, dict(plan.loss.losses))],
        best=None if best is None else from_json(best, EvaluatedWeights, "the last checkpoint"),
    )


def finish_penalty(model: Any, penalty: Penalty | None) -> dict[str, Any] | None:
    """Cut removed neurons out of the trained model; the details for sparsity.json, or None without a penalty."""
    if penalty is None:
        return None
    before = size_of(model)
    if isinstance(penalty, GroupLasso):
        details = penalty.cut(model)
        words = (
            f"MLP {details['width_before']} -> {details['width']}; of the neurons removed "
            f"{min(details['removed_zero_share']):.1%} or more per layer were exactly zero"
        )
    else:
        assert isinstance(penalty, UnstructuredL1)
        details = penalty.details()
        words = f"{details['zero_share']:.1%} of the blocks' weights are zero, which makes no step faster"
    after = size_of(model)
    return {"parameters": [before.parameters, after.parameters], "details": details, "sentence": words}
