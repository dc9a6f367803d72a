"""Stage `eval`: target against draft, before and after training, on the test split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.evaluation.measure import (
    METRICS,
    measure_blocks,
    position_acceptance,
    summarise,
    tokens_per_round,
)
from distill.files import write_atomically, write_json, write_text
from distill.models.hugging_face import end_ids, load_model, load_target, load_tokenizer, pick_device, real_tokens
from distill.models.kept import read_kept
from distill.models.torch_model import TorchModel
from distill.packing import Packed, pack
from distill.progress import Progress
from distill.recipe import Evaluate, Recipe
from distill.run import Run
from distill.sampler import Sampler
from distill.speculative.decode import Round, room_for, speculative
from distill.speculative.sample import continue_prompts
from distill.texts import prompt_seed, read_prompts

TITLES = {
    "forward_kl": "KL(target ‖ draft), nats",
    "reverse_kl": "KL(draft ‖ target), nats",
    "total_variation": "total variation",
    "top1_agreement": "top-1 agreement",
    "acceptance_sampling": "acceptance, rejection sampling",
    "acceptance_match": "acceptance, draft's argmax = sampled token",
    "acceptance_greedy": "acceptance, greedy",
    "acceptance_ceiling": "ceiling of acceptance: the target's mass on tokens the draft can speak",
}


def continue_all(
    target: Any,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    limit: int,
    seeds: Sequence[int],
    ends: Sequence[int],
    batch: int,
    vocabulary: int,
) -> list[list[int]]:
    """The target's own continuations of prompts, in batches."""
    limit = min(limit, target.config.max_position_embeddings - max(len(prompt) for prompt in prompts))
    if limit < 1:
        raise DataError("the prompts fill the target's context", "lower answers.prompt_tokens")
    texts: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        rows = slice(start, start + batch)
        texts += continue_prompts(target, prompts[rows], sampler, limit, seeds[rows], ends, vocabulary)
    return texts


def decode_rounds(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    settings: Evaluate,
    ends: Sequence[int],
    title: str,
    vocabulary: int | None = None,
) -> list[list[Round]]:
    """Greedy speculative decoding of every prompt; the rounds of each."""
    first, second = TorchModel(target, vocabulary), TorchModel(draft, vocabulary)
    progress = Progress(title, len(prompts))
    rounds = []
    for prompt in prompts:
        limit = room_for(first, second, len(prompt), settings.new_tokens)
        rounds.append(speculative(first, second, prompt, limit, settings.length, ends).rounds)
        progress.step()
    return rounds


def evaluate_pair(
    target: Any,
    drafts: dict[str, Any],
    domains: dict[str, Packed],
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    settings: Evaluate,
    vocabulary: int,
    ends: Sequence[int],
    divergence: bool = True,
    acceptance: bool = True,
) -> tuple[dict[str, Any], dict[str, list[list[Round]]]]:
    """Everything measured between a target and its drafts, and the decoded rounds of each draft."""
    report: dict[str, Any] = {"sampler": sampler.describe(), "length": settings.length, "domains": {}, "positions": {}}
    if divergence:
        for domain, blocks in domains.items():
            found = measure_blocks(target, drafts, blocks, sampler, vocabulary)
            report["domains"][domain] = {
                name: summarise(*found[name], settings.resamples, settings.confidence) for name in drafts
            }
    rounds: dict[str, list[list[Round]]] = {}
    if acceptance:
        report["tokens_per_round"] = {}
        for name, draft in drafts.items():
            rounds[name] = decode_rounds(target, draft, prompts, settings, ends, f"rounds {name}, prompts", vocabulary)
            own = rounds[name]
            report["positions"][name] = position_acceptance(
                own, settings.length, settings.resamples, settings.confidence
            )
            report["tokens_per_round"][name] = tokens_per_round(own, settings.resamples, settings.confidence)
    return report, rounds


