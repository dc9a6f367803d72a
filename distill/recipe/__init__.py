"""The recipe: its schema, every default, loading and overrides. No torch, so that `distill check` starts at once."""

from distill.recipe.configuration import Configuration
from distill.recipe.corpus import Chat, Corpus, Source
from distill.recipe.cut import ComparedCut, Cut, Transplant, Trim
from distill.recipe.gguf import Gguf, GgufOptions
from distill.recipe.load import dump_recipe, is_path, load_recipe, parse_recipe, resolve_model
from distill.recipe.measuring import Evaluate, Export, Speedup
from distill.recipe.recipe import Recipe
from distill.recipe.section import Section, parse_section
from distill.recipe.servers import CONNECTION_KEYS, Servers, TeacherServer, Writer
from distill.recipe.target import Answers, PyTorch, SamplerSettings, Target, TeacherStore, Traffic
from distill.recipe.training import Acceptance, Adapter, HiddenStates, Loss, Sparsity, Train
