"""Compare distill with its peers on Qwen2.5-Coder-1.5B-Instruct and its 0.5B sibling: whole greedy requests with KL.

    python scripts/qwen_coder.py
    python -m venv PEER && PEER/bin/pip install openvino-genai==2026.4.1.0 optimum-intel nncf torch==2.13.0
    python scripts/benchmarks/coder_pair.py build/qwen-coder/*1.5b*.gguf build/qwen-coder/*0.5b*.gguf --prompts FILE \\
        --openvino PEER/bin/python --to FOLDER [--ours DRAFT.gguf] [--server llama-server] --rounds 3

The peers of distill in PyTorch, llama.cpp and ik_llama.cpp are llama-server's own drafting (from the wheel xllamacpp
without --server), transformers' assisted generation, and OpenVINO GenAI in 8 bits. Each decodes plainly, with an n-gram
lookup and with the sibling. `--ours` adds a draft made here to distill and llama-server. Every way runs in a process of
its own in every round, and the order differs between rounds. It continues the first prompt once before it is timed. KL
compares a target with the float32 reading of the file, on its greedy texts. FOLDER keeps converted models and rounds. A
call that was stopped continues.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import beside_openvino as base
from beside_openvino import PLAIN, Text

SERVER_SECONDS = 300.0
TYPES = {PLAIN: (), "draft": ("--spec-type", "draft-simple"), "lookup": ("--spec-type", "ngram-mod")}


def server_texts(way: dict[str, Any], given: dict[str, Any]) -> list[Text]:
    """Return texts of a llama-server, by the clock of its client."""
    from distill.serving.check import LlamaClient
    from distill.serving.server import Http, LlamaServer, started

    with contextlib.ExitStack() as stack:
        if given["server"]:
            binary = Path(given["server"])
        else:
            sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
            import wheel_server

            binary = wheel_server.program(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        draft = Path(way["draft"]) if way["drafter"] == "draft" else None
        settings = LlamaServer(
            *(binary, Path(way["model"]), draft, way.get("length", 4)),
            threads=given["threads"],
            context=base.CONTEXT,
            further=TYPES[way["drafter"]],
        )
        running = stack.enter_context(started(settings, SERVER_SECONDS))
        client = LlamaClient(stack.enter_context(contextlib.closing(Http(running.url, SERVER_SECONDS))))
        replies = [client.complete(ids, given["tokens"]) for ids in [given["prompts"][0], *given["prompts"]]]
    return [(list(reply.tokens), reply.first_seconds, reply.seconds) for reply in replies[1:]]


def transformers_texts(way: dict[str, Any], given: dict[str, Any]) -> list[Text]:
    """Return texts of transformers' generate, with its own assistant or prompt lookup."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(given["threads"])
    target = AutoModelForCausalLM.from_pretrained(way["model"], dtype=torch.bfloat16)
    drafting: dict[str, Any] = {"prompt_lookup_num_tokens": 10} if way["drafter"] == "lookup" else {}
    if way["drafter"] == "draft":
        drafting = {"assistant_model": AutoModelForCausalLM.from_pretrained(way["draft"], dtype=torch.bfloat16)}
    continued = []
    for ids in [given["prompts"][0], *given["prompts"]]:
        asked = torch.tensor([ids])
        settings = {"do_sample": False, "max_new_tokens": given["tokens"], "eos_token_id": given["ends"]}
        # The model's own file asks for a penalty and a sampler.
        settings |= {"repetition_penalty": 1.0, "temperature": None, "top_p": None, "top_k": None}
        started = time.perf_counter()
        with torch.inference_mode():
            made = target.generate(asked, attention_mask=torch.ones_like(asked), **settings, **drafting)
        continued.append((made[0, len(ids) :].tolist(), 0.0, time.perf_counter() - started))
    return continued[1:]


def texts(way: dict[str, Any], given: dict[str, Any]) -> list[Text]:
    """Return the texts of a way to decode, with their seconds."""
    peers = {"llama-server": server_texts, "transformers": transformers_texts, "openvino": base.openvino_texts}
    return peers.get(way["engine"], base.our_texts)(way, given)


