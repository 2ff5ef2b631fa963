"""From predictor configuration to the estimator that the core asks."""

from __future__ import annotations

from domain.ports import Estimator
from predictors.config import EstimatorConfig


def build_estimator(config: EstimatorConfig) -> Estimator:
    """The configured estimator; imports only what that kind needs."""
    match config.kind:
        case "baseline":
            from predictors.estimator import BaselineEstimator

            return BaselineEstimator()
        case "learned":
            from predictors.learned import (
                PACKAGED,
                LearnedEstimator,
                load_parts,
                packaged_latency,
            )

            length = config.length if config.length is not None else PACKAGED / "length.npz"
            latency = config.latency if config.latency is not None else packaged_latency()
            return LearnedEstimator(*load_parts(length, config.quality, latency))
