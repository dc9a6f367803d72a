"""Stage `export`: GGUF files of draft and target, read back and compared with their folders. Importance matrices.

An importance matrix tells llama.cpp's quantiser which columns of a matrix meet large inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.data.samples import first_difference
from distill.divergences import forward_kl
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.torch.adapters import WRITTEN as MERGED
from distill.engines.torch.hugging_face import (
    encode_text,
    is_quantised,
    load_config,
    load_model,
    load_tokenizer,
    local_folder,
    text_folder,
)
from distill.engines.torch.model import model_name
from distill.errors import DataError, DistillError
from distill.files import is_gguf, parts_of, read_json, read_utf8, write_result
from distill.folders import Floats, stored_tensors, to_floats, weight_files
from distill.gguf.fields import Origin, Shape, configuration, read_shape
from distill.gguf.head import open_head, type_name
from distill.gguf.importing import file_type, rotary_factors
from distill.gguf.importing import sources as file_tensors
from distill.gguf.tokenizer import PROBE, as_llama_reads
from distill.gguf.writer import export_files, target_gguf
from distill.recipe import Recipe
from distill.recipe.recipe import is_path, not_loadable
from distill.run import Run
from distill.sampler import place_of, require_finite
from distill.surgery.layers import watching
from distill.teacher.distributions import head_logits
from distill.vocabulary.vocabulary import tokenizer_content, with_opening

# ── gguf/export.json as dataclasses ──


@dataclass(frozen=True)
class Parity:
    """Hugging Face in fp32 and GGUF compared on the same ids.

    Log-probabilities are in nats, for the token that really follows at least two others. `tokenizer_mismatches` holds
    (index of the text, first differing position). Texts that the Hugging Face normaliser changes are compared after
    it, because llama.cpp never normalises. `kl` is the mean KL in nats from Hugging Face's distributions to the file's.
    `adapter_left` is the result of the function of this name.
    """

    positions: int
    top1_agreement: float
    mean_abs_dlogprob: float
    max_abs_dlogprob: float
    tokenizer_texts: int
    tokenizer_mismatches: list[tuple[int, int]]
    kl: float
    adapter_left: float | None = None

    @property
    def words(self) -> str:
        """The figures in one line."""
        left = "" if self.adapter_left is None else f", {self.adapter_left:.0%} of the adapter's change left"
        return (
            f"top-1 {self.top1_agreement:.1%}, KL {self.kl:.2g}, mean |d log p| {self.mean_abs_dlogprob:.5f} over "
            f"{self.positions} positions after at least two tokens, {len(self.tokenizer_mismatches)} of "
            f"{self.tokenizer_texts} texts with other ids{left}"
        )


@dataclass(frozen=True)
class ExportedFile:
    """One GGUF file.

    `path` is relative to the run, or absolute for a file elsewhere. `model` is draft or target. `fallback_tensors` have
    another type, because the file's type did not fit their rows. `faults` lists what the comparison found wrong.
    `parity` is None for the user's own file of the target, which is the reference.
    """

    path: str
    model: str
    outtype: str
    bytes: int
    fallback_tensors: int
    parity: Parity | None
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExportReport:
    """gguf/export.json."""

    command: str
    files: list[ExportedFile]

    @property
    def faults(self) -> list[str]:
        """What the checks found wrong, after the file's name."""
        return [f"{file.path}: {fault}" for file in self.files for fault in file.faults]


# ── GGUF files, compared with their sources ──

WINDOW = 256
# Texts for a comparison if none are given: cases that tokenizers handle differently.
PROSE = """The lighthouse keeper had kept the same log for thirty-one years: wind, sea, visibility, ships. On the first
of March he wrote nothing but the date. Nobody noticed until the inspector came in June, by which time the page had
yellowed and the keeper had taken up bees. "What happened that day?" the inspector asked. "The fog lifted," he said,
"and there was nothing to write down." They drank tea. The inspector's report, which ran to four pages, recommended a
new lens, a second chair and, in a footnote that his superiors crossed out, a holiday.
"""
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
MAX_SPECIAL = 1024  # added tokens that are tried. Larger vocabularies contain numbered fillers.
# Bits -> the largest mean KL (nats) and the smallest argmax agreement that rounding to a type explains. A wrong tensor,
# order or scale gives far larger differences.
LIMITS: dict[int, tuple[float, float]] = {32: (1e-3, 0.97), 16: (0.01, 0.95), 8: (0.05, 0.9), 6: (0.15, 0.8)}
LIMITS |= {5: (0.4, 0.7), 4: (1.0, 0.5), 3: (3.0, 0.1), 2: (6.0, 0.0)}
# The least share of an adapter's change in a file. Rounding leaves most of it (0.85 was measured) or hardly any (0.04).
MIN_LEFT = 0.5


