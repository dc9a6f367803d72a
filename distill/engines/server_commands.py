"""Commands that serve a pair with llama-server, vLLM or transformers, and draft heads that a target ships.

Every server command that `distill` prints or runs is made here. tests/engines/test_server_commands.py checks the
options against real servers, and vLLM's against its sources.
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
from distill.files import is_gguf, parts_of, read_object
from distill.folders import present_files, read_header
from distill.gguf.head import FileHead, open_head
from distill.recipe import is_path

LLAMA_SERVER = "the llama-server of llama-cpp-python 0.3.36's sources"  # These options were run on this build.
VLLM = "0.32.0"  # These options were run on this version, in its build for CPUs.
DRAFT_TYPE = "draft-simple"  # --spec-type of a plain draft model. Without it, the server loads the draft for nothing.

SPEC_TYPE, N_MAX, P_MIN = "--spec-type", "--spec-draft-n-max", "--spec-draft-p-min"
DRAWN_AMONG = 10  # Probabilistic drafts are drawn from this many tokens (common/speculative.cpp, spec_retune).
IK_DEPTH = 64  # the depth of ik_llama.cpp's suffix tree
IK_INSERTED = 2**28  # the most tokens × depth of a corpus that ik_llama.cpp reads
SGLANG_NODES = 8  # SGLang takes this many of its 12 drafted tokens from the file.
SGLANG_TOKENS = 10_000_000  # SGLang's limit for a file
VLLM_REQUESTS = 10_000  # By default vLLM's suffix cache keeps the texts of this many requests.
SAMPLING = "--spec-draft-sampling"  # greedy (the default) or probabilistic. Older builds do not have it.


def pair_arguments(
    target: str, draft: str | None, n_max: int, p_min: float | None = None, probabilistic: bool = False
) -> list[str]:
    """Return llama-server's arguments for a pair. With None, `p_min` is the server's (0), and `draft` is not used.

    `probabilistic` drafts are drawn, which builds since October 2026 support.
    """
    if draft is None:
        return ["-m", target]
    floor = [] if p_min is None else [P_MIN, f"{p_min:g}"]
    drawn = [SAMPLING, "probabilistic"] if probabilistic else []
    return ["-m", target, "-md", draft, SPEC_TYPE, DRAFT_TYPE, N_MAX, str(n_max), *floor, *drawn]


# Settings of a sampler, by their names in recipes and generation_config.json: the name in GGUF files
# (general.sampling.…), and llama-server's option. If a request names no setting, vLLM, transformers and llama-server
# use the settings in the target's files. If these have none, llama-server uses its own defaults.
Sampling = Mapping[str, float]
SAMPLING_KEYS = {
    "temperature": ("temp", "--temp"),
    "top_k": ("top_k", "--top-k"),
    "top_p": ("top_p", "--top-p"),
    "min_p": ("min_p", "--min-p"),
    "repetition_penalty": ("penalty_repeat", "--repeat-penalty"),
}
# Settings of generation_config.json that recipes do not have, and the values that change nothing.
FOREIGN: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
FOREIGN |= {"epsilon_cutoff": (0,), "eta_cutoff": (0,), "suppress_tokens": ([],), "bad_words_ids": ([],)}


def stated_sampling(target: str) -> dict[str, Any]:
    """Return the sampler settings in a target's files, by the names of `SAMPLING_KEYS` and `FOREIGN`."""
    if is_gguf(target):
        values = open_head(Path(target)).values
        stated = {key: values.get(f"general.sampling.{name}") for key, (name, _) in SAMPLING_KEYS.items()}
    else:
        from distill.engines.torch.hugging_face import text_folder

        path = text_folder(target) / "generation_config.json"
        settings = read_object(path) if path.is_file() else {}
        stated = {key: settings.get(key) for key in (*SAMPLING_KEYS, *FOREIGN)}
    return {key: value for key, value in stated.items() if value is not None and not isinstance(value, bool)}


