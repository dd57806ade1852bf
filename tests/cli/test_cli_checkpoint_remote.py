"""``myriad checkpoint`` on object storage: the same words and exit codes as on a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from myriad.cli.main import main
from myriad.spec.job import ModelSpec
from myriad.storage.durable.checkpoint import save
from myriad.storage.durable.llama import weights
from myriad.storage.durable.manifest import MODEL_KEY, checkpoint_path, commit_marker
from myriad.storage.durable.remote import Remote
from myriad.storage.objects import open_store
from objects import BUCKET, Server, moto, moto_server, restricted

__all__ = ["moto", "moto_server"]

URL = f"s3://{BUCKET}/run"
Output = pytest.CaptureFixture[str]


def copied(directory: Path, step: int) -> None:
    spec = ModelSpec(layers=1, dim=8, heads=2, kv_heads=1, ffn_dim=8, vocab_size=9)
    tensors = {f"model.{each.ours}": torch.full(each.shape, float(step)) for each in weights(spec)}
    meta = {MODEL_KEY: spec.model_dump(mode="json")}
    save(directory, step, 1, tensors, None, position=8 * step, layout={}, meta=meta)
    commit_marker(path := checkpoint_path(directory, step, 1))
    Remote(URL).copy_up(path)


def test_ls_verify_prune_export_import(moto: Server, tmp_path: Path, capsys: Output) -> None:
    for step in (10, 20, 30):
        copied(tmp_path / "c", step)
    store = open_store(URL)
    store.delete(["step-20.gen-1/COMMITTED"])
    assert main(["checkpoint", "ls", URL, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["path"], row["committed"]) for row in rows] == [
        (f"{URL}/step-30.gen-1", True),
        (f"{URL}/step-20.gen-1", False),
        (f"{URL}/step-10.gen-1", True),
    ]
    assert main(["checkpoint", "verify", URL]) == 0 and "as written" in capsys.readouterr().out
    store.write("step-10.gen-1/__0_0.distcp", b"not what was written")
    assert main(["checkpoint", "verify", URL]) == 1
    assert "step-10.gen-1 (committed): __0_0.distcp has 20 of " in capsys.readouterr().out
    assert main(["checkpoint", "prune", URL, "--keep", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(", 2 checkpoints")
    assert {name.partition("/")[0] for name in store.sizes()} == {"step-30.gen-1"}
    assert main(["checkpoint", "export", URL, str(tmp_path / "hf")]) == 0
    assert main(["checkpoint", "import", str(tmp_path / "hf"), f"{URL}/other"]) == 0
    assert f"{URL}/other/step-0.gen-0: the model of" in capsys.readouterr().out
    assert main(["checkpoint", "verify", f"{URL}/other"]) == 0
    assert capsys.readouterr().out == "step-0.gen-0 (committed): as written\n"


def test_refusals(moto: Server, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    assert main(["checkpoint", "ls", URL]) == 3
    assert f"{URL} has no checkpoints" in capsys.readouterr().err
    assert main(["checkpoint", "ls", "s3://key:word@bucket/run"]) == 1
    assert "never in the URL" in (said := capsys.readouterr().err) and "word@" not in said
    assert main(["checkpoint", "verify", "s3://nowhere/run"]) == 1
    assert "there is no bucket nowhere" in capsys.readouterr().err
    for name, value in restricted(moto, ["s3:GetObject"]).items():
        monkeypatch.setenv(name, value)
    assert main(["checkpoint", "ls", URL]) == 1
    assert "does not let these credentials list" in capsys.readouterr().err
