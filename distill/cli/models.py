"""Commands that write models and files for servers: `cut`, `transplant`, `export-gguf`, `export-lookup` and
`import-gguf`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from distill.cli import shared
from distill.errors import DataError, RecipeError
from distill.files import is_gguf, over, parts_of, read_utf8, require_new_folder
from distill.progress import announce, note, warn
from distill.recipe import resolve_model
from distill.recipe.configuration import USUAL_LENGTH
from distill.recipe.measuring import OUTTYPES, UNQUANTISED
from distill.recipe.recipe import assigned, not_loadable

if TYPE_CHECKING:
    from distill.export import Parity
    from distill.gguf.fields import Origin
    from distill.gguf.writer import WrittenFile

# ── `distill cut` and `distill transplant` ──


def cut(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or hub name.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    text: Annotated[
        list[Path] | None, typer.Option(help="File or folder of text to score the cuts on. Repeatable.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Model that KL is measured against. The default is the uncut model.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers to keep.")] = None,
    mlp_width: Annotated[int | None, typer.Option(min=1, help="Neurons to keep in each MLP.")] = None,
) -> None:
    """Remove layers or MLP neurons from a model, chosen by scores on text."""
    cuts = {"layers": layers, "mlp_width": mlp_width}
    if not text:
        raise RecipeError("cuts are scored on text", "give --text FILE or --text FOLDER")
    texts = shared.read_texts(text)
    shared.prepare(None)
    from distill import api

    announce(out)
    for change in api.cut(source, out, texts, target=target, **cuts):
        print(change.sentence())
    print(f"written: {out}")


def transplant(
    donor: Annotated[str, typer.Argument(metavar="DONOR", help="Model folder or hub name that gives the weights.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Model or tokenizer folder with the vocabulary.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. The default is the stored type.")
    ] = None,
) -> None:
    """Give a model the vocabulary of another, byte for byte, so that it can draft for it."""
    from distill.surgery.vocabulary import folders_of
    from distill.surgery.vocabulary import transplant as write

    require_new_folder(out)
    folders = folders_of(resolve_model(donor), resolve_model(target))
    announce(out)
    change = write(*folders, out, dtype=dtype)
    print(change.sentence())
    print("\n".join(report_lines(change.details)))
    print(f"written: {out}")


def report_lines(details: dict[str, Any]) -> list[str]:
    """Describe a transplant in lines of text: rows by origin, special tokens, longest rows."""
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


# ── `distill export-gguf` ──

COMPARED = 512  # compared in each check
UNWEIGHED = (*UNQUANTISED, "q8_0")  # types for which llama.cpp reads no importance matrix


def export_gguf(
    invocation: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="[RUN|MODEL]", help="Run, or Hugging Face folder.")] = None,
    adapter: shared.AdapterOption = None,
    outtype: Annotated[
        list[str] | None, typer.Option(help=f"One of {shared.FILE_TYPES}. Repeatable. The default is f16 and q8_0.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--to", help="Folder for the files. The default for a run is its folder gguf/extra.")
    ] = None,
    tensor_type: Annotated[
        list[str] | None, typer.Option(help="PATTERN=TYPE: another of these types for some tensors. Repeatable.")
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(help="Importance matrix by llama-imatrix, or a text to compute one.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text to check on, instead of built-in texts.")] = None,
    target: Annotated[
        Path | None, typer.Option(help="The target's GGUF file. The command that serves the pair is printed.")
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare each file with its source.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
) -> None:
    """Write GGUF files of a run's draft and target, or of a folder of a supported family (docs/export.md)."""
    if not check:
        shared.refuse(invocation, "with --no-check", "text")
    kinds = outtype or ["f16", "q8_0"]
    shared.require_known("--outtype", kinds, OUTTYPES)
    overrides = tuple(
        assigned(value, "--tensor-type", "PATTERN=TYPE, such as token_embd=q4_0") for value in tensor_type or ()
    )
    unweighed = [] if imatrix is None or overrides else [kind for kind in kinds if kind in UNWEIGHED]
    from distill.export import Original, check_texts, compare, faults_of, importance_of
    from distill.gguf.writer import export_files

    if unweighed:
        warn(f"--imatrix changes nothing in {' and '.join(unweighed)}")
    sources, place = _find(invocation, model, runs, adapter)
    place = folder or place
    outputs = {name: {place / f"{name}-{kind}.gguf": kind for kind in kinds} for name in sources}
    there = [path for paths in outputs.values() for path in paths if path.exists()]
    if there and not overwrite:
        raise DataError(f"{there[0]} exists already", "--overwrite replaces it; --to FOLDER writes elsewhere")
    announce(place)
    faults: list[str] = []
    for name, (source, origin) in sources.items():
        importance = None if imatrix is None else importance_of(imatrix, source)
        reports = export_files(source, outputs[name], origin, overrides, importance)
        texts = check_texts(source) if text is None else [read_utf8(text)]
        opened = Original.open(source) if check else None
        for report in reports:
            parity = None if opened is None else compare(opened, report.path, texts, COMPARED)
            _print(report, parity)
            if parity is not None:
                faults += [f"{report.path}: {fault}" for fault in faults_of(parity, report.outtype)]
            if target is not None and name != "target":
                faults += _served(target, report.path)
    if faults:
        raise DataError("; ".join(faults), "the file was written; do not use it for what it does not pass")