def other_sampling(target: str, sampling: Sampling) -> str | None:
    """Describe how the sampler in a target's files differs from this one. None if it does not."""
    differences, keys = [], []
    for key, value in stated_sampling(target).items():
        if key in FOREIGN:
            differences += [f"{key} {value!r:.60} (which recipes do not have)"] if value not in FOREIGN[key] else []
        elif not isinstance(value, int | float):
            differences.append(f"{key} {value!r:.60}, which is not a number")
        elif sampling["temperature"] or key in ("temperature", "repetition_penalty"):  # Greedy decoding ignores others.
            value = max(value, 0) if key == "top_k" else value  # Servers accept -1 for off.
            if not math.isclose(value, sampling[key], rel_tol=1e-5, abs_tol=1e-9):
                differences.append(f"{key} {value:.6g} (here {sampling[key]:g})")
                keys.append(f"{'answers' if key == 'repetition_penalty' else 'sampler'}.{key}={value:.6g}")
    if not differences:
        return None
    place = "general.sampling" if is_gguf(target) else "generation_config.json"
    advice = "remove the settings that you do not serve"
    if keys:
        advice = f"if you serve with these settings, learn and measure with them ({' '.join(keys)})"
        advice += "; otherwise serve with the report's commands, which contain the recipe's sampler"
    return (
        f"the target's {place} has another sampler than the recipe: {', '.join(differences)}. vLLM, transformers and "
        f"llama-server use it if a request names none: {advice}"
    )


def _llama_sampling(sampling: Sampling | None) -> list[str]:
    return [word for key, value in (sampling or {}).items() for word in (SAMPLING_KEYS[key][1], f"{value:g}")]


def _vllm_sampling(sampling: Sampling | None) -> str:
    if not sampling:
        return ""
    return f" \\\n  --override-generation-config {shlex.quote(json.dumps(dict(sampling)))}"


def served_name(reference: str) -> str:
    """Return the name under which other programs open a model.

    For a base with an adapter it is the folder into which both were merged. If that folder cannot be found, because
    the base or the adapter is not on this machine, the name is a placeholder.
    """
    if parts_of(reference)[1] is None:
        return reference
    from distill.engines.torch.hugging_face import local_folder

    try:
        return str(local_folder(reference, weights=False))
    except DistillError:
        return "merged-target"


def llama_server(
    target: str, draft: str | None, n_max: int, p_min: float | None = None, sampling: Sampling | None = None
) -> str:
    """Return the command that serves two GGUF files. The sampler applies if a request names none."""
    return shlex.join(["llama-server", *pair_arguments(target, draft, n_max, p_min), *_llama_sampling(sampling)])


