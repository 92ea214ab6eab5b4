"""`run repair`: what of a run is damaged or missing, and its restoration (`repair.py`)."""

from millrace.readers.repair.objects import Repair, RepairState
from millrace.readers.repair.repair import repair_run, require_run

__all__ = ["Repair", "RepairState", "repair_run", "require_run"]
