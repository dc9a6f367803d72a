"""The order of imports (cli → api → pipeline → subjects → floor), and what is loaded.

docs/architecture.md explains the order.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from typer.main import get_command

from distill.cli.app import app as cli
from distill.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
# Downward: each room may import those below its own line. Floor modules may import each other.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"api"},
    {"pipeline"},
    {"report"},
    {"planning", "serving"},
    {"export"},
    {"measuring"},
    {"training"},
    {"surgery"},
    {"teacher"},
    {"decoding"},
    {"data"},
    {"engines"},
    {"gguf"},
    {"run", "sampler"},
    {"recipe"},
    {
        "vocabulary",
        "folders",
        "checkpoints",
        "divergences",
        "tables",
        "files",
        "http",
        "machine",
        "devices",
        "progress",
        "errors",
    },
    {"distill"},  # the package itself: its version
)
FLOOR = LAYERS[-2]
HEIGHT = {room: -depth for depth, rooms in enumerate(LAYERS) for room in rooms}

# The package names the API's types for checkers; at run time its names load with their first use (test_api.py).
TYPES = ("distill", "api")

ALLOWED = {("sampler", "engines")}  # types alone

HEAVY = {"torch", "transformers", "datasets", "peft", "accelerate", "llama_cpp", "gguf", "pyarrow", "matplotlib"}
LIGHT_FILES = ("errors.py", "recipe/recipe.py", "recipe/training.py", "files.py", "machine.py", "run.py")


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a module of `package` imports, at any depth of its code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str | None:
    """The room that a dotted name lies in; None when it is not ours. `distill` is the package's own __init__."""
    parts = name.split(".")
    if parts[0] != "distill":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "distill"


def faults(user: str, name: str) -> str | None:
    """What is wrong with room `user` importing `name`; None when nothing is."""
    used = room_of(name)
    if used is None or used == user or (user, used) == TYPES:
        return None
    if {user, used} <= FLOOR or (user, used) in ALLOWED:
        return None
    if HEIGHT.get(used, 0) == HEIGHT.get(user, 0):
        return f"{user} imports {used}, which lies beside it"
    return f"{user} imports {used}, which lies above it" if HEIGHT.get(used, 0) > HEIGHT.get(user, 0) else None


FILES = sorted((ROOT / "distill").rglob("*.py"))
PLACES = [(path, ("distill", *path.relative_to(ROOT / "distill").with_suffix("").parts)) for path in FILES]
ROOMS = set(HEIGHT) | {parts[1] for _, parts in PLACES if parts[1] != "__init__"}


def test_every_file_has_a_room() -> None:
    assert not ROOMS - set(HEIGHT), "give each a layer here and a place in docs/architecture.md"


def test_imports_run_downward() -> None:
    """And modules outside engines/torch/products/ import from its __init__.py alone."""
    found, room = [], "distill.engines.torch.products"
    inside = {f"{room}.{path.stem}" for path, parts in PLACES if ".".join(parts[:-1]) == room}
    assert len(inside) > 5
    for path, parts in PLACES:
        user = "distill" if parts[1] == "__init__" else parts[1]
        for line, name in imports(parsed(path), ".".join(parts[:-1])):
            fault = faults(user, name)
            if ".".join(parts[:-1]) != room and {name, name.rpartition(".")[0]} & inside:
                fault = f"{name} must be imported from {room}"
            if fault:
                found.append(f"{path.relative_to(ROOT)}:{line}: {fault}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("user", "name", "allowed"),
    [
        ("cli", "distill.pipeline.stages", True),
        ("training", "distill.surgery.sparsity", True),
        ("files", "distill.errors", True),
        ("recipe", "distill.__version__", True),
        ("training", "torch", True),
        ("planning", "distill.serving.check", False),
        ("teacher", "distill.training.loop", False),
        ("engines", "distill.decoding", False),
        ("pipeline", "distill.cli.app", False),
    ],
)
def test_the_rule_itself(user: str, name: str, allowed: bool) -> None:
    assert (faults(user, name) is None) is allowed


def test_relative_imports_are_resolved() -> None:
    tree = ast.parse("from . import a\nfrom .b import c\nfrom ..d import e\nfrom .. import f\nimport g.h\n")
    names = [name for _, name in imports(tree, "distill.room")]
    assert names == ["distill.room.a", "distill.room.b.c", "distill.d.e", "distill.f", "g.h"]


@pytest.mark.parametrize("name", LIGHT_FILES)
def test_light_file_imports_nothing_heavy(name: str) -> None:
    used = {name.split(".")[0] for _, name in imports(parsed(ROOT / "distill" / name), "distill")}
    assert not used & HEAVY


