"""The general.* keys of a GGUF file: name, size, licence, origin, sampling settings, and who wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distill
from distill.errors import DataError
from distill.models.gguf.file_head import ARRAY, STRING

INTEGERS = (4, 5)  # of gguf.GGUFValueType, 32 bits


@dataclass(frozen=True)
class Advice:
    """How to draft: tokens a round at most, and llama.cpp's p_min, None where no floor was tried."""

    n_max: int
    p_min: float | None = None


@dataclass(frozen=True)
class Origin:
    """What the files of a model's folder do not say. What they do say wins, except for the name.

    `base_model` and `datasets` are hub names; `licence` is that of the base model.
    """

    name: str | None = None
    recipe: str | None = None
    base_model: str | None = None
    licence: str | None = None
    datasets: tuple[str, ...] = ()
    advice: Advice | None = None


PLAIN = Origin()  # nothing but what the folder's files say


def add_general_fields(writer: Any, folder: Path, origin: Origin, outtype: str, parameters: int) -> None:
    """Write the keys to a gguf.GGUFWriter: those that the gguf package reads from the folder's model card, config.json,
    generation_config.json and name, as llama.cpp's converter does, what `origin` adds to them, and keys of our own.

    Raises DataError for a model card whose head is no YAML, or holds values that GGUF has no place for.
    """
    import gguf
    import yaml

    folder = folder.resolve()
    try:
        metadata = gguf.Metadata.load(None, folder, origin.name, parameters)
        if metadata.name is None:
            metadata.name = folder.name
        _complete(metadata, origin)
        if metadata.size_label is None and parameters > 0:
            metadata.size_label = gguf.size_label(parameters, parameters, 0, 0)
        writer.add_type(gguf.GGUFType.MODEL)
        metadata.set_gguf_meta_model(writer)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, UnicodeDecodeError) as error:
        first = str(error).split("\n", 1)[0]
        raise DataError(
            f"{folder}: README.md or generation_config.json cannot be read as a model card: {first}",
            "correct the block between the --- lines of README.md, or remove it",
        ) from None
    _require_forms(folder, writer)
    writer.add_file_type(file_type_number(outtype))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("distill.version", distill.__version__)
    if origin.recipe is not None:
        writer.add_string("distill.recipe", origin.recipe)
    if origin.advice is not None:
        writer.add_uint32("distill.draft.n_max", origin.advice.n_max)
        if origin.advice.p_min is not None:
            writer.add_float32("distill.draft.p_min", origin.advice.p_min)


def file_type_number(outtype: str) -> int:
    """llama.cpp's number of a type of files (gguf.LlamaFileType)."""
    import gguf

    return int(gguf.LlamaFileType["ALL_F32" if outtype == "f32" else f"MOSTLY_{outtype.upper()}"])


def _complete(metadata: Any, origin: Origin) -> None:
    """Fill what the model card leaves out, in the words that the gguf package makes of such a card."""
    import gguf

    card: dict[str, Any] = {
        "license": origin.licence,
        "datasets": list(origin.datasets),
        "base_model": origin.base_model,
    }
    made = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), {key: value for key, value in card.items() if value})
    for key in ("license", "datasets", "base_models"):
        if not getattr(metadata, key):
            setattr(metadata, key, getattr(made, key))


def _require_forms(folder: Path, writer: Any) -> None:
    """The gguf package takes values as they stand in the files and would fail while it writes them."""
    for key, field in writer.kv_data[0].items():
        values = field.value if field.type == ARRAY else [field.value]
        kind = str if field.type in (STRING, ARRAY) else int if field.type in INTEGERS else (int, float)
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
        ):
            raise DataError(
                f"{folder}: README.md or generation_config.json gives {field.value!r:.60} for {key}",
                "correct that entry, or remove it",
            )
        if field.type in INTEGERS and not -(2**31) <= field.value < 2**31:
            raise DataError(f"{folder}: {key} is {field.value}, too large for GGUF", "correct that entry, or remove it")
