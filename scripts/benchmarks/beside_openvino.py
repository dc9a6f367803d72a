"""Compare distill with OpenVINO GenAI on a CPU: whole requests, tokens after the first, and each KL to float32.

    python -m venv PEER && PEER/bin/pip install openvino-genai==2026.4.1.0 optimum-intel nncf torch
    python scripts/benchmarks/beside_openvino.py RUN --openvino PEER/bin/python --to FOLDER --library llama.cpp

RUN has a trained draft, a table and test prompts, which are continued greedily. Every way to decode runs in a process
of its own in every round, and the order differs between rounds. It continues the first prompt once before it is timed.
FOLDER keeps the models that OpenVINO's own tools converted, float32's greedy texts with their distributions, the KL of
each model on them (token by token), and the rounds. A call that was stopped continues, and more --rounds add rounds.
Seconds are medians of a prompt's rounds. Intervals resample prompts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy

PLAIN = "plain"
CONTEXT = 1024
Text = tuple[list[int], float, float]  # ids, seconds to the first id, seconds in all
Continued = tuple[list[int], list[int]]  # a prompt, and its text


# ── In a process of its own. OpenVINO's environment has no distill, so nothing above may need it. ──


def openvino_texts(way: dict[str, Any], given: dict[str, Any]) -> list[Text]:
    import openvino
    import openvino_genai

    threads = {"INFERENCE_NUM_THREADS": given["threads"]}
    drafting: dict[str, Any] = {"prompt_lookup": True} if way["drafter"] == "lookup" else {}
    if way["drafter"] == "draft":
        drafting = {"draft_model": openvino_genai.draft_model(way["draft"], "CPU", **threads)}
    pipeline = openvino_genai.LLMPipeline(way["model"], "CPU", **threads, **drafting)
    config = pipeline.get_generation_config()
    config.max_new_tokens, config.do_sample, config.apply_chat_template = given["tokens"], False, False
    config.set_eos_token_id(given["ends"][0])
    config.stop_token_ids = set(given["ends"])
    if drafting:
        config.num_assistant_tokens = way["length"]
    if way["drafter"] == "lookup":
        config.max_ngram_size = 3
    texts = []
    for ids in [given["prompts"][0], *given["prompts"]]:
        inputs = [openvino.Tensor(numpy.array([row], numpy.int64)) for row in (ids, [1] * len(ids))]
        started = time.perf_counter()
        result = pipeline.generate(openvino_genai.TokenizedInputs(*inputs), config)
        seconds = time.perf_counter() - started
        texts.append((list(result.tokens[0]), result.perf_metrics.get_ttft().mean / 1e3, seconds))
    return texts[1:]


def openvino_logits(way: dict[str, Any], given: dict[str, Any], texts: Sequence[Continued]) -> Iterable[Any]:
    """Yield logits of every position after the prompts, as in decoding: prompts at once, then token by token."""
    import openvino

    core = openvino.Core()
    model = core.read_model(f"{way['model']}/openvino_model.xml")
    request = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": given["threads"]}).create_infer_request()
    names = {name for port in request.model_inputs for name in port.names}
    for prompt, text in texts:
        request.reset_state()
        for start, step in [(0, prompt), *((len(prompt) + at, [token]) for at, token in enumerate(text[:-1]))]:
            end = start + len(step)
            values = {
                "input_ids": [step],
                "attention_mask": [[1] * end],
                "position_ids": [list(range(start, end))],
                "beam_idx": [0],
            }
            kinds = {name: numpy.int32 if name == "beam_idx" else numpy.int64 for name in values}
            request.infer({n: openvino.Tensor(numpy.array(v, kinds[n])) for n, v in values.items() if n in names})
            yield request.get_tensor("logits").data[0, -1]


def our_pair(way: dict[str, Any], given: dict[str, Any]) -> Any:
    import torch

    from distill.engines.loaded import load_pair
    from distill.recipe import Configuration, Gguf, PyTorch, Target, parse_section

    torch.set_num_threads(given["threads"])
    configuration = parse_section(Configuration, way["configuration"])
    target = parse_section(Target, {"model": way["model"], "dtype": way["dtype"]})
    options = {"target": {"library": "ik"}} if way["engine"] == "ik" else {}
    draft = way["draft"] if configuration.asks_the_draft else None
    nodes = configuration.most_nodes if target.model.endswith(".gguf") and configuration.counts_ngrams else 0
    gguf = parse_section(Gguf, options)
    pytorch = parse_section(PyTorch, way.get("pytorch", {}))
    return load_pair(target, draft, tokens=CONTEXT, nodes=nodes, threads=given["threads"], gguf=gguf, pytorch=pytorch)


def our_texts(way: dict[str, Any], given: dict[str, Any]) -> list[Text]:
    from distill.recipe import Configuration, Sampler, parse_section
    from distill.serving.answering import Continuation, begin

    configuration = parse_section(Configuration, way["configuration"])
    table = Path(given["run"]) if "run" in given and configuration.counts_ngrams else None
    request = Continuation(configuration, Sampler(temperature=0), table=table)
    texts = []
    with our_pair(way, given) as pair:
        for ids in [given["prompts"][0], *given["prompts"]]:
            result = begin(pair, None, request).text(ids, given["tokens"])
            texts.append((result.tokens, result.prefill_seconds, result.prefill_seconds + result.seconds))
    return texts[1:]


def our_logits(way: dict[str, Any], given: dict[str, Any], texts: Sequence[Continued]) -> Iterable[Any]:
    """See `openvino_logits`."""
    with our_pair(way, given) as pair:
        for prompt, text in texts:
            pair.target.rollback([0])
            for step in [prompt, *([token] for token in text[:-1])]:
                yield pair.target.extend(step, want=[len(step) - 1]).full()[-1].float().numpy()


def logprobs(logits: Any) -> Any:
    shifted = logits.astype(numpy.float64) - logits.max()
    return shifted - numpy.log(numpy.exp(shifted).sum())


def divergence(way: dict[str, Any], given: dict[str, Any]) -> float:
    """Return the mean KL(float32 ‖ model) in nats over the positions of float32's greedy texts."""
    folder = Path(given["folder"])
    texts = json.loads((folder / "texts.json").read_text())
    exact = numpy.load(folder / "logprobs.npy", mmap_mode="r")
    logits = openvino_logits if way["engine"] == "openvino" else our_logits
    divergences = []
    for p, row in zip(exact, logits(way, given, texts), strict=True):
        p = p.astype(numpy.float64)
        q = logprobs(row[: len(p)])
        divergences.append(float((numpy.exp(p) * (p - q)).sum()))
    return statistics.fmean(divergences)


