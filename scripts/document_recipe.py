"""Write docs/recipes.md from the schema in distill/recipe/.

python scripts/document_recipe.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from distill.recipe.document import describe_schema  # noqa: E402

INTRODUCTION = """\
<!-- Written by `python scripts/document_recipe.py` from distill/recipe/; edit those, not this file. -->

# Recipes

A recipe is one YAML file that says everything a run depends on: which target is to be made faster, on what text, how
the draft is cut and trained, and what is measured at the end. `distill train RECIPE` carries it out, stage by stage,
into the run directory `runs/<name>`. The smallest recipe names a target and some text; all else has a default:

```yaml
name: first
target:
  model: ../models/my-target        # a folder, or a hub name such as Qwen/Qwen2.5-Coder-14B-Instruct
corpus:
  sources:
    - {kind: tree, path: ~/code, pattern: "**/*.py"}
```

**Paths.** What starts with `.`, `/` or `~` is a path; a relative one is taken from the folder of the *recipe file*, not
from where the command is run. Any other model name is a hub name. The path of a source is always a path, except for
`kind: hub` and the special `python:stdlib`.

**Mistakes.** An unknown key, a key written twice, a value out of range: every mistake is named in one message, with the
nearest known key, before any work starts. `distill check RECIPE` does only that and a few more checks.

**Overrides.** A command that takes a recipe also takes changes to it, as `a.b=c`. The value is YAML; numbers index into
lists; `null` switches an optional part off. Quote what your shell would read itself:

```
distill train recipes/demo.yaml train.steps=100 cut.layers=1
distill train recipes/demo.yaml 'speedup.lengths=[2, 4]' speedup.grown=null
distill train recipes/demo.yaml corpus.sources.0.pattern='asyncio/*.py' name=asyncio
```

The run directory keeps the recipe as written (`recipe.yaml`) and resolved, with every default and override
(`config.yaml`); the latter is itself a recipe. A stage runs again only when keys that it reads have changed. Where that
would supersede finished answers or training, `distill train` stops and shows what changed.

**Splits.** Every document belongs to one split. *train*: the draft learns from it. *validation*: decisions are made on
it, such as which layers to drop. *test*: every printed figure comes from it, and nothing is ever tuned on it. With
`split: by-name` a hash of the document's name decides, so a document keeps its split when others come and go; with
`split: test` (or another) a whole source goes there; `keep` then drops what a source has in other splits. The shares
of by-name documents are `corpus.validation` and `corpus.test`.

"""


def document() -> str:
    """The whole of docs/recipes.md."""
    return INTRODUCTION + describe_schema().rstrip() + "\n"


if __name__ == "__main__":
    path = ROOT / "docs" / "recipes.md"
    path.write_text(document(), encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
