"""Stage `speedup`: the draft with the target as it is and, where asked for, with the same target grown."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from distill.benchmark.compare import (
    TORCH_NOISE,
    choose_length,
    compare_library,
    judge_identity,
    rounding_noise,
    run_trials,
    summarise_trials,
)
from distill.export.writer import export_gguf
from distill.models.base import Model
from distill.models.gguf import GgufModel
from distill.models.hugging_face import (
    TorchModel,
    describe_model,
    end_ids,
    load_model,
    load_target,
    load_tokenizer,
    pick_device,
    real_tokens,
)
from distill.recipe import Recipe
from distill.run import Run, faults_explained, machine, read_json, write_json, write_text
from distill.speculative.cost import measure_steps, predicted_speedup
from distill.surgery.grow import grow
from distill.texts import read_prompts

REFERENCE_PROMPTS = {False: 4, True: 2}  # by grown: a grown target takes a minute for each pair of runs
SAMPLES = 3


def speedup(recipe: Recipe, run: Run) -> list[Path]:
    """Write speedup.json and speedup.md; each pair and backend is a part, kept when the run is interrupted."""
    settings = recipe.speedup
    parts = []
    for grown in [False, True] if settings.grown is not None else [False]:
        for backend in settings.backends:
            path = run.path("speedup", f"{'grown' if grown else 'shipped'}-{backend}.json")
            if not path.exists():
                write_json(path, _measure_part(recipe, run, backend, grown))
            else:
                run.say(f"  {path.stem}: was there")
            parts.append(read_json(path))
            gc.collect()
    report = {
        "command": run.command,
        "machine": machine(),
        "new_tokens": settings.new_tokens,
        "prompts": settings.prompts,
        "rows": [row for part in parts for row in part["rows"]],
        "chosen": [part["chosen"] for part in parts],
        "plain_reference": [part["plain_reference"] for part in parts],
        "explanations": [sentence for part in parts for sentence in part["explanations"]],
        "samples": [sample for part in parts for sample in part["samples"]],
        "noise": [part["noise"] for part in parts],
    }
    write_json(run.path("speedup.json"), report)
    write_text(run.path("speedup.md"), as_markdown(report))
    return [run.path("speedup"), run.path("speedup.json"), run.path("speedup.md")]


def _measure_part(recipe: Recipe, run: Run, backend: str, grown: bool) -> dict[str, Any]:
    settings = recipe.speedup
    tokenizer = load_tokenizer(recipe.target.model)
    device = pick_device(recipe.device)
    small = load_target(recipe.target, device)
    ends = end_ids(small.config, tokenizer)
    prompts = [prompt.ids for prompt in read_prompts(run, "report")]
    prompts = prompts[: settings.grown_prompts if grown else settings.prompts]
    lengths = settings.grown_lengths if grown else settings.lengths
    title = "draft + target"
    big = small
    if grown:
        assert settings.grown is not None
        big = grow(small.float().cpu(), settings.grown.tile, settings.grown.layers).to(device)
        title = f"draft + target grown to {describe_model('', big)['parameters'] / 1e6:.0f}M"
    run.say(f"  {title}, {backend}")
    scratch = run.path("speedup", ".scratch")
    try:
        if backend == "pytorch":
            vocabulary = real_tokens(big.config, tokenizer)
            target: Model = TorchModel(big, vocabulary)
            draft: Model = TorchModel(load_model(str(run.path("draft")), recipe.target.dtype, device), vocabulary)
            library, name = _transformers_generation(big, ends), "transformers generate"
        else:
            context = recipe.corpus.block
            path = run.path("gguf", f"target-{settings.outtype}.gguf")
            if grown:
                with faults_explained(scratch):
                    scratch.mkdir(parents=True, exist_ok=True)
                    big.save_pretrained(scratch / "grown")
                    tokenizer.save_pretrained(scratch / "grown")
                path = scratch / "grown.gguf"
                export_gguf(scratch / "grown", path, settings.outtype, f"{recipe.name} target, grown")
                del big
            target = GgufModel(path, context=context, threads=recipe.threads)
            draft = GgufModel(
                run.path("gguf", f"draft-{settings.outtype}.gguf"), context=context, threads=recipe.threads
            )
            library, name = _llama_generation(path, context, recipe.threads, ends), "llama-cpp-python generate"
        return _measure_pair(recipe, run, title, backend, grown, target, draft, prompts, lengths, ends, library, name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _measure_pair(
    recipe: Recipe,
    run: Run,
    title: str,
    backend: str,
    grown: bool,
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    ends: list[int],
    library: Callable[[Sequence[int], int], int],
    library_name: str,
) -> dict[str, Any]:
    settings, evaluation = recipe.speedup, recipe.eval
    tokenizer = load_tokenizer(recipe.target.model)
    label = {"pair": title, "grown": grown, "backend": backend}
    reference = compare_library(target, library, prompts[: REFERENCE_PROMPTS[grown]], settings.new_tokens, ends)
    trials = run_trials(target, draft, prompts, lengths, settings.new_tokens, ends, f"{backend}, prompts")
    noise = TORCH_NOISE
    if backend == "gguf" or recipe.target.dtype != "float32":
        longest = next(t.decoded.tokens for t in trials if t.length == 0)
        noise = max(
            rounding_noise(target, prompts[0], longest[start : start + length + 1])
            for length in lengths
            for start in (0, 16)
            if len(longest) > start + length
        )
    verdicts = judge_identity(target, prompts, trials, noise)
    depth = min(recipe.profile.depth, target.capacity - max(lengths) - 1)
    steps = measure_steps(target, [1, *(n + 1 for n in lengths)], depth, recipe.profile.repeats, target.vocabulary_size)
    costs = {m: found[0] for m, found in steps.items()}
    draft_cost = measure_steps(draft, [1], depth, recipe.profile.repeats, draft.vocabulary_size)[1][0]
    accepted = _accepted_by_position(run, max(lengths))
    rows = summarise_trials(trials, lengths, evaluation.resamples, evaluation.confidence)
    for row in rows:
        length = row["length"]
        row.update(label)
        row["predicted"] = (
            predicted_speedup(costs, draft_cost, length, accepted) if length and length <= len(accepted) else None
        )
        row.update(verdicts.get(length, {"identical": len(prompts), "excused": 0, "different": 0}))
    chosen = choose_length(trials, lengths, evaluation.resamples, evaluation.confidence)
    explanations = explain(title, backend, costs, draft_cost, rows, chosen)
    for sentence in explanations:
        run.say(f"    {sentence}")
    best = (
        chosen["length"]
        or max((row for row in rows if row["length"]), key=lambda row: float(row["tokens_per_second"]))["length"]
    )
    samples = [] if grown else _samples(tokenizer, prompts, [t for t in trials if t.length == best], label)
    for model in (target, draft):
        model.close()
    return {
        "rows": rows,
        "chosen": {**label, **chosen},
        "plain_reference": {**label, "library": library_name, **reference},
        "explanations": explanations,
        "samples": samples,
        "noise": {**label, "largest_logit_difference": noise},
    }


def _accepted_by_position(run: Run, longest: int) -> list[float]:
    """Acceptance at positions 1.. from the evaluation, as far as positions were reached."""
    path = run.path("eval.json")
    if not path.exists():
        return []
    rates = []
    for row in read_json(path)["positions"].get("after", [])[:longest]:
        if not row["drafted"]:
            break
        rates.append(float(row["rate"]))
    return rates


def explain(
    title: str, backend: str, costs: dict[int, float], draft: float, rows: list[dict[str, Any]], chosen: dict[str, Any]
) -> list[str]:
    """Sentences that trace the measured speedup to the cost curve, every number in them measured."""
    single = costs[1]
    row = max((r for r in rows if r["length"]), key=lambda r: float(r["tokens_per_second"]))
    length = int(row["length"])
    bound = (length + 1) / (costs[length + 1] / single + length * draft / single)
    where = f"{title}, {backend}"
    sentences = [
        f"{where}: T(1) = {single * 1e3:.2f} ms, T({length + 1}) = {costs[length + 1] / single:.2f} T(1), a draft step "
        f"costs {draft / single:.2f} T(1). If every drafted token were accepted, {length} a round would give "
        f"{bound:.2f}x; with {row['tokens_per_round']:.2f} tokens a round it gave {row['speedup']:.2f}x over the whole "
        "request, prompt included."
    ]
    if bound < 1:
        sentences.append(f"{where}: at this cost ratio no draft, however good, makes {length} drafted tokens pay.")
    if chosen["length"] == 0:
        sentences.append(
            f"{where}: on the prompts used for choosing, plain decoding was fastest: do not speculate here."
        )
    else:
        sentences.append(
            f"{where}: {chosen['length']} drafted tokens a round were chosen on the even prompts; on the odd ones "
            f"they give {chosen['speedup']:.2f}x [{chosen['speedup_low']:.2f}, {chosen['speedup_high']:.2f}]."
        )
    return sentences


def _samples(
    tokenizer: Any, prompts: Sequence[Sequence[int]], trials: Sequence[Any], label: dict[str, Any]
) -> list[Any]:
    """A few texts, cut into pieces that the draft proposed and pieces that the target wrote."""
    samples = []
    for trial in trials[:SAMPLES]:
        segments: list[dict[str, Any]] = []
        pieces: list[tuple[list[int], bool]] = []
        for token, from_draft in zip(trial.decoded.tokens, trial.decoded.from_draft, strict=True):
            if pieces and pieces[-1][1] == from_draft:
                pieces[-1][0].append(token)
            else:
                pieces.append(([token], from_draft))
        for ids, from_draft in pieces:
            segments.append({"text": tokenizer.decode(ids), "kind": "accepted" if from_draft else "target"})
        samples.append(
            {
                "prompt": tokenizer.decode(list(prompts[trial.prompt])),
                "backend": label["backend"],
                "pair": label["pair"],
                "length": trial.length,
                "segments": segments,
            }
        )
    return samples


def _transformers_generation(model: Any, ends: list[int]) -> Callable[[Sequence[int], int], int]:
    """The library's own greedy generation; returns how many tokens it made."""

    def generate(prompt: Sequence[int], limit: int) -> int:
        ids = torch.tensor([list(prompt)], device=model.device)
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=limit,
                do_sample=False,
                pad_token_id=ends[0] if ends else 0,
                eos_token_id=ends or None,
            )
        return int(made.shape[1] - ids.shape[1])

    return generate