def vllm(
    target: str,
    draft: str,
    length: int,
    probabilistic: bool = False,
    same_vocabulary: bool = True,
    sampling: Sampling | None = None,
) -> str:
    """Return the command that serves two Hugging Face folders. The sampler applies if a request names none.

    By default vLLM drafts the draft's best tokens. `probabilistic` drafts are drawn. If the vocabularies differ, only
    best tokens that both vocabularies have are drafted.
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
    """Return the greatest depth, up to IK_DEPTH, at which ik_llama.cpp reads a corpus of this many tokens."""
    return min(IK_DEPTH, IK_INSERTED // max(tokens, 1))


def drafting_from_texts(
    server: str, target: str, file: str, texts: int, tokens: int, sampling: Sampling | None = None
) -> str:
    """Return a server's command that drafts from a file of texts and tokens (teacher/ngrams.py), without a draft model.

    The sampler applies if a request names none. SGLang takes no sampler.
    """
    model, sampled = shlex.quote(target), "".join(f" {word}" for word in _llama_sampling(sampling))
    if server == "llama.cpp":
        return f"llama-server -m {model} {SPEC_TYPE} ngram-cache --lookup-cache-static {shlex.quote(file)}{sampled}"
    if server == "ik_llama":
        quoted = file.replace("\\", "\\\\").replace("'", "\\'")
        stage = f"suffix:suffix_max_depth={suffix_depth(tokens)},suffix_corpus='{quoted}'"
        return f"llama-server -m {model} {SPEC_TYPE} {shlex.quote(stage)}{sampled}"
    if server == "sglang":
        budget = ["--speculative-ngram-external-sam-budget", str(SGLANG_NODES)]
        if texts + tokens > SGLANG_TOKENS:  # SGLang also counts a mark between texts.
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
    """Return the server command that is nearest to what one of our backends decoded.

    With a draft, the server drafts `length` tokens. For the n-grams of a `run`, the command writes them first and
    prints the server's command.
    """
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
    """Return SGLang's command for a draft with the target's vocabulary."""
    options = {"algorithm": "STANDALONE", "draft-model-path": draft, "num-steps": length, "eagle-topk": 1}
    options |= {"num-draft-tokens": length + 1}
    words = [word for name, value in options.items() for word in (f"--speculative-{name}", str(value))]
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", target, *words])


def transformers(target: str, draft: str, length: int, same_vocabulary: bool, sampling: Sampling | None = None) -> str:
    """Return Python code that continues a text with two Hugging Face folders and this sampler."""
    given = dict(sampling or {})
    if given and not given["temperature"]:
        given = {"repetition_penalty": given["repetition_penalty"]}
    drawn = {} if not sampling else {"do_sample": bool(sampling["temperature"])} | given
    extra = "".join(f", {key}={value}" for key, value in drawn.items())
    extra += "" if same_vocabulary else ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer"
    # If the vocabularies differ in size, transformers needs both tokenizers.
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


# ── Draft heads that a target ships: inside the model (multi-token prediction), or in other files of its folder ──
# Names of keys and tensors: DeepSeek-V3, GLM-4.5, Qwen3.5, MiMo. Names of architectures: llama.cpp, SGLang, DFlash.

HEAD_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # in config.json
HEAD_TENSORS = re.compile(r"(^|\.)(mtp|mtp_layers|nextn|eh_proj)\.")
HEAD_KINDS = {"eagle3": "EAGLE-3", "dflash": "DFlash"}  # the servers' names
MOST_BESIDE = 64  # At most this many neighbouring files or folders are read.
MORE = "docs/choosing.md#drafts-of-other-kinds says when a plain draft still wins"
MTP_OF_FILES, MTP = f"{SPEC_TYPE} draft-mtp {N_MAX} 3", {"method": "mtp", "num_speculative_tokens": 1}


def refuse_head_file(head: FileHead) -> None:
    """Raise DataError for a GGUF file that contains a draft head, as `refuse_head` does for a folder."""
    if (kind := head.text("general.architecture")) in HEAD_KINDS:
        command = shlex.join(["llama-server", "-m", "TARGET", "-md", str(head.path), SPEC_TYPE, f"draft-{kind}"])
        head.refuse(
            f"it is a head ({HEAD_KINDS[kind]}), which drafts from the hidden states of its target",
            f"serve it with its target: {command}; to draft here, give a complete model",
        )


def shipped_heads(target: str) -> list[str]:
    """Return a line for each head of a model folder, hub name or GGUF file: its use, or that this copy lacks it.

    Empty for a hub name whose files are not available. DataError for a damaged GGUF file or config.json.
    """
    heads = list(_heads_of_file(Path(target)) if is_gguf(target) else _heads_of_folder(target))
    return [*heads, MORE] if heads else []


def _heads_of_file(path: Path) -> Iterator[str]:
    head, key = open_head(path), "nextn_predict_layers"
    yield from _inside(key, head.size(key, 0, 2**16), head.shapes, f"llama-server {MTP_OF_FILES}")
    others = sorted(file for file in path.parent.glob("*.gguf") if file != path)
    for other in itertools.islice(others, MOST_BESIDE):
        with contextlib.suppress(DistillError, OSError):
            kind = open_head(other).text("general.architecture")
            if kind in HEAD_KINDS:
                use = f"llama-server -md {shlex.quote(str(other))} {SPEC_TYPE} draft-{kind}"
                yield f"target: {other.name} in its folder is for {HEAD_KINDS[kind]}; if made for this target: {use}"


def _heads_of_folder(target: str) -> Iterator[str]:
    from distill.engines.torch.hugging_face import local_snapshot, text_folder

    try:
        folder = text_folder(target)
    except DistillError:  # `plan` needs only a configuration.
        return
    config = _language(read_object(folder / "config.json"))
    key = next((key for key in HEAD_KEYS if config.get(key)), "")
    names, whole = ["mtp."], local_snapshot(target) if key else None
    if whole is not None:
        with contextlib.suppress(DistillError, OSError):  # Without weights, config.json is believed.
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
    """Return a configuration with the values of its language model, if that is one of several parts."""
    inner = config.get("text_config")
    return config | inner if isinstance(inner, dict) else config


def _inside(key: str, layers: Any, names: Iterable[str], use: str) -> Iterator[str]:
    """Yield a line about a head inside the target, if config.json states `layers` of it. `names` are its tensors."""
    about = f"a head for multi-token prediction ({key} {layers})"
    if layers and any(map(HEAD_TENSORS.search, names)):
        yield f"target: it has {about}; measure it first: {use}"
    elif layers:
        yield f"target: it states {about}, but has no tensor of it: this copy lost it"
