"""Durable checkpoints: bit for bit back, on another layout too, and never from damaged or hostile files."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_deaths
import pytest
import torch
from checkpoint_ranks import whole
from storage_faults import mounted_tmpfs
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from myriad.storage.durable.checkpoint import load, save
from myriad.storage.durable.manifest import (
    MARKER_NAME,
    CheckpointCorrupt,
    CheckpointError,
    checkpoint_path,
    commit_marker,
    file_sum,
    list_checkpoints,
    prune,
    read_manifest,
    write_manifest,
)

LEAK_BYTES = 40_000  # a save's growth of memory, of a state of 400 kB a rank

Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(10, 4, generator=generator),
        "scalar": torch.tensor(3.0),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "double": torch.tensor([float("nan"), float("inf"), -0.0, 1e-310], dtype=torch.float64),
        "strided": torch.randn(8, 8, generator=generator)[:, ::2],
        "empty": torch.empty(0, 3),
        "count": torch.arange(5),
        "parameter": torch.nn.Parameter(torch.randn(3, generator=generator)),
    }


def zeros() -> Tensors:
    return {name: torch.zeros_like(each) for name, each in tensors().items()}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (left, right))
    return torch.equal(left, right)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path, 5, 2, tensors(), None, position=40, layout={"tp": 1}, meta={"seed": 7})
    return checkpoint_path(tmp_path, 5, 2)


def test_every_bit_returns(saved: Path) -> None:
    back = zeros()
    addresses = {name: each.data_ptr() for name, each in back.items()}
    manifest = load(saved.parent, 5, 2, back)
    assert all(same_bits(back[name], each) for name, each in tensors().items())
    assert {name: each.data_ptr() for name, each in back.items()} == addresses  # in place
    assert (manifest.step, manifest.generation, manifest.position, manifest.world_size) == (5, 2, 40, 1)
    assert (manifest.layout, manifest.meta) == ({"tp": 1}, {"seed": 7})
    assert manifest.versions["torch"] == str(torch.__version__)
    assert sorted(each.path for each in manifest.files) == [".metadata", "__0_0.distcp"]
    assert all(file_sum(saved / each.path) == each for each in manifest.files)


def test_a_step_is_saved_once_per_generation(saved: Path) -> None:
    with pytest.raises(AssertionError, match="was saved before"):
        save(saved.parent, 5, 2, tensors(), None, position=40, layout={})
    save(saved.parent, 5, 3, tensors(), None, position=40, layout={})


def test_a_part_can_be_loaded_alone(saved: Path) -> None:
    back = {"count": torch.zeros(5, dtype=torch.int64)}
    load(saved.parent, 5, 2, back)
    assert back["count"].tolist() == [0, 1, 2, 3, 4]


PLAIN_READER = """
import sys, torch, warnings
from torch.distributed.checkpoint import load
warnings.simplefilter("ignore")  # that there is no process group
back = {"weight": torch.zeros(10, 4), "count": torch.zeros(5, dtype=torch.int64)}
load(back, checkpoint_id=sys.argv[1], no_dist=True)
assert not any(name.split(".")[0] == "myriad" for name in sys.modules)
print(back["weight"].sum().item().hex(), back["count"].tolist())
"""


def test_a_program_without_myriad_reads_it(saved: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_READER, str(saved)], capture_output=True, text=True, check=False
    )
    want = tensors()["weight"].sum().item().hex()
    assert done.stdout == f"{want} [0, 1, 2, 3, 4]\n", done.stderr


def test_plain_dcp_reads_it(saved: Path, recwarn: pytest.WarningsRecorder) -> None:
    back = zeros()
    state_dict_loader.load(back, checkpoint_id=saved, no_dist=True)
    assert all(same_bits(back[name], each) for name, each in tensors().items())


def test_one_flipped_bit_in_any_file_is_named_before_use(saved: Path) -> None:
    for name in ("__0_0.distcp", ".metadata"):
        good = (saved / name).read_bytes()
        for at in (0, len(good) // 3, len(good) // 2, len(good) - 1):
            (saved / name).write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            back = zeros()
            with pytest.raises(CheckpointCorrupt, match=f"{name} fails its checksum; use another tier"):
                load(saved.parent, 5, 2, back)
            assert all(not each.any() for each in back.values())
        (saved / name).write_bytes(good)
    load(saved.parent, 5, 2, zeros())


def test_dcp_alone_loads_a_flipped_bit(saved: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Why the checksums are there: without them the same damage passes."""
    good = (saved / "__0_0.distcp").read_bytes()
    at = good.index(tensors()["weight"].numpy().tobytes())
    (saved / "__0_0.distcp").write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    back = zeros()
    load(saved.parent, 5, 2, back, verify=False)
    assert not same_bits(back["weight"], tensors()["weight"])
    with pytest.raises(CheckpointCorrupt):
        load(saved.parent, 5, 2, zeros())


