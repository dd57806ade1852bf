"""The user's files, read: jobs and clusters from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from myriad.cli.errors import CommandError, Exit

if TYPE_CHECKING:
    from myriad.spec.cluster import ClusterSpec
    from myriad.spec.job import JobSpec


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CommandError(f"{file} does not exist; give the path of a YAML file", Exit.USAGE) from None
    except OSError as error:
        raise CommandError(
            f"{file} cannot be read ({error.strerror}); give the path of a YAML file", Exit.USAGE
        ) from None
    except UnicodeDecodeError:
        raise CommandError(f"{file} is not UTF-8 text; give a YAML file", Exit.USAGE) from None


def read_cluster(file: Path) -> ClusterSpec:
    """SpecError for what the file says wrong."""
    from myriad.spec.cluster import cluster_from_yaml

    return cluster_from_yaml(read_text(file), str(file))


def read_job(file: Path) -> JobSpec:
    """The job; its workdir is the current folder unless it names one, since the workers are started elsewhere."""
    from myriad.spec.job import job_from_yaml

    job = job_from_yaml(read_text(file), str(file))
    return job.model_copy(update={"workdir": str(Path.cwd() / (job.workdir or "."))})