@dataclass(frozen=True)
class Original:
    """A Hugging Face folder, opened to compare several files with it. `references` caches log-probabilities by text."""

    folder: Path
    shape: Shape
    tokenizer: Any
    model: Any
    references: dict[tuple[tuple[int, ...], ...], list[Tensor]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Original:
        """Open the model in fp32, and its tokenizer. Raises DataError if they cannot be loaded."""
        return cls(folder, read_shape(folder), load_tokenizer(str(folder)), streamed(folder))

    @torch.inference_mode()
    def log_probabilities(self, parts: list[list[int]], columns: int) -> list[Tensor]:
        """Return log-probabilities [positions, V] of the first `columns` ids, after each token but the first and last.

        All parts go through the model at once, because each pass reads all weights.
        """
        key = tuple(map(tuple, parts))
        if key not in self.references:
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(part) for part in parts], batch_first=True)
            # No token sees the padding after it.
            hidden = self.model.base_model(ids, use_cache=False).last_hidden_state
            scored = torch.cat([hidden[row, 1 : len(part) - 1] for row, part in enumerate(parts)])
            logs = head_logits(self.model, scored)[:, :columns].log_softmax(-1)
            self.references[key] = list(logs.split([len(part) - 2 for part in parts]))
        by_part = self.references[key]
        for part, logs in zip(parts, by_part, strict=True):
            require_finite(logs.amax(-1).tolist(), place_of(model_name(self.model), range(2, len(part))))
        return by_part


def streamed(folder: Path) -> Any:
    """Return a folder's model in fp32 on the CPU, whose modules read their weights when they run and then free them.

    A pass holds only the largest module in memory. If transformers stores weights under other names, the model is
    loaded completely, in its own dtype.
    """
    from accelerate import init_empty_weights
    from accelerate.hooks import attach_align_device_hook
    from accelerate.utils import OffloadedWeightsLoader
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    config = load_config(str(folder))
    stored: dict[str, dict[str, str]] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            stored |= {
                name: {"safetensors_file": str(path), "weight_name": name, "dtype": "float32"}
                for name in file.keys()  # noqa: SIM118 - `file` is a handle, not a mapping.
            }
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.tie_weights()  # Empty weights are not tied.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    index = {
        name: stored.get(name) or stored.get(names[id(p)]) for name, p in model.named_parameters(remove_duplicate=False)
    }
    if is_quantised(config) or not all(index.values()):
        return load_model(str(folder), "auto", torch.device("cpu"), trimmed=False)
    attach_align_device_hook(model, torch.device("cpu"), offload=True, weights_map=OffloadedWeightsLoader(index=index))
    return model


def compare(source: Original, gguf: Path, texts: list[str], positions: int) -> Parity:
    """Compare ids on all `texts` and logits on the first `positions` positions, in windows of at most 256 tokens.

    The first position of a window is left out. If the tokenizer has no bos, the window starts with a single token.
    Models are not trained on single tokens, and rounding errors peak there: Qwen2.5-Coder's Q4_K_M file has a KL of 6
    nats instead of 0.002. Raises DataError if the file cannot be loaded, if the vocabularies differ in size, or if the
    texts have no position to compare.
    """
    window = min(WINDOW, source.shape.context)
    with GgufModel(gguf, context=window, batch=window) as quantised:
        if quantised.file.head_rows != source.shape.vocabulary:
            what = f"{gguf} has {quantised.file.head_rows} rows, but {source.folder} has {source.shape.vocabulary}"
            raise DataError(what, "compare a GGUF file with the folder it was exported from")
        mismatches = list(_mismatches(source.tokenizer, quantised, texts))
        same_top, differences, divergences = 0, list[float](), list[float]()
        parts = list(_parts(source.tokenizer, texts, positions, window))
        references = source.log_probabilities(parts, quantised.vocabulary_size) if parts else []
        for part, reference in zip(parts, references, strict=True):
            actual = _log_probabilities(quantised, part)
            following = torch.tensor(part[2:])[:, None]
            differences += (reference.gather(1, following) - actual.gather(1, following)).abs()[:, 0].tolist()
            divergences += forward_kl(reference, actual).tolist()
            same_top += int((reference.argmax(-1) == actual.argmax(-1)).sum())
    if not differences:
        raise DataError("the texts have no three consecutive tokens to compare", hint="give longer texts")
    return Parity(
        positions=len(differences),
        top1_agreement=same_top / len(differences),
        mean_abs_dlogprob=sum(differences) / len(differences),
        max_abs_dlogprob=max(differences),
        tokenizer_texts=len(texts),
        tokenizer_mismatches=mismatches,
        kl=sum(divergences) / len(divergences),
        adapter_left=adapter_left(source.folder, gguf),
    )