def _llama_generation(
    path: Path, context: int, threads: int | None, ends: list[int]
) -> Callable[[Sequence[int], int], int]:
    """llama-cpp-python's own greedy generation over the same file; returns how many tokens it made."""
    import llama_cpp

    from distill.run import usable_cores

    count = threads or usable_cores()
    model = llama_cpp.Llama(
        str(path), n_ctx=context, n_threads=count, n_threads_batch=count, verbose=False, flash_attn=False
    )

    def generate(prompt: Sequence[int], limit: int) -> int:
        made = 0
        model.reset()
        for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True):
            made += 1
            if made == limit or token in ends:
                break
        return made

    return generate


def as_markdown(report: dict[str, Any]) -> str:
    """The tables of speedup.md, which the terminal shows too."""
    lines = [
        f"Greedy decoding of up to {report['new_tokens']} tokens, distinct report prompts, interleaved, cold caches; "
        "times include the prompt. Speedup over this decoder's own plain run, intervals by prompt.",
        "",
        "| pair | backend | drafted | tok/s | tokens/round | accepted | speedup | predicted | same text |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report["rows"]:
        drafted = str(row["length"]) if row["length"] else "plain"
        per_round = f"{row['tokens_per_round']:.2f}" if row["length"] else ""
        acceptance = f"{row['acceptance']:.1%}" if row["acceptance"] is not None else ""
        gain = f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]" if row["length"] else "1"
        predicted = f"{row['predicted']:.2f}" if row["predicted"] is not None else ""
        total = row["identical"] + row["excused"] + row["different"]
        same = f"{row['identical']}/{total}" + (f" (+{row['excused']} ties)" if row["excused"] else "")
        lines.append(
            f"| {row['pair']} | {row['backend']} | {drafted} | {row['tokens_per_second']:.1f} | {per_round} "
            f"| {acceptance} | {gain} | {predicted} | {same if row['length'] else ''} |"
        )
    lines += ["", "| pair | backend | plain tok/s | library | its tok/s | ratio |", "|---|---|--:|---|--:|--:|"]
    for row in report["plain_reference"]:
        lines.append(
            f"| {row['pair']} | {row['backend']} | {row['plain_tokens_per_second']:.1f} | {row['library']} "
            f"| {row['library_tokens_per_second']:.1f} | {row['ratio']:.2f} |"
        )
    lines += ["", *[f"- {sentence}" for sentence in report["explanations"]], "", f"`{report['command']}`"]
    return "\n".join(lines) + "\n"
