"""The report of a run as one HTML page that needs nothing beside it: no network, no scripts, no fonts."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape

from distill.report import plots
from distill.report.html import Html, as_cell, as_code, as_list, as_plot, as_plots, as_table, as_text
from distill.report.style import CSS
from distill.report.text import (
    MEASURES,
    NOTHING,
    RATES,
    Facts,
    acceptance_measure,
    best_rows,
    clean,
    grown_pairs,
    interval,
    is_grown,
    known,
    limits,
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

LEVEL = {"faster than plain": "good", "slower than plain": "bad", "not told apart from plain": "flat"}


def build_page(facts: Facts) -> str:
    """The whole page. Raises nothing for stages that have not run: each leaves one line that says so."""
    sections: list[tuple[str, str, Html]] = [
        ("made", "What was made", _made(facts)),
        ("numbers", "In short", _headlines(facts)),
        *([("cuts", "From donor to draft", _cuts(facts))] if facts.get("cuts") else []),
        ("training", "Training", _training(facts)),
        *([("sparsity", "Sparsity", _sparsity(facts))] if facts.get("sparsity") else []),
        ("positions", "Acceptance by position", _stage(facts, "eval", _positions)),
        ("divergence", "Divergence and acceptance", _stage(facts, "eval", _divergence)),
        ("cost", "Cost curves", _stage(facts, "profile", _cost)),
        ("speedup", "Speedup", _stage(facts, "speedup", _speedup)),
        ("plain", "The plain decoder beside the library's own", _stage(facts, "speedup", _plain)),
        ("why", "Why these speedups", _stage(facts, "speedup", _explanations)),
        ("gguf", "GGUF files and parity", _stage(facts, "export", _gguf)),
        ("samples", "Generated samples", _stage(facts, "speedup", _samples)),
        ("limits", "Limits", as_list(limits(facts))),
    ]
    links = " ".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in sections)
    body = "\n".join(f'<section id="{key}"><h2>{escape(title)}</h2>{inner}</section>' for key, title, inner in sections)
    name = as_text(facts["name"])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name} · distill report</title>
<style>{CSS}</style>
</head>
<body>
<header><h1>{name}</h1><p class="soft">Draft model for speculative decoding, {as_text(facts["date"])}</p>
<nav aria-label="Sections">{links}</nav></header>
<main>
{body}
</main>
<footer><p>Made by <code>distill report</code>. Brackets hold intervals; a dash means not measured.</p></footer>
</body>
</html>
"""


def _stage(facts: Facts, stage: str, draw: Callable[[Facts], Html]) -> Html:
    """A section drawn from a stage's figures, or one line saying that the stage has not run."""
    return draw(facts) if facts.get(stage) else _not_run(stage)


def _not_run(stage: str) -> Html:
    return Html(f'<p class="notrun">The stage <code>{stage}</code> has not run, so there is nothing to show here.</p>')


def _grown(shown: object, grown: bool) -> Html:
    """A name, with the badge where the target behind it was grown."""
    return Html(as_cell(shown) + (' <span class="grown">grown</span>' if grown else ""))


