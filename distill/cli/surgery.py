"""`distill cut` and `distill transplant`: a smaller model, and one with the vocabulary of another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli.shared import local_reference, read_texts, refuse_idle, section_options, takes
from distill.errors import DataError, RecipeError
from distill.files import require_new_folder
from distill.progress import announce, is_verbose
from distill.recipe import Cut


@takes("cuts", section_options(Cut, "layers layer_rule drop_layers mlp_width layer_repair"))
def cut(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or hub name.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    text: Annotated[list[Path] | None, typer.Option(help="Text to score the cuts on.")] = None,
    target: Annotated[str | None, typer.Option(help="Model to measure KL to; by default the uncut model.")] = None,
    *,
    cuts: dict[str, Any],
) -> None:
    """Remove layers or MLP neurons from a model.

    The parts to remove are chosen by scores on text.
    """
    if not cuts.keys() & {"layers", "drop_layers", "mlp_width"}:
        raise RecipeError("nothing to cut", "give --layers, --drop-layers or --mlp-width")
    refuse_idle(
        context,
        ("layers" not in cuts, "layer_rule", "says which layers go where --layers says how many"),
        (
            not cuts.keys() & {"layers", "drop_layers"},
            "layer_repair",
            "is for dropped layers (--layers, --drop-layers)",
        ),
    )
    if not text:
        raise RecipeError("cuts are scored on text", "give --text FILE or --text FOLDER")
    texts = read_texts(text)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if is_verbose():
        transformers.utils.logging.set_verbosity_info()
    from distill import api

    announce(out)
    for change in api.cut(source, out, texts, target=target, **cuts):
        print(change.sentence())
    print(f"written: {out}")


def transplant(
    donor: Annotated[str, typer.Argument(metavar="DONOR", help="Model folder or hub name that gives the weights.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Model or tokenizer folder with the vocabulary.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default as stored.")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="The target's text: what DONOR cannot draft.")] = None,
) -> None:
    """Give a model the vocabulary of another, byte for byte, so that it can draft for it."""
    from distill.surgery.transplant import folders_of
    from distill.surgery.transplant import transplant as write

    require_new_folder(out)
    texts = read_texts(text) if text else []
    folders = folders_of(local_reference(donor), local_reference(target))
    announce(out)
    change = write(*folders, out, dtype=dtype)
    print(change.sentence())
    print("\n".join(report_lines(change.details)))
    if texts:
        print(gain_line(texts, *folders))
    print(f"written: {out}")


def gain_line(texts: list[str], donor: Path, target: Path) -> str:
    """The gain of the transplant: the share of the texts' target tokens that the donor's vocabulary lacks."""
    from collections import Counter

    from distill.decoding.other_vocabulary import transplant_gain
    from distill.engines.torch.hugging_face import encode, load_tokenizer
    from distill.vocabulary.vocabulary import Vocabulary

    tokenizer = load_tokenizer(str(target))
    counts = Counter(token for text in texts for token in encode(tokenizer, text))
    if not counts:
        raise DataError("--text holds no text", "give text that the target wrote, or leave it out")
    found = transplant_gain(counts, Vocabulary.read(target), Vocabulary.read(donor), worst=5)
    missing = ", ".join(f"{token!r} {share:.1%}" for token, share in found["missing"])
    return (
        f"of {counts.total()} tokens of the text, {found['gain']:.1%} are not in the donor's vocabulary: without a "
        f"transplant it cannot draft them{f' ({missing})' if missing else ''}"
    )


def report_lines(details: dict[str, Any]) -> list[str]:
    """The rows of a transplant by origin, its special tokens and its longest rows, as lines of text."""
    lines = [
        f"rows: {details['rows']}, of them {details['copies']} exact copies ({details['copy_share']:.1%}), "
        f"{details['means']} of {details['subtokens_per_mean']:.2f} subtokens on average, {details['unused']} unused, "
        f"{details['padding_rows']} padding, {details['zeros']} zero",
        f"special tokens: {details['overrides']} by override, {details['roles']} by role, {details['same_special']} by "
        f"name, {details['special_as_text']} from their text",
        f"tokens with the bytes of another: {details['duplicates']}; invalid UTF-8 alone: {details['not_utf8_alone']}",
    ]
    for row in details["special_tokens"][:20]:
        lines.append(f"  {row['token']!r} <- {' '.join(map(repr, row['subtokens']))} ({row['how']})")
    if len(details["special_tokens"]) > 20:
        lines.append(f"  and {len(details['special_tokens']) - 20} more, in surgery.json")
    if details["worst"]:
        lines.append("most subtokens:")
    lines += [f"  {row['token']!r} <- {' '.join(map(repr, row['subtokens']))}" for row in details["worst"][:5]]
    return lines
