"""`distill cut`: make a model smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distill.commands.shared import (
    read_texts,
)
from distill.errors import RecipeError


def cut(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or hub name.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="Text file, or folder of them, that scores are collected on.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Whose distributions KL is measured to; the uncut model if left out.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Layers kept.")] = None,
    layer_rule: Annotated[
        str, typer.Option("--layer-rule", help="auto, greedy, influence, angular or last-but-one.")
    ] = "auto",
    drop_layers: Annotated[
        str | None, typer.Option("--drop-layers", help="Layers dropped by number: 14-21 or 3,7.")
    ] = None,
    mlp_width: Annotated[int | None, typer.Option("--mlp-width", help="MLP neurons kept per layer.")] = None,
    mlp_rule: Annotated[str, typer.Option("--mlp-rule", help="activation, magnitude or first.")] = "activation",
    repair: Annotated[
        bool, typer.Option("--repair/--no-repair", help="Least-squares repair of the narrowed MLPs.")
    ] = True,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="KV heads kept.")] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", help="Hidden size kept.")] = None,
) -> None:
    """Cut layers, MLP neurons, KV groups or hidden dimensions out of a model, each choice measured on text."""
    from distill.recipe import Cut, parse_section

    asked = {
        "layers": layers,
        "layer_rule": layer_rule,
        "drop_layers": drop_layers,
        "mlp_width": mlp_width,
        "mlp_rule": mlp_rule,
        "mlp_repair": repair,
        "kv_heads": kv_heads,
        "hidden": hidden,
    }
    settings = parse_section(Cut, {name: value for name, value in asked.items() if value is not None})
    if all(size is None for size in (layers, drop_layers, mlp_width, kv_heads, hidden)):
        raise RecipeError("nothing to cut", "name --layers, --drop-layers, --mlp-width, --kv-heads or --hidden")
    if not text:
        raise RecipeError("cuts are scored on text", "give --text FILE or --text FOLDER")
    texts = read_texts(text)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    from distill.surgery.cut_folder import cut_folder

    for change in cut_folder(source, out, settings, texts, target):
        print(change.sentence())
    print(f"written: {out}")
