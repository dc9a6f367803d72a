"""The trained draft as a folder that loads everywhere, and training.json with the choice of its weights."""

from __future__ import annotations

from pathlib import Path

from distill.files import copy_file, write_folder, write_json
from distill.models.model_files import copy_tokenizer
from distill.models.trimmed_head import FILE as KEPT_FILE
from distill.results.serialise import from_json, read_result, write_result
from distill.results.training_results import EvaluatedWeights, ReplayDecision, TrainedPart, TrainingSummary
from distill.training.adapters import merge
from distill.training.choice.enough import learning_curve
from distill.training.penalty import finish_penalty
from distill.training.setup import Training


def write_draft(work: Training) -> list[Path]:
    """Write draft/ and training.json with the present weights, adapters merged and removed neurons cut out."""
    run, main = work.run, work.accelerator.is_main_process
    final = work.draft().eval()
    decision = run.path("replay", "decision.json")
    artifacts = [run.path("draft"), run.path("training.json"), *([decision.parent] if decision.exists() else [])]
    if not main:
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
    write_result(run.path("training.json"), _summary(work, decision))
    return artifacts


def _summary(work: Training, decision: Path) -> TrainingSummary:
    # Under a sparsity penalty the last weights stay, however earlier ones were accepted.
    best, source = work.state["best"] if work.penalty is None else None, "the last checkpoint"
    chosen = None if best is None else from_json(best, EvaluatedWeights, source)
    averaged = work.average is not None if chosen is None else chosen.averaged
    replay = read_result(decision, ReplayDecision) if decision.exists() else None
    return TrainingSummary(
        steps=work.state["step"],
        processes=work.accelerator.num_processes,
        parts=[
            TrainedPart(part.name, part.first, part.steps, part.rate, dict(part.loss.losses)) for part in work.parts
        ],
        best=chosen,
        replay=replay,
        averaged=averaged and not (replay is not None and replay.kept),
        curve=learning_curve(work),
        skipped=work.state["skipped"],
    )
