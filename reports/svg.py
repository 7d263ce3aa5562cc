"""matplotlib draws, the page styles: a figure becomes a small inline SVG that follows the page's theme and font.

A figure is drawn with the light theme's colours, each of which becomes a CSS variable. Words never reach matplotlib:
they go in as a key and come back as text, so no name can be taken for mathematics or miss a glyph. The same figure
gives the same bytes.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOKENS = """
bg              #FAFAF7 #14171A
surface         #FFFFFF #1A1E22
ink             #1B1F24 #E9ECEF
ink2            #474E57 #BCC3CB
ink3            #646B75 #98A0AA
rule            #DDDDD6 #343B42
grid            #E9E9E4 #262C32
paged           #0B62A8 #74BBF5
paged-tint      #D6E6F4 #17364F
contiguous      #BC5200 #F0A468
contiguous-tint #F7E1CE #4A2D17
third           #00736B #5CC9BC
fourth          #7B3F98 #CFA0E6
ok              #1B7742 #6CCB93
warn            #8A5A00 #E3B341
bad             #B3261E #FF8A80
waste           #B0326E #F08CB8
waste-tint      #EFC9DB #55283D
"""
LIGHT = {name: light for name, light, _ in map(str.split, _TOKENS.strip().splitlines())}
DARK = {name: dark for name, _, dark in map(str.split, _TOKENS.strip().splitlines())}
"""The colours of the design by token and theme; no two of the light ones are equal, so each hex names its token."""

_TOKEN_OF = {hex_.lower(): name for name, hex_ in LIGHT.items()}
_HEX = re.compile(r"#[0-9a-fA-F]{6}")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "font.size": 11,
    "text.color": LIGHT["ink2"],
    "axes.labelcolor": LIGHT["ink3"],
    "axes.edgecolor": LIGHT["ink3"],
    "xtick.color": LIGHT["ink3"],
    "ytick.color": LIGHT["ink3"],
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.linewidth": 1,
    "xtick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.pad": 3,
    "ytick.major.pad": 4,
    "lines.linewidth": 2,
    "lines.markersize": 5.5,
}


class Plot:
    """A figure of `WIDTH` x `HEIGHT` units with its axes `left`, `right`, `top` and `bottom` units from the edges, and
    `strips` more units of height above them. `name` is unique on its page."""

    WIDTH, HEIGHT = 360, 206
    STRIP = 36
    """Height of a strip with its name."""

    def __init__(
        self,
        name: str,
        *,
        left: float = 38,
        right: float = 14,
        top: float = 12,
        bottom: float = 36,
        strips: int = 0,
    ) -> None:
        import matplotlib as mpl
        from matplotlib.figure import Figure

        self.name = name
        self._words: list[str] = []
        self.plot_height = self.HEIGHT - top - bottom
        self._height = self.HEIGHT + strips * self.STRIP
        self._left, self._width = left, self.WIDTH - left - right
        self._next_strip = bottom + self.plot_height + top
        with mpl.rc_context(_SETTINGS):
            self._figure = Figure(figsize=(self.WIDTH / 72, self._height / 72))
            self.axes = self._add_axes(bottom, self.plot_height)
        self.axes.set_axisbelow(True)
        self.axes.grid(axis="y")

    def _add_axes(self, bottom: float, height: float) -> Axes:
        """All axes of a figure have the same left and right ends."""
        box = (self._left / self.WIDTH, bottom / self._height, self._width / self.WIDTH, height / self._height)
        axes = self._figure.add_axes(box)
        axes.patch.set_visible(False)
        return axes

    def strip(self, words: str) -> Axes:
        """The next strip above the axes, along the same x axis, without ticks, under its name; y from 0 to 1."""
        import matplotlib as mpl

        with mpl.rc_context(_SETTINGS):
            axes = self._add_axes(self._next_strip, self.STRIP - 16)
        self._next_strip += self.STRIP
        axes.set_xlim(self.axes.get_xlim())
        axes.set_ylim(0, 1)
        self.ticks("x", [], [], axes)
        self.ticks("y", [], [], axes)
        self.write(words, (0, 1), "ink2", (0, 4), axes=axes, va="baseline", xycoords="axes fraction")
        return axes

    def word(self, text: str) -> str:
        """The key that stands for a text until the figure is SVG."""
        self._words.append(text)
        return f"§{len(self._words) - 1}§"

    def write(
        self,
        text: str,
        at: tuple[float, float],
        token: str,
        shift: tuple[float, float],
        *,
        axes: Axes | None = None,
        **style: Any,
    ) -> None:
        """Write into the plot (or a strip's `axes`) beside a point of it, `shift` units away."""
        style = {"va": "center", "xycoords": "data", "annotation_clip": False, **style}
        axes = axes or self.axes
        axes.annotate(self.word(text), at, shift, textcoords="offset points", color=LIGHT[token], **style)

    def name_x(self, text: str) -> None:
        """The name of the x axis, at its right end."""
        self.write(text, (1, 0), "ink3", (0, -31), ha="right", va="baseline", xycoords="axes fraction")

    def ticks(self, axis: str, at: Sequence[float], labels: Sequence[str], axes: Axes | None = None) -> None:
        """Ticks of the `x` or `y` axis and what stands at them."""
        from matplotlib.ticker import FixedLocator, NullLocator

        axes = axes or self.axes
        which = axes.xaxis if axis == "x" else axes.yaxis
        which.set_minor_locator(NullLocator())
        which.set_major_locator(FixedLocator(list(at)))
        which.set_ticklabels([self.word(label) for label in labels])

    def svg(self, label: str) -> str:
        """The figure as SVG for a page; `label` says to those who cannot see it what it shows."""
        import matplotlib as mpl

        out = io.StringIO()
        with mpl.rc_context({**_SETTINGS, "svg.hashsalt": self.name}):
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self._figure.savefig(out, format="svg", transparent=True, metadata=nothing)
        root = ET.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", out.getvalue()))
        self._tidy(root)
        root.attrib.clear()
        root.attrib |= {"class": "plot", "viewBox": f"0 0 {self.WIDTH} {self._height}", "role": "img"}
        root.set("aria-label", label)
        text = ET.tostring(root, encoding="unicode")
        used = set(re.findall(r"#([\w-]+)", text))
        return re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else "", text)

    def _tidy(self, element: ET.Element) -> None:
        """Drop what a page does not need, round, and turn colours into variables and keys into words."""
        element.tag = _local(element.tag)
        element.attrib = {
            name: text for key, value in element.attrib.items() if (text := self._attribute(name := _local(key), value))
        }
        element.tail = None
        text = (element.text or "").strip()
        key = re.fullmatch(r"§(\d+)§", text) if element.tag == "text" else None
        element.text = self._words[int(key[1])] if key else text or None
        kept = []
        for child in list(element):
            if not isinstance(child.tag, str) or _local(child.tag) in ("metadata", "style"):
                continue
            self._tidy(child)
            if child.tag == "g" and set(child.attrib) <= {"id"}:
                kept += list(child)
            elif child.tag not in ("g", "defs") or len(child):
                kept.append(child)
        element[:] = kept

    def _attribute(self, name: str, value: str) -> str:
        """The new value of an attribute, empty where it can go."""
        if name == "id":
            return f"{self.name}-{value}"
        if name in ("href", "clip-path"):
            return value.replace("#", f"#{self.name}-")
        if name == "style":
            return _style(value)
        if name == "transform" and value.startswith("rotate(-0"):
            return ""
        if name in ("d", "x", "y", "width", "height", "transform"):
            return re.sub(r"\s*([MLCQz])\s*", r"\1", _NUMBER.sub(_short, " ".join(value.split())))
        return value


