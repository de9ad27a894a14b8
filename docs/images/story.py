"""Makes the README's pictures of the first screen and of six cards of the story.

    python docs/images/story.py LINK [CHROMIUM]

LINK is what `llamarium inspect` prints. Needs Chromium, and the `dev` extra.
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
TEXT = "My grandmother baked a delicious apple"
CARDS = {"stream": 3, "looking": 4, "values": 8, "mlp": 9, "layers": 10, "again": 12}
"""The cards by their ids, with their numbers."""


def save(page: Page, name: str) -> None:
    """Save what is seen, in few colors."""
    page.wait_for_selector("main[data-ready]")
    page.wait_for_timeout(1500)
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.quantize(128).save(HERE / f"{name}.png", optimize=True)


def main() -> None:
    """Write them."""
    link = f"{sys.argv[1].partition('&text=')[0]}&text={TEXT.replace(' ', '%20')}"
    chromium = sys.argv[2] if len(sys.argv) > 2 else shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light", reduced_motion="reduce")
        page.goto(f"{link}&stage=first")
        save(page, "first-screen")
        for card, number in CARDS.items():
            page.goto("about:blank")
            page.goto(f"{link}&stage=story&card={number}")
            save(page, f"story-{card}")
        browser.close()


if __name__ == "__main__":
    main()
