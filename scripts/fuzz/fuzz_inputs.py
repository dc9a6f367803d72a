"""Hostile inputs for scripts/fuzz/fuzz.py, as strategies of hypothesis: valid files with edits, and values of any kind.

An edit of a JSON tree deletes, renames, wraps, repeats or replaces a value anywhere. An edit of bytes flips, cuts,
repeats, inserts or overwrites. Both draw from the same list of values that readers often do not expect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

DEEP = "@deep@"  # `dumped` replaces this text by a value that is nested beyond every parser's limit.
DEEP_JSON = '{"a":' * 1_000 + "[" * 12_000 + "1" + "]" * 12_000 + "}" * 1_000
DIGITS = "@digits@"  # `dumped` replaces it by an integer with more digits than Python converts.
TWICE = "@twice@"  # As a key, `dumped` replaces it by the next key, so that an object has that key twice.

SCALARS: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 255, 65536, 10**6, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64),
    *(-(2**31), -(2**63) - 1, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e300, 1.5e308, float("nan"), float("inf")),
    *(float("-inf"), "", " ", "a", "0", "-1", "1e5", "nan", "null", "true", "\0", "a\0b", "\ud800", "\udfff\ud800"),
    *("\ufeff", "é\u202e\u0301", "\U0010ffff", "../../../../x", "/", ".", "..", "/dev/null", "~", "~nobody/x", "C:\\x"),
    *("a" * 300, "a" * 5_000, "%s%n{}", "{{ 7 * 7 }}", "{% for a in b %}", "$(x)", "\x1b[31m", "\r\n", "!!x", DEEP),
    *(DIGITS, [], {}, [[]], [None], [{}], {"a": {}}, {"": None}, {"\0": 1}, {"type": "x"}, [0, -1, 2**63], ["a", 1]),
]
scalars = st.sampled_from(SCALARS)
values = st.one_of(
    scalars,
    scalars,
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
        max_leaves=6,
    ),
)


@st.composite
def weighted(draw: Callable[..., Any], *choices: tuple[int, st.SearchStrategy[Any]]) -> Any:
    """Return one of several strategies, by weight. `one_of` would give each branch inside them the same weight."""
    return draw(
        choices[draw(st.sampled_from([at for at, (weight, _) in enumerate(choices) for _ in range(weight)]))][1]
    )


fractions = st.integers(0, 2**20 - 1)
EDITS = ("replace", "replace", "replace", "delete", "swap", "wrap", "repeat", "rename", "empty", "grow")


def dumped(value: Any) -> bytes:
    """Return a tree as JSON, with the texts DEEP, DIGITS and TWICE replaced by what a tree cannot hold."""
    text = json.dumps(value)
    text = text.replace(f'"{DEEP}"', DEEP_JSON).replace(f'"{DIGITS}"', "9" * 5000)
    return text.replace(f"{TWICE}", "").encode()


class Tree:
    """A valid value, the paths to all its parts, and edits of copies of it."""

    def __init__(self, value: Any, often: Sequence[str] = ()) -> None:
        """Half of the edits are made below the keys in `often`. A large file's other parts would attract too many."""
        self.value = value
        self.paths = [path for path in _paths(value) if path] or [()]
        self.few = [path for path in self.paths if len(path) <= 2 or not isinstance(path[-1], int)]
        self.few = [path for path in self.few if not often or not path or path[0] in often] or self.paths

    def edited(self) -> st.SearchStrategy[Any]:
        """Return copies with one to three edits."""

        @st.composite
        def copies(draw: Callable[..., Any]) -> Any:
            value = self.value
            for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
                paths = self.few if draw(st.integers(0, 2)) == 0 else self.paths
                path = paths[draw(fractions) % len(paths)]
                value = _edit(value, path, draw(st.sampled_from(EDITS)), draw(values), draw(fractions), self)
            return value

        return copies()

    def files(self) -> st.SearchStrategy[bytes]:
        """Return JSON texts of edited copies, of the value with edited bytes, and of other values."""
        plain = dumped(self.value)
        return weighted((8, self.edited().map(dumped)), (2, edited_bytes(plain)), (1, values.map(dumped)))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _paths(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:64]):
            yield from _paths(inner, (*path, index))


def _edit(value: Any, path: tuple[Any, ...], edit: str, other: Any, number: int, tree: Tree) -> Any:
    """Return a copy of `value` with one edit at `path`. Unchanged if an earlier edit removed the place."""
    if not path:
        return {"replace": other, "wrap": [value], "empty": type(value)() if value is not None else None}.get(
            edit, value
        )
    name, rest = path[0], path[1:]
    if isinstance(value, dict) and name in value:
        copy: Any = dict(value)
    elif isinstance(value, list) and isinstance(name, int) and name < len(value):
        copy = list(value)
    else:
        return value
    if rest:
        copy[name] = _edit(copy[name], rest, edit, other, number, tree)
        return copy
    old = copy[name]
    if edit == "replace":
        copy[name] = other
    elif edit == "delete":
        del copy[name]
    elif edit == "swap":
        found = tree.value
        for part in tree.paths[number % len(tree.paths)]:
            found = found[part]
        copy[name] = found
    elif edit == "wrap":
        copy[name] = [old] if number % 2 else {"a": old}
    elif edit == "empty":
        copy[name] = type(old)() if old is not None else []
    elif edit == "grow" and isinstance(old, (str, list)):
        copy[name] = old * (number % 300)
    elif edit == "grow" and isinstance(old, (int, float)):
        copy[name] = old * 10 ** (number % 30) * (-1) ** (number % 2)
    elif isinstance(copy, list):
        copy[name:name] = [old] * (1 + number % 3)
    elif edit == "rename":
        copy[other if isinstance(other, str) else str(name).upper()] = copy.pop(name)
    else:  # The same key occurs twice, the second time with another value.
        copy[f"{TWICE}{name}"] = other
    return copy


WORDS = [2**64 - 1, 2**63, 2**63 - 1, 2**62, 2**40, 2**33, 2**32 - 1, 2**31, 2**31 - 1, 2**30, 10**9, 65535, 255, 1, 0]


@st.composite
def edited_bytes(draw: Callable[..., Any], base: bytes, first: int | None = None) -> bytes:
    """Return copies of `base` with one to four edits. Half of them lie in the `first` bytes, where headers are."""
    found = bytearray(base)
    for _ in range(draw(st.integers(1, 4))):
        size = len(found) if first is None or draw(st.booleans()) else min(first, len(found))
        at = draw(fractions) * 7919 % max(1, size)
        edit = draw(st.integers(0, 9))
        if edit <= 2 and found:
            found[at % len(found)] ^= 1 << draw(st.integers(0, 7))
        elif edit == 3:
            del found[at:]
        elif edit == 4:
            del found[at : at + draw(st.integers(1, 64))]
        elif edit == 5:
            found[at:at] = found[at : at + draw(st.integers(1, 200))]
        elif edit <= 7:
            word = draw(st.sampled_from(WORDS)).to_bytes(8, "little")[: draw(st.sampled_from([1, 2, 4, 8]))]
            found[at : at + len(word)] = word
        elif edit == 8:
            found[at:at] = draw(st.binary(max_size=12))
        else:
            found[at : at + 1] = draw(st.sampled_from([b"\0", b"\xff", b"\xc3", b'"', b"{", b"[" * 3000, b"\\ud800"]))
    return bytes(found)


texts = st.one_of(st.text(max_size=30), st.sampled_from([value for value in SCALARS if isinstance(value, str)]))
