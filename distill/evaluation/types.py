"""A pair in every combination of GGUF types: what quantising target, draft and the draft's cache costs and gains."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distill.errors import RecipeError
from distill.evaluation.measure import sum_by_document, text_values
from distill.evaluation.stage import pack_answers
from distill.evaluation.standalone import PromptedPair, continued
from distill.intervals import Interval
from distill.machine import machine
from distill.models.conversion.importing import file_type, is_gguf
from distill.models.conversion.writer import export_files
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import local_folder
from distill.models.loaded import load_pair
from distill.recipe import Gguf, GgufOptions, Target
from distill.recipe.gguf import UNQUANTISED
from distill.results.evaluation_results import MEASURES
from distill.results.tables import markdown_table
from distill.speculative.costs.curve import measure_steps, predicted_speedups

LONGEST = 8  # tokens drafted a round, at most, in the prediction
REPEATS = 7  # of timed steps

PREDICTED = (
    "Speedups are predicted from measured steps, with the acceptance of a single position at every drafted one; they "
    "leave out what a round costs beside its steps. `distill speedup` measures."
)


@dataclass(frozen=True)
class TypeRow:
    """A draft of one type, whose keys and values are cached in `cache`, with a target of one type.

    `acceptance` is that of single positions as served, `forward_kl` the KL from target to draft in nats. A draft step
    takes `draft_seconds`. `speedup` over the same target's plain decoding is predicted, with `length` tokens drafted a
    round (0: plain decoding is faster) and the acceptance the same at each position.
    """

    target: str
    draft: str
    cache: str
    draft_bytes: int
    forward_kl: Interval
    acceptance: Interval
    draft_seconds: float
    length: int
    speedup: float
    tokens_per_second: float


@dataclass(frozen=True)
class TargetType:
    """A target of one type: its size, and T(1), T(2), … in seconds."""

    target: str
    bytes: int
    seconds: list[float]


@dataclass(frozen=True)
class TypeTable:
    """All pairs of types, on the same texts, which the first target wrote: `tokens` behind `prompts` prompts."""

    command: str
    machine: dict[str, Any]
    sampler: dict[str, int | float]
    measure: str
    tokens: int
    prompts: int
    targets: list[TargetType]
    rows: list[TypeRow]

    @property
    def fastest(self) -> TypeRow:
        """The row of most predicted tokens a second."""
        return max(self.rows, key=lambda row: row.tokens_per_second)


def files_of_types(model: str, kinds: Sequence[str], scratch: Path, name: str, written: Path | None) -> dict[str, Path]:
    """A model's files by type: a GGUF file as it is, else files that a run has `written` and new ones in `scratch`."""
    if is_gguf(model):
        return {file_type(Path(model)): Path(model)}
    files = {kind: (written or scratch) / f"{name}-{kind}.gguf" for kind in kinds}
    missing = {kind: scratch / path.name for kind, path in files.items() if not path.is_file()}
    if missing:
        export_files(local_folder(model), {path: kind for kind, path in missing.items()})
    return files | missing


def measure_types(
    pair: PromptedPair,
    outtypes: Sequence[str],
    target_outtypes: Sequence[str],
    caches: Sequence[str],
    command: str,
    gguf: Gguf,
    threads: int | None,
) -> TypeTable:
    """Every target with every draft, on texts that the first target writes; files that the pair lacks are written.

    Raises RecipeError for types of a model that is a GGUF file already, and for a cache type that the build or the
    draft's sizes do not allow.
    """
    for model, own, option in (
        (pair.target.model, target_outtypes, "--target-outtype"),
        (pair.draft, outtypes, "--outtype"),
    ):
        if own and is_gguf(model):
            raise RecipeError(f"{model} has its types already", f"leave {option} out, or give the folder")
    with tempfile.TemporaryDirectory() as scratch:
        targets = files_of_types(pair.target.model, target_outtypes or ["f16"], Path(scratch), "target", pair.written)
        drafts = files_of_types(pair.draft, outtypes or ["f16"], Path(scratch), "draft", pair.written)
        return _measured(pair, targets, drafts, [*dict.fromkeys(caches)], command, gguf, threads)


