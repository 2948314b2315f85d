#!/bin/bash
export PYTHONPATH=/tmp/core-policy/wt/src:/tmp/core-policy/wt
exec /work/core-policy/.venv/bin/python /tmp/core-policy/first.py "$@"
