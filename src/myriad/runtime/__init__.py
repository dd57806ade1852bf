"""The shell around the controller: event loop, clock, SQLite file, connections."""
