"""The sections on how the draft came about: its cuts, its training and its sparsity."""

from __future__ import annotations

from distill.report import plots
from distill.report.html import Html, as_list, as_plot, as_plots, as_table, as_text, not_run
from distill.report.text import Results, known, number, percent, significant, size, trained_tokens, training_steps


def cuts(results: Results) -> Html:
    """What each operation on the donor changed and cost, and the search over cuts where there was one."""
    rows = []
    for change in results["cuts"]:
        before, after = change["before"], change["after"]
        rows.append(
            [
                change["operation"],
                number(after["parameters"]),
                size(after["bytes_per_step"]),
                number(after["layers"]),
                number(max(after["mlp"])),
                number(after["kept_vocabulary"]),
                percent(after["parameters"] / before["parameters"] - 1),
                significant(change["kl_before"]),
                significant(change["kl_after"]),
            ]
        )
    heads = [
        "operation",
        "parameters",
        "bytes per step",
        "layers",
        "MLP",
        "tokens spoken",
        "change",
        "KL before, nats",
        "KL after",
    ]
    parts = as_table(heads, rows, results["command"])
    search = results.get("search")
    if not search:
        return parts
    points = sorted(search["points"], key=lambda point: -float(point["tokens_per_second"]))
    table = as_table(
        [
            "cut",
            "parameters",
            "KL, nats",
            "acceptance",
            "step, ms",
            "best γ",
            "predicted tokens/s",
            "predicted speedup",
        ],
        [
            [
                Html(f"{as_text(point['name'])} <b>chosen</b>") if point["name"] == search["chosen"] else point["name"],
                number(point["parameters"]),
                significant(point["kl"]),
                percent(point["acceptance"]),
                significant(1e3 * point["draft_seconds"]),
                number(point["length"]),
                significant(point["tokens_per_second"]),
                significant(point["speedup"]),
            ]
            for point in points
        ],
        search["command"],
    )
    caption = (
        "Every cut tried: what its step costs and how often it is accepted after a short heal, on the validation "
        "split. The line joins those that no other beats in both."
    )
    drawing = as_plots(as_plot(lambda: plots.search_front(search), caption))
    return Html(parts + drawing + table + as_list(search["explanations"]))


def sparsity(results: Results) -> Html:
    """How the penalty spread over the layers and, for single weights, over the tensors."""
    details = results["sparsity"]["details"]
    parts = [f"<p>{as_text(results['sparsity']['sentence'])}</p>"]
    if "by_layer" in details:
        rows = [[str(layer), percent(share)] for layer, share in enumerate(details["by_layer"])]
        parts.append(as_table(["layer", "zero weights"], rows, results["command"]))
        tensors = [[name, percent(share)] for name, share in details["by_tensor"].items()]
        parts.append(as_table(["tensor", "zero weights"], tensors, results["command"]))
    else:
        rows = [
            [str(layer), percent(share), significant(strength)]
            for layer, (share, strength) in enumerate(
                zip(details["removed_zero_share"], details["lambda_by_layer"], strict=True)
            )
        ]
        parts.append(
            as_table(
                ["layer", "removed neurons that were exactly zero", "mean λ of the ramp"], rows, results["command"]
            )
        )
    return Html("".join(parts))


def training(results: Results) -> Html:
    """The curves of the training, where it began and ended, and what became of it."""
    steps = training_steps(results.get("metrics"))
    if not steps:
        return not_run("train")
    metrics, block = results["metrics"], plots.block_length(results["metrics"])
    each = "every step" if block == 1 else f"each point the mean of {block} steps"
    first, last = steps[0], steps[-1]
    rates = sorted(line["tokens_per_second"] for line in steps if known(line.get("tokens_per_second")))
    memory = [line["memory_bytes"] for line in steps if known(line.get("memory_bytes"))]
    rows: list[list[object]] = [
        [words, significant(first.get(key)), significant(last.get(key))]
        for key, words in {
            "loss": "loss",
            "forward_kl": "KL(target ‖ draft), nats",
            "cross_entropy": "cross-entropy, nats",
            "agreement": "top-1 agreement",
            "rate": "learning rate",
        }.items()
    ]
    run = (
        f"{number(len(steps))} steps, {number(trained_tokens(steps))} tokens, median "
        f"{number(rates[len(rates) // 2] if rates else None, 0)} tokens/s, peak memory "
        f"{size(max(memory, default=None))}; first line {first.get('time')}, last line {last.get('time')}."
    )
    return Html(
        as_plots(
            as_plot(lambda: plots.loss_curve(metrics), f"Loss on training batches, {each}."),
            as_plot(lambda: plots.agreement_curve(metrics), f"Agreement on training batches, {each}."),
            as_plot(lambda: plots.validation_curve(metrics), "Drafts decoded on validation prompts."),
        )
        + f"<p>{as_text(run)}</p>"
        + _chosen(results)
        + as_table(["", f"step {first['step']}", f"step {last['step']}"], rows, results["command"])
    )


def _chosen(results: Results) -> Html:
    """The parts of the training, which weights were taken, and what became of a replay."""
    training = results.get("training")
    if not training:
        return Html("")
    rows = [
        [
            part["name"],
            f"{part['first'] + 1}–{part['first'] + part['steps']}",
            significant(part["rate"]),
            ", ".join(f"{weight:g} {name}" for name, weight in part["loss"].items()),
        ]
        for part in training["parts"]
    ]
    found = as_table(["part", "steps", "peak rate", "loss"], rows, results["command"], words=4)
    said = []
    if best := training.get("best"):
        said.append(
            f"The weights of step {number(best['step'])} were taken: {percent(best['acceptance'])} accepted, "
            f"{number(best['tokens_per_round'])} tokens per round on validation prompts."
        )
    replay = training.get("replay")
    if replay and "difference" not in replay:
        said.append(
            f"Replay: nothing was rejected in {number(replay['collected']['rounds'])} rounds of "
            f"{number(replay['collected']['prompts'])} prompts, so there was nothing to learn."
        )
    elif replay:
        gain = replay["difference"]
        said.append(
            f"Replay: {number(replay['collected']['rejected'])} rejected positions were learnt; tokens per round went "
            f"from {number(replay['before'], 3)} to {number(replay['after'], 3)} on {number(replay['prompts'])} other "
            f"validation prompts, a difference of {number(gain['mean'], 3)} [{number(gain['low'], 3)}, "
            f"{number(gain['high'], 3)}]: {'kept' if replay['kept'] else 'not kept'}."
        )
    return Html(found + as_list(said))
