"""One self-contained page about results: `write(folders, path, ...)`. See analysis/report.py."""

from sparsity_lab.report.page import render
from sparsity_lab.report.pages import build, write

__all__ = ["build", "render", "write"]
