"""What mkdocs is told besides `mkdocs.yml`: anchors of headings as they are in the repository's viewer."""

from __future__ import annotations

import re
from typing import Any


def anchor(heading: str, separator: str = "-") -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """mkdocs calls it once the file has been read."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config
