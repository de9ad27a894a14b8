"""Makes the README's moving picture of the page, `picture.webp`: a pass rises, a layer and its attention are entered.

    python docs/images/picture.py LINK [CHROMIUM]

LINK is what `llamarium inspect` prints. Needs Chromium, and the `dev` extra.
"""

import io
import shutil
import sys
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
TEXT = "My grandmother baked a delicious apple"
FRAMES, FRAME_S = 80, 0.12
STATIONS = {30: "residual&layer=10", 52: "attention&layer=10&head=1"}
"""What is opened at which frame."""
OPEN = "to => { location.hash = location.hash.replace(/stage=[a-z]+(&layer=[0-9]+)?(&head=[0-9]+)?/, 'stage=' + to) }"


def moving(page: Page) -> list[Image.Image]:
    """Return frames of what moves, at equal times."""
    frames: list[Image.Image] = []
    begin = time.monotonic()
    for i in range(FRAMES):
        if i in STATIONS:
            page.evaluate(OPEN, STATIONS[i])
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        frames.append(shot.resize((960, 600), Image.Resampling.LANCZOS))
        time.sleep(max(0.0, begin + (i + 1) * FRAME_S - time.monotonic()))
    return frames


def main() -> None:
    """Write it."""
    link = f"{sys.argv[1].partition('&text=')[0]}&text={TEXT.replace(' ', '%20')}&stage=map"
    chromium = sys.argv[2] if len(sys.argv) > 2 else shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        page.goto(link)
        page.wait_for_selector(".picture canvas")
        first, *others = moving(page)
        browser.close()
    times = {"duration": int(1000 * FRAME_S), "loop": 0}
    first.save(HERE / "picture.webp", save_all=True, append_images=others, quality=55, method=6, **times)


if __name__ == "__main__":
    main()
