"""The sections on what was measured: acceptance, divergence, cost, speedup, files and samples."""

from __future__ import annotations

from collections.abc import Callable

from distill.report import plots
from distill.report.html import Html, as_code, as_list, as_plot, as_plots, as_table, as_text, badged
from distill.report.text import (
    MEASURES,
    NOTHING,
    RATES,
    Results,
    best_rows,
    clean,
    grown_pairs,
    interval,
    is_grown,
    known,
    number,
    percent,
    sampler_words,
    significant,
    size,
    speedup_interval,
)


def positions(results: Results) -> Html:
    """Acceptance by position, before and after the training."""
    evaluation = results["eval"]
    sides = {
        side: {row["position"]: row for row in (evaluation.get("positions") or {}).get(side) or []}
        for side in ("before", "after")
    }
    places = sorted(set().union(*sides.values()))
    if not places:
        return Html('<p class="notrun">No acceptance by position was measured (<code>eval --acceptance</code>).</p>')

    def cells(row: Results | None) -> list[object]:
        if not row:
            return [NOTHING] * 3
        rate = {"mean": row["rate"], "low": row["low"], "high": row["high"]}
        return [number(row["drafted"]), number(row["accepted"]), interval(rate, rate=True)]

    table = as_table(
        ["position", "drafted before", "accepted", "rate", "drafted after", "accepted", "rate"],
        [[place, *cells(sides["before"].get(place)), *cells(sides["after"].get(place))] for place in places],
        evaluation["command"],
    )
    return Html(
        as_plots(
            as_plot(
                lambda: plots.acceptance_by_position(evaluation["positions"]),
                "Of the tokens drafted at a position, the share accepted; bars are intervals. A token "
                "behind a rejected one was not looked at and is not counted.",
            )
        )
        + table
    )


def divergence(results: Results) -> Html:
    """Every measure by domain, before and after the training."""
    evaluation = results["eval"]
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
        counts = [
            f"{number(side.get('tokens'))} tokens, {number(side.get('prompts'))} prompts" for side in (before, after)
        ]
        rows.append(["measured on", *counts, ""])
        table = as_table(["", "before", "after", "change"], rows, evaluation["command"])
        parts += [f"<h3>{as_text(domain)}</h3>", table]
    return Html("".join(parts))


def cost(results: Results) -> Html:
    """The measured cost curves of every model."""
    curves = results["profile"]["curves"]
    command = results["profile"].get("command", results["command"])
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
        at = {
            count: _milliseconds(*seconds)
            for count, *seconds in zip(curve["tokens"], curve["seconds"], curve["low"], curve["high"], strict=True)
        }
        cells: list[object] = [
            badged(curve["model"], is_grown(curve["model"], set())),
            curve["backend"],
            curve["dtype"],
            number(curve["depth"]),
            number(curve["repeats"]),
        ]
        rows.append(cells + [at.get(count, NOTHING) for count in counts])
    table = as_table(
        ["model", "backend", "dtype", "depth", "repeats", *(f"T({count}), ms" for count in counts)],
        rows,
        command,
        words=3,
    )
    doubts = [
        f"{curve['model']}, {curve['backend']}: {curve['doubt']} (distill train RECIPE --redo profile)."
        for curve in curves
        if curve.get("doubt")
    ]
    return Html(as_plots(*drawn) + table + (as_list(doubts) if doubts else ""))


def _milliseconds(middle: float, low: float, high: float) -> Html:
    return Html(f"{significant(1e3 * middle)}<br><small>[{significant(1e3 * low)}, {significant(1e3 * high)}]</small>")


def _cost_drawings(curves: list[Results], backend: str) -> tuple[Callable[[], str], Callable[[], str]]:
    return (lambda: plots.cost_curves(curves, backend)), (lambda: plots.cost_curves(curves, backend, relative=True))


def speedup(results: Results) -> Html:
    """Speculative beside plain decoding by draft length, then the other ways to decode."""
    speedup = results["speedup"]
    grown, best = grown_pairs(results), best_rows(speedup)
    backends = dict.fromkeys(row["backend"] for row in speedup["rows"])
    words = "measured with intervals, predicted dashed; 1 is plain decoding of the same target."
    drawn = [as_plot(_speedup_drawing(speedup["rows"], backend), f"{backend}: {words}") for backend in backends]
    rows, classes = [], []
    for row in speedup["rows"]:
        different = Html(f'<span class="bad">{row["different"]}</span>') if row["different"] else "0"
        rows.append(
            [
                badged(row["pair"], row["pair"] in grown),
                row["backend"],
                row["length"] or "plain",
                speedup_interval(row),
                f"{row['predicted']:.2f}×" if known(row["predicted"]) else NOTHING,
                number(row["tokens_per_second"]),
                number(row["tokens_per_round"]),
                percent(row["acceptance"]),
                number(row["tokens"]),
                number(row["seconds"]),
                number(row["identical"]),
                number(row["excused"]),
                different,
            ]
        )
        classes.append("plain" if row["length"] == 0 else "best" if any(row is one for one in best) else "")
    heads = [
        "pair",
        "backend",
        "γ",
        "speedup",
        "predicted",
        "tokens/s",
        "tokens per round",
        "acceptance",
        "tokens",
        "seconds",
        "identical",
        "excused",
        "different",
    ]
    note = (
        f"{number(speedup['prompts'])} prompts, up to {number(speedup['new_tokens'])} new tokens each. The fastest "
        "row of a pair is bold. Identical, excused and different count outputs against the plain run: excused ones "
        "part at a rounding tie."
    )
    table = as_table(heads, rows, speedup["command"], 2, classes)
    return Html(as_plots(*drawn) + f"<p>{as_text(note)}</p>" + table + _trials(speedup, grown))