def _measured(
    pair: PromptedPair,
    targets: Mapping[str, Path],
    drafts: Mapping[str, Path],
    caches: Sequence[str],
    command: str,
    gguf: Gguf,
    threads: int | None,
) -> TypeTable:
    settings, sampler, ids = pair.settings, pair.sampler, [prompt.ids for prompt in pair.prompts]
    room = max(map(len, ids)) + settings.new_tokens
    with load_pair(Target(model=str(next(iter(targets.values())))), tokens=room, threads=threads, gguf=gguf) as first:
        size = first.target.vocabulary_size
        texts = continued(first, pair.prompts, sampler, settings.new_tokens, size)
    blocks = pack_answers(ids, texts, room)
    depth = sum(len(prompt) + len(text) // 2 for prompt, text in zip(ids, texts, strict=True)) // len(ids)
    measure = "acceptance_sampling" if sampler.temperature else "acceptance_greedy"
    found, rows = [], []
    for kind, path in targets.items():
        with ExitStack() as stack:

            def opened(file: Path, options: GgufOptions) -> GgufModel:
                model = GgufModel(file, context=room + LONGEST + 1, threads=threads, options=options)
                return stack.enter_context(model)

            big = opened(path, gguf.target)
            small = {
                (draft, cache): opened(file, with_cache(gguf.draft, cache))
                for draft, file in drafts.items()
                for cache in caches
            }
            named = {", ".join(key): model for key, model in small.items()}
            measured = sum_by_document(text_values(big, named, blocks, sampler, size, f"target {kind}"))
            steps = measure_steps(big, range(1, LONGEST + 2), depth, REPEATS, size)
            found.append(TargetType(kind, path.stat().st_size, [steps[m][0] for m in sorted(steps)]))
            for (draft, cache), model in small.items():
                result = measured[f"{draft}, {cache}"].divergences()
                accepted, step = result.measure(measure), measure_steps(model, [1], depth, REPEATS, size)[1][0]
                speeds = predicted_speedups(found[-1].seconds, step, [accepted.mean] * LONGEST)
                length = speeds.index(max(speeds))
                rows.append(
                    TypeRow(
                        target=kind,
                        draft=draft,
                        cache=cache,
                        draft_bytes=drafts[draft].stat().st_size,
                        forward_kl=result.forward_kl,
                        acceptance=accepted,
                        draft_seconds=step,
                        length=length,
                        speedup=speeds[length],
                        tokens_per_second=speeds[length] / found[-1].seconds[0],
                    )
                )
    tokens = sum(map(len, texts))
    return TypeTable(command, machine(), sampler.describe(), measure, tokens, len(ids), found, rows)


def with_cache(options: GgufOptions, cache: str) -> GgufOptions:
    """The options with keys and values cached in a type; llama.cpp quantises values with flash attention alone."""
    changed = {"cache_type_k": cache, "cache_type_v": cache}
    if cache not in UNQUANTISED and options.flash_attn == "off":
        changed["flash_attn"] = "on"
    return GgufOptions.model_validate(options.model_dump() | changed)


def as_markdown(table: TypeTable) -> str:
    """Targets, then all pairs; the fastest is bold where it beats plain decoding."""
    served = ", ".join(f"{name} {value}" for name, value in table.sampler.items())
    title = f"{MEASURES[table.measure]}; {table.tokens} tokens behind {table.prompts} prompts; {served}"
    targets = [
        [one.target, f"{one.bytes / 1e6:.1f}", *(f"{seconds * 1e3:.2f}" for seconds in one.seconds)]
        for one in table.targets
    ]
    heads = ["target", "MB", *(f"T({m}), ms" for m in range(1, len(table.targets[0].seconds) + 1))]
    rows = []
    for row in table.rows:
        cells = [
            row.target,
            row.draft,
            row.cache,
            f"{row.draft_bytes / 1e6:.1f}",
            *(f"{one.mean:.4f} [{one.low:.4f}, {one.high:.4f}]" for one in (row.forward_kl, row.acceptance)),
            f"{row.draft_seconds * 1e3:.2f}",
            str(row.length or "none"),
            f"{row.speedup:.2f}",
            f"{row.tokens_per_second:.1f}",
        ]
        rows.append([f"**{cell}**" for cell in cells] if row.length and row == table.fastest else cells)
    columns = ["target", "draft", "cache", "MB", "KL, nats", "acceptance", "D, ms", "drafted", "speedup", "tokens/s"]
    blocks = [title, markdown_table(heads, targets, "lr"), markdown_table(columns, rows, "lllr"), PREDICTED]
    return "\n\n".join([*blocks, f"`{table.command}`"]) + "\n"


def flat_rows(table: TypeTable) -> list[dict[str, Any]]:
    """A row for each pair, for jsonl and csv."""
    flat = []
    for row in table.rows:
        values = asdict(row)
        for name in ("forward_kl", "acceptance"):
            interval = values.pop(name)
            values |= {name: interval["mean"], f"{name}_low": interval["low"], f"{name}_high": interval["high"]}
        flat.append(values)
    return flat