def truncate(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 1)


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


DAMAGE: list[tuple[str, Callable[[Path], None], type[Exception], str]] = [
    ("torn data", truncate("__0_0.distcp"), CheckpointCorrupt, r"__0_0\.distcp fails its checksum"),
    ("torn metadata", truncate(".metadata"), CheckpointCorrupt, r"\.metadata fails its checksum"),
    ("data missing", remove("__0_0.distcp"), CheckpointCorrupt, r"__0_0\.distcp is missing"),
    ("metadata missing", remove(".metadata"), CheckpointCorrupt, r"\.metadata is missing"),
    ("no manifest", remove("manifest.json"), CheckpointError, "there is no finished checkpoint at"),
    ("torn manifest", truncate("manifest.json"), CheckpointCorrupt, r"manifest\.json is no manifest"),
]


@pytest.mark.parametrize(("name", "damage", "kind", "sentence"), DAMAGE, ids=[each[0] for each in DAMAGE])
def test_damage(
    saved: Path, name: str, damage: Callable[[Path], None], kind: type[Exception], sentence: str
) -> None:
    damage(saved)
    with pytest.raises(kind, match=sentence):
        load(saved.parent, 5, 2, zeros())


WRONG: list[tuple[str, Tensors, str]] = [
    ("missing name", {"other": torch.zeros(1)}, "the checkpoint has no other: it belongs to another model"),
    ("shape", {"weight": torch.zeros(4, 10)}, r"weight is \(4, 10\) torch.float32 here and \(10, 4\)"),
    (
        "dtype",
        {"weight": torch.zeros(10, 4).bfloat16()},
        "weight is .* torch.bfloat16 here and .* torch.float32",
    ),
]


