"""Names of ``parbench.reports.fits`` for modules that do not import it yet."""

from parbench.reports.fits import COPY, LINK, Ceiling, Curve, fit_curves
from parbench.reports.fits import describe_fits as fit_notes
from parbench.reports.fits import find_ceiling as ceiling_of
from parbench.reports.fits import get_size as size_of
from parbench.reports.fits import make_points as points_of

__all__ = [
    "COPY",
    "LINK",
    "Ceiling",
    "Curve",
    "ceiling_of",
    "fit_curves",
    "fit_notes",
    "points_of",
    "size_of",
]