def write_rounds(path: Path, rounds: dict[str, list[list[Round]]]) -> None:
    """rounds.parquet: one row per round (draft, prompt, depth, drafted, accepted, seconds)."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "draft": name,
            "prompt": prompt,
            "depth": r.depth,
            "drafted": r.drafted,
            "accepted": r.accepted,
            "seconds": r.seconds,
        }
        for name, prompts in rounds.items()
        for prompt, own in enumerate(prompts)
        for r in own
    ]
    table = pyarrow.Table.from_pylist(rows)
    write_atomically(path, lambda temporary: pyarrow.parquet.write_table(table, temporary))


def as_markdown(report: dict[str, Any]) -> str:
    """The tables of eval.md."""

    def cell(value: dict[str, float]) -> str:
        return f"{value['mean']:.4f} [{value['low']:.4f}, {value['high']:.4f}]"

    lines = [f"Sampler: {report['sampler']}. Intervals resample prompts or documents.", ""]
    for domain, drafts in report["domains"].items():
        names = list(drafts)
        size = drafts[names[0]]
        lines += [
            f"**{domain}**: {size['tokens']} tokens, {size['prompts']} units",
            "",
            "| | " + " | ".join(names) + " |",
            "|---|" + "---|" * len(names),
        ]
        trimmed = any(drafts[name].get("acceptance_ceiling", {"mean": 1.0})["mean"] < 1 - 1e-6 for name in names)
        shown = [metric for metric in METRICS if trimmed or metric != "acceptance_ceiling"]
        lines += [f"| {TITLES[m]} | " + " | ".join(cell(drafts[n][m]) for n in names) + " |" for m in shown]
        if trimmed:
            lines += [
                "",
                "A trimmed draft: KL(target ‖ draft) is between the distributions over the tokens it can speak.",
            ]
        lines.append("")
    if report["positions"]:
        names = list(report["positions"])
        lines += [
            f"**Acceptance by draft position** (greedy, up to {report['length']} drafted; given that it was reached)",
            "",
            "| position | " + " | ".join(f"{name} (accepted / reached)" for name in names) + " |",
            "|---|" + "---|" * len(names),
        ]
        for index in range(report["length"]):
            rows = [report["positions"][name][index] for name in names]
            cells = [
                f"{r['rate']:.3f} [{r['low']:.3f}, {r['high']:.3f}] ({r['accepted']} / {r['drafted']})"
                if r["drafted"]
                else "never reached"
                for r in rows
            ]
            lines.append(f"| {index + 1} | " + " | ".join(cells) + " |")
        lines.append(
            "| tokens per round | " + " | ".join(cell(report["tokens_per_round"][name]) for name in names) + " |"
        )
        lines.append("")
    if "command" in report:
        lines.append(f"`{report['command']}`")
    return "\n".join(lines) + "\n"


def evaluate(recipe: Recipe, run: Run) -> list[Path]:
    """Write eval.json, eval.md and rounds.parquet: the draft before (cut/) and after (draft/) training."""
    device = pick_device(recipe.device)
    target = load_target(recipe.target, device)
    tokenizer = load_tokenizer(recipe.target.model)
    drafts = {
        "before": load_model(str(run.path("cut")), recipe.target.dtype, device),
        "after": load_model(str(run.path("draft")), recipe.target.dtype, device),
    }
    if read_kept(run.path("draft")) is not None:  # llama.cpp and others that know no trimmed heads see this one
        drafts["after, full head"] = load_model(str(run.path("draft")), recipe.target.dtype, device, trimmed=False)
    ends = end_ids(target.config, tokenizer)
    vocabulary = real_tokens(target.config, tokenizer)
    sampler = Sampler.of(recipe.sampler)
    prompts = read_prompts(run, "test")[: recipe.eval.prompts]
    ids = [prompt.ids for prompt in prompts]
    seeds = [prompt_seed(recipe.seed, prompt.id) for prompt in prompts]
    run.say(f"  the target continues {len(ids)} test prompts")
    limit = min(recipe.eval.new_tokens, recipe.corpus.block - max(map(len, ids)))  # served prompts may be long
    texts = continue_all(target, ids, sampler, limit, seeds, ends, recipe.answers.batch, vocabulary)
    own = pack(
        ((prompt + text, len(prompt)) for prompt, text in zip(ids, texts, strict=True)), recipe.corpus.block, False
    )
    files = Packed.load(run.path("corpus", "text-test.safetensors")).take(slice(0, recipe.eval.file_blocks))
    report, rounds = evaluate_pair(
        target,
        drafts,
        {"answers": own, "files": files},
        ids,
        sampler,
        recipe.eval,
        vocabulary,
        ends,
    )
    report["command"] = run.command
    write_rounds(run.path("rounds.parquet"), rounds)
    write_json(run.path("eval.json"), report)
    write_text(run.path("eval.md"), as_markdown(report))
    return [run.path("eval.json"), run.path("eval.md"), run.path("rounds.parquet")]
