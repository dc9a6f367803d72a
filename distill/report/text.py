"""Words and figures of the report, shared by the page and the model card: formats, best rows, limits."""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

Results = dict[str, Any]

NOTHING = "–"

MEASURES = {
    "forward_kl": "KL(target ‖ draft), nats",
    "reverse_kl": "KL(draft ‖ target), nats",
    "total_variation": "total variation",
    "top1_agreement": "top-1 agreement",
    "acceptance_sampling": "acceptance, sampling verifier",
    "acceptance_match": "acceptance, match verifier",
    "acceptance_greedy": "acceptance, greedy",
}
RATES = {"top1_agreement", "acceptance_sampling", "acceptance_match", "acceptance_greedy"}

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")


def clean(value: object) -> str:
    """Text that every reader can take: control characters and lone surrogates are shown, not obeyed."""
    text = str(value).replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 32 else "\ufffd", text)


def known(value: Any) -> TypeGuard[float]:
    """Whether a figure was measured: a finite number, not None."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def number(value: Any, digits: int = 2) -> str:
    """A number with thousands separators; a dash where nothing was measured."""
    if not known(value):
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def significant(value: Any) -> str:
    """Three significant digits, for figures whose size is not known beforehand."""
    if not known(value):
        return NOTHING
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def percent(value: Any) -> str:
    """Per cent to one decimal; nothing short of all is rounded up to 100."""
    if not known(value):
        return NOTHING
    digits = next((digits for digits in (1, 2, 3) if value >= 1 or float(f"{100 * value:.{digits}f}") < 100), 4)
    return f"{100 * value:.{digits}f} %"


def size(value: Any) -> str:
    """Bytes in decimal units."""
    if not known(value):
        return NOTHING
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.{1 if value < 100 * factor else 0}f} {unit}"
    return f"{value:.0f} bytes"


def interval(measured: Any, rate: bool = False) -> str:
    """A mean with its interval, as `.612 [.598, .627]` or in per cent; a dash where nothing was measured."""
    if not measured or not known(measured.get("mean")):
        return NOTHING
    mean, low, high = measured["mean"], measured.get("low"), measured.get("high")
    if rate:
        bounds = f" [{100 * low:.1f}, {100 * high:.1f}]" if known(low) and known(high) else ""
        return percent(mean) + bounds
    return f"{mean:.3f}" + (f" [{low:.3f}, {high:.3f}]" if known(low) and known(high) else "")


def speedup_interval(row: Results) -> str:
    """`1.52× [1.44, 1.60]` of one speedup row."""
    if not known(row.get("speedup")):
        return NOTHING
    low, high = row.get("speedup_low"), row.get("speedup_high")
    return f"{row['speedup']:.2f}×" + (f" [{low:.2f}, {high:.2f}]" if known(low) and known(high) else "")


def verdict(row: Results) -> str:
    """How a speedup stands to plain decoding, judged by its interval: faster, slower or not told apart."""
    low, high = row.get("speedup_low"), row.get("speedup_high")
    if known(low) and low > 1:
        return "faster than plain"
    if known(high) and high < 1:
        return "slower than plain"
    return "not told apart from plain"


def best_rows(speedup: Results | None) -> list[Results]:
    """The fastest speculative row of each pair and backend, in the order of the table."""
    best: dict[tuple[str, str], Results] = {}
    for row in (speedup or {}).get("rows") or []:
        key = (row["pair"], row["backend"])
        if row["length"] > 0 and known(row["speedup"]) and (key not in best or row["speedup"] > best[key]["speedup"]):
            best[key] = row
    return list(best.values())


def plain_row(speedup: Results, row: Results) -> Results | None:
    """The plain run beside a speculative row."""
    for plain in speedup["rows"]:
        if plain["length"] == 0 and plain["pair"] == row["pair"] and plain["backend"] == row["backend"]:
            return dict(plain)
    return None


def grown_pairs(results: Results) -> set[str]:
    """Names of the pairs whose target was grown."""
    return {row["pair"] for row in (results.get("speedup") or {}).get("rows") or [] if row.get("grown")}


def is_grown(name: object, pairs: set[str]) -> bool:
    return str(name) in pairs or "grown" in str(name).lower()


def any_grown(results: Results) -> bool:
    curves = (results.get("profile") or {}).get("curves") or []
    files = (results.get("export") or {}).get("files") or []
    return bool(grown_pairs(results)) or any(is_grown(entry["model"], set()) for entry in [*curves, *files])


def acceptance_measure(evaluation: Results) -> str:
    """The acceptance that fits the sampler: greedy at temperature 0, the sampling verifier's otherwise."""
    return "acceptance_sampling" if (evaluation.get("sampler") or {}).get("temperature") else "acceptance_greedy"


def sampler_words(evaluation: Results) -> str:
    settings = evaluation.get("sampler") or {}
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "sampler not recorded"


