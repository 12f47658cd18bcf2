"""The pictures of the live page and of the report in docs/pictures: `make screenshots RUN=runs/latest`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fedstill.deploy.watch.app import Serving, open_door  # noqa: E402
from fedstill.deploy.watch.follow import Folder  # noqa: E402
from fedstill.server.page.report import write_report  # noqa: E402
from tests.browser import chromium  # noqa: E402

LOOKS = {"light": (1200, "light"), "dark": (1200, "dark"), "phone": (390, "light")}


def main(run: Path) -> None:
    """Take a picture of each page in each look."""
    serving = Serving(Folder(run), open_door(port=0))
    threading.Thread(target=serving.run, daemon=True).start()
    pages = {"page": serving.door.url, "report": write_report(run).as_uri()}
    with chromium() as browser:
        for name, address in pages.items():
            for look, (width, scheme) in LOOKS.items():
                tab = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
                tab.goto(address)
                tab.wait_for_selector("svg")
                tab.wait_for_timeout(1200)
                tab.screenshot(path=ROOT / f"docs/pictures/{name}-{look}.png", full_page=True)
    serving.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
