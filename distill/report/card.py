"""The model card of a draft: the README.md in its folder, Markdown under YAML front matter."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence

import yaml

from distill.report.text import (
    MEASURES,
    RATES,
    Results,
    best_rows,
    clean,
    grown_pairs,
    interval,
    is_grown,
    limits,
    machine_words,
    number,
    percent,
    plain_row,
    sampler_words,
    significant,
    size,
    speedup_interval,
    trained_tokens,
    training_steps,
    verdict,
)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FALLBACK_LENGTH = 4


def build_card(results: Results) -> str:
    """The whole card; a stage that has not run leaves one line that says so."""
    parts = [
        _front_matter(results),
        f"# {_words(results['name'])}",
        _what(results),
        "## How it was made",
        _how(results),
        "## Numbers",
        _acceptance(results),
        _speedup(results),
        _gguf(results),
        "## How to use it",
        _use(results),
        "## Limits",
        "\n".join(f"- {_words(sentence)}" for sentence in limits(results)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(results: Results) -> str:
    head: Results = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "assisted-generation", "distill"],
    }
    donor = clean((results.get("donor") or {}).get("path", ""))
    if HUB_NAME.fullmatch(donor):  # the hub refuses a base_model that is a path of this machine
        head["base_model"] = donor
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---"


def _words(text: object) -> str:
    """Foreign text as plain Markdown words: no markup of its own takes effect, lines stay one line."""
    flat = " ".join(clean(text).split())
    return re.sub(r"([\\`*_\[\]#|~$])", r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _code(text: object) -> str:
    """A code span whose fence is longer than any run of backticks inside; bars are safe for tables."""
    flat = " ".join(clean(text).split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", flat)), default=0))
    space = " " if "`" in flat else ""
    return f"{fence}{space}{flat}{space}{fence}"


def _block(language: str, text: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], command: object) -> str:
    lines = [f"| {' | '.join(headers)} |", "|" + "---|" * len(headers)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + f"\n\n{_block('sh', ' '.join(clean(command).split()))}"


def _not_run(stage: str) -> str:
    return f"The stage `{stage}` has not run."


def _pair(name: str, grown: set[str]) -> str:
    return _words(name) + (" **(grown)**" if is_grown(name, grown) else "")


def _what(results: Results) -> str:
    target, draft = results["target"], results["draft"]
    grown = " (a **grown** target)" if target.get("grown") else ""
    return (
        f"A draft model for speculative decoding. It proposes tokens that the target {_code(target['path'])}{grown}"
        f" verifies, so that the target's own output comes sooner. It has {number(draft['parameters'])} parameters"
        f" ({size(draft['bytes'])}) beside the target's {number(target['parameters'])} ({size(target['bytes'])})."
        " On its own it is a weak language model and is not meant to be used without its target."
    )


def _how(results: Results) -> str:
    models = [(name, results[name]) for name in ("target", "donor", "draft") if results.get(name)]
    table = _table(
        ["", "path", "architecture", "parameters", "layers", "hidden", "MLP", "vocabulary", "bytes"],
        [
            [
                name + (" (grown)" if model.get("grown") else ""),
                _code(model["path"]),
                _words(model["architecture"]),
                *(number(model[key]) for key in ("parameters", "layers", "hidden", "mlp", "vocabulary", "bytes")),
            ]
            for name, model in models
        ],
        results["command"],
    )
    steps = training_steps(results.get("metrics"))
    if steps:
        first, last = steps[0], steps[-1]
        trained = (
            f"Trained for {number(len(steps))} steps over {number(trained_tokens(steps))} tokens; the loss went "
            f"from {significant(first['loss'])} to {significant(last['loss'])}."
        )
    else:
        trained = _not_run("train") + " These are the weights as cut from the donor."
    machine = results.get("machine") or {}
    recipe = (results.get("config") or {}).get("name") or results["name"]
    start = "Cut from the donor"
    if parent := results.get("parent"):
        start = (
            f"Generation {number(parent['generation'])}: started from the draft of {_code(parent['run'])} "
            f"(digest {_code(parent['digest'])})"
        )
    return (
        f"{start} and trained towards the target with `distill`, recipe {_code(recipe)}, finished "
        f"{_words(results['date'])}, on {_words(machine_words(machine))}; Python {_words(machine.get('python'))}, "
        f"torch {_words(machine.get('torch'))}, transformers {_words(machine.get('transformers'))}.\n\n"
        f"{trained}\n\n{table}"
    )


def _acceptance(results: Results) -> str:
    evaluation = results.get("eval")
    if not evaluation:
        return "### Acceptance and divergence\n\n" + _not_run("eval")
    parts = [
        "### Acceptance and divergence",
        "Before is the draft as cut, after is this draft; brackets hold intervals; sampler: "
        + _words(sampler_words(evaluation))
        + ".",
    ]
    for domain, sides in evaluation["domains"].items():
        before, after = (sides.get(side) or {} for side in ("before", "after"))
        rows = [
            [words, interval(before.get(key), key in RATES), interval(after.get(key), key in RATES)]
            for key, words in MEASURES.items()
        ]
        rows.append(
            [
                "tokens (prompts)",
                *(f"{number(side.get('tokens'))} ({number(side.get('prompts'))})" for side in (before, after)),
            ]
        )
        parts.append(f"**{_words(domain)}**\n\n" + _table(["", "before", "after"], rows, evaluation["command"]))
    return "\n\n".join(parts)


def _speedup(results: Results) -> str:
    speedup, grown = results.get("speedup"), grown_pairs(results)
    if not speedup:
        return "### Speedup\n\n" + _not_run("speedup")
    rows = []
    for row in best_rows(speedup):
        plain = plain_row(speedup, row)
        rows.append(
            [
                _pair(row["pair"], grown),
                _words(row["backend"]),
                str(row["length"]),
                number(plain["tokens_per_second"]) if plain else number(None),
                number(row["tokens_per_second"]),
                percent(row["acceptance"]),
                number(row["tokens_per_round"]),
                speedup_interval(row),
                verdict(row),
                f"{number(row['identical'])} / {number(row['excused'])} / {number(row['different'])}",
            ]
        )
    heads = [
        "pair",
        "backend",
        "γ",
        "plain, tokens/s",
        "speculative, tokens/s",
        "acceptance",
        "tokens per round",
        "speedup",
        "",
        "identical / excused / different",
    ]
    found = (
        "### Speedup\n\nEnd to end against plain decoding of the same target, the fastest of the draft lengths "
        f"tried:\n\n{_table(heads, rows, speedup['command'])}"
    )
    rows = [
        [
            _pair(row["pair"], grown),
            _words(row["backend"]),
            _words(row["way"]),
            speedup_interval(row),
            verdict(row),
            number(row["tokens_per_round"]),
            _words(row["distribution"]),
        ]
        for row in speedup.get("trials") or []
        if row["rule"]
    ]
    if not rows:
        return found
    heads = ["pair", "backend", "way", "speedup", "", "tokens per round", "distribution of the text"]
    return f"{found}\n\nOther ways to decode, each against plain decoding under the same sampler:\n\n" + _table(
        heads, rows, speedup["command"]
    )


def _gguf(results: Results) -> str:
    export = results.get("export")
    if not export:
        return "### GGUF files\n\n" + _not_run("export")
    rows = []
    for file in export["files"]:
        parity = file.get("parity") or {}
        wrong = number(len(parity["tokenizer_mismatches"])) if parity else number(None)
        rows.append(
            [
                _code(file["path"]),
                _pair(file["model"], set()),
                _words(file["outtype"]),
                number(file["bytes"]),
                number(parity.get("positions")),
                percent(parity.get("top1_agreement")),
                significant(parity.get("mean_abs_dlogprob")),
                significant(parity.get("max_abs_dlogprob")),
                f"{wrong} of {number(parity.get('tokenizer_texts'))}",
            ]
        )
    heads = [
        "file",
        "model",
        "type",
        "bytes",
        "positions",
        "top-1 agreement",
        "mean \\|Δ log p\\|",
        "max \\|Δ log p\\|",
        "tokenizer mismatches",
    ]
    return "### GGUF files\n\nEach file in llama.cpp against its Hugging Face model:\n\n" + _table(
        heads, rows, export.get("command", results["command"])
    )


def _use(results: Results) -> str:
    best = {row["backend"]: row["length"] for row in sorted(best_rows(results.get("speedup")), key=_preference)}
    length = best.get("pytorch", max(best.values(), default=FALLBACK_LENGTH))
    return "\n\n".join(
        [
            "transformers:",
            _block("python", _transformers(results, length)),
            "llama.cpp:",
            _block("sh", _llama_cpp(results, best.get("gguf", length))),
            "vLLM:",
            _block("sh", _vllm(results, length)),
            _length_words(bool(best))
            + " These are the options of recent releases of the three; none of these commands "
            "was run to make the numbers above.",
        ]
    )


def _preference(row: Results) -> tuple[bool, float]:
    """Sorts the row to take a draft length from last: the real target before a grown one, then the fastest."""
    return not row.get("grown"), row["speedup"]


def _length_words(measured: bool) -> str:
    return (
        "The draft lengths are those that were fastest on the machine above; measure on yours."
        if measured
        else "No draft length was measured; the ones shown are only a place to start."
    )


def _transformers(results: Results, length: int) -> str:
    target, draft = results["target"], results["draft"]
    same = target["vocabulary"] == draft["vocabulary"]
    extra = "" if same else ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer"
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({clean(target['path'])!r})",
        f"target = AutoModelForCausalLM.from_pretrained({clean(target['path'])!r})",
        f"draft = AutoModelForCausalLM.from_pretrained({clean(draft['path'])!r})",
    ]
    if not same:
        lines += [
            "# the two vocabularies differ in size, so transformers asks for both tokenizers",
            f"assistant_tokenizer = AutoTokenizer.from_pretrained({clean(draft['path'])!r})",
        ]
    lines += [
        f"draft.generation_config.num_assistant_tokens = {length}",
        'draft.generation_config.num_assistant_tokens_schedule = "constant"',
        'inputs = tokenizer("def fibonacci(n):", return_tensors="pt")',
        f"output = target.generate(**inputs, assistant_model=draft{extra}, max_new_tokens=128)",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
    ]
    return "\n".join(lines)


def _llama_cpp(results: Results, length: int) -> str:
    files = (results.get("export") or {}).get("files") or []
    found = {
        model: next((file["path"] for file in files if file["model"] == model), f"{model}.gguf")
        for model in ("target", "draft")
    }
    return (
        f"# older builds say --draft-max instead of --spec-draft-n-max\n"
        f"llama-server -m {shlex.quote(clean(found['target']))} -md {shlex.quote(clean(found['draft']))} "
        f"--spec-draft-n-max {length}"
    )


def _vllm(results: Results, length: int) -> str:
    config = {"model": clean(results["draft"]["path"]), "num_speculative_tokens": length, "method": "draft_model"}
    return (
        f"vllm serve {shlex.quote(clean(results['target']['path']))} \\\n"
        f"  --speculative-config {shlex.quote(json.dumps(config, ensure_ascii=False))}"
    )
