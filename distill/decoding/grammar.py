"""The tokens that a regular expression, JSON schema or grammar allows after each text: states of constrained decoding.

One token leads from a state to the next. States are remembered: the target, the draft and every branch of a tree share
them, and going back costs nothing. llguidance parses the bytes of the tokens; where only one text can follow, it allows
only the token that the tokenizer would write there. Legend: V vocabulary, n rows.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.engines.llama_cpp.model import GgufModel, token_bytes_of
from distill.errors import DataError
from distill.files import kind_of, parse_json
from distill.machine import install_extra
from distill.vocabulary.encoding import Encoder
from distill.vocabulary.vocabulary import Vocabulary


@dataclass(frozen=True)
class Tokens:
    """A vocabulary as grammars need it: the bytes [V] of each token, none for special ones.

    `ends` are the tokens that end a text; they are allowed where the grammar is satisfied, and only there. `write`
    gives the tokens in which the tokenizer writes bytes.
    """

    bytes_of: Sequence[bytes]
    ends: tuple[int, ...]
    write: Callable[[bytes], list[int]]

    def __post_init__(self) -> None:
        if not self.ends or not all(0 <= end < len(self.bytes_of) for end in self.ends):
            raise DataError(
                f"a grammar needs a token that ends the text, got {list(self.ends)} of {len(self.bytes_of)}"
            )

    @classmethod
    def of(cls, vocabulary: Vocabulary, ends: Sequence[int]) -> Tokens:
        """From a tokenizer folder."""
        bytes_of = [
            b"" if data is None or kind in ("special", "unused") else data
            for data, kind in zip(vocabulary.bytes_of, vocabulary.kinds, strict=True)
        ]
        return cls(bytes_of, tuple(end for end in ends if end < len(bytes_of)), Encoder(vocabulary).text)

    @classmethod
    def of_gguf(cls, model: GgufModel, ends: Sequence[int]) -> Tokens:
        """From a GGUF file."""
        write = model.file.tokenize
        return cls(token_bytes_of(model), tuple(ends), lambda data: write(data.decode("utf-8", "ignore")))

    @cached_property
    def library(self) -> Any:
        """The vocabulary as llguidance's tokenizer; DataError where llguidance is not installed."""
        try:
            module: Any = importlib.import_module("llguidance")
        except ImportError as error:
            raise DataError(f"grammars need llguidance ({error})", install_extra("grammar")) from None
        ends = set(self.ends)
        # An end token has no bytes here, whatever its text: `accepting` decides where it may stand.
        texts = [b"" if number in ends else data for number, data in enumerate(self.bytes_of)]
        wrapper = _Wrapper(texts, self.ends[0], self.write)
        return module.LLTokenizer(module.TokenizerWrapper(wrapper), eos_token=self.ends[0])


class _Wrapper:
    """A tokenizer with the attributes that llguidance reads."""

    bos_token_id = None

    def __init__(self, texts: list[bytes], end: int, write: Callable[[bytes], list[int]]) -> None:
        # llguidance needs bytes for every token: those without get the bytes of a special token, which no text matches.
        self.special_token_ids = [number for number, data in enumerate(texts) if not data]
        self.tokens = [data or b"<%d>" % number for number, data in enumerate(texts)]
        self.eos_token_id, self._write = end, write

    def __call__(self, text: bytes) -> list[int]:
        return self._write(text)


# ── GBNF, llama.cpp's grammar notation, rewritten for llguidance without changing what it allows ──
# llguidance splits a text into lexemes, and a lexeme matches as much as it can: `[0-9]+ [0-9]` with one lexeme for
# each part allows no text at all. So every lexeme written here is one character, and the rules do the rest.

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
            raise _error(text, place, f"`{text[place : place + 12]}` is not GBNF")
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


# ── States of constrained decoding ──

STUCK = "allow texts that this vocabulary can write, or simplify the grammar"
Bits = NDArray[np.uint8]  # [⌈V / 8⌉], a bit for each token, the lowest first


def _stuck(matcher: Any) -> DataError:
    reason = str(matcher.get_error()).split("\n")[0]
    return DataError(f"the grammar cannot go on: {reason}", STUCK)


class State:
    """The tokens that may follow a text. `forced` is the only one allowed, None where there are several.

    A text is `over` when it has ended or the grammar rules it out: only the end token may follow. Ids from `rows` on
    are never allowed; DataError where no other one is. `matcher` is llguidance's, which is copied before it goes on.
    """

    __slots__ = ("_bits", "accepting", "after", "forced", "matcher")

    def __init__(self, matcher: Any | None, ends: Sequence[int], size: int, rows: int) -> None:
        self.matcher = matcher
        self.after: dict[int, State] = {}
        self.accepting = matcher is not None and bool(matcher.is_accepting())
        if matcher is None:
            allowed = np.zeros(size, dtype=bool)
            allowed[next((end for end in ends if end < rows), ends[0])] = True
        else:
            allowed = _unpacked(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), size)
            if matcher.is_error():
                raise _stuck(matcher)
            allowed[list(ends)] = self.accepting
        missing = int(allowed[rows:].sum())
        allowed[rows:] = False
        tokens = np.flatnonzero(allowed)
        if not len(tokens):
            few = f"only {missing} tokens fit that the model has no row for"
            none = "no token of this vocabulary fits"
            raise DataError(f"the grammar cannot go on: {few if missing else none}", STUCK)
        self.forced = int(tokens[0]) if len(tokens) == 1 else None
        self._bits: Bits = np.packbits(allowed, bitorder="little")

    @property
    def over(self) -> bool:
        """Whether the text has ended or is ruled out."""
        return self.matcher is None

    def allows(self, token: int) -> bool:
        """Whether this token may follow."""
        return 8 * len(self._bits) > token and bool(self._bits[token >> 3] >> (token & 7) & 1)

    def mask(self, size: int) -> NDArray[np.bool_]:
        """The allowed tokens as a mask [size]; padding rows beyond the vocabulary are not allowed."""
        return _unpacked(self._bits, size)


