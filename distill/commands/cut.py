"""`distill cut`: makes a model smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distill.commands.shared import read_texts
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
    layer_rule: Annotated[str, typer.Option(help="Which layers go: auto, greedy, influence or last-but-one.")] = "auto",
    drop_layers: Annotated[str | None, typer.Option(help="Layers to drop, by number: 14-21 or 3,7.")] = None,
    mlp_width: Annotated[int | None, typer.Option(help="MLP neurons to keep per layer.")] = None,
    repair: Annotated[
        bool, typer.Option("--repair/--no-repair", help="Make up for dropped layers by least squares.")
    ] = True,
) -> None:
    """Remove layers or MLP neurons from a model.

    The parts to remove are chosen by scores on text.
    """
    settings = {
        "layers": layers,
        "layer_rule": layer_rule,
        "drop_layers": drop_layers,
        "mlp_width": mlp_width,
        "layer_repair": repair,
    }
    if all(size is None for size in (layers, drop_layers, mlp_width)):
        raise RecipeError("nothing to cut", "give --layers, --drop-layers or --mlp-width")
    if not text:
        raise RecipeError("cuts are scored on text", "give --text FILE or --text FOLDER")
    texts = read_texts(text)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if is_verbose():
        transformers.utils.logging.set_verbosity_info()
    from distill import api

    announce(out)
    for change in api.cut(source, out, texts, target=target, **settings):
        print(change.sentence())
    print(f"written: {out}")
