"""What a user submits: a job that is either any command, or a model with layout, data and optimizer.

All that can be judged from the job alone is judged here, with the sentence that says which number to change;
what needs the cluster as well is in :mod:`myriad.spec.admission`. A ``JobSpec`` survives
``model_dump(mode="json")`` and back unchanged, which is how it travels to agents and into the journal.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from myriad.spec.cluster import NodeType
from myriad.spec.errors import SpecError, one_of, quoted
from myriad.spec.fields import (
    AUTO,
    Count,
    CountOrAuto,
    CountOrZero,
    CountOrZeroOrAuto,
    NotNegative,
    Positive,
    Spec,
    Text,
    as_text,
    no_nul,
    spec_from_yaml,
)
from myriad.spec.units import Bytes, Seconds

MAX_NODES = 1_000_000  # nodes of one job: a slip of the hand must not make the scheduler count to 10^18
# Schemes of storage.objects; no user, query or fragment, where credentials could hide.
_REMOTE = re.compile(r"((s3|gs|az)://[^/@?#\s]+|file://)(/[^@?#\s]*)?")
MAX_NAME = 200  # characters: a name is a label in tables
MIN_CACHE_BYTES = 64 << 20  # a few blocks of 8 MiB
REMOTE_SCHEMES = ("s3", "gs", "az", "file")  # what myriad.storage.objects opens
MAX_PREFETCH = 64  # batches: more than any delay that is worth waiting for, and they are held in memory
PREFETCH_REMOTE = 4  # batches: one in use, and requests for three on their way

# What the agent sets for every worker; a job that set them too would silently lose.
RESERVED_ENV = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
    }
)

# Characters that would break a table's line or turn its direction; all else that prints is welcome in a name.
_UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def _check_name(name: str) -> str:
    if not name.strip() or len(name) > MAX_NAME:
        raise SpecError(f"{quoted(name)} has {len(name)} characters; give 1 to {MAX_NAME}, not all blank")
    bad = next((c for c in name if unicodedata.category(c) in _UNPRINTABLE or c in _TURNING), None)
    if bad is not None:
        raise SpecError(f"{quoted(name)} holds the control character U+{ord(bad):04X}; remove it")
    return name


def _check_env_key(key: str) -> str:
    if not key or "=" in key or "\0" in key:
        raise SpecError(f'{quoted(key)} cannot name an environment variable; use a name without "=" and NUL')
    if key in RESERVED_ENV or key.startswith("MYRIAD_"):
        raise SpecError(f"{quoted(key)} is set by Myriad for every worker; remove it or use another name")
    return key


def _read_command(value: Any) -> Any:
    """A YAML string is a shell command; a list is executed as given."""
    if value is None or isinstance(value, list):
        return value
    text = as_text(value)
    if not text.strip():
        raise SpecError("the command is empty; write what to run, for example: python train.py")
    return ["/bin/sh", "-c", text]


def _check_command(command: list[str] | None) -> list[str] | None:
    if command is not None and not (command and command[0]):
        raise SpecError("the command names no program; write what to run, for example: [python, train.py]")
    return command


def _check_path(path: str) -> str:
    if not path.strip():
        raise SpecError("the path is empty; write the path of a file or folder")
    return no_nul(path)


JobName = Annotated[Text, AfterValidator(_check_name)]
EnvKey = Annotated[str, AfterValidator(_check_env_key)]
EnvValue = Annotated[Text, AfterValidator(no_nul)]
Command = Annotated[
    list[Annotated[Text, AfterValidator(no_nul)]] | None,
    BeforeValidator(_read_command, json_schema_input_type=str | list[str] | None),
    AfterValidator(_check_command),
]
Path = Annotated[Text, AfterValidator(_check_path)]
Prefetch = Annotated[CountOrZero, Field(le=MAX_PREFETCH)]


class ModelSpec(Spec):
    """A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, untied output."""

    layers: Count
    dim: Count
    heads: Count
    kv_heads: Count
    ffn_dim: Count
    vocab_size: Count
    rope_theta: Positive = 10000.0
    norm_eps: Positive = 1e-5
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        _must_divide("dim", self.dim, "heads", self.heads)
        _must_divide("heads", self.heads, "kv_heads", self.kv_heads)
        if self.head_dim % 2:
            raise SpecError(
                f"dim {self.dim} over heads {self.heads} makes {self.head_dim} numbers a head, but rotary "
                f"positions need an even number; change dim or heads"
            )
        return self


class LayoutSpec(Spec):
    """The parallel degrees. world = pp x dp_replicate x dp_shard x tp, slowest axis first.

    ``microbatches`` is per optimizer step and data-parallel rank: what fills a pipeline, and gradient
    accumulation.
    """

    pp: Count = 1
    dp_replicate: Count = 1
    dp_shard: Count = 1
    tp: Count = 1
    microbatches: Count = 1
    schedule: Literal["1f1b", "gpipe"] = "1f1b"

    @property
    def world(self) -> int:
        """Ranks."""
        return self.pp * self.dp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @model_validator(mode="after")
    def _check(self) -> LayoutSpec:
        if self.pp > 1 and self.microbatches < self.pp:
            raise SpecError(
                f"pp {self.pp} needs at least {self.pp} microbatches to fill the pipeline, not "
                f"{self.microbatches}; set microbatches to a multiple of {self.pp}"
            )
        return self

    def __str__(self) -> str:
        degrees = ("pp", "dp_replicate", "dp_shard", "tp")
        named = [f"{name} {getattr(self, name)}" for name in degrees if getattr(self, name) > 1]
        return " x ".join(named) or "one rank"


class SourceSpec(Spec):
    """One token dataset of a mixture, and its weight beside the others'."""

    path: Path
    weight: Positive = 1.0