def write_exact(way: dict[str, Any], given: dict[str, Any]) -> None:
    """Write the greedy texts of float32, and its distributions at their positions."""
    folder = Path(given["folder"])
    texts = [(ids, new) for ids, (new, *_) in zip(given["prompts"], our_texts(way, given), strict=True)]
    rows = [logprobs(row) for row in our_logits(way, given, texts)]
    numpy.save(folder / "logprobs.npy", numpy.array(rows, numpy.float32))
    (folder / "texts.json").write_text(json.dumps(texts))


WORK: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "exact": write_exact,
    "kl": divergence,
    "texts": lambda way, given: (openvino_texts if way["engine"] == "openvino" else our_texts)(way, given),
}


# ── The benchmark ──


def ask(work: str, way: dict[str, Any], given: dict[str, Any], openvino: str, script: str) -> Any:
    """Return the result of a script's `--worker` in a fresh process."""
    python = openvino if way["engine"] == "openvino" else sys.executable
    environment = os.environ | {"OMP_NUM_THREADS": str(given["threads"])}
    command, asked = [python, script, "--worker", work], json.dumps([way, given])
    return json.loads(finished(command, f"{way['name']}: {work}", input=asked, env=environment).splitlines()[-1])


def finished(command: list[str], label: str, **settings: Any) -> str:
    """Return the output of a command. If it fails, end the script with its last words."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **settings)
    if done.returncode:
        sys.exit(f"{label} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def convert(python: str, model: Path, kind: str, place: Path) -> Path:
    """Convert a Hugging Face folder with OpenVINO's own tool."""
    if not (place / "openvino_model.xml").exists():
        command = [str(Path(python).parent / "optimum-cli"), "export", "openvino", "--model", str(model)]
        command += ["--task", "text-generation-with-past", "--weight-format", kind, str(place)]
        print(shlex.join(command), file=sys.stderr)
        finished(command, shlex.join(command))
    return place


