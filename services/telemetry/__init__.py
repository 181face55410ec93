"""Logs and metrics of every Stagemesh process.

`setup_logging()` once per process; `Metrics()` once per gateway, handed to
those who count. Neither is a global.
"""

from __future__ import annotations

from services.telemetry.logging import log_event, request_id_scope, setup_logging
from services.telemetry.metrics import Metrics

__all__ = ["Metrics", "log_event", "request_id_scope", "setup_logging"]
