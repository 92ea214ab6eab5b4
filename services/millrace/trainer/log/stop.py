"""How a run is released."""


class StopRequested(Exception):
    """The trainer was asked to release the run: a signal, a pause, or another assignment. Not an error."""
