"""One self-contained HTML page: text, tables and pictures, for a phone as for a desk, in the light and in the dark."""

import base64
import html
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

INK = {"light": "#1c2330", "dark": "#dfe4ee"}
PAPER = {"light": "#ffffff", "dark": "#161a22"}

STYLE = """
:root { --ink:#1c2330; --soft:#5b6577; --paper:#ffffff; --panel:#f4f6fa; --line:#dde2ea; --mark:#0f62b5; }
@media (prefers-color-scheme: dark) {
  :root { --ink:#dfe4ee; --soft:#9aa5b8; --paper:#161a22; --panel:#1f2530; --line:#323a48; --mark:#7fb6f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { max-width: 46rem; } .soft, figcaption, caption { color: var(--soft); font-size: .9rem; }
figure { margin: 1rem 0; } figure img { width: 100%; height: auto; display: block; border-radius: 6px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; background: var(--panel); }
pre { background: var(--panel); padding: .8rem; border-radius: 6px; overflow-x: auto; font-size: .85rem; }
a { color: var(--mark); }
"""


class Page:
    """Add to it from the top down, then `write` it."""

    def __init__(self, title: str, lead: str = ""):
        self.title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]
        self._figures: dict[str, bytes] = {}
        if lead:
            self.text(lead)

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str, soft: bool = False) -> None:
        self._parts.append(f"<p{' class=soft' if soft else ''}>{html.escape(text)}</p>")

    def code(self, text: str) -> None:
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
        head = "".join(f"<th>{html.escape(str(x))}</th>" for x in header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(_cell(x))}</td>" for x in row) + "</tr>" for row in rows)
        title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
        self._parts.append(
            f"<div class=wide><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def figure(self, name: str, draw: Callable[[], Figure], caption: str) -> None:
        """A picture drawn twice, for light and for dark pages; `name` is its file under figures/."""
        light, dark = (_png(draw, theme) for theme in ("light", "dark"))
        self._figures[name] = light
        data = lambda png: "data:image/png;base64," + base64.b64encode(png).decode()
        self._parts.append(
            f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{data(dark)}">'
            f'<img src="{data(light)}" alt="{html.escape(caption)}"></picture>'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def write(self, folder: Path) -> Path:
        """`folder`/report.html, and each picture under `folder`/figures."""
        folder = Path(folder)
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        for name, png in self._figures.items():
            (folder / "figures" / f"{name}.png").write_bytes(png)
        path = folder / "report.html"
        path.write_text(
            "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
            '<meta name=viewport content="width=device-width, initial-scale=1">'
            '<meta name=color-scheme content="light dark">'
            f'<link rel=icon href="data:,"><title>{html.escape(self.title)}</title><style>{STYLE}</style></head>'
            f"<body><main>{''.join(self._parts)}</main></body></html>\n",
            encoding="utf-8",
        )
        return path


def _cell(x):
    if isinstance(x, float):
        return "—" if math.isnan(x) else f"{x:.4g}"
    return str(x)


def _png(draw, theme):
    ink, paper = INK[theme], PAPER[theme]
    inked = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink)
    ground = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"), paper)
    look = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with matplotlib.rc_context(rc=inked | ground | look):  # pyright: ignore[reportArgumentType]
        buffer = io.BytesIO()
        draw().savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
