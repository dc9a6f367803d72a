"""The general.* keys of a GGUF file: name, size, licence, origin, sampling settings, and who wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distill
from distill.errors import DataError

STRING, ARRAY, INTEGERS = 8, 9, (4, 5)  # gguf.GGUFValueType: texts, lists, and 32-bit integers
FILE_TYPES = {"f32": "ALL_F32"}  # others are MOSTLY_ and the type's name


def add_general_fields(writer: Any, folder: Path, name: str | None, outtype: str, parameters: int) -> None:
    """Write the keys to a gguf.GGUFWriter: those that the gguf package reads from the folder's model card, config.json,
    generation_config.json and name, as llama.cpp's converter does; `distill.version` is ours.

    Raises DataError for a model card whose head is no YAML, or holds values that GGUF has no place for.
    """
    import gguf
    import yaml

    folder = folder.resolve()
    try:
        found = gguf.Metadata.load(None, folder, name, parameters)
        if found.name is None:
            found.name = folder.name
        if found.size_label is None and parameters > 0:
            found.size_label = gguf.size_label(parameters, parameters, 0, 0)
        writer.add_type(gguf.GGUFType.MODEL)
        found.set_gguf_meta_model(writer)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, UnicodeDecodeError) as error:
        first = str(error).split("\n", 1)[0]
        raise DataError(
            f"{folder}: README.md or generation_config.json cannot be read as a model card: {first}",
            "correct the block between the --- lines of README.md, or remove it",
        ) from None
    _require_forms(folder, writer)
    file_type = FILE_TYPES.get(outtype, f"MOSTLY_{outtype.upper()}")
    writer.add_file_type(int(gguf.LlamaFileType[file_type]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("distill.version", distill.__version__)


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
