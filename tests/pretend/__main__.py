"""`python -m pretend [-m MODULE | SCRIPT] ARGUMENTS…` with the pretend device as torch's accelerator.

With --devices 2 before the script there are two of them; --memory BYTES limits each, --mps takes away what MPS lacks,
and --counts prints what the device was asked, to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys

import pretend


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(prog="python -m pretend", description=__doc__, allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=1, choices=(1, 2))
    parser.add_argument("--memory", type=int)
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("-m", action="store_true", dest="module")
    parser.add_argument("script")
    options, rest = parser.parse_known_args()
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend.available(options.devices))
        if options.memory is not None:
            for device in range(options.devices):
                stack.enter_context(pretend.memory(options.memory, device))
        if options.mps:
            stack.enter_context(pretend.without("float64", pretend.SORTS, *pretend.lacking()))
        counts = stack.enter_context(pretend.counting())
        sys.argv = [options.script, *rest]
        run = runpy.run_module if options.module else runpy.run_path
        try:
            run(options.script, run_name="__main__", **({"alter_sys": True} if options.module else {}))
        finally:
            stack.close()
            if options.counts:
                print(counts, file=sys.stderr)


main()
