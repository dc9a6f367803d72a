"""Where the models of a run come from, and how its draft is best used, for the head of their GGUF files."""

from __future__ import annotations

from distill.errors import DistillError
from distill.models.conversion.fields import Advice, Origin
from distill.models.hugging_face import local_folder
from distill.recipe import Recipe
from distill.recipe.configuration import P_MIN
from distill.recipe.load import is_path
from distill.results.serialise import read_result
from distill.results.speedup_results import SpeedupReport
from distill.run import Run


def origins(recipe: Recipe, run: Run) -> dict[str, Origin]:
    """The origins of a run's draft and target, by name, without advice: see `advice_of`."""
    donor = recipe.donor_model
    draft = Origin(
        name=f"{recipe.name} draft",
        recipe=recipe.name,
        base_model=None if is_path(donor) else donor,
        licence=_licence(donor, run),
        datasets=tuple(source.path for source in recipe.corpus.sources if source.kind == "hub"),
    )
    return {"draft": draft, "target": Origin(f"{recipe.name} target")}


def _licence(donor: str, run: Run) -> str | None:
    """The licence in the donor's model card; a line in the log where the card cannot be read."""
    import yaml
    from gguf import Metadata

    try:
        licence = Metadata.load_model_card(local_folder(donor)).get("license")
    except (DistillError, OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        run.say(f"  the licence of {donor} is not known: {str(error).split(chr(10), 1)[0]}")
        return None
    return licence if isinstance(licence, str) else None


def advice_of(run: Run) -> Advice | None:
    """The fastest greedy way of a run's speedup that llama.cpp has too: a fixed length, or a floor of the draft's
    probability; None where it advises against drafting."""
    report = read_result(run.path("speedup.json"), SpeedupReport)
    floors = {
        configuration.title: configuration
        for configuration in run.recipe.speedup.configurations
        if configuration.drafter == "draft" and configuration.rule == "p_min"
    }
    tried = [
        measurement
        for measurement in report.measurements
        if measurement.sampler is None and (measurement.length or measurement.configuration in floors)
    ]
    backend = "gguf" if any(measurement.backend == "gguf" for measurement in tried) else "pytorch"
    tried = [measurement for measurement in tried if measurement.backend == backend and measurement.speedup > 1]
    if not tried:
        return None
    best = max(tried, key=lambda measurement: measurement.speedup)
    floor = floors.get(best.configuration)
    if floor is not None:
        return Advice(floor.max_length, P_MIN if floor.p_min is None else floor.p_min)
    return Advice(best.length or 0, 0.0 if floors else None)