class CacheSpec(Spec):
    """A folder on each node's own disk for blocks of remote datasets, and how many bytes of them it may hold."""

    directory: Path
    size: Annotated[Bytes, Field(ge=MIN_CACHE_BYTES)]


class DataSpec(Spec):
    """A token dataset (``path`` or URL without .bin/.idx) or a mixture of several, and how much a step consumes.

    ``packing: documents`` reads whole documents packed by ``data build --pack``; attention stays within each."""

    path: Path | None = None
    sources: list[SourceSpec] = Field(default_factory=list)
    sequence_length: Count  # tokens
    global_batch: Count  # sequences per optimizer step
    on_end: Literal["repeat", "refuse"] = "repeat"
    packing: Literal["none", "documents"] = "none"  # documents: whole ones, by data build --pack
    prefetch: Prefetch | None = None  # batches each rank has read ahead; left out: 4 from a URL, else 0
    cache: CacheSpec | None = None

    @property
    def parts(self) -> list[SourceSpec]:
        """Every dataset; one path alone is a mixture of one."""
        return self.sources if self.path is None else [SourceSpec(path=self.path)]

    @property
    def batches_ahead(self) -> int:
        """How many batches a process of each rank's own reads ahead; by default none from a file system."""
        if self.prefetch is not None:
            return self.prefetch
        return PREFETCH_REMOTE if self.remote else 0

    @property
    def remote(self) -> bool:
        """Whether any dataset is behind a URL."""
        return any("://" in part.path for part in self.parts)

    @model_validator(mode="after")
    def _check(self) -> DataSpec:
        if (self.path is None) == (not self.sources):
            found = "neither path nor sources" if self.path is None else "both path and sources"
            raise SpecError(f"data has {found}; give the path of one dataset, or sources with a weight each")
        paths = [source.path for source in self.sources]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise SpecError(f"data.sources names {twice} twice; name it once, with the weights added up")
        for path in (part.path for part in self.parts if "://" in part.path):
            if path.partition("://")[0] not in REMOTE_SCHEMES:
                raise SpecError(
                    f"{quoted(path)} has a scheme that is not known; give a path, or a URL that begins with "
                    f"{one_of(f'{scheme}://' for scheme in REMOTE_SCHEMES)}"
                )
            if not _REMOTE.fullmatch(path):  # it is not repeated: it may hold a secret
                raise SpecError(
                    "a data set's URL must be s3://BUCKET/PREFIX; credentials and the endpoint belong into the "
                    "environment of `myriad up` (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
                )
        if self.packing != "none" and (self.remote or self.batches_ahead):
            raise SpecError(
                "data.packing is read from file systems and in the step only: give paths instead of URLs, and leave "
                "data.prefetch out"
            )
        if self.cache is not None and not self.remote:
            raise SpecError(
                "data.cache keeps what is read from object storage, and no dataset of this job is behind a URL; "
                "remove it"
            )
        return self


class OptimizerSpec(Spec):
    """AdamW with linear warmup, then a cosine from learning_rate to min_learning_rate at the last step."""

    steps: Count
    learning_rate: Positive
    min_learning_rate: NotNegative = 0.0
    warmup_steps: CountOrZero = 0
    weight_decay: NotNegative = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Positive = 1e-8
    clip_norm: Positive | None = 1.0

    @model_validator(mode="after")
    def _check(self) -> OptimizerSpec:
        if self.warmup_steps > self.steps:
            raise SpecError(
                f"warmup_steps {self.warmup_steps} is more than steps {self.steps}; lower warmup_steps"
            )
        if self.min_learning_rate > self.learning_rate:
            raise SpecError(
                f"min_learning_rate {self.min_learning_rate} is more than learning_rate "
                f"{self.learning_rate}; lower it"
            )
        return self


