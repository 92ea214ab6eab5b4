"""How a run is let go of."""


class StopRequested(Exception):
    """The trainer was asked to let go of the run: a signal, a pause, or another assignment. Not an error."""
