"""`python -m distill`."""

from distill.cli import main

if __name__ == "__main__":
    main()
