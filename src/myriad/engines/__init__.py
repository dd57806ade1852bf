"""Where nodes come from. ``python -m myriad.engines --state DIR`` is the controller process."""
