"""Puts recipes/ and data/ into wheels, as distill/shipped/recipes and distill/shipped/data; see pyproject.toml, too.

They stay at the root of a checkout, where an editable installation reads them (distill/cli/check.py).
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("recipes", "data")


class BuildWithRecipes(build_py):
    """The package's modules, then what it ships with."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in SHIPPED:
            place = Path(self.build_lib, "distill", "shipped", name)
            shutil.rmtree(place, ignore_errors=True)  # what an earlier build left
            shutil.copytree(name, place, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))


setup(cmdclass={"build_py": BuildWithRecipes})
