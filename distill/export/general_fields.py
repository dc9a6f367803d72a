"""The general.* keys of a GGUF file: name, size, licence, origin, sampling settings, and who wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distill
from distill.errors import DataError

FILE_TYPES = {"f32": "ALL_F32"}  # others are MOSTLY_ and the type's name


def add_general_fields(writer: Any, folder: Path, name: str | None, outtype: str, parameters: int) -> None:
    """Write the keys to a gguf.GGUFWriter: those that the gguf package reads from the folder's model card, config.json,
    generation_config.json and name, as llama.cpp's converter does; `distill.version` is ours.

    Raises DataError for a model card whose head is no YAML.
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
    file_type = FILE_TYPES.get(outtype, f"MOSTLY_{outtype.upper()}")
    writer.add_file_type(int(gguf.LlamaFileType[file_type]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("distill.version", distill.__version__)
