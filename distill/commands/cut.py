"""`distill cut`: makes a model smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distill.commands.shared import local_reference, read_texts
from distill.errors import RecipeError
from distill.progress import announce, is_verbose


def cut(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or hub name.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    text: Annotated[
        list[Path] | None, typer.Option(help="Text file or folder of text files to score the cuts on.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Model to measure KL to; by default the uncut model.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers to keep.")] = None,
    layer_rule: Annotated[
        str, typer.Option(help="Which layers go: auto, greedy, influence, angular or last-but-one.")
    ] = "auto",
    drop_layers: Annotated[str | None, typer.Option(help="Layers to drop, by number: 14-21 or 3,7.")] = None,
    mlp_width: Annotated[int | None, typer.Option(help="MLP neurons to keep per layer.")] = None,
    mlp_rule: Annotated[str, typer.Option(help="Which neurons stay: activation, magnitude or first.")] = "activation",
    repair: Annotated[
        bool, typer.Option("--repair/--no-repair", help="Make up for dropped layers and neurons by least squares.")
    ] = True,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads to keep.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size to keep.")] = None,
) -> None:
    """Remove layers, MLP neurons, KV groups or hidden dimensions from a model.

    The parts to remove are chosen by scores on text.
    """
    from distill.recipe import Cut, parse_section

    asked = {
        "layers": layers,
        "layer_rule": layer_rule,
        "drop_layers": drop_layers,
        "mlp_width": mlp_width,
        "mlp_rule": mlp_rule,
        "layer_repair": repair,
        "mlp_repair": repair,
        "kv_heads": kv_heads,
        "hidden": hidden,
    }
    settings = parse_section(Cut, {name: value for name, value in asked.items() if value is not None})
    if all(size is None for size in (layers, drop_layers, mlp_width, kv_heads, hidden)):
        raise RecipeError("nothing to cut", "give --layers, --drop-layers, --mlp-width, --kv-heads or --hidden")
    if not text:
        raise RecipeError("cuts are scored on text", "give --text FILE or --text FOLDER")
    texts = read_texts(text)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if is_verbose():
        transformers.utils.logging.set_verbosity_info()
    from distill.surgery.cutter import cut_folder

    announce(out)
    judge = None if target is None else local_reference(target)
    for change in cut_folder(local_reference(source), out, settings, texts, judge):
        print(change.sentence())
    print(f"written: {out}")
