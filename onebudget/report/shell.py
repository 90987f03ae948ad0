"""What every page of this package has around its sections: one file that loads nothing from a network."""

from __future__ import annotations

from html import escape
from importlib import resources

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def shell(title: str, body: str, after: str = "") -> str:
    """The whole page as text, plotly's source included (about 5 MB). ``after`` stands behind the sections."""
    from plotly.offline import get_plotlyjs

    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{resource('page.css')}</style><script>{get_plotlyjs()}</script></head>\n"
        f"<body><main>{body}</main>{after}</body></html>\n"
    )


def section(title: str, body: str) -> str:
    """A titled part of the page; nothing where there is no body."""
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def resource(name: str) -> str:
    """A file that lies beside the reports."""
    return resources.files("onebudget.report").joinpath(name).read_text(encoding="utf-8")
