"""Draw the picture of README.md: two panels of the course side by side, as the panels draw themselves.

    python tests/tools/picture.py [FILE]       docs/pictures/panels.png, if no other is named

The roofline shows the archive's first record beside the ceilings of the machine that draws; nothing is timed for it but
those. The scheduler's steps run a model, and are the same everywhere.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image

from workbench import panels
from workbench.records import records_of

FILE = Path(__file__).parents[2] / "docs" / "pictures" / "panels.png"
HEIGHT = 400  # pixels


def drawn(png: bytes) -> Image.Image:
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    return picture.resize((round(picture.width * HEIGHT / picture.height), HEIGHT), Image.Resampling.LANCZOS)


def main(file: Path) -> None:
    roofline, steps = panels.roofline(), panels.scheduler_steps(shown_step=24)
    roofline.record = records_of(roofline.experiment.name)[0].of(roofline.experiment.name)
    roofline.paint()
    steps.run()
    pictures = [drawn(panel.snapshot().data) for panel in (roofline, steps)]
    both = Image.new("RGB", (sum(p.width for p in pictures) + 20, HEIGHT), "white")
    both.paste(pictures[0], (0, 0))
    both.paste(pictures[1], (pictures[0].width + 20, 0))
    both.save(file, optimize=True)
    print(f"wrote {file}: {both.width} × {both.height} pixels, {file.stat().st_size / 1e3:.0f} kB")
    print(*(panel.snapshot().alt for panel in (roofline, steps)), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
