"""The controller: a pure state machine from events to commands (design 5)."""
