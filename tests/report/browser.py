"""A headless browser: what a page looks like when it is laid out.

In: the text of a page, the size of the window, the colour scheme. Out: measurements, taken by a script that is added to a copy of
the page.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)

MEASURE = """
<script>
const box = (e) => e.getBoundingClientRect();
const cut = [...document.querySelectorAll("svg.chart")].flatMap((svg) => [...svg.querySelectorAll("text")].filter((t) => {
  const [a, b] = [box(svg), box(t)];
  return b.width > 0 && (b.left < a.left - 1 || b.right > a.right + 1 || b.top < a.top - 1 || b.bottom > a.bottom + 1);
}).map((t) => t.textContent));
const styles = getComputedStyle(document.body);
const found = {
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  cut: cut,
  bars: document.querySelectorAll("svg.chart rect").length,
  headings: [...document.querySelectorAll("h3")].map((e) => e.textContent),
  ground: styles.backgroundColor,
  ink: styles.color,
  resources: performance.getEntriesByType("resource").map((e) => e.name),
  height: document.documentElement.scrollHeight,
};
const out = document.createElement("pre");
out.id = "measured";
out.textContent = JSON.stringify(found);
document.body.append(out);
</script>
"""


def measured(page: str, folder: Path, width: int, *, dark: bool) -> dict[str, Any]:
    """Opens a page, and measures it."""
    assert BROWSER is not None
    copy = folder / "page.html"
    copy.write_text(page.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},900",
        f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom",
        f"file://{copy}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.S)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    loaded: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return loaded