def _made(facts: Facts) -> Html:
    models = {name: facts[name] for name in ("target", "donor", "draft") if facts.get(name)}
    heads = {"target": "target", "donor": "donor (before)", "draft": "draft (after)"}
    rows: list[list[object]] = [["path", *(as_code(model["path"]) for model in models.values())],
                                ["architecture", *(model["architecture"] for model in models.values())]]
    for key, words in {"parameters": "parameters", "layers": "layers", "hidden": "hidden width", "mlp": "MLP width",
                       "vocabulary": "vocabulary", "bytes": "bytes"}.items():
        values = [model[key] for model in models.values()]
        rows.append([words, *(Html(f"{number(v)} <small>{size(v)}</small>") if key == "bytes" else number(v)
                              for v in values)])
        if {"donor", "draft"} <= models.keys():
            before, after = models["donor"][key], models["draft"][key]
            rows[-1].append(percent(after / before - 1) if before and after != before else "same")
    heading: list[object] = ["", *(_grown(heads[name], bool(model.get("grown"))) for name, model in models.items())]
    if {"donor", "draft"} <= models.keys():
        heading.append("donor → draft")
        rows[0].append("")
        rows[1].append("same" if models["donor"]["architecture"] == models["draft"]["architecture"] else "changed")
    machine = facts.get("machine") or {}
    told = {
        "recipe": as_text((facts.get("config") or {}).get("name") or facts["name"]),
        "date": as_text(facts["date"]),
        "command": as_code(facts["command"]),
        "machine": as_text(f"{machine.get('cpu')}, {machine.get('cores')} cores, "
                         f"{size(machine.get('memory_bytes'))} memory, {machine.get('platform')}"),
        "GPU": as_text(machine.get("gpu") or "none"),
        "software": as_text(f"Python {machine.get('python')}, torch {machine.get('torch')}, "
                          f"transformers {machine.get('transformers')}"),
    }
    if parent := facts.get("parent"):
        told["generation"] = as_text(f"{parent['generation']}, from the draft of {parent['run']}, {parent['digest']}")
    listed = "".join(f"<dt>{word}</dt><dd>{value}</dd>" for word, value in told.items())
    config = json.dumps(facts.get("config") or {}, indent=2, ensure_ascii=False, default=str)
    return Html(as_table(heading, rows, facts["command"]) + f"<dl>{listed}</dl>"
                f"<details><summary>Resolved recipe</summary><pre>{as_text(config)}</pre></details>")


def _headlines(facts: Facts) -> Html:
    cards: list[str] = []
    speedup, evaluation, grown = facts.get("speedup"), facts.get("eval"), grown_pairs(facts)
    for row in best_rows(speedup):
        plain = plain_row(speedup or {}, row)
        rates = f"{number(plain['tokens_per_second'], 1)} → " if plain else ""
        low, high = row.get("speedup_low"), row.get("speedup_high")
        bounds = f" <small>[{low:.2f}, {high:.2f}]</small>" if known(low) and known(high) else ""
        cards.append(
            f'<div class="card"><div class="name">{_grown(row["pair"], row["pair"] in grown)}</div>'
            f'<div class="figure">{row["speedup"]:.2f}×{bounds}</div>'
            f'<p class="{LEVEL[verdict(row)]}">{verdict(row)}</p><p class="soft">best of the draft lengths tried, '
            f'γ = {row["length"]}, {as_text(row["backend"])}; '
            f'{rates}{number(row["tokens_per_second"], 1)} tokens/s</p></div>')
    measure = acceptance_measure(evaluation or {})
    for domain, sides in ((evaluation or {}).get("domains") or {}).items():
        before, after = (sides.get(side) or {} for side in ("before", "after"))
        first, last = before.get(measure) or {}, after.get(measure) or {}
        cards.append(
            f'<div class="card"><div class="name">Acceptance, {as_text(domain)}</div>'
            f'<div class="figure"><small>{percent(first.get("mean"))} →</small> {percent(last.get("mean"))}</div>'
            f'<p class="soft">before: {interval(first, True)}<br>after: {interval(last, True)}</p>'
            f'<p class="soft">{as_text(MEASURES[measure].partition(", ")[2])}; {number(after.get("tokens"))} tokens of '
            f'{number(after.get("prompts"))} prompts</p></div>')
    shown = f'<div class="cards">{"".join(cards)}</div>' if cards else ""
    absent = [stage for stage in ("speedup", "eval") if not facts.get(stage)]
    sources = [facts[stage]["command"] for stage in ("speedup", "eval") if facts.get(stage)]
    commands = "".join(f'<p class="command">{as_text(command)}</p>' for command in dict.fromkeys(sources))
    return Html(shown + commands + "".join(_not_run(stage) for stage in absent))


