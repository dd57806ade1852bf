"""The process on each node: starts, watches and fences workers, and holds their memory snapshots."""
