"""Shows the console's live panel in a Jupyter notebook: one output of the cell, replaced in place.

Rich's own live display needs ipywidgets there, and a saved notebook would not have its last picture.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import RenderableType

SECONDS = 0.5  # between two updates
_HTML = "<pre style=\"line-height:1.2;font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace\">{code}</pre>"


class NotebookPanel:
    """Call `start`, `refresh` after every record, and `stop`, which leaves the last panel in the notebook."""

    def __init__(self, render: Callable[[], RenderableType], width: int) -> None:
        self._render, self._width = render, width
        self._handle: Any = None
        self._shown = 0.0

    def start(self) -> None:
        from IPython.display import display

        self._handle = display(self._drawn(), raw=True, display_id=True)

    def refresh(self) -> None:
        if time.monotonic() - self._shown > SECONDS:
            self.stop()

    def stop(self) -> None:
        self._handle.update(self._drawn(), raw=True)

    def _drawn(self) -> dict[str, str]:
        self._shown = time.monotonic()
        page = RichConsole(file=io.StringIO(), record=True, width=self._width, force_jupyter=False)
        page.print(self._render())
        text = page.export_text(clear=False)
        return {"text/plain": text, "text/html": page.export_html(inline_styles=True, code_format=_HTML)}