def _find(
    invocation: typer.Context, model: str | None, runs: Path, adapter: str | None
) -> tuple[dict[str, tuple[Path, Origin]], Path]:
    """Return the models to export by name, and the folder for the files. A run exports its draft and target."""
    from distill.engines.torch.hugging_face import local_folder
    from distill.folders import refuse_adapter
    from distill.gguf.fields import NO_ORIGIN

    if model is not None and (found := parts_of(shared.model_of(model, adapter)))[1] is not None:
        return {Path(str(found[1])).name: (local_folder(over(found[0], str(found[1]))), NO_ORIGIN)}, Path(".")
    shared.refuse(invocation, "with a run, whose recipe names the adapter", "adapter", hint="name MODEL")
    if model is not None:
        refuse_adapter(Path(model))
    if model is not None and (Path(model) / "config.json").exists():
        return {Path(model).resolve().name: (Path(model), NO_ORIGIN)}, Path(".")
    if model is not None and is_gguf(model):
        return {Path(model).stem: (local_folder(resolve_model(model)), NO_ORIGIN)}, Path(".")
    from distill.export import origins

    recipe, run = shared.find_run(model, runs)
    shared.run_until(recipe, run, "train")
    run.verify("train", "draft/*")
    known = origins(recipe, run)
    sources = {"draft": (run.path("draft"), known["draft"])}
    if is_gguf(recipe.target.model):
        note(f"the target is served as it is: {recipe.target.model}")
    elif (reason := not_loadable(recipe)) is None:
        sources["target"] = (local_folder(recipe.target.model), known["target"])
    else:
        print(f"no file of the target is written: {reason}", file=sys.stderr)
    return sources, run.path("gguf", "extra")


def _print(report: WrittenFile, parity: Parity | None) -> None:
    line = f"{report.path}  {report.bytes / 1e6:.1f} MB  {report.tensors} tensors"
    if report.fallback_tensors:
        line += f", {report.fallback_tensors} in a larger type: their rows do not fit {report.outtype}'s blocks"
    for left_out in report.notes:
        warn(f"{report.path.name}: {left_out}")
    print(f"{line}  {'not checked' if parity is None else parity.words}")


def _served(target: Path, draft: Path) -> list[str]:
    """Print the command that serves the pair, or return llama.cpp's reason not to."""
    from distill.engines.pairs import compare_pair
    from distill.engines.server_commands import llama_server

    report = compare_pair(str(target), str(draft))
    if report.llama_cpp is not None:
        reason, remedy = report.llama_cpp
        return [f"{draft} does not fit {target} by llama.cpp's rule: {reason} ({remedy})"]
    print(llama_server(str(target), str(draft), USUAL_LENGTH))
    return []


# ── `distill export-lookup` ──


def export_lookup(
    name: shared.RunArgument = None,
    server: Annotated[
        Literal["llama.cpp", "ik_llama", "sglang", "vllm"], typer.Option("--for", help="Server that reads the file.")
    ] = "llama.cpp",
    to: Annotated[Path | None, typer.Option(help="File to write. The default lies in the run's folder lookup.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    runs: shared.RunsOption = shared.DEFAULT_RUNS,
) -> None:
    """Write n-grams of a run's train answers, from which servers draft without a draft model (docs/serving.md)."""
    if to is not None and not to.resolve().parent.is_dir():
        raise DataError(f"there is no folder {to.resolve().parent}", "make it, or correct --to")
    recipe, run = shared.find_run(name, runs)
    from distill.decoding.lookup_files import FORMS
    from distill.decoding.lookup_files import export_lookup as export
    from distill.engines.server_commands import drafting_from_texts

    path = to or run.path("lookup", FORMS[server][0])
    if path.exists() and not overwrite:
        raise DataError(f"{path} exists already", "--overwrite replaces it; --to FILE writes elsewhere")
    announce(path)
    content, texts, tokens = export(recipe, run, server, path)
    size = f"{path.stat().st_size / 1e6:.2f} MB"
    print(f"{path}  {size}  {content}, of {texts} answers, {tokens} tokens")
    ending = ".gguf" if server in ("llama.cpp", "ik_llama") else ""
    target = recipe.target.model if is_gguf(recipe.target.model) == bool(ending) else f"TARGET{ending}"
    print(drafting_from_texts(server, target, str(path), texts, tokens, recipe.sampling))


# ── `distill import-gguf` ──


def import_gguf(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file of a model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of all weights. The default keeps floats and dequantises to float32."),
    ] = None,
) -> None:
    """Write a GGUF file as a Hugging Face folder: dequantised weights, config.json, tokenizer, chat template.

    Other commands and recipes take a GGUF file as a model and import it themselves.
    """
    require_new_folder(out)
    from distill.gguf.importing import read_import, write_import

    found = read_import(file, dtype)
    announce(out)
    write_import(found, out)
    config, ids = found.config, found.tokenizer.content["model"]["vocab"]
    ends = ", ".join(found.tokenizer.tokens[token] for token in found.tokenizer.ends)
    kinds = f"; {', '.join(found.quantised)} dequantised" if found.quantised else ""
    print(
        f"{out}  {config['model_type']}, {config['num_hidden_layers']} layers of {config['hidden_size']}, "
        f"{len(found.tensors)} tensors, {found.bytes / 1e6:.0f} MB in {config['dtype']}{kinds}{found.tied}"
    )
    template = "a chat template" if found.tokenizer.templates else "no chat template"
    print(f"tokenizer: {len(ids)} tokens, {template}, an answer ends with {ends}{found.retyped}")
