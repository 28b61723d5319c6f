"""Record `make demo` as the picture `docs/demo.svg`: a real run, as its terminal shows it.

.venv/bin/python docs/record_demo.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = 104


def main() -> None:
    """Run the demo, and draw what it printed."""
    root = Path(__file__).resolve().parents[1]
    # Colours as in a terminal, but no spinner: that is drawn by moving the cursor.
    plain = {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    demo = [sys.executable, "-m", "commands", "demo"]
    done = subprocess.run(demo, cwd=root, env=os.environ | plain, stdout=subprocess.PIPE, check=True)
    save(Text.from_ansi(f"$ make demo\n{done.stdout.decode()}"), root / "docs" / "demo.svg", COLUMNS)


def save(picture: RenderableType, file: Path, columns: int) -> None:
    """Write what a terminal of so many columns shows as an SVG file."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=columns, height=24, file=nowhere, force_terminal=True)
        console.print(picture)
    svg = console.export_svg(title="Turnkeep", clear=False)
    # Rich names a font on somebody's server; the reader's own will do.
    svg = re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", svg, flags=re.DOTALL)
    file.write_text(svg.replace("Fira Code, monospace", "monospace"), "utf-8")


if __name__ == "__main__":
    main()
