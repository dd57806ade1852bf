"""Where everything of one cluster's state lives on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StateDir:
    """One folder per cluster; secrets and endpoints in it are files of mode 0600."""

    root: Path

    @property
    def journal(self) -> Path:
        return self.root / "journal.db"

    @property
    def reports(self) -> Path:
        return self.root / "reports.db"

    @property
    def control_socket(self) -> Path:
        return self.root / "control.sock"

    @property
    def controller_file(self) -> Path:
        """JSON {"pid", "agent_port", "started_s"} of the running controller."""
        return self.root / "controller.json"

    @property
    def server_file(self) -> Path:
        """JSON {"url", "token", "pid"} of the running API server."""
        return self.root / "server.json"

    @property
    def agent_token(self) -> Path:
        """The secret with which agents join."""
        return self.root / "agent.token"

    @property
    def lock(self) -> Path:
        """Held (flock) by the one controller of this state."""
        return self.root / "lock"

    @property
    def cluster_file(self) -> Path:
        return self.root / "cluster.yaml"

    @property
    def probe_file(self) -> Path:
        return self.root / "probe.json"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    def log(self, name: str) -> Path:
        """Log file of "controller" or "server"."""
        return self.root / f"{name}.log"

    def job_dir(self, job: str) -> Path:
        return self.jobs / job

    def log_file(self, job: str, rank: int) -> Path:
        return self.job_dir(job) / "logs" / f"rank-{rank:05d}.log"

    def node_dir(self, node: str) -> Path:
        return self.root / "nodes" / node
