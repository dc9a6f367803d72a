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

A recipe is one YAML file with everything a run depends on: the target, the text, how the draft is cut and trained, and
which measurements are made at the end. `distill train RECIPE` runs it stage by stage and writes to the run directory
`runs/<name>`. The smallest recipe names a target, some text and a cut; every other key has a default:

```yaml
name: first
target:
  model: ../models/my-target        # a folder, or a hub name such as Qwen/Qwen2.5-Coder-14B-Instruct
corpus:
  sources:
    - {kind: tree, path: ~/code, pattern: "**/*.py"}
cut:
  layers: 8                         # fewer than the target has: a draft of the target's own size saves nothing
```

**Paths.** A value that starts with `.`, `/` or `~` is a path; a relative one starts at the folder of the *recipe file*,
not at the working directory. Any other model name is a hub name, unless a file or folder of that name exists there: it
wins. Models on a command line follow the same rule, with paths that start at the working directory. The path of a
source is always a path, except for `kind: hub` and the special `python:stdlib`.

**Mistakes.** Unknown keys, keys written twice, values out of range: one message names every mistake, with the nearest
known key, before any work starts. `distill check RECIPE` makes all checks that need no weights: sources, traffic,
device, tokenizers, cuts, trackers, export, disk.

**Overrides.** A command that takes a recipe also takes changes to it, as `a.b=c`. The value is YAML; numbers index into
lists; `null` switches an optional part off. Quote anything your shell would interpret:

```
distill train recipes/demo.yaml train.steps=100 cut.layers=1
distill train recipes/demo.yaml 'speedup.lengths=[2, 4]' speedup.grown=null
distill train recipes/demo.yaml corpus.sources.0.pattern='asyncio/*.py' name=asyncio
```

The run directory keeps the recipe as written (`recipe.yaml`) and resolved, with every default and override
(`config.yaml`); the latter is itself a recipe. A stage runs again only when keys that it reads have changed. If that
would supersede finished answers or training, `distill train` stops and shows the changed keys.

**Splits.** Every document belongs to one split. *train*: the draft learns from it. *validation*: choices are made on
it, such as which layers to drop. *test*: every printed figure comes from it, and nothing is ever tuned on it. With
`split: by-name` a hash of the document's name decides, so a document keeps its split when others come and go. With
`split: test` (or another) the whole source belongs to that split. `keep` drops a source's documents of other splits.
The shares of by-name documents are `corpus.validation` and `corpus.test`.

"""


def document() -> str:
    """The whole of docs/recipes.md."""
    return INTRODUCTION + describe_schema().rstrip() + "\n"


if __name__ == "__main__":
    path = ROOT / "docs" / "recipes.md"
    path.write_text(document(), encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
