"""`python -m distill`."""

from distill.commands.app import main

if __name__ == "__main__":
    main()
