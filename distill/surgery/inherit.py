"""The start of a refreshed run: the unchanged draft of the run before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.files import copy_file, file_digest, write_folder
from distill.models.hugging_face import describe_model, load_config
from distill.results.cut_results import CutReport
from distill.results.serialise import write_result
from distill.run import Run


def inherit(run: Run, parent: dict[str, Any]) -> list[Path]:
    """Copy the parent's draft to cut/: weights, tokenizer, kept tokens. No cut is made.

    Raises DataError when the parent's draft is missing or has changed since the refresh began.
    """
    import torch
    from transformers import AutoModelForCausalLM

    name = f"{parent['run']}/draft"
    source = run.folder.parent / parent["run"] / "draft"
    for file, expected in parent["files"].items():
        if not (source / file).is_file() or file_digest(source / file) != expected:
            raise DataError(
                f"{source / file} is missing or is not the one that this run goes on from",
                f"put the folder {source.parent} back as it was",
            )
    config = load_config(str(source))
    with torch.device("meta"):  # sizes alone
        sizes = describe_model(name, AutoModelForCausalLM.from_config(config))

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
