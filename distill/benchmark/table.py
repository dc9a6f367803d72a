"""The tables of speedup.md, which the terminal shows too."""

from __future__ import annotations

from typing import Any


def as_markdown(report: dict[str, Any]) -> str:
    """The tables of speedup.md, which the terminal shows too."""
    lines = [
        f"Greedy decoding of up to {report['new_tokens']} tokens, distinct test prompts, interleaved, cold caches; "
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
        lines.append(
            f"| {row['pair']} | {row['backend']} | {drafted} | {row['tokens_per_second']:.1f} | {per_round} "
            f"| {acceptance} | {gain} | {predicted} | {same_text(row) if row['length'] else ''} |"
        )
    lines += _trials(report)
    heads = "| pair | backend | plain tok/s | library | its tok/s | median of the prompts' ratios |"
    lines += ["", heads, "|---|---|--:|---|--:|--:|"]
    for row in report["plain_reference"]:
        lines.append(
            f"| {row['pair']} | {row['backend']} | {row['plain_tokens_per_second']:.1f} | {row['library']} "
            f"| {row['library_tokens_per_second']:.1f} | {row['ratio']:.2f} |"
        )
    lines += ["", *[f"- {sentence}" for sentence in report["explanations"]], "", *_footer(report)]
    return "\n".join(lines) + "\n"


def _trials(report: dict[str, Any]) -> list[str]:
    """The other ways to decode, each beside the plain run of its own sampler."""
    rows = report.get("trials") or []
    if not rows:
        return []
    lines = [
        "",
        "Other ways to decode, interleaved with the ones above; speedup over the plain run of the same sampler.",
        "",
        "| pair | backend | way | plain tok/s | tok/s | tokens/round | accepted | speedup | same text | distribution |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        drafted = row["rule"] is not None
        gain = f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]" if drafted else "1"
        distribution = "LOSSY" if row["lossy"] else row["distribution"]
        lines.append(
            f"| {row['pair']} | {row['backend']} | {row['way']} | {row['plain_tokens_per_second']:.1f} "
            f"| {row['tokens_per_second']:.1f} | {_number(row['tokens_per_round'], '.2f')} "
            f"| {_number(row['acceptance'], '.1%')} "
            f"| {gain} | {same_text(row)} | {distribution} |"
        )
    return lines


def same_text(row: dict[str, Any]) -> str:
    """How many greedy texts are the plain ones, with those that part at a rounding tie; `sampled` where chance says."""
    if row.get("identical") is None:
        return "sampled"
    total = row["identical"] + row["excused"] + row["different"]
    return f"{row['identical']}/{total}" + (f" (+{row['excused']} ties)" if row["excused"] else "")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _footer(report: dict[str, Any]) -> list[str]:
    """What must be known of the table: where probabilities were calibrated, which ways are lossy, the command."""
    lines = []
    calibration = report.get("calibration")
    if calibration:
        none = "".join(f" No fit of {name}: {why}." for name, why in calibration["unfitted"].items())
        where = f"{calibration['rounds']} rounds of {calibration['prompts']} validation texts"
        lines += [f"Draft probabilities were calibrated on {where}, costs measured on this machine.{none}", ""]
    reasons = {row["way"]: row["distribution"] for row in report.get("trials") or [] if row["lossy"]}
    for way, distribution in reasons.items():
        lines += [f"`{way}` is {distribution}", ""]
    return [*lines, f"`{report['command']}`"]


def flat_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every measured way as a row with the same columns, for jsonl and csv."""
    found = []
    for row in [*report["rows"], *(report.get("trials") or [])]:
        length = row.get("length")
        way = row.get("way") or (f"draft, γ = {length}" if length else "plain")
        names = (
            "pair",
            "grown",
            "backend",
            "tokens",
            "seconds",
            "tokens_per_second",
            "tokens_per_round",
            "acceptance",
            "speedup",
            "speedup_low",
            "speedup_high",
            "identical",
            "excused",
            "different",
        )
        found.append(
            {name: row[name] for name in names}
            | {"way": way, "length": length, "predicted": row.get("predicted")}
            | {"verifier": row.get("verifier", "greedy" if length else None), "sampler": row.get("sampler", "greedy")}
            | {"lossy": row.get("lossy", False), "distribution": row.get("distribution", "the target's")}
        )
    return found