def _cuts(facts: Facts) -> Html:
    """What each operation on the donor changed and cost, and the search over cuts where there was one."""
    rows = []
    for change in facts["cuts"]:
        before, after = change["before"], change["after"]
        rows.append([
            change["operation"], number(after["parameters"]), size(after["bytes_per_step"]), number(after["layers"]),
            number(max(after["mlp"])), number(after["kept_vocabulary"]),
            percent(after["parameters"] / before["parameters"] - 1),
            significant(change["kl_before"]), significant(change["kl_after"]),
        ])  # fmt: skip
    heads = ["operation", "parameters", "bytes per step", "layers", "MLP", "tokens spoken", "change",
             "KL before, nats", "KL after"]  # fmt: skip
    parts = as_table(heads, rows, facts["command"])
    search = facts.get("search")
    if not search:
        return parts
    points = sorted(search["points"], key=lambda point: -float(point["tokens_per_second"]))
    table = as_table(
        ["cut", "parameters", "KL, nats", "acceptance", "step, ms", "best γ", "predicted tokens/s",
         "predicted speedup"],
        [[Html(f"{as_text(point['name'])} <b>chosen</b>") if point["name"] == search["chosen"] else point["name"],
          number(point["parameters"]), significant(point["kl"]), percent(point["acceptance"]),
          significant(1e3 * point["draft_seconds"]), number(point["length"]), significant(point["tokens_per_second"]),
          significant(point["speedup"])] for point in points],
        search["command"],
    )  # fmt: skip
    caption = ("Every cut tried: what its step costs and how often it is accepted after a short heal, on the selection "
               "split. The line joins those that no other beats in both.")  # fmt: skip
    drawing = as_plots(as_plot(lambda: plots.search_front(search), caption))
    return Html(parts + drawing + table + as_list(search["explanations"]))


def _sparsity(facts: Facts) -> Html:
    """How the penalty spread over the layers and, for single weights, over the tensors."""
    details = facts["sparsity"]["details"]
    parts = [f"<p>{as_text(facts['sparsity']['sentence'])}</p>"]
    if "by_layer" in details:
        rows = [[str(layer), percent(share)] for layer, share in enumerate(details["by_layer"])]
        parts.append(as_table(["layer", "zero weights"], rows, facts["command"]))
        tensors = [[name, percent(share)] for name, share in details["by_tensor"].items()]
        parts.append(as_table(["tensor", "zero weights"], tensors, facts["command"]))
    else:
        rows = [[str(layer), percent(share), significant(strength)] for layer, (share, strength) in enumerate(
            zip(details["removed_zero_share"], details["lambda_by_layer"], strict=True))]  # fmt: skip
        parts.append(as_table(["layer", "removed neurons that were exactly zero", "mean λ of the ramp"], rows,
                              facts["command"]))  # fmt: skip
    return Html("".join(parts))


def _training(facts: Facts) -> Html:
    steps = training_steps(facts.get("metrics"))
    if not steps:
        return _not_run("train")
    metrics, block = facts["metrics"], plots.block_length(facts["metrics"])
    each = "every step" if block == 1 else f"each point the mean of {block} steps"
    first, last = steps[0], steps[-1]
    rates = sorted(line["tokens_per_second"] for line in steps if known(line.get("tokens_per_second")))
    memory = [line["memory_bytes"] for line in steps if known(line.get("memory_bytes"))]
    rows: list[list[object]] = [[words, significant(first.get(key)), significant(last.get(key))] for key, words in {
        "loss": "loss", "forward_kl": "KL(target ‖ draft), nats", "cross_entropy": "cross-entropy, nats",
        "agreement": "top-1 agreement", "rate": "learning rate"}.items()]
    run = (f"{number(len(steps))} steps, {number(trained_tokens(steps))} tokens, median "
           f"{number(rates[len(rates) // 2] if rates else None, 0)} tokens/s, peak memory "
           f"{size(max(memory, default=None))}; first line {first.get('time')}, last line {last.get('time')}.")
    return Html(
        as_plots(as_plot(lambda: plots.loss_curve(metrics), f"Loss on training batches, {each}."),
               as_plot(lambda: plots.agreement_curve(metrics), f"Agreement on training batches, {each}."),
               as_plot(lambda: plots.selection_curve(metrics), "Drafts decoded on selection prompts."))
        + f"<p>{as_text(run)}</p>" + _chosen(facts)
        + as_table(["", f"step {first['step']}", f"step {last['step']}"], rows, facts["command"]))


