"""Checkpoints to Hugging Face folders and back: the same bits, the same logits, and nothing unpickled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from myriad.spec.job import ModelSpec
from myriad.storage.durable.checkpoint import load, save
from myriad.storage.durable.huggingface import export_folder, import_folder
from myriad.storage.durable.llama import weights
from myriad.storage.durable.manifest import (
    MODEL_KEY,
    Checkpoint,
    CheckpointError,
    commit_marker,
    list_checkpoints,
    read_manifest,
)
from myriad.training.model import Decoder, StageSpan

SPEC = ModelSpec(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=48, vocab_size=50, rope_theta=500.0)


def model(spec: ModelSpec = SPEC, seed: int = 3) -> Decoder:
    """With weights that are large enough for attention and position to matter."""
    torch.manual_seed(seed)
    made = Decoder(spec, StageSpan(0, spec.layers, True, True))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3)
    return made.double() if spec.dtype == "float64" else made


def state(of: Decoder) -> dict[str, torch.Tensor]:
    return {f"model.{name}": parameter.detach() for name, parameter in of.named_parameters()}


def saved(directory: Path, of: Decoder, spec: ModelSpec = SPEC, **meta: Any) -> Checkpoint:
    meta = meta or {MODEL_KEY: spec.model_dump(mode="json"), "sequence_length": 64}
    save(directory, 7, 1, state(of), None, position=9, layout={}, meta=meta)
    (checkpoint,) = list_checkpoints(directory)
    commit_marker(checkpoint.path)
    return checkpoint


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))
        for name in left
    )


def test_the_names_are_those_of_the_model() -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in model().named_parameters()}
    assert {each.ours: each.shape for each in weights(SPEC)} == shapes


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_there_and_back_is_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"dtype": dtype})
    checkpoint = saved(tmp_path / "c", model(spec), spec)
    to = "bfloat16" if dtype == "bfloat16" else None
    export_folder(checkpoint, tmp_path / "one", to)
    path = import_folder(tmp_path / "one", tmp_path / "back")
    (again,) = list_checkpoints(tmp_path / "back")
    assert again.committed and again.path == path and (again.step, again.generation) == (0, 0)
    assert read_manifest(path).meta == {MODEL_KEY: spec.model_dump(mode="json"), "sequence_length": 64}
    export_folder(again, tmp_path / "two", to)
    assert same_bits(read_folder(tmp_path / "one"), read_folder(tmp_path / "two"))
    assert (tmp_path / "one" / "config.json").read_text() == (tmp_path / "two" / "config.json").read_text()
    if dtype != "bfloat16":
        back = {name: torch.zeros_like(tensor) for name, tensor in state(model(spec)).items()}
        load(tmp_path / "back", 0, 0, back)
        assert same_bits(back, state(model(spec)))


def test_a_large_model_is_cut_into_files(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "c", model())
    total = export_folder(checkpoint, tmp_path / "one", max_file_bytes=20_000)
    export_folder(checkpoint, tmp_path / "whole")
    index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) == 4 and files[0] == "model-00001-of-00004.safetensors"
    assert index["metadata"]["total_size"] == total == sum(t.nbytes for t in state(model()).values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "one" / file)
    assert same_bits(read_folder(tmp_path / "one"), read_folder(tmp_path / "whole"))
    import_folder(tmp_path / "one", tmp_path / "back")
    assert sorted(os.listdir(tmp_path)) == ["back", "c", "one", "whole"]  # nothing half written is left


def test_tied_embeddings_become_two(tmp_path: Path) -> None:
    export_folder(saved(tmp_path / "c", model()), tmp_path / "tied")
    change_config(tie_word_embeddings=True)(tmp_path / "tied")
    tensors = load_file(tmp_path / "tied" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "tied" / "model.safetensors")
    import_folder(tmp_path / "tied", tmp_path / "back")
    back = {name: torch.zeros_like(tensor) for name, tensor in state(model()).items()}
    load(tmp_path / "back", 0, 0, back)
    assert torch.equal(back["model.head.weight"], model().embedding.weight)  # type: ignore[union-attr]


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def change_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return changed


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


NORM = "model.norm.weight"
REFUSED: list[tuple[str, Callable[[Path], Any], str]] = [
    (
        "a pickle beside",
        lambda f: (f / "pytorch_model.bin").write_bytes(b"x"),
        "bin is a pickle, which can run code",
    ),
    ("a .pt beside", lambda f: (f / "x.pt").write_bytes(b"x"), r"x\.pt is a pickle"),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "has no weights: there is no .safetensors"),
    ("cut", cut, r"model\.safetensors cannot be read .*; fetch it again"),
    ("no configuration", lambda f: (f / "config.json").unlink(), "has no config.json: name the folder"),
    ("not JSON", lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read"),
    (
        "another kind",
        change_config(model_type="gpt2"),
        "has model_type 'gpt2', and the built-in model has 'llama'",
    ),
    ("biases", change_config(attention_bias=True), "has attention_bias True"),
    (
        "scaled positions",
        change_config(rope_scaling={"rope_type": "yarn"}),
        r"scales rotary positions \('yarn'\)",
    ),
    ("wide heads", change_config(head_dim=16), "has head_dim 16, and the built-in model has"),
    ("odd heads", change_config(num_key_value_heads=3), "kv_heads"),
    ("a lost tensor", change_weights(lambda t: t.pop(NORM)), f"has no {NORM}: one of its files is missing"),
    (
        "another shape",
        change_config(intermediate_size=52),
        r"is \(48, 32\), and config.json makes it \(52, 32\)",
    ),
    (
        "one too many",
        change_weights(lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})),
        "holds model.layers.0.self_attn.q_norm.weight, which the built-in model lacks",
    ),
]


@pytest.mark.parametrize(("name", "harm", "sentence"), REFUSED, ids=[each[0] for each in REFUSED])
def test_refused_folders(name: str, harm: Callable[[Path], Any], sentence: str, tmp_path: Path) -> None:
    export_folder(saved(tmp_path / "c", model()), tmp_path / "hf")
    harm(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=sentence):
        import_folder(tmp_path / "hf", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_refused_exports(tmp_path: Path) -> None:
    anonymous = saved(tmp_path / "a", model(), other=1)
    with pytest.raises(CheckpointError, match="does not say which model it is of"):
        export_folder(anonymous, tmp_path / "hf")
    checkpoint = saved(tmp_path / "c", model())
    (tmp_path / "hf").mkdir()
    with pytest.raises(CheckpointError, match="hf: it exists already; remove it"):
        export_folder(checkpoint, tmp_path / "hf")
    file = checkpoint.path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="fails its checksum"):
        export_folder(checkpoint, tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["a", "c", "hf"]


JUDGE = """
import sys, torch, warnings
warnings.simplefilter("ignore")
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
assert type(model).__name__ == "LlamaForCausalLM"
tokens = torch.tensor([[int(word) for word in sys.argv[3].split()]])
with torch.no_grad():
    torch.save(model.eval()(tokens).logits.float(), sys.argv[2])
