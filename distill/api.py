"""What `import distill` gives notebooks and other programs. docs/api.md shows every name at work.

Models are named as on the command line: a Hugging Face folder, a hub name, or a GGUF file; paths start at the working
directory. Whatever a caller can do wrong raises a DistillError with `what` happened and a `hint` of what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from distill.data.prompts import sources_of
from distill.data.suites import read_suite
from distill.decoding.configured import check_configurations
from distill.decoding.decode import Decoded
from distill.engines import loaded
from distill.engines.loaded import GROWING, LoadedPair
from distill.engines.pairs import pair_references, require_pair
from distill.engines.torch.hugging_face import local_folder, settled_target
from distill.errors import DataError, DistillError, RecipeError
from distill.files import require_new_folder
from distill.gguf.importing import Import, read_import, write_import
from distill.gguf.writer import WrittenFile
from distill.gguf.writer import export_gguf as write_gguf
from distill.measuring.compare import PairSettings
from distill.measuring.evaluation import EvaluationOptions, Grid, evaluate_grid, prompts_of, prompts_of_suite
from distill.measuring.evaluation_results import EvaluationReport, evaluation_blocks
from distill.measuring.speedup import measure_any_pair
from distill.measuring.speedup_results import SpeedupReport
from distill.measuring.speedup_tables import speedup_blocks
from distill.measuring.stream import Continuation, begin
from distill.progress import note, warn
from distill.recipe import (
    Chat,
    Configuration,
    Corpus,
    Cut,
    Evaluate,
    Gguf,
    PyTorch,
    SamplerSettings,
    Speedup,
    parse_section,
    resolve_model,
)
from distill.recipe.measuring import fixed_length
from distill.report.page import section
from distill.report.plots import acceptance_by_position, speeds
from distill.sampler import Sampler
from distill.surgery.cutter import cut_folder
from distill.surgery.results import Change
from distill.surgery.vocabulary import folders_of
from distill.surgery.vocabulary import transplant as transplanted
from distill.tables import Plot

__all__ = [
    "Change",
    "Configuration",
    "Decoded",
    "DistillError",
    "EvaluationReport",
    "LoadedPair",
    "Sampler",
    "SpeedupReport",
    "cut",
    "decode",
    "evaluate",
    "export_gguf",
    "import_gguf",
    "load_pair",
    "measure_speedup",
    "transplant",
]

Floats = Literal["float32", "bfloat16", "float16"]
Dtype = Literal["auto"] | Floats
Paths = Sequence[str | Path]
BLOCK: int = Corpus.model_fields["block"].default  # tokens of a text, where no prompt is longer


def load_pair(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    tokens: int | None = None,
    nodes: int = 0,
    threads: int | None = None,
    gguf: Gguf | None = None,
    pytorch: PyTorch = GROWING,
) -> LoadedPair:
    """A target, with a draft of its vocabulary or alone, ready to decode; use it as a context, or `close` it.

    `tokens` is the length of the context, `nodes` the largest number of nodes of a tree in GGUF files. PairError for a
    draft of another vocabulary; for the rest see `distill.engines.loaded.load_pair`.
    """
    big, small = resolve_model(str(target)), None if draft is None else resolve_model(str(draft))
    if small is not None:
        require_pair(big, small)
    settings = settled_target(big, dtype, device)
    return loaded.load_pair(
        settings, small, device=device, tokens=tokens, nodes=nodes, threads=threads, gguf=gguf, pytorch=pytorch
    )


def decode(
    pair: LoadedPair,
    prompt: str | Sequence[int],
    tokens: int = 128,
    *,
    configuration: Configuration | Mapping[str, Any] | None = None,
    sampler: Sampler | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    table: str | Path | None = None,
) -> Decoded:
    """Continue a prompt, a text or token ids, by at most `tokens`; `pair.text(found.tokens)` is the text.

    `configuration` (None: four tokens of the draft a round; plain decoding for a pair without a draft) is one of
    docs/recipes.md, as an object or a mapping; `sampler` None is greedy. The text is the target's own whatever drafts:
    a configuration that would change its distribution raises DataError, as does a prompt that is empty or fills the
    context. `table` (a file, or a run that has one) holds n-grams of the target for drafter table.
    """
    sampler = sampler or Sampler(temperature=0)
    if configuration is None:
        configuration = {"drafter": "none"} if pair.draft is pair.target else {"length": 4}
    if not isinstance(configuration, Configuration):
        sampled = {"sampler": "recipe" if sampler.temperature else "greedy"}
        configuration = parse_section(Configuration, sampled | dict(configuration))
    if configuration.other_vocabulary:
        raise RecipeError(f"drafter {configuration.drafter} reads two vocabularies", "use `distill generate`")
    if tokens < 1:
        raise RecipeError(f"{tokens} new tokens are requested", "request at least one")
    if configuration.branches and pair.backend != "pytorch" and not pair.target.max_leaves:
        raise RecipeError("these GGUF files were loaded without room for trees", "load_pair(…, nodes=N)")
    ids = pair.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids or len(ids) >= pair.target.capacity:
        raise DataError(f"a prompt of {len(ids)} tokens in a context of {pair.target.capacity}", "give some, and fewer")
    room = min(tokens, pair.target.capacity - len(ids))
    request = Continuation(configuration, sampler, seed, stop, table=None if table is None else Path(table))
    return begin(pair, None, request, ids).text(ids, room)


def evaluate(
    target: str | Path,
    draft: str | Path | Paths,
    texts: Paths = (),
    *,
    suite: str | Path | None = None,
    sampler: Sampler | None = None,
    prompts: int | None = None,
    seed: int = 0,
    kl: bool = True,
    acceptance: bool = True,
    types: Sequence[str] = (),
    dtype: Dtype = "auto",
    threads: int | None = None,
    gguf: Gguf | None = None,
    command: str = "",
) -> EvaluationReport:
    """Divergences and acceptance of a pair, with intervals, on text files or folders of them; `sampler` None:
    temperature 1. `prompts` are 32 by default; of a `suite`, in place of texts, questions of each category: None: all.

    Several drafts, or the draft in several GGUF `types`, are compared with the first. `dtype` is the type of folders,
    "auto" the checkpoint's own. DataError
    for files that are not there and for texts of fewer than 4 prompts; PairError as `load_pair`.
    """
    if bool(texts) == (suite is not None):
        raise RecipeError("eval measures prompts or a suite", "give one of them")
    if suite is None:
        if prompts is not None and prompts < 4:
            raise RecipeError(f"{prompts} prompts are too few for an interval", "measure 4 or more")
        given = prompts_of(Corpus(sources=sources_of([Path(path) for path in texts])), prompts or 32)
    else:
        given = prompts_of_suite(read_suite(Path(suite)), prompts, seed)
    drafts = [resolve_model(str(one)) for one in ([draft] if isinstance(draft, (str, Path)) else draft)]
    grid = Grid(resolve_model(str(target)), drafts, BLOCK, types, threads=threads, gguf=gguf, dtype=dtype)
    served = sampler or Sampler(1.0)
    options = EvaluationOptions(served, Evaluate(), command, kl, seed=seed, grid=acceptance)
    return evaluate_grid(grid, given, options)


def measure_speedup(
    target: str | Path,
    draft: str | Path | None,
    prompts: Paths = (),
    *,
    suite: str | Path | None = None,
    lengths: Iterable[int] = (1, 2, 4),
    configurations: Iterable[Configuration | Mapping[str, Any]] = (),
    sampler: SamplerSettings | None = None,
    count: int | None = None,
    tokens: int = 96,
    prompt_tokens: int = 64,
    dtype: Dtype = "auto",
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
    gguf: Gguf | None = None,
    pytorch: PyTorch | None = None,
    chat: Chat | None = None,
    table: Path | None = None,
    allow_lossy: bool = False,
    command: str = "",
) -> SpeedupReport:
    """Plain against speculative decoding, end to end, on the prompts in files, as `distill speedup` measures them.

    The draft's fixed `lengths` and every other configuration are decoded interleaved with plain decoding; with a
    `sampler` all of them are sampled. `count` prompts are measured, by default 12. A `suite` (a file of Spec-Bench's
    form) stands in place of `prompts`: `count` questions of each category, by default all, with every turn, both
    greedy and sampled (by default at temperature 1). `table` holds n-grams of the target. DataError or RecipeError for
    prompts, contexts and configurations that do not go together; lossy ones, where allowed, are named on stderr.
    """
    if bool(prompts) == (suite is not None):
        raise RecipeError("speedup measures prompts or a suite", "give one of them")
    sampler, pytorch = sampler or SamplerSettings(temperature=0 if suite is None else 1), pytorch or PyTorch()
    kinds = ["greedy"] if suite is not None or not sampler.temperature else []
    kinds += ["recipe"] if sampler.temperature else []
    fixed = tuple(lengths)
    configured = [Configuration(length=length, sampler="recipe") for length in fixed if "recipe" in kinds]
    for one in configurations:
        if isinstance(one, Configuration):
            configured.append(one)
        else:
            samplers = [one["sampler"]] if "sampler" in one else kinds
            configured += [parse_section(Configuration, {"sampler": kind, **one}) for kind in samplers]
    counts: dict[str, Any] = {"prompts": 12 if count is None or suite is not None else count, "new_tokens": tokens}
    counts |= {"allow_lossy": allow_lossy, "configurations": configured}
    speedup = parse_section(Speedup, counts | {"lengths": fixed if "greedy" in kinds else ()})
    every = (*map(fixed_length, speedup.lengths), *configured)
    drawn = next((one for one in every if one.sampler == "recipe" and "recipe" not in kinds), None)
    if drawn is not None:
        raise RecipeError(f"`{drawn.described}` is sampled", "give a sampler (--sampler temperature=1)")
    for line in check_configurations(speedup, sampler, "the options"):
        warn(line)
    own, other = resolve_model(str(target)), None if draft is None else resolve_model(str(draft))
    place, pytorch = loaded.settled_decoding(settled_target(own, dtype, device), other, pytorch, device)
    big, small = pair_references(own, other, every, pytorch.in_bits)
    if table is None and any(one.counts_ngrams for one in every):
        note("no table of n-grams (--table): drafter table knows those of the text so far alone")
    place = place.model_copy(update={"model": big})
    settings = PairSettings(place, small, device, threads, gguf or Gguf(), pytorch, speedup, sampler, seed)
    names = str(target), None if draft is None else str(draft)
    more: dict[str, Any] = {"chat": chat, "table": table, "command": command}
    more |= {} if suite is None else {"suite": Path(suite), "count": count}
    return measure_any_pair(settings, names, prompts, prompt_tokens=prompt_tokens, **more)


def cut(
    source: str | Path, out: str | Path, texts: Sequence[str], *, target: str | Path | None = None, **settings: Any
) -> list[Change]:
    """Write `source` with fewer layers or neurons to a new folder; what was changed.

    `settings` are keys of the recipe's section `cut` (layers, mlp_width);
    `texts` score the parts. KL is that to `target` (None: the uncut model).
    RecipeError for cuts that are not possible, DataError for too little text and a folder that is not empty.
    """
    cuts = parse_section(Cut, {name: value for name, value in settings.items() if value is not None})
    if cuts.layers is None and cuts.mlp_width is None:
        raise RecipeError("nothing to cut", "give layers or mlp_width")
    compared = None if target is None else resolve_model(str(target))
    return cut_folder(resolve_model(str(source)), Path(out), cuts, texts, compared)


def transplant(donor: str | Path, target: str | Path, out: str | Path, **settings: Any) -> Change:
    """Write `donor` with the vocabulary of `target` to a new folder, so that it can draft for it.

    `settings` are those of `distill.surgery.vocabulary.transplant`: rows, overrides, dtype.
    DataError for an impossible transplant and a folder that is not empty.
    """
    require_new_folder(Path(out))
    return transplanted(*folders_of(resolve_model(str(donor)), resolve_model(str(target))), Path(out), **settings)


def export_gguf(model: str | Path, out: str | Path, outtype: str = "f16") -> WrittenFile:
    """Write a model as a GGUF file of type `outtype` (f32, f16, bf16, q8_0, q4_k_m, …; quantised types need
    llama-cpp-python)."""
    return write_gguf(local_folder(resolve_model(str(model))), Path(out), outtype)


def import_gguf(file: str | Path, out: str | Path, dtype: Floats | None = None) -> Import:
    """Write a GGUF file as a Hugging Face folder; `dtype` None keeps floats and gives quantised weights in float32."""
    require_new_folder(Path(out))
    found = read_import(Path(file), dtype)
    write_import(found, Path(out))
    return found


# ── In a notebook: a measurement shows its picture and tables ──


def _html(report: SpeedupReport | EvaluationReport) -> str:
    if isinstance(report, SpeedupReport):
        return section([report.verdict, Plot(partial(speeds, report), ""), *speedup_blocks(report)])
    drawn = [Plot(partial(acceptance_by_position, report.by_position), "")] if report.positions else []
    return section([*drawn, *evaluation_blocks(report)])


for _kind in (SpeedupReport, EvaluationReport):
    setattr(_kind, "_repr_html_", _html)  # noqa: B010
