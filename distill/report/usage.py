"""The commands of the model card: how transformers, llama.cpp and vLLM load the draft beside its target."""

from __future__ import annotations

from distill.models.server_commands import LLAMA_SERVER, VLLM, llama_server, transformers, vllm
from distill.report.markup import block
from distill.report.text import clean
from distill.results.run_results import RunResults
from distill.results.speedup_results import SLOWER, Measurement

FALLBACK_LENGTH = 4
SPECULATION_LOSES = (
    "On the machine above, speculation was slower than plain decoding with every draft length tried: do not use this "
    "pair there. The commands are for other machines."
)


def how_to_use(results: RunResults) -> str:
    """One command for each server or library, with the draft length that was fastest."""
    fastest = results.speedup.fastest if results.speedup else []
    best = {one.backend: one.length or FALLBACK_LENGTH for one in sorted(fastest, key=_preference)}
    length = best.get("pytorch", max(best.values(), default=FALLBACK_LENGTH))
    origin = (
        "The draft lengths shown were the fastest on the machine above; measure on yours."
        if best
        else "No draft length was measured; the one shown is only a starting point."
    )
    slower = fastest and all(one.verdict == SLOWER for one in fastest if not one.grown)
    warning = [SPECULATION_LOSES] if slower else []
    return "\n\n".join(
        [
            *warning,
            "transformers:",
            block("python", _transformers(results, length)),
            "llama.cpp:",
            block("sh", _llama_cpp(results, best.get("gguf", length))),
            "vLLM:",
            _vllm(results, length),
            f"{origin} llama-server's options were run with {LLAMA_SERVER}, vLLM's were read in the sources of {VLLM} "
            "and not run; on several GPUs vLLM splits the draft as the target. The figures above are of distill's own "
            "decoder: `distill serve-check RUN --server PATH` measures the pair on your server.",
        ]
    )


def _preference(one: Measurement) -> tuple[bool, float]:
    """Sorts the best measurement last: the real target after a grown one, then by speedup."""
    return not one.grown, one.speedup


def _transformers(results: RunResults, length: int) -> str:
    same = results.target.vocabulary == results.draft.vocabulary
    return transformers(clean(results.target.path), clean(results.draft.path), length, same)


def _llama_cpp(results: RunResults, length: int) -> str:
    files = results.export.files if results.export else []

    def path(model: str) -> str:
        return clean(next((file.path for file in files if file.model == model), f"{model}.gguf"))

    return llama_server(path("target"), path("draft"), length)


def _vllm(results: RunResults, length: int) -> str:
    """A block, or the reason why vLLM does not take the pair."""
    if results.target.vocabulary != results.draft.vocabulary:
        return (
            f"vLLM does not take this pair: it asks for the same number of rows, and the target has "
            f"{results.target.vocabulary:,}, the draft {results.draft.vocabulary:,}. A transplant gives the draft the "
            "target's rows."
        )
    return block("sh", vllm(clean(results.target.path), clean(results.draft.path), length))
