"""The code blocks of README.md and docs/, and the commands in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

from examples.megatron.arguments import read_arguments

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "configs" / "deepspeed" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: its page (a path below the repository), first line, label and text."""

    page: str
    line: int
    label: str
    text: str

    def compiled(self, changes: dict[str, str] | None = None):
        """Python that knows where it came from; `changes` are words that are exchanged."""
        text = self.text
        for old, new in (changes or {}).items():
            assert old in text, (self.page, old)
            text = text.replace(old, new)
        return compile("\n" * self.line + text, self.page, "exec")


def blocks(label: str | None = None, page: str | None = None) -> list[Block]:
    """All blocks, or those with a label, or of a page."""
    found = []
    for file in PAGES:
        text, name = file.read_text(), str(file.relative_to(ROOT))
        for match in re.finditer(r"^( *)```([^\n`]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(name, line, match[2], textwrap.dedent(match[3])))
    return [b for b in found if label in (None, b.label) and page in (None, b.page)]


@dataclass(frozen=True)
class Command:
    """A command line of a bash block, without variables that are set before it."""

    page: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0]


def commands() -> list[Command]:
    """Every command of every bash block; ``$(grep -v '^#' FILE)`` is what it gives."""
    found = []
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            line = re.sub(r"\$\(grep -v '\^#' (\S+)\)", lambda m: shlex.join(read_arguments(ROOT / m[1])), line)
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words:
                found.append(Command(block.page, tuple(words)))
    return found
