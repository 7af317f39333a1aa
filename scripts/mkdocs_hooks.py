"""Links that leave docs/ for the rest of the repository work on the repository's page, not on the site: there they
become the file's path. One that leads nowhere is a warning, which ``mkdocs build --strict`` fails on."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

_LOG = logging.getLogger("mkdocs.hooks.repository_links")
_CODE_OR_LINK = re.compile(
    r"^```.*?^```|(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)\s#]*)(?:#[^)\s]*)?\)", re.S | re.M
)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for every page."""
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        if match["target"] is None:  # a code block
            return match[0]
        target = Path(os.path.normpath(folder / match["target"]))
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            _LOG.warning(
                "Doc file '%s' links to '%s', which is not in the repository", page.file.src_uri, match["target"]
            )
        path = target.relative_to(docs.parent)
        return f"`{path}`" if match["text"] in (path.name, str(path)) else f"{match['text']} (`{path}`)"

    return _CODE_OR_LINK.sub(shown, markdown)