def _unpacked(bits: Bits, size: int) -> NDArray[np.bool_]:
    mask = np.zeros(size, dtype=bool)
    known = np.unpackbits(bits, count=min(8 * len(bits), size), bitorder="little")
    mask[: len(known)] = known
    return mask


class Constraint:
    """The tokens that a grammar allows after each token of one text, from the end of the prompt on.

    `begin` starts another text. `warnings` name the parts of the user's grammar that are not enforced. DataError where
    the grammar allows nothing at all.
    """

    def __init__(self, matcher: Any, tokens: Tokens, warnings: Sequence[str]) -> None:
        self.warnings = warnings
        self.ends, self._size, self._matcher = tokens.ends, len(tokens.bytes_of), matcher
        self.begin(0)

    def begin(self, start: int, rows: int | None = None) -> None:
        """A new text; the grammar ignores its prompt of `start` tokens.

        `rows` is how many ids the target's logits cover (None: all); it can write no other ones.
        """
        self.start, self._rows = start, self._size if rows is None else rows
        self._over = State(None, self.ends, self._size, self._rows)
        self.root = State(self._matcher, self.ends, self._size, self._rows)

    def next(self, state: State, token: int) -> State:
        """The state after one more token, made once."""
        if state.matcher is None or token in self.ends or not state.allows(token):
            return self._over
        following = state.after.get(token)
        if following is None:
            matcher = state.matcher.deep_copy()
            if not matcher.consume_token(token):
                raise _stuck(matcher)
            following = state.after[token] = State(matcher, self.ends, self._size, self._rows)
        return following

    def state(self, context: Sequence[int]) -> State:
        """The state after a context, the prompt included."""
        state = self.root
        for token in context[self.start :]:
            state = self.next(state, token)
        return state

    def satisfied(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens after a prompt are a whole text of the grammar, the end token included or not."""
        state = self.root
        for token in tokens:
            if token in self.ends:
                return state.accepting
            state = self.next(state, token)
        return state.accepting

    def masked(self, logits: Tensor, states: Sequence[State]) -> Tensor:
        """Logits [n, V] with −∞ where the state of a row allows no token.

        A row with −∞ at every allowed token (possible for a trimmed draft) gets the same logit at all of them.
        """
        size = logits.shape[-1]
        allowed = torch.from_numpy(np.stack([state.mask(size) for state in states])).to(logits.device)
        masked = logits.masked_fill(~allowed, -torch.inf)
        silent = masked.amax(-1, keepdim=True) == -torch.inf
        return masked.masked_fill(silent & allowed, 0.0)


# The user's text in llguidance's own notation.
GRAMMARS: dict[str, Callable[[Any, str], str]] = {
    "regex": lambda matcher, text: matcher.grammar_from_regex(text),
    "choice": lambda matcher, text: matcher.grammar_from_regex(_alternatives(text)),
    "json": lambda matcher, text: _json_grammar(matcher, text),
    "gbnf": lambda matcher, text: matcher.grammar_from_lark(lark(text)),
    "lark": lambda matcher, text: matcher.grammar_from_lark(text),
}
HINTS = {"json": 'correct it; {"x-guidance": {"lenient": true}} in the schema ignores unsupported keywords'}
# As json.dumps writes it. A schema can ask for another layout under "x-guidance".
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def constraint(kind: str, text: str, tokens: Tokens) -> Constraint:
    """A constraint from a `regex`, `json` schema, `gbnf` or `lark` grammar, or a `choice`: texts in a JSON list.

    DataError for an invalid one.

    A regular expression (Rust's notation: no look-around, no back-references) must match the whole text. Lark is
    llguidance's dialect, in which a terminal matches as much as it can. JSON is laid out as by json.dumps.
    """
    if kind not in GRAMMARS:
        raise DataError(f"there is no kind of grammar `{kind}`", f"use one of {', '.join(GRAMMARS)}")
    library = tokens.library  # first: raises a clear error where llguidance is missing
    matcher: Any = importlib.import_module("llguidance").LLMatcher
    source = GRAMMARS[kind](matcher, text)
    invalid, messages = matcher.validate_grammar_with_warnings(source, library)
    guided = None if invalid else matcher(library, source, log_level=0)
    problem = messages[0] if guided is None else guided.get_error()
    if problem:
        raise DataError(f"the {kind} grammar cannot be used: {_first(problem)}", HINTS.get(kind, "correct it"))
    return Constraint(guided, tokens, messages)


def _alternatives(text: str) -> str:
    """A regular expression of the texts of a JSON list."""
    return "|".join("".join(map(_escaped, alternative)) for alternative in json.loads(text))


def _json_grammar(matcher: Any, text: str) -> str:
    try:
        schema = parse_json(text.encode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise DataError(f"the JSON schema cannot be read: {error}", "correct it") from None
    if not isinstance(schema, dict):
        raise DataError(f"a JSON schema is an object, got {kind_of(schema)}", "correct it")
    try:
        grammar: str = matcher.grammar_from_json_schema(json.dumps(schema), defaults=LAYOUT)
    except (ValueError, RecursionError) as error:  # NaN, which no JSON has, and too many levels
        raise DataError(f"the JSON schema cannot be used: {_first(str(error))}", "correct it") from None
    return grammar


def _first(message: str) -> str:
    """A library's message without its drawing of the grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "|" not in line]
    return "; ".join(line for line in lines if set(line) != {"^"})[:300]
