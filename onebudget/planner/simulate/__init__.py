"""Replay a request trace through the real scheduler and managers on a card that exists only as books."""

from onebudget.planner.simulate.books import CountedPool
from onebudget.planner.simulate.card import StepLoad, load_of_ledger, pools_of_ledger, roofline
from onebudget.planner.simulate.clock import RooflineClock, StepClock, StepWork
from onebudget.planner.simulate.model_load import load_of_gpu, load_of_model
from onebudget.planner.simulate.result import SimulationResult
from onebudget.planner.simulate.run import Simulation, simulate
from onebudget.planner.simulate.synthetic import SyntheticLoad, synthetic_trace
from onebudget.planner.simulate.table_clock import TableClock, read_step_table
from onebudget.planner.simulate.traces import Trace, TraceRequest, read_trace, write_trace

__all__ = [
    "CountedPool",
    "RooflineClock",
    "Simulation",
    "SimulationResult",
    "StepClock",
    "StepLoad",
    "StepWork",
    "SyntheticLoad",
    "TableClock",
    "Trace",
    "TraceRequest",
    "load_of_gpu",
    "load_of_ledger",
    "load_of_model",
    "pools_of_ledger",
    "read_step_table",
    "read_trace",
    "roofline",
    "simulate",
    "synthetic_trace",
    "write_trace",
]
