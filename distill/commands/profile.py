"""`distill profile`: measures the cost curve of one model on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distill import MOST_PRIMITIVES, PRIMITIVES
from distill.commands import shared
from distill.commands.gguf_options import require_used, takes_gguf_options
from distill.errors import DataError, RecipeError
from distill.machine import thread_count
from distill.progress import announce
from distill.recipe import Gguf, PyTorch, Target
from distill.tables import Cell, Row, Table

if TYPE_CHECKING:
    from distill.speculative.costs.curve import CostCurve


@takes_gguf_options("target")
def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder, hub name or GGUF file.")],
    depths: Annotated[str, typer.Option(help="Tokens already in the cache, separated by commas.")] = "64,512",
    max_tokens: Annotated[int, typer.Option(min=2, max=64, help="Measure steps of 1 to this many tokens.")] = 64,
    repeats: Annotated[int, typer.Option(min=5, help="Repeats per step; the median counts.")] = 7,
    dtype: Annotated[str, typer.Option(help=shared.DTYPE_HELP)] = "float32",
    static: Annotated[bool | None, typer.Option(help=shared.STATIC_HELP)] = None,
    compile: Annotated[bool | None, typer.Option(help=shared.COMPILE_HELP)] = None,
    prepack: Annotated[bool | None, typer.Option(help=shared.PREPACK_HELP)] = None,
    threads: shared.ThreadsOption = None,
    out: Annotated[Path | None, typer.Option(help="Also save the curve to this JSON file.")] = None,
    output: shared.FormatOption = "md",
    gguf: Gguf | None = None,
) -> None:
    """Measure the cost curve of one model on this machine.

    T(m) is the time of a step of m tokens, in seconds, with a given number of tokens (depth) in the cache.
    """
    shared.require_dtype_used(dtype, model)
    pytorch = shared.pytorch_settings(PyTorch(), model, static=static, compile=compile, prepack=prepack)
    place, places = shared.target_settings(model, dtype), shared.numbers(depths, "--depths", int)
    if min(places) < 1:
        raise RecipeError(f"--depths {depths}: a step follows at least one token", "for instance --depths 1,512,4096")
    curve = measured_curve(place, places, max_tokens, repeats, threads, gguf, pytorch)
    if out is not None:
        from distill.speculative.costs.curve import save_cost_curve

        announce(out)
        save_cost_curve(curve, out)
    rows: list[Row] = [
        [depth, m, Cell(seconds, ".6g"), Cell(seconds / row[0], ".3f")]
        for depth, row in zip(curve.depths, curve.seconds, strict=True)
        for m, seconds in enumerate(row, start=1)
    ]
    notes = [f"{curve.model}, {curve.backend}", *([f"Note: {curve.note}."] if curve.note else [])]
    table = Table(["depth", "m", f"T(m), {curve.unit}", "T(m) / T(1)"], rows)
    shared.print_blocks([*notes, table], None, output)


def measured_curve(
    place: Target,
    depths: list[int],
    max_tokens: int,
    repeats: int,
    threads: int | None,
    gguf: Gguf | None,
    pytorch: PyTorch,
) -> CostCurve:
    """The curve of a folder or a GGUF file on this machine; DataError or RecipeError where it cannot be opened."""
    from distill.speculative.costs.curve import measure_curve

    if os.environ.get(PRIMITIVES) == MOST_PRIMITIVES:
        # Sizes take turns, and each has primitives of its own: up to 64 of them would push one another out, and every
        # step would be timed with the compilation of its own. The process ends with the command.
        os.environ[PRIMITIVES] = str(2 * int(MOST_PRIMITIVES))
    model, room = place.model, max(depths) + max_tokens
    if model.endswith(".gguf"):
        from distill.models.gguf.model import GgufModel

        if not Path(model).is_file():
            raise DataError(f"there is no file {model}", "give a GGUF file or a Hugging Face folder")
        options = (gguf or Gguf()).target
        with GgufModel(model, context=room, threads=threads, options=options) as quantised:
            return measure_curve(quantised, model, "gguf", depths, max_tokens, repeats)
    require_used(gguf, model, None)
    import torch

    from distill.models.hugging_face import load_model, pick_device
    from distill.models.loaded import torch_decoder

    torch.set_num_threads(thread_count(threads))
    loaded = load_model(shared.local_reference(model), place.dtype, pick_device("auto"))
    decoder = torch_decoder(loaded, None, pytorch, room)
    title = model + pytorch.suffix + ("" if place.dtype == "float32" else f", {place.dtype}")
    return measure_curve(decoder, title, "pytorch", depths, max_tokens, repeats)
