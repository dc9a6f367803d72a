"""The packages that distill needs or can use, as its own metadata names them, beside those installed. No torch here."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

DEVELOPERS = "dev"  # the extra that no user needs
COMPILE_LLAMA = "pip install --force-reinstall --no-cache-dir --no-deps --no-binary llama-cpp-python llama-cpp-python"
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"  # see scripts/compiler_flags.sh
WITHOUT_AMX = f'CFLAGS="{_NO_AMX}" CXXFLAGS="{_NO_AMX}"'


@dataclass(frozen=True)
class Package:
    """A package that the metadata names: its requirement, such as `torch>=2.11`, the extra that it is of (None for
    one that is always needed), and the version installed (None without one)."""

    name: str
    requirement: str
    extra: str | None
    installed: str | None

    @property
    def fits(self) -> bool:
        """Whether it is installed in a version that is supported."""
        if self.installed is None:
            return False
        try:
            return Requirement(self.requirement).specifier.contains(Version(self.installed), prereleases=True)
        except InvalidVersion:  # a build with a name of its own
            return True

    @property
    def found(self) -> str:
        """The version beside the oldest that is supported."""
        specifier = str(Requirement(self.requirement).specifier)
        return f"{self.installed or 'not installed'} ({specifier})" if specifier else str(self.installed)


def required_python() -> str | None:
    """The versions of Python that the metadata allows, such as `>=3.11`; None where distill is not installed."""
    try:
        return importlib.metadata.metadata("distill")["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        return None


def packages() -> list[Package]:
    """Everything that the installed metadata names but the developers' tools; empty where distill is not installed."""
    try:
        metadata = importlib.metadata.metadata("distill")
    except importlib.metadata.PackageNotFoundError:
        return []
    extras = [name for name in metadata.get_all("Provides-Extra") or [] if name != DEVELOPERS]
    found = []
    for line in metadata.get_all("Requires-Dist") or []:
        wanted = Requirement(line)
        extra = None
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            extra = next((name for name in extras if wanted.marker.evaluate({"extra": name})), DEVELOPERS)
        if extra != DEVELOPERS:
            found.append(Package(wanted.name, f"{wanted.name}{wanted.specifier}", extra, version_of(wanted.name)))
    return found


def install_extra(extra: str) -> str:
    """The command that installs what an extra, such as `llama`, names.

    It names the packages themselves: pip finds `distill[llama]` on an index alone, and many run a checkout or a wheel.
    """
    named = [one.requirement for one in packages() if one.extra == extra]
    return pip_install(*named) if named else f"{pip_install('-e', f'.[{extra}]')} in the checkout of distill"


def version_of(name: str) -> str | None:
    """The version of a package that is installed; None without one."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip_install(*requirements: str) -> str:
    """The command that installs packages into the environment of this interpreter, in any shell."""
    beside = shutil.which("pip")
    here = Path(sys.executable).parent
    own = beside is not None and Path(beside).parent.resolve() == here.resolve()
    pip = "pip" if own else f'"{sys.executable}" -m pip'
    return " ".join([pip, "install", *(f'"{one}"' if set(one) & set("<>=!~[]; ") else one for one in requirements)])
