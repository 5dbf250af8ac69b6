"""The README's pictures, the first screen of a run's page light and dark: ``python -m tests.studies.pictures RUN``.

They go to ``docs``. With ``--all FOLDER`` the page whole, 1400 and 400 pixels wide, goes to that folder instead, to be
looked at after a change of figures or page.
"""

import argparse
import tempfile
from pathlib import Path

from parbench.reports.render.show import build
from tests.support.browser import Browser

DOCS, SCREEN, PHONE = Path(__file__).parents[2] / "docs", (1400, 900), (400, 800)


def take(run: Path, folder: Path, *, is_whole: bool) -> None:
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made, Browser() as browser:
        page = Path(made) / "report.html"
        page.write_bytes(build([run], "html")[0])
        for size in (SCREEN, PHONE) if is_whole else (SCREEN,):
            for name, dark in (("light", False), ("dark", True)):
                target = folder / (f"{size[0]}-{name}.png" if is_whole else f"report-{name}.webp")
                browser.open(page, dark=dark, size=size)
                browser.picture(target, whole=is_whole)
                print(target, f"{target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--all", type=Path, dest="folder", help="the whole page, into this folder")
    asked = parser.parse_args()
    take(asked.run, asked.folder or DOCS, is_whole=asked.folder is not None)
