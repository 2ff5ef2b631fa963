"""Compiled kernels that are older than the source they were made from are thrown away.

Numba keeps compiled functions in `__pycache__` and looks only at the file a function stands in;
what it calls from other files is compiled into it, so an edit there would go unnoticed and
yesterday's rule would run.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("domain", "policies", "predictors", "backends", "training")


def drop_stale(root: Path = ROOT) -> int:
    """Delete cached kernels older than the youngest file that defines one; returns how many.

    A folder that cannot be written keeps its files: what is installed read-only does not change
    either.
    """
    sources: list[float] = []
    cached: list[Path] = []
    for package in PACKAGES:
        modules = (root / package).rglob("*.py")
        sources += [p.stat().st_mtime for p in modules if "njit" in p.read_text(encoding="utf-8")]
        cached += (root / package).rglob("__pycache__/*.nb[ic]")
    youngest = max(sources, default=0.0)
    stale = [path for path in cached if path.stat().st_mtime < youngest]
    for path in stale:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return 0
    return len(stale)