class CheckpointSpec(Spec):
    """Steps between durable checkpoints, memory snapshots, and those that are copied to another node's memory
    (``peer_every_steps`` 0: none). ``auto``: from what a save costs and how often things fail, and it moves with
    them. ``directory`` None: in the job's folder. ``remote``: where in object storage committed checkpoints are copied to
    behind training, ``s3://bucket/prefix`` of this job alone; None: no copies."""

    directory: Path | None = None
    remote: Text | None = None
    every_steps: CountOrAuto = AUTO
    snapshot_every_steps: CountOrAuto = AUTO
    peer_every_steps: CountOrZeroOrAuto = AUTO
    keep: Count = 2

    @model_validator(mode="after")
    def _check(self) -> CheckpointSpec:
        if self.remote is not None and not _REMOTE.fullmatch(self.remote):
            raise SpecError(
                "remote must be s3://BUCKET/PREFIX; credentials and the endpoint belong into the "
                "environment of `myriad up` (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
            )
        return self


class JobSpec(Spec):
    """One job: ``command`` or ``model`` on ``nodes`` whole nodes, with ``spares`` more held for failures."""

    name: JobName
    nodes: Annotated[Count, Field(le=MAX_NODES)]
    spares: Annotated[CountOrZero, Field(le=MAX_NODES)] = 0
    node_type: Text | None = None
    workers_per_node: Count | None = None  # None: one for each accelerator of the node type
    time_limit: Annotated[Seconds, Field(gt=0)] | None = None
    env: dict[EnvKey, EnvValue] = Field(default_factory=dict)
    workdir: Path | None = None  # where workers start and relative paths begin; submit fills in its own
    command: Command = None
    model: ModelSpec | None = None
    layout: LayoutSpec = LayoutSpec()
    data: DataSpec | None = None
    optimizer: OptimizerSpec | None = None
    checkpoint: CheckpointSpec = CheckpointSpec()
    seed: CountOrZero = 0

    @property
    def uses_torch(self) -> bool:
        """Whether the workers are forked from the template instead of executed as a command."""
        return self.model is not None

    def workers_per_node_on(self, node_type: NodeType) -> int:
        """Workers on each node of that type."""
        return self.workers_per_node or node_type.accelerators

    @model_validator(mode="after")
    def _check(self) -> JobSpec:
        if self.model is None:
            self._check_command_job()
        elif self.command is not None:
            raise SpecError("the job has both a command and a model; keep one of them")
        else:
            self._check_model_job(self.model)
        return self

    def _check_command_job(self) -> None:
        if self.command is None:
            raise SpecError("the job has neither a command nor a model; add one of them")
        unread = [name for name in ("data", "optimizer") if getattr(self, name) is not None]
        unread += ["layout"] if self.layout != LayoutSpec() else []
        if unread:
            raise SpecError(
                f"{unread[0]} is only read for a job with a model, and this one has a command; remove it"
            )

    def _check_model_job(self, model: ModelSpec) -> None:
        if self.data is None or self.optimizer is None:
            missing = "data" if self.data is None else "optimizer"
            raise SpecError(f'the job has a model but no {missing}; add the key "{missing}"')
        layout = self.layout
        for name in ("heads", "kv_heads", "ffn_dim", "vocab_size"):
            _must_divide(f"model.{name}", getattr(model, name), "layout.tp", layout.tp)
        _must_divide("data.sequence_length", self.data.sequence_length, "layout.tp", layout.tp)
        if model.layers < layout.pp:
            raise SpecError(
                f"model.layers {model.layers} is less than layout.pp {layout.pp}; lower layout.pp"
            )
        _must_divide("model.layers", model.layers, "layout.pp", layout.pp)
        share = layout.dp * layout.microbatches
        if self.data.global_batch % share:
            raise SpecError(
                f"data.global_batch {self.data.global_batch} does not divide by {share} (dp_replicate "
                f"{layout.dp_replicate} x dp_shard {layout.dp_shard} x microbatches {layout.microbatches}); "
                f"set it to a multiple of {share}"
            )


def job_from_yaml(text: str, source: str) -> JobSpec:
    """Read a job; ``source`` is the file's name as the user knows it. SpecError with one sentence."""
    return spec_from_yaml(JobSpec, text, source)


def _must_divide(what: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        fitting = ", ".join(str(d) for d in _divisors_near(value, divisor))
        raise SpecError(
            f"{what} {value} does not divide by {by} {divisor}; change one of them (to {by} {fitting}?)"
        )


def _divisors_near(value: int, divisor: int) -> Iterator[int]:
    """The divisors of ``value`` next below and above ``divisor``; one is always found, since 1 divides
    all."""
    yield next(d for d in range(min(divisor, value), 0, -1) if value % d == 0)
    above = next((d for d in range(divisor + 1, min(value, 8 * divisor) + 1) if value % d == 0), None)
    if above is not None:
        yield above
