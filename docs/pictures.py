"""Draw the pictures of the README from a real run: `python docs/pictures.py RUN_FOLDER`.

Writes docs/pictures/learning-curve.png and console.png. The console is the live screen itself, fed with the run's
records and set in a font that comes with matplotlib, so that the picture is the same on every machine.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console as RichConsole
from rich.terminal_theme import DIMMED_MONOKAI as THEME

from tiltyard.run import metrics
from tiltyard.run.folder import Run
from tiltyard.track.console import Console
from tiltyard.track.plot import plot
from tiltyard.types import Progress

SIZE, COLUMNS, SCALE = 15, 100, 2  # points, characters, pixels per point
Colour = tuple[int, int, int]
PAPER, INK = (22, 24, 29), (222, 224, 228)
BLOCKS = "▏▎▍▌▋▊▉█"
DOTS = {1: (0, 0), 2: (0, 1), 4: (0, 2), 64: (0, 3), 8: (1, 0), 16: (1, 1), 32: (1, 2), 128: (1, 3)}


def live_screen(run: Run) -> Console:
    """The live screen at the end of the run."""
    screen = Console(run.experiment(), run.id, run.folder, live=False, stream=io.StringIO())
    for record in metrics.read(run.folder):
        split = {name[5:]: value for name, value in record["metrics"].items() if name.startswith("time/")}
        counts = {name: record[name] for name in ("env_steps", "frames", "updates", "episodes", "seconds")}
        screen.update(Progress(**counts), record["metrics"], split)
    return screen


def cell(
    pen: ImageDraw.ImageDraw, x: float, y: float, size: tuple[float, float], character: str, colour: Colour
) -> bool:
    """Draw a block or braille character, for which fonts leave gaps or have no glyph; return False for any other."""
    width, height = size
    if character in BLOCKS:
        share = (BLOCKS.index(character) + 1) / 8
        pen.rectangle((x, y + height * 0.1, x + width * share, y + height * 0.9), fill=colour)
        return True
    bits = ord(character) - 0x2800
    if not 0 <= bits < 256:
        return False
    for bit, (across, down) in DOTS.items():
        if bits & bit:
            at = (x + width * (0.25 + 0.5 * across), y + height * (0.125 + 0.25 * down))
            pen.circle(at, width * 0.17, fill=colour)
    return True


def draw(screen: Console, out: Path) -> None:
    """Draw every character of the panel in its cell."""
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf", SIZE * SCALE)
    rich = RichConsole(width=COLUMNS, height=30, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    screen._rich = rich
    lines = rich.render_lines(screen.render(), rich.options, pad=False)
    size = (font.getlength("M"), SIZE * SCALE * 1.164)  # width, and the line height of the font: frames have no gaps
    margin = size[0] * 2
    columns = max(sum(len(part.text) for part in line) for line in lines)
    picture = Image.new("RGB", (round(columns * size[0] + 2 * margin), round(len(lines) * size[1] + 2 * margin)), PAPER)
    pen = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        x, y = margin, margin + row * size[1]
        for part in line:
            red, green, blue = INK
            if part.style and part.style.color:
                red, green, blue = part.style.color.get_truecolor(THEME)
            colour = (red, green, blue)
            if part.style and part.style.dim:
                colour = ((red + PAPER[0]) // 2, (green + PAPER[1]) // 2, (blue + PAPER[2]) // 2)
            for character in part.text:
                if not cell(pen, x, y, size, character, colour):
                    pen.text((x, y), character, font=font, fill=colour)
                x += size[0]
    picture.quantize(64).save(out, optimize=True)


if __name__ == "__main__":
    chosen = Run(Path(sys.argv[1]).absolute())
    here = Path(__file__).parent / "pictures"
    plot(chosen, here / "learning-curve.png")
    draw(live_screen(chosen), here / "console.png")
