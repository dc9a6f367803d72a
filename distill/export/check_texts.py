"""Texts on which a GGUF file is compared with its source where none are given: all that tokenizers treat apart."""

from __future__ import annotations

from pathlib import Path

from distill.export.tokens.probing import PROBE
from distill.vocabulary.reading import tokenizer_content

PROSE = """The lighthouse keeper had kept the same log for thirty-one years: wind, sea, visibility, ships. On the first
of March he wrote nothing but the date. Nobody noticed until the inspector came in June, by which time the page had
yellowed and the keeper had taken up bees. "What happened that day?" the inspector asked. "The fog lifted," he said,
"and there was nothing to write down." They drank tea. The inspector's report, which ran to four pages, recommended a
new lens, a second chair and, in a footnote that his superiors crossed out, a holiday.
"""
CODE = '''def moving_average(values: list[float], width: int) -> list[float]:
    """The mean of each window of `width` values."""
    if width < 1 or width > len(values):
        raise ValueError(f"width must lie between 1 and {len(values)}, got {width}")
    total = sum(values[:width])
    result = [total / width]
    for old, new in zip(values, values[width:]):
        total += new - old
        result.append(total / width)
    return result


for index, mean in enumerate(moving_average([1.0, 2.5, 4.0, 8.25], 2)):
    print(index, round(mean, 2))  # 1.75, 3.25, 6.12
'''
NASTY = (
    "  ",
    "   leading, and trailing   ",
    "\n\n\n\n\t\t  \r\n \r\n",
    "I'LL we'Re don't 'S 12345678 3.14 1e-9 ١٢٣ ½ Ⅷ",
    "naïve Ünïcödé 你好，世界。 こんにちは 한국어 नमस्ते ไทย",
    "שלום עולם مرحبا بالعالم \u200f(abc)\u200e",
    "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 \u200b\u00a0\u3000\u2028",
    "if x:\n        return {'a': [1, 2, 3]}  # !!! ??? --- ===\n",
    "a\u0302\u0323 q\u0307\u0323 z\u0335",
)
MOST_SPECIAL = 1024  # added tokens that are tried; vocabularies with more hold numbered fillers


def check_texts(folder: Path) -> list[str]:
    """Prose, code and the nasty texts, then every added token of the folder's tokenizer by itself."""
    added = tokenizer_content(folder / "tokenizer.json").get("added_tokens") or []
    return [PROSE, CODE, *PROBE, *NASTY, *(token["content"] for token in added[:MOST_SPECIAL])]
