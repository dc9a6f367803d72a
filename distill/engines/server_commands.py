"""The commands that serve a pair, for llama-server, vLLM and transformers: all that `distill` prints or runs; and the
heads to draft with that a target ships.

tests/engines/test_server_commands.py holds the options to real servers, and vLLM's to its sources.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distill.errors import DistillError
from distill.files import is_gguf, read_object
from distill.folders import present_files, read_header
from distill.gguf.head import FileHead, open_head
from distill.recipe import is_path

LLAMA_SERVER = "the llama-server of llama-cpp-python 0.3.36's sources"  # the build on which these options were run
VLLM = "0.32.0"  # the version on which these options were run, in its build for CPUs
DRAFT_TYPE = "draft-simple"  # of --spec-type: a plain draft model; without it the server loads the draft for nothing

SPEC_TYPE, N_MAX, P_MIN = "--spec-type", "--spec-draft-n-max", "--spec-draft-p-min"
DRAWN_AMONG = 10  # likeliest tokens of the draft, of probabilistic drafts (common/speculative.cpp, spec_retune)
IK_DEPTH, IK_INSERTED = 64, 2**28  # of ik_llama.cpp's suffix tree; the most tokens × depth of a corpus that it reads
SGLANG_NODES, SGLANG_TOKENS = 8, 10_000_000  # of its 12 drafted tokens, those from the file; its own limit of a file
VLLM_REQUESTS = 10_000  # whose texts its suffix cache keeps by default
SAMPLING = "--spec-draft-sampling"  # greedy, its default, or probabilistic; older builds do not have it


def pair_arguments(
    target: str, draft: str | None, n_max: int, p_min: float | None = None, probabilistic: bool = False
) -> list[str]:
    """llama-server's arguments for a pair; `p_min` None leaves the server's own (0), `draft` None decodes plainly.

    `probabilistic` drafts are drawn, which builds since October 2026 can.
    """
    if draft is None:
        return ["-m", target]
    floor = [] if p_min is None else [P_MIN, f"{p_min:g}"]
    drawn = [SAMPLING, "probabilistic"] if probabilistic else []
    return ["-m", target, "-md", draft, SPEC_TYPE, DRAFT_TYPE, N_MAX, str(n_max), *floor, *drawn]


# A served sampler by its names in recipes and generation_config.json: its name in GGUF files (general.sampling.…), and
# llama-server's option. vLLM, transformers and llama-server take what the target's files say wherever a request names
# nothing; where those say nothing, llama-server has defaults of its own.
Sampling = Mapping[str, float]
SAMPLING_KEYS = {
    "temperature": ("temp", "--temp"),
    "top_k": ("top_k", "--top-k"),
    "top_p": ("top_p", "--top-p"),
    "min_p": ("min_p", "--min-p"),
    "repetition_penalty": ("penalty_repeat", "--repeat-penalty"),
}
# Settings of generation_config.json that no recipe has, and the values that change nothing.
FOREIGN: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
FOREIGN |= {"epsilon_cutoff": (0,), "eta_cutoff": (0,), "suppress_tokens": ([],), "bad_words_ids": ([],)}


def stated_sampling(target: str) -> dict[str, Any]:
    """The sampler that a target's own files ask servers for, by the names of `SAMPLING_KEYS` and `FOREIGN`."""
    if is_gguf(target):
        values = open_head(Path(target)).values
        found = {key: values.get(f"general.sampling.{name}") for key, (name, _) in SAMPLING_KEYS.items()}
    else:
        from distill.engines.torch.hugging_face import text_folder

        path = text_folder(target) / "generation_config.json"
        stated = read_object(path) if path.is_file() else {}
        found = {key: stated.get(key) for key in (*SAMPLING_KEYS, *FOREIGN)}
    return {key: value for key, value in found.items() if value is not None and not isinstance(value, bool)}


