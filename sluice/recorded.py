"""A fresh core as the header of an event log describes it."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import TypeAdapter

from domain.fleet import FleetSpec
from domain.request import SloClass, Tenant
from policies.config import PolicyConfig
from policies.core import DecisionCore
from policies.factory import build_core
from predictors.config import EstimatorConfig
from predictors.factory import build_estimator


def core_of(header: dict[str, Any]) -> DecisionCore:
    """The core that a log's events were fed to, as it was at their start.

    Raises: ValueError if the header is not one of ours.
    """
    policy: PolicyConfig = TypeAdapter(PolicyConfig).validate_python(header["policy"])
    predictors: EstimatorConfig = TypeAdapter(EstimatorConfig).validate_python(header["predictors"])
    return build_core(
        policy,
        fleet=msgspec.convert(header["fleet"], FleetSpec),
        estimator=build_estimator(predictors),
        tenants=msgspec.convert(header["tenants"], list[Tenant]),
        classes=msgspec.convert(header["classes"], list[SloClass]),
        now=header["now"],
        midnight=header.get("midnight", 0.0),
    )
