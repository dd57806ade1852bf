"""Packing: every token after a document's first is a label once, no document is cut without need, nothing is wasted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.storage.datasets import packing
from myriad.storage.datasets.builder import build
from myriad.storage.datasets.index import DatasetError, open_index, read_sidecar, verify
from myriad.storage.datasets.loader import MASKED, PADDING, Loader, TokenDataset
from myriad.storage.datasets.packed import PackingIndex
from myriad.storage.datasets.packing import best_fit, cut_documents

S = 16
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def documents(
    folder: Path, lengths: list[int], name: str = "set", pack: int | None = S, validation: float = 0
) -> Path:
    """A data set of documents with so many tokens each (their last ends the document)."""
    draw = np.random.default_rng(len(lengths))
    lines = [{"text": bytes(draw.integers(97, 123, length - 1, np.uint8)).decode()} for length in lengths]
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    build([folder / f"{name}.jsonl"], folder / name, pack=pack, validation=validation)
    return folder / name


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS)
def test_every_place_of_every_document_is_in_one_sequence(lengths: list[int]) -> None:
    pieces, cut = cut_documents(np.array(lengths, np.int32), 1000, S)
    sequences = best_fit(pieces, S)
    assert_packed(sequences, lengths, 1000)
    assert cut == sum(length - 1 > S for length in lengths)


def assert_packed(sequences: list[list[tuple[int, int]]], lengths: list[int], first: int) -> None:
    assert all(0 < sum(places for _, places in sequence) <= S for sequence in sequences), (
        "a sequence overflows"
    )
    found = sorted((at, places) for sequence in sequences for at, places in sequence)
    places_of = {place for at, places in found for place in range(at, at + places)}
    ends = np.cumsum(lengths) + first - 1  # the last token of a document is never an input
    assert places_of == set(range(first, int(ends[-1]))) - set(ends.tolist()), "a place is lost"
    assert sum(places for _, places in found) == len(places_of), "a place is packed twice"
    for at, places in found:
        whole = at == first or at - 1 in ends
        ended = at + places in ends
        assert places == S or ended, "a piece that does not end its document is shorter than a sequence"
        assert whole or (at - first) >= S


@pytest.mark.parametrize("fault", ["lost", "twice", "overflow", "cut"])
def test_a_planted_fault_is_noticed(fault: str) -> None:
    lengths = [9, 5, 30, 7, 2]
    pieces, _ = cut_documents(np.array(lengths, np.int32), 0, S)
    sequences = best_fit(pieces, S)
    assert_packed(sequences, lengths, 0)
    match fault:
        case "lost":
            sequences[-1].pop()
        case "twice":
            sequences.append([sequences[0][0]])
        case "overflow":
            sequences[0] += sequences.pop()
        case "cut":
            at, places = sequences[-1].pop(0)
            sequences += [[(at, 1)], [(at + 1, places - 1)]]
    with pytest.raises(AssertionError):
        assert_packed([each for each in sequences if each], lengths, 0)


def plain_best_fit(places: list[int]) -> list[list[int]]:
    """The rule, word by word: the longest first, each where the least room is left."""
    rooms: list[list[int]] = []
    for each in sorted(places, reverse=True):
        fitting = [bin_ for bin_ in rooms if S - sum(bin_) >= each]
        if fitting:
            min(fitting, key=lambda bin_: S - sum(bin_)).append(each)
        else:
            rooms.append([each])
    return rooms


@settings(max_examples=150, deadline=None)
@given(places=st.lists(st.integers(1, S), max_size=60))
def test_it_is_best_fit(places: list[int]) -> None:
    found = best_fit(list(enumerate(places)), S)
    sums = sorted(sum(places for _, places in each) for each in found)
    assert sums == sorted(map(sum, plain_best_fit(places)))  # which of two equal rooms is taken is free
    assert best_fit(reversed(list(enumerate(places))), S) == found  # the order they come in changes nothing


@pytest.mark.parametrize("window", [1, 7, 1000])
def test_a_loader_reads_inputs_labels_and_documents(
    tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "WINDOW", window)
    lengths = [*range(1, 41), 3, 3, 3]
    prefix = documents(
        tmp_path, [each for each in lengths if each > 1]
    )  # a document without text is left out
    stream = np.fromfile(f"{prefix}.bin", np.uint16).astype(np.int64)
    sidecar = read_sidecar(prefix)
    assert sidecar is not None and sidecar.packing is not None
    end, facts = sidecar.end_of_document, sidecar.packing
    predicted: list[int] = []
    with TokenDataset(prefix, S, packed=True) as dataset:
        assert dataset.size == facts.sequences
        assert dataset.packing is not None
        loaders = [Loader(dataset, 3, 2, rank, 2) for rank in range(2)]
        batches = [loader.next() for _ in range((dataset.size + 1) // 2) for loader in loaders][
            : dataset.size
        ]
        for batch in batches:
            assert batch.documents is not None
            (row,), (labels,), (numbers,) = batch.tokens, batch.labels, batch.documents
            done = 0
            for number, (first, places) in enumerate(dataset.packing.pieces(batch.sample_ids[0])):
                here = slice(done, done + places)
                assert row[here].tolist() == stream[first : first + places].tolist()
                assert labels[here].tolist() == stream[first + 1 : first + places + 1].tolist()
                assert (numbers[here] == number).all() and end not in row[here]
                predicted += range(first + 1, first + places + 1)
                done += places
            assert (
                (row[done:] == end).all()
                and (labels[done:] == MASKED).all()
                and (numbers[done:] == PADDING).all()
            )
        padding = sum(int((batch.labels == MASKED).sum()) for batch in batches)
    firsts = {0, *(np.flatnonzero(stream == end) + 1).tolist()}
    assert sorted(predicted) == sorted(set(range(len(stream))) - firsts)
    assert padding == facts.padding and facts.cut == sum(each - 1 > S for each in lengths)
    assert facts.efficiency == pytest.approx(len(predicted) / (facts.sequences * S))


def test_many_documents_are_packed_tightly(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    lengths = np.clip(draw.lognormal(2, 0.8, 3000).astype(np.int32), 2, 60)
    found = packing.write_packing(tmp_path / "p", [lengths[:1000], lengths[1000:]], S)
    assert found.efficiency > 0.99, found


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def other_number(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "missing",
        os.unlink,
        r"set\.pack cannot be read \(No such file or directory\); build the data set again",
    ),
    (
        "cut short",
        truncate,
        r"set\.pack is truncated, damaged or of another data set; build the data set again",
    ),
    ("another length", other_number, r"set\.pack is truncated, damaged or of another data set"),
]


@pytest.mark.parametrize(("name", "damage", "sentence"), DAMAGE, ids=[each[0] for each in DAMAGE])
def test_damage_is_refused_by_a_sentence(
    tmp_path: Path, name: str, damage: Callable[[Path], None], sentence: str
) -> None:
    prefix = documents(tmp_path, [5, 9, 30])
    damage(Path(f"{prefix}.pack"))
    with pytest.raises(DatasetError, match=sentence):
        TokenDataset(prefix, S, packed=True)
    with pytest.raises(DatasetError, match="set.pack"):
        verify(prefix)


def test_a_piece_that_points_out_of_the_data_is_refused(tmp_path: Path) -> None:
    prefix = documents(tmp_path, [5])
    with open(f"{prefix}.pack", "r+b") as file:
        file.seek(packing.HEADER.size)
        file.write(np.array([(3, 9)], packing.PIECE).tobytes())
    with TokenDataset(prefix, S, packed=True) as dataset, pytest.raises(DatasetError, match="damaged"):
        Loader(dataset, 1, 1, 0, 1).next()
    with pytest.raises(DatasetError, match=r"set\.pack is not what was built"):
        verify(prefix)


def test_what_was_not_packed_so_is_refused_and_a_later_build_takes_the_packing_away(tmp_path: Path) -> None:
    prefix = documents(tmp_path, [5, 9, 30], validation=0.0)
    with pytest.raises(
        DatasetError, match="is packed for sequences of 16 tokens: build it with `myriad data build --pack 8`"
    ):
        TokenDataset(prefix, 8, packed=True)
    assert PackingIndex(open_index(prefix), S).close() is None
    documents(tmp_path, [5, 9, 30], pack=None)
    assert not Path(f"{prefix}.pack").exists()
    with pytest.raises(
        DatasetError, match="is not packed: build it with `myriad data build --pack 16`, or leave"
    ):
        TokenDataset(prefix, S, packed=True)


def test_both_sides_of_a_split_are_packed(tmp_path: Path) -> None:
    prefix = documents(tmp_path, list(range(5, 60)), validation=0.3)
    for side in (prefix, Path(f"{prefix}.validation")):
        assert verify(side).packing is not None
        with TokenDataset(side, S, packed=True) as dataset:
            assert dataset.size > 0
