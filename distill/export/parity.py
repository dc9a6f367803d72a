"""Stage `export`: GGUF files of draft and target, read back and compared with the folders that they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.data.texts import first_difference, read_documents_of
from distill.divergences import forward_kl
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.torch.hugging_face import encode_text, load_model, load_tokenizer, local_folder
from distill.engines.torch.model import model_name
from distill.errors import DataError, DistillError
from distill.export.results import ExportedFile, ExportReport, Parity
from distill.files import read_result, write_result
from distill.gguf.fields import PROBE, Advice, Origin, as_llama_reads
from distill.gguf.head import open_head
from distill.gguf.importing import file_type
from distill.gguf.shape import Shape, read_shape
from distill.gguf.writer import WrittenFile, export_files, own_file
from distill.measuring.speedup_results import SpeedupReport
from distill.recipe import Recipe
from distill.recipe.configuration import P_MIN
from distill.recipe.load import is_path
from distill.recipe.recipe import REASON
from distill.run import Run
from distill.sampler import place_of, require_finite
from distill.vocabulary.files import tokenizer_content, with_opening

WINDOW = 256
# Texts for a comparison where none are given: cases that tokenizers handle differently.
PROSE = """The lighthouse keeper had kept the same log for thirty-one years: wind, sea, visibility, ships. On the first
of March he wrote nothing but the date. Nobody noticed until the inspector came in June, by which time the page had
yellowed and the keeper had taken up bees. "What happened that day?" the inspector asked. "The fog lifted," he said,
"and there was nothing to write down." They drank tea. The inspector's report, which ran to four pages, recommended a
new lens, a second chair and, in a footnote that his superiors crossed out, a holiday.
"""
CODE = '''def moving_average(values: list[float], width: int) -> list[float]:
    """The mean of each window of `width` values."""
    if width < 1 or width > len(values):
        raise ValueError(f"width must lie between 1 and {len(values)}, got {width}")
    total = sum(values[:width])
    result = [total / width]
    for old, new in zip(values, values[width:]):
        total += new - old
        result.append(total / width)
    return result


for index, mean in enumerate(moving_average([1.0, 2.5, 4.0, 8.25], 2)):
    print(index, round(mean, 2))  # 1.75, 3.25, 6.12
'''
NASTY = (
    "  ",
    "   leading, and trailing   ",
    "\n\n\n\n\t\t  \r\n \r\n",
    "I'LL we'Re don't 'S 12345678 3.14 1e-9 ١٢٣ ½ Ⅷ",
    "naïve Ünïcödé 你好，世界。 こんにちは 한국어 नमस्ते ไทย",
    "שלום עולם مرحبا بالعالم \u200f(abc)\u200e",
    "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 \u200b\u00a0\u3000\u2028",
    "if x:\n        return {'a': [1, 2, 3]}  # !!! ??? --- ===\n",
    "a\u0302\u0323 q\u0307\u0323 z\u0335",
)
MAX_SPECIAL = 1024  # added tokens that are tried; vocabularies with more hold numbered fillers
# By bits: the most mean KL (nats) and the least agreement of argmaxes that rounding to a type explains. A wrong tensor,
# order or scale gives far more.
LIMITS: dict[int, tuple[float, float]] = {32: (1e-3, 0.97), 16: (0.01, 0.95), 8: (0.05, 0.9), 6: (0.15, 0.8)}
LIMITS |= {5: (0.4, 0.7), 4: (1.0, 0.5), 3: (3.0, 0.1), 2: (6.0, 0.0)}


@dataclass(frozen=True)
class Source:
    """A Hugging Face folder, opened to compare several files with it."""

    folder: Path
    shape: Shape
    tokenizer: Any
    model: Any

    @classmethod
    def open(cls, folder: Path) -> Source:
        """Load the model in fp32, and its tokenizer; raises DataError where they cannot be loaded."""
        shape, tokenizer = read_shape(folder), load_tokenizer(str(folder))
        return cls(folder, shape, tokenizer, load_model(str(folder), "float32", torch.device("cpu"), trimmed=False))


def compare(source: Source, gguf: Path, texts: list[str], positions: int) -> Parity:
    """Compare ids on all `texts` and logits on the first `positions` positions, in windows of at most 256 tokens.

    Raises DataError when the file cannot be loaded, the vocabularies differ in size, or the texts hold no position.
    """
    window = min(WINDOW, source.shape.context)
    with GgufModel(gguf, context=window, batch=window) as quantised:
        if quantised.head_rows != source.shape.vocabulary:
            raise DataError(
                f"{gguf} has {quantised.head_rows} rows, {source.folder} has {source.shape.vocabulary}",
                hint="compare a GGUF file with the folder it was exported from",
            )
        mismatches = list(_mismatches(source.tokenizer, quantised, texts))
        same_top, differences, divergences = 0, list[float](), list[float]()
        for part in _parts(source.tokenizer, texts, positions, window):
            reference, actual = _log_probabilities(source.model, quantised, part)
            following = torch.tensor(part[1:])[:, None]
            differences += (reference.gather(1, following) - actual.gather(1, following)).abs()[:, 0].tolist()
            divergences += forward_kl(reference, actual).tolist()
            same_top += int((reference.argmax(-1) == actual.argmax(-1)).sum())
    if not differences:
        raise DataError("the texts hold no two consecutive tokens to compare", hint="give longer texts")
    return Parity(
        positions=len(differences),
        top1_agreement=same_top / len(differences),
        mean_abs_dlogprob=sum(differences) / len(differences),
        max_abs_dlogprob=max(differences),
        tokenizer_texts=len(texts),
        tokenizer_mismatches=mismatches,
        kl=sum(divergences) / len(divergences),
    )


def compared(
    report: WrittenFile, name: str, run: Run | None, source: Source | None, texts: list[str], positions: int
) -> ExportedFile:
    """A file of the model `name`, by its place in the run where it lies there, with what the comparison with its source
    found; without one it is not compared."""
    place = report.path.resolve()
    if run is not None and place.is_relative_to(run.folder.resolve()):
        place = place.relative_to(run.folder.resolve())
    parity = None if source is None else compare(source, report.path, texts, positions)
    faults = [] if parity is None else faults_of(parity, report.outtype)
    return ExportedFile(str(place), name, report.outtype, report.bytes, report.fallback_tensors, parity, faults)


def faults_of(parity: Parity, outtype: str) -> list[str]:
    """What is wrong with a file of this type: texts with other ids, a KL or an agreement beyond the type's limits."""
    faults = []
    if parity.tokenizer_mismatches:
        text, token = parity.tokenizer_mismatches[0]
        faults.append(
            f"{len(parity.tokenizer_mismatches)} of {parity.tokenizer_texts} texts have other token ids, the first at "
            f"token {token} of text {text}"
        )
    bits = {"f32": 32, "f16": 16, "bf16": 16}.get(outtype) or int(next(filter(str.isdigit, outtype), "2"))
    max_kl, min_agreement = LIMITS[min(LIMITS, key=lambda known: abs(known - bits))]
    if not parity.kl <= max_kl:
        faults.append(f"the mean KL is {parity.kl:.3g} nats, more than {max_kl} for {outtype}")
    # Flat distributions change their first token at a KL near 0.
    if parity.top1_agreement < min_agreement and parity.kl > max_kl / 10:
        faults.append(f"{parity.top1_agreement:.1%} of the argmaxes agree, less than {min_agreement:.0%} for {outtype}")
    return faults


