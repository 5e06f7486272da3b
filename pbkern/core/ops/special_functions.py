"""Functions of real numbers that NumPy lacks, on float64 arrays: erf, erfc, erf_inv, lgamma, digamma.

They are written for the interpreters, after definitions, and share nothing with the polynomials of lower/math.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# The least argument of digamma's asymptotic series; recurrence lifts smaller ones. At 10 the terms left out are below 1e-17.
LEAST_SERIES_ARGUMENT = 10.0
# B(2k) / (2k) of digamma's asymptotic series, k = 1, 2, ... Source: Abramowitz and Stegun, 6.3.18.
_DIGAMMA_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
# The constant of an approximation of erf_inv with a relative error of 2e-3. Source: Winitzki 2008, "A handy approximation
# for the error function and its inverse".
WINITZKI = 0.147
# Steps of Halley's method from there, each of which triples the number of digits.
HALLEY_STEPS = 3


def _each(function: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    """A function of Python's numbers on arrays."""
    vectorised = np.vectorize(function, otypes=[np.float64])
    return lambda x: vectorised(np.asarray(x, np.float64))


erf = _each(math.erf)
erfc = _each(math.erfc)


def _lgamma(x: float) -> float:
    """log |gamma(x)|; infinite at the poles, where Python raises ValueError, and where it is too large."""
    try:
        return math.lgamma(x)
    except (ValueError, OverflowError):
        return math.inf


lgamma = _each(_lgamma)


def digamma(x: np.ndarray) -> np.ndarray:
    """The derivative of log gamma, by recurrence and its asymptotic series; below zero by reflection. NaN at the poles."""
    x = np.asarray(x, np.float64)
    reflects = x < 0.5
    argument = np.where(reflects, 1 - x, x)
    lifted, correction = argument, np.zeros_like(argument)
    for _ in range(int(LEAST_SERIES_ARGUMENT)):
        small = lifted < LEAST_SERIES_ARGUMENT
        correction = np.where(small, correction - 1 / lifted, correction)
        lifted = np.where(small, lifted + 1, lifted)
    inverse_square = 1 / (lifted * lifted)
    tail = np.zeros_like(lifted)
    for coefficient in reversed(_DIGAMMA_SERIES):
        tail = (tail + coefficient) * inverse_square
    series = np.log(lifted) - 0.5 / lifted - tail + correction
    fraction = x - np.round(x)
    reflected = series - np.pi / np.tan(np.pi * fraction)
    is_pole = (x <= 0) & (fraction == 0)
    return np.where(is_pole | (x == -np.inf), np.nan, np.where(reflects, reflected, series))


def erf_inv(x: np.ndarray) -> np.ndarray:
    """The number whose erf is x: Winitzki's approximation and Halley's method; in erfc's terms near one, where erf is flat."""
    x = np.asarray(x, np.float64)
    size = np.abs(x)
    inside = size < 1
    target = np.where(inside, size, 0.0)
    log_term = np.log1p(-target * target)
    half = 2 / (np.pi * WINITZKI) + log_term / 2
    approximation = np.sqrt(np.sqrt(half * half - log_term / WINITZKI) - half)
    estimate = np.where(target < 1e-2, target * (np.sqrt(np.pi) / 2), approximation)
    for _ in range(HALLEY_STEPS):
        error = np.where(target < 0.5, erf(estimate) - target, (1 - target) - erfc(estimate))
        step = error * (np.sqrt(np.pi) / 2) * np.exp(estimate * estimate)
        estimate = estimate - step / (1 + estimate * step)
    estimate = np.where(size == 1, np.inf, np.where(inside, estimate, np.nan))
    return np.copysign(estimate, x)
