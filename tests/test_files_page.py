"""docs/files.md has every file with its own first sentence: ``UPIPE_WRITE_DOCS=1 pytest tests/test_files_page.py``.

The map in README.md has a line for every folder of the packages.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "files.md"
README = (ROOT / "README.md").read_text()
PACKAGES = ("upipe_integrations", "deepspeed_plugin", "megatron_patch")
HEAD = """# Every file

Written by `UPIPE_WRITE_DOCS=1 pytest tests/test_files_page.py` from the first sentence of each file; the same test
fails when this page is not true. The [README](../README.md#map) has the folders, [How it works](how-it-works.md) what
rests on what.

"""


def _folders() -> Iterator[Path]:
    """The packages and the folders in them, each before those in it."""
    for package in PACKAGES:
        yield from sorted({file.parent for file in (ROOT / package).rglob("*.py")})


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")


def _says(file: Path) -> str:
    """The first paragraph of a file's docstring, in one line."""
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert text, f"{file} has no docstring"
    return re.sub("``", "`", " ".join(text.split("\n\n")[0].split()))


def _table(files: list[Path]) -> str:
    rows = (f"| [{file.name}]({os.path.relpath(file, PAGE.parent)}) | {_says(file)} |\n" for file in files)
    return "".join(("| file | what it is for |\n|---|---|\n", *rows, "\n")) if files else ""


def _page() -> str:
    sections = (
        f"## {folder.relative_to(ROOT)}\n\n{_says(folder / '__init__.py')}\n\n{_table(_files(folder))}"
        for folder in _folders()
    )
    others = [ROOT / "upipe_autoload.py", *_files(ROOT / "benchmarks"), *_files(ROOT / "scripts")]
    examples = [file for folder in sorted((ROOT / "examples").iterdir()) for file in _files(folder)]
    return (HEAD + "".join(sections) + "## Beside the packages\n\n" + _table([*others, *examples])).rstrip() + "\n"


def test_the_page_has_every_file():
    page = _page()
    if os.environ.get("UPIPE_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run UPIPE_WRITE_DOCS=1 pytest tests/test_files_page.py and commit docs/files.md"
    listed = re.findall(r"^\| \[[^\]]+\]\(\.\./([^)]+)\) \| \S", page, re.MULTILINE)
    wanted = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file.name != "__init__.py"]
    assert {str(file.relative_to(ROOT)) for file in wanted} <= set(listed) and len(listed) == len(set(listed))


def test_the_readmes_map_has_every_folder_and_no_other():
    (block,) = re.findall(r"^## Map\n\n```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    *packages, others = block.splitlines()
    found, package = [], ""
    for line in packages:
        name, what = re.fullmatch(r"( *\S+)  +(\S.*)", line).groups()
        assert what
        package = package if name.startswith("  ") else name
        found.append(package if name == package else package + name.strip())
    assert len(found) == len(set(found))
    assert {name.rstrip("/") for name in found} == {str(folder.relative_to(ROOT)) for folder in _folders()} | {
        "upipe_autoload.py"
    }
    assert all((ROOT / name).is_dir() for name in others.split())
