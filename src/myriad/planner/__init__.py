"""What a job will need and where its accelerator-seconds will go, before it runs."""

from myriad.planner.predict import Plan, StepTime, plan
from myriad.planner.probe import Probe

__all__ = ["Plan", "Probe", "StepTime", "plan"]
