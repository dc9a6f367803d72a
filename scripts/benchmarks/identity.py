"""Compare greedy speculative output with plain output, token by token, for every length rule and tree of a run's pair.

    python scripts/benchmarks/identity.py runs/demo
    python scripts/benchmarks/identity.py runs/demo --backend gguf --configurations "draft, γ = 4" lookup

Fixed lengths 1..8, every other length rule, n-gram lookup alone and before the draft, trees of several sizes, and (in
PyTorch) four texts at once against each alone. Rules that read costs get the run's measured curve; calibrations come
from its speedup stage where it has them. Prompts are pieces of test and then of validation documents.

A first difference is excused where the target's two best logits lie within rounding: 1e-4 in PyTorch fp32; in GGUF the
largest logit difference measured between taking tokens one at a time and nine at once. Excused ones are counted.

Decoded texts are kept in a JSON file in the run directory, by configuration and prompt: the same command resumes after
an interruption and prints the table of everything in that file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distill.benchmark.calibrate import load_calibrations, run_costs
from distill.benchmark.identity import TORCH_NOISE, is_tie, rounding_noise
from distill.files import digest, read_json, write_json
from distill.models.base import Model
from distill.models.gguf.model import MOST_LEAVES, GgufModel
from distill.packing import Packed
from distill.progress import Progress
from distill.recipe import Configuration, load_recipe
from distill.recipe.configuration import RULES
from distill.run import Run
from distill.speculative.configured import NO_COSTS, make_drafter, make_rule
from distill.speculative.decode import decode_text, plain
from distill.speculative.rules import GREEDY, Rules
from distill.speculative.trees.shape import Shape
from distill.texts import first_difference

ROWS = 4  # texts at once
STATIC = Shape.of_widths((3, 2, 1))  # any will do: 15 nodes
Job = tuple[str, Callable[[int], list[list[int]]], int]  # title, texts of the prompts from a number on, and how many
BATCHED = (Configuration(length=4), Configuration(rule="p_min"), Configuration(rule="expected-value"))
CONFIGURATIONS = (
    *(Configuration(length=length) for length in range(1, 9)),
    *(Configuration(rule=rule) for rule in RULES if rule != "fixed"),
    Configuration(rule="expected-value", calibration="features"),
    Configuration(drafter="lookup"),
    Configuration(drafter="lookup+draft", length=4),
    Configuration(drafter="lookup+draft", rule="expected-value"),
    *(
        Configuration(drafter="tree", nodes=nodes, calibration=name)
        for nodes, name in ((4, "none"), (8, "none"), (8, "features"), (16, "features"), (24, "none"))
    ),
    Configuration(drafter="tree", shape="static", nodes=15),
)


def pieces(run: Run, tokens: int, count: int) -> list[list[int]]:
    """Prompts of `tokens` tokens: pieces of all test documents in turn, then of validation documents."""
    found: list[list[int]] = []
    for split in ("test", "validation"):
        blocks = Packed.load(run.path("corpus", f"text-{split}.safetensors"))
        texts = [
            ids[documents == document].tolist()
            for ids, documents in zip(blocks.ids, blocks.documents, strict=True)
            for document in range(int(documents.max()) + 1)
        ]
        cut = [
            (n, text[start : start + tokens])
            for text in texts
            for n, start in enumerate(range(0, len(text) - tokens, 2 * tokens))
        ]
        found += [ids for _, ids in sorted(cut, key=lambda piece: piece[0])]
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--backend", choices=["pytorch", "gguf"], default="pytorch")
    parser.add_argument("--configurations", nargs="+", help="only those whose title begins with one of these")
    parser.add_argument(
        "--kept", type=Path, help="file that keeps the decoded texts; identity-BACKEND.json of the run if left out"
    )
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.run / "config.yaml")
    run = Run(arguments.run.resolve(), recipe)
    prompts = pieces(run, recipe.answers.prompt_tokens, arguments.prompts)
    target, draft = models(run, arguments.backend)
    costs = run_costs(run, arguments.backend) or NO_COSTS
    measured = run.path("speedup", "calibration.json")
    fitted = load_calibrations(measured) if measured.exists() else {}
    path = arguments.kept or run.path(f"identity-{arguments.backend}.json")
    kept = open_kept(path, {"prompts": digest(prompts), "tokens": arguments.tokens, "draft": draft_digest(run)})

    wanted = [
        one
        for one in CONFIGURATIONS
        if not arguments.configurations or any(one.title.startswith(title) for title in arguments.configurations)
    ]
    jobs: list[Job] = [("plain", lambda at: [plain(target, prompts[at], arguments.tokens).tokens], 1)]
    for one in wanted:
        jobs.append((one.title, alone(target, draft, one, prompts, arguments.tokens, costs, fitted), 1))
    if arguments.backend == "pytorch" and not arguments.configurations:
        rows = models(run, arguments.backend, ROWS)
        for one in BATCHED:
            job = together(*rows, one, prompts, arguments.tokens, costs, fitted)
            jobs.append((f"{ROWS} at once: {one.title}", job, ROWS))
    work(jobs, len(prompts), kept, path)
    noise, sizes = TORCH_NOISE, range(0)
    if arguments.backend == "gguf":
        text = kept["texts"]["plain"]["0"]
        sizes = range(2, 10)
        noise = max(rounding_noise(target, prompts[0], text[at : at + 9]) for at in (0, 16) if len(text) > at + 9)
    titles = [title for title, _, _ in jobs[1:]]
    print(f"{arguments.backend}, {len(prompts)} prompts × {arguments.tokens} tokens, rounding {noise:.1e}\n")
    print(table(target, prompts, kept["texts"], titles, noise, sizes))


def models(run: Run, backend: str, rows: int = 1) -> tuple[Any, Any]:
    """Target and draft of a run; several rows only in PyTorch."""
    recipe = run.recipe
    if backend == "gguf":
        names = (run.path("gguf", f"{name}-{recipe.speedup.outtype}.gguf") for name in ("target", "draft"))
        leaves = min(MOST_LEAVES, max(one.nodes or 0 for one in CONFIGURATIONS))
        return tuple(  # type: ignore[return-value]
            GgufModel(path, context=recipe.corpus.block, threads=recipe.threads, max_leaves=leaves) for path in names
        )
    import torch

    from distill.models.batched import BatchedTorchModel
    from distill.models.hugging_face import load_model, load_tokenizer, real_tokens
    from distill.models.torch_model import TorchModel

    folders = (recipe.target.model, str(run.path("draft")))
    found = [load_model(folder, "float32", torch.device("cpu")) for folder in folders]
    size = real_tokens(found[0].config, load_tokenizer(recipe.target.model))
    if rows > 1:
        return tuple(BatchedTorchModel(model, rows, size) for model in found)  # type: ignore[return-value]
    return tuple(TorchModel(model, size) for model in found)  # type: ignore[return-value]


def draft_digest(run: Run) -> Any:
    """A value that differs between trained drafts."""
    return (run.done("train") or {}).get("key")


def open_kept(path: Path, key: dict[str, Any]) -> dict[str, Any]:
    """The texts decoded before with the same prompts, tokens and draft; empty where these differ."""
    if path.exists():
        found: dict[str, Any] = read_json(path)
        if found["key"] == key:
            return found
        print(f"{path} belongs to other prompts, tokens or another draft: starting anew")
    return {"key": key, "texts": {}}


def alone(
    target: Model, draft: Model, one: Configuration, prompts: Sequence[list[int]], tokens: int, costs: Any, fitted: Any
) -> Callable[[int], list[list[int]]]:
    """Decodes one prompt by a configuration, whose rule keeps what it learns for the next prompt."""
    rules = Rules(GREEDY, one.verified_by)
    drafter = make_drafter(one, draft, GREEDY, rules.random, costs, fitted, STATIC if one.needs_tree_choice else None)

    def run(at: int) -> list[list[int]]:
        result = decode_text(target, drafter, prompts[at], tokens, rules)
        return [result.tokens]

    return run


def together(
    target: Any, draft: Any, one: Configuration, prompts: Sequence[list[int]], tokens: int, costs: Any, fitted: Any
) -> Callable[[int], list[list[int]]]:
    """Decodes ROWS prompts at once, from number `at` on."""
    from distill.speculative.batch import decode_batch

    def run(at: int) -> list[list[int]]:
        def rule() -> Any:
            return make_rule(one, costs, fitted)

        some = prompts[at : at + ROWS]
        return [result.tokens for result in decode_batch(target, draft, some, tokens, Rules(), rule)]

    return run


def work(jobs: Sequence[Job], prompts: int, kept: dict[str, Any], path: Path) -> None:
    """Decode the texts that are missing, with a progress bar, saving every half minute and at the end."""
    missing = [
        (title, job, at)
        for title, job, step in jobs
        for at in range(0, prompts, step)
        if any(str(n) not in kept["texts"].get(title, {}) for n in range(at, min(at + step, prompts)))
    ]
    progress, saved = Progress("texts", len(missing)), time.monotonic()
    try:
        for title, job, at in missing:
            for offset, tokens in enumerate(job(at)):
                kept["texts"].setdefault(title, {})[str(at + offset)] = tokens
            progress.step()
            if time.monotonic() - saved > 30:
                write_json(path, kept)
                saved = time.monotonic()
    finally:
        write_json(path, kept)


def table(
    target: Model,
    prompts: Sequence[list[int]],
    texts: dict[str, dict[str, list[int]]],
    titles: Sequence[str],
    noise: float,
    sizes: Sequence[int] = (),
) -> str:
    """One Markdown table: identical, excused and different texts of each configuration, with their sums at the end."""
    lines = ["| configuration | identical | excused (tie) | different |", "|---|--:|--:|--:|"]
    sums = [0, 0, 0]
    ties: dict[tuple[int, int, int], bool] = {}
    for title in titles:
        counts = [0, 0, 0]
        for at, prompt in enumerate(prompts):
            wanted, got = (texts[name][str(at)] for name in ("plain", title))
            where = first_difference(wanted, got)
            if where is None:
                counts[0] += 1
                continue
            key = (at, where, got[where] if where < len(got) else -1)
            if key not in ties:
                ties[key] = is_tie(target, prompt, wanted, got, where, noise, sizes)
            counts[1 if ties[key] else 2] += 1
        lines.append(f"| {title} | {counts[0]} | {counts[1]} | {counts[2]} |")
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
    return "\n".join([*lines, f"| all | {sums[0]} | {sums[1]} | {sums[2]} |"])


if __name__ == "__main__":
    main()