# ── names ──


def names_given(tree: ast.Module) -> list[str]:
    """The names that a module's own statements give to a value, function or class, imports apart."""
    given = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = (one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
        given += [one.id for one in names if isinstance(one.ctx, ast.Store)]
    return given


def test_no_constant_takes_the_place_of_another() -> None:
    """As where modules become one: the linter sees functions and imports of one name, and no constants."""
    found = {str(path.relative_to(ROOT)): Counter(names_given(parsed(path))).most_common(1) for path in FILES}
    assert not {path: names for path, names in found.items() if names and names[0][1] > 1}


# ── what a user has to learn ──

MOST_OPTIONS, MOST_KEYS = 185, 135


def sections(section: type[BaseModel]) -> set[type[BaseModel]]:
    """A section of the recipe and all below it."""
    kinds = [field.annotation for field in section.model_fields.values()]
    for kind in kinds:
        kinds += get_args(kind)
    below = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)}
    return {section}.union(*map(sections, below))


def test_options_and_keys_are_few() -> None:
    """Options of all commands; keys of a recipe that hold a value, each once wherever its section stands."""
    app: Any = get_command(cli)
    params = [one for command in (app, *app.commands.values()) for one in command.params]
    options = [one for one in params if one.param_type_name == "option" and one.name != "help"]
    assert len(options) <= MOST_OPTIONS and all(one.help for one in options)
    every = sections(Recipe)
    keys = {
        (next(base for base in section.__mro__ if name in base.__annotations__), name)
        for section in every
        for name, field in section.model_fields.items()
        if not any(kind in every for kind in (field.annotation, *get_args(field.annotation))) and name != "sources"
    }
    assert len(keys) <= MOST_KEYS


# ── circles ──


def import_graph(root: Path) -> dict[str, set[str]]:
    """The modules of the package at `root` that each of its modules imports, at any depth but for types alone."""
    files = {
        ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        tree = parsed(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                node.body = [ast.Pass()]
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = (used for _, used in imports(tree, package))
        modules = {used if used in files else used.rpartition(".")[0] for used in found}
        graph[name] = {module for module in modules if module in files and module != name}
    return graph


def test_no_circle_of_imports() -> None:
    TopologicalSorter(import_graph(ROOT / "distill")).prepare()


def test_circles_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "__init__.py").write_text("")
    (folder / "a.py").write_text("from package.inner import b\n")
    (folder / "inner" / "b.py").write_text("def f():\n    from package.c import name\n")
    (folder / "c.py").write_text("import package.a\n")
    (folder / "d.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.e import E\n")
    (folder / "e.py").write_text("import package.d\n")
    with pytest.raises(CycleError) as caught:
        TopologicalSorter(import_graph(folder)).prepare()
    assert set(caught.value.args[1]) == {"package.a", "package.c", "package.inner.b"}
    (folder / "c.py").write_text("")
    TopologicalSorter(import_graph(folder)).prepare()


# ── what is loaded ──


def in_fresh_python(program: str) -> None:
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_light_files_load_nothing_heavy() -> None:
    modules = ", ".join(f"distill.{name[:-3].replace('/', '.')}" for name in LIGHT_FILES)
    in_fresh_python(f"import sys, {modules}\nassert not {HEAVY!r} & set(sys.modules)")


def test_help_of_every_command_loads_nothing_heavy() -> None:
    in_fresh_python(
        "import sys\n"
        "from typer.main import get_command\n"
        "from typer.testing import CliRunner\n"
        "from distill.cli.app import app\n"
        "commands = sorted(get_command(app).commands)\n"
        "assert 'train' in commands, commands\n"
        "for arguments in [['--help'], *([name, '--help'] for name in commands)]:\n"
        "    result = CliRunner().invoke(app, arguments)\n"
        "    assert result.exit_code == 0, (arguments, result.output)\n"
        "    assert 'torch' not in sys.modules and 'transformers' not in sys.modules, arguments\n"
    )


def test_one_module_knows_kinds_of_devices() -> None:
    """distill/devices.py: elsewhere no code names one. Texts that a user reads may."""
    kinds = {"cuda", "mps", "xpu", "npu", "hip"}
    found = []
    for path in FILES:
        for node in ast.walk(parsed(path)) if path.name != "devices.py" else ():
            name = (
                node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
            )
            if isinstance(name, str) and (name in kinds or name.startswith(("cuda", "is_cuda"))):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not found, "\n".join(found)
