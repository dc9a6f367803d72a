"""How a draft is used: one command for each server or library, and whether it pays there, as measured."""

from __future__ import annotations

from dataclasses import dataclass

from distill.models.server_commands import LLAMA_SERVER, VLLM, llama_server, transformers, vllm
from distill.results.run_results import RunResults
from distill.results.speedup_results import FASTER, SLOWER, Measurement
from distill.results.speedup_tables import speedup_of
from distill.tables import clean, shown

FALLBACK_LENGTH = 4  # drafted where no length was measured
OTHER_ROWS = (
    "The heads have other numbers of rows, so vLLM is asked to draft among the tokens that both vocabularies have, "
    "which it does with the draft's best tokens alone. A transplant gives the draft the target's rows."
)
NO_FILE = "The run wrote no GGUF file of its draft: `distill export-gguf RUN` does."
PLACES = (
    "Paths of what the run made are relative to its folder; models of yours are named without their folders. "
    f"llama-server's options were run with {LLAMA_SERVER}, vLLM's "
    f"with its {VLLM} on a CPU; on several GPUs vLLM splits the draft as the target. The figures are of distill's own "
    "decoder on the run's machine: `distill serve-check RUN --server PATH` measures the pair on your server."
)


@dataclass(frozen=True)
class Use:
    """A command or program, in a language of code blocks, for one server or library; `verdict` says whether it pays,
    and `notes` what else there is to know."""

    name: str
    language: str
    text: str
    verdict: str
    notes: tuple[str, ...] = ()


def uses(results: RunResults) -> list[Use]:
    """llama.cpp, and where the target is a folder transformers and vLLM, each with the fixed draft length that was
    fastest in its engine, or else in the other."""
    target, draft = clean(results.target.path), clean(results.draft.path)
    same = results.target.vocabulary == results.draft.vocabulary
    fastest = results.speedup.fastest_of_backends if results.speedup else {}
    evaluation = results.evaluation
    drawn = evaluation.probabilistic if evaluation else None
    big, small = _file(results, "target"), _file(results, "draft")
    found = [
        Use(
            "llama.cpp",
            "sh",
            llama_server(
                big or (target if target.endswith(".gguf") else "target.gguf"),
                small or "draft.gguf",
                _length(fastest, "gguf"),
            ),
            _verdict(fastest, "gguf"),
            (*([drawn] if drawn else []), *([] if small else [NO_FILE])),
        )
    ]
    if target.endswith(".gguf"):
        return found
    sampled = evaluation is not None and evaluation.acceptance_measure == "acceptance_sampling"
    length, verdict = _length(fastest, "pytorch"), _verdict(fastest, "pytorch")
    served = vllm(target, draft, length, probabilistic=sampled, same_vocabulary=same)
    return [
        Use("transformers", "python", transformers(target, draft, length, same), verdict),
        *found,
        Use("vLLM", "sh", served, verdict, () if same else (OTHER_ROWS,)),
    ]


def _file(results: RunResults, model: str) -> str:
    """The GGUF file of a model, of the type that was timed where there is one; empty where there is none."""
    files = [file for file in (results.export.files if results.export else []) if file.model == model]
    timed = results.config.get("speedup", {}).get("outtype")
    return clean(next((file.path for file in sorted(files, key=lambda file: file.outtype != timed)), ""))


def _length(fastest: dict[str, Measurement], backend: str) -> int:
    one = fastest.get(backend) or next(iter(fastest.values()), None)
    return FALLBACK_LENGTH if one is None else one.length or FALLBACK_LENGTH


def _verdict(fastest: dict[str, Measurement], backend: str) -> str:
    """Whether a fixed length pays in an engine on the machine of the run."""
    names = {"gguf": "llama.cpp's library", "pytorch": "PyTorch"}
    one = fastest.get(backend)
    if one is None and fastest:
        return (
            f"It was not timed in {names[backend]}: the length shown was the fastest in {names[next(iter(fastest))]}."
        )
    if one is None:
        return "No draft length was timed; the one shown is only a starting point."
    best = f"{one.length} drafted, {shown(speedup_of(one), '×')} over plain decoding in {names[backend]}"
    if one.verdict == SLOWER:
        return (
            f"It does not pay on the run's machine: the best fixed length was slower than plain decoding ({best}). "
            "Serve without a draft there; the command is for other machines."
        )
    if one.verdict == FASTER:
        return f"It pays on the run's machine with the length shown, the fastest fixed one: {best}."
    return f"Whether it pays on the run's machine is not known. The fastest fixed length: {best}."