def y_ticks(plot: Plot, top: float, unit: str = "") -> None:
    """About five round ticks from 0 to `top`, the unit beside the highest."""
    from matplotlib.ticker import MaxNLocator

    at = [float(tick) for tick in MaxNLocator(5).tick_values(0, top) if 0 <= tick <= top]
    plot.ticks("y", at, [f"{tick:,.10g}{unit if tick == at[-1] else ''}" for tick in at])


def _local(name: str) -> str:
    return name.rsplit("}", 1)[-1]


def _short(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0").replace("-0.0", "0")


def _style(text: str) -> str:
    """CSS without what the page sets itself, colours as variables."""
    given = dict(part.split(": ", 1) for part in text.split("; ") if ": " in part)
    ours = {"font-family", "stroke-linejoin", "stroke-dashoffset", "stroke-miterlimit"}
    kept = {name: value.rstrip("; ") for name, value in given.items() if name not in ours}
    defaults = {"font-size": "11px", "text-anchor": "start", "stroke-linecap": "square"}
    css = ";".join(f"{name}:{value}" for name, value in kept.items() if defaults.get(name) != value)
    return _HEX.sub(
        lambda hex_: f"var(--{_TOKEN_OF[hex_[0].lower()]})" if hex_[0].lower() in _TOKEN_OF else hex_[0], css
    )
