"""The version of Stagemesh: the one place that says it.

Both distributions (`stagemesh`, `stagemesh-server`) read it when they are
built, and `stagemesh.__version__`, the command line and the servers at run
time.
"""

from __future__ import annotations

__version__ = "0.1.0"
