"""llama.cpp's options on our command lines, by its own names: `--NAME` for the target, `--NAME-draft` for the draft."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from distill.errors import RecipeError
from distill.recipe import Gguf, parse_section

PANEL = "llama.cpp's options, for GGUF files"
# Name, kind, short name of the target's and of the draft's, help. `threads` is an option of the commands themselves.
OPTIONS: tuple[tuple[str, Any, str, str, str], ...] = (
    ("n_gpu_layers", int, "-ngl", "-ngld", "Layers on GPUs; all if llama.cpp was built for GPUs."),
    ("device", str, "-dev", "-devd", "GPUs, such as CUDA0,CUDA1; none: the CPU alone."),
    ("tensor_split", str, "-ts", "", "Share of the layers for each GPU, such as 3,1."),
    ("flash_attn", str, "-fa", "", "on, off (the default) or auto."),
    ("cache_type_k", str, "-ctk", "-ctkd", "Type of the cached keys: f32, f16 (the default), bf16, q8_0, q5_1, …"),
    ("cache_type_v", str, "-ctv", "-ctvd", "Type of the cached values; quantised ones need --flash-attn on."),
    ("threads_batch", int, "-tb", "-tbd", "CPU threads of steps of several tokens; as --threads if left out."),
    ("ubatch_size", int, "-ub", "", "Tokens computed at once (micro-batch)."),
)
OF_DRAFT = (*OPTIONS, ("threads", int, "", "-td", "CPU threads of the draft."))
LISTS: dict[str, type] = {"device": str, "tensor_split": float}


def takes_gguf_options(*roles: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command takes llama.cpp's options of these roles, and gets them as its argument `gguf`.

    The argument is a `distill.recipe.Gguf`, or None where none of the options was given.
    """
    options = [
        _option(role, "draft" in roles, *row) for role in roles for row in (OF_DRAFT if role == "draft" else OPTIONS)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "gguf"]

        @functools.wraps(command)
        def wrapped(*args: Any, **values: Any) -> None:
            given = {option.name: values.pop(option.name) for option in options}
            return command(*args, **values, gguf=_collected(given, roles))

        changed: Any = wrapped
        changed.__signature__ = signature.replace(parameters=[*own, *options])
        changed.__annotations__ = {each.name: each.annotation for each in (*own, *options)} | {"return": None}
        return wrapped

    return decorate


def _option(
    role: str, both: bool, name: str, kind: Any, short: str, short_of_draft: str, words: str
) -> inspect.Parameter:
    draft = role == "draft"
    if both and name == OPTIONS[0][0]:
        words += " This and each option below is also --NAME-draft, for the draft."
    spelt = name.replace("_", "-") + ("-draft" if draft else "")
    names = [f"--{spelt}", short_of_draft if draft else short]
    # A group of their own, in which the draft's, the same once more, are not shown.
    info = typer.Option(*filter(None, names), help=words, rich_help_panel=PANEL, hidden=draft)
    return inspect.Parameter(
        f"gguf_{role}_{name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _collected(given: Mapping[str, Any], roles: tuple[str, ...]) -> Gguf | None:
    """The options that were given, checked as a recipe's; RecipeError for values that cannot be."""
    found: dict[str, dict[str, Any]] = {}
    for role in roles:
        prefix = f"gguf_{role}_"  # commands have options of their own by such names
        own = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
        own = {name: _listed(name, value) for name, value in own.items() if value is not None}
        if own:
            found[role] = own
    return parse_section(Gguf, found, "the options of llama.cpp") if found else None


def _listed(name: str, value: Any) -> Any:
    if name not in LISTS:
        return value
    try:
        return [LISTS[name](part.strip()) for part in value.split(",")]
    except ValueError:
        example = "3,1" if name == "tensor_split" else "CUDA0,CUDA1"
        raise RecipeError(
            f"--{name.replace('_', '-')} {value}: expected values separated by commas", f"for instance {example}"
        ) from None


def require_used(gguf: Gguf | None, target: str, draft: str | None) -> None:
    """Raise RecipeError for options that would do nothing: PyTorch runs the models, or there is no draft."""
    if gguf is None:
        return
    if not target.endswith(".gguf"):
        raise RecipeError(
            f"options of llama.cpp were given ({gguf.described() or 'defaults'}), and PyTorch runs {target}"
        )
    if draft is None and gguf.draft.given():
        raise RecipeError(
            f"options of llama.cpp were given for the draft ({gguf.draft.described()}), and no draft is loaded"
        )


def merged(recipe: Gguf, given: Gguf) -> Gguf:
    """A recipe's options with those of the command line in their place; RecipeError where they do not go together."""
    roles = {
        role: getattr(recipe, role).given() | getattr(given, role).model_dump(mode="json", exclude_unset=True)
        for role in ("target", "draft")
    }
    return parse_section(Gguf, roles, "the options of llama.cpp")
