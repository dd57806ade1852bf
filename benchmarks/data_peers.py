"""The peers of ``benchmarks.data``: the same tokens through other loaders. Run by their own Python; needs no Myriad.

    PYTHON -P benchmarks/data_peers.py NAME FOLDER --batch 8 --seconds 3 --step 10000000

``FOLDER/tokens.bin`` has uint16 tokens; a sample is S + 1 of them, and a batch is two int64 tensors [batch, S], as
ours. Each peer reads its own format (made in FOLDER at its first run) in shuffled order with the settings its
documentation names for speed. The last line is one JSON document: tokens/s of the run, latency of its batches, and how
long a loader made anew takes to its first batch from the state it saved at the place of ``--step`` within its epoch (what
a peer keeps of earlier epochs is a number, which costs nothing to restore).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

S = 2048
WARM_UP_S = 1.0
WALK_LIMIT_S = 20.0  # for walking to the place of the step within its epoch


def timed(batches: Callable[[], Iterator[Any]], batch: int, seconds: float) -> dict[str, Any]:
    """Tokens/s and the latencies (s) of batches over ``seconds`` after a warm-up; epochs follow each other."""
    latencies: list[float] = []
    found = batches()
    clock = time.perf_counter
    begin = clock()
    warm, end = begin + WARM_UP_S, begin + WARM_UP_S + seconds
    before, since = begin, begin
    while before < end:
        if next(found, None) is None:
            found = batches()
            continue
        now = clock()
        if before >= warm:
            latencies.append(now - before)
        else:
            since = now
        before = now
    rate = len(latencies) * batch * S / (before - since)
    return {
        "tokens_per_s": rate,
        "p50_s": float(np.median(latencies)),
        "p99_s": float(np.quantile(latencies, 0.99)),
    }


class Peer:
    """One loader: ``make`` gives a new one, whose state can be saved and loaded."""

    def __init__(self, folder: Path, batch: int, workers: int) -> None:
        self.folder, self.batch, self.workers = folder, batch, workers

    def make(self) -> Any:
        raise NotImplementedError

    def samples(self) -> int:
        return ((self.folder / "tokens.bin").stat().st_size // 2 - 1) // S


class Torchdata(Peer):
    """StatefulDataLoader over a map-style dataset that gathers a batch at once (``__getitems__``) from a memmap."""

    def make(self) -> Any:
        torch: Any = importlib.import_module("torch")
        loader: Any = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader

        class Tokens:
            def __init__(self, path: Path, size: int) -> None:
                self.tokens, self.size = np.memmap(path, np.uint16, "r"), size

            def __len__(self) -> int:
                return self.size

            def __getitems__(self, ids: list[int]) -> Any:
                rows = np.empty((len(ids), S + 1), np.int64)
                for slot, sample in enumerate(ids):
                    rows[slot] = self.tokens[sample * S : sample * S + S + 1]
                both = torch.from_numpy(rows)
                return both[:, :-1], both[:, 1:]

        return loader(
            Tokens(self.folder / "tokens.bin", self.samples()),
            batch_size=self.batch,
            shuffle=True,
            drop_last=True,
            num_workers=self.workers,
            collate_fn=_same,
            prefetch_factor=4 if self.workers else None,
        )


class Litdata(Peer):
    """StreamingDataset with TokensLoader over chunks of 64 MB, read in place, under StreamingDataLoader."""

    def make(self) -> Any:
        litdata: Any = importlib.import_module("litdata")
        items: Any = importlib.import_module("litdata.streaming.item_loader").TokensLoader
        place = self.folder / "litdata"
        if not (place / "index.json").exists():
            self._write(place, items)
        dataset = litdata.StreamingDataset(
            str(place), item_loader=items(block_size=S + 1), shuffle=True, drop_last=True
        )
        return litdata.StreamingDataLoader(
            dataset, batch_size=self.batch, num_workers=self.workers, drop_last=True, collate_fn=_halves
        )

    def _write(self, place: Path, items: Any) -> None:
        torch: Any = importlib.import_module("torch")
        writer_of: Any = importlib.import_module("litdata.streaming.writer").BinaryWriter
        tokens = np.memmap(self.folder / "tokens.bin", np.uint16, "r")
        place.mkdir()
        writer = writer_of(str(place), chunk_bytes=64 << 20, item_loader=items(block_size=S + 1))
        for sample in range(self.samples()):
            block = tokens[sample * S : sample * S + S + 1].astype(np.int32)
            writer.add_item(sample, torch.from_numpy(block))
        writer.done()
        writer.merge()


class Mosaic(Peer):
    """StreamingDataset over uncompressed MDS shards of 64 MB, read in place, under StreamingDataLoader."""

    def make(self) -> Any:
        streaming: Any = importlib.import_module("streaming")
        place = self.folder / "mds"
        if not (place / "index.json").exists():
            self._write(place, streaming)
        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(
            local=str(place), shuffle=True, batch_size=self.batch, num_canonical_nodes=1
        )
        return streaming.StreamingDataLoader(
            dataset, batch_size=self.batch, num_workers=self.workers, drop_last=True, collate_fn=_columns
        )

    def _write(self, place: Path, streaming: Any) -> None:
        tokens = np.memmap(self.folder / "tokens.bin", np.uint16, "r")
        columns = {"tokens": f"ndarray:uint16:{S + 1}"}
        with streaming.MDSWriter(out=str(place), columns=columns, size_limit=64 << 20) as out:
            for sample in range(self.samples()):
                out.write({"tokens": np.array(tokens[sample * S : sample * S + S + 1])})


def _same(batch: Any) -> Any:
    return batch


def _halves(items: list[Any]) -> Any:
    torch: Any = importlib.import_module("torch")
    rows = torch.stack([item.to(torch.int64) for item in items])
    return rows[:, :-1], rows[:, 1:]


def _columns(items: list[Any]) -> Any:
    torch: Any = importlib.import_module("torch")
    rows = torch.from_numpy(np.stack([item["tokens"] for item in items]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


PEERS: dict[str, type[Peer]] = {"torchdata": Torchdata, "litdata": Litdata, "mosaicml-streaming": Mosaic}


def resumed(peer: Peer, step: int) -> dict[str, Any]:
    """Seconds from nothing to the first batch of a loader that continues at ``step`` of its epoch."""
    loader = peer.make()
    batches, done = iter(loader), 0
    end = time.monotonic() + WALK_LIMIT_S
    while done < step and time.monotonic() < end and next(batches, None) is not None:
        done += 1
    state = loader.state_dict()
    want = next(batches)
    del batches, loader
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        again = peer.make()
        again.load_state_dict(state)
        found = next(iter(again))
        seconds.append(time.perf_counter() - begin)
        del again
    same = bool((found[0] == want[0]).all())
    return {"resume_s": sorted(seconds)[1], "resumed_at": done, "same_batch": same}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--step", type=int, default=0, help="0: do not resume")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    importlib.import_module("torch").set_num_threads(1)
    peer = PEERS[given.name](given.folder, given.batch, given.workers)
    loader = peer.make()
    found = timed(lambda: iter(loader), given.batch, given.seconds)
    if given.step:
        del loader
        try:
            found |= resumed(peer, given.step % (peer.samples() // given.batch))
        except Exception as error:  # noqa: BLE001 (told in the result; the throughput stands)
            found["resume_error"] = f"{type(error).__name__}: {error}"[:200]
    sys.stdout.flush()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
