"""Scripts of analysis/ in this process: starting one takes seconds, most of them imports."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

ANALYSIS = Path(__file__).parent.parent / "analysis"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """What the script would leave if it were started."""
    path, words = ANALYSIS / script, [str(argument) for argument in arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", [str(path), *words]),
        mock.patch.object(sys, "path", [str(ANALYSIS), *sys.path]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess([script, *words], code, out.getvalue(), err.getvalue())
