"""Runs the GPU tests and writes one JSON report: counts, tests, device facts, versions. Called by ``run.sh``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/gpu", "tests/contract")
LIMIT_S = 225
PACKAGES = ("onebudget", "torch", "transformers", "cuda-bindings", "cuda-core", "numpy", "pytest")
Report = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="where the JSON goes")
    target = parser.parse_args().report.resolve()
    sys.path.insert(0, str(ROOT))
    facts, broken = device_facts()
    if broken is not None:
        present = gpu_in_sight()
        report = empty_report("failed" if present else "skipped", broken)
        sentence = f"The GPU tests {'could not run' if present else 'were skipped'}: {broken}"
    else:
        report = run_tests()
        counts = ", ".join(f"{count} {name}" for name, count in report["counts"].items())
        sentence = f"{facts['name']['value']}: {counts} in {report['seconds']:.0f} s"
    report |= {"device": facts, "versions": versions()}
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{sentence}\nReport: {target}")
    return 1 if report["outcome"] == "failed" else 0


def device_facts() -> tuple[Report, str | None]:
    """Facts of the first device with their sources, or why there are none."""
    try:
        from onebudget.device import open_device

        with open_device("cuda:0") as device:
            known = [item.name for item in fields(device.facts) if item.name != "sources"]
            facts = {
                name: {"value": getattr(device.facts, name), "source": device.facts.source(name)} for name in known
            }
            facts["others_bytes"] = {"value": device.account.others_bytes, "source": "NVML, at opening"}
    except Exception as error:
        return {}, str(error)
    return facts, torch_problem()


def torch_problem() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"torch can't be imported ({error})"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def gpu_in_sight() -> bool:
    """Is there a GPU that something else than its absence keeps from being tested?"""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl")) or torch_problem() is None


def run_tests() -> Report:
    """The suites with their GPU parameter in a process of their own, ended when the time is up."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "junit.xml"
        options = ("-m", "gpu and not long", "-q", "--no-header", "-p", "no:cacheprovider", f"--junitxml={results}")
        command = [sys.executable, "-m", "pytest", *TESTS, *options]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            environment = {**os.environ, "PYTHONPATH": path}
            status = subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            return empty_report("failed", f"not done after {LIMIT_S} s") | {"seconds": time.monotonic() - started}
        report = read_results(results, status)
    report["seconds"] = time.monotonic() - started
    return report


def read_results(results: Path, status: int) -> Report:
    """pytest's own result file as counts and one line a test. Skipping everything is no success."""
    if not results.is_file():
        return empty_report("failed", f"pytest ended with status {status} and left no results")
    tests = [read_test(case) for case in ElementTree.parse(results).iter("testcase")]
    counts = Counter(test["outcome"] for test in tests)
    counts_by_name = {name: counts.get(name, 0) for name in ("passed", "failed", "skipped")}
    reason = None if counts["passed"] else "no test passed"
    outcome = "failed" if status or not counts["passed"] else "passed"
    return {"outcome": outcome, "reason": reason, "counts": counts_by_name, "tests": tests}


def read_test(case: ElementTree.Element) -> Report:
    result: Report = {
        "name": f"{case.get('classname')}::{case.get('name')}",
        "outcome": "passed",
        "seconds": float(case.get("time", 0)),
    }
    for kind, outcome in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        found = case.find(kind)
        if found is not None:
            result |= {"outcome": outcome, "message": found.get("message", ""), "details": (found.text or "")[-4000:]}
    return result


def empty_report(outcome: str, reason: str) -> Report:
    return {
        "outcome": outcome,
        "reason": reason,
        "counts": {"passed": 0, "failed": 0, "skipped": 0},
        "tests": [],
        "seconds": 0.0,
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