def _chosen(facts: Facts) -> Html:
    """The parts of the training, which weights were taken, and what became of a replay."""
    training = facts.get("training")
    if not training:
        return Html("")
    rows = [[part["name"], f"{part['first'] + 1}–{part['first'] + part['steps']}", significant(part["rate"]),
             ", ".join(f"{weight:g} {name}" for name, weight in part["loss"].items())]
            for part in training["parts"]]  # fmt: skip
    found = as_table(["part", "steps", "peak rate", "loss"], rows, facts["command"], words=4)
    said = []
    if best := training.get("best"):
        said.append(f"The weights of step {number(best['step'])} were taken: {percent(best['acceptance'])} accepted, "
                    f"{number(best['tokens_per_round'])} tokens per round on selection prompts.")  # fmt: skip
    if replay := training.get("replay"):
        gain = replay["difference"]
        said.append(
            f"Replay: {number(replay['collected']['rejected'])} rejected positions were learnt; tokens per round went "
            f"from {number(replay['before'], 3)} to {number(replay['after'], 3)} on {number(replay['prompts'])} other "
            f"selection prompts, a difference of {number(gain['mean'], 3)} [{number(gain['low'], 3)}, "
            f"{number(gain['high'], 3)}]: {'kept' if replay['kept'] else 'not kept'}.")  # fmt: skip
    return Html(found + as_list(said))


def _positions(facts: Facts) -> Html:
    evaluation = facts["eval"]
    sides = {side: {row["position"]: row for row in (evaluation.get("positions") or {}).get(side) or []}
             for side in ("before", "after")}
    places = sorted(set().union(*sides.values()))
    if not places:
        return Html('<p class="notrun">No acceptance by position was measured (<code>eval --acceptance</code>).</p>')

    def cells(row: Facts | None) -> list[object]:
        if not row:
            return [NOTHING] * 3
        rate = {"mean": row["rate"], "low": row["low"], "high": row["high"]}
        return [number(row["drafted"]), number(row["accepted"]), interval(rate, rate=True)]

    table = as_table(["position", "drafted before", "accepted", "rate", "drafted after", "accepted", "rate"],
                   [[place, *cells(sides["before"].get(place)), *cells(sides["after"].get(place))] for place in places],
                   evaluation["command"])
    return Html(as_plots(as_plot(lambda: plots.acceptance_by_position(evaluation["positions"]),
                             "Of the tokens drafted at a position, the share accepted; bars are intervals. A token "
                             "behind a rejected one was not looked at and is not counted.")) + table)


def _divergence(facts: Facts) -> Html:
    evaluation = facts["eval"]
    settings = as_text(sampler_words(evaluation))
    parts = [f"<p>Before is the draft as cut from the donor, after is the trained draft; {settings}.</p>"]
    for domain, sides in evaluation["domains"].items():
        before, after = (sides.get(side) or {} for side in ("before", "after"))
        rows = []
        for key, words in MEASURES.items():
            first, last = ((side.get(key) or {}).get("mean") for side in (before, after))
            change = NOTHING
            if known(first) and known(last):
                change = f"{100 * (last - first):+.1f} points" if key in RATES else f"{last - first:+.3f}"
            rows.append([words, *(interval(side.get(key), key in RATES) for side in (before, after)), change])
        counts = [f"{number(side.get('tokens'))} tokens, {number(side.get('prompts'))} prompts"
                  for side in (before, after)]
        rows.append(["measured on", *counts, ""])
        table = as_table(["", "before", "after", "change"], rows, evaluation["command"])
        parts += [f"<h3>{as_text(domain)}</h3>", table]
    return Html("".join(parts))