def _trials(speedup: Results, grown: set[str]) -> Html:
    """The other ways to decode; lossy ones say so in red, with the reason."""
    rows = []
    for row in speedup.get("trials") or []:
        distribution = (
            Html(f'<span class="bad">{as_text(row["distribution"])}</span>') if row["lossy"] else row["distribution"]
        )
        rows.append(
            [
                badged(row["pair"], row["pair"] in grown),
                row["backend"],
                row["way"],
                speedup_interval(row) if row["rule"] else "plain",
                number(row["plain_tokens_per_second"]),
                number(row["tokens_per_second"]),
                number(row["tokens_per_round"]),
                percent(row["acceptance"]),
                number(row["identical"]),
                number(row["excused"]),
                number(row["different"]),
                distribution,
            ]
        )
    if not rows:
        return Html("")
    heads = [
        "pair",
        "backend",
        "way",
        "speedup",
        "plain, tokens/s",
        "tokens/s",
        "tokens per round",
        "acceptance",
        "identical",
        "excused",
        "different",
        "distribution of the text",
    ]
    words = (
        "Other ways to decode, interleaved with those above, each beside the plain run of the same sampler. "
        "Sampled texts follow a distribution and are no copies, so nothing is counted as identical there."
    )
    return Html(f"<p>{as_text(words)}</p>" + as_table(heads, rows, speedup["command"], 3))


def _speedup_drawing(rows: list[Results], backend: str) -> Callable[[], str]:
    return lambda: plots.speedup_by_length(rows, backend)


def plain(results: Results) -> Html:
    """The plain decoder beside the library's own generation."""
    speedup, grown = results["speedup"], grown_pairs(results)
    if not speedup.get("plain_reference"):
        return Html('<p class="notrun">The library\'s own generation was not timed.</p>')
    rows = [
        [
            badged(line["pair"], line["pair"] in grown),
            line["backend"],
            line["library"],
            number(line["library_tokens_per_second"]),
            number(line["plain_tokens_per_second"]),
            percent(line["ratio"]),
        ]
        for line in speedup["plain_reference"]
    ]
    return Html(
        "<p>A speedup counts only beside a plain decoder that is itself fast: the plain run should stand "
        "within 5 % of the library's own generation.</p>"
        + as_table(
            ["pair", "backend", "library", "library, tokens/s", "plain, tokens/s", "ratio"],
            rows,
            speedup["command"],
            words=3,
        )
    )


def explanations(results: Results) -> Html:
    """Why the speedups are what they are, in sentences."""
    sentences = results["speedup"].get("explanations")
    return as_list(sentences) if sentences else Html('<p class="notrun">No explanation was recorded.</p>')


def gguf(results: Results) -> Html:
    """The files and how near llama.cpp's distributions and tokens are to those of their models."""
    rows, mismatches = [], []
    for file in results["export"]["files"]:
        parity = file.get("parity") or {}
        wrong = parity.get("tokenizer_mismatches") or []
        bad = Html(f'<span class="bad">{len(wrong)}</span>') if wrong else "0" if parity else NOTHING
        rows.append(
            [
                as_code(file["path"]),
                badged(file["model"], is_grown(file["model"], set())),
                file["outtype"],
                Html(f"{number(file['bytes'])} <small>{size(file['bytes'])}</small>"),
                number(parity.get("positions")),
                percent(parity.get("top1_agreement")),
                significant(parity.get("mean_abs_dlogprob")),
                significant(parity.get("max_abs_dlogprob")),
                number(parity.get("tokenizer_texts")),
                bad,
            ]
        )
        mismatches += [f"{file['path']}: {clean(text)}" for text in wrong]
    heads = [
        "file",
        "model",
        "type",
        "bytes",
        "positions",
        "top-1 agreement",
        "mean |Δ log p|",
        "max |Δ log p|",
        "tokenizer texts",
        "mismatches",
    ]
    listed = "".join(f"<li><code>{as_text(line)}</code></li>" for line in mismatches)
    details = f"<details><summary>Tokenizer mismatches</summary><ul>{listed}</ul></details>" if mismatches else ""
    return Html(
        "<p>Each file in llama.cpp against its Hugging Face model on the same positions.</p>"
        + as_table(heads, rows, results["export"].get("command", results["command"]), words=3)
        + details
    )


def samples(results: Results) -> Html:
    """Texts, with what the draft wrote of them marked."""
    speedup, grown = results["speedup"], grown_pairs(results)
    if not speedup.get("samples"):
        return Html('<p class="notrun">No samples were kept.</p>')
    parts = ["<p><mark>Marked and underlined</mark>: drafted and accepted. Bare: the target's. Pale: the prompt.</p>"]
    for sample in speedup["samples"]:
        accepted = sum(len(part["text"]) for part in sample["segments"] if part["kind"] == "accepted")
        written = sum(len(part["text"]) for part in sample["segments"])
        text = "".join(
            f"<mark>{as_text(part['text'])}</mark>" if part["kind"] == "accepted" else as_text(part["text"])
            for part in sample["segments"]
        )
        share = f", {percent(accepted / written)} of the characters from the draft" if written else ", nothing written"
        parts.append(
            f"<h3>{badged(sample['pair'], is_grown(sample['pair'], grown))}</h3>"
            f'<p class="soft">{as_text(sample["backend"])}{share}</p>'
            f'<pre><span class="prompt">{as_text(sample["prompt"])}</span>{text}</pre>'
        )
    return Html("".join(parts) + f'<p class="command">{as_text(speedup["command"])}</p>')
