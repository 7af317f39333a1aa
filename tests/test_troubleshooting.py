"""docs/troubleshooting.md quotes messages that the source still has, and has those that users meet first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = [text.replace("\n> ", " ") for text in re.findall(r"^> `((?:.+\n> )*?.+)`$", PAGE, re.MULTILINE)]
FIELD = "\0"
"""Stands for what is filled in: an f-string's field, or <...> on the page."""

# Where users' settings and batches are checked: each ValueError raised here is on the page, unless it is named below.
DOORS = (
    "config.py",
    "settings.py",
    "group.py",
    "guard.py",
    "shards.py",
    "stock.py",
    "options.py",
    "patches.py",
    "specs.py",
    "sharding.py",
    "layout.py",
)
NOT_LISTED = {
    "documents_cut = \0: must be 'each' or 'whole'.": "an argument of UPipeOptions, for code",
    "layout documents \0: must start at 0 and end at the sequence length \0.": "an argument of Layout, for code",
    "\0 = \0: must be 'native' or 'upipe'.": "says it all",
    "\0": "passes another message on",
}


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else FIELD for part in node.values)
    return FIELD if isinstance(node, (ast.Call, ast.Name)) else None


def _files() -> Iterator[Path]:
    for package in ("upipe_integrations", "deepspeed_plugin", "megatron_patch"):
        yield from (ROOT / package).rglob("*.py")


def _texts() -> set[str]:
    found = (
        _text(node) for file in _files() for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.expr)
    )
    return {text for text in found if text and text.strip(FIELD)}


def _raised(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and ast.unparse(node.exc.func) == "ValueError"
        ):
            text = _text(node.exc.args[0])
            assert text is not None, ast.unparse(node)
            yield text


def _template(quoted: str) -> str:
    return re.sub(r"<[^<>]+>", FIELD, quoted)


def test_every_quoted_message_is_in_the_source():
    texts = _texts()
    assert len(QUOTED) > 60
    assert [quoted for quoted in QUOTED if not any(_template(quoted) in text for text in texts)] == []


def test_what_users_meet_at_the_door_is_listed():
    listed = [_template(quoted) for quoted in QUOTED]
    raised = {text for file in _files() if file.name in DOORS for text in _raised(file)}
    assert len(raised) > 20
    missing = {text for text in raised if not any(template in text for template in listed)}
    assert missing == missing & set(NOT_LISTED)
    assert set(NOT_LISTED) <= raised


def test_a_message_that_is_gone_would_be_seen():
    assert not any(_template("upipe.chunk_heads = <U>: must be a prime number") in text for text in _texts())
