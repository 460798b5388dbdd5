"""Local linear regression of measured errors.

The cost model's error changes with the sizes: cache effects grow with the channels, border effects with smaller maps. A
mean over a neighbourhood takes such a trend for scatter, and is biased if all neighbours are on one side. So a plane is
fitted by weighted least squares, with slopes regularised to zero.
"""

from __future__ import annotations

from typing import NamedTuple

STIFFNESS = 0.3
"""Regularisation of a slope: weight of problems at distance one that show none."""


class Moments(NamedTuple):
    """Weighted sums over neighbours: of 1 (``n``), of the steps from here along the plane's axes (channels ``c`` and
    ``k``, batch ``b``, size ``s``), of the error ``e``, and of products of two of them."""

    n: float
    c: float
    k: float
    b: float
    s: float
    e: float
    cc: float
    ck: float
    kk: float
    cb: float
    kb: float
    bb: float
    cs: float
    ks: float
    bs: float
    ss: float
    ce: float
    ke: float
    be: float
    se: float
    ee: float


def plane_through(moments: Moments, expected: float, belief: float) -> tuple[float, float]:
    """Returns the plane's value here, and the weighted sum of squared residuals. ``expected`` and ``belief`` are the
    prior's value and weight.

    The normal equations are solved by elimination, without loops: each plan of a new shape solves some six of them.
    """
    n, c, k, b, s, e, cc, ck, kk, cb, kb, bb, cs, ks, bs, ss, ce, ke, be, se, ee = moments
    mean = (belief * expected + e) / (belief + n)
    # Moments of the deviations from the mean: with 1 and the steps, and their squares.
    de, ce, ke, be, se = e - mean * n, ce - mean * c, ke - mean * k, be - mean * b, se - mean * s
    squares = ee - mean * (e + de)
    of_n = n + belief
    along = c / of_n
    of_c, ck, cb, cs, ce = cc + STIFFNESS - along * c, ck - along * k, cb - along * b, cs - along * s, ce - along * de
    along = k / of_n
    kk, kb, ks, ke = kk + STIFFNESS - along * k, kb - along * b, ks - along * s, ke - along * de
    along = b / of_n
    bb, bs, be = bb + STIFFNESS - along * b, bs - along * s, be - along * de
    along = s / of_n
    ss, se = ss + STIFFNESS - along * s, se - along * de
    along = ck / of_c
    of_k, kb, ks, ke = kk - along * ck, kb - along * cb, ks - along * cs, ke - along * ce
    along = cb / of_c
    bb, bs, be = bb - along * cb, bs - along * cs, be - along * ce
    along = cs / of_c
    ss, se = ss - along * cs, se - along * ce
    along = kb / of_k
    of_b, bs, be = bb - along * kb, bs - along * ks, be - along * ke
    along = ks / of_k
    ss, se = ss - along * ks, se - along * ke
    along = bs / of_b
    of_s, se = ss - along * bs, se - along * be
    by_s = se / of_s
    by_b = (be - bs * by_s) / of_b
    by_k = (ke - kb * by_b - ks * by_s) / of_k
    by_c = (ce - ck * by_k - cb * by_b - cs * by_s) / of_c
    here = (de - c * by_c - k * by_k - b * by_b - s * by_s) / of_n
    explained = de * de / of_n + ce * ce / of_c + ke * ke / of_k + be * be / of_b + se * se / of_s
    held = belief * here * here + STIFFNESS * (by_c * by_c + by_k * by_k + by_b * by_b + by_s * by_s)
    return mean + here, max(0.0, squares - explained - held)
