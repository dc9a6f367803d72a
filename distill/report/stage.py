"""Stage `report`: the page and the draft's model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill.files import read_json, write_text
from distill.machine import machine
from distill.recipe import Recipe
from distill.report.card import build_card
from distill.report.page import build_page
from distill.run import Run, now


def gather(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Everything the page and the card show, read from the run directory; None for stages that have not run."""

    def found(*parts: str) -> Any:
        path = run.path(*parts)
        return read_json(path) if path.exists() else None

    cut = found("cut", "cut.json") or {}
    # The command that made the run, not the one that redraws its report.
    history = found("provenance.json") or []
    argv = history[0]["argv"][1:] if history else []
    results = {
        "name": recipe.name,
        "date": now(),
        "command": "distill " + " ".join(argv),
        "machine": machine(),
        "config": recipe.model_dump(mode="json"),
        "target": _target_sizes(recipe, cut),
        "donor": cut.get("donor"),
        "draft": (cut["draft"] | {"path": "draft"}) if cut else None,
        "cuts": cut.get("changes"),
        "parent": run.parent(),
        "search": found("search", "search.json"),
        "sparsity": found("draft", "sparsity.json"),
        "metrics": run.metrics(),
        "training": found("training.json"),
        "profile": found("profile.json"),
        "eval": found("eval.json"),
        "export": found("gguf", "export.json"),
        "speedup": found("speedup.json"),
    }
    return {name: value for name, value in results.items() if value is not None}


def _target_sizes(recipe: Recipe, cut: dict[str, Any]) -> dict[str, Any] | None:
    """Sizes of the target, read from its configuration on an empty model, so that no weights are loaded."""
    if cut and cut["donor"]["path"] == recipe.target.model:
        donor: dict[str, Any] = cut["donor"]
        return donor
    import torch
    from transformers import AutoModelForCausalLM

    from distill.models.hugging_face import describe_model, load_config

    with torch.device("meta"):
        return describe_model(recipe.target.model, AutoModelForCausalLM.from_config(load_config(recipe.target.model)))


def report(recipe: Recipe, run: Run) -> list[Path]:
    """Write report.html and, beside the draft's weights, its model card."""
    results = gather(recipe, run)
    write_text(run.path("report.html"), build_page(results))
    write_text(run.path("draft", "README.md"), build_card(results))
    return [run.path("report.html"), run.path("draft", "README.md")]