def _cost(facts: Facts) -> Html:
    curves = facts["profile"]["curves"]
    command = facts["profile"].get("command", facts["command"])
    drawn = []
    for backend in dict.fromkeys(curve["backend"] for curve in curves):
        draw_cost, draw_relative = _cost_drawings(curves, backend)
        drawn += [
            as_plot(draw_cost, f"{backend}: time of one step over m tokens; the band spans the repeats' interval."),
            as_plot(draw_relative, f"{backend}: the same relative to one token. Flat is what makes drafting pay."),
        ]
    counts = sorted({count for curve in curves for count in curve["tokens"]})
    rows = []
    for curve in curves:
        at = {count: _milliseconds(*seconds) for count, *seconds in zip(
            curve["tokens"], curve["seconds"], curve["low"], curve["high"], strict=True)}
        cells: list[object] = [_grown(curve["model"], is_grown(curve["model"], set())), curve["backend"],
                               curve["dtype"], number(curve["depth"]), number(curve["repeats"])]
        rows.append(cells + [at.get(count, NOTHING) for count in counts])
    table = as_table(["model", "backend", "dtype", "depth", "repeats", *(f"T({count}), ms" for count in counts)], rows,
                   command, words=3)
    return Html(as_plots(*drawn) + table)


def _milliseconds(middle: float, low: float, high: float) -> Html:
    return Html(f"{significant(1e3 * middle)}<br><small>[{significant(1e3 * low)}, {significant(1e3 * high)}]</small>")


def _cost_drawings(curves: list[Facts], backend: str) -> tuple[Callable[[], str], Callable[[], str]]:
    return (lambda: plots.cost_curves(curves, backend)), (lambda: plots.cost_curves(curves, backend, relative=True))


def _speedup(facts: Facts) -> Html:
    speedup = facts["speedup"]
    grown, best = grown_pairs(facts), best_rows(speedup)
    backends = dict.fromkeys(row["backend"] for row in speedup["rows"])
    words = "measured with intervals, predicted dashed; 1 is plain decoding of the same target."
    drawn = [as_plot(_speedup_drawing(speedup["rows"], backend), f"{backend}: {words}") for backend in backends]
    rows, classes = [], []
    for row in speedup["rows"]:
        different = Html(f'<span class="bad">{row["different"]}</span>') if row["different"] else "0"
        rows.append([_grown(row["pair"], row["pair"] in grown), row["backend"], row["length"] or "plain",
                     speedup_interval(row), f"{row['predicted']:.2f}×" if known(row["predicted"]) else NOTHING,
                     number(row["tokens_per_second"]), number(row["tokens_per_round"]), percent(row["acceptance"]),
                     number(row["tokens"]), number(row["seconds"]), number(row["identical"]), number(row["excused"]),
                     different])
        classes.append("plain" if row["length"] == 0 else "best" if any(row is one for one in best) else "")
    heads = ["pair", "backend", "γ", "speedup", "predicted", "tokens/s", "tokens per round", "acceptance", "tokens",
             "seconds", "identical", "excused", "different"]
    note = (f"{number(speedup['prompts'])} prompts, up to {number(speedup['new_tokens'])} new tokens each. The fastest "
            "row of a pair is bold. Identical, excused and different count outputs against the plain run: excused ones "
            "part at a rounding tie.")
    table = as_table(heads, rows, speedup["command"], 2, classes)
    return Html(as_plots(*drawn) + f"<p>{as_text(note)}</p>" + table + _trials(speedup, grown))


def _trials(speedup: Facts, grown: set[str]) -> Html:
    """The other ways to decode; lossy ones say so in red, with the reason."""
    rows = []
    for row in speedup.get("trials") or []:
        law = Html(f'<span class="bad">{as_text(row["law"])}</span>') if row["lossy"] else row["law"]
        rows.append([_grown(row["pair"], row["pair"] in grown), row["backend"], row["way"],
                     speedup_interval(row) if row["rule"] else "plain", number(row["plain_tokens_per_second"]),
                     number(row["tokens_per_second"]), number(row["tokens_per_round"]), percent(row["acceptance"]),
                     number(row["identical"]), number(row["excused"]), number(row["different"]), law])
    if not rows:
        return Html("")
    heads = ["pair", "backend", "way", "speedup", "plain, tokens/s", "tokens/s", "tokens per round", "acceptance",
             "identical", "excused", "different", "law of the text"]
    words = ("Other ways to decode, interleaved with those above, each beside the plain run of the same sampler. "
             "Sampled texts follow a law and are no copies, so nothing is counted as identical there.")
    return Html(f"<p>{as_text(words)}</p>" + as_table(heads, rows, speedup["command"], 3))


