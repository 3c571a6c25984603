"""Take the pictures of the local page that the documents show; it needs Chromium and playwright.

Run it after the page has changed: `python docs/screenshots.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURES = Path(__file__).parent / "pictures"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: File, address, and what must be seen before it is taken.
SHOTS = {
    "web.png": ("/collectives?compare=tree&ranks=5&step=3", '[data-picture="1"]'),
}
WIDTH, HEIGHT = 1280, 944


def main() -> None:
    """Start the page, and take every picture."""
    words = [sys.executable, "-m", "roundelay", "web", "--no-open", "--json"]
    found = next(filter(None, map(shutil.which, CHROMIUMS)))
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server,  # noqa: S603 - ours
        sync_playwright() as playwright,
    ):
        link = json.loads(server.stdout.readline() if server.stdout else "")["link"]
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for name, (address, seen) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT},
                locale="en-US",
                reduced_motion="reduce",
                color_scheme="light",
            )
            page.goto(f"{link}{address}")
            page.locator(seen).first.wait_for()
            page.screenshot(path=PICTURES / name)
            print(f"wrote docs/pictures/{name}")
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main()