def machine_words(machine: Results) -> str:
    gpu = machine.get("gpu") or "no GPU"
    return f"{machine.get('cpu')}, {machine.get('cores')} cores, {size(machine.get('memory_bytes'))} memory, {gpu}"


def training_steps(metrics: list[Results] | None) -> list[Results]:
    """One line per training step, in order; of a step repeated after a resume, the last line counts."""
    steps = {line["step"]: line for line in metrics or [] if line.get("stage", "train") == "train" and "loss" in line}
    return [steps[step] for step in sorted(steps)]


def trained_tokens(steps: list[Results]) -> int:
    """Tokens that counted in the loss, over all steps."""
    return sum(int(step.get("tokens") or 0) for step in steps)


def stages_not_run(results: Results) -> list[str]:
    trained = ["train"] if not training_steps(results.get("metrics")) else []
    return trained + [stage for stage in ("profile", "eval", "export", "speedup") if not results.get(stage)]


def limits(results: Results) -> list[str]:
    """What a reader must know before quoting these numbers, one sentence each."""
    machine = results.get("machine") or {}
    place = f"{machine.get('cpu')} ({machine.get('cores')} cores)" if machine else "one machine"
    said = [
        (
            f"Every time and speedup was measured on {place}; other hardware has other cost curves, so measure there "
            "before relying on them."
        )
    ]
    if not machine.get("gpu"):
        said.append("No GPU took part: nothing here says how the pair behaves on one.")
    missing = stages_not_run(results)
    if missing:
        said.append(f"Not run, so nothing is claimed about it: {', '.join(missing)}.")
    said += _speedup_limits(results.get("speedup")) + _evaluation_limits(results.get("eval"))
    said += _export_limits(results.get("export"))
    if any_grown(results):
        said.append(
            "A target labelled “grown” is a trained model enlarged without changing what it computes: its text "
            "is real, its cost is that of the larger shape, and its quality is that of the small model."
        )
    return said


def _speedup_limits(speedup: Results | None) -> list[str]:
    if not speedup:
        return []
    said = [
        (
            f"Speedups come from {number(speedup.get('prompts'))} prompts of up to {number(speedup.get('new_tokens'))}"
            " new tokens each; the best draft length of a pair is read off the same runs, and its interval does not "
            "cover that choice."
        )
    ]
    for row in best_rows(speedup):
        if verdict(row) != "faster than plain":
            said.append(
                f"{_labelled(row['pair'], speedup)} ({row['backend']}) at its best draft length is {verdict(row)}."
            )
    different = sum(row.get("different") or 0 for row in speedup["rows"])
    excused = sum(row.get("excused") or 0 for row in speedup["rows"])
    if different:
        said.append(
            f"{different} outputs differ from the plain run and no rounding tie explains them: treat this pair "
            "as not shown to be lossless."
        )
    if excused:
        said.append(
            f"{excused} outputs part from the plain run at a rounding tie, where two tokens' logits lie within "
            "rounding of one another; they are counted as excused, not as identical."
        )
    for line in speedup.get("plain_reference") or []:
        ratio = _plain_over_library(line)
        if ratio is not None and ratio < 0.95:
            said.append(
                f"The plain run of {_labelled(line['pair'], speedup)} ({line['backend']}) "
                f"reaches only {percent(ratio)} of {line['library']}'s own speed, so its speedup"
                " would shrink beside that library."
            )
    return said


def _labelled(pair: str, speedup: Results) -> str:
    """A pair's name in running text, with the word “grown” where the name itself does not say it."""
    grown = is_grown(pair, grown_pairs({"speedup": speedup}))
    return f"{pair} [grown]" if grown and "grown" not in pair.lower() else pair


def _plain_over_library(line: Results) -> float | None:
    plain, library = line.get("plain_tokens_per_second"), line.get("library_tokens_per_second")
    return plain / library if known(plain) and known(library) and library else None


def _evaluation_limits(evaluation: Results | None) -> list[str]:
    if not evaluation:
        return []
    counts = ", ".join(
        f"{name}: {number(sides['after'].get('tokens'))} tokens of {number(sides['after'].get('prompts'))} prompts"
        for name, sides in evaluation["domains"].items()
        if sides.get("after")
    )
    return [
        (
            f"Divergences and acceptance hold for the texts they were measured on ({counts}) and for this sampler "
            f"({sampler_words(evaluation)})."
        )
    ]


def _export_limits(export: Results | None) -> list[str]:
    said = []
    for file in (export or {}).get("files") or []:
        wrong = len((file.get("parity") or {}).get("tokenizer_mismatches") or [])
        if wrong:
            said.append(
                f"{file['path']}: llama.cpp and the Hugging Face tokenizer disagree on {wrong} of "
                f"{file['parity']['tokenizer_texts']} texts."
            )
    return said
