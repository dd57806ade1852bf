"""The controller process: composes the runtime with the engine that the cluster file names."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from myriad.engines.local.engine import LocalEngine
from myriad.runtime.engine import Engine
from myriad.runtime.loop import Runtime, StateBusy
from myriad.runtime.paths import StateDir
from myriad.runtime.store import StateTooNew
from myriad.spec.cluster import cluster_from_yaml
from myriad.spec.errors import SpecError

ENGINES: dict[str, type[Engine]] = {"local": LocalEngine}


def main() -> int:
    """Run until the cluster goes down; 1 with one sentence when it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m myriad.engines")
    parser.add_argument("--state", type=Path, required=True)
    state_dir = StateDir(parser.parse_args().state.resolve())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(_serve(state_dir))
    except (SpecError, StateBusy, StateTooNew, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


async def _serve(state_dir: StateDir) -> None:
    cluster = cluster_from_yaml(state_dir.cluster_file.read_text(), str(state_dir.cluster_file))
    runtime = Runtime(state_dir, cluster, ENGINES[cluster.engine.kind]())
    serving = asyncio.create_task(runtime.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        logging.getLogger("myriad").info("stopped by a signal; agents keep their jobs running")


if __name__ == "__main__":
    sys.exit(main())
