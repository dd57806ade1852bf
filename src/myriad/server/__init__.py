"""The HTTP API: a process beside the controller that reads its records and never blocks it."""