model.save_pretrained(sys.argv[4])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_transformers_computes_the_same_logits(kv_heads: int, tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"kv_heads": kv_heads})
    ours = model(spec)
    export_folder(saved(tmp_path / "c", ours, spec), tmp_path / "hf", max_file_bytes=20_000)
    tokens = torch.randint(0, spec.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))
    words = [
        tmp_path / "hf",
        tmp_path / "logits",
        " ".join(map(str, tokens[0].tolist())),
        tmp_path / "theirs",
    ]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", JUDGE, *map(str, words)],
        capture_output=True,
        text=True,
        env=offline,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = torch.load(tmp_path / "logits", weights_only=True)
    with torch.no_grad():
        want = ours(tokens)
        assert float(want.abs().max()) > 1.0
        torch.testing.assert_close(theirs, want, rtol=1e-5, atol=1e-5)
        ours.layers["0"].attention.rope_theta = 10000.0  # negative control: another base of the angles
        assert float((ours(tokens) - theirs).abs().max()) > 1e-3
    import_folder(tmp_path / "theirs", tmp_path / "back")  # as transformers writes it
    back = {name: torch.zeros_like(tensor) for name, tensor in state(ours).items()}
    load(tmp_path / "back", 0, 0, back)
    assert same_bits(back, state(model(spec)))