def other_sampling(target: str, sampling: Sampling) -> str | None:
    """How the sampler in a target's own files differs from this one; None where it does not."""
    found, keys = [], []
    for key, value in stated_sampling(target).items():
        if key in FOREIGN:
            found += [f"{key} {value!r:.60} (which no recipe has)"] if value not in FOREIGN[key] else []
        elif not isinstance(value, int | float):
            found.append(f"{key} {value!r:.60}, which is no number")
        elif sampling["temperature"] or key in ("temperature", "repetition_penalty"):  # else the likeliest token counts
            value = max(value, 0) if key == "top_k" else value  # servers take -1 for off
            if not math.isclose(value, sampling[key], rel_tol=1e-5, abs_tol=1e-9):
                found.append(f"{key} {value:.6g} (here {sampling[key]:g})")
                keys.append(f"{'answers' if key == 'repetition_penalty' else 'sampler'}.{key}={value:.6g}")
    if not found:
        return None
    place = "general.sampling" if is_gguf(target) else "generation_config.json"
    advice = "take out what is not served"
    if keys:
        advice = f"if it is the one that you serve, learn and measure it ({' '.join(keys)})"
        advice += "; else serve with the report's commands, which carry the recipe's"
    return (
        f"the target's {place} names another sampler than the recipe: {', '.join(found)}. vLLM, transformers and "
        f"llama-server use theirs wherever a request names none: {advice}"
    )


def _llama_sampling(sampling: Sampling | None) -> list[str]:
    return [word for key, value in (sampling or {}).items() for word in (SAMPLING_KEYS[key][1], f"{value:g}")]


def _vllm_sampling(sampling: Sampling | None) -> str:
    if not sampling:
        return ""
    return f" \\\n  --override-generation-config {shlex.quote(json.dumps(dict(sampling)))}"


def llama_server(
    target: str, draft: str | None, n_max: int, p_min: float | None = None, sampling: Sampling | None = None
) -> str:
    """The command that serves two GGUF files, with this sampler where a request names none."""
    return shlex.join(["llama-server", *pair_arguments(target, draft, n_max, p_min), *_llama_sampling(sampling)])


def vllm(
    target: str,
    draft: str,
    length: int,
    probabilistic: bool = False,
    same_vocabulary: bool = True,
    sampling: Sampling | None = None,
) -> str:
    """The command that serves two Hugging Face folders, with this sampler where a request names none.

    `probabilistic` drafts are drawn from the draft; by default vLLM drafts its best tokens, and where the vocabularies
    differ only those, of the tokens that both have.
    """
    config: dict[str, str | int | bool] = {"method": "draft_model", "model": draft, "num_speculative_tokens": length}
    if not same_vocabulary:
        config["use_heterogeneous_vocab"] = True
    elif probabilistic:
        config["draft_sample_method"] = "probabilistic"
    return (
        f"vllm serve {shlex.quote(target)} \\\n"
        f"  --speculative-config {shlex.quote(json.dumps(config, ensure_ascii=False))}" + _vllm_sampling(sampling)
    )


