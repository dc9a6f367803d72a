"""The recipe: its schema, every default, loading and overrides. No torch, so that `distill check` starts at once."""

from distill.recipe.configuration import Configuration
from distill.recipe.corpus import Chat, Corpus, Source
from distill.recipe.measuring import Evaluate, Gguf, GgufOptions, Speedup
from distill.recipe.recipe import Recipe, dump_recipe, is_path, load_recipe, parse_recipe, recipe_of, resolve_model
from distill.recipe.target import PyTorch, Sampler, Section, Target, parse_section
from distill.recipe.training import Adapter, Cut, Loss, Train
