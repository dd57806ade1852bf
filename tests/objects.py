"""S3 servers of a test: ``moto`` for what a server says (rights, conditions), ``rclone serve s3`` for volume.

    from objects import Server, moto, moto_server, s3

``s3`` is an rclone server on a folder of the test, one at a time (start 0.2 s); its bucket "bucket" is the folder
``s3.folder``, so a test can damage an object by writing its file. ``moto`` is in memory and starts once a
module, in 1 s. Both set the
AWS_ variables of this process, so that programs started by the test inherit them, and are gone at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

BUCKET = "bucket"
ACCESS_KEY, SECRET_KEY = "TESTACCESSKEY", "TESTSECRETKEY"
START_DEADLINE_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """An S3 server that a test can take away and bring back at the same address."""

    program: Sequence[str]
    port: int
    root: Path  # rclone: the buckets are its folders
    process: subprocess.Popen[bytes] | None = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        return self.root / BUCKET

    def start(self) -> None:
        with open(self.root.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(
                self.program, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **self.env}
            )
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def stop(self) -> None:
        """As a server that is gone: connections are refused."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_DEADLINE_S)
            self.process = None

    def log(self) -> str:
        return self.root.with_suffix(".log").read_text()[-2000:]


def environment(server: Server, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> dict[str, str]:
    """What a program needs to know of ``server``."""
    return {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_REGION": "us-east-1",
    }


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    return str(beside if beside.exists() else Path(sysconfig.get_path("scripts")) / name)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """``rclone serve s3`` on a folder, with the bucket; the environment names it."""
    root, port = tmp_path / "s3", free_port()
    (root / BUCKET).mkdir(parents=True)
    flags = (
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{ACCESS_KEY},{SECRET_KEY}",
        "--dir-cache-time",
        "0s",
    )
    server = Server((_program("rclone"), "serve", "s3", *flags, str(root)), port, root)
    server.env = {"RCLONE_CONFIG": os.devnull}
    _set_environment(server, monkeypatch)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """moto's server, for all tests of a module."""
    port = free_port()
    program = (_program("moto_server"), "-H", "127.0.0.1", "-p", str(port))
    server = Server(program, port, tmp_path_factory.mktemp("moto") / "none")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def moto(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """moto's server with an empty bucket; the environment names it. It grants everything until told otherwise."""
    _set_environment(moto_server, monkeypatch)
    _tell_moto(moto_server, "reset-auth", b"inf")
    _tell_moto(moto_server, "reset", b"")
    create_bucket(moto_server, BUCKET)
    return moto_server


def _tell_moto(server: Server, what: str, content: bytes) -> None:
    kind = {"Content-Type": "text/plain"}
    request = urllib.request.Request(f"{server.endpoint}/moto-api/{what}", content, kind, method="POST")
    with urllib.request.urlopen(request, timeout=START_DEADLINE_S):
        pass


def _set_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)


def create_bucket(server: Server, name: str) -> None:
    import boto3  # comes with moto

    keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1", **keys)
    try:
        client.create_bucket(Bucket=name)
    finally:
        client.close()


def restricted(server: Server, allowed: Sequence[str]) -> dict[str, str]:
    """From now on moto asks for rights; the environment of a user who has only the ``allowed`` actions of S3."""
    import boto3

    keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    iam = boto3.client("iam", endpoint_url=server.endpoint, region_name="us-east-1", **keys)
    try:
        iam.create_user(UserName="user")
        granted = {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": list(allowed), "Resource": "*"}],
        }
        iam.put_user_policy(UserName="user", PolicyName="rights", PolicyDocument=json.dumps(granted))
        key = iam.create_access_key(UserName="user")["AccessKey"]
    finally:
        iam.close()
    _tell_moto(server, "reset-auth", b"0")
    return environment(server, key["AccessKeyId"], key["SecretAccessKey"])
