"""The tokens that a regular expression, JSON schema or grammar allows after each text: states of constrained decoding.

One token leads from a state to the next. States are remembered: the target, the draft and every branch of a tree share
them, and going back costs nothing. llguidance parses the bytes of the tokens; where only one text can follow, it allows
only the token that the tokenizer would write there. Legend: V vocabulary, n rows.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.errors import DataError
from distill.files import kind_of, parse_json
from distill.grammar import gbnf
from distill.grammar.tokens import Tokens
from distill.models.gguf.llama_grammar import GrammarPlace, open_grammar
from distill.models.gguf.model import GgufModel

STUCK = "allow texts that this vocabulary can write, or simplify the grammar"
Bits = NDArray[np.uint8]  # [⌈V / 8⌉], a bit for each token, the lowest first


class _Guided:
    """A position in a grammar of llguidance; it never changes."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> Bits:
        """The tokens that may follow; the bits of end tokens are ignored."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise _stuck(self._matcher)
        return bits

    def accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def after(self, token: int) -> _Guided:
        """The position after one more allowed token."""
        matcher = self._matcher.deep_copy()
        if not matcher.consume_token(token):
            raise _stuck(matcher)
        return _Guided(matcher)


Position = _Guided | GrammarPlace


def _stuck(matcher: Any) -> DataError:
    reason = str(matcher.get_error()).split("\n")[0]
    return DataError(f"the grammar cannot go on: {reason}", STUCK)


class State:
    """The tokens that may follow a text. `forced` is the only one allowed, None where there are several.

    A text is `over` when it has ended or the grammar rules it out: only the end token may follow. Ids from `rows` on
    are never allowed; DataError where no other one is.
    """

    __slots__ = ("_bits", "accepting", "after", "forced", "position")

    def __init__(self, position: Position | None, ends: Sequence[int], size: int, rows: int) -> None:
        self.position = position
        self.after: dict[int, State] = {}
        self.accepting = position is not None and position.accepting()
        if position is None:
            allowed = np.zeros(size, dtype=bool)
            allowed[next((end for end in ends if end < rows), ends[0])] = True
        else:
            allowed = _unpacked(position.allowed(), size)
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
        return self.position is None

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

    def __init__(self, position: Position, tokens: Tokens, warnings: Sequence[str] = ()) -> None:
        self.warnings = warnings
        self.ends, self._size, self._position = tokens.ends, len(tokens.bytes_of), position
        self.begin(0)

    def begin(self, start: int, rows: int | None = None) -> None:
        """A new text; the grammar ignores its prompt of `start` tokens.

        `rows` is how many ids the target's logits cover (None: all); it can write no other ones.
        """
        self.start, self._rows = start, self._size if rows is None else rows
        self._over = State(None, self.ends, self._size, self._rows)
        self.root = State(self._position, self.ends, self._size, self._rows)

    def next(self, state: State, token: int) -> State:
        """The state after one more token, made once."""
        if state.position is None or token in self.ends or not state.allows(token):
            return self._over
        following = state.after.get(token)
        if following is None:
            following = state.after[token] = State(state.position.after(token), self.ends, self._size, self._rows)
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
    "json": lambda matcher, text: _json_grammar(matcher, text),
    "gbnf": lambda matcher, text: matcher.grammar_from_lark(gbnf.lark(text)),
    "lark": lambda matcher, text: matcher.grammar_from_lark(text),
}
HINTS = {"json": 'correct it; {"x-guidance": {"lenient": true}} in the schema ignores unsupported keywords'}
# As json.dumps writes it. A schema can ask for another layout under "x-guidance".
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def constraint(kind: str, text: str, tokens: Tokens) -> Constraint:
    """A constraint from a `regex`, `json` schema, `gbnf` or `lark` grammar; DataError for an invalid one.

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
    return Constraint(_Guided(guided), tokens, messages)


def llama_constraint(text: str, model: GgufModel) -> Constraint:
    """A constraint from a GBNF grammar, by llama.cpp itself; it forces a token only where no other one fits.

    DataError for a grammar that llama.cpp refuses. The model must stay open.
    """
    return Constraint(open_grammar(model, text), Tokens.of_gguf(model))


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
