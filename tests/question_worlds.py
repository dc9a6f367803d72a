"""Shared by the tests of self-asked questions: a tiny instruct model that ends its texts; a writer with a script."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chat_templates
import tiny
import torch
from tiny import Patch

from distill.data.samples import Reply, Request
from distill.engines.torch.hugging_face import encode, load_tokenizer
from distill.recipe import Recipe, load_recipe
from distill.run import Run

ENDING = 1.3  # how far the end's logit stands above what its weights give: a text has some 20 tokens
RARE = -3.0  # the same of special tokens and of bytes that are no ASCII text


def build_instruct(folder: Path, change: Callable[[Any, Any], object] | None = None, layers: int = 3) -> None:
    """plain/ (the tokenizer without template) and target/ (with one), whose model and tokenizer `change` changes."""
    from transformers import AutoModelForCausalLM

    tiny.build_model(folder / "plain", layers)
    tokenizer = chat_templates.dress(load_tokenizer(str(folder / "plain")), "qwen-3")
    model = AutoModelForCausalLM.from_pretrained(folder / "plain")
    model.resize_token_embeddings(len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    if change is not None:
        change(model, tokenizer)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")


def build(folder: Path) -> Path:
    """The models of `build_instruct`, of which target/ ends its texts, and recipe.yaml, whose corpus are its
    questions."""
    build_instruct(folder, biased)
    values = tiny.recipe_values(folder)
    source = {"kind": "target", "questions": 24, "tokens": 32}
    values["corpus"] |= {"sources": [source], "validation": 0.25, "test": 0.25, "block": 128}
    values["answers"] |= {"group": 6, "batch": 3}
    values["chat"] = {"system": ["Be short.", "Be kind."]}
    return tiny.write_recipe(folder / "recipe.yaml", values)


def biased(model: Any, tokenizer: Any) -> None:
    """Give each token a logit of its own: the first hidden number is the same everywhere, and the head reads it."""
    embeddings = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(embeddings.clone())
        embeddings[:, 0] = 3.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        for number in range(len(tokenizer)):
            text = tokenizer.decode([number])
            plain = text.isascii() and text.isprintable() and number not in tokenizer.all_special_ids
            own = ENDING if number == tokenizer.eos_token_id else 0.0 if plain else RARE
            model.lm_head.weight[number, 0] = own


def begin(world: Path, folder: Path, *overrides: str) -> tuple[Recipe, Run]:
    """The world's recipe and a run of it in a new folder."""
    recipe = load_recipe(world / "recipe.yaml", overrides)
    return recipe, Run(folder, recipe)


def dressed(world: Path, style: str, template: str | None = None) -> Any:
    """The world's plain tokenizer with the template of a style, or another one."""
    tokenizer = chat_templates.dress(copy.deepcopy(load_tokenizer(str(world / "plain"))), style)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


class Script:
    """A writer whose reply to each request `text` gives: a text, which ends, a reply's ids, which do not, or all."""

    by_prompt = True
    together = 1

    def __init__(self, recipe: Recipe, text: Callable[[Request], str | list[int] | Reply]) -> None:
        self.tokenizer, self.text = load_tokenizer(recipe.target.model), text
        self.recipes: list[Recipe] = []
        self.asked: list[Request] = []

    def opened(self, recipe: Recipe, *_: Any) -> Script:
        """This writer, in the place of open_writer."""
        self.recipes.append(recipe)
        return self

    def write(self, waiting: deque[Request]) -> Iterator[Reply]:
        while waiting:
            request = waiting.popleft()
            self.asked.append(request)
            found = self.text(request)
            if isinstance(found, Reply):
                yield found
            elif isinstance(found, str):
                ids = [*encode(self.tokenizer, found), self.tokenizer.eos_token_id]
                yield Reply(request.id, ids, True)
            else:
                yield Reply(request.id, found, False)

    def close(self) -> list[str]:
        return []


def scripted(monkeypatch: Patch, recipe: Recipe, text: Callable[[Request], str | list[int] | Reply]) -> Script:
    """A writer with a script in the place of the recipe's."""
    script = Script(recipe, text)
    monkeypatch.setattr("distill.teacher.answers.open_writer", script.opened)
    return script
