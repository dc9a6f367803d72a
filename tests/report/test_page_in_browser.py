"""The report in headless Chromium (or DISTILL_CHROMIUM): at desktop and phone width, light and dark.

pytest -m slow tests/report/test_page_in_browser.py      (Debian, Ubuntu: apt install chromium)
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_report import build_page, make_metadata

CHROMIUM = os.environ.get("DISTILL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium, or name one in DISTILL_CHROMIUM"),
]
WIDTHS = {"desktop": 1280, "phone": 390}
SCHEMES = {"light": 1, "dark": 0}  # Chromium's blink setting preferredColorScheme
HOSTILE = '<b id="injected">&amp;<script>document.title = "run"</script>'
LEAST_CONTRAST = 4.5  # of small text (WCAG 2.2, 1.4.3)

# What a person would see wrong, measured inside the page, which stands in a frame of the wanted width.
LOOK = r"""
const frame = document.querySelector("iframe"), page = frame.contentDocument, view = frame.contentWindow;
const wide = page.documentElement.clientWidth, found = {overflow: [], pictures: [], faint: [], outside: []};
found.scroll = page.documentElement.scrollWidth - wide;
const name = e => e.tagName + "." + (e.getAttribute("class") || "") + ": " + e.textContent.trim().slice(0, 50);
const inside = e => { for (; e; e = e.parentElement) if (view.getComputedStyle(e).overflowX === "auto") return true; };
const colour = text => { const [r, g, b, a] = text.match(/[\d.]+/g).map(Number); return {rgb: [r, g, b], a: a ?? 1}; };
const light = c => c.rgb.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const behind = e => { for (; e; e = e.parentElement) {
  const c = colour(view.getComputedStyle(e).backgroundColor); if (c.a === 1) return c;
} return colour("rgb(255,255,255)"); };
for (const e of page.body.querySelectorAll("*")) {
  const box = e.getBoundingClientRect(), style = view.getComputedStyle(e);
  if (!box.width) continue;
  if (!e.closest("svg") && (box.right > wide + 1 || box.left < -1) && !inside(e)) found.overflow.push(name(e));
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || e.tagName === "STYLE") continue;
  const paint = colour(e.closest("svg") ? style.fill : style.color), back = behind(e);
  const [high, low] = [light(paint), light(back)].sort((a, b) => b - a);
  if ((high + .05) / (low + .05) < LEAST && +style.opacity > .9 && !e.closest(".prompt")) found.faint.push(name(e));
}
for (const e of page.querySelectorAll("figure svg")) {
  const box = e.getBoundingClientRect(), marks = e.querySelectorAll("path, use").length;
  if (box.width < 200 || box.height < 100 || marks < 5) found.pictures.push(name(e));
  for (const text of e.querySelectorAll("text")) {
    const own = text.getBoundingClientRect();
    if (own.left < box.left - 2 || own.right > box.right + 2 || own.top < box.top - 2 || own.bottom > box.bottom + 2)
      found.outside.push(name(text));
  }
}
for (const e of page.images) if (!e.complete || !e.naturalWidth) found.pictures.push(e.src);
found.pictured = [...page.querySelectorAll("figure svg text")].map(e => e.textContent).join(" ");
found.svgs = page.querySelectorAll("figure svg").length;
found.injected = page.querySelectorAll("#injected, script").length;
found.fetched = view.performance.getEntriesByType("resource").map(e => e.name);
found.text = page.body.innerText.length; found.dark = view.matchMedia("(prefers-color-scheme: dark)").matches;
found.width = wide; found.paper = view.getComputedStyle(page.body).backgroundColor;
document.querySelector("#found").textContent = JSON.stringify(found);
"""


def seen(page: str, width: int, scheme: int, folder: Path) -> dict[str, Any]:
    """What the script finds in a page at this width."""
    script = LOOK.replace("LEAST", str(LEAST_CONTRAST))
    frame = f'<iframe srcdoc="{html.escape(page)}" style="width:{width}px;height:6000px;border:0"></iframe>'
    body = f'{frame}<pre id="found"></pre><script>onload = () => {{ {script} }}</script>'
    (folder / "frame.html").write_text(f"<!doctype html><meta charset=utf-8><body>{body}", encoding="utf-8")
    assert CHROMIUM is not None
    quiet = "--disable-background-networking --disable-component-update --disable-sync --no-first-run --disable-quic"
    command = [
        CHROMIUM,
        "--headless",
        "--hide-scrollbars",
        "--no-sandbox",
        "--disable-gpu",
        *quiet.split(),
        "--dump-dom",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"]
    done = subprocess.run([*command, (folder / "frame.html").as_uri()], capture_output=True, text=True, timeout=120)
    shown = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert shown is not None, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(shown[1]))
    return found


def hostile() -> dict[str, Any]:
    """Results whose foreign names try to be tags."""
    values = make_metadata()
    values["name"] = values["command"] = HOSTILE
    values["config"]["name"] = HOSTILE
    for slice_ in values["evaluation"]["slices"]:
        slice_["label"] = HOSTILE
    return values


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_as_a_person_sees_it(width: str, scheme: str, finished: Path, tmp_path: Path) -> None:
    """Nothing beyond the edge, no broken or empty picture, no text too faint to read or cut off, nothing fetched."""
    pages = {
        "a run": (finished / "report.html").read_text(encoding="utf-8"),
        "every table": build_page(make_metadata()),
        "hostile names": build_page(hostile()),
    }
    for name, page in pages.items():
        found = seen(page, WIDTHS[width], SCHEMES[scheme], tmp_path)
        assert found["width"] == WIDTHS[width] and found["dark"] == (scheme == "dark"), name
        assert found["text"] > 2000 and found["svgs"] >= 3, name
        assert found["scroll"] == 0 and not found["overflow"], (name, found["overflow"])
        assert not found["pictures"] and not found["outside"], (name, found["pictures"], found["outside"])
        assert not found["faint"], (name, found["paper"], found["faint"])
        assert found["injected"] == 0 and not found["fetched"], name
        assert (HOSTILE[:30] in found["pictured"]) == (name == "hostile names")  # as it is, in a picture too


def test_the_look_sees_what_is_wrong(tmp_path: Path) -> None:
    """A page with one of each fault."""
    page = (
        "<body style='background:#fff'><div style='width:900px'>wide</div><p style='color:#bbb'>faint</p>"
        "<figure><svg width='300' height='150'><text x='290' y='50'>beyond the edge</text></svg></figure>"
        f"<img src='data:image/png;base64,AAAA'>{HOSTILE}"
    )
    found = seen(page, 390, 1, tmp_path)
    assert found["scroll"] > 0 and found["injected"] == 2
    assert [found[kind] != [] for kind in ("overflow", "faint", "outside", "pictures")] == [True] * 4
    assert len(found["pictures"]) == 2
