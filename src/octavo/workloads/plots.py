"""Figures of results, drawn with matplotlib, which is optional."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, require_packages

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")


def require_writable(path: str | Path) -> None:
    """Raise `ConfigError` if a file cannot be written; called before anything is measured."""
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {path}: {folder} is not a writable folder")


def require_plot(path: str | Path) -> None:
    """Raise `ConfigError` if no plot can be drawn or written to `path`; called before anything is computed.

    The folder of `path` is created.
    """
    require_packages("a plot", "plot", "matplotlib.backend_bases")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix and suffix not in formats:
        raise ConfigError(f"cannot plot to {path}: its name must end in .{', .'.join(sorted(formats))}")
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    require_writable(path)


def new_figure(width: float, height: float) -> Any:
    """Return an empty `matplotlib` figure of that many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | Path) -> None:
    """Write a figure; raises `ConfigError` if the file cannot be written."""
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
