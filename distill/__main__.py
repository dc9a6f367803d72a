"""`python -m distill`, and the command `distill`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C during the first import, or after the work, ends it without a traceback."""
    try:
        from distill.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except ModuleNotFoundError as error:  # Without the package, not even `distill doctor` runs.
        if error.name is None or error.name.partition(".")[0] == "distill":
            raise
        print(f"distill: the package {error.name} is not installed\n  install distill again with pip", file=sys.stderr)
        sys.exit(2)
    try:
        run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