def _speedup_drawing(rows: list[Facts], backend: str) -> Callable[[], str]:
    return lambda: plots.speedup_by_length(rows, backend)


def _plain(facts: Facts) -> Html:
    speedup, grown = facts["speedup"], grown_pairs(facts)
    if not speedup.get("plain_reference"):
        return Html('<p class="notrun">The library\'s own generation was not timed.</p>')
    rows = [[_grown(line["pair"], line["pair"] in grown), line["backend"], line["library"],
             number(line["library_tokens_per_second"]), number(line["plain_tokens_per_second"]),
             percent(line["ratio"])] for line in speedup["plain_reference"]]
    return Html("<p>A speedup counts only beside a plain decoder that is itself fast: the plain run should stand "
                "within 5 % of the library's own generation.</p>"
                + as_table(["pair", "backend", "library", "library, tokens/s", "plain, tokens/s", "ratio"], rows,
                         speedup["command"], words=3))


def _explanations(facts: Facts) -> Html:
    sentences = facts["speedup"].get("explanations")
    return as_list(sentences) if sentences else Html('<p class="notrun">No explanation was recorded.</p>')


def _gguf(facts: Facts) -> Html:
    rows, mismatches = [], []
    for file in facts["export"]["files"]:
        parity = file.get("parity") or {}
        wrong = parity.get("tokenizer_mismatches") or []
        bad = Html(f'<span class="bad">{len(wrong)}</span>') if wrong else "0" if parity else NOTHING
        rows.append([as_code(file["path"]), _grown(file["model"], is_grown(file["model"], set())), file["outtype"],
                     Html(f"{number(file['bytes'])} <small>{size(file['bytes'])}</small>"),
                     number(parity.get("positions")), percent(parity.get("top1_agreement")),
                     significant(parity.get("mean_abs_dlogprob")), significant(parity.get("max_abs_dlogprob")),
                     number(parity.get("tokenizer_texts")), bad])
        mismatches += [f"{file['path']}: {clean(text)}" for text in wrong]
    heads = ["file", "model", "type", "bytes", "positions", "top-1 agreement", "mean |Δ log p|", "max |Δ log p|",
             "tokenizer texts", "mismatches"]
    listed = "".join(f"<li><code>{as_text(line)}</code></li>" for line in mismatches)
    details = f"<details><summary>Tokenizer mismatches</summary><ul>{listed}</ul></details>" if mismatches else ""
    return Html("<p>Each file in llama.cpp against its Hugging Face model on the same positions.</p>"
                + as_table(heads, rows, facts["export"].get("command", facts["command"]), words=3) + details)


def _samples(facts: Facts) -> Html:
    speedup, grown = facts["speedup"], grown_pairs(facts)
    if not speedup.get("samples"):
        return Html('<p class="notrun">No samples were kept.</p>')
    parts = ["<p><mark>Marked and underlined</mark>: drafted and accepted. Bare: the target's. Pale: the prompt.</p>"]
    for sample in speedup["samples"]:
        accepted = sum(len(part["text"]) for part in sample["segments"] if part["kind"] == "accepted")
        written = sum(len(part["text"]) for part in sample["segments"])
        text = "".join(f"<mark>{as_text(part['text'])}</mark>" if part["kind"] == "accepted" else as_text(part["text"])
                       for part in sample["segments"])
        share = f", {percent(accepted / written)} of the characters from the draft" if written else ", nothing written"
        parts.append(f"<h3>{_grown(sample['pair'], is_grown(sample['pair'], grown))}</h3>"
                     f'<p class="soft">{as_text(sample["backend"])}{share}</p>'
                     f'<pre><span class="prompt">{as_text(sample["prompt"])}</span>{text}</pre>')
    return Html("".join(parts) + f'<p class="command">{as_text(speedup["command"])}</p>')
