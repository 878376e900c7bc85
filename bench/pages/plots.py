"""The report's plots as Vega-Lite plot_specifications; the page's script puts rows, colours and theme into them."""

from typing import Any

HOVER = [
    {"field": "series", "title": "method"},
    {"field": "scores"},
    {"field": "alpha", "title": "alpha retrain"},
    {"field": "alpha_attribution", "title": "alpha attribution"},
    {"field": "lds", "title": "LDS", "format": ".3f"},
    {"field": "low", "title": "from", "format": ".3f"},
    {"field": "high", "title": "to", "format": ".3f"},
    {"field": "ceiling", "format": ".3f"},
    {"field": "seconds", "format": ".3~s"},
    {"field": "seeds"},
    {"field": "settings"},
]
# Wheels scroll the page; with Shift they zoom.
ZOOM = {"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"}
CHOSEN = {"name": "chosen", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}
FADED_UNLESS_CHOSEN = {"condition": {"param": "chosen", "value": 1}, "value": 0.12}
COLOUR: dict[str, Any] = {"field": "series", "type": "nominal", "title": None, "scale": {"domain": [], "range": []}}
SHAPE = {"field": "scores", "type": "nominal", "title": None, "scale": {"domain": ["raw", "train-normalised"]}}
DASH = {"field": "scores", "type": "nominal", "title": None, "scale": {"domain": ["raw", "train-normalised"]}}
LDS_AXIS = {"field": "lds", "type": "quantitative", "title": "LDS", "scale": {"zero": True}}


def lds_plot() -> dict[str, Any]:
    x = {"field": "alpha", "type": "quantitative", "title": "alpha retrain", "scale": {"zero": False, "padding": 16}}
    return {
        "height": 300,
        "encoding": {"x": x, "color": COLOUR, "opacity": FADED_UNLESS_CHOSEN},
        "layer": [
            {"mark": {"type": "rule", "strokeWidth": 1}, "encoding": {"y": {"field": "low", "type": "quantitative"},
             "y2": {"field": "high"}}},
            {"mark": {"type": "line"}, "encoding": {"y": LDS_AXIS, "strokeDash": DASH}},
            {"params": [ZOOM, CHOSEN], "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
             "encoding": {"y": LDS_AXIS, "shape": SHAPE, "tooltip": HOVER}},
            {"transform": [{"filter": "datum.ceiling != null"},
                           {"aggregate": [{"op": "mean", "field": "ceiling", "as": "ceiling"}], "groupby": ["alpha"]}],
             "mark": {"type": "line", "strokeDash": [2, 3], "point": False},
             "encoding": {"y": {"field": "ceiling", "type": "quantitative"}, "color": {"datum": "noise ceiling"},
                          "opacity": {"value": 1}}},
        ],
    }  # fmt: skip


def dots_plot() -> dict[str, Any]:
    """One share retrained on: methods below each other, best first, raw and train-normalised scores in two rows."""
    y = {
        "field": "series",
        "type": "nominal",
        "title": None,
        "sort": {"field": "lds", "op": "max", "order": "descending"},
        "axis": {"labelLimit": 260, "grid": True},
    }
    apart = {"field": "scores", "type": "nominal", "scale": {"domain": ["raw", "train-normalised"]}}
    return {
        "height": {"step": 13},
        "encoding": {"y": y, "yOffset": apart, "color": COLOUR | {"legend": None}},
        "layer": [
            {"transform": [{"filter": "datum.ceiling != null"},
                           {"aggregate": [{"op": "mean", "field": "ceiling", "as": "ceiling"}]}],
             "mark": {"type": "rule", "strokeDash": [2, 3]},
             "encoding": {"x": {"field": "ceiling", "type": "quantitative"}, "y": None, "yOffset": None,
                          "color": {"datum": "noise ceiling"}, "tooltip": [{"field": "ceiling", "format": ".3f"}]}},
            {"mark": {"type": "rule"}, "encoding": {"x": {"field": "low", "type": "quantitative"},
             "x2": {"field": "high"}}},
            {"params": [ZOOM], "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
             "encoding": {"x": LDS_AXIS, "shape": SHAPE, "tooltip": HOVER}},
        ],
    }  # fmt: skip


def cost_plot() -> dict[str, Any]:
    x = {"field": "seconds", "type": "quantitative", "title": "seconds, fit and score", "scale": {"type": "log"}}
    return {
        "height": 300,
        "transform": [{"filter": "datum.seconds > 0"}],
        "encoding": {"x": x, "color": COLOUR, "opacity": FADED_UNLESS_CHOSEN},
        "layer": [
            {"mark": {"type": "rule"}, "encoding": {"y": {"field": "low", "type": "quantitative"},
             "y2": {"field": "high"}}},
            {"params": [ZOOM, CHOSEN], "mark": {"type": "point", "filled": True, "size": 70},
             "encoding": {"y": LDS_AXIS, "shape": SHAPE, "tooltip": HOVER}},
        ],
    }  # fmt: skip


def scaling_plot() -> dict[str, Any]:
    x = {"field": "parameters", "type": "quantitative", "title": "parameters", "scale": {"type": "log"},
         "axis": {"format": "~s"}}  # fmt: skip
    y = {"field": "seconds", "type": "quantitative", "title": "seconds, fit and score", "scale": {"type": "log"}}
    hover = [
        {"field": "model"}, {"field": "series", "title": "method"}, {"field": "device"}, {"field": "measured"},
        {"field": "seconds", "format": ",.1f"}, {"field": "memory", "title": "peak memory, GiB", "format": ".2f"},
    ]  # fmt: skip
    shape = {"field": "measured", "type": "nominal", "title": None, "scale": {"domain": ["measured", "projected"]}}
    return {
        "height": 300,
        "encoding": {"x": x, "y": y, "color": COLOUR, "opacity": FADED_UNLESS_CHOSEN},
        "layer": [
            {"mark": {"type": "line"}, "encoding": {"detail": {"field": "device"}}},  # a series has its settings
            {"params": [ZOOM, CHOSEN], "mark": {"type": "point", "filled": True, "size": 60},
             "encoding": {"shape": shape, "tooltip": hover}},
        ],
    }  # fmt: skip


def plot_specifications() -> dict[str, Any]:
    return {"dots": dots_plot(), "lds": lds_plot(), "cost": cost_plot(), "scaling": scaling_plot()}
