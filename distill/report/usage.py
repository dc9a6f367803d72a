"""The commands of the model card: how transformers, llama.cpp and vLLM load the draft beside its target."""

from __future__ import annotations

import json
import shlex

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
            block("sh", _vllm(results, length)),
            f"{origin} The options are those of recent releases; the figures above were not measured with these "
            "commands.",
        ]
    )


def _preference(one: Measurement) -> tuple[bool, float]:
    """Sorts the best measurement last: the real target after a grown one, then by speedup."""
    return not one.grown, one.speedup


def _transformers(results: RunResults, length: int) -> str:
    target, draft = clean(results.target.path), clean(results.draft.path)
    same = results.target.vocabulary == results.draft.vocabulary
    extra = "" if same else ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer"
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({target!r})",
        f"target = AutoModelForCausalLM.from_pretrained({target!r})",
        f"draft = AutoModelForCausalLM.from_pretrained({draft!r})",
    ]
    if not same:
        lines += [
            "# the two vocabularies differ in size, so transformers needs both tokenizers",
            f"assistant_tokenizer = AutoTokenizer.from_pretrained({draft!r})",
        ]
    lines += [
        f"draft.generation_config.num_assistant_tokens = {length}",
        'draft.generation_config.num_assistant_tokens_schedule = "constant"',
        'inputs = tokenizer("def fibonacci(n):", return_tensors="pt")',
        f"output = target.generate(**inputs, assistant_model=draft{extra}, max_new_tokens=128)",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
    ]
    return "\n".join(lines)


def _llama_cpp(results: RunResults, length: int) -> str:
    def path(model: str) -> str:
        files = results.export.files if results.export else []
        return shlex.quote(clean(next((file.path for file in files if file.model == model), f"{model}.gguf")))

    return f"llama-server -m {path('target')} -md {path('draft')} --spec-type draft-simple --spec-draft-n-max {length}"


def _vllm(results: RunResults, length: int) -> str:
    config = {"method": "draft_model", "model": clean(results.draft.path), "num_speculative_tokens": length}
    return (
        f"vllm serve {shlex.quote(clean(results.target.path))} \\\n"
        f"  --speculative-config {shlex.quote(json.dumps(config, ensure_ascii=False))}"
    )
