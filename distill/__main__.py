"""`python -m distill`, and the command `distill`."""

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C before its first import is done, and after its work, ends it without a traceback."""
    try:
        from distill.commands.app import main as run
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    try:
        run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