def prepared(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return every way to decode, and the settings that all of them share."""
    from distill.data.samples import read_prompts
    from distill.engines.ends import target_ends
    from distill.engines.torch.hugging_face import load_tokenizer
    from distill.gguf.importing import read_import, write_import
    from distill.gguf.writer import export_gguf
    from distill.machine import thread_count
    from distill.recipe import load_recipe
    from distill.run import Run

    recipe = load_recipe(options.run / "config.yaml")
    run, folder = Run(options.run.resolve(), recipe), options.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    target, source, draft = recipe.target.model, folder / "target", str(run.path("draft"))
    if not target.endswith(".gguf"):
        source = Path(target)
    elif not source.exists():
        write_import(read_import(Path(target)), source)
    files = {"llama.cpp": Path(target) if target.endswith(".gguf") else folder / "target-f16.gguf"}
    files["ik"] = folder / "target-q8_0.gguf"
    for name, file in files.items():
        if name in options.library and not file.exists():
            export_gguf(source, file, file.stem.rpartition("-")[2])
    ways: list[dict[str, Any]] = []

    def add(engine: str, model: Path, **settings: Any) -> None:
        name = f"{engine}, {model.stem if model.suffix == '.gguf' else settings['dtype']}, {settings['drafter']}"
        length = f" of {settings['length']}" if settings.get("length") else ""
        ways.append({"name": name + length, "engine": engine, "model": str(model), **settings})

    for engine, model in {"pytorch": source, **{name: files[name] for name in options.library}}.items():
        for drafter in (PLAIN, "lookup", "table"):
            configuration = {"drafter": drafter, "rule": "expected-value"} if drafter != PLAIN else {"drafter": "none"}
            dtype = "bfloat16" if engine == "pytorch" else "auto"
            add(engine, model, drafter=drafter, configuration=configuration, dtype=dtype, draft=draft)
    for kind in ("int8", "fp16"):
        model = convert(options.openvino, source, kind, folder / kind)
        add("openvino", model, dtype=kind, drafter=PLAIN)
        for length in (3, 5):
            add("openvino", model, dtype=kind, drafter="lookup", length=length)
        small = convert(options.openvino, Path(draft), kind, folder / f"draft-{kind}")
        add("openvino", model, dtype=kind, drafter="draft", length=1, draft=str(small))
    prompts = [sample.prompt for sample in read_prompts(run, "test")][: options.count]
    ends = target_ends(str(source), load_tokenizer(str(source))).ids
    given = {"run": str(run.folder), "folder": str(folder), "prompts": prompts, "tokens": options.tokens}
    given |= {"threads": thread_count(options.threads), "ends": ends}
    return ways, given


def table(
    ways: Sequence[dict[str, Any]], rounds: list[dict[str, Any]], kl: dict[str, float], command: str, note: str
) -> str:
    """Return the Markdown table, with the fastest whole requests first."""
    from distill.tables import Cell, Row, Table, document, speed_ratio

    def columns(name: str) -> tuple[list[int], list[float], list[float]]:
        """Return, by prompt: tokens, median seconds after the first token, median seconds in all."""
        prompts = [*zip(*(record["texts"] for record in rounds if record["name"] == name), strict=True)]
        later_seconds = [statistics.median(whole - first for _, first, whole in texts) for texts in prompts]
        seconds = [statistics.median(whole for *_, whole in texts) for texts in prompts]
        return [len(texts[0][0]) for texts in prompts], later_seconds, seconds

    rows: list[tuple[float, Row]] = []
    for way in ways:
        plain = next(
            other["name"]
            for other in ways
            if (other["engine"], other["model"], other["drafter"]) == (way["engine"], way["model"], PLAIN)
        )
        tokens, later_seconds, seconds = columns(way["name"])
        base_tokens, _, base = columns(plain)
        rate = sum(tokens) / sum(seconds)
        first = statistics.median(whole - later for whole, later in zip(seconds, later_seconds, strict=True)) * 1e3
        cells: Row = [
            way["name"],
            Cell(kl[reading(way)], ".4f"),
            Cell(first, ".0f"),
            Cell((sum(tokens) - len(tokens)) / sum(later_seconds), ".1f"),
            Cell(rate, ".1f"),
            None if way["drafter"] == PLAIN else speed_ratio(tokens, seconds, base_tokens, base),
        ]
        rows.append((-rate, cells))
    heads = ["decoder", "KL", "first token, ms", "tokens/s after it", "tokens/s with the prompt", "÷ its plain"]
    ordered = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    return document([Table(heads, ordered, command=command, note=note)])


def reading(way: dict[str, Any]) -> str:
    """Name what decides on a target's distributions: its weights, and the engine that computes with them."""
    return f"{way['model']} in {way.get('read_by', way['engine'])}"


def read_rounds(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def benchmark(
    options: argparse.Namespace,
    prepared: Callable[[argparse.Namespace], tuple[list[dict[str, Any]], dict[str, Any]]],
    script: str,
    more: Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], str] = lambda ways, rounds: "",
) -> None:
    """Make what is missing, measure the rounds in processes of `script`, and print the table.

    `more` returns a sentence about ways and rounds.
    """
    from distill.errors import DistillError
    from distill.machine import machine

    try:
        ways, given = prepared(options)
    except DistillError as error:
        sys.exit(f"{Path(script).stem}: {error}")
    folder, openvino = Path(given["folder"]), options.openvino or ""
    if not (folder / "texts.json").exists():
        in_pytorch = next(way for way in ways if way["engine"] == "pytorch")
        ask("exact", in_pytorch | {"dtype": "float32"}, given, openvino, script)
    kept = folder / "kl.json"
    kl: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    for way in ways:
        if reading(way) not in kl:
            kl[reading(way)] = ask("kl", way, given, openvino, script)
            kept.write_text(json.dumps(kl))
    path = folder / "rounds.jsonl"
    done = Counter(record["name"] for record in read_rounds(path))
    for number in range(options.rounds):
        for place in range(len(ways)):
            way = ways[(place + number * 5) % len(ways)]
            if done[way["name"]] > number:
                continue
            print(f"round {number + 1}: {way['name']}", file=sys.stderr)
            texts = ask("texts", way, given, openvino, script)
            with path.open("a") as file:
                file.write(json.dumps({"name": way["name"], "texts": texts}) + "\n")
    rounds = read_rounds(path)
    command = f"python scripts/benchmarks/{Path(script).name} {shlex.join(sys.argv[1:])}"
    note = (
        f"{datetime.date.today()}; {machine()['cpu']}, {given['threads']} threads; {len(given['prompts'])} prompts × "
        f"{options.tokens} tokens, {options.rounds} rounds. {more(ways, rounds)}"
    )
    print(table(ways, rounds, kl, command, note.strip()))


def main() -> None:
    """Measure a run's pair."""
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(WORK[sys.argv[2]](*json.load(sys.stdin))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--openvino", required=True, help="the Python of OpenVINO's environment")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--library", action="append", choices=["llama.cpp", "ik"], default=[])
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    benchmark(parser.parse_args(), prepared, __file__)


if __name__ == "__main__":
    main()
