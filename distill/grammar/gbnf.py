"""GBNF, llama.cpp's grammar notation, rewritten for llguidance without changing what it allows.

llguidance splits a text into lexemes, and a lexeme matches as much as it can: `[0-9]+ [0-9]` with one lexeme for each
part allows no text at all. So every lexeme written here is one character, and the rules do the rest.
"""

from __future__ import annotations

import re

from distill.errors import DataError

ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}  # digits after each
_PART = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<rule>[A-Za-z0-9_-]+)\s*::=
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<literal>(?:[^"\\]|\\.)*)"
    |\[(?P<set>(?:[^\]\\]|\\.)+)\]
    |(?P<times>[*+?]|\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\})
    |(?P<mark>[().|])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[^xuU])|[^\\]", re.DOTALL)
_HINT = "see the grammars README of llama.cpp"


def lark(text: str) -> str:
    """A GBNF grammar in llguidance's Lark notation; DataError with the place of the first error.

    Rules are named by their number, `root` is the start. Token references (<[12]>, <name>) are not supported.
    """
    parts = _parts(text)
    names = list(dict.fromkeys(part for kind, part, _ in parts if kind == "rule"))
    if "root" not in names:
        raise DataError("the grammar has no rule `root`", f"name the first rule root; {_HINT}")
    known = {name: "start" if name == "root" else f"rule{number}" for number, name in enumerate(names)}
    lines: list[list[str]] = []
    depths: list[int] = []  # open brackets of each rule
    for kind, part, place in parts:
        if kind == "rule":
            lines.append([f"{known[part]}:"])
            depths.append(0)
            continue
        if not lines:
            raise _error(text, place, "a rule must begin with `name ::=`")
        _require_fit(kind, part, lines[-1], known, text, place)
        if kind == "mark":
            depths[-1] += {"(": 1, ")": -1}.get(part, 0)
            if depths[-1] < 0:
                raise _error(text, place, "this bracket closes nothing")
            if part in "|)":
                _fill(lines[-1])
        lines[-1].append(_written(kind, part, known, text, place))
    for line, depth in zip(lines, depths, strict=True):
        if depth:
            raise DataError("the grammar leaves a bracket open", "close it")
        _fill(line)
    if len(lines) != len(names):
        raise DataError("the grammar defines a rule twice", "rename one of them")
    return "\n".join(" ".join(line) for line in lines)


def _require_fit(kind: str, part: str, line: list[str], known: dict[str, str], text: str, place: int) -> None:
    """Raise DataError for the name of no rule, and for a repetition of nothing."""
    if kind == "name" and part not in known:
        raise _error(text, place, f"there is no rule `{part}`")
    if kind == "times" and line[-1][-1] in ":(|":
        raise _error(text, place, f"nothing stands before `{part}` to repeat")


def _parts(text: str) -> list[tuple[str, str, int]]:
    """(kind, text, place) of everything but space and comments."""
    parts: list[tuple[str, str, int]] = []
    place = 0
    while place < len(text):
        match = _PART.match(text, place)
        if match is None:
            raise _error(text, place, f"`{text[place : place + 12]}` is no GBNF")
        assert match.lastgroup is not None
        if match.lastgroup != "space":
            parts.append((match.lastgroup, match[match.lastgroup], place))
        place = match.end()
    return parts


def _fill(line: list[str]) -> None:
    """Write the empty text for an alternative that ends here without any part."""
    if line[-1][-1] in ":(|":
        line.append('""')


def _written(kind: str, part: str, known: dict[str, str], text: str, place: int) -> str:
    if kind == "name":
        return known[part]
    if kind == "literal":
        characters = [f"/{_escaped(character)}/" for character in _characters(part, text, place)]
        return f"({' '.join(characters)})" if characters else '""'
    if kind == "set":
        negated = part.startswith("^")
        return f"/[{'^' * negated}{_ranges(part[negated:], text, place)}]/"
    return "/(?s:.)/" if part == "." else re.sub(r"\s", "", part)


def _characters(written: str, text: str, place: int) -> list[str]:
    parts = _CHARACTER.findall(written)
    if "".join(parts) != written:
        raise _error(text, place, f"an escape in `{written}` is not whole")
    characters = [_unescaped(part) for part in parts]
    if None in characters:
        raise _error(text, place, f"`{written}` names a character that does not exist")
    return [character for character in characters if character is not None]


def _unescaped(part: str) -> str | None:
    """The character of an escape; None for a number that no character has."""
    if len(part) == 1:
        return part
    if part[1] in _HEXADECIMAL:
        number = int(part[2:], 16)
        return chr(number) if number <= 0x10FFFF and not 0xD800 <= number <= 0xDFFF else None
    return ESCAPES.get(part[1], part[1])


def _escaped(character: str) -> str:
    return f"\\u{{{ord(character):x}}}"


def _ranges(written: str, text: str, place: int) -> str:
    """The inside of a set; a `-` at either end stands for itself."""
    parts = _CHARACTER.findall(written)
    characters = _characters(written, text, place)
    inside = ""
    for number, (part, character) in enumerate(zip(parts, characters, strict=True)):
        between = part == "-" and 0 < number < len(parts) - 1
        inside += "-" if between else _escaped(character)
    return inside


def _error(text: str, place: int, problem: str) -> DataError:
    line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
    return DataError(f"the grammar is wrong at line {line}, column {column}: {problem}", _HINT)