def suffix_depth(tokens: int) -> int:
    """The deepest suffix tree, up to ik_llama.cpp's own, for which it reads a corpus of this many tokens."""
    return min(IK_DEPTH, IK_INSERTED // max(tokens, 1))


def drafting_from_texts(
    server: str, target: str, file: str, texts: int, tokens: int, sampling: Sampling | None = None
) -> str:
    """The command of a server that drafts from a file of this many texts and tokens (teacher/store.py), without a draft
    model, with this sampler where a request names none (SGLang takes none)."""
    model, sampled = shlex.quote(target), "".join(f" {word}" for word in _llama_sampling(sampling))
    if server == "llama.cpp":
        return f"llama-server -m {model} {SPEC_TYPE} ngram-cache --lookup-cache-static {shlex.quote(file)}{sampled}"
    if server == "ik_llama":
        quoted = file.replace("\\", "\\\\").replace("'", "\\'")
        stage = f"suffix:suffix_max_depth={suffix_depth(tokens)},suffix_corpus='{quoted}'"
        return f"llama-server -m {model} {SPEC_TYPE} {shlex.quote(stage)}{sampled}"
    if server == "sglang":
        budget = ["--speculative-ngram-external-sam-budget", str(SGLANG_NODES)]
        if texts + tokens > SGLANG_TOKENS:  # it counts a mark between texts
            budget += ["--speculative-ngram-external-corpus-max-tokens", str(texts + tokens)]
        return (
            f"python -m sglang.launch_server --model-path {model} --speculative-algorithm NGRAM \\\n"
            f"  --speculative-ngram-external-corpus-path {shlex.quote(file)} {' '.join(budget)}"
        )
    config: dict[str, str | int] = {"method": "suffix"}
    if texts > VLLM_REQUESTS:
        config["suffix_decoding_max_cached_requests"] = texts
    options = shlex.quote(json.dumps(config)) + _vllm_sampling(sampling)
    return (
        f"vllm serve {model} --speculative-config {options}  # needs arctic-inference\n"
        "while read -r request; do\n"
        "  curl -s http://localhost:8000/v1/completions -H 'Content-Type: application/json' -d \"$request\"\n"
        f"done < {shlex.quote(file)}"
    )


def serving(backend: str, drafter: str | None, target: str, draft: str | None, length: int, run: str = "") -> str:
    """The command of the server that comes nearest to what a backend of ours decoded: with a draft the server drafts
    `length` tokens; the n-grams of a `run` are written first, which prints the server's command."""
    engine = backend.partition(":")[0]
    if drafter == "table" and run:
        server = {"gguf": "llama.cpp", "ik": "ik_llama"}.get(engine, "vllm")
        return f"distill export-lookup {shlex.quote(run)} --for {server}"
    if engine == "pytorch":
        if drafter is None or draft is None:
            config = {"method": "ngram", "num_speculative_tokens": length}
            drafted = f" --speculative-config {shlex.quote(json.dumps(config))}" if drafter else ""
            return f"vllm serve {shlex.quote(target)}{drafted}"
        return vllm(target, draft, length).replace(" \\\n ", "")
    if drafter in (None, "lookup", "table"):
        looked = [] if drafter is None else [SPEC_TYPE, "ngram-mod"]
        return shlex.join(["llama-server", "-m", target, *looked])
    if engine == "ik":
        return shlex.join(["llama-server", "-m", target, "-md", str(draft), "--draft-max", str(length)])
    return llama_server(target, draft, length)


def sglang(target: str, draft: str, length: int) -> str:
    """SGLang's command for a draft of the same vocabulary."""
    options = {"algorithm": "STANDALONE", "draft-model-path": draft, "num-steps": length, "eagle-topk": 1}
    options |= {"num-draft-tokens": length + 1}
    words = [word for name, value in options.items() for word in (f"--speculative-{name}", str(value))]
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", target, *words])


def transformers(target: str, draft: str, length: int, same_vocabulary: bool, sampling: Sampling | None = None) -> str:
    """Python that continues a text with two Hugging Face folders, with this sampler."""
    given = dict(sampling or {})
    if given and not given["temperature"]:
        given = {"repetition_penalty": given["repetition_penalty"]}
    drawn = {} if not sampling else {"do_sample": bool(sampling["temperature"])} | given
    extra = "".join(f", {key}={value}" for key, value in drawn.items())
    extra += "" if same_vocabulary else ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer"
    # Where the vocabularies differ in size, transformers needs both tokenizers.
    tokenizers = "" if same_vocabulary else f"\nassistant_tokenizer = AutoTokenizer.from_pretrained({draft!r})"
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({target!r}){tokenizers}
target = AutoModelForCausalLM.from_pretrained({target!r})
draft = AutoModelForCausalLM.from_pretrained({draft!r})
draft.generation_config.num_assistant_tokens = {length}
draft.generation_config.num_assistant_tokens_schedule = "constant"
inputs = tokenizer("def fibonacci(n):", return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft{extra}, max_new_tokens=128)
print(tokenizer.decode(output[0], skip_special_tokens=True))"""


# ── What a target ships to draft with: a head inside it (multi-token prediction), and for it in files beside it ──
# Names of keys and tensors: DeepSeek-V3, GLM-4.5, Qwen3.5, MiMo; of architectures: llama.cpp, SGLang, DFlash.

HEAD_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of config.json
HEAD_TENSORS = re.compile(r"(^|\.)(mtp|mtp_layers|nextn|eh_proj)\.")
HEAD_KINDS = {"eagle3": "EAGLE-3", "dflash": "DFlash"}  # as servers name them
MOST_BESIDE = 64  # files or folders that are looked at
MORE = "docs/choosing.md#drafts-of-other-kinds says when a plain draft still wins"
MTP_OF_FILES, MTP = f"{SPEC_TYPE} draft-mtp {N_MAX} 3", {"method": "mtp", "num_speculative_tokens": 1}


def refuse_head_file(head: FileHead) -> None:
    """Raise DataError for a GGUF file that holds a head to draft with, as `refuse_head` for a folder."""
    if (kind := head.text("general.architecture")) in HEAD_KINDS:
        command = shlex.join(["llama-server", "-m", "TARGET", "-md", str(head.path), SPEC_TYPE, f"draft-{kind}"])
        head.refuse(
            f"it is a head ({HEAD_KINDS[kind]}), which drafts from the hidden states of its target",
            f"serve it with its target: {command}; to draft here, give a whole model",
        )


def shipped_heads(target: str) -> list[str]:
    """A line for each head of a model folder, hub name or GGUF file: how to use it, or that this copy has lost it.

    Nothing for a hub name whose files cannot be had; DataError for a damaged GGUF file or config.json.
    """
    found = list(_heads_of_file(Path(target)) if is_gguf(target) else _heads_of_folder(target))
    return [*found, MORE] if found else []


def _heads_of_file(path: Path) -> Iterator[str]:
    head, key = open_head(path), "nextn_predict_layers"
    yield from _inside(key, head.size(key, 0, 2**16), head.shapes, f"llama-server {MTP_OF_FILES}")
    others = sorted(one for one in path.parent.glob("*.gguf") if one != path)
    for other in itertools.islice(others, MOST_BESIDE):
        with contextlib.suppress(DistillError, OSError):
            kind = open_head(other).text("general.architecture")
            if kind in HEAD_KINDS:
                use = f"llama-server -md {shlex.quote(str(other))} {SPEC_TYPE} draft-{kind}"
                yield f"target: {other.name} beside it is for {HEAD_KINDS[kind]}; if it was made for this target: {use}"


def _heads_of_folder(target: str) -> Iterator[str]:
    from distill.engines.torch.hugging_face import local_snapshot, text_folder

    try:
        folder = text_folder(target)
    except DistillError:  # `plan` needs no more than a configuration
        return
    config = _language(read_object(folder / "config.json"))
    key = next((key for key in HEAD_KEYS if config.get(key)), "")
    names, whole = ["mtp."], local_snapshot(target) if key else None
    if whole is not None:
        with contextlib.suppress(DistillError, OSError):  # without weights here, config.json is believed
            names = [name for file in present_files(whole) for name in read_header(file)]
    use = f"vLLM, --speculative-config {shlex.quote(json.dumps(MTP))}; its GGUF file, llama-server {MTP_OF_FILES}"
    yield from _inside(key, config.get(key), names, use)
    places = [*folder.glob("*/config.json"), *folder.parent.glob("*/config.json")] if is_path(target) else []
    for place in itertools.islice(sorted(places), MOST_BESIDE):
        with contextlib.suppress(DistillError, OSError):
            other = _language(read_object(place))
            architectures = " ".join(map(str, other.get("architectures") or [])).lower()
            kind = next((kind for kind in HEAD_KINDS if kind in architectures), None)
            if kind is not None and other.get("hidden_size") == config.get("hidden_size"):
                used = json.dumps({"method": kind, "model": str(place.parent), "num_speculative_tokens": 3})
                use = f"vLLM, --speculative-config {shlex.quote(used)}"
                yield f"target: {place.parent} has its width and is for {HEAD_KINDS[kind]}: {use}"


def _language(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with that of its language model in front, where it is one of several parts."""
    inner = config.get("text_config")
    return config | inner if isinstance(inner, dict) else config


def _inside(key: str, layers: Any, names: Iterable[str], use: str) -> Iterator[str]:
    """The line about a head inside, where the target states `layers` of it: whether its tensors' `names` have one."""
    about = f"a head for multi-token prediction ({key} {layers})"
    if layers and any(map(HEAD_TENSORS.search, names)):
        yield f"target: it has {about}; measure it first: {use}"
    elif layers:
        yield f"target: it states {about} and holds no tensor of it: this copy lost it"