def adapter_left(folder: Path, gguf: Path) -> float | None:
    """Return the share of an adapter's change that a file of the merged folder has: about 1, or 0 if rounding undid it.

    The weights of a base that was quantised are levels of its type. If the merged weights are rounded to the same type,
    a small change goes back to the level that it came from, and the file is the base without the adapter. Texts that
    the adapter hardly changes do not show this. So the file's weights less the base's are projected on the change, over
    the matrices of the first, the middle and the last layer. None for a folder that no adapter was merged into, and if
    these layers or the base's weights are missing.
    """
    if not (folder / MERGED).is_file():
        return None
    base = Path(read_json(folder / MERGED, {"base": str})["base"])
    if not all(path.is_file() for path in weight_files(base)):
        return None
    before, after = (stored_tensors(place, tied=False) for place in (base, folder))
    head = open_head(gguf)
    tensors = file_tensors(head, configuration(head, rotary_factors(head)))
    layers = load_config(str(folder)).get_text_config().num_hidden_layers
    chosen = tuple(f"model.layers.{layer}." for layer in (0, layers // 2, layers - 1))
    product = square = 0.0
    for name in (name for name, tensor in tensors.items() if name.startswith(chosen) and len(tensor.shape) == 2):
        first = 0
        for part in tensors[name].parts():
            own, merged = (to_floats(of[name].rows(first, len(part)), of[name].dtype) for of in (before, after))
            first, change = first + len(part), merged - own
            product += float(np.sum((part - own) * change, dtype=np.float64))
            square += float(np.sum(change * change, dtype=np.float64))
    return product / square if square else None


def faults_of(parity: Parity, outtype: str) -> list[str]:
    """Return what is wrong with a file of this type: texts with other ids, and a KL or agreement beyond the limits."""
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
    # Flat distributions change their likeliest token at a KL near 0.
    if parity.top1_agreement < min_agreement and parity.kl > max_kl / 10:
        faults.append(f"{parity.top1_agreement:.1%} of the argmaxes agree, less than {min_agreement:.0%} for {outtype}")
    if parity.adapter_left is not None and parity.adapter_left < MIN_LEFT:
        faults.append(
            f"{max(parity.adapter_left, 0):.0%} of the adapter's change is left, and {outtype} rounded the rest away, "
            "as it does if the base was quantised to such a type: take q8_0 or f16, or a base in 16 bits"
        )
    return faults


def _mismatches(tokenizer: Any, quantised: GgufModel, texts: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the number of each text with other ids, and the first position where they differ."""
    for index, text in enumerate(texts):
        plain = as_llama_reads(tokenizer.backend_tokenizer, text)
        ids = with_opening(quantised.file.tokenize(plain, True), quantised.file.opening)
        position = first_difference(encode_text(tokenizer, text), ids)
        if position is not None:
            yield index, position


def _parts(tokenizer: Any, texts: list[str], positions: int, window: int) -> Iterator[list[int]]:
    """Yield parts of the texts of at most `window` tokens, with at most this many predicted positions in all."""
    for text in texts:
        ids = encode_text(tokenizer, text)
        for start in range(0, len(ids) - 2, max(1, window - 2)):
            # Windows overlap by two tokens, so that every token but the first two is predicted once.
            part = ids[start : start + window][: positions + 2]
            if len(part) < 3:
                return
            positions -= len(part) - 2
            yield part


def _log_probabilities(quantised: GgufModel, part: list[int]) -> Tensor:
    """Return a file's log-probabilities [positions, V] after each token of a part but the first and last."""
    quantised.rollback([0])
    output = quantised.extend(part, want=range(1, len(part) - 1))
    actual = output.full().log_softmax(-1)
    require_finite(actual.amax(-1).tolist(), output.place)
    return actual


def check_texts(folder: Path) -> list[str]:
    """Return prose and difficult texts, and every added token of the folder's tokenizer as a separate text."""
    added = tokenizer_content(folder / "tokenizer.json").get("added_tokens") or []
    return [PROSE, *PROBE, *NASTY, *(token["content"] for token in added[:MAX_SPECIAL])]


# ── Origins of a run's models, for the heads of their GGUF files ──


def origins(recipe: Recipe, run: Run) -> dict[str, Origin]:
    """Return the origins of a run's draft and target, by name."""
    donor, _ = parts_of(recipe.donor_model)
    draft = Origin(
        name=f"{recipe.name} draft",
        recipe=recipe.name,
        base_model=None if is_path(donor) else donor,
        licence=licence_of(recipe.donor_model, run),
        datasets=tuple(source.path for source in recipe.corpus.sources if source.kind == "hub"),
    )
    return {"draft": draft, "target": Origin(f"{recipe.name} target")}


def licence_of(model: str, run: Run) -> str | None:
    """Return the licence in a model's card or GGUF file. If the card cannot be read, log a line and return None."""
    import yaml
    from gguf import Metadata

    try:
        card = open_head(Path(model)).values if is_gguf(model) else Metadata.load_model_card(text_folder(model))
        licence = card.get("general.license" if is_gguf(model) else "license")
    except (DistillError, OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        run.say(f"  the licence of {model} is not known: {str(error).split(chr(10), 1)[0]}")
        return None
    return licence if isinstance(licence, str) else None


# ── The stage ──

PARITY_POSITIONS = 2000  # positions of test texts on which each file is compared with transformers in float32


def export(recipe: Recipe, run: Run) -> list[Path]:
    """Write gguf/MODEL-OUTTYPE.gguf for draft and target, and gguf/export.json with the parity of each file.

    Without `export.outtypes` no model is opened, because GGUF may not support it. A target that this machine cannot
    load is left out. A target that is a GGUF file is neither written nor checked, because it is the reference.
    """
    folder = run.path("gguf")
    files: list[ExportedFile] = []
    if not recipe.export.outtypes:
        run.say("  no file is written: export.outtypes is empty")
        write_result(folder / "export.json", ExportReport(run.command, files))
        return [folder]
    texts = read_json(run.path("corpus", "documents-test.json"), [str])
    sources = {"draft": run.path("draft")}
    own_file = target_gguf(recipe)
    reason = not_loadable(recipe)
    if reason is None:
        sources["target"] = local_folder(recipe.target.model)
    else:
        run.say(f"  no file of the target is written: {reason}")
    origin_of = origins(recipe, run)
    if own_file is not None and sources.pop("target", None) is not None:
        size = open_head(own_file).bytes
        run.say(f"  {own_file.name}: {size / 1e6:.1f} MB, the target's own file, which is the reference")
        files.append(ExportedFile(str(own_file.absolute()), "target", file_type(own_file), size, 0, None))
    for name, folder_of_model in sources.items():
        outputs = {folder / f"{name}-{outtype}.gguf": outtype for outtype in recipe.export.outtypes}
        reports = export_files(folder_of_model, outputs, origin_of[name])
        source = Original.open(folder_of_model)
        for report in reports:
            parity, place = compare(source, report.path, texts, PARITY_POSITIONS), report.path.absolute()
            faults = faults_of(parity, report.outtype)
            run.say(f"  {report.path.name}: {report.bytes / 1e6:.1f} MB, {parity.words}")
            for fault in (*report.notes, *faults):
                run.say(f"  {report.path.name}: {fault}", warning=True)
            place = place.relative_to(run.folder.absolute())
            kept = str(place), name, report.outtype, report.bytes, report.fallback_tensors
            files.append(ExportedFile(*kept, parity, faults))
    write_result(folder / "export.json", ExportReport(run.command, files))
    return [folder]


# ── Importance matrices ──

MAKE_MATRIX = "make one for this model with llama.cpp's llama-imatrix, or give a text to measure it on"
MAX_TOKENS, TOKENS_AT_ONCE = 16_384, 512  # tokens of the text on which a matrix is measured, and of a forward pass


def importance_of(path: Path, folder: Path) -> dict[str, Floats]:
    """Return GGUF tensor name -> mean squares of the inputs of its columns, in fp32.

    `path` is a GGUF file of llama.cpp's llama-imatrix, or a text on which the model in `folder` is measured. Raises
    DataError for a file that is neither, or whose matrix belongs to another model.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(2**12)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give an importance matrix or a text") from None
    if begin[:4] == b"GGUF":
        means = _stored(path)
        _require_own(path, means, folder)
        return means
    if b"\0" in begin:
        raise DataError(f"{path} is neither a text nor a GGUF file; an older .dat matrix is not supported", MAKE_MATRIX)
    return _measured(folder, read_utf8(path), path)


def _stored(path: Path) -> dict[str, Floats]:
    """Return the mean squares in a file of llama-imatrix, by tensor name. DataError if it holds none."""
    head = open_head(path)
    arrays = {
        name: np.fromfile(file, np.float32, math.prod(head.shapes[name]), offset=start)
        for name, (file, start) in head.places.items()
        if type_name(head.kinds[name]) == "f32"
    }
    result = {}
    for name, sums in arrays.items():
        counts = arrays.get(name.removesuffix(".in_sum2") + ".counts")
        if not name.endswith(".in_sum2") or counts is None or not counts.size or sums.size % counts.size:
            continue
        if (counts > 0).all():  # A matrix without inputs is left out: zeros would mean that its columns do not matter.
            means = sums.reshape(counts.size, -1) / counts.reshape(-1, 1)
            result[name.removesuffix(".in_sum2")] = np.ascontiguousarray(means.ravel(), dtype=np.float32)
    if not result:
        raise DataError(f"{path} contains no importance matrix", MAKE_MATRIX)
    return result


def _require_own(path: Path, means: Mapping[str, Floats], folder: Path) -> None:
    """Raise DataError for a matrix of another model. llama.cpp would ignore the tensors that it does not find."""
    shape = read_shape(folder)
    expected = {shape.gguf_name(name): size for name, size in shape.expected_tensors(()).items() if len(size) == 2}
    missing = [name for name in expected if name not in means and str(name).startswith("blk.")]
    other = [name for name in means if name not in (*expected, "output.weight")]
    if missing or other:
        lacks = f"has nothing for {len(missing)} of its tensors, first {missing[0]}" if missing else ""
        more = f"is for {len(other)} tensors that it lacks, first {other[0]}" if other else ""
        raise DataError(
            f"{path} does not belong to {folder}: it {' and '.join(filter(None, (lacks, more)))}", MAKE_MATRIX
        )
    for name, values in means.items():
        width = expected.get(name, (0, shape.hidden))[1]
        if len(values) != width:
            raise DataError(
                f"{path} does not belong to {folder}: {name} has {len(values)} columns, not {width}", MAKE_MATRIX
            )
        if not np.isfinite(values).all() or (values < 0).any():
            raise DataError(f"{path}: {name} holds values that are not mean squares", MAKE_MATRIX)


def _measured(folder: Path, text: str, path: Path) -> dict[str, Floats]:
    shape = read_shape(folder)
    ids = encode_text(load_tokenizer(str(folder)), text)[:MAX_TOKENS]
    if len(ids) < 2:
        raise DataError(f"{path} is too short to measure an importance matrix on", "give some thousand words")
    model: Any = load_model(str(folder), "float32", torch.device("cpu"), trimmed=False)
    modules = {} if shape.tied else {"output.weight": model.lm_head}
    for number, layer in enumerate(model.model.layers):
        for part, (name, letters) in shape.family.parts.items():
            if len(letters) == 2:
                modules[f"blk.{number}.{name}.weight"] = layer.get_submodule(part)
    sums: dict[str, Any] = {}

    def add(name: str, inputs: Tensor) -> None:
        squares = inputs.detach().double().square().flatten(0, -2).sum(0)
        sums[name] = sums[name] + squares if name in sums else squares

    window = min(TOKENS_AT_ONCE, shape.context)
    with torch.inference_mode(), watching([(module, partial(add, name)) for name, module in modules.items()]):
        for start in range(0, len(ids), window):
            model(torch.tensor([ids[start : start + window]]))
    return {name: (total / len(ids)).float().numpy() for name, total in sums.items()}
