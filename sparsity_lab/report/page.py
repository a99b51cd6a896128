"""Sections -> one HTML file with everything inside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from sparsity_lab import __version__
from sparsity_lab.report.blocks import Section

HERE = Path(__file__).parent


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page. Its security policy lets it load nothing and run no script but its own."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "tables.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("template.html").render(
        title=title, subtitle=subtitle, sections=sections, style=style, script=script, policy=policy,
        version=__version__,
    )  # fmt: skip


def _digest(text: str) -> str:
    """As a content security policy names an inline element."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