@pytest.mark.parametrize(("name", "wanted", "sentence"), WRONG, ids=[each[0] for each in WRONG])
def test_another_model_is_refused(saved: Path, name: str, wanted: Tensors, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        load(saved.parent, 5, 2, wanted)


def test_a_missing_checkpoint_and_a_renamed_one(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no finished checkpoint at .*step-6.gen-2"):
        load(saved.parent, 6, 2, zeros())
    saved.rename(checkpoint_path(saved.parent, 7, 2))
    with pytest.raises(CheckpointCorrupt, match="holds step 5 of generation 2"):
        load(saved.parent, 7, 2, zeros())


class Hostile:
    """Pickles into a call, as an attacker's file would."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


def accept_changes(path: Path) -> None:
    """Give the manifest the checksums of the files as they are: an attacker can do that too."""
    import msgspec

    manifest = read_manifest(path)
    files = tuple(file_sum(path / each.path) for each in manifest.files)
    write_manifest(path, msgspec.structs.replace(manifest, files=files))


@pytest.mark.parametrize("verify", [True, False])
def test_a_hostile_metadata_file_is_never_executed(saved: Path, tmp_path: Path, verify: bool) -> None:
    with (saved / ".metadata").open("rb") as file:
        good: Metadata = pickle.load(file)
    good.planner_data = Hostile(tmp_path / "owned")
    stories: list[tuple[Any, str]] = [
        (good, r"posix\.mkdir is not allowed here"),
        (Hostile(tmp_path / "owned"), "is not allowed here"),
        (getattr, "is not allowed here"),
        (torch.serialization.load, "is not allowed here"),
        ({"a": 1}, "is no DCP metadata"),
    ]
    for content, sentence in stories:
        (saved / ".metadata").write_bytes(pickle.dumps(content))
        accept_changes(saved)
        with pytest.raises(CheckpointCorrupt, match=sentence):
            load(saved.parent, 5, 2, zeros(), verify=verify)
    (saved / ".metadata").write_bytes(b"\x80\x04garbage")
    accept_changes(saved)
    with pytest.raises(CheckpointCorrupt, match="is no DCP metadata"):
        load(saved.parent, 5, 2, zeros(), verify=verify)
    assert not (tmp_path / "owned").exists()


def test_pickled_objects_in_data_are_never_loaded(
    tmp_path: Path, saved: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path = checkpoint_path(tmp_path, 9, 1)
    state_dict_saver.save({"weight": Hostile(tmp_path / "owned")}, checkpoint_id=path, no_dist=True)
    with (path / ".metadata").open("rb") as file:
        assert isinstance(pickle.load(file).state_dict_metadata["weight"], BytesStorageMetadata)
    import msgspec

    write_manifest(path, msgspec.structs.replace(read_manifest(saved), step=9, generation=1))
    accept_changes(path)
    with pytest.raises(CheckpointCorrupt, match="weight is a pickled object, which is never loaded"):
        load(tmp_path, 9, 1, {"weight": torch.zeros(1)})
    assert not (tmp_path / "owned").exists()


def test_a_pickled_object_in_a_tensors_place_is_never_loaded(saved: Path, tmp_path: Path) -> None:
    with (saved / ".metadata").open("rb") as file:
        metadata: Metadata = pickle.load(file)
    index = next(each for each in metadata.storage_data if each.fqn == "count")
    buffer = io.BytesIO()
    torch.save(Hostile(tmp_path / "owned"), buffer)
    stored = metadata.storage_data[index]
    stored.offset, stored.length = (saved / "__0_0.distcp").stat().st_size, len(buffer.getvalue())
    with (saved / "__0_0.distcp").open("ab") as file:
        file.write(buffer.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    accept_changes(saved)
    with pytest.raises(CheckpointError, match="could not read a checkpoint"):
        load(saved.parent, 5, 2, {"count": torch.zeros(5, dtype=torch.int64)})
    assert not (tmp_path / "owned").exists()


# Where a save finds the storage full: by the number of files it has room for, or of bytes.
FULL: list[tuple[str, str, list[str]]] = [
    ("at the folder", "nr_inodes=1", []),
    ("at the shard", "nr_inodes=2", []),
    ("in the middle of the shard", "size=500k", []),
    ("at the metadata", "nr_inodes=3", []),
    ("at the manifest", "nr_inodes=4", []),
    ("at the marker", "nr_inodes=5", ["step-1.gen-1 not committed"]),
]


@pytest.mark.parametrize(("place", "options", "left"), FULL, ids=[each[0] for each in FULL])
def test_full_storage(place: str, options: str, left: list[str], tmp_path: Path) -> None:
    """A sentence, nothing committed and nothing in the way; with room again the next save succeeds."""
    big = {"x": torch.ones(200_000)}
    with mounted_tmpfs(tmp_path / "disk", options) as disk:
        with pytest.raises(CheckpointError, match=f"the checkpoint directory {disk}.* is full: free space"):
            save_and_commit(disk, 1, 1, big)
        assert states(disk) == left
        room = {"nr_inodes=": "nr_inodes=20", "size=500k": "size=5m"}[options.rstrip("12345")]
        subprocess.run(["mount", "-o", f"remount,{room}", str(disk)], check=True)
        save_and_commit(disk, 1, 2, big)
        assert states(disk) == ["step-1.gen-2 committed", *left]
        load(disk, 1, 2, {"x": torch.zeros(200_000)})


def test_a_save_needs_five_files_and_folders(tmp_path: Path) -> None:
    """Negative control of the rows above: with one more than they have, nothing fails."""
    with mounted_tmpfs(tmp_path / "disk", "nr_inodes=6") as disk:
        save_and_commit(disk, 1, 1, {"x": torch.ones(200_000)})
        assert states(disk) == ["step-1.gen-1 committed"]


def test_read_only_storage_and_no_directory(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "ro") as disk:
        with pytest.raises(CheckpointError, match=f"the checkpoint directory {disk} is read-only: mount it"):
            save(disk, 1, 1, {"x": torch.ones(2)}, None, position=0, layout={})
        assert list_checkpoints(disk) == ()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be used to write"):
        save(tmp_path / "file", 1, 1, {"x": torch.ones(2)}, None, position=0, layout={})


def save_and_commit(directory: Path, step: int, generation: int, what: Tensors) -> None:
    save(directory, step, generation, what, None, position=step, layout={})
    commit_marker(checkpoint_path(directory, step, generation))


def states(directory: Path) -> list[str]:
    """Newest first."""
    found = list_checkpoints(directory)
    return [f"{each.path.name} {'committed' if each.committed else 'not committed'}" for each in found]


def test_a_save_killed_at_any_call_leaves_the_one_before(tmp_path: Path) -> None:
    program = Path(__file__).with_name("checkpoint_deaths.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    deaths = [json.loads(line) for line in done.stdout.splitlines()]
    phases = {each["before"] for each in deaths}
    for name in ("__0_0.distcp", ".metadata.tmp", ".manifest.json.tmp", ".COMMITTED.tmp"):
        assert {f"open {name}", f"fsync {name}"} <= phases, phases
    assert {"os.mkdir step-2.gen-1", "write __0_0.distcp", ""} <= phases
    assert len([each for each in phases if each.startswith("os.rename")]) == 3, "metadata, manifest, marker"
    for each in deaths:
        assert_the_one_before_is_whole(tmp_path / each["folder"], survived=not each["before"])


def assert_the_one_before_is_whole(directory: Path, survived: bool) -> None:
    """What a job finds that starts again; whatever the death left is refused, or whole, and goes in time."""
    load(directory, 1, 1, back := deaths_zeros())
    assert all(same_bits(back[name], each) for name, each in checkpoint_deaths.tensors(1).items())
    newest = next(each for each in list_checkpoints(directory) if each.committed)
    marked = (checkpoint_path(directory, 2, 1) / MARKER_NAME).exists()
    assert (newest.step == 2) == marked and marked >= survived
    back = deaths_zeros()
    try:
        load(directory, 2, 1, back)
    except CheckpointError as error:
        assert "there is no finished checkpoint" in str(error) and not marked
    else:
        assert all(same_bits(back[name], each) for name, each in checkpoint_deaths.tensors(2).items())
    save_and_commit(directory, 2, 2, checkpoint_deaths.tensors(2))
    prune(directory, 1)
    assert os.listdir(directory) == ["step-2.gen-2"]


def deaths_zeros() -> Tensors:
    return {name: torch.zeros_like(each) for name, each in checkpoint_deaths.tensors(1).items()}


def run_ranks(rendezvous: Path, **directories: Path) -> dict[str, list[dict[str, Any]]]:
    """Story -> what its two ranks reported, in rank order."""
    program = Path(__file__).with_name("checkpoint_ranks.py")
    stories = [f"{story}={directory}" for story, directory in directories.items()]
    done = subprocess.run(
        [sys.executable, str(program), str(rendezvous), *stories],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, list[dict[str, Any]]] = {story: [] for story in directories}
    for each in sorted(map(json.loads, done.stdout.splitlines()), key=lambda each: int(each["rank"])):
        results[each.pop("story")].append(each)
    return results


def test_two_ranks_save_together_and_a_newcomer_loads_alone(tmp_path: Path) -> None:
    results = run_ranks(tmp_path / "r", save_and_load=tmp_path / "c", subgroup=tmp_path / "g")
    assert results["save_and_load"] == [
        {"rank": 0, "files": ["__0_0.distcp", ".metadata"], "equal": True, "position": 40},
        {"rank": 1, "files": ["__1_0.distcp"], "equal": True, "position": 40},
    ]
    assert results["subgroup"] == [
        {"rank": 0, "files": []},
        {"rank": 1, "files": ["__0_0.distcp", ".metadata"]},
    ]
    back = {
        "sharded": torch.zeros(7, 3),
        "step": torch.tensor(0.0),
        "stage0.bias": torch.zeros(2).bfloat16(),
        "stage1.bias": torch.zeros(2).bfloat16(),
    }
    manifest = load(tmp_path / "c", 5, 2, back)  # two shards into one whole tensor
    assert torch.equal(back["sharded"], whole("sharded")) and back["step"].item() == 3.0
    assert all(torch.equal(back[f"stage{i}.bias"], whole(f"stage{i}", (2,)).bfloat16()) for i in (0, 1))
    assert manifest.world_size == 2 and len(manifest.files) == 3
    file = tmp_path / "c" / "step-5.gen-2" / "__1_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointCorrupt, match=r"__1_0\.distcp fails its checksum"):
        load(tmp_path / "c", 5, 2, back)
    load(tmp_path / "c", 5, 2, {"stage0.bias": back["stage0.bias"]})  # needs only the other file


def test_each_byte_is_read_once_per_job(tmp_path: Path) -> None:
    """What the two ranks read, over the size of the files."""
    results = run_ranks(tmp_path / "r", reads=tmp_path / "c", refused_together=tmp_path / "d")
    job = {
        name: sum(each[name] for each in results["reads"]) for name in results["reads"][0] if name != "rank"
    }
    assert job["own part"] == pytest.approx(1.0, abs=0.03), "checksum and use take one reading"
    assert job["all"] == pytest.approx(2.0, abs=0.03), "each alone"
    for name in ("own part, together", "all, together"):
        assert job[name] == pytest.approx(1.0, abs=0.03), "one reads, and passes it on"
    for each in results["refused_together"]:
        assert "__0_0.distcp fails its checksum" in each["error"]


def test_all_ranks_hear_that_the_storage_is_full(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=2500k") as disk:  # room for one rank's part
        results = run_ranks(tmp_path / "r", refused=disk)["refused"]
        assert [each["rank"] for each in results] == [0, 1]
        assert all(f"the checkpoint directory {disk} is full" in each["error"] for each in results)
        assert os.listdir(disk) == []


@pytest.mark.slow
def test_two_hundred_saves_leak_nothing(tmp_path: Path) -> None:
    results = run_ranks(tmp_path / "r", repeated=tmp_path / "c", leaking=tmp_path / "l")
    for each in results["repeated"]:
        assert each["saves"] == 200 and each["files"] == each["threads"] == 0
        assert each["memory_bytes_per_save"] < LEAK_BYTES, "a kept state would be ten times as much"
    for each in results["leaking"]:  # negative control: one descriptor, thread and state kept a save
        assert each["files"] >= each["saves"] / 2 and each["threads"] >= each["saves"] / 2
        assert each["memory_bytes_per_save"] > LEAK_BYTES
