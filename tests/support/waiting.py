"""Runs the command once its standard input is closed, so that a tracer can be attached to the process before."""

import runpy
import sys

sys.stdin.read()
runpy.run_module("holdfast", run_name="__main__", alter_sys=True)
