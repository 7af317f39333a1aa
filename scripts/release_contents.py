"""Whether the sdist and the wheel in a folder hold what they must and nothing else, and agree on the version.

scripts/release_check.sh runs it; Python's standard library and ``packaging`` are enough.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parents[1]
PACKAGES = ("upipe_integrations", "deepspeed_plugin", "megatron_patch")
ENTRY_POINTS = (
    "upipe = upipe_integrations.commands.main:main",
    "upipe_deepspeed = upipe_autoload:deepspeed",
    "upipe_megatron = upipe_autoload:megatron",
    "deepspeed = deepspeed_plugin.serves:serves",
)


def faults(folder: Path) -> list[str]:
    """What is wrong with the sdist and the wheel in `folder`, a sentence each."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if (len(wheels), len(sdists)) != (1, 1):
        return [f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists: must be one of each"]
    versions = {str(parse_wheel_filename(wheels[0].name)[1]), str(parse_sdist_filename(sdists[0].name)[1])}
    return [*_faults_of_wheel(wheels[0]), *_faults_of_sdist(sdists[0]), *_faults_of_versions(versions)]


def _faults_of_wheel(wheel: Path) -> list[str]:
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        points = archive.read(f"{info}/entry_points.txt").decode()
        readme = Parser().parsestr(archive.read(f"{info}/METADATA").decode()).get_payload()
    wanted = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    wanted |= {f"{package}/py.typed" for package in PACKAGES} | {"upipe_autoload.py"}
    there = {name for name in names if not name.startswith(f"{info}/")}
    found += [f"the wheel lacks {name}" for name in sorted(wanted - there)]
    found += [f"the wheel has {name}, which no import needs" for name in sorted(there - wanted)]
    if not any(name.endswith("LICENSE") for name in names):
        found.append("the wheel lacks LICENSE")
    found += [f"the wheel lacks the entry point {point}" for point in ENTRY_POINTS if point not in points]
    if "# upipe-integrations" not in readme:
        found.append("the wheel's description is not the README")
    return found


def _faults_of_sdist(sdist: Path) -> list[str]:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    return [f"the sdist lacks {name}" for name in ("pyproject.toml", "README.md", "LICENSE") if name not in names]


def _faults_of_versions(built: set[str]) -> list[str]:
    """The files', the package's own, and the changelog's newest, which an unreleased state has not yet."""
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "upipe_integrations" / "__init__.py").read_text(), re.M)
    found = [] if version and built == {version[1]} else [f"built {built}, __version__ = {version and version[1]}"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    if not headings:
        return [*found, "CHANGELOG.md has no section"]
    if headings[0] == "Unreleased":
        if headings[1:] and headings[1] in built:
            found.append(f"CHANGELOG.md has changes since {headings[1]}, the version that is built: raise the version")
    elif headings[0] not in built:
        found.append(f"CHANGELOG.md's newest section is {headings[0]}, built is {', '.join(sorted(built))}")
    return found


if __name__ == "__main__":
    said = faults(Path(sys.argv[1]))
    sys.exit("\n".join(said) if said else 0)