def prepared(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return every way to decode, and the settings that all of them share."""
    from distill.data.prompts import read_user_prompts, sources_of
    from distill.engines.ends import target_ends
    from distill.engines.torch.hugging_face import load_tokenizer
    from distill.gguf.importing import read_import, write_import
    from distill.machine import thread_count
    from distill.recipe import Chat, Corpus

    folder = options.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folders = {}
    for name, file in {"target": options.target, "sibling": options.sibling}.items():
        folders[name] = folder / name
        if not folders[name].exists():
            write_import(read_import(file), folders[name])
    files = {"sibling": options.sibling.resolve()} | ({"ours": options.ours.resolve()} if options.ours else {})
    target, whole = str(options.target.resolve()), str(folders["target"])
    ways: list[dict[str, Any]] = []

    def add(engine: str, model: str, drafter: str, draft: Any = None, which: str = "", **settings: Any) -> None:
        name = f"{engine}, {which or drafter}"
        way = {"name": name, "engine": engine, "model": model, "drafter": drafter, "draft": str(draft)}
        ways.append({"dtype": "auto", **way, **settings})

    rule = {"rule": "expected-value", "length": 8}
    bits = {"pytorch": {"target_weights": "file"}}
    ours: dict[str, tuple[str, dict[str, Any]]] = {
        "pytorch": (whole, {"dtype": "bfloat16"}),
        "pytorch in the file's bits": (target, bits),
        "llama.cpp": (target, {}),
        "ik": (target, {}),
    }
    for engine, (model, how) in ours.items():
        kinds = files | {"sibling": folders["sibling"]} if "pytorch" in engine else files
        add(engine, model, PLAIN, configuration={"drafter": "none"}, **how)
        add(engine, model, "lookup", configuration={"drafter": "lookup", "rule": "expected-value"}, **how)
        for name, draft in kinds.items():
            for which, drafter in ((name, "draft"), (f"lookup + {name}", "lookup+draft")):
                add(engine, model, drafter, draft, which, configuration={"drafter": drafter, **rule}, **how)
    for drafter, which, draft in ((PLAIN, PLAIN, None), ("lookup", "ngram-mod", None)):
        add("llama-server", target, drafter, draft, which, read_by="llama.cpp")
    for name, draft in files.items():
        add("llama-server", target, "draft", draft, f"draft-simple 4, {name}", length=4, read_by="llama.cpp")
    for drafter in (PLAIN, "lookup", "draft"):
        which = "assistant" if drafter == "draft" else ""
        add("transformers", whole, drafter, folders["sibling"], which, read_by="pytorch")
    if options.openvino:
        converted = {
            name: base.convert(options.openvino, place, "int8", folder / f"{name}-int8")
            for name, place in folders.items()
        }
        for drafter, length in ((PLAIN, 0), ("lookup", 5), ("draft", 4)):
            which = f"int8, {'sibling' if drafter == 'draft' else drafter}"
            add("openvino", str(converted["target"]), drafter, converted["sibling"], which, length=length)
    corpus = Corpus(sources=sources_of(options.prompts))
    read = read_user_prompts(target, corpus, Chat(), options.count, 64, base.CONTEXT - options.tokens - 16)
    ends = target_ends(whole, load_tokenizer(whole)).ids
    given = {"folder": str(folder), "prompts": [sample.prompt for sample in read.measured], "tokens": options.tokens}
    return ways, given | {"threads": thread_count(options.threads), "ends": ends, "server": options.server}


def same_texts(ways: Sequence[dict[str, Any]], rounds: Sequence[dict[str, Any]]) -> str:
    """Count, for each way, the texts that equal those of the same engine's plain decoding."""
    first: dict[str, list[list[int]]] = {}
    for record in rounds:
        first.setdefault(record["name"], [ids for ids, *_ in record["texts"]])
    counts = []
    for way in ways:
        decoded = first[way["name"]]
        plain = next(other["name"] for other in ways if (other["engine"], other["drafter"]) == (way["engine"], PLAIN))
        if way["name"] != plain:
            same = sum(a == b for a, b in zip(decoded, first[plain], strict=True))
            counts.append(f"{way['name']} {same}")
    return f"Texts equal to the engine's plain ones, of {len(decoded)}: {'; '.join(counts)}."


def main() -> None:
    """Measure the pair."""
    if sys.argv[1:2] == ["--worker"]:
        work = base.WORK | {"texts": texts}
        print(json.dumps(work[sys.argv[2]](*json.load(sys.stdin))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("sibling", type=Path)
    parser.add_argument("--ours", type=Path, help="a GGUF draft made here")
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--openvino", help="the Python of OpenVINO's environment")
    parser.add_argument("--server", help="a llama-server; by default the wheel's")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    base.benchmark(parser.parse_args(), prepared, __file__, same_texts)


if __name__ == "__main__":
    main()
