"""`distill import-gguf`: a GGUF file as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distill.errors import RecipeError
from distill.files import require_new_folder
from distill.progress import announce

DTYPES = ("float32", "bfloat16", "float16")


def import_gguf(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file of a model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type of all weights: float32, bfloat16 or float16; if left out, floats as they are and quantised "
            "weights in float32, which loses nothing."
        ),
    ] = None,
) -> None:
    """Write a GGUF file as a Hugging Face folder: dequantised weights, config.json, tokenizer, chat template.

    Commands and recipes also take the file itself as a model and import it.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RecipeError(f"--dtype {dtype} is unknown", f"use one of {', '.join(DTYPES)}")
    require_new_folder(out)
    from distill.models.conversion.importing import read_import, write_import

    found = read_import(file, dtype)  # type: ignore[arg-type]  # one of DTYPES
    announce(out)
    write_import(found, out)
    config, ids = found.config, found.tokenizer.content["model"]["vocab"]
    ends = ", ".join(found.tokenizer.tokens[token] for token in found.tokenizer.ends)
    kinds = f"; {', '.join(found.quantised)} dequantised" if found.quantised else ""
    print(
        f"{out}  {config['model_type']}, {config['num_hidden_layers']} layers of {config['hidden_size']}, "
        f"{len(found.tensors)} tensors, {found.bytes / 1e6:.0f} MB in {config['dtype']}{kinds}"
    )
    template = "a chat template" if found.tokenizer.templates else "no chat template"
    print(f"tokenizer: {len(ids)} tokens, {template}, an answer ends with {ends}")