def _mismatches(tokenizer: Any, quantised: GgufModel, texts: list[str]) -> Iterator[tuple[int, int]]:
    """The number of each text with other ids, and the first place where they differ."""
    for index, text in enumerate(texts):
        plain = as_llama_reads(tokenizer.backend_tokenizer, text)
        ids = with_opening(quantised.tokenize(plain, True), quantised.opening)
        position = first_difference(encode_text(tokenizer, text), ids)
        if position is not None:
            yield index, position


def _parts(tokenizer: Any, texts: list[str], positions: int, window: int) -> Iterator[list[int]]:
    """Parts of the texts of at most `window` tokens, in which at most so many positions are predicted."""
    for text in texts:
        ids = encode_text(tokenizer, text)
        for start in range(0, len(ids) - 1, window - 1):
            # One token of overlap, so that every token but the first is predicted once.
            part = ids[start : start + window][: positions + 1]
            if len(part) < 2:
                return
            positions -= len(part) - 1
            yield part


def _log_probabilities(model: Any, quantised: GgufModel, part: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities [positions, V] of both models after each token of a part but its last."""
    with torch.inference_mode():
        logits = model(torch.tensor([part])).logits[0, :-1, : quantised.vocabulary_size]
    require_finite(logits.amax(-1).tolist(), place_of(model_name(model), range(1, len(part))))
    quantised.rollback([0])
    output = quantised.extend(part, want=range(len(part) - 1))
    actual = output.full().log_softmax(-1)
    require_finite(actual.amax(-1).tolist(), output.place)
    return logits.float().log_softmax(-1), actual


def check_texts(folder: Path) -> list[str]:
    """Prose, code and the nasty texts, then every added token of the folder's tokenizer by itself."""
    added = tokenizer_content(folder / "tokenizer.json").get("added_tokens") or []
    return [PROSE, CODE, *PROBE, *NASTY, *(token["content"] for token in added[:MAX_SPECIAL])]


# ── Where the models of a run come from, and how its draft is best used, for the head of their GGUF files ──


def origins(recipe: Recipe, run: Run) -> dict[str, Origin]:
    """The origins of a run's draft and target, by name, without advice: see `advice_of`."""
    donor = recipe.donor_model
    draft = Origin(
        name=f"{recipe.name} draft",
        recipe=recipe.name,
        base_model=None if is_path(donor) else donor,
        licence=_licence(donor, run),
        datasets=tuple(source.path for source in recipe.corpus.sources if source.kind == "hub"),
    )
    return {"draft": draft, "target": Origin(f"{recipe.name} target")}


def _licence(donor: str, run: Run) -> str | None:
    """The licence in the donor's model card; a line in the log where the card cannot be read."""
    import yaml
    from gguf import Metadata

    try:
        licence = Metadata.load_model_card(local_folder(donor)).get("license")
    except (DistillError, OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        run.say(f"  the licence of {donor} is not known: {str(error).split(chr(10), 1)[0]}")
        return None
    return licence if isinstance(licence, str) else None


def advice_of(run: Run) -> Advice | None:
    """The fastest greedy way of a run's speedup that llama.cpp has too: a fixed length, or a floor of the draft's
    probability; None where it advises against drafting."""
    report = read_result(run.path("speedup.json"), SpeedupReport)
    floors = {
        configuration.title: configuration
        for configuration in run.recipe.speedup.configurations
        if configuration.drafter == "draft" and configuration.rule == "p_min"
    }
    tried = [
        measurement
        for measurement in report.measurements
        if measurement.sampler is None and (measurement.length or measurement.configuration in floors)
    ]
    backend = "gguf" if any(measurement.backend == "gguf" for measurement in tried) else "pytorch"
    tried = [measurement for measurement in tried if measurement.backend == backend and measurement.speedup > 1]
    if not tried:
        return None
    best = max(tried, key=lambda measurement: measurement.speedup)
    floor = floors.get(best.configuration)
    if floor is not None:
        return Advice(floor.max_length, P_MIN if floor.p_min is None else floor.p_min)
    return Advice(best.length or 0, 0.0 if floors else None)


# ── The stage ──

POSITIONS = 2000  # of test texts, on which each file is compared with transformers in float32


def export(recipe: Recipe, run: Run) -> list[Path]:
    """Write gguf/MODEL-OUTTYPE.gguf for draft and target, and gguf/export.json with the parity of each file.

    Without `export.outtypes` no model is opened: GGUF may not hold it. A target that the recipe never loads is left
    out. One that is a GGUF file is not written again: its own file is compared with the folder that it is imported to.
    The files say nothing that was timed, so that their bytes depend on the models alone; `distill export-gguf RUN` adds
    the draft length.
    """
    folder = run.path("gguf")
    files: list[ExportedFile] = []
    if not recipe.export.outtypes:
        run.say("  no file is written: export.outtypes is empty")
        write_result(folder / "export.json", ExportReport(run.command, files))
        return [folder]
    texts = read_documents_of(run, "test")
    sources = {"draft": run.path("draft")}
    own = own_file(recipe)
    if recipe.target.load:
        sources["target"] = local_folder(recipe.target.model)
    else:
        run.say(f"  no file of the target is written: {REASON}")
    origin_of = origins(recipe, run)
    for name, folder_of_model in sources.items():
        if name == "target" and own is not None:
            head = open_head(own)
            reports = [WrittenFile(own, file_type(own), head.bytes, len(head.shapes), 0)]
        else:
            outputs = {folder / f"{name}-{outtype}.gguf": outtype for outtype in recipe.export.outtypes}
            reports = export_files(folder_of_model, outputs, origin_of[name])
        source = Source.open(folder_of_model)
        for report in reports:
            file = compared(report, name, run, source, texts, POSITIONS)
            assert file.parity is not None
            run.say(f"  {report.path.name}: {report.bytes / 1e6:.1f} MB, {file.parity.words}")
            for fault in (*report.notes, *file.faults):
                run.say(f"  {report.path.name}: {fault}", warning=True)
            files.append(file)
    write_result(folder / "export.json", ExportReport(run.command, files))
    return [folder]


def record_extra(run: Run, files: Sequence[ExportedFile]) -> Path:
    """Add the files of `distill export-gguf RUN` to gguf/extra/export.json, in place of earlier ones at their paths.

    gguf/export.json is an artifact of the stage and stays as it is.
    """
    path = run.path("gguf", "extra", "export.json")
    new = {file.path for file in files}
    old = read_result(path, ExportReport).files if path.exists() else []
    write_result(path, ExportReport(run.command, [*(file for file in old if file.path not in new), *files]))
    return path
