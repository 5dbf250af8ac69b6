"""Take the pictures of the README: the first screen of a report, light and dark.

    python -m tests.studies.pictures RUN

They are written to ``docs``. ``--all FOLDER`` writes pictures of the full page in two widths to
that folder instead, to look at after a change of figures or of the page.
"""

import argparse
import tempfile
from pathlib import Path

from parbench.reports.render.show import load_report, render_report
from tests.support.paths import ROOT
from tests.support.reports.browser import Browser

SCREEN_SIZE = (1400, 900)
PHONE_SIZE = (400, 800)


def take_pictures(run: Path, folder: Path, *, full_page: bool) -> None:
    folder.mkdir(exist_ok=True)
    sizes = [SCREEN_SIZE, PHONE_SIZE] if full_page else [SCREEN_SIZE]
    with tempfile.TemporaryDirectory() as scratch, Browser() as browser:
        page = Path(scratch) / "report.html"
        page.write_bytes(render_report(load_report([run]), "html"))
        for size in sizes:
            for theme in ("light", "dark"):
                name = f"{size[0]}-{theme}.png" if full_page else f"report-{theme}.webp"
                browser.open(page, dark=theme == "dark", size=size)
                browser.picture(folder / name, whole=full_page)
                num_bytes = (folder / name).stat().st_size
                print(folder / name, f"{num_bytes / 1000:.0f} kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--all", type=Path, dest="folder", help="the full page, into this folder"
    )
    options = parser.parse_args()
    take_pictures(options.run, options.folder or ROOT / "docs", full_page=bool(options.folder))
