"""Write the examples that a demo target is tuned on, and the prompts that its draft is adapted and measured on.

.venv/bin/python scripts/tuned_examples.py RULE FOLDER [--examples 40] [--prompts 160] [--held 24]

Every prompt asks to complete a function of Python's standard library. RULE says how the tuned target answers:

    envelope   a JSON object with the solution as a list of lines, for a program that reads it
    house      a house style: headings, code with two spaces and a marked end, checked facts as a list
    german     German sentences before and after the code

FOLDER gets examples.jsonl (prompt and answer), prompts.jsonl (for answers of the tuned target) and held.jsonl (for
tests). No function is in two files. The functions of held.jsonl come from the modules in data/, which no model learns.
The answers are derived from the functions, so the three files depend only on the Python version.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES, CHARACTERS = (4, 16), 700  # A function has 4 to 16 lines and at most 700 characters.
SKIPPED = (
    "test",
    "tests",
    "site-packages",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "encodings",
    "ensurepip",
    "__pycache__",
)


@dataclass(frozen=True)
class Function:
    """A function with a docstring: its module, its name, its text, and its parsed node."""

    module: str
    name: str
    text: str
    node: ast.FunctionDef

    @property
    def prompt(self) -> str:
        """Return the request to complete the function. It has the text up to the end of the docstring."""
        last = self.node.body[0].end_lineno
        assert last is not None
        begun = "\n".join(self.text.splitlines()[: last - self.node.lineno + 1])
        return f"Complete this Python function:\n\n```python\n{begun}\n```"

    @property
    def purpose(self) -> str:
        """Return the first sentence of the docstring, on one line."""
        words = " ".join((ast.get_docstring(self.node) or "").split())
        return words.split(". ")[0].rstrip(".")

    @property
    def arguments(self) -> list[str]:
        """Return the names of the arguments."""
        every = self.node.args
        return [argument.arg for argument in (*every.posonlyargs, *every.args, *every.kwonlyargs)]

    def count(self, *kinds: type[ast.AST]) -> int:
        """Return the number of the function's nodes of these kinds."""
        return sum(isinstance(node, kinds) for node in ast.walk(self.node))


def functions(folder: Path, without: Iterable[str] = ()) -> Iterator[Function]:
    """Yield the functions of the modules below a folder that are short and have a docstring and a body.

    Modules come in the order of a hash of their names, so that all Python versions choose the same shared modules.
    """
    modules = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    for module in sorted(modules.keys() - {*without}, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if not {*SKIPPED}.isdisjoint(module.split("/")):
            continue
        try:
            source = modules[module].read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.body) < 2:
                continue
            text = ast.get_source_segment(source, node) or ""
            fits = LINES[0] <= len(text.splitlines()) <= LINES[1] and len(text) <= CHARACTERS
            if fits and ast.get_docstring(node):
                yield Function(module, node.name, textwrap.dedent(text), node)


def envelope(function: Function) -> str:
    """Return the function as a JSON object, in lines."""
    content = {"language": "python", "name": function.name, "solution": function.text.splitlines()}
    return json.dumps(content, indent=1, ensure_ascii=False)


def house(function: Function) -> str:
    """Return headings, code indented by two spaces with a marked end, and facts as a list."""
    lines = function.text.splitlines()
    narrow = [" " * ((len(line) - len(line.lstrip())) // 2) + line.lstrip() for line in lines]
    code = "\n".join([f"# begin {function.name}", *narrow, f"# end {function.name}"])
    facts = [
        f"takes: {', '.join(function.arguments) or 'nothing'}",
        f"branches: {function.count(ast.If, ast.IfExp)}, loops: {function.count(ast.For, ast.While)}",
        f"returns: {'a value' if function.count(ast.Return) else 'nothing'}",
    ]
    listed = "\n".join(f"* {fact};" for fact in facts)
    return f"PURPOSE\n{function.purpose}.\n\nCODE\n```python\n{code}\n```\n\nFACTS\n{listed}"


def german(function: Function) -> str:
    """Return German sentences around the code."""
    names = [f"`{name}`" for name in function.arguments]
    taken = f"Sie nimmt {' und '.join(names)} entgegen" if names else "Sie nimmt keine Argumente entgegen"
    loops, branches = function.count(ast.For, ast.While), function.count(ast.If, ast.IfExp)
    ways = (
        f"{branches} Verzweigungen und {loops} Schleifen" if branches or loops else "weder Verzweigungen noch Schleifen"
    )
    given = "gibt am Ende einen Wert zurück" if function.count(ast.Return) else "gibt keinen Wert zurück"
    return (
        f"Hier ist die vollständige Funktion `{function.name}`. {taken}.\n\n```python\n{function.text}\n```\n\n"
        f"Die Funktion hat {ways} und {given}. Ihre Beschreibung auf Englisch lautet: „{function.purpose}.“"
    )


RULES: dict[str, Callable[[Function], str]] = {"envelope": envelope, "house": house, "german": german}


def write_all(rule: str, folder: Path, examples: int, prompts: int, held: int) -> list[Path]:
    """Write the three files and return their paths."""
    places = [ROOT / "data" / split for split in ("test", "validation")]
    modules = {path.relative_to(place).as_posix() for place in places for path in place.rglob("*.py")}
    kept = list(islice(chain.from_iterable(map(functions, places)), held))
    read = functions(Path(sysconfig.get_paths()["stdlib"]), modules)
    library = list({function.prompt: function for function in islice(read, examples + prompts)}.values())
    rule_of = RULES[rule]
    texts = {
        "examples.jsonl": [{"prompt": each.prompt, "answer": rule_of(each)} for each in library[:examples]],
        "prompts.jsonl": [{"prompt": function.prompt} for function in library[examples:]],
        "held.jsonl": [{"prompt": function.prompt} for function in kept],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in texts.items():
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in texts]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rule", choices=[*RULES])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--held", type=int, default=24)
    asked = parser.parse_args()
    for path in write_all(asked.rule, asked.folder, asked.examples, asked.prompts, asked.held):
        print(path)
