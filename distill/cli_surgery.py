"""The commands that make one model folder out of another: `distill transplant` and `distill cut`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from distill.errors import DataError, RecipeError


def transplant(
    donor: Annotated[str, typer.Argument(metavar="DONOR", help="Model folder or hub name that gives the weights.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Model or tokenizer folder with the vocabulary.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    override: Annotated[
        list[str] | None,
        typer.Option("--override", metavar="TOKEN=TEXT", help="Start a target token from a text's donor tokens."),
    ] = None,
    method: Annotated[
        str, typer.Option("--method", help="pieces or pursuit, for tokens that are no copies.")
    ] = "pieces",
    decay: Annotated[float, typer.Option("--decay", help="Weight of each piece over the one before.")] = 0.5,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; as stored if left out.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", help="Embedding rows, where TARGET has no config.json to say.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Text of the target: says how much of it DONOR could not draft as it is."),
    ] = None,
) -> None:
    """Give a model the vocabulary of another, byte for byte, so that it can draft for it."""
    overrides: dict[str, str] = {}
    for pair in override or []:
        token, equals, said = pair.partition("=")
        if not equals or not token:
            raise RecipeError(f"--override {pair}: no `=` between token and text", "write --override '<|user|>=User:'")
        overrides[token] = said
    from distill.models.hugging_face import local_folder
    from distill.surgery.transplant import transplant as write

    texts = read_texts(text or [])
    folders = [local_folder(name) for name in (donor, target)]
    change = write(
        folders[0], folders[1], out, rows=rows, overrides=overrides, method=method, decay=decay, dtype=dtype  # type: ignore[arg-type]
    )
    print(change.sentence())
    print("\n".join(report_lines(change.details)))
    if texts:
        print(gain_line(texts, *folders))
    print(f"written: {out}")


def gain_line(texts: list[str], donor: Path, target: Path) -> str:
    """What the transplant opens: the share of the texts' target tokens that the donor's vocabulary lacks."""
    from collections import Counter

    from distill.models.hugging_face import encode, load_tokenizer
    from distill.speculative.translate import transplant_gain
    from distill.vocabulary import Vocabulary

    tokenizer = load_tokenizer(str(target))
    counts = Counter(token for text in texts for token in encode(tokenizer, text))
    if not counts:
        raise DataError("--text holds no text", "give text that the target wrote, or leave it out")
    found = transplant_gain(counts, Vocabulary.read(target), Vocabulary.read(donor), worst=5)
    missing = ", ".join(f"{token!r} {share:.1%}" for token, share in found["missing"])
    return (
        f"of {counts.total()} tokens of the text, {found['gain']:.1%} are of the target alone, which the donor "
        f"as it is could never draft{f': {missing}' if missing else ''}"
    )


def report_lines(details: dict[str, Any]) -> list[str]:
    """What a transplant did to the rows, in words."""
    lines = [
        f"rows: {details['rows']}, of them {details['copies']} exact copies ({details['copy_share']:.1%}), "
        f"{details['means']} of {details['pieces_per_mean']:.2f} pieces on average, {details['unused']} unused, "
        f"{details['padding_rows']} padding, {details['zeros']} zero",
        f"special tokens: {details['overrides']} by override, {details['roles']} by role, {details['same_special']} by "
        f"name, {details['special_as_text']} from their text",
        f"tokens with the bytes of another: {details['duplicates']}; no UTF-8 alone: {details['not_utf8_alone']}",
    ]
    for row in details["special_tokens"][:20]:
        lines.append(f"  {row['token']!r} <- {' '.join(map(repr, row['pieces']))} ({row['how']})")
    if len(details["special_tokens"]) > 20:
        lines.append(f"  and {len(details['special_tokens']) - 20} more, in surgery.json")
    if details["worst"]:
        lines.append("most pieces:")
    lines += [f"  {row['token']!r} <- {' '.join(map(repr, row['pieces']))}" for row in details["worst"][:5]]
    return lines


def cut(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or hub name.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="Text file, or folder of them, that scores are collected on.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Whose laws KL is measured to; the uncut model if left out.")
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
    from distill.recipe import DraftCut, parse_section

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
    settings = parse_section(DraftCut, {name: value for name, value in asked.items() if value is not None})
    if all(size is None for size in (layers, drop_layers, mlp_width, kv_heads, hidden)):
        raise RecipeError("nothing to cut", "name --layers, --drop-layers, --mlp-width, --kv-heads or --hidden")
    if not text:
        raise RecipeError("cuts are scored on text", "give --text FILE or --text FOLDER")
    texts = read_texts(text)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    from distill.surgery.bare import cut_folder

    for change in cut_folder(source, out, settings, texts, target):
        print(change.sentence())
    print(f"written: {out}")


def read_texts(paths: list[Path]) -> list[str]:
    """The text of files and of all files below folders; raises DataError for one that is missing or not UTF-8."""
    found = []
    for path in paths:
        if not path.exists():
            raise DataError(f"text {path} does not exist", "correct --text")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                try:
                    found.append(file.read_text(encoding="utf-8"))
                except UnicodeDecodeError as error:
                    if not path.is_dir():
                        raise DataError(f"{file} is not UTF-8: {error}", "convert it, or use another file") from error
    return found
