"""The recipe: its schema, every default, loading and overrides. No torch, so that `distill check` starts at once."""

from distill.recipe.configuration import Configuration
from distill.recipe.corpus import Chat, Corpus, Source
from distill.recipe.cut import Cut, Search, Transplant, Trim
from distill.recipe.gguf import Gguf, GgufOptions
from distill.recipe.load import dump_recipe, is_path, load_recipe, parse_recipe, resolve_model
from distill.recipe.measuring import Evaluate, Export, Grown, Profile, Speedup
from distill.recipe.mistakes import parse_section
from distill.recipe.section import Section
from distill.recipe.target import Answers, PyTorch, SamplerSettings, Target, TeacherServer, TeacherStore
from distill.recipe.text.servers import REACHING, Servers
from distill.recipe.text.traffic import Traffic
from distill.recipe.text.writer import Writer
from distill.recipe.training import Acceptance, Adapter, HiddenStates, Loss, Part, Replay, Sparsity, Train
from distill.recipe.whole import Recipe

__all__ = [
    "REACHING",
    "Acceptance",
    "Adapter",
    "Answers",
    "Chat",
    "Configuration",
    "Corpus",
    "Cut",
    "Evaluate",
    "Export",
    "Gguf",
    "GgufOptions",
    "Grown",
    "HiddenStates",
    "Loss",
    "Part",
    "Profile",
    "PyTorch",
    "Recipe",
    "Replay",
    "SamplerSettings",
    "Search",
    "Section",
    "Servers",
    "Source",
    "Sparsity",
    "Speedup",
    "Target",
    "TeacherServer",
    "TeacherStore",
    "Traffic",
    "Train",
    "Transplant",
    "Trim",
    "Writer",
    "dump_recipe",
    "is_path",
    "load_recipe",
    "parse_recipe",
    "parse_section",
    "resolve_model",
]
