#!/usr/bin/env bash
# Everything that only a GPU can show, in one command of under four minutes:
#
#   tests/gpu/run.sh [REPORT.json]        (default ./gpu-report.json)
#
# PYTHON names the interpreter; without it the project's .venv is used, else python3. Without a GPU it says so, writes
# a report with "outcome": "skipped", and exits 0. Otherwise the exit status is 0 when every test that ran passed.
set -eu
root="$(cd "$(dirname "$0")/../.." && pwd)"
python="${PYTHON:-}"
if [ -z "$python" ]; then
  if [ -x "$root/.venv/bin/python" ]; then python="$root/.venv/bin/python"; else python=python3; fi
fi
exec "$python" "$root/tests/gpu/check.py" "${1:-gpu-report.json}"
